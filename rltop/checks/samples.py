"""Makes a `Sample` from the plain map that a stream or a file holds, reducing text and token arrays to measures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rltop.checks.observe import Sample, TokenGap, Where
from rltop.checks.text import measure

EXCERPT_CHARS = 160
MOST_SCANNED = 200_000
MOST_LABEL = 200
_SPECIAL = re.compile(
    r"<\|[\w. /-]{1,40}\|>|<\uff5c[^<>\s]{1,40}\uff5c>|</?(?:start|end)_of_\w{1,20}>|<(?:eos|bos|im_end|im_start|eot)>|"
    r"</s>|\[(?:/INST|gMASK|EOT|EOS)\]|<(?!\|)\w{1,40}\|>|\[\|\w{1,40}\|\]|<seed:eos>|\[e~\["
)
"""Special tokens as tokenizers spell them, turn and text terminators among them."""


def make_sample(
    fields: Mapping[str, Any],
    *,
    rollout_id: int | None,
    segment: int = 0,
    mode: str = "",
    when: str = "",
    where: Where | None = None,
) -> Sample:
    """Sample from the keys of the wire's `samples` payload (`rltop.protocol.messages.SamplesPayload`).

    `log_probs`, `ref_log_probs` and `rollout_log_probs` are natural logs per response token. A field of a wrong type is
    taken as absent: a producer's mistake must not hide the other fields.
    """
    response = str(fields.get("response") or "")
    actor = _floats(fields.get("log_probs"))
    reference = _floats(fields.get("ref_log_probs"))
    engine = _floats(fields.get("rollout_log_probs"))
    finite = [x for x in actor if math.isfinite(x)]
    return Sample(
        index=_integer(fields.get("index")) or 0,
        text=measure(response, prompt=_text(fields.get("prompt")), token_ids=_integers(fields.get("token_ids"))),
        excerpt=response[:EXCERPT_CHARS],
        rollout_id=rollout_id,
        segment=segment,
        mode=mode,
        when=when,
        group=_integer(fields.get("group_index")),
        reward=_number(fields.get("reward")),
        status=_text(fields.get("status")),
        finish_reason=_text(fields.get("finish_reason")),
        response_length=_integer(fields.get("response_length")),
        weight_version=_text(fields.get("weight_version")),
        engine=_text(fields.get("engine")),
        mean_log_prob=math.fsum(finite) / len(finite) if finite else None,
        ref_gap=token_gap(actor, reference),
        engine_gap=token_gap(actor, engine),
        bad_log_probs=sum(not math.isfinite(x) for x in (*actor, *reference, *engine)),
        where=where,
        versions=_versions(fields.get("weight_versions", fields.get("weight_version"))),
        ran_past=ran_past(response),
        label_shown=_label_shown(fields.get("label"), response),
        last_token=_integer(fields.get("last_token_id")),
    )


def ran_past(response: str) -> tuple[str, ...]:
    """Special tokens that more text follows, the first 200,000 characters' distinct ones in order."""
    found: dict[str, None] = {}
    for match in _SPECIAL.finditer(response, 0, MOST_SCANNED):
        if len(found) < 8 and response[match.end() : match.end() + 200].strip():
            found.setdefault(match[0])
    return tuple(found)


def _label_shown(label: object, response: str) -> bool | None:
    """The label stands in the response as a word of its own."""
    text = str(label).strip() if isinstance(label, str | int | float) and not isinstance(label, bool) else ""
    if not text or len(text) > MOST_LABEL:
        return None
    return bool(re.search(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\d)", response))


def _versions(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(str(one) for one in value[:1000])
    return () if value is None or value == "" else (str(value),)


def token_gap(left: Sequence[float], right: Sequence[float]) -> TokenGap | None:
    """|left - right| over the tokens where both are finite; None without any, or when the lengths differ."""
    if not left or len(left) != len(right):
        return None
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not gaps:
        return None
    return TokenGap(mean=math.fsum(gaps) / len(gaps), largest=max(gaps), tokens=len(gaps))


def pooled(gaps: Sequence[TokenGap]) -> TokenGap | None:
    """The gap over all tokens of several responses; None for no responses."""
    tokens = sum(gap.tokens for gap in gaps)
    if not tokens:
        return None
    mean = math.fsum(gap.mean * gap.tokens for gap in gaps) / tokens
    return TokenGap(mean=mean, largest=max(gap.largest for gap in gaps), tokens=tokens)


def _floats(value: object) -> list[float]:
    if not isinstance(value, list | tuple):
        return []
    try:
        return list(map(float, value))
    except (TypeError, ValueError, OverflowError):
        return []


def _integers(value: object) -> list[int]:
    return [x for x in value if isinstance(x, int)] if isinstance(value, list | tuple) else []


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    """Text of a field; a list of versions (one per turn) becomes its last entry."""
    match value:
        case None:
            return ""
        case [*_, last]:
            return str(last)
        case _:
            return str(value)
