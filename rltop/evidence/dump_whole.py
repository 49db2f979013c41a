"""One sample of a dump in full, as plain values that cross the wire: `samples[0]` of `dump-page`.

Bounded: texts, tokens and fields beyond their limits are left out and named in `cut`, never silently.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from rltop.evidence.dump_rows import length_of, line_of
from rltop.evidence.dump_sample import DumpSample, DumpTensor, Refused
from rltop.evidence.dump_stats import spread
from rltop.evidence.samples import reward_key_of
from rltop.evidence.token_text import TokenTexts, characters, fitting

MOST_CHARACTERS = 1_000_000
MOST_TOKENS = 100_000
MOST_FIELDS = 200
MOST_FIELD = 2_000
MOST_DEPTH = 6
_PER_TOKEN = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "loss_mask")


def whole(
    sample: DumpSample, trained: DumpSample | None, group: Sequence[float | None], texts: TokenTexts | None
) -> dict[str, Any]:
    """Everything of a sample. trained: its entry in the train dump. group: rewards of its group, itself included."""
    cut: list[str] = []
    length = length_of(sample)
    ids = _numbers(sample.response_tokens)
    told: dict[str, Any] = {
        **line_of(sample, trained.log_probs if trained is not None else sample.log_probs).row(),
        "prompt": _text(sample.prompt, "prompt", cut),
        "response": _text(sample.response, "response", cut),
        "label": brief(sample.label) if sample.label is not None else None,
        "weight_versions": [str(one)[:100] for one in (sample.weight_versions or ())][:64],
        "prompt_tokens": _prompt_tokens(sample, length),
        "reward_key": reward_key_of(sample.reward) if isinstance(sample.reward, Mapping) else None,
        "trained": trained is not None,
    }
    for name in _PER_TOKEN:
        told[name] = _numbers(_of(name, sample, trained))
    if len(told["advantages"]) == 1 and length:
        told["advantages"] *= length
    known = max([len(ids), *(len(told[name]) for name in _PER_TOKEN)])
    if known > MOST_TOKENS:
        cut.append(f"tokens ({known - MOST_TOKENS} of {known} left out)")
        ids = ids[:MOST_TOKENS]
        for name in _PER_TOKEN:
            told[name] = told[name][:MOST_TOKENS]
    told["ids"] = ids
    told["texts"], told["texts_from"] = token_texts(ids, sample.response or "", texts, partial=known > MOST_TOKENS)
    told["gaps"] = gap_numbers(told["log_probs"], told["rollout_log_probs"])
    told["group"] = group_numbers(sample.score, group)
    told["fields"] = fields(sample, trained)
    told["refused"] = [one[:300] for one in sample.refused[:20]]
    told["remarks"] = remarks(sample, trained)
    told["cut"] = cut
    return told


def _prompt_tokens(sample: DumpSample, length: int | None) -> int | None:
    if sample.tokens is None or length is None or not 0 <= length <= len(sample.tokens):
        return None
    return len(sample.tokens) - length


def _of(name: str, sample: DumpSample, trained: DumpSample | None) -> Any:
    """A field per response token: the trainer's where it has it."""
    if name != "rollout_log_probs" and trained is not None:
        found = getattr(trained, name, None) if name != "advantages" else trained.extra.get(name)
        if found is not None:
            return found
    return getattr(sample, name, None) if name != "advantages" else sample.extra.get(name)


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, DumpTensor):
        value = value.values()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return []
    return list(value) if all(isinstance(one, int | float) for one in value) else []


def _text(text: str | None, name: str, cut: list[str]) -> str | None:
    if text is None or len(text) <= MOST_CHARACTERS:
        return text
    cut.append(f"{name} ({len(text) - MOST_CHARACTERS} of {len(text)} characters left out)")
    return text[:MOST_CHARACTERS]


def token_texts(
    ids: Sequence[int], response: str, texts: TokenTexts | None, *, partial: bool = False
) -> tuple[list[str], str]:
    """(text of every token, where it is from); no texts: none that fit the response, and why."""
    if not ids:
        return [], "the dump has no token ids"
    if texts is not None:
        found = texts.texts(ids)
        whole_text = "".join(found or ())
        if found is not None and (partial or not response or fitting(found, response[:MOST_CHARACTERS], texts.special)):
            return found, str(texts.path)
        if found is not None and whole_text:
            return [], f"{texts.path} does not give this response"
    if (one_each := characters(ids, response)) is not None:
        return one_each, "one character per token"
    return [], f"{texts.path} lacks some of its tokens" if texts is not None else "no tokenizer beside the dump"


def gap_numbers(trained: Sequence[float], rollout: Sequence[float]) -> dict[str, Any]:
    """{mean, max, at, n} of |train - rollout| over the response tokens; empty where they cannot be compared."""
    if not trained or len(trained) != len(rollout):
        return {}
    gaps = [abs(a - b) for a, b in zip(trained, rollout, strict=True)]
    at = max(range(len(gaps)), key=lambda i: (gaps[i] != gaps[i], gaps[i]))
    return {"mean": math.fsum(gaps) / len(gaps), "max": gaps[at], "at": at, "n": len(gaps)}


def group_numbers(score: float | None, group: Sequence[float | None]) -> dict[str, Any]:
    """{n, missing, mean, std, advantage} of the rewards of a group; advantage: (reward - mean) / std, GRPO's before any
    option; 0 in a group without spread. A NaN makes all of them NaN, as in slime; `missing` have no reward."""
    known = [one for one in group if one is not None]
    told = {"n": len(group), "missing": len(group) - len(known)}
    if not known:
        return {**told, "mean": None, "std": None, "advantage": None} if group else {}
    mean, std = statistics.fmean(known), spread(known)
    advantage = None
    if score is not None and std is not None:
        advantage = 0.0 if std == 0 else (score - mean) / std
    return {**told, "mean": mean, "std": std, "advantage": advantage}


def remarks(sample: DumpSample, trained: DumpSample | None) -> list[str]:
    """What of a sample contradicts itself: lengths that differ, fewer tokens than the response has."""
    length, found = sample.response_length, []
    if length is not None and length < 0:
        found.append(f"response_length {length}")
    if length is not None and sample.tokens is not None and len(sample.tokens) < length:
        found.append(f"{len(sample.tokens)} tokens, fewer than the response_length {length}")
    for name in _PER_TOKEN if length is not None else ():
        value = _of(name, sample, trained)
        count = math.prod(value.shape) if isinstance(value, DumpTensor) else len(_numbers(value)) if value else length
        if count != length and not (name == "advantages" and count == 1):
            found.append(f"{count} {name}, but a response_length of {length}")
    return found


def fields(sample: DumpSample, trained: DumpSample | None) -> list[list[str]]:
    """[name, text] of metadata and of every field that is not shown elsewhere; the trainer's under `train.`."""
    out: list[list[str]] = []
    if isinstance(sample.reward, Mapping):
        out.append(["reward", brief(sample.reward)])
    for key, value in (sample.metadata or {}).items():
        out.append([f"metadata.{key}"[:200], brief(value)])
    for key, value in sample.extra.items():
        if key not in _PER_TOKEN:
            out.append([str(key)[:200], brief(value)])
    for key, value in (trained.extra if trained is not None else {}).items():
        if key not in _PER_TOKEN:  # those are shown with the tokens
            out.append([f"train.{key}"[:200], brief(value)])
    if len(out) > MOST_FIELDS:
        out = [*out[:MOST_FIELDS], ["", f"{len(out) - MOST_FIELDS} more fields are left out"]]
    return out


def brief(value: Any, room: int = MOST_FIELD) -> str:
    """A value of a dump in at most about `room` characters; what is left out is counted."""
    text = _brief(value, room, 0)
    return text if len(text) <= room + 200 else f"{text[:room]} ... ({len(text) - room} characters left out)"


def _brief(value: Any, room: int, depth: int) -> str:
    match value:
        case None:
            return "-"
        case str() if depth == 0:
            return value if len(value) <= room else f"{value[:room]} ... ({len(value) - room} characters left out)"
        case str():
            return repr(value[:room]) + ("..." if len(value) > room else "")
        case DumpTensor():
            return f"tensor {value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}{_first(value)}"
        case Refused():
            return f"not read: {value.name}"
        case bytes():
            return f"{len(value)} bytes"
        case Mapping() | list() | tuple() | array() if depth >= MOST_DEPTH:
            return "..."
        case Mapping():
            parts = ((f"{key}: ", item) for key, item in value.items())
            return "{" + _listed(parts, len(value), room, depth) + "}"
        case list() | tuple() | array() if _all_one(value):
            return f"{len(value)} times {value[0]}"
        case list() | tuple() | array():
            return "[" + _listed((("", item) for item in value), len(value), room, depth) + "]"
        case _:
            return str(value)[:room]


def _all_one(value: Sequence[Any]) -> bool:
    """More than a few numbers that are all the same."""
    return len(value) > 8 and isinstance(value[0], int | float) and all(one == value[0] for one in value)


def _listed(parts: Any, count: int, room: int, depth: int) -> str:
    out: list[str] = []
    used = 0
    for name, item in parts:
        if used >= room:
            return f"{', '.join(out)}, ... {count - len(out)} more of {count}"
        out.append(f"{str(name)[:200]}{_brief(item, room - used, depth + 1)}")
        used += len(out[-1]) + 2
    return ", ".join(out)


def _first(value: DumpTensor) -> str:
    if math.prod(value.shape) > MOST_TOKENS:
        return ""
    numbers = value.values()
    if not numbers:
        return ""
    shown = ", ".join(f"{one:g}" for one in numbers[:8])
    return f": {shown}" + (", ..." if len(numbers) > 8 else "")
