"""What is watched of a run that knows nothing of rltop: its logs, its Ray cluster, its router, as labelled facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rltop.tui.picture import under
from rltop.tui.text import age, plain
from rltop.tui.view import Frame

QUIET_S = 60.0
"""A log that did not grow for so long is called quiet: it says nothing about who writes it."""
_MIB = 1 << 20
_Fact = tuple[str, str, str]


def watched_facts(frame: Frame) -> Iterator[_Fact]:
    """(label, text, style); nothing for a run that is not watched."""
    run = frame.state.get("run")
    run = run if isinstance(run, Mapping) else {}
    if run.get("watched"):
        yield "watched", plain(run["watched"]), "accent"
    for name, log in under(frame.state, "log/"):
        yield f"log {name}", *_log(log, frame)
    cluster = frame.state.get("cluster")
    if isinstance(cluster, Mapping):
        yield from _cluster(cluster, frame)
    yield from _gpus(frame)
    if run.get("router"):
        yield "router", plain(run["router"]), "text"


def _log(log: Mapping[str, Any], frame: Frame) -> tuple[str, str]:
    last = log.get("last")
    since = frame.since(float(last)) if isinstance(last, int | float) else None
    quiet = since is not None and since > QUIET_S
    ago = f"{age(since)} ago" if since is not None else ""
    match log.get("state"):
        case "missing":
            return "not there yet", "warn"
        case "gone":
            return f"the file is gone, last line {ago}", "bad"
        case "unreadable":
            return f"cannot be read: {plain(log.get('problem'))}", "bad"
    text = f"{plain(log.get('lines'))} lines, " + (f"quiet, last {ago}" if quiet else f"last {ago}" if ago else "empty")
    style = "warn" if quiet else "text"
    behind, dropped = log.get("behind"), log.get("dropped")
    if isinstance(behind, int) and behind > _MIB:
        text += f", {behind / _MIB:,.0f} MiB still to read"
    if isinstance(dropped, int) and dropped:
        text, style = f"{text}, {dropped:,} lines left out", "warn"
    if log.get("restarts"):
        text += ", replaced once" if log["restarts"] == 1 else f", replaced {plain(log['restarts'])} times"
    return text, style


def _cluster(cluster: Mapping[str, Any], frame: Frame) -> Iterator[_Fact]:
    seen = cluster.get("seen")
    since = frame.since(float(seen)) if isinstance(seen, int | float) else None
    if cluster.get("error"):
        ago = f", last seen {age(since)} ago" if since is not None else ""
        yield "Ray", f"does not answer{ago}: {plain(cluster['error'])}", "bad"
    nodes = cluster.get("nodes")
    if not isinstance(nodes, Mapping):
        return
    text = f"{plain(nodes.get('alive'))} nodes"
    text += f" ({plain(nodes['dead'])} dead)" if nodes.get("dead") else ""
    text += f", {plain(cluster.get('gpus'))} GPUs, {plain(cluster.get('cpus'))} CPUs"
    text += f", asked {age(since)} ago" if since is not None and not cluster.get("error") else ""
    yield "Ray cluster", text, "warn" if nodes.get("dead") else "text"
    for label, key in (("Ray actors", "actors"), ("placement groups", "groups")):
        if (counts := cluster.get(key)) and isinstance(counts, Mapping):
            yield label, ", ".join(f"{plain(count)} {plain(state).lower()}" for state, count in counts.items()), "text"
    for group in _rows(cluster, "waiting"):
        yield "waits for GPUs", f"{plain(group.get('gpus'))} GPUs {plain(group.get('name'))}".rstrip(), "warn"
    for actor in _rows(cluster, "dead_actors"):
        why = plain(actor.get("why")) or "Ray does not say why"
        yield f"dead {plain(actor.get('class'))}", f"pid {plain(actor.get('pid'))}: {why}", "bad"
    for job in _rows(cluster, "jobs"):
        style = "bad" if job.get("status") == "FAILED" else "text"
        words = [plain(job.get(name)) for name in ("id", "status", "message")]
        yield "Ray job", " ".join(word for word in words if word), style


def _gpus(frame: Frame) -> Iterator[_Fact]:
    found = frame.state.get("gpus")
    for gpu in _rows(found, "gpus") if isinstance(found, Mapping) else ():
        holders = [f"{plain(one.get('name')) or 'pid'} {plain(one.get('pid'))}" for one in _rows(gpu, "holders")[:4]]
        more = len(_rows(gpu, "holders")) - len(holders)
        words = ", ".join(holders) + (f" and {more} more" if more > 0 else "")
        yield f"GPU {plain(gpu.get('index'))}", f"{plain(gpu.get('used_mib'))} MiB held by {words}", "text"


def _rows(cluster: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = cluster.get(key)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
