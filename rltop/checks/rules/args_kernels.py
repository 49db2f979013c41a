"""`args.kernels`: kernel flags that break the step-1 checks.

A rule of the second stage: a flag that only makes two forwards differ is worth a warning when they do differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from rltop.checks.events import of_kind
from rltop.checks.facts import (
    NO_TRAINER,
    context_parallel,
    fires,
    flash_attention_3,
    latent_attention,
    mixture_of_experts,
)
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event, of_flags
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Status, Verdict

ID = "args.kernels"
STAGE = 1


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per finding: expert permute, attention under context parallelism, flash attention on MLA."""
    args = obs.args
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    if not args.flags:
        return [Verdict(ID, "skip", cause=missing(obs, "the arguments of the trainer"))]
    if args.framework == "verl":
        return [Verdict(ID, "skip", cause="the rule knows Megatron's flags; verl passes them in its own way")]
    found = [*_latent(obs), *_permute(obs), *_context(obs)]
    if found:
        return found
    flags = of_flags(args, "moe_permute_fusion", "attention_backend")
    return [Verdict(ID, "pass", evidence=flags, cause="No kernel flag is known to break the step-1 checks.")]


def _permute(obs: Observations) -> list[Verdict]:
    if not mixture_of_experts(obs) or obs.args.on("moe_permute_fusion"):
        return []
    firing = fires(obs, "kl.on-policy")
    cause = (
        "A mixture-of-experts model trains without --moe-permute-fusion: the unfused expert permute is not "
        "deterministic, so two forwards over the same weights differ"
    )
    cause += " and ppo_kl is not 0 at the on-policy step." if firing else "; kl.on-policy does not show it so far."
    first = firing[0] if firing else None
    return [
        Verdict(
            ID,
            "warn" if first else "info",
            rollout=first.rollout if first else None,
            step=first.step if first else None,
            value={"moe_permute_fusion": False},
            threshold=True,
            evidence=of_flags(obs.args, "num_experts", "moe_router_topk") + (first.evidence[:2] if first else ()),
            cause=cause,
            advice=("--moe-permute-fusion",),
        )
    ]


def _context(obs: Observations) -> list[Verdict]:
    size = context_parallel(obs)
    if size <= 1 or obs.args.text("attention_backend") == "flash":
        return []
    firing = fires(obs, "logprob.ref-equal")
    barred = latent_attention(obs) and flash_attention_3(obs) is not True
    status: Status = "warn" if firing else "info"
    cause = f"Context parallelism is {size} without --attention-backend flash"
    if firing:
        cause += (
            ": attention may be what makes actor and reference differ, as other backends are not deterministic there."
        )
    else:
        cause += ": other backends are not always deterministic there; logprob.ref-equal does not show it so far."
    advice = ("--attention-backend flash",)
    if barred:
        cause += " Flash attention is no way out here: the model has latent attention (MLA) and no FlashAttention 3."
        advice = ("--deterministic-mode (as a test)",)
    confidence: Confidence = "low"
    return [
        Verdict(
            ID,
            status,
            threshold="flash",
            value={"context_parallel_size": size, "attention_backend": obs.args.text("attention_backend") or "auto"},
            evidence=of_flags(obs.args, "context_parallel_size", "attention_backend"),
            cause=cause,
            advice=advice if firing or not barred else (),
            confidence=confidence,
        )
    ]


def _latent(obs: Observations) -> list[Verdict]:
    refused = of_kind(obs, "no_attention")
    if obs.args.text("attention_backend") != "flash" or not latent_attention(obs):
        return []
    trained = any(row.axis == "train" for row in obs.metrics)  # a step was done, so a backend is there
    if (flash_attention_3(obs) or trained) and not refused:
        return []
    cause = (
        "--attention-backend flash on a model with latent attention (MLA): the flag switches the fused and unfused "
        "backends off, and FlashAttention 2 refuses query heads that are larger than value heads"
    )
    cause += (
        "; the log says that no attention backend is left." if refused else "; without FlashAttention 3 none is left."
    )
    return [
        Verdict(
            ID,
            "fail" if refused else "warn",
            value={"attention_backend": "flash", "flash_attention_3": bool(flash_attention_3(obs))},
            threshold="auto or fused",
            evidence=(
                *of_flags(obs.args, "attention_backend", "multi_latent_attention"),
                *(of_event(event) for event in refused[:2]),
            ),
            cause=cause,
            advice=("--attention-backend auto (or fused)", "or install FlashAttention 3"),
        )
    ]
