"""All numbers that the rules compare with, in one table.

Defaults are those of the check catalogue; where it gives none, the docstring says whose choice the number is. Override
them in the configuration's `[checks.thresholds]`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltop.errors import RltopError


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """One field per number; log-probs and KL in nats, shares 0 to 1."""

    # -- args.token-budget
    budget_ratio: float = 2.0
    """Multiple of the safe start above which the token budget is worth lowering (rltop's choice: 1.1 is usual)."""

    # -- logprob.ref-equal
    ref_equal_tolerance: float = 1e-8
    """Largest difference of actor and reference that counts as equal. slime's own CI asserts 1e-8."""
    ref_equal_fail: float = 5e-3
    """Above: fail. Also the bound that routing replay is allowed."""

    # -- logprob.magnitude
    magnitude_warn: float = 0.7
    """|mean log-prob| of the first rollout from which prompts are suspect. slime's guide calls 0.8 slightly high."""
    magnitude_fail: float = 3.0
    """From here configuration or weights are wrong."""

    # -- logprob.train-rollout
    gap_warn: float = 0.1
    """Largest healthy mean |trainer - engine| per token at on-policy steps. slime's CI gate."""
    gap_fail: float = 1.0
    """Above: fail."""
    gap_moe_info: float = 0.5
    """Up to here a flat gap is an offset for mixture-of-experts models with natural routing."""
    gap_flat: float = 0.2
    """Last-quarter median within this share of the first-quarter median: the series is flat."""

    # -- kl.on-policy
    kl_tolerance: float = 1e-8
    """Largest |ppo_kl| at the on-policy step that counts as 0. slime's own CI asserts 1e-8."""
    kl_fail: float = 1e-2
    """Above: fail."""
    kl_ratio_tolerance: float = 1e-6
    """Largest deviation of probs_ratio from 1 at the on-policy step."""

    # -- train.grad-high
    grad_first_warn: float = 10.0
    """grad_norm of the first on-policy step of a run."""
    grad_first_fail: float = 1000.0
    """Above: fail."""
    grad_spike_factor: float = 10.0
    """A later step is a spike above this multiple of the median of the steps before it."""
    grad_spike_floor: float = 5.0
    """A spike is also above this."""
    grad_spike_window: int = 20
    """Steps before it whose median counts."""
    grad_spike_history: int = 5
    """Fewest steps before it (rltop's choice: the median of fewer is no level)."""
    grad_spike_recent: int = 50
    """A spike with this many steps after it is over (rltop's choice): pass, and the cause says when it was."""

    # -- train.grad-zero
    grad_zero_steps: int = 2
    """Steps in a row with grad_norm exactly 0."""

    # -- train.grad-scale
    scale_steps: int = 3
    """Fewest healthy steps."""
    scale_norm: float = 1e4
    """Smallest grad_norm of all of them."""
    scale_spread: float = 0.2
    """Largest coefficient of variation."""
    scale_loss: float = 10.0
    """Healthy: |loss| below."""
    scale_ppo_kl: float = 1e-3
    """Healthy: |ppo_kl| at most."""
    scale_recent: int = 50
    """Newest steps that are looked at (rltop's choice)."""
    scale_token_steps: int = 4
    """Fewest steps for the comparison with token counts."""
    scale_token_range: float = 2.0
    """Token counts per micro-batch vary at least by this factor."""
    scale_token_spread: float = 0.05
    """grad_norm / tokens varies less than this (range over mean)."""

    # -- train.skipped-steps
    skipped_row: int = 3
    """Skipped steps in a row from which the model does not learn."""
    skipped_share: float = 0.1
    """Above this share of the newest `skipped_window` steps too."""
    skipped_window: int = 50
    skipped_fp16_row: int = 10
    """fp16 overflows in a row that a falling loss scale explains."""

    # -- train.collapse
    collapse_rollouts: int = 10
    """Fewest rollouts, and the length of the best stretch."""
    collapse_recent: int = 5
    """Newest rollouts whose median reward counts."""
    collapse_drop: float = 0.5
    """Below this share of the best stretch's median."""
    collapse_kl_factor: float = 10.0
    """KL above this multiple of its median ..."""
    collapse_kl_floor: float = 1.0
    """... and above this."""
    collapse_entropy: float = 0.1
    """Entropy below this share of its start."""
    collapse_repetition: float = 0.5
    """repetition_frac above this."""

    # -- logprob.drift
    drift_factor: float = 2.0
    """Last-quarter median at least this multiple of the first-quarter median."""
    drift_rise: float = 0.01
    """And at least this much higher, nats per token."""
    drift_correlation: float = 0.7
    """Spearman's rank correlation with time, at least."""

    # -- cluster.stall
    stall_factor: float = 10.0
    """A phase that is open longer than this multiple of the median of the earlier ones ..."""
    stall_floor_s: float = 600.0
    """... and than this is a stall."""
    stall_history: int = 3
    """Fewest earlier ones."""
    stall_alone_s: float = 1800.0
    """Without history: probably a stall from here on."""
    stall_batch_s: float = 300.0
    """An engine with queued requests and no batch line for so long stands still."""

    # -- host.inductor-cache, host.hf-cache-race
    inductor_race_s: float = 10.0
    """Ranks that fail within so many seconds race for one cache entry (rltop's choice: all ranks compile at the same
    step, and a relaunch takes longer)."""
    hf_race_s: float = 5.0
    """Processes that fail within so many seconds race for one model-code cache."""

    # -- engine.not-ready, engine.died
    not_ready_s: float = 300.0
    """So long after all engines are ready a router without workers will never have any."""
    died_clear_rollouts: int = 6
    """An engine that rltop started again after a crash and that lasted for so many rollouts is no warning any more (as
    many as a fleet asks for before it forgets a crash) ..."""
    died_clear_s: float = 1800.0
    """... nor is one that has served for so long, where no rollouts are made."""

    # -- engine.health-timeout
    health_window_s: float = 30.0
    """Time limit of a health check where neither arguments nor the line say it (slime's default)."""

    # -- engine.oom
    ima_free_gb: float = 2.0
    """An illegal access with less free memory than this may be memory."""
    ima_oom_s: float = 60.0
    """And so may one with an out-of-memory line so many seconds before it."""

    # -- train.nan
    nan_kl_jump: float = 10.0
    """kl_loss above this multiple of the step before is the suspected source, with an exp-type estimator."""

    # -- rollout.text
    text_least_chars: int = 60
    """A shorter response is salad only if it cannot be decoded."""
    text_scripts: int = 4
    """Script families within 400 characters."""
    text_switch_share: float = 0.5
    """Word boundaries at which the script changes."""
    text_many_scripts: int = 6
    """So many families need fewer switches (rltop's choice): ..."""
    text_many_switch_share: float = 0.4
    """... this share of the word boundaries."""
    text_control_share: float = 0.02
    """U+FFFD and control characters above this share."""
    text_short_control_share: float = 0.1
    """The same in a response below `text_least_chars` (rltop's choice)."""
    text_undecoded_share: float = 0.05
    """Characters that a decoder left as bytes or marks (rltop's choice)."""
    text_third_share: float = 0.02
    """Letters of a third script and on, together with ... (rltop's choice)."""
    text_third_joined_share: float = 0.03
    """... scripts that follow each other without a space."""
    text_joined_share: float = 0.05
    """Scripts that follow each other without a space, alone (rltop's choice; 0 in 99 % of texts)."""
    text_babble_words: int = 20
    """Words before their variety is judged (rltop's choice)."""
    text_babble_distinct: float = 0.35
    """Distinct words per word up to which a text has few words (rltop's choice)."""
    text_babble_pairs: float = 1.6
    """Distinct neighbours per word from which few words follow each other freely (rltop's choice)."""
    text_stops_share: float = 0.35
    """Sentence punctuation among all but spaces (rltop's choice; prose has 2 to 8 %)."""
    text_stutter_share: float = 0.02
    """Runs of one comma, colon or semicolon among all characters (rltop's choice)."""
    text_disorder: float = -0.05
    """Log-odds from which Latin words stand in no order (rltop's choice: 0.5 % of excerpts of manuals lie above)."""
    text_least_words: int = 40
    """Latin words before their function words count."""
    text_function_share: float = 0.02
    """Fewer function words than this: no language."""
    text_latin_share: float = 0.5
    """Latin letters among all, before their words count (rltop's choice)."""
    text_structure: float = 0.08
    """From this share of digits, punctuation and line ends on a text is code, maths, data or a list (rltop's choice;
    prose has 2 to 7 %)."""
    text_repeat_share: float = 0.9
    """One character or token id from this share on."""
    text_unknown_coverage: float = 0.2
    """Letter sequences of a known language from which a text is one after all (rltop's choice)."""
    text_list_stops: float = 0.04
    """Punctuation from which such a text is a list of names (rltop's choice)."""
    text_repeat_least: int = 20
    """Of at least so many."""
    text_fail_share: float = 0.3
    """Salad or repeated responses among those of a rollout."""
    text_warn_share: float = 0.05
    """From here up to `text_fail_share`: warn."""
    text_first_share: float = 0.1
    """Responses whose first token does not belong."""

    # -- cluster.placement
    placement_wait_s: float = 120.0
    """Seconds that a job may wait for GPUs that are registered but not free."""

    # -- cluster.gpu-mapping
    gpu_foreign_gb: float = 1.0
    """Memory of somebody else's process on an own GPU, in GB, above which it is in the way."""

    # -- weights.frozen
    frozen_syncs: int = 4
    """Successful syncs over which a greedy answer, or the weight version, stays the same."""
    frozen_drift_factor: float = 2.0
    """The gap of trainer and engine grows at least by this over these syncs (as in logprob.drift)."""
    frozen_drift_rise: float = 0.01
    """And by this, in nats."""
    frozen_drift_correlation: float = 0.7
    """Rank correlation of the gap with time, at least."""

    # -- weights.mixed-version
    version_lag: int = 0
    """Weight versions that a sample may be behind the newest of its rollout."""
    version_lag_async: int = 1
    """The same where rollouts run beside training."""

    # -- weights.resume-stale
    stale_gap_factor: float = 5.0
    """The first gap after a resume above this multiple of its neighbours' median (and above `gap_warn`)."""
    stale_reward_share: float = 0.5
    """Or its reward below this share of its neighbours'."""

    # -- engine.bisect
    bisect_soak: float = 1.5
    """A clean run counts if it lasted this multiple of the longest failing one."""
    bisect_luck: float = 0.05
    """Largest probability that the clean runs are luck."""

    # -- logprob.outliers
    outlier_error: float = 2.0
    """Multiplicative error of a sequence above which it is an outlier."""
    outlier_warn: float = 0.05
    """Outliers among the sequences of a step, from here on: warn."""
    outlier_fail: float = 0.1
    """From here on, with the same prompts in two steps: fail."""
    outlier_same: float = 0.5
    """Jaccard index of two steps' outliers from which they are the same prompts."""
    outlier_spike: float = 10.0
    """A mean over sequences above this multiple of its median is a spike (rltop's choice)."""

    # -- rollout.truncated
    truncated_warn: float = 0.25
    """Share of responses that are cut at the cap."""
    truncated_fail: float = 0.9
    """From here on: fail."""

    # -- rollout.reward-flat
    reward_flat_rollouts: int = 2
    """Rollouts in a row without any spread of rewards."""

    # -- dump.size
    dump_field_share: float = 0.5
    """One field above this share of a dump's bytes."""

    recovered_rollouts: int = 20
    """So many good rollouts after the last bad one turn a text or gap warning into info; a fail stays, because a step
    was trained on those samples (rltop's choice)."""


DEFAULTS = Thresholds()
_TOO_LARGE = 1e300


def override(
    values: Mapping[str, object], *, where: str = "[checks.thresholds]", base: Thresholds = DEFAULTS
) -> Thresholds:
    """`base` with some numbers replaced.

    Raises RltopError for an unknown name (naming the closest one) and for a value that is not a finite number >= 0 or,
    where the default is an integer, not an integer.
    """
    fields = {field.name: type(getattr(base, field.name)) for field in dataclasses.fields(Thresholds)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(name.replace("-", "_"), fields, n=1, cutoff=0.4)
            raise RltopError(
                f"unknown threshold {name!r}",
                where=where,
                why=f"there are {len(fields)} thresholds; none has this name",
                do=f"did you mean {close[0]!r}?" if close else "see rltop/checks/thresholds.py for the names",
            )
        changes[name] = _number(name, value, fields[name], where)
    return dataclasses.replace(base, **changes)


def _number(name: str, value: object, kind: type, where: str) -> float:
    whole = kind is int
    if isinstance(value, int if whole else int | float) and not isinstance(value, bool) and 0 <= value < _TOO_LARGE:
        return int(value) if whole else float(value)
    raise RltopError(
        f"{name} must be {'a whole number' if whole else 'a number'} that is not negative",
        where=where,
        why=f"got {value!r}",
        do=f"{name} = {getattr(DEFAULTS, name)}",
    )
