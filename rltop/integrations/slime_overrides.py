"""Experimental: other flags on one of slime's own engines, in the middle of a run, with slime's own recovery.

RLTOP_SLIME_OVERRIDES names a file that the RolloutManager can read. It does so after each rollout, each content once:

    {"engine": 1, "server_args": {"disable_cuda_graph": true}, "env": {"CUDA_LAUNCH_BLOCKING": "1"}}

The engine's group gets the overrides (a null takes one back), Ray's default environment for slime's actors the
variables, the engine is shut down as slime's health monitor does it, and its slot is emptied. At the next weight sync
slime finds the empty slot, starts an engine with what is there now, and pushes the weights into it. Only that engine
differs; one that dies later in the same group comes back with the overrides too.

It reaches into what is private to slime, so `refusal` looks at every part of it first: where one is not as it was read
(624b824a8, 2026-08-21), nothing is done and the reason is told. `num_new_engines` is left alone: it makes slime push.
slime has tried the recovery with SGLang; this way into it was tried with stand-ins for the engines only.

Failure policy: nothing raises. Between two rollouts it waits for one engine to end, a minute at most.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.integrations.slime_attach import Attachment

VARIABLE = "RLTOP_SLIME_OVERRIDES"
SHUTDOWN_S = 60.0
_FRAMES = 12
_GROUP = ("all_engines", "engines", "nodes_per_engine", "num_new_engines", "sglang_overrides", "worker_type")
_MANAGER = ("args", "servers", "_get_updatable_server", "health_monitoring_pause", "recover_updatable_engines")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the file asks for."""

    engine: int
    """Position among all engines of the model that is trained."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Field of SGLang's ServerArgs -> value; None: not overridden any more."""
    env: Mapping[str, str | None] = field(default_factory=dict)


def read_wish(text: str) -> Wish:
    """Raises ValueError that says what is wrong."""
    given = json.loads(text)
    if not isinstance(given, dict) or set(given) - {"engine", "server_args", "env"}:
        raise ValueError("it takes a map of engine, server_args and env")
    engine, args, env = given.get("engine"), given.get("server_args", {}), given.get("env", {})
    if not isinstance(engine, int) or isinstance(engine, bool) or engine < 0:
        raise ValueError("engine must be the number of one")
    if not isinstance(args, dict) or not isinstance(env, dict):
        raise ValueError("server_args and env must be maps")
    if not args and not env:
        raise ValueError("neither server_args nor env: nothing to do")
    if wrong := [name for name, value in env.items() if value is not None and not isinstance(value, str)]:
        raise ValueError(f"{wrong[0]} must be text, or null")
    return Wish(engine, args, env)


class Overrides:
    """Does what the file asks for, once per content. `path`: the file; it may not exist yet."""

    def __init__(self, path: str, attachment: Attachment) -> None:
        self._path = Path(path)
        self._attachment = attachment
        self._done = ""

    def look(self) -> None:
        """After a rollout, called from within RolloutManager."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError:
            return
        if text == self._done:
            return
        self._done = text
        try:
            said = self._do(read_wish(text))
        except Exception as error:  # of slime, of Ray, of the file: the rollout goes on
            self._attachment.say("error", f"{self._path}: not done: {type(error).__name__}: {error}"[:500])
            return
        self._attachment.say("warn", f"experimental override: {said}")

    def _do(self, wish: Wish) -> str:
        manager = manager_above()
        env = default_env()
        if why := refusal(manager, env, wish):
            raise ValueError(why)
        group, at = locate(manager, wish.engine)
        manager.health_monitoring_pause()  # until the next rollout, as before every weight sync
        group.sglang_overrides = _merged(group.sglang_overrides, wish.server_args)
        after = _merged(env, wish.env)
        env.clear()
        env.update(after)
        shut_down(group, at)
        what = [f"{name}={value}" for name, value in (*wish.server_args.items(), *wish.env.items())]
        return f"engine {wish.engine} is down and comes back at the next weight sync with {', '.join(what)}"


def refusal(manager: Any, env: Any, wish: Wish) -> str:
    """Why it must not be done; empty: it may."""
    if manager is None or (missing := [name for name in _MANAGER if not hasattr(manager, name)]):
        return "this is not the RolloutManager that is known: " + (
            ", ".join(missing) if manager is not None else "none"
        )
    if not isinstance(env, dict):
        return "slime.ray.utils has no RAY_DEFAULT_ENV_VARS"
    if not getattr(manager.args, "use_fault_tolerance", False):
        return "without --use-fault-tolerance slime brings no engine back"
    if getattr(manager.args, "rollout_external", False):
        return "these engines are not slime's: restart them where they were started"
    server = manager._get_updatable_server()
    if server is None or not getattr(server, "server_groups", None):
        return "no model whose engines get weights"
    for group in server.server_groups:
        if lacks := [name for name in _GROUP if not hasattr(group, name)]:
            return f"slime's ServerGroup is another one: no {', '.join(lacks)}"
    located = locate(manager, wish.engine)
    if located is None:
        return f"there is no engine {wish.engine}"
    group, at = located
    if group.engines[at] is None:
        return f"engine {wish.engine} is down already"
    if group.num_new_engines:
        return "an engine is just coming back"
    return ""


def locate(manager: Any, engine: int) -> Any:
    """Group and position in it; None: there is no such engine."""
    for group in manager._get_updatable_server().server_groups:
        count = len(group.engines)
        if engine < count:
            return group, engine
        engine -= count
    return None


def shut_down(group: Any, at: int) -> None:
    """As slime's health monitor ends an engine, on all its nodes."""
    import ray

    nodes = group.nodes_per_engine
    for index in range(at * nodes, (at + 1) * nodes):
        actor = group.all_engines[index]
        if actor is not None:
            try:
                ray.get(actor.shutdown.remote(), timeout=SHUTDOWN_S)
            finally:
                ray.kill(actor)
                group.all_engines[index] = None


def manager_above() -> Any:
    """The RolloutManager in whose `generate` we are; None: there is none above."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        me = frame.f_locals.get("self")
        if me is not None and hasattr(me, "servers") and hasattr(me, "health_monitoring_pause"):
            return me
        frame = frame.f_back
    return None


def default_env() -> Any:
    """What slime gives every actor's environment."""
    return getattr(sys.modules.get("slime.ray.utils"), "RAY_DEFAULT_ENV_VARS", None)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**old, **new}.items() if value is not None or name not in new}
