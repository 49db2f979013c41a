"""A few of slime's samples as the wire's `samples` record has them, and a run's facts from its arguments.

`args` may be any object: what it lacks is left out. Never torch: tensors among the fields are asked for a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltop.runs.masks import mask_data

MOST = 8
"""Samples of one rollout that are sent; the daemon shows as many."""
MOST_CHARS = 20_000
MOST_TOKENS = 16_384
"""Of a longer response no token arrays are sent: cut ones would not fit each other."""
_MOST_ITEMS = 200
_MOST_ARG_CHARS = 2_000


def few(samples: Any, args: Any, most: int = MOST) -> tuple[list[dict[str, Any]], int]:
    """Some of a rollout's samples as plain maps, spread over the rollout, and how many it has.

    A rollout-only run has no other place where its text is seen: the shortest and the longest response are among them.
    """
    flat = [sample for sample in _flat(samples) if hasattr(sample, "response")]
    places = list(range(len(flat)))
    chosen = places
    if len(flat) > most:
        lengths = [_whole(getattr(sample, "response_length", None)) or 0 for sample in flat]
        order = sorted(places, key=lengths.__getitem__)
        spread = [at * (len(flat) - 1) // max(1, most - 3) for at in range(most - 2)]
        chosen = sorted(list(dict.fromkeys([order[-1], order[0], *spread, *places]))[:most])
    return [plain(flat[at], args) for at in chosen], len(flat)


def plain(sample: Any, args: Any) -> dict[str, Any]:
    """One sample under the wire's names."""
    length = _whole(getattr(sample, "response_length", None))
    fields: dict[str, Any] = {
        "index": _whole(getattr(sample, "index", None)) or 0,
        "group_index": _whole(getattr(sample, "group_index", None)),
        "prompt": _text(getattr(sample, "prompt", "")),
        "response": _text(getattr(sample, "response", "")),
        "response_length": length,
        "reward": _reward(getattr(sample, "reward", None), getattr(args, "reward_key", None)),
        "label": None if (label := getattr(sample, "label", None)) is None else _text(label),
        "status": str(getattr(status := getattr(sample, "status", ""), "value", status)),
    }
    versions = getattr(sample, "weight_versions", None)
    if isinstance(versions, list | tuple) and versions:
        fields["weight_versions"] = [str(one) for one in versions[:100]]
        fields["weight_version"] = str(versions[-1])
    if length and length <= MOST_TOKENS:
        if (ids := _list(getattr(sample, "tokens", None))) and len(ids) >= length:
            fields["token_ids"] = ids[-length:]
            fields["last_token_id"] = ids[-1]
        if (log_probs := _list(getattr(sample, "rollout_log_probs", None))) and len(log_probs) == length:
            fields["rollout_log_probs"] = log_probs
        if (mask := _list(getattr(sample, "loss_mask", None))) and len(mask) == length:
            fields["loss_mask"] = mask
    return {name: value for name, value in fields.items() if value is not None}


def facts(args: Any, *, start_rollout_id: int) -> dict[str, Any]:
    """Payload of the `run` record."""
    rollout_only = bool(getattr(args, "debug_rollout_only", False))
    train_only = bool(getattr(args, "debug_train_only", False))
    vocabulary = _whole(getattr(args, "vocab_size", None)) or _whole(getattr(args, "padded_vocab_size", None))
    # slime sets `finetune` when nothing is resumed from --load (its arguments.py), whatever it loads instead.
    finetune = getattr(args, "finetune", None)
    return {
        "args": arguments(args),
        "mode": "rollout-only" if rollout_only else "train-only" if train_only else "full",
        "start_rollout_id": start_rollout_id,
        "fresh_start": start_rollout_id == 0 and (rollout_only or finetune is None or bool(finetune)),
        "num_rollout": _whole(getattr(args, "num_rollout", None)),
        "vocab_size": vocabulary or None,
    }


def arguments(args: Any) -> dict[str, Any]:
    """What of a namespace is plain data, without secrets."""
    found: dict[str, Any] = {}
    source = getattr(args, "__dict__", None)
    for name, value in dict(source).items() if isinstance(source, Mapping) else ():
        if name.startswith("_"):
            continue
        found[name] = _plain(value, 2)
    masked: dict[str, Any] = mask_data(found)
    return masked


def _plain(value: Any, depth: int) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value[:_MOST_ARG_CHARS]
        case list() | tuple() if depth:
            return [_plain(one, depth - 1) for one in value[:_MOST_ITEMS]]
        case dict() if depth:
            pairs = list(value.items())[:_MOST_ITEMS]
            return {str(key): _plain(one, depth - 1) for key, one in pairs}
        case _:
            return str(value)[:200]


def _flat(samples: Any) -> list[Any]:
    """Samples of a rollout that may come in groups, and groups of groups."""
    found: list[Any] = []
    waiting = [samples]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | tuple):
            waiting.extend(reversed(one))
        else:
            found.append(one)
    return found


def _reward(reward: Any, key: Any) -> float | None:
    if isinstance(reward, Mapping):
        reward = reward.get(key) if isinstance(key, str) else None
    try:
        return None if reward is None else float(reward)
    except (TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str:
    """Text of a prompt or a response; a list of messages in one line each."""
    if isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
        value = "\n".join(f"{one.get('role', '')}: {one.get('content', '')}" for one in value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + f" … ({len(text) - MOST_CHARS} more characters)"


def _list(value: Any) -> list[Any] | None:
    """A copy: the run goes on with its own."""
    if isinstance(value, list):
        return value[:]
    if hasattr(value, "tolist"):
        made = value.tolist()
        return made if isinstance(made, list) else None
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
