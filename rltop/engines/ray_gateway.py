"""The process between a daemon and a Ray cluster: `python -m rltop.engines.ray_gateway FD OPTIONS`.

A process of its own, because Ray ends the process of a driver whose cluster is gone, and takes its signal handlers. It
reads requests from a socket and answers them from threads; it ends when the socket is closed. What it made in the
cluster stays there: per engine slot one detached actor with a `Host` in it (`HostActor`), and where nobody gave a
placement group, one detached group of one bundle. Both are found again by name.

Failure policy. An actor that died while its node lives is made again in the same bundle (or, when its placement group
was removed, beside it): the engine is no child of it and goes on. A node that Ray calls dead is `LostNode`; the group
is placed elsewhere by Ray, and the next start uses that. Everything else (no answer in time, Ray not reachable) is an
error that says nothing about the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rltop.engines.host_actor import HostActor
from rltop.engines.launcher import Launched, LaunchSpec, Look, LostNode, Remains
from rltop.engines.ray_path import without_current_directory
from rltop.errors import RltopError

THREADS = 64
ANSWER_S = 5.0
"""For a glance; a node that was just cut off does not answer, and Ray needs some seconds to call it dead."""
SLOW_S = 20.0
"""For a kill, which waits for the processes to go."""
KNOCK_S = 5.0
PLACE_S = 60.0
"""For a bundle to be placed, and for the first worker on a node to start."""
NAME_S = 5.0
"""For the name of an actor that was ended to be free again."""
DEFAULT_PLACE: dict[str, Any] = {"resources": {"CPU": 1}}
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Slot:
    """An engine slot's actor."""

    actor: Any
    node_id: str
    place: dict[str, Any]


class _GroupGone(RltopError):
    """The placement group that somebody made for the engine is not there any more."""


class Gateway:
    """What the daemon may ask of a cluster. Every method may be called from several threads."""

    def __init__(self, ray: Any, namespace: str) -> None:
        self._ray = ray
        self._namespace = namespace
        self._slots: dict[str, Slot] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._mutex = threading.Lock()

    # ------------------------------------------------------------------ requests

    def start(self, spec: LaunchSpec) -> Launched:
        """Place the slot if it has no living place, and start the engine there."""
        name, place = _name(spec.marker, spec.directory), dict(spec.place or DEFAULT_PLACE)
        with self._lock(name):
            slot = self._living(name)
            if slot is None or slot.place != place:
                self._drop(name)
                slot = self._place(name, place)
        launched: Launched = self._call(slot, "start", spec, timeout_s=SLOW_S)
        return launched

    def look(self, launched: Launched, place: dict[str, Any]) -> Look:
        found: Look = self._ask(launched, place, "look", launched)
        return found

    def read_log(self, launched: Launched, place: dict[str, Any], offset: int, limit: int) -> bytes:
        found: bytes = self._ask(launched, place, "read_log", launched, offset, limit)
        return found

    def terminate(self, launched: Launched, place: dict[str, Any]) -> None:
        self._ask(launched, place, "terminate", launched)

    def kill(self, launched: Launched, place: dict[str, Any]) -> None:
        self._ask(launched, place, "kill", launched, timeout_s=SLOW_S)

    def remains(self, launched: Launched, place: dict[str, Any]) -> Remains:
        found: Remains = self._ask(launched, place, "remains", launched, timeout_s=SLOW_S)
        return found

    def environ(self, launched: Launched, place: dict[str, Any]) -> dict[str, str] | None:
        found: dict[str, str] | None = self._ask(launched, place, "environ", launched)
        return found

    def adopt(self, directory: str, marker: str, place: dict[str, Any], node_id: str) -> Launched | None:
        """place, node_id: as it was started; the actor may have died with nobody there to make it again."""
        name = _name(marker, directory)
        with self._lock(name):
            slot = self._living(name)
            if slot is None and node_id and self._node_alive(node_id):
                slot = self._again(name, place, node_id)
        if node_id and (slot is None or slot.node_id != node_id):
            raise _lost(node_id)
        if slot is None:
            return None
        found: Launched | None = self._call(slot, "adopt", directory, marker)
        return found

    def release(self, launched: Launched, place: dict[str, Any]) -> None:
        """Give the slot's place back to the cluster if nothing of the engine lives."""
        with contextlib.suppress(LostNode):
            seen = self.look(launched, place)
            if seen.alive or seen.lock_held:
                return
        self._drop(_name(launched.marker, launched.directory))

    # ------------------------------------------------------------------ slots

    def _ask(
        self, launched: Launched, place: dict[str, Any], method: str, *args: Any, timeout_s: float = ANSWER_S
    ) -> Any:
        name = _name(launched.marker, launched.directory)
        slot = self._slots.get(name)
        if slot is not None and slot.node_id == launched.node_id:
            with contextlib.suppress(self._ray.exceptions.ActorDiedError):
                return self._call(slot, method, *args, timeout_s=timeout_s)
        if not self._node_alive(launched.node_id):
            raise _lost(launched.node_id, launched.node)
        with self._lock(name):
            slot = self._living(name) or self._again(name, place or DEFAULT_PLACE, launched.node_id)
        if slot.node_id != launched.node_id:
            raise _lost(launched.node_id, launched.node)
        return self._call(slot, method, *args, timeout_s=timeout_s)

    def _call(self, slot: Slot, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Raises ActorDiedError where the caller can do something about it, else RltopError."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(getattr(slot.actor, method).remote(*args), timeout=timeout_s)
        except errors.ActorDiedError:
            raise
        except errors.RayTaskError as error:
            if isinstance(error.cause, RltopError):
                raise error.cause from None
            raise RltopError(f"{method} failed on the engine's node", why=str(error.cause), exit_code=1) from error
        except errors.RayError as error:
            why = str(error).strip().splitlines()
            raise RltopError(
                "the engine's node does not answer",
                where=f"Ray node {slot.node_id[:8]}",
                why=why[0] if why else "",
                exit_code=1,
            ) from error

    def _living(self, name: str) -> Slot | None:
        """The slot's actor if it answers; None when there is none, or it is dead or not yet anywhere."""
        try:
            actor = self._ray.get_actor(name, namespace=self._namespace)
            about = self._ray.get(actor.about.remote(), timeout=ANSWER_S)
        except (ValueError, self._ray.exceptions.RayError):
            self._slots.pop(name, None)
            return None
        slot = self._slots[name] = Slot(actor, about["node_id"], about["place"])
        return slot

    def _place(self, name: str, place: dict[str, Any]) -> Slot:
        """An actor in the slot's bundle, wherever that is now. Raises RltopError when it is not placed in time."""
        group, index = self._group(name, place)
        if not group.wait(timeout_seconds=PLACE_S):
            raise self._unplaced(name, place)
        table = self._ray.util.placement_group_table(group)
        resources = dict(place.get("resources") or table["bundles"][index])
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )
        return self._actor(name, place, strategy, resources)

    def _again(self, name: str, place: dict[str, Any], node_id: str) -> Slot:
        """An actor for an engine that was started on this node: in its bundle, or beside it when the group is gone.

        The group of a run ends with the run's driver, and every actor in it; the engine is to be ended after that.
        """
        try:
            return self._place(name, place)
        except _GroupGone:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            # Not its place: the next start makes one, or says that it can not.
            return self._actor(name, {**place, "beside": True}, strategy, {})

    def _actor(self, name: str, place: dict[str, Any], strategy: Any, resources: dict[str, Any]) -> Slot:
        options = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources or None,
            "scheduling_strategy": strategy,
            "max_concurrency": 8,  # a kill takes seconds, and looks go on meanwhile
            "max_restarts": 0,
        }
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                actor = self._ray.remote(HostActor).options(**options).remote(place)
                break
            except ValueError as error:  # the name of the one before is not free yet
                if time.monotonic() > deadline:
                    raise RltopError("cannot place the engine", where=name, why=str(error), exit_code=1) from error
                time.sleep(0.1)
        try:
            about = self._ray.get(actor.about.remote(), timeout=PLACE_S)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise RltopError(
                "the worker on the engine's node did not start",
                where=name,
                why=(str(error).strip().splitlines() or [type(error).__name__])[-1],
                do="is this version of rltop installed there?",
                exit_code=1,
            ) from error
        slot = self._slots[name] = Slot(actor, about["node_id"], place)
        return slot

    def _group(self, name: str, place: Mapping[str, Any]) -> tuple[Any, int]:
        given = place.get("placement_group")
        try:
            group = self._ray.util.get_placement_group(given or name)
        except ValueError as error:
            if given:
                raise _GroupGone(
                    "there is no such placement group", where=str(given), why=str(error).splitlines()[0]
                ) from error
            bundle = dict(place.get("resources") or DEFAULT_PLACE["resources"])
            group = self._ray.util.placement_group([bundle], name=name, lifetime="detached")
        return group, int(place.get("bundle", 0)) if given else 0

    def _unplaced(self, name: str, place: Mapping[str, Any]) -> RltopError:
        wanted = place.get("resources") or f"bundle {place.get('bundle', 0)} of {place.get('placement_group')}"
        free = {key: value for key, value in self._ray.available_resources().items() if ":" not in key}
        return RltopError(
            "the engine's bundle was not placed",
            where=name,
            why=f"wanted {wanted}; after {PLACE_S:g} s the cluster has free {free}",
            do="wait for room, or ask for less",
            exit_code=1,
        )

    def _drop(self, name: str) -> None:
        """End the actor and the group that was made for it. The engine is not touched."""
        self._slots.pop(name, None)
        with contextlib.suppress(ValueError):
            self._ray.kill(self._ray.get_actor(name, namespace=self._namespace))
        with contextlib.suppress(ValueError):
            self._ray.util.remove_placement_group(self._ray.util.get_placement_group(name))

    def _node_alive(self, node_id: str) -> bool:
        return any(node["NodeID"] == node_id and node["Alive"] for node in self._ray.nodes())

    def _lock(self, name: str) -> threading.Lock:
        with self._mutex:
            return self._locks.setdefault(name, threading.Lock())


def _name(marker: str, directory: str) -> str:
    """Of the slot's actor and group: of the run, this machine and the engine, not of the generation."""
    where = f"{socket.gethostname()} {Path(directory).parent}"
    return f"rltop/{marker.rpartition('/')[0]}/{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def _lost(node_id: str, node: str = "") -> LostNode:
    return LostNode(
        "the engine's node is lost",
        where=f"{node} (Ray node {node_id[:8]})".strip(),
        why="Ray calls the node dead",
        do="the engine is placed again on another node when one has room",
        exit_code=1,
    )


# ---------------------------------------------------------------------- the process

ARGUMENTS: dict[str, dict[str, type]] = {
    "start": {"spec": LaunchSpec},
    **{
        name: {"launched": Launched}
        for name in ("look", "read_log", "terminate", "kill", "remains", "environ", "release")
    },
    "adopt": {},
}
"""Requests, and which of their arguments are more than plain data."""


def pack(message: object) -> bytes:
    """A frame: length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Bytes that follow the first `FRAME_HEAD`."""
    length: int = _LENGTH.unpack(head)[0]
    return length


FRAME_HEAD = _LENGTH.size


def answer(gateway: Gateway, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a request says; failures are part of the answer."""
    method, args = str(request["method"]), dict(request["args"])
    try:
        for name, kind in ARGUMENTS[method].items():
            args[name] = msgspec.convert(args[name], kind)
        return {"id": request["id"], "value": getattr(gateway, method)(**args)}
    except RltopError as error:
        return {"id": request["id"], "error": told(error)}
    except Exception as error:  # Ray's, for the most part: a lost connection has many names
        logging.getLogger(__name__).exception("%s", method)
        text = (str(error).strip().splitlines() or [""])[0]
        failed = RltopError("Ray does not answer", why=f"{type(error).__name__}: {text}", exit_code=1)
        return {"id": request["id"], "error": told(failed)}


def told(error: RltopError) -> dict[str, Any]:
    """An error as plain data."""
    names = ("what", "where", "why", "do", "exit_code")
    return {"lost": isinstance(error, LostNode), **{name: getattr(error, name) for name in names}}


def connect(options: Mapping[str, Any]) -> Any:
    """Join the cluster; returns the module. Raises RltopError."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    if token := options.get("token_file"):
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(settings)
    os.environ.pop("RAY_ADDRESS", None)
    _knock(str(options["address"]))
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RltopError("Ray is not installed", why=str(error), do="pip install 'rltop[train]'") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=options["address"],
            namespace=options["namespace"],
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            job_config=without_current_directory(str(options["address"])),
        )
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise RltopError(
            "cannot join the Ray cluster",
            where=str(options["address"]),
            why=lines[-1] if lines else type(error).__name__,
            do="`ray status --address ADDRESS` says whether it is up; does it want a token (RAY_AUTH_TOKEN_PATH)?",
            exit_code=1,
        ) from error
    return ray


def _knock(address: str) -> None:
    """Ray itself waits for a minute for a cluster that is not there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        raise RltopError(
            "cannot reach the Ray cluster",
            where=address,
            why=error.strerror or str(error),
            do="is it up, and is this the address of its head (`ray status --address ADDRESS`)?",
            exit_code=1,
        ) from error


def main(argv: list[str]) -> int:
    """Serve one daemon until it closes the socket."""
    channel, options = socket.socket(fileno=int(argv[0])), json.loads(argv[1])
    writing = threading.Lock()

    def send(message: object) -> None:
        with writing, contextlib.suppress(OSError):
            channel.sendall(pack(message))

    try:
        ray = connect(options)
    except RltopError as error:
        send({"id": 0, "error": told(error)})
        return 1
    gateway = Gateway(ray, options["namespace"])
    send({"id": 0, "value": None})
    pool = ThreadPoolExecutor(THREADS)
    with channel.makefile("rb") as stream:
        while head := stream.read(FRAME_HEAD):
            request = msgspec.msgpack.decode(stream.read(frame_length(head)))
            pool.submit(_serve, gateway, request, send)
    # Not `ray.shutdown`: threads may hang in calls to a cluster that is gone, and nothing here needs a good end.
    os._exit(0)


def _serve(gateway: Gateway, request: Mapping[str, Any], send: Callable[[object], None]) -> None:
    send(answer(gateway, request))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
