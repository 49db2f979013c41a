"""Which functions of slime are wrapped, and where they lie in its layouts.

Every wrapper calls slime's function once, with what it was given, and gives back what it returns or raises. What we do
around it cannot raise (`Attachment`). A function that is not there (an older or a newer slime) is left out: the metrics
come from `log` alone, and then without the step inside a rollout.

Functions reach Ray's actors by reference, except the methods of RolloutManager: `ray.remote` hides that class, so it is
pickled by value, and the module functions that it calls are wrapped instead.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rltop.integrations.after_import import Patch
from rltop.integrations.slime_attach import Attachment, Clock

MARK = "__rltop_wrapped__"

# The first of each is slime's layout since 2026-08-21, then back to 2025-11.
LOGGING = ("slime.observability.logging_utils", "slime.utils.logging_utils", "slime.utils.tracking_utils")
"""slime's logging module."""
_TIMER = ("slime.observability.timer", "slime.utils.timer")
_ROLLOUT_METRICS = {"slime.observability.rollout_metrics": "", "slime.ray.rollout": "_"}
"""Module -> what its functions' names begin with."""
_TRAIN_METRICS = (
    "slime.observability.train_metric_utils",
    "slime.backends.megatron_utils.data",
    "slime.backends.training_utils.log_utils",
)

Around = Callable[..., Any]


def patches(attachment: Attachment) -> dict[str, Patch]:
    """Module -> patch, for `AfterImport`."""
    a = attachment
    table: dict[str, Patch] = {}
    for name in LOGGING:
        table[name] = wrapping(a, {"log": log_metrics, "finish_tracking": _finish})
    for name in _TIMER:
        table[name] = lambda module: timer_patch(module, a)
    for name in _ROLLOUT_METRICS:
        table[name] = wrapping(a, {"log_rollout_data": rollout_metrics, "log_eval_rollout_data": scoped})
    for name in _TRAIN_METRICS:
        functions = {"log_rollout_data": train_metrics, "gather_log_data": scoped, "log_perf_data": scoped}
        table[name] = wrapping(a, functions)
    table["slime.rollout.base_types"] = wrapping(a, {"call_rollout_fn": _rollout_phase})
    table["slime.backends.megatron_utils.model"] = wrapping(a, {"train_one_step": train_step})
    table["slime.backends.megatron_utils.actor"] = lambda module: _actor(module, a)
    table["slime.backends.sglang_utils.sglang_engine"] = lambda module: engine_patch(module, a)
    return table


def wrap(owner: Any, name: str, around: Around) -> bool:
    """Put `around(original, args, kwargs)` in place of a function or method, once. False: there is none."""
    original = inspect.getattr_static(owner, name, None)
    if not callable(original) or isinstance(original, type):
        return False
    if getattr(original, MARK, False):
        return True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
    return True


def picker(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Gives one argument of a call by its name; None where the function has none of that name."""
    try:
        at = list(inspect.signature(function).parameters).index(name)
    except (ValueError, TypeError):
        return lambda args, kwargs: kwargs.get(name)
    return lambda args, kwargs: kwargs[name] if name in kwargs else args[at] if at < len(args) else None


def wrapping(attachment: Attachment, table: Mapping[str, Callable[[Any, Attachment], Around]]) -> Patch:
    def patch(module: ModuleType) -> None:
        for name, make in table.items():
            original = getattr(module, name, None)
            if callable(original):
                wrap(module, name, make(original, attachment))

    return patch


# ---------------------------------------------------------------- logging


def log_metrics(function: Any, a: Attachment) -> Around:
    metrics, step_key = picker(function, "metrics"), picker(function, "step_key")

    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a.log(metrics(args, kwargs), step_key(args, kwargs))
        return original(*args, **kwargs)

    return around


def _finish(function: Any, a: Attachment) -> Around:
    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a.end()
        return original(*args, **kwargs)

    return around


def scoped(function: Any, a: Attachment) -> Around:
    rollout_id = picker(function, "rollout_id")

    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = a.enter_scope(rollout_id(args, kwargs))
        try:
            return original(*args, **kwargs)
        finally:
            a.leave_scope(before)

    return around


# ---------------------------------------------------------------- the RolloutManager


def rollout_metrics(function: Any, a: Attachment) -> Around:
    rollout_id, settings, samples = (picker(function, name) for name in ("rollout_id", "args", "samples"))
    path = os.environ.get("RLTOP_SLIME_OVERRIDES")
    overrides = None if not path else _overrides(path, a)

    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rollout, given = rollout_id(args, kwargs), settings(args, kwargs)
        a.begin(given, rollout)  # where nothing called the rollout function: a replayed dump
        a.samples(rollout, given, samples(args, kwargs))
        before = a.enter_scope(rollout)
        try:
            return original(*args, **kwargs)
        finally:
            a.leave_scope(before)
            if overrides is not None:
                overrides.look()

    return around


def _overrides(path: str, a: Attachment) -> Any:
    from rltop.integrations.slime_overrides import Overrides

    return Overrides(path, a)


def _rollout_phase(function: Any, a: Attachment) -> Around:
    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # call_rollout_fn(fn, args, rollout_id, data_source, evaluation=…)
        settings, rollout = (args[1], args[2]) if len(args) > 2 else (None, kwargs.get("rollout_id"))
        name = "eval" if kwargs.get("evaluation") else "rollout"
        a.begin(settings, rollout)
        a.phase("rollout", name, "enter")
        clock = Clock()
        try:
            return original(*args, **kwargs)
        finally:
            a.phase("rollout", name, "leave", clock.seconds)

    return around


# ---------------------------------------------------------------- trainers


def train_metrics(function: Any, a: Attachment) -> Around:
    rollout_id, settings, data = (picker(function, name) for name in ("rollout_id", "args", "rollout_data"))

    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rollout = rollout_id(args, kwargs)
        a.rollout_data(rollout, settings(args, kwargs), data(args, kwargs))
        before = a.enter_scope(rollout)
        try:
            return original(*args, **kwargs)
        finally:
            a.leave_scope(before)

    return around


def train_step(function: Any, a: Attachment) -> Around:
    rollout_id, step_id = picker(function, "rollout_id"), picker(function, "step_id")

    def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a.train_step(rollout_id(args, kwargs), step_id(args, kwargs))
        return original(*args, **kwargs)

    return around


def timer_patch(module: ModuleType, a: Attachment) -> None:
    """Its timers are phases. How long one ran is ours to tell: what the class keeps of it is its own affair."""
    cls = getattr(module, "Timer", None)
    running: dict[str, Clock] = {}

    def edge(word: str) -> Around:
        def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = original(*args, **kwargs)
            name = str(args[1] if len(args) > 1 else kwargs.get("name"))
            if a.phase_of(name) is None:
                return result
            if word == "enter":
                running[name] = Clock()
            clock = running.pop(name, None) if word == "leave" else None
            a.timer(name, word, None if clock is None else clock.seconds)
            return result

        return around

    if cls is not None:
        wrap(cls, "start", edge("enter"))
        wrap(cls, "end", edge("leave"))


def _actor(module: ModuleType, a: Attachment) -> None:
    cls = getattr(module, "MegatronTrainRayActor", None)
    if cls is None:
        return
    role, rollout_id = picker(cls.init, "role"), picker(cls.train, "rollout_id")

    def init(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        a.trainer_up(role(args, kwargs), result)
        return result

    def train(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a.enter_scope(rollout_id(args, kwargs))
        try:
            return original(*args, **kwargs)
        finally:
            a.leave_scope(None)

    def update_weights(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, clock, ok = version_of(args[0]), Clock(), False
        try:
            result = original(*args, **kwargs)
            ok = True
            return result
        finally:
            if (version := version_of(args[0])) is not None and (version != before or not ok):
                a.weights(version, ok=ok, args=getattr(args[0], "args", None), elapsed_s=clock.seconds)

    wrap(cls, "init", init)
    wrap(cls, "train", train)
    wrap(cls, "update_weights", update_weights)


def version_of(actor: Any) -> Any:
    return getattr(getattr(actor, "weight_updater", None), "weight_version", None)


# ---------------------------------------------------------------- engines


def engine_patch(module: ModuleType, a: Attachment) -> None:
    cls = getattr(module, "SGLangEngine", None)
    if cls is None:
        return

    def becomes(state: str, *, on_error: str = "") -> Around:
        def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if on_error:
                    a.engine(args[0], on_error)
                raise
            a.engine(args[0], state)
            return result

        return around

    tags = picker(getattr(cls, "resume_memory_occupation", len), "tags")

    def resume(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        given = tags(args, kwargs)
        if given is None or "kv_cache" in given:  # with its weights alone it serves nothing
            a.engine(args[0], "HEALTHY")
        return result

    wrap(cls, "init", becomes("HEALTHY", on_error="CRASHED"))
    wrap(cls, "release_memory_occupation", becomes("OFFLOADED"))
    wrap(cls, "resume_memory_occupation", resume)
    wrap(cls, "shutdown", becomes("STOPPED"))
