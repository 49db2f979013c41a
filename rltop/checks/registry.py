"""Which function is the rule of which check. An id of the catalogue without one is reported as `skip`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rltop.checks.observe import Observations
from rltop.checks.rules import (
    args_batch,
    args_debug,
    args_effective,
    args_kernels,
    args_token_budget,
    ckpt_files,
    ckpt_load,
    cluster_gpus,
    cluster_restarts,
    cluster_stall,
    dump_rules,
    engine_bisect,
    engine_death,
    engine_order,
    engine_start,
    gpu_fault,
    gpu_memory,
    host_cache,
    host_proxy,
    host_unexplained,
    input_parse,
    kl_on_policy,
    launch,
    logprob_drift,
    logprob_gap,
    logprob_magnitude,
    logprob_outliers,
    logprob_ref,
    quant_map,
    reward_flat,
    rollout_length,
    rollout_text,
    stop_set,
    train_collapse,
    train_collective,
    train_grad,
    train_nan,
    train_replay,
    train_skipped,
    train_swap,
    train_zero,
    weights_frozen,
    weights_garble,
    weights_update,
    weights_version,
)
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

RuleFunction = Callable[[Observations, Thresholds], Iterable[Verdict]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: pure, no clock, no I/O. It never raises for odd input; if it does, its check becomes `skip`."""

    id: str
    function: RuleFunction
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it reads; one that ends in `/` is a prefix. A bounded source keeps only these."""
    newest: tuple[str, ...] = ()
    """Names, of which the first that was ever a number is what its pass speaks of: a number of earlier steps is no pass
    while the newest value is NaN or Inf. Not for rules about the first step alone."""
    stage: int = 0
    """Rules of a later stage see the verdicts of the earlier ones (`Observations.verdicts`): 1 for a rule that asks
    whether another check fires, later ones for what is left when the others have spoken."""


_LOG_PROBS = train_nan.ROLLOUT_METRICS
_MAGNITUDE = ("rollout/log_probs", "rollout/ref_log_probs", "rollout/rollout_log_probs")
_NORM = (train_grad.NORM,)
_GAP = (logprob_gap.METRIC, "rollout/log_probs")
_SCALE = (train_grad.NORM, "train/loss", "train/ppo_kl", logprob_gap.METRIC, *train_grad.TOKENS)

RULES: tuple[Rule, ...] = (
    Rule("args.batch", args_batch.check),
    Rule("args.token-budget", args_token_budget.check),
    Rule("args.kernels", args_kernels.check, stage=args_kernels.STAGE),
    Rule("args.debug-flags", args_debug.check),
    Rule("args.effective", args_effective.check),
    Rule("args.entrypoint", launch.check),
    Rule("host.inductor-cache", host_cache.check_inductor),
    Rule("host.hf-cache-race", host_cache.check_hf),
    Rule("host.proxy", host_proxy.check),
    Rule("host.unexplained", host_unexplained.check, stage=host_unexplained.STAGE),
    Rule("cluster.stall", cluster_stall.check),
    Rule("cluster.restarts", cluster_restarts.check),
    Rule("engine.port", engine_start.check_port, stage=engine_start.PORT_STAGE),
    Rule("engine.not-ready", engine_start.check_not_ready),
    Rule("engine.died", engine_death.check_died, stage=engine_death.DIED_STAGE),
    Rule("engine.health-timeout", engine_death.check_slow),
    Rule("engine.oom", gpu_memory.check_engine, stage=gpu_memory.ENGINE_STAGE),
    Rule("engine.ima", gpu_fault.check_engine),
    Rule("train.skipped-steps", train_skipped.check, (train_skipped.NORM, train_skipped.TOLD)),
    Rule("train.oom", gpu_memory.check_trainer, gpu_memory.LONGEST),
    Rule("train.colocate-swap", train_swap.check),
    Rule("train.ima", gpu_fault.check_trainer),
    Rule("train.collective", train_collective.check),
    Rule(
        "train.collapse",
        train_collapse.check,
        (*train_collapse.REWARD, *train_collapse.KL, *train_collapse.ENTROPY, *train_collapse.REPETITION),
        newest=train_collapse.REWARD,
        stage=train_collapse.STAGE,
    ),
    Rule(
        "logprob.drift",
        logprob_drift.check,
        (logprob_gap.METRIC, "rollout/log_probs", "rollout/rollout_log_probs", *logprob_drift.MULTIPLICATIVE),
        newest=_GAP,
    ),
    Rule("input.parse", input_parse.check),
    Rule("train.nan", train_nan.check, (*train_nan.STEP_METRICS, *_LOG_PROBS, train_nan.STEP_SKIPPED)),
    Rule("train.grad-scale", train_grad.check_scale, _SCALE, newest=_NORM),
    Rule("train.grad-high", train_grad.check_high, (*_SCALE, *_MAGNITUDE), newest=_NORM),
    Rule("train.grad-zero", train_zero.check, (train_grad.NORM, "train/loss", train_zero.ZERO_STD), newest=_NORM),
    Rule("train.replay", train_replay.check, train_replay.METRICS),
    Rule(
        "kl.on-policy",
        kl_on_policy.check,
        ("train/ppo_kl", "train/pg_clipfrac", "train/probs_ratio", "rollout/log_probs"),
        newest=("train/ppo_kl",),
    ),
    Rule(
        "logprob.ref-equal",
        logprob_ref.check,
        ("rollout/log_probs", "rollout/ref_log_probs", "train/kl_loss", "train/loss", logprob_ref.TOKENS),
    ),
    Rule("logprob.magnitude", logprob_magnitude.check, _MAGNITUDE),
    Rule(
        "logprob.train-rollout",
        logprob_gap.check,
        (logprob_gap.METRIC, "rollout/log_probs", "rollout/rollout_log_probs"),
        newest=_GAP,
        stage=1,
    ),
    Rule("rollout.text", rollout_text.check),
    Rule("cluster.placement", cluster_gpus.check_placement),
    Rule("cluster.gpu-mapping", cluster_gpus.check_mapping),
    Rule("ckpt.loaded", ckpt_load.check_loaded),
    Rule("ckpt.resume", ckpt_load.check_resume),
    Rule("ckpt.shards", ckpt_files.check_shards),
    Rule("ckpt.layers", ckpt_files.check_layers),
    Rule("quant.map", quant_map.check),
    Rule("quant.bad-scale", quant_map.check_scales),
    Rule("weights.sync-garble", weights_garble.check, weights_garble.METRICS, stage=1),
    Rule("weights.compare", weights_update.check_compare, stage=1),
    Rule("weights.update-failed", weights_update.check_failed),
    Rule("weights.frozen", weights_frozen.check, (weights_frozen.NORM, weights_frozen.RATE, logprob_gap.METRIC)),
    Rule("weights.mixed-version", weights_version.check_mixed),
    Rule("weights.resume-stale", weights_version.check_stale, (logprob_gap.METRIC, weights_version.REWARD)),
    Rule("engine.resume-order", engine_order.check_order),
    Rule("engine.stale-kv", engine_order.check_cache),
    Rule("engine.bisect", engine_bisect.check, stage=1),
    Rule("logprob.outliers", logprob_outliers.check, logprob_outliers.METRICS),
    Rule(
        "rollout.truncated",
        rollout_length.check_truncated,
        (*rollout_length.RATIO, *rollout_length.LONGEST),
        newest=rollout_length.RATIO,
        stage=1,
    ),
    Rule("rollout.stop-set", stop_set.check, rollout_length.RATIO),
    Rule("rollout.len-over-cap", rollout_length.check_over, (*rollout_length.LONGEST, *rollout_length.CAP_METRICS)),
    Rule(
        "rollout.reward-flat",
        reward_flat.check,
        (reward_flat.REWARD, reward_flat.ZERO_STD),
        newest=(reward_flat.REWARD,),
        stage=2,
    ),
    Rule("dump.join", dump_rules.check_join),
    Rule("dump.foreign-class", dump_rules.check_foreign),
    Rule("dump.routing-field", dump_rules.check_routing),
    Rule("dump.size", dump_rules.check_size),
)
"""All rules."""


def metric_names(rules: Iterable[Rule] = RULES) -> tuple[frozenset[str], tuple[str, ...]]:
    """(exact names, prefixes) of the metrics that any rule reads."""
    names = {name for rule in rules for name in rule.metrics}
    prefixes = {name for name in names if name.endswith("/")}
    return frozenset(names - prefixes), tuple(sorted(prefixes))
