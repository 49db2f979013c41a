"""`cluster.placement` and `cluster.gpu-mapping`: can Ray place the job, and do its processes run where they should?

slime asks for one bundle of one GPU and one CPU per GPU, and needs two CPUs more (rollout manager, lock). It waits for
them without end and says so every 30 seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rltop.checks.facts import relax_gpus
from rltop.checks.found import Document, LogEvent, RaySnapshot
from rltop.checks.observe import Args, Observations
from rltop.checks.phrase import missing, num, of_event, of_flags, span
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

PLACEMENT = "cluster.placement"
MAPPING = "cluster.gpu-mapping"
_UNLISTED = ("accelerator_type:", "node:", "bundle_group", "memory", "object_store_memory")
"""Resources that `ray status` does not list among the usage, or lists in another unit."""
_OWN = ("run", "own", "self", "ours", "me", "rltop", "engine", "trainer", "sglang", "megatron", "ray")
_FOREIGN = ("other", "foreign", "unknown", "else", "somebody")


# -- cluster.placement


@dataclass(frozen=True, slots=True)
class Need:
    """GPUs that the job asks for."""

    gpus: int
    mode: str
    actor: int = 0
    rollout: int = 0


def needed(obs: Observations) -> Need | None:
    """From the arguments (slime's table), else from the log; None where neither says."""
    args = obs.args
    nodes, per_node = args.number("actor_num_nodes"), args.number("actor_num_gpus_per_node")
    rollout = args.number("rollout_num_gpus")
    actor = int((nodes or 1) * (per_node or 8)) if nodes or per_node else None
    asked = next((e.data.get("gpus") for e in obs.events if e.kind in ("placement_create", "placement_wait")), None)
    said = int(asked) if isinstance(asked, int | float) else None
    colocate = args.on("colocate")
    if roles := relax_gpus(args):
        return _relax(args, roles) or _said(said)
    if actor is not None and (args.on("debug_train_only") or args.given("load_debug_rollout_data")):
        return Need(actor, "train-only", actor)
    if args.on("debug_rollout_only"):
        count = rollout if rollout is not None else actor if colocate else None
        return Need(int(count), "rollout-only", 0, int(count)) if count else _said(said)
    if actor is not None and args.on("rollout_external"):
        return Need(actor, "external engines", actor)
    if actor is not None and colocate:
        return Need(max(actor, int(rollout or 0)), "colocate", actor, int(rollout or actor))
    if actor is not None and rollout is not None:
        return Need(actor + int(rollout), "decoupled", actor, int(rollout))
    return _said(said)


def _relax(args: Args, roles: Mapping[str, int]) -> Need | None:
    """Relax gives every role of `--resource` its own placement group, but actor, rollout and GenRM share one in a
    colocated run. None for its debug modes, which start fewer roles."""
    if any(args.on(name) for name in ("debug_rollout_only", "debug_train_only")) or args.given(
        "load_debug_rollout_data"
    ):
        return None
    actor, rollout = roles.get("actor", 0), roles.get("rollout", 0)
    if args.on("colocate") and not args.on("hybrid") and actor and rollout:
        shared = {name for name in ("actor", "rollout", "genrm") if name in roles}
        if args.text("advantage_estimator") == "ppo" and roles.get("critic") == actor:
            shared.add("critic")
        apart = sum(gpus for name, gpus in roles.items() if name not in shared)
        return Need(max(roles[name] for name in shared) + apart, "colocate", actor, rollout)
    return Need(sum(roles.values()), "decoupled", actor, rollout)


def _demanded(last: RaySnapshot | None) -> Need | None:
    """GPUs of all bundles that wait."""
    gpus = sum(bundle.get("GPU", 0.0) * count for bundle, count, _ in last.demands) if last else 0.0
    return Need(math.ceil(gpus), "by Ray's demands") if gpus >= 1 else None


def _said(gpus: int | None) -> Need | None:
    return Need(gpus, "by the log") if gpus else None


def check_placement(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    need = needed(obs)
    waits = [event for event in obs.events if event.kind == "placement_wait"]
    bundles = [event for event in obs.events if event.kind == "placement_bundle"]
    last = _last(obs.ray)
    if need is None and not (last and last.demands):
        what = "what the job asks for (arguments, or Ray's demands)"
        return [Verdict(PLACEMENT, "skip", cause=missing(obs, what))]
    need = need or _demanded(last)
    if bundles or (last and len(obs.ray) > 1 and not last.demands and last.usage.get("GPU", (0.0, 0.0))[0] > 0):
        cause = (
            f"The placement group was placed ({len(bundles)} bundles in the log)."
            if bundles
            else (f"The placement group was placed: no demand waits in {last.source}." if last else "")
        )
        return [Verdict(PLACEMENT, "pass", value={"required": need.gpus if need else None}, cause=cause)]
    registered, available, evidence = _gpus(last, waits)
    if registered is None and last is None:
        return [Verdict(PLACEMENT, "skip", cause=missing(obs, "ray status, or the wait for the placement group"))]
    if need and registered is not None and need.gpus > registered:
        return [_too_few(obs, need, registered, evidence, last)]
    if last and (verdict := _does_not_fit(obs, last, need)):
        return [verdict]
    waited = _waited(obs.ray, waits)
    value = {"required": need.gpus if need else None, "registered": registered, "available": available}
    if need and available is not None and available < need.gpus and waited > t.placement_wait_s:
        cause = (
            f"The job needs {need.gpus} GPUs ({need.mode}), {registered:g} are registered, but only {available:g} are "
        )
        cause += f"available for {span(waited)}: somebody holds the rest."
        advice = ("ray status", "ray list actors --filter state=ALIVE", "ray list placement-groups")
        threshold = {"wait_s": t.placement_wait_s}
        return [
            Verdict(PLACEMENT, "warn", value=value, threshold=threshold, evidence=evidence, cause=cause, advice=advice)
        ]
    cause = "Ray can place the job"
    cause += f": it needs {need.gpus} GPUs ({need.mode})" if need else ""
    cause += f", {registered:g} are registered" if registered is not None else ""
    cause += f"; it waits for {span(waited)} so far." if waited else "."
    return [Verdict(PLACEMENT, "pass", value=value, threshold={"wait_s": t.placement_wait_s}, cause=cause)]


def _last(ray: tuple[RaySnapshot, ...]) -> RaySnapshot | None:
    return max(ray, key=lambda one: (one.at_s if one.at_s is not None else -1.0, one.source), default=None)


def _gpus(last: RaySnapshot | None, waits: list[LogEvent]) -> tuple[float | None, float | None, tuple[Evidence, ...]]:
    """(registered, available, evidence): by the newest snapshot, else by the newest line of the wait."""
    evidence: list[Evidence] = []
    registered = available = None
    if waits:
        data = waits[-1].data
        registered, available = _number(data.get("registered")), _number(data.get("available"))
        evidence.append(of_event(waits[-1]))
    if last is not None and last.usage:
        used, total = last.usage.get("GPU", (0.0, 0.0))
        registered, available = total, total - used
        line = last.lines.get("GPU") or last.lines.get("CPU")
        evidence.insert(0, Evidence(last.source, line, f"{used:g}/{total:g} GPU"))
    if last is not None and last.demands:
        bundle, count, strategy = last.demands[0]
        evidence.append(Evidence(last.source, last.lines.get("demands"), f"{dict(bundle)} * {count} ({strategy})"))
    return registered, available, tuple(evidence)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _waited(ray: tuple[RaySnapshot, ...], waits: list[LogEvent]) -> float:
    times = [one.at_s for one in ray if one.at_s is not None and one.demands]
    elapsed = [number for event in waits if (number := _number(event.data.get("elapsed_s"))) is not None]
    return max([max(times) - min(times) if len(times) > 1 else 0.0, *elapsed], default=0.0)


def _too_few(
    obs: Observations, need: Need, registered: float, evidence: tuple[Evidence, ...], last: RaySnapshot | None
) -> Verdict:
    parts = f" ({need.actor} actor + {need.rollout} rollout)" if need.mode == "decoupled" else ""
    cause = f"The placement group needs {need.gpus} GPUs in mode {need.mode}{parts}, but only {registered:g} GPUs are "
    cause += "registered with Ray: it waits for ever."
    if last is not None and last.pending_nodes:
        cause += f" {last.pending_nodes} nodes are pending."
    advice = [f"add nodes with {need.gpus - registered:g} more GPUs (ray start --address=...)"]
    if need.mode == "decoupled" and max(need.actor, need.rollout) <= registered:
        advice.append("--colocate, so that both sides share the GPUs")
    advice.append("--actor-num-nodes, --actor-num-gpus-per-node and --rollout-num-gpus: fit them to the cluster")
    return Verdict(
        PLACEMENT,
        "fail",
        value={"required": need.gpus, "registered": registered, "resource": "GPU", "mode": need.mode},
        threshold={"registered": need.gpus},
        evidence=(*evidence, *of_flags(obs.args, "actor_num_nodes", "rollout_num_gpus", "colocate")),
        cause=cause,
        advice=tuple(advice),
    )


def _does_not_fit(obs: Observations, last: RaySnapshot, need: Need | None) -> Verdict | None:
    """A bundle that no node can hold, or a sum that the cluster does not have, in any resource."""
    nodes = max(1, last.nodes, len(last.node_totals))
    demands = list(last.demands) or _printed(obs)
    if need and not demands and "CPU" in last.usage:
        demands = [({"CPU": 1.0}, need.gpus + 2, "PACK")]  # slime's bundles, the rollout manager and the lock
    for bundle, count, strategy in demands:
        for resource, amount in bundle.items():
            if resource.startswith(_UNLISTED):
                continue
            total = last.usage.get(resource, (0.0, 0.0))[1]
            one_node = max((node.get(resource, 0.0) for node in last.node_totals), default=total / nodes)
            one_group = amount * count if strategy == "STRICT_PACK" else amount
            if one_group > one_node:
                what = f"a bundle asks for {one_group:g} {resource} on one node, and a node has {one_node:g}"
                exact = bool(last.node_totals) or nodes == 1
                return _short(last, resource, one_group, one_node, what, "high" if exact else "medium")
            if amount * count > total:
                what = f"{count} bundles ask for {amount * count:g} {resource}, and the cluster has {total:g}"
                return _short(last, resource, amount * count, total, what, "high")
    return None


def _printed(obs: Observations) -> list[tuple[dict[str, float], int, str]]:
    """Bundles that the log prints, where Ray's status lists no demand."""
    for event in obs.events:
        bundles = event.data.get("bundles") if event.kind == "placement_create" else None
        if isinstance(bundles, tuple) and bundles:
            counts = Counter(tuple(sorted(one.items())) for one in bundles)
            return [(dict(one), count, "") for one, count in counts.items()]
    return []


def _short(last: RaySnapshot, resource: str, required: float, has: float, what: str, confidence: Confidence) -> Verdict:
    advice = ["ray status -v", f"ray start --resources='{{\"{resource}\": ...}}' on the nodes that have it"]
    if resource == "CPU":
        advice = ["ray start --num-cpus", "nodes with more CPUs, or fewer CPUs per bundle"]
    elif resource == "GPU":
        advice = ["nodes with more GPUs, or fewer GPUs per bundle", "ray status -v"]
    return Verdict(
        PLACEMENT,
        "fail",
        value={"required": required, "registered": has, "resource": resource},
        threshold={"registered": required},
        evidence=(Evidence(last.source, last.lines.get("demands") or last.lines.get(resource), what),),
        cause=f"Ray can not place the job for want of {resource}: {what}; it waits for ever, whatever else is free.",
        advice=tuple(advice),
        confidence=confidence,
    )


# -- cluster.gpu-mapping


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU."""

    gpu: str
    pid: int | None
    gb: float
    user: str
    evidence: Evidence


def check_mapping(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    bundles = [event for event in obs.events if event.kind == "placement_bundle"]
    group = {str(event.data.get("gpu")) for event in bundles}
    several = len({event.data.get("node") for event in bundles}) > 1
    pids = {event.pid for event in obs.events if event.pid is not None}
    listed = [one for document in obs.documents if document.kind == "gpu_procs" for one in _processes(document)]
    listed += [
        one
        for row in obs.rows
        if row.kind == "gpu_mem"
        for one in _of_row(row.fields, row.where.source, row.where.line)
    ]
    users = {one.user for one in listed if one.pid in pids and one.user}
    own = [one for one in listed if _is_own(one, pids, users)]
    foreign = [one for one in listed if _is_foreign(one, pids, users) and one.gb > t.gpu_foreign_gb]
    outside = [] if several or not group else [one for one in own if one.gpu not in group and one.gb > 0]
    ours = group | {one.gpu for one in own}
    beside = [one for one in foreign if one.gpu in ours]
    if outside or beside:
        return [_mapped(obs, t, bundles, outside, beside)]
    if not listed and (found := _by_memory(obs, t, group, several, pids)):
        return [found]
    if not group or not listed:
        what = "the GPUs of the placement group together with the processes on the GPUs"
        return [Verdict(MAPPING, "skip", cause=missing(obs, what))]
    cause = f"{len(own)} processes of the run are on GPUs of its placement group ({_ids(group)}) alone."
    return [Verdict(MAPPING, "pass", value={"group": sorted(group)}, cause=cause)]


def _ids(gpus: Iterable[str]) -> str:
    return ", ".join(sorted(gpus, key=lambda gpu: (len(gpu), gpu)))


def _processes(document: Document) -> list[Process]:
    found = []
    for gpu, value in document.fields.items():
        rows = value if isinstance(value, list) else value.get("processes") if isinstance(value, dict) else None
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict):
                named = {"gpu": gpu, **row} if gpu != "processes" else row
                found += _of_row(named, document.source, document.lines.get(gpu))
    return found


def _of_row(row: Mapping[str, object], source: str, line: int | None) -> list[Process]:
    gpu, pid = row.get("gpu", row.get("index", row.get("device"))), row.get("pid")
    gb = next((_number(row[key]) for key in ("gb", "used_gb", "memory_gb", "mem_gb") if key in row), None)
    if gb is None and (megabytes := _number(row.get("mb", row.get("used_mb")))) is not None:
        gb = megabytes / 1024
    if gpu is None or gb is None:
        return []
    user = str(row.get("user") or row.get("owner") or row.get("name") or "")
    evidence = Evidence(source, line, f"GPU {gpu}: pid {pid}, {num(gb)} GB, {user or 'owner unknown'}")
    return [Process(str(gpu), pid if isinstance(pid, int) else None, gb, user, evidence)]


def _is_own(one: Process, pids: set[int], users: set[str]) -> bool:
    return (one.pid in pids) or (one.user in users) or one.user.lower().startswith(_OWN)


def _is_foreign(one: Process, pids: set[int], users: set[str]) -> bool:
    if _is_own(one, pids, users):
        return False
    return one.user.lower().startswith(_FOREIGN) or (bool(users) and bool(one.user))


def _mapped(
    obs: Observations, t: Thresholds, bundles: list[LogEvent], outside: list[Process], beside: list[Process]
) -> Verdict:
    group = {str(event.data.get("gpu")) for event in bundles}
    parts = []
    if outside:
        parts.append(
            f"the placement group has GPUs {_ids(group)}, but pid {outside[0].pid} of this run is on GPU "
            f"{_ids({one.gpu for one in outside})}"
        )
    parts += [f"pid {p.pid} of somebody else holds {num(p.gb)} GB of GPU {p.gpu}" for p in beside[:4]]
    text = "; ".join(parts)
    advice = [
        "take base_gpu_id of the engine from the placement group's own GPU ids",
        "CUDA_VISIBLE_DEVICES: set it per actor",
    ]
    return Verdict(
        MAPPING,
        "fail",
        value={
            "group": sorted(group),
            "used": sorted({one.gpu for one in outside}),
            "foreign": [{"pid": p.pid, "gb": p.gb, "gpu": p.gpu} for p in beside[:20]],
        },
        threshold={"foreign_gb": t.gpu_foreign_gb},
        evidence=(*(one.evidence for one in (*outside, *beside)[:4]), *(of_event(event) for event in bundles[:2])),
        cause=text[:1].upper() + text[1:] + ". The memory is not this run's: no setting of its own frees any.",
        advice=tuple(advice if outside else ()) + tuple(f"ask the owner of pid {p.pid} to move" for p in beside[:2]),
    )


def _by_memory(obs: Observations, t: Thresholds, group: set[str], several: bool, pids: set[int]) -> Verdict | None:
    """Without a list of processes: an out-of-memory line of a GPU outside the group, filled by another process."""
    for event in obs.events:
        gpu, processes = event.data.get("gpu"), event.data.get("processes")
        if event.kind != "oom" or gpu is None or several or not group or str(gpu) in group:
            continue
        for pid, gb in processes.items() if isinstance(processes, Mapping) else ():
            held, number = _number(gb), int(pid) if str(pid).isdigit() else None
            if held is not None and held > t.gpu_foreign_gb and number not in pids:
                cause = (
                    f"The placement group has GPUs {_ids(group)}, but the allocation failed on GPU {gpu}, of which pid "
                )
                cause += f"{pid}, no process of this run's log, holds {num(held)} GB."
                return Verdict(
                    MAPPING,
                    "fail",
                    value={"group": sorted(group), "used": [str(gpu)], "foreign": [{"pid": number, "gb": held}]},
                    threshold={"foreign_gb": t.gpu_foreign_gb},
                    evidence=(of_event(event),),
                    cause=cause,
                    advice=("take base_gpu_id of the engine from the placement group's own GPU ids", f"ps -fp {pid}"),
                    confidence="medium",
                )
    return None
