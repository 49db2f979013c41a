"""`ray status` as text: nodes, usage, and the demands that wait."""

from __future__ import annotations

import re
from ast import literal_eval

from rltop.checks.found import RaySnapshot
from rltop.evidence.sink import Reader, Sink, Source

MOST_BYTES = 4 << 20
_MOST_RESOURCE = 1e18
_USAGE = re.compile(
    r"^\s*(?P<used>[\d.]+)\s*(?P<u1>[KMGT]?i?B)?/(?P<total>[\d.]+)\s*(?P<u2>[KMGT]?i?B)?\s+(?P<name>\S+)"
)
_DEMAND = re.compile(
    r"^\s*(?P<bundle>\{.*?\})(?:\s*\*\s*(?P<count>\d+))?(?:\s*\((?P<strategy>\w+)\))?\s*:\s*(?P<groups>\d+)?"
)
_AT = re.compile(r"_(\d+)s$")
_UNITS = {"": 1.0, "B": 1.0, "K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4}
_NODE = re.compile(r"^\s*(?P<count>\d+)\s+\S+|^\s*\(?(?P<none>no )")


def read(source: Source, sink: Sink) -> None:
    """One snapshot."""
    with source.path.open("rb") as stream:
        text = stream.read(MOST_BYTES).decode("utf-8", "replace")
    snapshot = parse(text, source.name, source.path.stem)
    if not snapshot.usage and not snapshot.demands and not snapshot.nodes:
        sink.problem(source, "ray status", "it has no nodes, no usage and no demands", line=1, whole=True)
        return
    sink.ray.append(snapshot)
    sink.files.append(source.name)


def parse(text: str, source: str, stem: str = "") -> RaySnapshot:
    """Snapshot of a text; sections that are not there stay empty."""
    section = ""
    nodes = pending = 0
    usage: dict[str, tuple[float, float]] = {}
    demands: list[tuple[dict[str, float], int, str]] = []
    per_node: list[dict[str, float]] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        head = line.strip().rstrip(":").lower()
        if head.startswith("node: "):  # `ray status -v`: what follows is one node's
            per_node.append({})
            section = "node"
            continue
        if section.startswith("node") and head in ("usage", "activity"):
            section = f"node {head}"
            continue
        if head in ("active", "idle", "pending", "recent failures", "demands", "resources", "usage", "total usage"):
            section = head
            continue
        if head.startswith("total demands"):
            section = "demands"
        elif section in ("active", "idle", "pending") and (found := _NODE.match(line)) and found["count"]:
            nodes += int(found["count"]) if section != "pending" else 0
            pending += int(found["count"]) if section == "pending" else 0
        elif section.endswith("usage") and (found := _USAGE.match(line)):
            used, total = _amount(found["used"], found["u1"]), _amount(found["total"], found["u2"])
            if section == "node usage":
                per_node[-1][found["name"]] = total
                continue
            usage[found["name"]] = (used, total)
            lines.setdefault(found["name"], number)
        elif section == "demands" and (found := _DEMAND.match(line)):
            bundle = _bundle(found["bundle"])
            if bundle:
                many = min(int((found["count"] or found["groups"] or "1")[:12]), 1_000_000_000)
                demands.append((bundle, many, found["strategy"] or ""))
                lines.setdefault("demands", number)
    at = _AT.search(stem)
    return RaySnapshot(
        source, float(at[1]) if at else None, nodes, pending, usage, tuple(demands), lines, tuple(per_node)
    )


def _amount(number: str, unit: str | None) -> float:
    try:
        return _resource(float(number) * _UNITS.get((unit or "")[:1], 1.0))
    except ValueError:
        return 0.0


def _resource(amount: float) -> float:
    """No cluster has more of anything than this; a damaged file may say so."""
    return amount if 0 <= amount <= _MOST_RESOURCE else 0.0


def _bundle(text: str) -> dict[str, float]:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {
        str(key): _resource(float(amount))
        for key, amount in value.items()
        if isinstance(amount, int | float) and abs(amount) <= _MOST_RESOURCE
    }


def _sniff(_source: Source, head: bytes) -> bool:
    return b"======== Autoscaler status" in head


READERS: tuple[Reader, ...] = (Reader("ray", ("ray_status*.txt",), read, _sniff),)
