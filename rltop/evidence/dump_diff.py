"""Two sets of samples compared prompt by prompt: where their responses part, and how rewards and log-probs differ.

Samples belong together by their prompt and, within a prompt, by their order (sampling has no better key). Log-probs are
compared over the tokens that both have in common, before they part: only there they are of the same thing. Pure.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.evidence.dump_sample import DumpSample

MOST_PROMPT = 200
CONTEXT = 40
"""Characters of the responses that are shown from where they part."""


@dataclass(slots=True)
class Prompt:
    """One prompt in both."""

    prompt: str
    places: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))
    rewards: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))
    pairs: list[Pair] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """One line: counts, mean rewards, where the first pair parts, the mean log-prob difference."""
        means = [statistics.fmean(known) if (known := [r for r in one if r == r]) else None for one in self.rewards]
        parted = [pair for pair in self.pairs if pair.at is not None]
        first = min(parted, key=lambda pair: pair.at or 0, default=None)
        gaps = [pair.log_prob_abs_diff for pair in self.pairs if pair.log_prob_abs_diff is not None]
        return {
            "prompt": self.prompt,
            "samples": [len(one) for one in self.places],
            "reward": means,
            "reward_diff": None if None in means else means[1] - means[0],  # type: ignore[operator]
            "same": sum(pair.at is None for pair in self.pairs),
            "pairs": len(self.pairs),
            "first": first.row() if first else None,
            "log_prob_abs_diff": statistics.fmean(gaps) if gaps else None,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt."""

    places: tuple[int, int]
    at: int | None
    """Token of the response at which they part, from 0 (a character where a dump has no ids); None: they do not."""
    tokens: tuple[int | None, int | None]
    """The token ids there; None: the response had ended."""
    texts: tuple[str, str]
    """What the responses go on with there, roughly: by the share of the tokens."""
    unit: str
    """`token` or `character`."""
    common: int
    log_prob_abs_diff: float | None
    """Mean over the common tokens of |log-prob of B - of A|, nats."""
    log_prob_max: float | None

    def row(self) -> dict[str, Any]:
        """As it is shown."""
        return {
            "samples": list(self.places),
            "at": self.at,
            "unit": self.unit,
            "tokens": list(self.tokens),
            "texts": list(self.texts),
            "log_prob_abs_diff": self.log_prob_abs_diff,
        }


class DumpDiff:
    """Feed it side A, then side B; a sample of A is asked for again when its pair is there."""

    def __init__(self, again: Callable[[int], DumpSample]) -> None:
        """again: the sample of side A by the number under which `add_a` took it."""
        self._again = again
        self.prompts: dict[bytes, Prompt] = {}
        self.only = [0, 0]
        """Samples of A and of B without a partner; of B known as it comes, of A at the end (`summary`)."""
        self.other_prompt_tokens = 0
        """Pairs whose prompts are the same text but other tokens: another tokenizer or chat template."""
        self._pairs = self._same = 0
        self._diffs = array("d")
        self._worst = 0.0

    def add_a(self, number: int, sample: DumpSample) -> None:
        """A sample of side A."""
        self._take(0, number, sample)

    def add_b(self, number: int, sample: DumpSample) -> None:
        """A sample of side B; all of A must be there."""
        prompt = self._take(1, number, sample)
        nth = len(prompt.places[1]) - 1
        if nth >= len(prompt.places[0]):
            self.only[1] += 1
            return
        other = self._again(prompt.places[0][nth])
        pair = pair_of((prompt.places[0][nth], number), other, sample)
        prompt.pairs.append(pair)
        self._pairs += 1
        self._same += pair.at is None
        self.other_prompt_tokens += _prompt_ids(other) != _prompt_ids(sample)
        if pair.log_prob_abs_diff is not None:
            self._diffs.append(pair.log_prob_abs_diff)
            self._worst = max(self._worst, pair.log_prob_max or 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """Prompts that both sides have, those that part earliest first."""
        both = [one.row() for one in self.prompts.values() if one.pairs]
        return sorted(both, key=lambda row: row["first"]["at"] if row["first"] else math.inf)

    def summary(self) -> dict[str, Any]:
        """What matters, before the table."""
        both = [one for one in self.prompts.values() if one.pairs]
        parted = [pair.at for one in both for pair in one.pairs if pair.at is not None]
        means = [_known_mean(one.rewards[side] for one in both) for side in (0, 1)]
        unpaired = [sum(max(0, len(p.places[s]) - len(p.places[1 - s])) for p in self.prompts.values()) for s in (0, 1)]
        return {
            "prompts": len(both),
            "only_a": sum(not one.places[1] for one in self.prompts.values()),
            "only_b": sum(not one.places[0] for one in self.prompts.values()),
            "pairs": self._pairs,
            "unpaired": unpaired,
            "same": self._same,
            "first_diverging_token": {
                "min": min(parted, default=None),
                "median": statistics.median(parted) if parted else None,
            },
            "reward": means,
            "reward_diff": None if None in means else means[1] - means[0],  # type: ignore[operator]
            "log_prob_abs_diff": statistics.fmean(self._diffs) if self._diffs else None,
            "log_prob_abs_diff_max": self._worst if self._diffs else None,
            "other_prompt_tokens": self.other_prompt_tokens,
        }

    def _take(self, side: int, number: int, sample: DumpSample) -> Prompt:
        text = sample.prompt or ""
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
        prompt = self.prompts.get(key)
        if prompt is None:
            prompt = self.prompts[key] = Prompt(text[:MOST_PROMPT])
        prompt.places[side].append(number)
        score = sample.score
        prompt.rewards[side].append(math.nan if score is None else score)
        return prompt


def pair_of(places: tuple[int, int], a: DumpSample, b: DumpSample) -> Pair:
    """Where two responses part, by token ids where both have them, else by characters."""
    ids = a.response_tokens, b.response_tokens
    if ids[0] is not None and ids[1] is not None:
        left: Sequence[Any] = ids[0]
        right: Sequence[Any] = ids[1]
        unit = "token"
    else:
        left, right, unit = a.response or "", b.response or "", "character"
    common = next(
        (at for at, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    parted = common < max(len(left), len(right))
    gaps = _gaps(a, b, common) if unit == "token" else []
    tokens = (_at(left, common), _at(right, common)) if parted and unit == "token" else (None, None)
    return Pair(
        places,
        common if parted else None,
        tokens,
        (_text(a, common, len(left)), _text(b, common, len(right))) if parted else ("", ""),
        unit,
        common,
        math.fsum(gaps) / len(gaps) if gaps else None,
        max(gaps, default=None),
    )


def _gaps(a: DumpSample, b: DumpSample, common: int) -> list[float]:
    ours, theirs = a.rollout_log_probs, b.rollout_log_probs
    if not ours or not theirs:
        return []
    return [abs(y - x) for x, y in zip(ours[:common], theirs[:common], strict=False)]


def _at(values: Sequence[Any], at: int) -> int | None:
    return values[at] if at < len(values) else None


def _text(sample: DumpSample, at: int, count: int) -> str:
    """The response from its token `at` of `count`: without a tokenizer its place is estimated by the share."""
    text = sample.response or ""
    start = len(text) if at >= count else int(len(text) * at / max(count, 1))
    return text[start : start + CONTEXT]


def _prompt_ids(sample: DumpSample) -> Sequence[int] | None:
    if sample.tokens is None or sample.response_length is None:
        return None
    return sample.tokens[: max(len(sample.tokens) - sample.response_length, 0)]


def _known_mean(parts: Iterable[Sequence[float]]) -> float | None:
    known = [one for part in parts for one in part if one == one]
    return statistics.fmean(known) if known else None
