"""`engine.oom` and `train.oom`: who ran out of GPU memory, and what the bytes say.

Lines of the memory saver that say they may not be an issue, and retractions of a full KV pool, are part of a healthy
run and never count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rltop.checks.events import DEDUP, frames, goes_on, number, of_kind, side, who, whole, word
from rltop.checks.facts import NO_TRAINER, context_parallel, fires, owned, vocabulary
from rltop.checks.faults import Fault, first_fault
from rltop.checks.found import LogEvent, Row
from rltop.checks.known import match
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, num, of_event, of_flags, of_points, span
from rltop.checks.series import Point, finite, points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ENGINE = "engine.oom"
TRAINER = "train.oom"
ENGINE_STAGE = 1
"""Memory advice is wrong where cluster.gpu-mapping says that another job fills the GPU."""
LONGEST = (
    "multi_turn/raw_response_length/response_length_max",
    "multi_turn/wo_obs_response_length/response_length_max",
    "rollout/response_len/max",
    "rollout/total_lengths/max",
    "rollout/response_lengths/max",
)
"""Longest sample of a rollout, tokens; multi-turn totals first."""
_LOGITS = re.compile(r"log_?prob|logits|vocab|cross_entropy|entropy", re.I)
_RESUME = re.compile(r"resume_memory_occupation|memory_saver")
GIB = 2**30


def fatal_ooms(obs: Observations, owner: str) -> tuple[LogEvent, ...]:
    """Out-of-memory lines that this side owns and after which it made no progress; benign ones are left out."""
    found = [event for event in of_kind(obs, "oom", "memory_saver") if not event.data.get("benign")]
    return tuple(event for event in found if side(obs, event) == owner and not goes_on(obs, event))


# -- engine.oom


def check_engine(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: an engine's own out-of-memory line, else an illegal access that may be memory."""
    if not obs.logs and not obs.events:
        return [Verdict(ENGINE, "skip", cause=missing(obs, "a log of an engine"))]
    own = fatal_ooms(obs, "engine")
    if own and fires(obs, "train.colocate-swap") and all(_resumes(event) for event in own):
        cause = "An engine could not take its memory back at its wake-up because the trainer still held it (see "
        return [Verdict(ENGINE, "pass", cause=cause + "train.colocate-swap); its own settings are not the cause.")]
    if own:
        return [_engine(obs, own)]
    fault = first_fault(obs)
    if fault is not None and fault.owner == "engine" and (reason := _may_be_memory(obs, t, fault)):
        return [_maybe(obs, t, fault, *reason)]
    cause = "No engine ran out of GPU memory."
    if fault is not None and fault.owner == "engine":
        free = f" ({num(fault.free_gb)} GB were free before it)" if fault.free_gb is not None else ""
        cause = f"Nothing says that the illegal memory access is one of memory{free}."
    return [Verdict(ENGINE, "pass", cause=cause)]


def _resumes(event: LogEvent) -> bool:
    """The engine was taking released memory back, not asking for more."""
    return word(event, "function") == "resume" or any(_RESUME.search(frame) for frame in frames(event))


def _engine(obs: Observations, own: Sequence[LogEvent]) -> Verdict:
    event = own[0]
    mapping = fires(obs, "cluster.gpu-mapping")
    tried, free, gpu = number(event, "tried_gb"), number(event, "free_gb"), whole(event, "gpu")
    cause = f"{who(event)} ran out of memory"
    cause += f" on GPU {gpu}" if gpu is not None else ""
    cause += f": it asked for {num(tried)} GiB" if tried is not None else ""
    cause += f" with {num(free)} GiB free" if free is not None else ""
    others = event.data.get("processes")
    if isinstance(others, dict) and others:
        cause += "; " + ", ".join(f"process {pid} holds {num(float(gb))} GiB" for pid, gb in others.items() if gb)
    if mapping:
        advice: tuple[str, ...] = ("see cluster.gpu-mapping: the memory is not this run's own",)
        cause += "; another process fills that GPU, so this run's memory settings are not the cause"
    elif event.engine is not None and (mine := owned(obs, event.engine)):
        cause += ": the weights leave nothing for the KV cache" if event.data.get("pool") else ""
        advice = _own_advice(mine[0], pool=bool(event.data.get("pool")))
    elif event.data.get("pool"):
        cause += ": the weights leave nothing for the KV cache within --mem-fraction-static"
        advice = (
            "a larger --sglang-mem-fraction-static, if it is well below 0.9",
            "nvidia-smi before the start: another process, or a trainer that did not offload, on these GPUs",
            "more GPUs per engine (--rollout-num-gpus-per-engine), or quantised weights",
        )
    else:
        advice = (
            "a smaller --sglang-mem-fraction-static",
            "a smaller graph batch limit: --sglang-cuda-graph-max-bs",
            "--sglang-chunked-prefill-size 2048",
        )
    known = match(obs, event, message_only=True)
    return Verdict(
        ENGINE,
        "fail",
        engine=event.engine if event.engine is not None else event.actor or None,
        rank=event.rank,
        value={"tried_gb": tried, "free_gb": free, "gpu": gpu, "processes": others or None}
        | ({"known": [crash.issue for crash in known]} if known else {}),
        threshold="no out-of-memory line",
        evidence=tuple(of_event(one) for one in own[:3]),
        cause=cause + ".",
        advice=(*advice, *(crash.advice() for crash in known), *((DEDUP,) if event.repeated else ())),
    )


def _own_advice(engine: str, *, pool: bool) -> tuple[str, ...]:
    """For an engine that rltop started: flags of the trainer do nothing to it."""
    fraction = "larger, if it is well below 0.9" if pool else "smaller than now"
    return (
        f"rltop engine set mem_fraction_static=FRACTION --engine {engine} ({fraction})",
        *(() if pool else (f"rltop engine set chunked_prefill=2048 --engine {engine}",)),
        *(() if pool else (f"rltop engine set cuda_graph=off --engine {engine} (captured graphs hold memory)",)),
        "nvidia-smi: another process, or a trainer that did not offload, on these GPUs",
    )


def _may_be_memory(obs: Observations, t: Thresholds, fault: Fault) -> tuple[str, tuple[Evidence, ...]] | None:
    """Why an illegal access may be memory, unless something excludes it."""
    if fault.phase == "capture" or _memory_excluded([row for row in obs.rows if row.kind == "bisect"]):
        return None
    event = fault.event
    for one in of_kind(obs, "oom", "memory_saver"):
        near = event.time is not None and one.time is not None and 0 <= event.time - one.time <= t.ima_oom_s
        if one.order < event.order and near and not one.data.get("benign") and side(obs, one) in ("engine", ""):
            ago = span((event.time or 0.0) - (one.time or 0.0))
            return f"an out-of-memory line stands {ago} before it", (of_event(one),)
    if fault.free_gb is not None and fault.free_gb < t.ima_free_gb and fault.free_at is not None:
        return f"only {num(fault.free_gb)} GB were free before it", (of_event(fault.free_at),)
    return None


def _memory_excluded(rows: Sequence[Row]) -> bool:
    """Bisection runs show that the memory fraction does not matter, or that a higher one is clean."""
    failed = [row.fields for row in rows if str(row.fields.get("outcome")) in ("ima", "oom", "hang")]
    clean = [row.fields for row in rows if str(row.fields.get("outcome")) == "ok"]
    fractions = {value for one in failed if (value := _fraction(one)) is not None}
    if len(fractions) > 1:
        return True
    highest = max(fractions, default=None)
    return highest is not None and any((_fraction(one) or 0.0) > highest for one in clean)


def _fraction(fields: Mapping[str, object]) -> float | None:
    """The memory fraction of a run under SGLang's, vLLM's or slime's name."""
    for name in ("mem_fraction", "mem_fraction_static", "gpu_memory_utilization", "sglang_mem_fraction_static"):
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _maybe(obs: Observations, t: Thresholds, fault: Fault, why: str, places: tuple[Evidence, ...]) -> Verdict:
    mapping = fires(obs, "cluster.gpu-mapping")
    test = "--sglang-mem-fraction-static 0.6 (as a test)"
    if fault.event.engine is not None and (mine := owned(obs, fault.event.engine)):
        test = f"rltop engine set mem_fraction_static=0.6 --engine {mine[0]} (as a test)"
    return Verdict(
        ENGINE,
        "warn",
        engine=fault.event.engine if fault.event.engine is not None else fault.event.actor or None,
        rank=fault.event.rank,
        value={"free_gb": fault.free_gb},
        threshold={"free_gb": t.ima_free_gb, "seconds": t.ima_oom_s},
        evidence=(of_event(fault.event), *places),
        cause=f"The illegal memory access may be memory: {why}. A run with more free memory decides.",
        advice=("see cluster.gpu-mapping first",) if mapping else (test,),
        confidence="low",
    )


# -- train.oom


def check_trainer(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the first fatal out-of-memory line of the trainer."""
    if obs.mode == "rollout-only" and not obs.events:
        return [Verdict(TRAINER, "skip", cause=NO_TRAINER)]
    if not obs.logs and not obs.events:
        return [Verdict(TRAINER, "skip", cause=missing(obs, "a log of the trainer"))]
    own = fatal_ooms(obs, "trainer")
    if own:
        return [_trainer(obs, own)]
    benign = [event for event in of_kind(obs, "memory_saver", "oom") if side(obs, event) in ("trainer", "")]
    cause = "The trainer did not run out of GPU memory."
    if benign:
        cause = "Out-of-memory lines of the memory saver or the allocator did not stop the run: they are benign."
    return [Verdict(TRAINER, "pass", cause=cause, evidence=tuple(of_event(event) for event in benign[:2]))]


def _trainer(obs: Observations, own: Sequence[LogEvent]) -> Verdict:
    event = own[0]
    tried, free = number(event, "tried_gb"), number(event, "free_gb")
    budget, parallel = obs.args.number("max_tokens_per_gpu"), context_parallel(obs)
    longest = _longest(obs, event.segment)
    tokens = _tokens_of_logits(obs, event, tried)
    value: dict[str, object] = {
        "tried_gb": tried,
        "free_gb": free,
        "tokens": tokens,
        "max_tokens_per_gpu": int(budget) if budget else None,
        "context_parallel_size": parallel,
        "longest": int(longest.value) if longest else None,
    }
    cause, sure = _story(obs, event, value, budget, longest)
    return Verdict(
        TRAINER,
        "fail",
        rollout=longest.step if longest else None,
        rank=event.rank,
        value=value,
        threshold={"tokens": int(budget * parallel)} if budget else "fits",
        evidence=(
            *(of_event(one) for one in own[:2]),
            *(of_points((longest,)) if longest else ()),
            *of_flags(obs.args, "max_tokens_per_gpu", "context_parallel_size", "use_dynamic_batch_size"),
        ),
        cause=cause,
        advice=_trainer_advice(obs, value, budget, longest, hidden=bool(event.repeated)),
        confidence=sure,
    )


def _longest(obs: Observations, segment: int) -> Point | None:
    """The longest sample of the newest rollout that tells one, of the run that the event belongs to where it does."""
    found: list[Point] = []
    for name in LONGEST:
        series = finite(points(obs, name, "rollout"))
        own = [point for point in series if point.segment == segment]
        found += (own or series)[-1:]
    newest = max((point.order[:2] for point in found), default=None)
    same = [point for point in found if point.order[:2] == newest]
    return max(same, key=lambda point: point.value, default=None)


def _tokens_of_logits(obs: Observations, event: LogEvent, tried: float | None) -> int | None:
    """Tokens whose fp32 logits are as large as the allocation: bytes x TP / (vocabulary x 4)."""
    vocab = vocabulary(obs)
    text = "\n".join((*frames(event), event.text))
    if not tried or not vocab or not _LOGITS.search(text):
        return None
    tensor_parallel = max(1.0, obs.args.number("tensor_model_parallel_size") or 1.0)
    return round(tried * GIB * tensor_parallel / (vocab * 4))


def _story(
    obs: Observations, event: LogEvent, value: dict[str, object], budget: float | None, longest: Point | None
) -> tuple[str, Confidence]:
    tokens = value["tokens"]
    cause = f"{who(event)} ran out of GPU memory"
    if value["tried_gb"] is not None:
        cause += f" when it asked for {value['tried_gb']:g} GiB"
    if tokens:
        cause += f", which are the fp32 logits of {tokens} tokens"
    parallel = int(str(value["context_parallel_size"]))
    if budget:
        cause += f"; max_tokens_per_gpu is {budget:g}, context parallelism {parallel}"
    if longest is None:
        return f"{cause}.", "high" if tokens else "medium"
    cause += f", and the longest sample of rollout {longest.step} has {longest.value:g} tokens"
    if budget and longest.value > budget * parallel:
        cause += ": the budget is no hard cap, one sample that is longer gets a micro-batch of its own"
    return f"{cause}.", "high"


def _trainer_advice(
    obs: Observations, value: dict[str, object], budget: float | None, longest: Point | None, *, hidden: bool
) -> tuple[str, ...]:
    parallel = int(str(value["context_parallel_size"]))
    length = obs.args.number("rollout_max_response_len")
    wider = f"--context-parallel-size {2 * parallel} (or more)"
    dedup = (DEDUP,) if hidden else ()
    if budget and longest and longest.value > budget * parallel:
        cap = f" to {budget * parallel:g} tokens" if budget else ""
        return (f"limit turns or the total length of a sample{cap}", wider, *dedup)
    start = f"{int(length // parallel)}" if length else "<rollout_max_response_len / cp>"
    smaller = f"--max-tokens-per-gpu {start}"
    if budget and length and length // parallel >= budget:
        smaller = f"--max-tokens-per-gpu {int(budget // 2)}"
    dynamic = () if obs.args.on("use_dynamic_batch_size") else ("--use-dynamic-batch-size",)
    return (*dynamic, smaller, wider, "limit turns or the total length of a sample", *dedup)
