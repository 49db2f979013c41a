"""What a supervisor does about one engine that takes a while: ask it, wait for it, clear it away, keep its evidence.

Each chore is a coroutine that ends in one event for the state machine, or in None when there is nothing to say. It is
cancelled when the engine leaves the state it was begun for, so none of them may leave anything half-done.

Failure policy: an engine that does not answer is no exception here but an event, or another try.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rltop.engines.client import AsyncEngineClient, EngineRefused, EngineUnreachable
from rltop.engines.crash import Crash
from rltop.engines.launcher import Launched, Launcher, LaunchSpec, Look, Remains
from rltop.engines.requests import Required
from rltop.engines.states import Awaits, Drained, Held, Reclaimed, State, Synced
from rltop.engines.toggles import read_argv
from rltop.engines.verify import Effective, verify
from rltop.errors import RltopError
from rltop.runs.masks import is_secret, mask_command

PAUSE_S = 0.1
"""Between two questions while an operation waits for the answer."""
ANSWER_S = 5.0
"""A question that an engine answers at once when it is well."""
MUTE_S = 3.0
"""An engine that does not answer for so long has nothing to drain."""
CLOSE_S = 2.0
"""For what is on its way when its supervisor ends: a crash's evidence, the close of a connection."""
LOAD_RETRY_S = 10.0
"""Between two attempts to load weights from disk."""
EVIDENCE_LINES = 2000
EVIDENCE_BYTES = 1 << 20
OLDER = 3
"""Earlier generations that may still hold a slot's lock: of a supervisor that was killed while it launched."""


@dataclass(frozen=True, slots=True)
class _Begun:
    task: asyncio.Task[Any]
    states: frozenset[State]


class Board:
    """The chores of one engine that are under way. Each is for certain states and is cancelled outside of them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._begun: dict[str, _Begun] = {}
        self._number = 0

    def begin(self, name: str, states: frozenset[State], work: Coroutine[Any, Any, Any]) -> None:
        """Begin it, unless it is under way."""
        old = self._begun.get(name)
        if old is not None and not old.task.cancelling():
            return work.close()
        if old is not None:
            self._begun[self._unique(name)] = self._begun.pop(name)
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(lambda _: self._wake())
        self._begun[name] = _Begun(task, states)
        return None

    def always(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """One that no change of state ends."""
        self.begin(self._unique(name), frozenset(State), work)

    def left_for(self, state: State) -> None:
        """Cancel what is not for this state."""
        for begun in self._begun.values():
            if state not in begun.states:
                begun.task.cancel()

    def finished(self) -> list[tuple[str, frozenset[State], asyncio.Task[Any]]]:
        """Those that ended since the last call, the cancelled left out."""
        ended = [(name, begun) for name, begun in self._begun.items() if begun.task.done()]
        for name, _ in ended:
            del self._begun[name]
        return [(name, begun.states, begun.task) for name, begun in ended if not begun.task.cancelled()]

    async def close(self) -> None:
        """Cancel everything and wait for it; what no change of state ends may come to its end, within a moment."""
        whole = [begun.task for begun in self._begun.values() if begun.states == frozenset(State)]
        for begun in self._begun.values():
            if begun.task not in whole:
                begun.task.cancel()
        if whole:
            await asyncio.wait(whole, timeout=CLOSE_S)
        for begun in self._begun.values():
            begun.task.cancel()
        await asyncio.gather(*(begun.task for begun in self._begun.values()), return_exceptions=True)

    def _unique(self, name: str) -> str:
        self._number += 1
        return f"{name} {self._number}"


async def drain(client: AsyncEngineClient | None) -> Drained:
    """Wait until nothing runs and nothing is queued, seen twice: a request may be on its way."""
    if client is None:
        return Drained("it had no address yet")
    clock = asyncio.get_running_loop().time
    idle, silent_since = 0, clock()
    while True:
        try:
            async with asyncio.timeout_at(silent_since + MUTE_S):
                idle = idle + 1 if not busy(await client.loads()) else 0
            silent_since = clock()
        except EngineRefused:
            return Drained("it does not say what it runs")
        except (EngineUnreachable, TimeoutError):
            if clock() - silent_since >= MUTE_S:
                return Drained("it does not answer")
        if idle >= 2:
            return Drained()
        await asyncio.sleep(PAUSE_S)


def busy(loads: Mapping[str, Any]) -> int:
    """Requests that run or wait, by an answer of `/v1/loads`."""
    told = loads.get("loads")
    ranks = [rank for rank in told if isinstance(rank, dict)] if isinstance(told, list) else []
    counts = [rank.get(name) for rank in ranks for name in ("num_running_reqs", "num_waiting_reqs")]
    return sum(int(count) for count in counts if isinstance(count, int | float) and isfinite(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What a started engine says of itself."""

    version: str
    """SGLang's, whose arguments it takes."""
    info: Mapping[str, Any]
    toggles: Mapping[str, Effective]
    wanted: Mapping[str, str]

    @property
    def ignored(self) -> list[str]:
        """Toggles whose flag was accepted and had no effect."""
        return [name for name, found in self.toggles.items() if found.holds is False]

    @property
    def dumping(self) -> bool:
        """CUDA core dumps are on."""
        return "core_dump" in self.toggles and self.toggles["core_dump"].value == "on"

    @property
    def blocking(self) -> bool:
        """Every launch blocks, and no graph hides several in one: where a fault is noticed is where it was launched."""
        seen = {name: found.value for name, found in self.toggles.items()}
        return seen.get("launch_blocking") == "on" and seen.get("cuda_graph") == seen.get("prefill_graph") == "off"


async def inspect(
    client: AsyncEngineClient,
    launcher: Launcher,
    spec: LaunchSpec,
    launched: Launched,
    log_head: bytes,
    fallback_version: str,
) -> Verified:
    """Wait until it answers, then compare what is in effect with what was asked for."""
    while True:
        with contextlib.suppress(EngineUnreachable, EngineRefused, TimeoutError):
            async with asyncio.timeout(ANSWER_S * 4):
                info = await client.server_info()
            break
        await asyncio.sleep(PAUSE_S)
    version = str(info.get("sglang_version") or info.get("version") or fallback_version)
    metrics = ""
    with contextlib.suppress(EngineUnreachable, EngineRefused, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            metrics = await client.metrics_text()
    environ = None
    with contextlib.suppress(RltopError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            environ = await launcher.environ(launched)
    model = await asyncio.to_thread(model_config, spec.model_path)
    wanted = read_argv(spec.args, spec.env, version=version, model=model)
    toggles = verify(
        wanted,
        server_info=info,
        metrics=metrics,
        log_lines=log_head.decode(errors="replace").splitlines(),
        environ=environ,
        version=version,
    )
    return Verified(version=version, info=info, toggles=toggles, wanted=wanted)


def model_config(path: str) -> dict[str, Any] | None:
    """config.json of the model; None when it cannot be read here."""
    try:
        found = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


async def sync(
    client: AsyncEngineClient,
    required: Callable[[], Required],
    model_path: str,
    *,
    emptied: bool,
    always_digest: bool,
) -> tuple[Synced | Awaits, str, str]:
    """Bring it to the required weights where that is the fleet's to do; the event, and the version and digest it holds.

    The engine's own word decides, asked after everything else was done. emptied: its word counts only after a load.
    """
    wanted = required()
    try:
        async with asyncio.timeout(ANSWER_S):
            held = await client.weight_version()
        if held != wanted.version or emptied:
            told = await _bring(
                client, wanted, model_path, "nothing: its memory was released" if emptied else repr(held)
            )
            if told is not None:
                return told, held, ""
            held = await client.weight_version()
            if held != wanted.version:
                return Awaits(f"loaded {wanted.version!r} from disk, but it says {held!r}"), held, ""
        found = ""
        if wanted.digest or always_digest:
            found = overall(await client.weights_checker("checksum"))
        if wanted.digest and found != wanted.digest:
            why = f"it calls its weights {held!r}, but their digest is {found[:12]}, not {wanted.digest[:12]}"
            return Awaits(why), held, found
    except (EngineUnreachable, EngineRefused, TimeoutError) as error:
        return Awaits(f"cannot be asked for its weights: {error or 'no answer in time'}"), "", ""
    if required() != wanted:
        return Awaits(f"the required version moved on from {wanted.version!r}"), held, found
    return Synced(held), held, found


async def _bring(client: AsyncEngineClient, wanted: Required, model_path: str, holds: str) -> Awaits | None:
    """Load what the fleet can load; None when that was done."""
    if wanted.source == "trainer":
        return Awaits(f"awaits weight version {wanted.version!r} from the trainer; it holds {holds}")
    path = wanted.path or model_path
    try:
        await client.update_weights_from_disk(path, wanted.version)
    except (EngineUnreachable, EngineRefused) as error:
        told = str(error).splitlines()
        why = f"cannot load weight version {wanted.version!r} from {path}: {' '.join(told)}"
        await asyncio.sleep(LOAD_RETRY_S)
        return Awaits(why, refused=True)
    return None


async def digest(client: AsyncEngineClient) -> tuple[str, str]:
    """Version and digest of its weights; both empty when they changed meanwhile or it does not say."""
    try:
        before = await client.weight_version()
        found = overall(await client.weights_checker("checksum"))
        return (before, found) if await client.weight_version() == before else ("", "")
    except (EngineUnreachable, EngineRefused):
        return "", ""


def overall(answer: Mapping[str, Any]) -> str:
    """The digest over all weights of the first rank, as `/weights_checker` says it."""
    for rank in answer.get("ranks") or ():
        if isinstance(rank, dict) and rank.get("per_gpu_checksum"):
            return str(rank["per_gpu_checksum"])
    return ""


async def reclaim(
    launcher: Launcher, launched: Launched | None, specs: Iterable[LaunchSpec]
) -> tuple[Reclaimed | Held, Remains]:
    """Kill what is left of it and is ours; say what remains.

    specs: of other generations that may still be there; they are looked for.
    """
    found = [launched] if launched is not None else []
    for spec in specs:
        old = await launcher.adopt(spec.directory, spec.marker)
        found += [old] if old is not None else []
    remains = Remains()
    for one in found:
        remains = await launcher.remains(one)
        if not remains.clean:
            await launcher.kill(one)
            remains = await launcher.remains(one)
        if not remains.clean:
            return Held(held(remains)), remains
    return Reclaimed(), remains


def held(remains: Remains) -> str:
    """Who holds what, for people."""
    parts = [f"pid {use.pid} ({use.name or 'gone'}) holds {use.mib} MiB of GPU {use.index}" for use in remains.gpu]
    parts += [f"pid {pid} ({name}) still runs" for pid, name in remains.processes]
    seen = {pid for pid, _ in remains.processes}
    parts += [f"pid {pid} ({name}) holds its lock" for pid, name in remains.lock_holders if pid not in seen and pid]
    if any(pid == 0 for pid, _ in remains.lock_holders):
        parts.append("a process that cannot be seen holds its lock")
    if remains.port_holder:
        parts.append(f"its port is {remains.port_holder}")
    return "; ".join(parts)


def strangers(remains: Remains) -> str:
    """Who else uses the GPUs: told, never killed, and not waited for."""
    return "; ".join(
        f"pid {use.pid} ({use.name or 'unknown'}) holds {use.mib} MiB of GPU {use.index} and is not ours"
        for use in remains.gpu
        if not use.ours
    )


async def keep_evidence(
    launcher: Launcher,
    launched: Launched,
    folder: Path,
    *,
    crash: Crash,
    look: Look | None,
    spec: LaunchSpec,
    versions: Mapping[str, str],
    weights: str = "",
    served_s: float | None = None,
    busy_s: float | None = None,
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write `crash.json` (cause, fingerprint, signal, flags, versions, weights, for how long it was ready and for how
    much of that it had requests, `/server_info`) and `crash.log` (the last 2,000 lines)."""
    size = look.log_size if look is not None else EVIDENCE_BYTES
    data = b""
    with contextlib.suppress(RltopError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            data = await launcher.read_log(launched, max(0, size - EVIDENCE_BYTES), EVIDENCE_BYTES)
    story = {
        "crash": asdict(crash),
        "exit_code": look.exit_code if look else None,
        "signal": -look.exit_code if look and look.exit_code is not None and look.exit_code < 0 else None,
        "ended": look.ended if look else None,
        "started": launched.started,
        "marker": launched.marker,
        "node": launched.node,
        # The folder is passed on with bug reports.
        "args": mask_command(spec.args, None),
        "env": {name: "***" if is_secret(name, value) else value for name, value in spec.env.items()},
        "unset": list(spec.unset),
        "model_path": spec.model_path,
        "versions": dict(versions),
        "weight_version": weights,
        "served_s": served_s,
        "busy_s": busy_s,
        "server_info": dict(info or {}),
    }
    await asyncio.to_thread(_write_evidence, folder, story, data)


def _write_evidence(folder: Path, story: dict[str, Any], log: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = log.splitlines(keepends=True)[-EVIDENCE_LINES:]
    for name, data in (("crash.json", json.dumps(story, indent=1).encode()), ("crash.log", b"".join(lines))):
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
