"""Lines that say where something listens: engines, the router in front of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence import literal
from rltop.evidence.lines.engine import of_engine
from rltop.evidence.lines.line import Line, Recogniser

_PORTS = re.compile(r"Ports for engine (?P<engine>\d{1,6}): (?P<ports>\{.*)")
_ADAPTER = re.compile(r"Launch HttpServerEngineAdapter at: (?P<host>\[[^\]\s]+\]|[^\s:]+):(?P<port>\d{2,5})")
_UVICORN = re.compile(r"Uvicorn running on https?://(?P<host>\[[^\]\s]+\]|[^\s:/]+):(?P<port>\d{2,5})")
_SERVER_ARGS = re.compile(
    r"server_args=.*?\bhost='(?P<host>[^']{1,255})'.{0,80}?\bport=(?P<port>\d{2,5})\b|"
    r"server_args=.*?\bport=(?P<port2>\d{2,5})\b"
)
_NODE_RANK = re.compile(r"\bnode_rank=(?P<rank>\d{1,5})\b")
_ROUTER = re.compile(
    r"Router launched at (?P<host>\[[^\]\s]+\]|[^\s:,]+):(?P<port>\d{2,5})(?:, Prometheus port: (?P<metrics>\d{2,5}))?"
)
_LOCAL = frozenset({"0.0.0.0", "127.0.0.1", "localhost", "::", "::1", "[::]", "[::1]", ""})


def engine_address(line: Line) -> Mapping[str, object] | None:
    """Where an engine listens: host ("" for any address of the line's node), port, by (ports: before it starts, args:
    at its start, adapter and server: then), number (slime's of the engine)."""
    text = line.text
    if found := _PORTS.search(text):
        fields = literal.parse_map(found["ports"])
        port = fields.get("port") if fields else None
        if fields is None or not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65_536:
            return None
        host = str(fields.get("host") or "")
        return {"by": "ports", "number": int(found["engine"]), "host": _host(host), "port": port}
    if found := _ADAPTER.search(text):
        return {"by": "adapter", "host": _host(found["host"]), "port": int(found["port"])} | of_engine(line)
    if (found := _UVICORN.search(text)) and line.owner in ("engine", ""):
        return {"by": "server", "host": _host(found["host"]), "port": int(found["port"])} | of_engine(line)
    if found := _SERVER_ARGS.search(text):
        rank = _NODE_RANK.search(text)
        if rank and rank["rank"] != "0":
            return None  # a further node of an engine that another one answers for
        told = {"by": "args", "host": _host(found["host"] or ""), "port": int(found["port"] or found["port2"])}
        return told | of_engine(line)
    return None


def router_address(line: Line) -> Mapping[str, object] | None:
    """Where the router listens: host, port, metrics_port."""
    found = _ROUTER.search(line.text)
    if found is None:
        return None
    metrics = int(found["metrics"]) if found["metrics"] else None
    return {"host": _host(found["host"]), "port": int(found["port"]), "metrics_port": metrics}


def _host(text: str) -> str:
    return "" if text.lower() in _LOCAL else text.strip("[]")


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser(
        "engine_address",
        ("Ports for engine", "HttpServerEngineAdapter at", "Uvicorn running on", "server_args="),
        engine_address,
    ),
    Recogniser("router_address", ("Router launched at",), router_address),
)
