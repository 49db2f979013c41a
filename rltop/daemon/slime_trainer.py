"""A slime run that trains against this run's engines from outside (`--rollout-external-engine-addrs`).

rltop owns the engines' processes and slime knows nothing of it: it pushes weights into every engine by itself and sends
requests through a router of its own. What an engine must hold is therefore read from the engines: the label that slime
pushed last. One that was restarted loads that version from the directory in which slime keeps it, and is taken out of
slime's router for as long as it does not serve.

What slime cannot do decides what is refused here (docs/slime.md, "Engines that rltop owns"): a group that was built for
a push over NCCL is never built again, so without kept versions on a disk nothing is restarted once slime has pushed.

Failure policy: disk and router are asked beside the event loop and may be slow or gone; what was known last counts, and
what is wrong is told once. Nothing here raises into the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltop.engines.processes import locked
from rltop.engines.requests import Ab, AbEnd, Refused, Request, Required, Restart, Revert, SetToggles, Stop

if TYPE_CHECKING:
    from rltop.engines.kept_weights import Kept, KeptWeights
    from rltop.engines.slime_router import SlimeRouter, Tell

TURN_S = 1.0
APART_S = 120.0
"""Engines that serve under unlike labels are in the middle of a push for so long; then one of them missed it."""
WRITING_S = 180.0
"""A version on the disk that no engine holds is about to be pushed, if it was written to within this time."""
FRESH_S = 15.0
"""After a push: the best moment for a restart, the next push is farthest away."""
LOOK_S = 5.0
"""An operator waits for the disk no longer than this."""
BACK_S, BACK_TRIES = 0.2, 15
"""slime's router takes an engine back behind its answer; the next one leaves after that, or after these tries."""
BASE = "default"
"""SGLang's label for a checkpoint that nobody has updated."""
MEMORY = "slime.json"
SLIME_FLAGS = (
    "--update-weight-mode full",
    "--update-weight-transport disk",
    "--update-weight-disk-dir {folder}",
    "--update-weight-disk-keep-files",
)
_SERVES = ("HEALTHY", "SUSPECT")
_LEAVING = (SetToggles, Restart, Stop, Revert, Ab, AbEnd)


@dataclass(frozen=True, slots=True)
class SlimeOptions:
    """What `[engines]` says of the slime run."""

    addresses: tuple[str, ...]
    """HOST:PORT of each engine, as slime must be given them."""
    weights_dir: str = ""
    """slime's `--update-weight-disk-dir`; empty: it pushes otherwise."""
    router: str = ""
    """HOST:PORT of slime's router; empty: not known."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> SlimeOptions | None:
        """From `[engines]`, as `rltop.config` has checked it; None: it names no slime run."""
        if table.get("trainer") != "slime":
            return None
        host, port = str(table.get("host", "127.0.0.1")), int(table.get("port", 0))
        name = f"[{host}]" if ":" in host else host
        addresses = tuple(f"{name}:{port + at}" for at in range(int(table.get("count", 1))))
        return cls(addresses, str(table.get("weights_dir", "")), str(table.get("router", "")))

    def flags(self) -> list[str]:
        """What the slime run must be started with."""
        found = [f"--rollout-external-engine-addrs {' '.join(self.addresses)}"]
        if self.weights_dir:
            found += [flag.format(folder=self.weights_dir) for flag in SLIME_FLAGS]
        if self.router:
            found.append(f"--sglang-router-port {self.router.rpartition(':')[2]}")
        return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """One engine, as its cell says it."""

    serves: bool
    version: str
    url: str
    busy: bool
    since: float
    """When it began or ceased to serve."""


class SlimeTrainer:
    """What is known of the slime run, and what follows for the engines. tell: level and text."""

    def __init__(
        self,
        options: SlimeOptions,
        folder: Path,
        *,
        wall: Callable[[], float],
        tell: Tell,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """folder: of the run's engines; what must outlive a daemon is written there."""
        # Not at the top: a run without a slime run reads none of it, nor httpx.
        from rltop.engines.kept_weights import KeptWeights
        from rltop.engines.slime_router import SlimeRouter

        self.options = options
        self._file = folder / MEMORY
        self._wall, self._tell, self._sleep = wall, tell, sleep
        self._engines: dict[str, _Seen] = {}
        memory = _read(self._file)
        self._begun = float(memory.get("begun") or wall())
        """Versions written before were for others."""
        self.version = str(memory.get("version") or "")
        """That slime pushed last; empty: none is known."""
        self._left = any(locked(lock) for lock in folder.glob("*/lock"))
        """Engines of an earlier daemon run: what they hold can be gone on with."""
        self._changed = 0.0
        self._past: deque[str] = deque(maxlen=8)
        """Versions that were required before: an engine may come to hold one late, by a load of ours."""
        self.pushes: deque[float] = deque(maxlen=8)
        """When the latest were seen to come through."""
        self.away_s: float | None = None
        """How long the engine that came up last had not served."""
        self._disk = KeptWeights(Path(options.weights_dir)) if options.weights_dir else None
        self._kept: list[Kept] = []
        self._looking: asyncio.Task[None] | None = None
        """A look at the disk that goes on; one at a time, for it may hang."""
        self._answers = True
        """Whether the disk answered whoever asked last."""
        self._said = ""
        self._router: SlimeRouter | None = None
        if options.router:
            removed = memory.get("removed")
            self._router = SlimeRouter(options.router, tell, removed=removed if isinstance(removed, dict) else {})
        self._written: dict[str, Any] = {}

    # ---------------------------------------------------------------- what the fleet asks

    def required(self) -> Required:
        """The weights that an engine must hold before it serves."""
        if self.version in ("", BASE):
            return Required(version=BASE, source="base")
        kept = self._whole(self.version)
        if kept is None:
            return Required(version=self.version, source="trainer")
        return Required(version=self.version, source="disk", path=str(kept.path))

    def updating(self) -> bool:
        """Whether slime is about to push, or pushes: nothing may be ended then, for slime ends with it."""
        now = self._wall()
        versions = {one.version for one in self._engines.values() if one.serves and one.version}
        if len(versions) > 1 and now - self._changed < APART_S:
            return True
        newest = self._kept[0] if self._kept else None
        after = max(self._begun, self.pushes[-1] if self.pushes else 0.0)
        return newest is not None and newest.version != self.version and after < newest.written > now - WRITING_S

    def safe_point(self) -> bool:
        """Whether an engine that leaves now leaves little undone: no request runs, or a push has just come through."""
        if self.updating():
            return False
        fresh = bool(self.pushes) and self._wall() - self.pushes[-1] < FRESH_S
        return fresh or not any(one.busy for one in self._engines.values())

    async def leaving(self, url: str) -> None:
        """This engine drains: its requests should go elsewhere from now on, so those who came back go first."""
        if self._router is None or not url:
            return
        for _ in range(BACK_TRIES):
            others = {one.url: one.serves for one in self._engines.values() if one.url and one.url != url}
            await self._router.keep(others)
            if self._router.listed is None or not any(others.get(other) for other in self._router.removed):
                break
            await self._sleep(BACK_S)
        await self._router.leave(url)
        self._remember()

    # ---------------------------------------------------------------- what the fleet says

    def see(self, engine_id: str, cell: Mapping[str, Any] | None) -> None:
        """The fleet's words about one engine; None: it is gone."""
        if cell is None:
            self._engines.pop(engine_id, None)
            return
        now, before = self._wall(), self._engines.get(engine_id)
        serves, version = cell.get("state") in _SERVES, str(cell.get("weight_version") or "")
        since = before.since if before is not None and before.serves == serves else now
        if serves and before is not None and not before.serves:
            self.away_s = now - before.since
        url = str(cell.get("url") or "") or (before.url if before is not None else "")
        busy = serves and bool(cell.get("running") or cell.get("queued"))
        self._engines[engine_id] = _Seen(serves, version, url, busy, since)
        # Its first word, or another label while it served: the fleet loads only into engines that do not serve.
        known = before.version if before is not None else ""
        if not version or version == known:
            return
        if (serves and (not known or (before is not None and before.serves))) or self._pushed_early(version):
            self._take(version, now, pushed=bool(known))

    def _pushed_early(self, version: str) -> bool:
        """Into an engine that does not serve: only slime brings a version there that never was required."""
        return version.isdigit() and version != self.version and version not in self._past

    def _take(self, version: str, now: float, *, pushed: bool) -> None:
        if version == self.version:
            return
        if self.version:
            self._past.append(self.version)
        self.version, self._changed = version, now
        if pushed and version != BASE:
            self.pushes.append(now)
        self._remember()

    # ---------------------------------------------------------------- disk and router

    async def run(self) -> None:
        """Look at the disk and keep the router's list, until cancelled."""
        try:
            while True:
                await self.turn()
                await self._sleep(TURN_S)
        finally:
            if self._router is not None:
                await self._router.close()

    async def look(self) -> None:
        """Look at the disk anew, for an answer that must not stand on a look of before the version that engines hold.
        Where the disk does not answer, what was known last stays, and `refused` says so."""
        if self._disk is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                if self._looking is not None:  # it may have begun before that version was there
                    await asyncio.wait([self._looking])
                await self._scan(self._disk)
                self._answers = True
                return
        self._answers = False

    async def _scan(self, disk: KeptWeights) -> None:
        """One look, or the end of the one that goes on. Cancelled, it leaves that to whoever comes next."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._read(disk))
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None

    async def _read(self, disk: KeptWeights) -> None:
        try:
            self._kept = await asyncio.to_thread(disk.scan)
        except OSError as error:
            self._kept = []
            if self.version not in ("", BASE):  # slime makes it with its first version
                self._once(f"weights_dir {disk.folder} cannot be read: {error.strerror or error}")

    async def turn(self) -> None:
        """One look at either."""
        if self._disk is not None:
            await self._scan(self._disk)
        if not self._left and self._whole(self.version) is None:
            self.version = ""  # of engines that are gone, and nowhere to be had: slime pushes before its first rollout
        self._left = True
        if self._router is not None:
            serving = {one.url: one.serves for one in self._engines.values() if one.url}
            await self._router.keep(serving)
            self._join_in()
        self._remember()

    def _join_in(self) -> None:
        """These engines are new and slime's router lists them already: its run goes on from before this one."""
        if self._router is None or self._router.listed is None:
            return
        listed = {*self._router.listed, *self._router.removed}
        whole = next((one for one in self._kept if not one.problem), None)
        if self.version or whole is None or any(one.serves for one in self._engines.values()):
            return
        ours = {f"http://{address}" for address in self.options.addresses}
        if ours.intersection(listed):
            self.version = whole.version
            self._tell("info", f"slime trains against these addresses already: weight version {whole.version} it is")

    def attached(self) -> bool:
        """Whether slime's router has one of these engines. False also where it is not known."""
        listed = self._router.listed if self._router is not None else None
        return any(f"http://{address}" in (listed or ()) for address in self.options.addresses)

    def _whole(self, version: str) -> Kept | None:
        fits = (one for one in self._kept if one.version == version and not one.problem)
        return next(fits, None)

    def _once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell("warn", text)

    def _remember(self) -> None:
        """Write down what the next daemon must know."""
        removed = self._router.removed if self._router is not None else {}
        memory = {
            "begun": self._begun,
            "version": self.version,
            "removed": {url: dict(e) for url, e in removed.items()},
        }
        if memory == self._written:
            return
        try:
            self._file.parent.mkdir(exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(memory), encoding="utf-8")
            os.replace(new, self._file)
            self._written = memory
        except OSError as error:
            self._once(f"cannot write {self._file}: {error.strerror or error}")

    # ---------------------------------------------------------------- what people ask for

    def refused(self, request: Request) -> Refused | None:
        """Why these engines could not come back from a restart; None: they can."""
        if not isinstance(request, _LEAVING) or isinstance(request, Stop) or self.version in ("", BASE):
            return None
        if not self.options.weights_dir:
            why = (
                f"slime pushed weight version {self.version} into these engines, and a restarted one could not get it: "
                "a push over NCCL goes to the group that was built at slime's start, which is never built again"
            )
            do = "start slime with --update-weight-transport disk, and rltop with weights_dir in [engines]"
            return Refused(code="bad-args", why=why, do=do)
        if self._whole(self.version) is not None:
            return None
        if not self._answers:
            why = (
                f"{self.options.weights_dir} did not answer within {LOOK_S:.0f} s: whether it has weight version "
                f"{self.version}, which a restarted engine must load, is not known"
            )
            return Refused(code="busy", why=why, do="ask again when it does")
        there = next((one for one in self._kept if one.version == self.version), None)
        name = f"weight_v{int(self.version):06d}" if self.version.isdigit() else self.version
        why = (
            f"a restarted engine could not get weight version {self.version}: {self.options.weights_dir} has no {name}"
        )
        if there is not None:
            why = f"a restarted engine could not get weight version {self.version}: {there.path}: {there.problem}"
        do = "start slime with --update-weight-disk-keep-files and that directory as --update-weight-disk-dir"
        return Refused(code="bad-args", why=why, do=do)

    def warnings(self, request: Request, targets: tuple[str, ...]) -> list[str]:
        """What slime does while these engines are away."""
        if not isinstance(request, _LEAVING) or not any(self._serves(name) for name in targets):
            return []
        found = []
        if self.version not in ("", BASE) or self.pushes:
            text = "warning: a weight update that meets an engine which is down ends slime's run" + self._pace()
            if request.when != "safe-point" and not isinstance(request, Stop):
                text += "; --when safe-point begins right after one"
            found.append(text)
        if not self.options.router:
            found.append(
                "warning: no router in [engines]: slime goes on sending requests to an engine that is down, tries each "
                "60 times in a minute, and ends its run"
            )
        elif (len(targets) == 1 or isinstance(request, Stop) or getattr(request, "mode", "") == "at-once") and not any(
            one.serves for name, one in self._engines.items() if name not in targets
        ):
            found.append("warning: no other engine serves: slime gives a request up after a minute and ends its run")
        return found

    def _pace(self) -> str:
        words = []
        if len(self.pushes) > 1:
            words.append(f"one every {(self.pushes[-1] - self.pushes[0]) / (len(self.pushes) - 1):.0f} s")
        if self.pushes:
            words.append(f"the last {self._wall() - self.pushes[-1]:.0f} s ago")
        if self.away_s is not None:
            words.append(f"an engine took {self.away_s:.0f} s to come up")
        return f" ({', '.join(words)})" if words else ""

    def _serves(self, name: str) -> bool:
        return name in self._engines and self._engines[name].serves


def _read(file: Path) -> dict[str, Any]:
    """What an earlier daemon of the run knew."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
