"""`engine.ima` and `train.ima`: who made the first illegal memory access, and what narrows it down."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rltop.checks.events import DEDUP, of_kind, own_frame, who, whole
from rltop.checks.facts import engine_has, owned
from rltop.checks.faults import HARDWARE_XIDS, Fault, engine_faults, first_fault
from rltop.checks.known import match_fault
from rltop.checks.observe import Observations
from rltop.checks.phrase import clock, count, missing, of_event, span
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ENGINE = "engine.ima"
TRAINER = "train.ima"
_NO_SPECULATION = "speculative decoding off: remove every --sglang-speculative-* flag"
_GRAPH = re.compile(r"cuda graph: (?P<on>True|False)")
_CORE = "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE=/persistent/cuda_coredump_%h.%p.%t"


def check_engine(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the first fault, if an engine owns it; where every process of an engine has a log of its own, one
    for the first fault of each engine."""
    if not obs.logs and not obs.events:
        return [Verdict(ENGINE, "skip", cause=missing(obs, "a log of an engine"))]
    fault = first_fault(obs)
    if fault is None:
        return [Verdict(ENGINE, "pass", cause="No log tells of an illegal memory access.")]
    if fault.owner != "engine":
        owner = "the trainer (see train.ima)" if fault.owner == "trainer" else "a process that is no engine"
        return [Verdict(ENGINE, "pass", cause=f"The first illegal memory access is that of {owner}.")]
    return [_engine(obs, one) for one in engine_faults(obs)]


def check_trainer(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the first fault, if the trainer owns it."""
    if not obs.logs and not obs.events:
        return [Verdict(TRAINER, "skip", cause=missing(obs, "a log of the trainer"))]
    fault = first_fault(obs)
    if fault is None:
        return [Verdict(TRAINER, "pass", cause="No log tells of an illegal memory access.")]
    if fault.owner != "trainer":
        return [Verdict(TRAINER, "pass", cause="The first illegal memory access is not the trainer's.")]
    return [_trainer(obs, fault)]


def _evidence(fault: Fault) -> tuple[Evidence, ...]:
    places = [of_event(fault.event)]
    if fault.free_at is not None:
        places.append(of_event(fault.free_at))
    places += [of_event(event) for event in fault.xids[:2]]
    return tuple(places)


def _value(fault: Fault) -> dict[str, object]:
    found: dict[str, object] = {"phase": fault.phase, "fault": str(fault.event.data.get("fault", ""))}
    if fault.free_gb is not None:
        found["free_gb"] = fault.free_gb
    if fault.since_start_s is not None:
        found["since_start_s"] = round(fault.since_start_s, 3)
    if fault.kernel:
        found["kernel"] = fault.kernel
    if fault.xids:
        found["xids"] = [whole(event, "xid") for event in fault.xids[:8]]
    if fault.cascades:
        found["later_reports"] = len(fault.cascades)
    if fault.generation is not None:
        found["generation"] = fault.generation
    if fault.again:
        found["again"] = len(fault.again)
    if fault.rehearsal:
        found["rehearsal"] = fault.rehearsal
    if frame := own_frame(fault.event):
        found["frame"] = frame
    return found


def _fact(fault: Fault) -> str:
    event = fault.event
    rank = f"rank {event.rank}" if event.rank is not None else who(event)
    at = f" at {clock(event.time)}" if event.time is not None else ""
    text = f"first fault: {rank} {_in(fault)}{at}"
    if fault.since_start_s:
        text += f", {span(fault.since_start_s)} after the start"
    if fault.kernel:
        text += f", in kernel {fault.kernel}"
    if fault.free_gb is not None:
        text += f", with {fault.free_gb:g} GB free before it"
    return text


def _in(fault: Fault) -> str:
    return "in an unknown phase" if fault.phase == "unknown" else f"in {fault.phase}"


def _hardware(fault: Fault) -> list[str]:
    xids = [whole(event, "xid") or 0 for event in fault.xids]
    return [f"Xid {xid} ({HARDWARE_XIDS[xid]})" for xid in dict.fromkeys(xids) if xid in HARDWARE_XIDS]


def _engine(obs: Observations, fault: Fault) -> Verdict:
    event = fault.event
    hardware = _hardware(fault)
    name = "An engine"
    if fault.generation is not None and event.engine is not None:
        name = f"Engine {event.engine} (generation {fault.generation})"
    cause = f"{name} made an illegal memory access; {_fact(fault)}."
    if fault.rehearsal:
        cause += f" A rehearsal: the fault {fault.rehearsal} was injected."
    if fault.again:
        last = fault.again[-1]
        at = f", last at {clock(last.time)}" if last.time is not None else ""
        times = "once" if len(fault.again) == 1 else f"{len(fault.again)} times"
        cause += f" A later generation of it did the same {times}{at}."
    if hardware:
        cause += f" The driver reports {', '.join(hardware)}: that is hardware, no toggle helps."
    elif software := [f"Xid {whole(e, 'xid')}" for e in fault.xids if whole(e, "xid") in (13, 31)]:
        cause += f" The driver's {software[0]} is a software fault."
    if fault.cascades:
        cause += f" Its cascade: {count(len(fault.cascades), 'later report')} of other ranks or threads."
    known = match_fault(obs, fault)
    value = _value(fault)
    if known:
        value["known"] = [f"{crash.issue}" for crash in known]
        cause += f" It {known[0].sentence()}."
    advice = _hardware_advice() if hardware else (*(crash.advice() for crash in known), *_ladder(obs, fault))
    if event.repeated:
        advice = (*advice, DEDUP)
    return Verdict(
        ENGINE,
        "fail",
        engine=event.engine if event.engine is not None else event.actor or None,
        rank=event.rank,
        value=value,
        threshold="none",
        evidence=_evidence(fault),
        cause=cause,
        advice=advice,
    )


def _hardware_advice() -> tuple[str, ...]:
    return (
        "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER on that node",
        "take the node out of the job and reset the GPU",
    )


def _graphs_may_be_on(obs: Observations) -> bool:
    """Neither settings nor the lines of decode batches say that no graph is replayed."""
    if engine_has(obs, "disable_cuda_graph") is True:
        return False
    told = [found["on"] for event in of_kind(obs, "decode") if (found := _GRAPH.search(event.text))]
    return not told or "True" in told


def _own_switches(obs: Observations, engine: str) -> tuple[str, ...]:
    """The same with rltop's own tools, for an engine that it started."""
    steps = (
        ("cuda_graph=off", _graphs_may_be_on(obs)),
        ("speculative=off", engine_has(obs, "speculative_algorithm") is not False),
        ("overlap_schedule=off", engine_has(obs, "disable_overlap_schedule") is not True),
        ("deepep=off", engine_has(obs, "moe_a2a_backend", "enable_deepep_moe") is not False),
        ("dp_attention=off", engine_has(obs, "enable_dp_attention") is not False),
        ("hicache=off", engine_has(obs, "enable_hierarchical_cache") is not False),
    )
    return tuple(f"rltop engine set {change} --engine {engine}" for change, may_be_on in steps if may_be_on)


def _own_ladder(obs: Observations, fault: Fault, engine: str) -> tuple[str, ...]:
    switches = _own_switches(obs, engine)
    if fault.phase == "capture":
        switches = tuple(one for one in switches if "cuda_graph" in one or "speculative" in one)
    both = ("rltop engine ab cuda_graph=off (half of the engines with, half without, on the same requests)",)
    return (
        f"rltop bisect start --engine {engine} (tries them by itself, with the requests of the crash)",
        *switches,
        *(both if len(owned(obs)) > 1 and any("cuda_graph" in one for one in switches) else ()),
        f"rltop engine set launch_blocking=on cuda_graph=off --engine {engine} (it only locates)",
        f"rltop engine set core_dump=on --engine {engine} (a CUDA core dump names the kernel)",
    )


def _switches(obs: Observations) -> tuple[str, ...]:
    """What can be switched off, the likeliest first; what is known to be off is left out."""
    steps = (
        (
            "CUDA graph off: --sglang-disable-cuda-graph (then graphs on with --sglang-disable-cuda-graph-padding)",
            _graphs_may_be_on(obs),
        ),
        (
            _NO_SPECULATION,
            engine_has(obs, "speculative_algorithm") is not False,
        ),
        (
            "overlap schedule off: --sglang-disable-overlap-schedule",
            engine_has(obs, "disable_overlap_schedule") is not True,
        ),
        (
            "DeepEP off: --sglang-moe-a2a-backend none, and no --moe-enable-deepep in the trainer",
            engine_has(obs, "moe_a2a_backend", "enable_deepep_moe") is not False or obs.args.on("moe_enable_deepep"),
        ),
        ("DP attention off: no --sglang-enable-dp-attention", engine_has(obs, "enable_dp_attention") is not False),
        (
            "hierarchical cache off: no --sglang-enable-hierarchical-cache",
            engine_has(obs, "enable_hierarchical_cache") is not False,
        ),
    )
    return tuple(text for text, may_be_on in steps if may_be_on)


def _ladder(obs: Observations, fault: Fault) -> tuple[str, ...]:
    if fault.event.engine is not None and (mine := owned(obs, fault.event.engine)):
        return _own_ladder(obs, fault, mine[0])
    soak = ""
    if fault.since_start_s and fault.since_start_s >= 1:
        soak = f" for longer than {span(1.5 * fault.since_start_s)}, because the fault took {span(fault.since_start_s)}"
    if fault.phase == "capture":
        return (
            "CUDA graph off: --sglang-disable-cuda-graph",
            *([] if engine_has(obs, "speculative_algorithm") is False else [_NO_SPECULATION]),
            "another image of SGLang (the last one that worked)",
            f"a CUDA core dump names the kernel: {_CORE}",
        )
    return (
        f"replay the same requests against one engine{soak}, one toggle at a time (rltop bisect does that by itself on "
        "engines that rltop up started)",
        *_switches(obs),
        "another image of SGLang",
        "CUDA_LAUNCH_BLOCKING=1 together with CUDA graphs off (it only locates: it changes the timing)",
        f"a CUDA core dump names the kernel: {_CORE}",
    )


def _trainer(obs: Observations, fault: Fault) -> Verdict:
    event = fault.event
    cause = (
        f"The trainer ({who(event)}) made the first illegal memory access, {_in(fault)}; {_fact(fault)}. "
        "Toggles of the engine are pointless."
    )
    deepep = obs.args.on("moe_enable_deepep")
    if deepep:
        cause += " The trainer's DeepEP stays a suspect."
    hardware = _hardware(fault)
    if hardware:
        cause += f" The driver reports {', '.join(hardware)}: that is hardware."
    advice = [
        "--load-debug-rollout-data DIR/{rollout_id}.pt (replays the rollout on the trainer alone)",
        """--train-env-vars '{"CUDA_LAUNCH_BLOCKING": "1"}'""",
        *(["remove --moe-enable-deepep (--moe-token-dispatcher-type alltoall)"] if deepep else []),
        f"a CUDA core dump names the kernel: {_CORE}",
    ]
    if event.repeated:
        advice.append(DEDUP)
    return Verdict(
        TRAINER,
        "fail",
        rank=event.rank,
        value=_value(fault) | {"actor": event.actor or "trainer"},
        threshold="none",
        evidence=_evidence(fault),
        cause=cause,
        advice=_hardware_advice() if hardware else tuple(advice),
    )
