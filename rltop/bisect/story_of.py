"""A `Story` from the cell `bisect` (docs/protocol.md), read without trust.

Failure policy: what is missing or has another type counts as unknown; nothing is invented, nothing raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rltop.bisect.story import (
    CrashStory,
    ExtraRun,
    FactStory,
    KernelStory,
    NextStory,
    OutsideStory,
    Story,
    Suspect,
    TrialStory,
    VerdictStory,
)


def story_of(cell: Any) -> Story | None:
    """The value of the cell; None where it is none."""
    if not isinstance(cell, Mapping) or not cell:
        return None
    traffic, verdict, kernel = _map(cell.get("traffic")), cell.get("verdict"), cell.get("kernel")
    left = [value for value in map(_number, _list(cell.get("left_min"))) if value is not None]
    scale = _number(cell.get("time_scale"))
    return Story(
        id=_text(cell.get("id")),
        state=_text(cell.get("state")),
        mode=_text(cell.get("mode")),
        engines=_names(cell.get("engines")),
        dropped=_texts(cell.get("dropped")),
        toggles=_names(cell.get("toggles")),
        fixed=_names(cell.get("fixed")),
        aliases={_text(name): _names(others) for name, others in _map(cell.get("aliases")).items()},
        started=_number(cell.get("started")),
        ended=_number(cell.get("ended")),
        minutes=_number(cell.get("minutes")) or 0.0,
        budget_min=_number(cell.get("budget_min")),
        time_scale=1.0 if scale is None else scale,
        left_min=(left[0], left[1]) if len(left) == 2 else None,
        error=_text(cell.get("error")),
        crash=_crash(_map(cell.get("crash"))),
        facts=tuple(map(_fact, map(_map, _list(cell.get("facts"))))),
        traffic=_text(traffic.get("source")),
        requests=_whole(traffic.get("requests")),
        concurrency=_whole(traffic.get("concurrency")),
        posterior=tuple(map(_suspect, map(_map, _list(cell.get("posterior"))))),
        involved={_text(name): _number(p) or 0.0 for name, p in _map(cell.get("involved")).items()},
        trials=tuple(map(_trial, map(_map, _list(cell.get("trials"))))),
        next=tuple(map(_next, map(_map, _list(cell.get("next"))))),
        verdict=_verdict(verdict) if isinstance(verdict, Mapping) else None,
        kernel=_kernel(kernel) if isinstance(kernel, Mapping) and kernel.get("name") else None,
        kernel_stage=_text(cell.get("kernel_stage")),
        kernel_runs=tuple(map(_extra, map(_map, _list(cell.get("kernel_runs"))))),
        unwritten=_text(cell.get("unwritten")),
        unserved=_text(cell.get("unserved")),
        outside=tuple(map(_outside, map(_map, _list(cell.get("outside"))))),
        counted={name: count for name, one in _map(cell.get("counts")).items() if (count := _whole(one)) is not None},
        cut_off=cell.get("cut_off") is True,
        restored=_texts(cell.get("restored")),
        notes=_names(cell.get("notes")),
        reason=_text(cell.get("reason")),
        who=_text(cell.get("who")),
    )


def _crash(value: Mapping[str, Any]) -> CrashStory:
    names = ("fingerprint", "cause", "kernel", "phase", "weight_version", "injected")
    told = {name: _text(value.get(name)) for name in names}
    return CrashStory(engine=_text(value.get("engine")), generation=_whole(value.get("generation")), **told)


def _fact(value: Mapping[str, Any]) -> FactStory:
    return FactStory(_text(value.get("text")), _text(value.get("source")), _weighed(value.get("moves")))


def _suspect(value: Mapping[str, Any]) -> Suspect:
    culprit = _names(value.get("culprit"))
    return Suspect(culprit, _text(value.get("words")) or " x ".join(culprit), _number(value.get("p")) or 0.0)


def _trial(value: Mapping[str, Any]) -> TrialStory:
    return TrialStory(
        n=_whole(value.get("n")) or 0,
        engine=_text(value.get("engine")),
        generation=_whole(value.get("generation")),
        on=_names(value.get("on")),
        off=_names(value.get("off")),
        outcome=_text(value.get("outcome")),
        minutes=_number(value.get("minutes")) or 0.0,
        planned=_number(value.get("planned")),
        started=_number(value.get("started")),
        ended=_number(value.get("ended")),
        ready=value.get("ready") is True,
        why=_text(value.get("why")),
        counts=value.get("counts") is not False,
        fingerprint=_text(value.get("fingerprint")),
        kernel=_text(value.get("kernel")),
        log=_text(value.get("log")),
        note=_text(value.get("note")),
        requests=_whole(value.get("requests")),
        argv=_names(value.get("argv")),
    )


def _next(value: Mapping[str, Any]) -> NextStory:
    return NextStory(
        _text(value.get("engine")),
        _names(value.get("on")),
        _names(value.get("off")),
        _number(value.get("minutes")),
        _number(value.get("crash")),
        _number(value.get("bits")),
        _text(value.get("why")),
    )


def _verdict(value: Mapping[str, Any]) -> VerdictStory:
    culprit = value.get("culprit")
    return VerdictStory(
        _text(value.get("state")),
        None if culprit is None else _names(culprit),
        _text(value.get("words")),
        _number(value.get("p")) or 0.0,
        _text(value.get("text")),
        _weighed(value.get("left")),
    )


def _kernel(value: Mapping[str, Any]) -> KernelStory:
    block = value.get("block")
    told = ", ".join(map(str, block)) if isinstance(block, list | tuple) else _text(block)
    return KernelStory(
        _text(value.get("name")),
        told,
        _text(value.get("source")),
        value.get("weaker") is True,
        _text(value.get("place")),
        _text(value.get("exception")),
    )


def _extra(value: Mapping[str, Any]) -> ExtraRun:
    return ExtraRun(
        engine=_text(value.get("engine")),
        generation=_whole(value.get("generation")),
        why=_text(value.get("why")),
        outcome=_text(value.get("outcome")),
        minutes=_number(value.get("minutes")) or 0.0,
        started=_number(value.get("started")),
        ended=_number(value.get("ended")),
        log=_text(value.get("log")),
        note=_text(value.get("note")),
        limit_min=_number(value.get("limit_min")),
    )


def _outside(value: Mapping[str, Any]) -> OutsideStory:
    return OutsideStory(
        _text(value.get("engine")),
        _whole(value.get("generation")),
        _number(value.get("minutes")),
        _text(value.get("fingerprint")),
        _number(value.get("t")),
    )


def _weighed(value: Any) -> tuple[tuple[tuple[str, ...], float], ...]:
    """`[[names], number]` each."""
    rows: list[tuple[tuple[str, ...], float]] = []
    for item in map(_list, _list(value)):
        if len(item) == 2 and (number := _number(item[1])) is not None:
            rows.append((_names(item[0]), number))
    return tuple(rows)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _texts(value: Any) -> dict[str, str]:
    return {_text(name): _text(item) for name, item in _map(value).items()}
