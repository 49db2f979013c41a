"""TCP ports: take one now, keep one for a slow starter, or say who has it."""

from __future__ import annotations

import errno
import socket

import psutil

from rltop.errors import RltopError

RESERVED = range(20000, 32700, 700)
"""Ports for SGLang servers of one machine, below the numbers that systems give to connections. 700 apart, because a
server may use ports above its own (data parallelism: from 233 above on)."""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host:port` (0: a free port), not listening. Raises `RltopError` naming the port's holder.

    Bound before a slow start, so that a taken port is known at once and nobody else can take this one meanwhile; not
    listening, so that clients are refused until the server is ready.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RltopError(
                f"port {port} is in use",
                where=f"{host}:{port}",
                why=holder(port) or "another process holds it; it belongs to another user or is unknown",
                do="stop that process, or give another port (0 takes a free one)",
            ) from error
        raise RltopError("cannot bind the address", where=f"{host}:{port}", why=str(error)) from error
    return listener


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port for a server that will bind the same port in minutes, with SO_REUSEADDR.

    As long as it is open and does not listen, nobody who asks for an unused port gets this one: not the next call
    here, of whichever process, and no connection of the system. The server is let in.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*RESERVED, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))  # without SO_REUSEADDR: a port that is reserved or still cooling is passed over
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise RltopError("cannot bind the address", where=f"{host}:{port}", why=str(error)) from error
            continue
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return listener
    raise RltopError("no free port", where=host, why="the system has none left")


def holder(port: int) -> str:
    """ "held by pid 123 (python -m …)" for the process that listens on a local TCP port; empty if it cannot be seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "unknown command"
            return f"held by pid {connection.pid} ({command[:120]})"
    return ""
