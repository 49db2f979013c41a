"""The metrics that slime would log for a dump, computed from its samples one by one, and a table of its groups.

Names and formulas are slime's: `rollout/*` and `perf/*` of `slime/observability/rollout_metrics.py` (the old
`display_debug_rollout_data` printed the same), `passrate/*` of `metric_utils.py`, and the trainer's means of
`train_metric_utils.py`, which need a train dump. Pure: no file, no clock. A metric whose fields the samples lack is
absent; what can never come from a dump is listed in `absent`.
"""

from __future__ import annotations

import math
import statistics
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rltop.evidence.dump_sample import DumpSample, DumpTensor
from rltop.evidence.samples import reward_key_of

REPETITION_TAIL = 10_000
"""Characters at the end of a response that slime compresses; a response that is not longer never counts."""
REPETITION_RATIO = 10.0
MOST_PROMPT = 200
_REQUEST = {
    "request/e2e_latency": "e2e_latency",
    "request/queue_time": "queue_time",
    "decode/throughput": "decode_throughput",
    "prefill/bootstrap_queue_duration": "pd_prefill_bootstrap_queue_duration",
    "prefill/bootstrap_duration": "pd_prefill_bootstrap_duration",
    "prefill/alloc_wait_duration": "pd_prefill_alloc_wait_duration",
    "prefill/forward_duration": "pd_prefill_forward_duration",
    "prefill/transfer_queue_duration": "pd_prefill_transfer_queue_duration",
    "prefill/transfer_speed_gb_s": "pd_transfer_speed_gb_s",
    "prefill/transfer_total_mb": "pd_transfer_total_mb",
    "prefill/retry_count": "pd_prefill_retry_count",
    "decode/prealloc_duration": "pd_decode_prealloc_duration",
    "decode/bootstrap_duration": "pd_decode_bootstrap_duration",
    "decode/alloc_wait_duration": "pd_decode_alloc_wait_duration",
    "decode/transfer_duration": "pd_decode_transfer_duration",
    "decode/forward_duration": "pd_decode_forward_duration",
}
"""slime's name below `perf/` -> attribute of the end of a `sglang_generate` span."""
_LOG_PROBS = ("rollout_log_probs", "log_probs", "ref_log_probs")


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    key: object
    """`group_index`, or the number of the prompt where the dump has none."""
    prompt: str
    count: int = 0
    """Samples."""
    rewards: array[float] = field(default_factory=lambda: array("d"))
    """Of those that have one."""
    first: Any = None
    """Reward of the first sample as it was saved, which slime's `zero_std` is named after."""
    lengths: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """One line of the table; std is the population's, as GRPO's advantages use it. A NaN makes all of them NaN."""
        known = self.rewards
        nan = any(math.isnan(one) for one in known)
        return {
            "group": self.key,
            "samples": self.count,
            "without_reward": self.count - len(known),
            "reward_mean": statistics.fmean(known) if known else None,
            "reward_std": spread(known),
            "reward_min": math.nan if nan else min(known, default=None),
            "reward_max": math.nan if nan else max(known, default=None),
            "response_length_mean": self.lengths / self.count,
            "truncated": self.statuses["truncated"],
            "statuses": dict(self.statuses),
            "prompt": self.prompt,
        }


class DumpStats:
    """Feed it the samples of one dump; it keeps numbers of each, no texts."""

    def __init__(
        self,
        *,
        is_eval: bool = False,
        reward_key: str | None = None,
        log_reward_category: str | None = None,
        rollout_time_s: float | None = None,
        rollout_num_gpus: int | None = None,
    ) -> None:
        """Arguments: slime's of the same names; what a dump does not say."""
        self._is_eval = is_eval
        self._reward_key, self._category = reward_key, log_reward_category
        self._time_s, self._gpus = rollout_time_s, rollout_num_gpus
        self._sets: dict[str, _Set] = {}
        self.no_samples: list[tuple[int, str]] = []
        """(place, why) of entries that are no samples."""

    @property
    def count(self) -> int:
        """Samples so far."""
        return sum(one.count for one in self._sets.values())

    def add(self, sample: DumpSample, trained: DumpSample | None = None) -> None:
        """The next sample. trained: its entry in the train dump."""
        if sample.problem:
            self.no_samples.append((sample.at, sample.problem))
            return
        name = str(sample.extra.get("dataset") or "all") if self._is_eval else ""
        found = self._sets.get(name)
        if found is None:
            found = self._sets[name] = _Set(self._reward_key, self._category)
        found.add(sample, trained)

    def metrics(self) -> dict[str, float]:
        """Name -> value, in slime's order. Of an evaluation the names are `eval/{dataset}/…`; without the name of the
        data set (slime does not save it) `all`."""
        if not self._is_eval:
            one = self._sets.get("")
            if one is None:
                return {}
            named = {f"rollout/{name}": value for name, value in one.metrics().items()}
            named |= {f"perf/{name}": value for name, value in one.perf(self._time_s, self._gpus).items()}
            return named | one.passrate("passrate/") | one.trainer()
        found: dict[str, float] = {}
        for name, one in self._sets.items():
            if one.rewards:
                found[f"eval/{name}"] = statistics.fmean(one.rewards)
            found |= {f"eval/{name}/{key}": value for key, value in one.metrics().items()}
            if "truncated_ratio" in one.metrics():
                found[f"eval/{name}-truncated_ratio"] = one.metrics()["truncated_ratio"]
            found |= one.passrate(f"eval/{name}-")
        return found

    def absent(self) -> dict[str, str]:
        """Metrics of slime that this dump cannot give, and why."""
        found = {}
        if not self._is_eval and self._time_s is None:
            found["perf/rollout_time"] = "the dump does not say how long it took: --rollout-time SECONDS"
            found["perf/tokens_per_gpu_per_sec"] = "needs --rollout-time and --rollout-num-gpus"
        if self._sets and not any(one.rewards for one in self._sets.values()):
            found["rollout/raw_reward"] = "no sample has a reward that is a number: --reward-key KEY"
        return found

    def remarks(self) -> list[str]:
        """What was left out of the numbers, and what slime would not take as it is."""
        found = []
        sets = self._sets.values()
        if self.no_samples:
            at, why = self.no_samples[0]
            found.append(f"{len(self.no_samples)} entries are no samples and left out: entry {at}, {why}")
        if none := sum(one.count - len(one.rewards) for one in sets):
            found.append(
                f"{none} of {self.count} samples have no reward that is a number: they are left out of means and "
                "groups; slime would fail on them"
            )
        if odd := sum(not math.isfinite(reward) for one in sets for reward in one.rewards):
            found.append(
                f"{odd} rewards are NaN or Inf: the mean is too, as slime logs it, and so is every advantage of their "
                "groups"
            )
        for key, count in sum((one.keys for one in sets), Counter[str]()).items():
            found.append(f"{count} rewards are maps, of which {key!r} counts: slime takes --reward-key KEY for it")
        return found

    def groups(self) -> list[Group]:
        """The groups, in the order of the dump."""
        return [group for one in self._sets.values() for group in one.groups.values()]


class _Set:
    """The samples of a rollout, or of one data set of an evaluation."""

    def __init__(self, reward_key: str | None, category: str | None) -> None:
        self._reward_key, self._category = reward_key, category
        self.count = 0
        self.rewards = array("d")
        self.keys: Counter[str] = Counter()
        """Keys that were taken of maps of rewards, where nobody named one."""
        self.groups: dict[object, Group] = {}
        self._prompts: dict[int, int] = {}
        self._effective, self._lengths, self._totals = array("q"), array("q"), array("q")
        self._waits = array("d")
        self._repeated = 0
        self._statuses: Counter[str] = Counter()
        self._spec: list[float] = [0.0, 0.0]
        self._has_spec = False
        self._cached = self._asked = self._has_cache = 0
        self._categories: Counter[str] = Counter()
        self._kept = self._kept_of = 0
        self._requests: dict[str, array[float]] = {}
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, sample: DumpSample, trained: DumpSample | None) -> None:
        self.count += 1
        raw, reward = self._reward(sample)
        if reward is not None:
            self.rewards.append(reward)
        length = _length(sample)
        self._lengths.append(length)
        effective = sample.effective_length
        self._effective.append(length if effective is None else effective)
        if sample.tokens is not None:
            self._totals.append(len(sample.tokens))
        status = sample.status or "?"
        self._statuses[status] += 1
        self._repeated += is_repetition(sample.response or "")
        self._group(sample, raw, reward, length, status)
        self._of_extra(sample)
        self._log_probs(sample, trained)

    def metrics(self) -> dict[str, float]:
        """What slime computes from the samples, below `rollout/` or `eval/{dataset}/`."""
        found = _statistics("response_len", self._effective)
        zero = Counter(
            str(round(group.first, 1))
            for group in self.groups.values()
            if _is_number(group.first)
            and len(group.rewards) == group.count
            and all(one == group.rewards[0] for one in group.rewards)
        )
        found |= {f"zero_std/count_{reward}": count for reward, count in zero.items()}
        if self._has_spec:
            found["spec_accept_rate"] = self._spec[0] / self.count
            found["spec_accept_length"] = self._spec[1] / self.count
        if self._has_cache:
            found["prefix_cache_hit_rate"] = self._cached / self._asked if self._asked else 0.0
            found["avg_cached_tokens_per_sample"] = self._cached / self.count
        found |= {f"error_cat/{name}": count / self.count for name, count in self._categories.items()}
        if self._kept_of:
            found["top_p_kept_vocab_per_token"] = self._kept / self._kept_of
        if self.count:
            found["repetition_frac"] = self._repeated / self.count
        if set(self._statuses) != {"?"}:
            found["truncated_ratio"] = self._statuses["truncated"] / max(self.count, 1)
        return found

    def perf(self, time_s: float | None, gpus: int | None) -> dict[str, float]:
        """What slime logs below `perf/`; without the time only what the samples hold."""
        found: dict[str, float] = {}
        waited = max(self._waits, default=0.0) > 0 and len(self._waits) == self.count
        if time_s is not None:
            found["rollout_time"] = time_s
        if waited:
            found |= _statistics("non_generation_time", self._waits)
        for key, lengths in (("", self._lengths), ("effective_", self._effective)):
            if time_s is None or time_s <= 0 or not lengths:
                continue
            longest = max(lengths)
            if gpus:
                found[f"{key}tokens_per_gpu_per_sec"] = sum(lengths) / time_s / gpus
            found[f"longest_{key}sample_tokens_per_sec"] = longest / time_s
            if waited:
                wait = statistics.fmean(w for w, n in zip(self._waits, lengths, strict=True) if n == longest)
                found[f"longest_{key}sample_non_generation_time"] = wait
                if time_s > wait:
                    name = f"longest_{key}sample_tokens_per_sec_without_non_generation"
                    found[name] = longest / (time_s - wait)
        for name, values in self._requests.items():
            found |= _statistics(name, values)
        return found

    def passrate(self, prefix: str) -> dict[str, float]:
        """pass@1, 2, 4, …: the unbiased estimate, a reward of exactly 1 is right. Only for groups of one size."""
        sizes = {group.count for group in self.groups.values()}
        if len(sizes) != 1 or (size := sizes.pop()) < 2 or len(self.rewards) != self.count:
            return {}
        right = [sum(one == 1 for one in group.rewards) for group in self.groups.values()]
        return {
            f"{prefix}pass@{k}": statistics.fmean(_pass_at(size, correct, k) for correct in right)
            for k in (1 << at for at in range(size.bit_length()))
        }

    def trainer(self) -> dict[str, float]:
        """What the trainer logs: of the samples where they say it, of log-probs where a train dump has them."""
        found: dict[str, float] = {}
        if self.rewards:
            found["rollout/raw_reward"] = statistics.fmean(self.rewards)
        if self._lengths:
            found["rollout/response_lengths"] = statistics.fmean(self._lengths)
        if self._totals:
            found["rollout/total_lengths"] = statistics.fmean(self._totals)
        if "truncated_ratio" in self.metrics():
            found["rollout/truncated"] = self.metrics()["truncated_ratio"]
        found |= {name: total / count for name, (total, count) in self._sums.items() if count}
        return found

    # -- one sample

    def _reward(self, sample: DumpSample) -> tuple[Any, float | None]:
        """(as saved, as a number)."""
        raw: Any = sample.reward
        if self._reward_key is not None:
            raw = raw.get(self._reward_key) if isinstance(raw, Mapping) else None
        elif isinstance(raw, Mapping):
            self.keys.update([str(key)] if (key := reward_key_of(raw)) is not None else [])
            raw = sample.score
        return raw, float(raw) if _is_number(raw) else None

    def _group(self, sample: DumpSample, raw: Any, reward: float | None, length: int, status: str) -> None:
        key: object = sample.group_index
        if key is None:
            key = self._prompts.setdefault(zlib.crc32((sample.prompt or "").encode()), len(self._prompts))
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(key, (sample.prompt or "")[:MOST_PROMPT], first=raw)
        group.count += 1
        if reward is not None:
            group.rewards.append(reward)
        group.lengths += length
        group.statuses[status] += 1

    def _of_extra(self, sample: DumpSample) -> None:
        extra = sample.extra
        if _is_number(wait := extra.get("non_generation_time")):
            self._waits.append(wait)
        spec = extra.get("spec_info")
        if isinstance(spec, Mapping) and spec.get("spec_verify_ct"):
            self._has_spec = True
            drafted = _count(spec, "spec_draft_token_num")
            self._spec[0] += _count(spec, "spec_accept_token_num") / drafted if drafted else 0.0
            self._spec[1] += _count(spec, "completion_token_num") / (_count(spec, "spec_verify_ct") or 1)
        cache = extra.get("prefix_cache_info")
        if isinstance(cache, Mapping):
            self._has_cache += 1
            self._cached += int(_count(cache, "cached_tokens"))
            self._asked += int(_count(cache, "total_prompt_tokens"))
        if self._category is not None and isinstance(sample.reward, Mapping):
            self._categories[str(sample.reward.get(self._category))] += 1
        self._top_p(sample)
        trace = extra.get("trace")
        for event in trace.get("events") or () if isinstance(trace, Mapping) else ():
            if isinstance(event, Mapping) and (event.get("type"), event.get("name")) == ("span_end", "sglang_generate"):
                self._request(event.get("attrs"))

    def _request(self, attrs: object) -> None:
        if not isinstance(attrs, Mapping):
            return
        for name, key in _REQUEST.items():
            value = attrs.get(key)
            if _is_number(value) and math.isfinite(value):
                self._requests.setdefault(name, array("d")).append(value)

    def _top_p(self, sample: DumpSample) -> None:
        """Tokens of the vocabulary that top-p kept: differences of the offsets, where the loss mask counts."""
        offsets = numbers(sample.extra.get("rollout_top_p_token_offsets"))
        if not offsets or len(offsets) != _length(sample) + 1 or sample.extra.get("remove_sample"):
            return
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * (len(offsets) - 1)
        for before, after, counts in zip(offsets, offsets[1:], mask, strict=False):
            if counts:
                self._kept += int(after - before)
                self._kept_of += 1

    def _log_probs(self, sample: DumpSample, trained: DumpSample | None) -> None:
        """Sums over the tokens that the loss mask counts."""
        found = {name: getattr(sample, name) for name in _LOG_PROBS}
        if trained is not None:
            found |= {name: value for name in _LOG_PROBS[1:] if (value := getattr(trained, name)) is not None}
        mask = sample.loss_mask
        for name, values in found.items():
            if values:
                self._sum(f"rollout/{name}", masked(values, mask))
        ours, theirs = found["log_probs"], found["rollout_log_probs"]
        if ours and theirs and len(ours) == len(theirs):
            gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            self._sum("train/train_rollout_logprob_abs_diff", masked(gaps, mask))

    def _sum(self, name: str, values: Sequence[float]) -> None:
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + math.fsum(values), count + len(values)


def stats_of(samples: Iterable[DumpSample], *, is_eval: bool = False) -> dict[str, float]:
    """The metrics of some samples, without options."""
    found = DumpStats(is_eval=is_eval)
    for sample in samples:
        found.add(sample)
    return found.metrics()


def spread(rewards: Sequence[float]) -> float | None:
    """The population's standard deviation; NaN where one is not finite, None without any."""
    if not rewards:
        return None
    return statistics.pstdev(rewards) if all(map(math.isfinite, rewards)) else math.nan


def is_repetition(text: str) -> bool:
    """slime's `has_repetition`: the end of a long response that compresses more than ten times."""
    if len(text) <= REPETITION_TAIL:
        return False
    raw = text[-REPETITION_TAIL:].encode("utf-8", "replace")
    return len(raw) / len(zlib.compress(raw, 9)) > REPETITION_RATIO


def numbers(value: Any) -> Sequence[float]:
    """Numbers of a list or of a flat tensor; empty for anything else."""
    if isinstance(value, DumpTensor):
        return value.values()
    return value if isinstance(value, list) and all(map(_is_number, value)) else ()


def masked(values: Sequence[float], mask: Sequence[int] | None) -> Sequence[float]:
    """The values that a loss mask of the same length counts; all without one."""
    if mask is None or len(mask) != len(values):
        return values
    return [value for value, counts in zip(values, mask, strict=True) if counts]


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def _pass_at(size: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): Chen et al. 2021, as slime's `_estimate_pass_at_k`."""
    return 1.0 if size - correct < k else 1.0 - math.comb(size - correct, k) / math.comb(size, k)


def _length(sample: DumpSample) -> int:
    if sample.response_length is not None:
        return sample.response_length
    return len(sample.rollout_log_probs or sample.log_probs or ())


def _count(value: Mapping[str, Any], key: str) -> float:
    found = value.get(key)
    return found if _is_number(found) else 0.0


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
