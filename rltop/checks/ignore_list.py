"""Corrects the ignore list of a compressed-tensors checkpoint, so that trainer and engine read it alike.

Pure. A proposal is only made if it is right by both readings (`rules.quant_map`): every two-dimensional weight that is
no Linear is left alone by both, what both left alone or packed before stays so, and nothing is read differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rltop.checks.found import HfCheckpoint
from rltop.checks.names import is_embedding, is_flat, is_router
from rltop.checks.rules.quant_map import engine_skips, quantisation, tensors_of, trainer_skips

_PACKED = ".weight_packed"


def corrected(one: HfCheckpoint) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(old list, new list) of a checkpoint; None where nothing is to correct or no list is right by both readings."""
    config = quantisation(one)
    rules = config.get("ignore") if config and config.get("quant_method") == "compressed-tensors" else None
    if not isinstance(rules, list):
        return None
    old = tuple(rule for rule in rules if isinstance(rule, str))
    names = tensors_of(one)
    wanted = wanted_skips(old, names)
    if not wanted or _right(old, wanted):
        return None
    new = _narrowed(old, wanted)
    for make in (_for_every_layer, _exact):
        tried = (*new, *make(new, wanted))
        if _right(tried, wanted):
            return old, tried
    return None


def wanted_skips(rules: Sequence[str], names: Mapping[str, int | None]) -> dict[str, bool]:
    """Weight -> whether it is to be left alone. `names`: tensor -> dimensions, None where unknown.

    Routers and embeddings always; what both readings agree on stays. Where they differ, a checkpoint that is packed
    already says what was meant: what lies there unpacked was left alone. Without packed tensors the converter's reading
    (module names) is what was meant.
    """
    packed = {name.removesuffix(_PACKED) for name in names if name.endswith(_PACKED)}
    found: dict[str, bool] = {f"{module}.weight": False for module in packed}
    for name, dimensions in names.items():
        if not name.endswith(".weight") or is_flat(name) or (dimensions is not None and dimensions < 2):
            continue
        ours, theirs = trainer_skips(rules, name), engine_skips(rules, name)
        if is_router(name) or is_embedding(name):
            found[name] = True
        elif ours == theirs:
            found[name] = ours
        else:
            found[name] = True if packed else theirs
    return found


def _right(rules: Sequence[str], wanted: Mapping[str, bool]) -> bool:
    return all(trainer_skips(rules, name) == engine_skips(rules, name) == skip for name, skip in wanted.items())


def _narrowed(rules: Sequence[str], wanted: Mapping[str, bool]) -> tuple[str, ...]:
    """Plain rules that swallow a sibling as a prefix (`…mlp.gate`, `…mlp.gate_proj`) become patterns."""
    found = []
    for rule in rules:
        swallows = not rule.startswith("re:") and any(
            name.startswith(rule) and not skip for name, skip in wanted.items()
        )
        found.append(f"re:{re.escape(rule)}(\\.weight)?$" if swallows else rule)
    return tuple(found)


def _for_every_layer(rules: Sequence[str], wanted: Mapping[str, bool]) -> tuple[str, ...]:
    """Rules for what is still missing, by the end of its name: one for all layers."""
    found: dict[str, None] = {}
    for name in _missing(rules, wanted):
        module = name.removesuffix(".weight")
        parts = module.split(".")
        layered = any(part.isdecimal() for part in parts)
        found[f"re:.*\\.{re.escape('.'.join(parts[-2:]))}(\\.weight)?$" if layered else module] = None
    return tuple(found)


def _exact(rules: Sequence[str], wanted: Mapping[str, bool]) -> tuple[str, ...]:
    """Rules for what is still missing, name by name."""
    return tuple(f"re:{re.escape(name.removesuffix('.weight'))}(\\.weight)?$" for name in _missing(rules, wanted))


def _missing(rules: Sequence[str], wanted: Mapping[str, bool]) -> list[str]:
    return sorted(
        name for name, skip in wanted.items() if skip and not (trainer_skips(rules, name) and engine_skips(rules, name))
    )
