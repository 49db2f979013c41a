"""`args.token-budget`: what `--max-tokens-per-gpu` and packing really do."""

from __future__ import annotations

from collections.abc import Iterable

from rltop.checks.facts import NO_TRAINER, context_parallel
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_flags
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ID = "args.token-budget"


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the budget, one on the dispatcher where it is replaced."""
    args = obs.args
    if not args.flags:
        return [Verdict(ID, "skip", cause=missing(obs, "the arguments"))]
    if args.framework == "verl":
        return [Verdict(ID, "skip", cause="--max-tokens-per-gpu is a flag of slime and its kin; this is verl")]
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    return [_budget(obs, t), *_dispatcher(obs)]


def _budget(obs: Observations, t: Thresholds) -> Verdict:
    args = obs.args
    # rltop's own trainer always packs up to the budget.
    dynamic = args.on("use_dynamic_batch_size") or args.framework == "rltop"
    budget = args.number("max_tokens_per_gpu")
    evidence = of_flags(args, "use_dynamic_batch_size", "max_tokens_per_gpu", "rollout_max_response_len")
    length, parallel = args.number("rollout_max_response_len"), context_parallel(obs)
    start = int(length // parallel) if length else None
    fix = f"--max-tokens-per-gpu {start}" if start else "--max-tokens-per-gpu <rollout_max_response_len / cp>"
    if dynamic and not budget and args.framework != "rltop":
        cause = "--use-dynamic-batch-size is given without --max-tokens-per-gpu: there is no budget to pack for."
        none: dict[str, object] = {"max_tokens_per_gpu": None}
        return Verdict(ID, "fail", value=none, threshold=start or "set", evidence=evidence, cause=cause, advice=(fix,))
    if budget and not dynamic:
        cause = (
            f"--max-tokens-per-gpu {budget:g} has no effect without --use-dynamic-batch-size: micro-batches hold "
            "--micro-batch-size samples of any length."
        )
        alone = {"max_tokens_per_gpu": int(budget)}
        return Verdict(
            ID,
            "warn",
            value=alone,
            threshold="--use-dynamic-batch-size",
            evidence=evidence,
            cause=cause,
            advice=("--use-dynamic-batch-size",),
        )
    if not budget:
        return Verdict(ID, "pass", cause="No token budget is set: micro-batches are counted in samples.")
    hard = (
        f"it is no hard cap: a sample of more than {budget:g} x {parallel} (context parallel) = {budget * parallel:g} "
        "tokens gets a micro-batch of its own"
    )
    value: dict[str, object] = {"max_tokens_per_gpu": int(budget), "context_parallel_size": parallel}
    if start is None:
        return Verdict(ID, "info", value=value, evidence=evidence, cause=f"The budget is {budget:g} tokens; {hard}.")
    ratio = budget / max(start, 1)
    cause = (
        f"The budget of {budget:g} tokens per GPU is {ratio:.2g} x the safe start value {length:g} // {parallel} = "
        f"{start}; {hard}."
    )
    value |= {"safe_start": start, "ratio": round(ratio, 3)}
    advice = (f"--max-tokens-per-gpu {start}, then raise it (only if the trainer runs out of memory)",)
    fine = ratio <= t.budget_ratio
    return Verdict(ID, "info", value=value, evidence=evidence, cause=cause, advice=() if fine else advice)


def _dispatcher(obs: Observations) -> list[Verdict]:
    if obs.args.text("moe_token_dispatcher_type") != "allgather":
        return []
    cause = "Sequences are always packed, so --moe-token-dispatcher-type allgather is replaced by alltoall."
    return [
        Verdict(
            ID,
            "info",
            value={"moe_token_dispatcher_type": "alltoall"},
            evidence=of_flags(obs.args, "moe_token_dispatcher_type"),
            cause=cause,
            advice=("--moe-token-dispatcher-type alltoall",),
        )
    ]
