"""TCP ports: take one now, or say who has it."""

from __future__ import annotations

import errno
import socket

import psutil

from rltop.errors import RltopError


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
