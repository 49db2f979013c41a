"""What the arguments say about the run, where several rules ask."""

from __future__ import annotations

import re

from rltop.checks.observe import Observations
from rltop.checks.verdict import FIRING, Verdict

_BASE_MODEL = re.compile(r"(?:^|[-_/.])(?:base|pretrain(?:ed)?|pt)(?:[-_/.]|$)", re.IGNORECASE)
_LOW_PRECISION = re.compile(r"fp8|int4|w4a16|awq|gptq|nvfp4|mxfp4|e4m3", re.IGNORECASE)
_QUANTISED_ROLLOUT = ("sglang_quantization", "rollout_quantization", "sglang_kv_cache_dtype", "hf_checkpoint")


def pretrained(obs: Observations) -> bool:
    """The model's path names a base model, which follows no chat template."""
    return any(_BASE_MODEL.search(obs.args.text(name)) for name in ("hf_checkpoint", "ref_load"))


def quantised_rollout(obs: Observations) -> bool:
    """The engines run FP8 or INT4 weights or cache while the trainer does not."""
    flag = any(obs.args.on(name) for name in ("fp8_rollout", "rollout_fp8", "int4_rollout"))
    return flag or any(_LOW_PRECISION.search(obs.args.text(name)) for name in _QUANTISED_ROLLOUT)


def mixture_of_experts(obs: Observations) -> bool:
    """More than one expert."""
    return any((obs.args.number(name) or 0) > 1 for name in ("num_experts", "num_moe_experts"))


def routing_replay(obs: Observations) -> bool:
    """The actor replays recorded expert routes; the reference routes by itself."""
    return any(obs.args.on(name) for name in ("use_routing_replay", "use_rollout_routing_replay"))


def context_parallel(obs: Observations) -> int:
    """Context parallel size, at least 1."""
    return max(1, int(obs.args.number("context_parallel_size") or 1))


def low_rank(obs: Observations) -> bool:
    """LoRA or another adapter: actor and reference are different models by design."""
    return any(obs.args.on(name) for name in ("lora_rank", "use_lora", "lora_r"))


def exp_estimator(obs: Observations) -> bool:
    """The KL loss exponentiates the log-ratio, so one outlier can overflow it."""
    return obs.args.text("kl_loss_type") in ("low_var_kl", "k3")


def fires(obs: Observations, *ids: str) -> tuple[Verdict, ...]:
    """Warn and fail verdicts of these checks, or areas (`weights.*`), among those of the stages before."""
    return tuple(
        verdict
        for verdict in obs.verdicts
        if verdict.status in FIRING
        and any(verdict.id == id or (id.endswith(".*") and verdict.id.startswith(id[:-1])) for id in ids)  # noqa: A001
    )


NO_TRAINER = "rollout-only mode has no trainer"
"""Cause of a skip."""
