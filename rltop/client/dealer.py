"""What every DEALER of ours shares, without asyncio: is anybody there at all, and the socket's options."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import zmq

from rltop.client.transport import ConnectionLost
from rltop.protocol.codec import MAX_MESSAGE_BYTES

HANDSHAKE_S = 5.0
"""A listening socket whose daemon does not answer ZeroMQ's greeting for so long is not a living daemon."""
GONE = "the daemon closed the connection"


def check_socket(address: str) -> None:
    """Raise ConnectionLost with the reason when nobody can be behind this `ipc://` address.

    ZeroMQ itself connects to a missing socket, a stale one or one that it may not open without a word, for ever.
    """
    if not address.startswith("ipc://"):
        return
    path = Path(address.removeprefix("ipc://"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(HANDSHAKE_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            raise ConnectionLost(f"the daemon is not running: no socket {path}") from None
        except ConnectionRefusedError:
            raise ConnectionLost(f"the daemon is not running: {path} is left over from a dead one") from None
        except PermissionError:
            raise ConnectionLost(f"permission denied on {path}: it belongs to {_owner(path)}", final=True) from None
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return  # its backlog is full: there is a daemon, and it is busy
            raise ConnectionLost(f"can not open {path}: {error.strerror or error}") from error


def _owner(path: Path) -> str:
    try:
        return f"uid {path.stat().st_uid}, you are uid {os.getuid()}"
    except OSError:
        return "somebody else"


def configure_dealer(dealer: zmq.Socket[Any]) -> None:
    """Options of every DEALER of ours: never linger, bounded messages, no silent reconnects.

    A reconnect would land on a daemon that does not know us; we want to see the end and say hello again.
    """
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
