"""A sample of a dump as text: what was asked, what was answered, coloured token by token, and what is known of it.

Colours are the log-prob of the engine (`rollout_log_probs`): the less likely a token was, the warmer. An underlined
token is one on which trainer and engine differ by more than `GAP` nats. Without colours the tokens that stand out are
listed.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rltop.cli.output import number
from rltop.evidence.visible import visible

Colour = Literal["auto", "always", "never"]
LIKELY, HALF, RARE = math.log(0.9), math.log(0.5), math.log(0.1)
GAP = 0.1
"""Nats; slime's CI refuses a mean of more (`--ci-train-rollout-logprob-abs-diff-threshold`)."""
LEGEND = f"colours: probability below 0.9 green, 0.5 yellow, 0.1 red; underlined: |train - rollout| above {GAP}"
MOST_SHOWN = 4_000
"""Characters of a prompt or response unless all of it is asked for."""
MOST_ODD = 5
MOST_FIELD = 160
MARKS_A_LINE, MOST_MARKS = 70, 420
_NOTHING = ("", "-", "{}", "[]", "False")
_GREEN, _YELLOW, _RED, _BOLD, _DIM, _UNDER, _OFF = (f"\x1b[{code}m" for code in (32, 33, 31, 1, 2, 4, 0))


def with_colours(asked: Colour) -> bool:
    """Whether stdout gets colours."""
    if asked == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return asked == "always"


def sample_lines(
    told: Mapping[str, Any], *, colours: bool, everything: bool = False, tokens: bool = False
) -> list[str]:
    """Lines of one sample. told: as `evidence.dump_whole.whole` tells it."""
    paint = _Paint(colours)
    found = [paint.bold(_head(told))]
    prompt, response = told.get("prompt"), told.get("response")
    if prompt is not None:
        count = told.get("prompt_tokens")
        found += [paint.dim("prompt" + (f", {count} tokens" if count is not None else "")), *_block(prompt, everything)]
    if response is not None:
        found.append(paint.dim(f"response, {number(told.get('length'))} tokens" + _gap_text(told)))
        found += _coloured(told, everything, paint) or [*_block(response, everything), *_strip(told, paint)]
    if not colours and not tokens:
        found += _odd(told)
    if tokens:
        found += _table(told, paint)
    named = [("label", told["label"])] if told.get("label") is not None else []
    named += [(name, text) for name, text in told.get("fields", ()) if text not in _NOTHING]
    named += [("left out", text) for text in told.get("cut", ())]
    wide = min(max((len(name) for name, _ in named), default=0), 40)
    found += [f"{_plain(name).ljust(wide)}  {_field(text)}" for name, text in named]
    found += [paint.red(f"odd      {_plain(one)}") for one in told.get("remarks", ())]
    return found + [paint.red(f"refused  {_plain(one)}") for one in told.get("refused", ())]


def _plain(text: str) -> str:
    """One line of it, every character in sight."""
    return visible(text, newline=" ")


def _head(told: Mapping[str, Any]) -> str:
    parts = [f"sample {told['at']}"]
    parts += [
        f"{name} {told[key]}" for name, key in (("index", "index"), ("group", "group_index")) if _known(told, key)
    ]
    key = told.get("reward_key")
    parts.append(f"reward {number(told.get('reward'))}" + (f" ({_plain(str(key))})" if key is not None else ""))
    if told.get("status"):
        parts.append(_plain(str(told["status"])))
    group = told.get("group") or {}
    if group.get("n", 0) > 1:
        parts.append(f"of its group: mean {number(group['mean'])}, advantage {number(group['advantage'])}")
    if told.get("weight_versions"):
        parts.append(f"weights v{', v'.join(map(str, dict.fromkeys(told['weight_versions'])))}")
    return "  ".join(parts)


def _known(told: Mapping[str, Any], key: str) -> bool:
    return told.get(key) is not None


def _gap_text(told: Mapping[str, Any]) -> str:
    gaps = told.get("gaps")
    if not gaps:
        return "" if told.get("rollout_log_probs") else ", no log-probs in the dump"
    return f", |train - rollout| mean {number(gaps['mean'])}, max {number(gaps['max'])} at token {gaps['at']}"


def _block(text: str, everything: bool) -> list[str]:
    """A text of the run, indented, without what would steer the terminal."""
    cut = len(text) - MOST_SHOWN
    shown = text if everything or cut <= 0 else text[:MOST_SHOWN]
    lines = [f"  {_plain(line)}" for line in shown.split("\n")]
    return [*lines, f"  … {cut} more characters: --whole"] if shown is not text else lines


def _coloured(told: Mapping[str, Any], everything: bool, paint: _Paint) -> list[str]:
    """The response token by token; empty where the texts of the tokens are not known, or without colours."""
    texts, probs = told.get("texts") or [], told.get("rollout_log_probs") or told.get("log_probs") or []
    if not paint.on or not texts or len(texts) != len(probs):
        return []
    gaps = _gaps(told)
    out: list[str] = []
    shown = 0
    for at, text in enumerate(texts):
        if not everything and shown > MOST_SHOWN:
            return [*"".join(out).split("\n"), f"  … {len(texts) - at} more tokens: --whole"]
        shown += len(text)
        style = shade(probs[at]) + (_UNDER if gaps and not gaps[at] <= GAP else "")
        # A style is closed at the end of a line: a pager shows lines one by one.
        parts = [f"{style}{_plain(part)}{_OFF}" if style and part else _plain(part) for part in text.split("\n")]
        out.append("\n".join(parts))
    return [f"  {line}" for line in "".join(out).split("\n")]


def _strip(told: Mapping[str, Any], paint: _Paint) -> list[str]:
    """One mark per token, where their texts are not known: what was unlikely, and where, can be seen all the same."""
    probs, gaps = told.get("rollout_log_probs") or told.get("log_probs") or [], _gaps(told)
    if not paint.on or not probs:
        return []
    marks = [
        paint.styled((shade(one) or _DIM) + (_UNDER if gaps and not gaps[at] <= GAP else ""), "*")
        for at, one in enumerate(probs[:MOST_MARKS])
    ]
    rows = ["".join(marks[at : at + MARKS_A_LINE]) for at in range(0, len(marks), MARKS_A_LINE)]
    more = f", the first {MOST_MARKS}" if len(probs) > MOST_MARKS else ""
    why = told.get("texts_from") or "no tokenizer"
    return [paint.dim(f"  a mark per token{more} (no texts: {why})"), *(f"  {row}" for row in rows)]


def shade(log_prob: float) -> str:
    """The colour of a log-prob; nothing for a token that was likely."""
    if log_prob >= LIKELY:
        return ""
    return _GREEN if log_prob >= HALF else _YELLOW if log_prob >= RARE else _RED


def _gaps(told: Mapping[str, Any]) -> list[float]:
    ours, theirs = told.get("log_probs") or [], told.get("rollout_log_probs") or []
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)] if ours and len(ours) == len(theirs) else []


def _odd(told: Mapping[str, Any]) -> list[str]:
    """The tokens that stand out, for a reader without colours."""
    probs, gaps = told.get("rollout_log_probs") or [], _gaps(told)
    found = []
    rare = sorted((at for at, one in enumerate(probs) if not one >= RARE), key=lambda at: probs[at])[:MOST_ODD]
    if rare:
        found.append("unlikely   " + ", ".join(f"{_token(told, at)} {number(probs[at])}" for at in rare))
    apart = sorted((at for at, gap in enumerate(gaps) if not gap <= GAP), key=lambda at: -gaps[at])[:MOST_ODD]
    if apart:
        each = (f"{_token(told, at)} {number(probs[at])} / {number(told['log_probs'][at])}" for at in apart)
        found.append("apart      " + ", ".join(each) + "  (rollout / train)")
    return found


def _token(told: Mapping[str, Any], at: int) -> str:
    texts, ids = told.get("texts") or [], told.get("ids") or []
    name = f" {_plain(repr(texts[at]))}" if at < len(texts) else f" id {ids[at]}" if at < len(ids) else ""
    return f"token {at}{name}"


def _table(told: Mapping[str, Any], paint: _Paint) -> list[str]:
    """One line per token of the response."""
    ids, texts = told.get("ids") or [], told.get("texts") or []
    columns: list[tuple[str, Sequence[Any]]] = [("id", ids), ("rollout", told.get("rollout_log_probs") or [])]
    columns += [(name, told[key]) for name, key in (("train", "log_probs"), ("ref", "ref_log_probs")) if told.get(key)]
    columns += [("gap", gaps)] if (gaps := _gaps(told)) else []
    columns += [("mask", told["loss_mask"])] if told.get("loss_mask") else []
    count = max((len(values) for _, values in columns), default=0)
    rows = ["  " + "token".rjust(6) + "".join(name.rjust(12) for name, _ in columns) + "  text"]
    for at in range(count):
        cells = "".join((number(v[at]) if at < len(v) else "-").rjust(12) for _, v in columns)
        text = _plain(repr(texts[at])) if at < len(texts) else ""
        probs = columns[1][1]
        rows.append(paint.styled(shade(probs[at]) if at < len(probs) else "", f"  {at:>6}{cells}  {text}".rstrip()))
    return rows


def _field(text: str) -> str:
    return textwrap.shorten(_plain(text), MOST_FIELD, placeholder=" …")


class _Paint:
    """Styles, or nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_OFF}" if self.on and style else text

    def bold(self, text: str) -> str:
        return self.styled(_BOLD, text)

    def dim(self, text: str) -> str:
        return self.styled(_DIM, text)

    def red(self, text: str) -> str:
        return self.styled(_RED, text)
