"""What the colour of a token means: log-prob, gap between trainer and engine, sign of the advantage.

Pure: numbers in, style names out. Of what is not known there is no colour, and NaN is always loud.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from rltop.tui.rows import Row, Span
from rltop.tui.text import num

MODES = ("off", "log-prob", "gap", "advantage")
LOG_PROBS = (0.9, 0.5, 0.1, 0.01)
"""Probabilities of the sampled token below which it gets warmer."""
GAPS = (0.01, 0.03, 0.1, 0.3)
"""|train - rollout| from which on a token gets warmer. 0.1 is the default of slime's
--ci-train-rollout-logprob-abs-diff-threshold."""


class Tokens(Struct, frozen=True):
    """The numbers of a response, one per token; empty where the dump has none."""

    ids: Sequence[int] = ()
    texts: Sequence[str] = ()
    rollout: Sequence[float] = ()
    train: Sequence[float] = ()
    ref: Sequence[float] = ()
    advantages: Sequence[float] = ()
    mask: Sequence[int] = ()
    group_advantage: float | None = None
    """Of the whole response, from the rewards of its group: what is taken where no train dump has any."""

    @property
    def count(self) -> int:
        """How many there are."""
        return max(map(len, (self.ids, self.rollout, self.train, self.advantages)), default=0)

    def gap(self, at: int) -> float | None:
        """|train - rollout| of a token."""
        left, right = number(self.train, at), number(self.rollout, at)
        return None if left is None or right is None else abs(left - right)

    def advantage(self, at: int) -> float | None:
        """Of a token."""
        found = number(self.advantages, at)
        return found if found is not None or self.advantages else self.group_advantage

    def masked(self, at: int) -> bool:
        """The loss leaves it out."""
        return at < len(self.mask) and not self.mask[at]


def tokens_of(sample: dict[str, Any]) -> Tokens:
    """From `samples[0]` of a `dump-page`."""

    def listed(name: str) -> Sequence[Any]:
        found = sample.get(name)
        return found if isinstance(found, list | tuple) else ()

    group = sample.get("group")
    advantage = group.get("advantage") if isinstance(group, dict) else None
    return Tokens(
        ids=listed("ids"),
        texts=listed("texts"),
        rollout=listed("rollout_log_probs"),
        train=listed("log_probs"),
        ref=listed("ref_log_probs"),
        advantages=listed("advantages"),
        mask=listed("loss_mask"),
        group_advantage=advantage if isinstance(advantage, int | float) else None,
    )


def number(values: Sequence[float], at: int) -> float | None:
    """Value of a token, None where there is none."""
    return values[at] if 0 <= at < len(values) else None


def style_of(mode: str, tokens: Tokens, at: int) -> str:
    """Style of a token."""
    value: float | None = None
    match mode:
        case "log-prob":
            value = number(tokens.rollout, at)
            if value is None:  # a train dump alone
                value = number(tokens.train, at)
        case "gap":
            value = tokens.gap(at)
        case "advantage":
            value = tokens.advantage(at)
    if value is not None and math.isnan(value):
        return "bad+cur"
    if tokens.masked(at):
        return "faint"
    if value is None:
        return "text"
    match mode:
        case "log-prob":
            chance = math.exp(min(value, 0.0))
            return _heat(sum(chance < limit for limit in LOG_PROBS))
        case "gap":
            return _heat(sum(value >= limit for limit in GAPS))
        case _:
            return "plus" if value > 0 else "minus" if value < 0 else "dim"


def _heat(level: int) -> str:
    return f"heat{level}" if level else "text"


def known(mode: str, tokens: Tokens) -> bool:
    """Whether the dump has what a mode shows."""
    match mode:
        case "log-prob":
            return bool(tokens.rollout or tokens.train)
        case "gap":
            return bool(tokens.rollout and tokens.train)
        case "advantage":
            return bool(tokens.advantages) or tokens.group_advantage is not None
        case _:
            return True


def legend(mode: str, tokens: Tokens) -> Row:
    """What the colours of a mode say, in one line."""
    if not known(mode, tokens):
        why = {
            "log-prob": "the dump has no log-probs",
            "gap": "no gap: no train dump is joined",
            "advantage": "no train dump, no rewards of a group",
        }[mode]
        return ((f" {why}", "warn"),)
    row: list[Span] = [(f"{mode} ", "dim")]
    match mode:
        case "log-prob":
            row[0] = (" p below " if tokens.rollout else " trainer's p below ", "dim")
            row += _scale(LOG_PROBS)
        case "gap":
            row[0] = (" gap from ", "dim")
            row += _scale(GAPS)
        case "advantage":
            source = "of the train dump" if tokens.advantages else "by its group's rewards"
            row[0] = (" advantage ", "dim")
            row += [(" + ", "plus"), (" ", "text"), (" - ", "minus"), (f" {source}", "dim")]
        case _:
            return ((" no colours", "dim"),)
    if any(not one for one in tokens.mask):
        row.append((" masked", "faint"))
    return tuple(row)


def _scale(limits: Sequence[float]) -> list[Span]:
    out: list[Span] = []
    for level, limit in enumerate(limits, 1):
        out += [(f" {num(limit)} ", f"heat{level}"), (" ", "text")]
    return out
