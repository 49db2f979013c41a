"""Ray under the run: a private cluster on this machine or somebody's, one placement group, actors with names.

Failure policy. Whatever happens inside an actor comes out as one `RltopError` that says which actor, and how it ended:
an `RltopError` raised inside is passed on as it is, another exception becomes a failure that names it, a dead process
becomes "the trainer died" with the tail of what it wrote. While the driver waits for one actor, the others are watched,
so a dead engine ends a rollout in seconds instead of never.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.engines.ray_path import without_current_directory
from rltop.errors import RltopError
from rltop.train.lifetime import Signals

_WATCH_EVERY_S = 1.0
_PLACEMENT_NOTE_S = 30.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's minimum is 75 MiB; a rollout of the reference run is far below 1 MiB."""
_TAIL_LINES = 20
_log = logging.getLogger("rltop.train")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How to get a cluster."""

    address: str | None
    """A cluster to join; None starts a private one."""
    bundles: tuple[dict[str, float], ...]
    """Resources per bundle of the placement group, the trainer's first."""
    directory: Path
    """Where a private cluster keeps its sockets and logs. Its path must be short."""
    name: str = ""
    """Of the placement group, under which others find it in `namespace`; empty: it has none."""
    namespace: str | None = None
    """In a cluster that is joined; None: one of its own."""


class Actor:
    """A Ray actor with a name for people."""

    def __init__(self, cluster: Cluster, handle: Any, name: str) -> None:
        self._cluster = cluster
        self._handle = handle
        self._name = name
        self._pid = 0

    @property
    def name(self) -> str:
        """What people call it: `trainer`, `trainer rank 1`, `engine 0`."""
        return self._name

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self._cluster

    @property
    def pid(self) -> int:
        """Of its process; 0 before `ready`."""
        return self._pid

    def ready(self) -> None:
        """Wait until the process runs; raises RltopError if it cannot start."""
        self._pid = self._cluster.wait(self._handle.process_id.remote(), self._name, 0)

    def call(
        self, method: str, *args: Any, watch: Sequence[Callable[[], None]] = (), every_s: float = _WATCH_EVERY_S
    ) -> Any:
        """Result of a method. `watch` is called about so often meanwhile and may raise."""
        return self._cluster.wait(getattr(self._handle, method).remote(*args), self._name, self._pid, watch, every_s)

    def begin(self, method: str, *args: Any) -> Any:
        """Start a method without waiting; give what comes back to `result` or `settled`."""
        return getattr(self._handle, method).remote(*args)

    def result(self, ref: Any) -> Any:
        """Result of what `begin` started."""
        return self._cluster.wait(ref, self._name, self._pid)

    def settled(self, ref: Any, *, timeout_s: float) -> bool:
        """Whether what `begin` started ended well within `timeout_s`. For cleaning up: never raises."""
        ray = self._cluster.ray
        try:
            ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            _log.warning("%s: %s", self._name, str(error).strip().splitlines()[0] if str(error) else type(error))
            return False
        return True

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Result of a quick method, or TimeoutError."""
        ray = self._cluster.ray
        try:
            return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{self._name} did not answer in {timeout_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise self._cluster.translated(error, self._name, self._pid) from error


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected Ray, with the run's placement group."""

    ray: Any
    """The module, imported late: it costs 0.3 s, and `rltop --help` must not pay that."""
    group: Any
    signals: Signals
    session: Path | None
    """Directory of Ray's own logs; None when the cluster is somebody else's."""
    exposed: str = ""
    """Why strangers may run code in it, in words; "" when they may not (`exposure`)."""

    @property
    def address(self) -> str:
        """`host:port` of its head, whatever name it was joined under."""
        return str(self.ray.get_runtime_context().gcs_address)

    def actor(self, cls: type[Any], *args: Any, name: str, bundle: int, cpus: float, lanes: int = 1) -> Actor:
        """Start an actor of a plain class in a bundle. It must have a method `process_id`.

        lanes: how many of its methods may run at a time, each in a thread of its own.
        """
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=bundle
        )
        remote = self.ray.remote(cls).options(num_cpus=cpus, scheduling_strategy=strategy, max_concurrency=lanes)
        return Actor(self, remote.remote(*args), name)

    def wait(
        self,
        ref: Any,
        name: str,
        pid: int,
        watch: Sequence[Callable[[], None]] = (),
        every_s: float = _WATCH_EVERY_S,
    ) -> Any:
        """The value of `ref`, watching signals and neighbours meanwhile."""
        while True:
            self.signals.check()
            ready, _ = self.ray.wait([ref], timeout=every_s)
            if ready:
                break
            for look in watch:
                look()
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            raise self.translated(error, name, pid) from error

    def translated(self, error: Exception, name: str, pid: int) -> RltopError:
        """What a person is told about an error that came out of an actor."""
        if isinstance(error, self.ray.exceptions.RayTaskError):
            cause = getattr(error, "cause", None)
            if isinstance(cause, RltopError):
                return cause
            _log.error("%s: %s", name, error)
            return RltopError(
                f"the {name} failed",
                why=f"{type(cause).__name__}: {cause}" if cause else str(error).strip().splitlines()[-1],
                do="the traceback is above; if it is not your code, it is rltop's: please report it",
                exit_code=1,
            )
        tail = self._tail(pid)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        last = "".join(f"\n       | {line}" for line in tail)
        return RltopError(
            f"the {name} died" + (f" (pid {pid})" if pid else " before it was up"),
            why=reason + ("\n       its last lines:" + last if last else ""),
            do="out of memory? look at `dmesg | tail`; otherwise the lines above say why",
            exit_code=1,
        )

    def _tail(self, pid: int) -> list[str]:
        """Last lines that a worker process wrote, from Ray's files of this session."""
        if self.session is None or not pid:
            return []
        lines: list[str] = []
        for path in sorted((self.session / "logs").glob(f"worker-*-{pid}.*")):
            with contextlib.suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()
        marks = (":job_id:", ":actor_name:", ":task_name:")
        return [line[:300] for line in lines if line.strip() and not line.startswith(marks)][-_TAIL_LINES:]


@contextlib.contextmanager
def ray_cluster(options: RayOptions, signals: Signals) -> Iterator[Cluster]:
    """Connect, make the placement group, and let go again. A private cluster ends with the block."""
    with contextlib.ExitStack() as stack:
        private = options.address is None
        stack.enter_context(_environment(private))
        ray = _import_ray()
        stack.callback(_shutdown, ray)
        session = None
        if private:
            cpus = sum(bundle.get("CPU", 0) for bundle in options.bundles)
            with _fewer_helpers(ray):
                _start(ray, options.directory, cpus=cpus, signals=signals)
            session = options.directory / "session_latest"
        else:
            _join(ray, str(options.address), options.namespace, signals)
        group = _place(ray, options.bundles, options.name, signals)
        yield Cluster(ray, group, signals, session.resolve() if session else None, _exposed(ray, private))


def exposure(*, private: bool, version: str, knows_tokens: bool, mode: str) -> str:
    """Why whoever reaches this Ray's ports may run code in it, in words; "" when only holders of its token may.

    version: Ray's. knows_tokens: whether it has token authentication at all. mode: RAY_AUTH_MODE.
    """
    if knows_tokens and mode.lower() == "token":
        return ""
    if not knows_tokens:
        why = f"Ray {version} has no token authentication (pip install -U ray)"
    elif private:
        why = f"RAY_AUTH_MODE is {mode!r} (leave it unset, and rltop makes a token for the run)"
    else:
        # Joined without a token: so it asks nobody for one.
        why = "the cluster that was joined asks for no token (RAY_AUTH_MODE=token where it is started)"
    return f"Ray listens on every interface and lets anybody in who reaches it: {why}"


def _exposed(ray: Any, private: bool) -> str:
    knows = importlib.util.find_spec("ray._private.authentication") is not None
    mode = os.environ.get("RAY_AUTH_MODE", "")
    return exposure(private=private, version=str(ray.__version__), knows_tokens=knows, mode=mode)


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RltopError(
            "Ray is not installed", why=str(error), do="pip install 'rltop[train]'", exit_code=2
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)  # what goes wrong comes out as an exception anyway
    return ray


@contextlib.contextmanager
def _environment(private: bool) -> Iterator[None]:
    """Settings that Ray and its workers read from the environment, restored afterwards.

    Ray's servers listen on all interfaces whatever address they are given, so a private cluster takes part only in
    conversations that show a token made for this run.
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray gives its workers niceness 15: on a busy machine training would then wait for whoever watches it.
        "RAY_worker_niceness": "0",
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    if private and sys.platform.startswith("linux") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine: gloo shall not look for it under a host name that may not resolve.
        settings |= {"GLOO_SOCKET_IFNAME": "lo"}
    if private and "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in [*settings, "RAY_ADDRESS"]}
    os.environ.update(settings)
    if private:
        os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _fewer_helpers(ray: Any) -> Iterator[None]:
    """Ray starts without its autoscaler's monitor and its log monitor, a second of computing each.

    A private cluster neither grows nor sends its logs anywhere. `ray.init` has no argument for that, only what it
    calls has; a Ray that calls something else starts all of them, as ever.
    """
    module: Any = getattr(getattr(ray, "_private", None), "parameter", None)
    usual = getattr(module, "RayParams", None)
    fewer = {"no_monitor": True, "include_log_monitor": False}
    if usual is None or not set(fewer) <= set(inspect.signature(usual).parameters):
        yield
        return
    module.RayParams = functools.partial(usual, **fewer)
    try:
        yield
    finally:
        module.RayParams = usual


def _start(ray: Any, directory: Path, *, cpus: float, signals: Signals) -> None:
    """Start Ray's processes and connect.

    In a thread, because Ray waits for its own servers in ways that no signal interrupts: this thread stays awake.
    """
    error = _awake(
        lambda: ray.init(
            num_cpus=int(cpus),
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            job_config=without_current_directory(),
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(directory),
        ),
        signals,
    )
    if error is not None:
        raise RltopError(
            "the local Ray did not start",
            where=str(directory),
            why=_last_line(error),
            do="is there room in the temporary directory and in /dev/shm? RAY_ADDRESS joins a running cluster instead",
            exit_code=1,
        ) from error


def _join(ray: Any, address: str, namespace: str | None, signals: Signals) -> None:
    error = _awake(
        lambda: ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            job_config=without_current_directory(address),
        ),
        signals,
    )
    if error is not None:
        raise RltopError(
            "cannot join the Ray cluster",
            where=f"--ray-address {address}",
            why=_last_line(error),
            do="`ray status --address ADDRESS` says whether it is up; if it wants a token, export RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; leave the flag out for a private one",
        ) from error


def _awake(work: Callable[[], object], signals: Signals) -> BaseException | None:
    """Run `work` in a thread and wait for it, open to signals meanwhile. Returns what it raised.

    After success the thread stays: Ray asks the kernel to kill its servers when their parent dies
    (PR_SET_PDEATHSIG), and the kernel takes the *thread* that forked them for the parent.
    """
    raised: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        done.set()
        if not raised:
            threading.Event().wait()

    threading.Thread(target=body, name="ray-init", daemon=True).start()
    while not done.wait(0.1):
        signals.check()
    return raised[0] if raised else None


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _place(ray: Any, bundles: Sequence[dict[str, float]], name: str, signals: Signals) -> Any:
    """The placement group, once it is placed. Waits as long as it takes, and says every 30 s what it waits for."""
    group = ray.util.placement_group(list(bundles), strategy="PACK", name=name)
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            wanted[resource] = wanted.get(resource, 0) + amount
    while not group.wait(timeout_seconds=_PLACEMENT_NOTE_S):
        signals.check()
        have = ray.cluster_resources()
        _log.warning(
            "Waiting for placement group of %s: %s registered with Ray, %s available.",
            wanted,
            {resource: have.get(resource, 0) for resource in wanted},
            {resource: ray.available_resources().get(resource, 0) for resource in wanted},
        )
    return group


def _shutdown(ray: Any) -> None:
    try:
        ray.shutdown()
    except Exception:
        _log.error(
            "Ray did not shut down in good order; its processes are ended one by one\n%s", traceback.format_exc()
        )
