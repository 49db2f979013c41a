"""Engines that others run: found out over HTTP what they are, never started, stopped or restarted.

Every engine that the daemon does not own (of `rltop watch --engine`, or told by a trainer's record) is asked once for
`/server_info`: its release and its toggles. Of watched ones the state too is told from outside: they answer (HEALTHY),
do not answer, or answer with what cannot be read (SUSPECT), or have not for half a minute (LOST). One that a log names
is NAMED until it answers: it may be where nobody can reach it from here. `/health` and `/generate` are never asked.

Failure policy: what does not answer is unknown and asked again later; whatever a foreign answer does to a parser is a
cause. Nothing here ends anything.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rltop.checks.phrase import brief
from rltop.daemon.core import Core
from rltop.daemon.engine_view import FLEET_KEYS, SCRAPED
from rltop.engines.bounded import cut
from rltop.errors import RltopError

EVERY_S = 2.0
ASK_S = 5.0
"""`/server_info` goes through the scheduler: of an engine that hangs it never comes."""
AGAIN_S = 15.0
"""Until an engine that did not tell its toggles is asked again."""
SILENT_S = 8.0
"""An engine that was seen so recently answers: the scraper asks every two seconds and waits four."""
LOST_S = 30.0
NAMED = "NAMED"
"""State of an engine that a log names and that has not answered yet."""
_ASKED = frozenset({"HEALTHY", "SUSPECT"})
_OUTSIDE = frozenset({NAMED, "HEALTHY", "SUSPECT", "LOST"})
"""States that are told from outside; any other one a log has told."""

AskInfo = Callable[[str], Awaitable[Mapping[str, Any]]]
"""URL -> `/server_info`. Raises RltopError."""


def watched(config: Mapping[str, Any]) -> tuple[str, ...]:
    """URLs of `rltop watch --engine`, from a daemon's configuration."""
    found = config.get("watch")
    urls = found.get("engines") if isinstance(found, dict) else None
    return tuple(map(str, urls)) if isinstance(urls, list) else ()


class Others:
    """Keeps the cells of engines that others run. `urls`: those that are watched; they get the ids 0, 1, …"""

    def __init__(
        self,
        core: Core,
        urls: Sequence[str],
        *,
        ask: AskInfo | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._core = core
        self._urls = tuple(urls)
        self._ask = ask or server_info
        self._sleep = sleep
        self._asked: dict[str, tuple[str, int, float]] = {}
        """Engine -> URL and generation that was asked, and when to ask again (inf: it has told)."""
        self._started: dict[str, Any] = {}
        """Watched engine -> `startup_time` (how long its stages took): another one is another process."""
        self._odd: dict[str, str] = {}
        """Engine -> why what it told of itself cannot be read."""
        self._begun = 0.0
        self._named: set[str] = set()
        """Ids of engines that a log names."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Those that were named to be watched."""
        return self._urls

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._sleep(EVERY_S)
            await self.once()

    async def once(self) -> None:
        """Look at every such engine once."""
        now = self._core.now()
        due = []
        for key in self._core.table.keys("engine/"):
            engine = self._core.table.get(key)
            if engine.get("owner") == "rltop" or not engine.get("url"):
                continue
            watched = engine["id"].isdigit() and int(engine["id"]) < len(self._urls)
            if (watched or engine["id"] in self._named) and engine["state"] in _OUTSIDE:
                self._judge(key, engine, now)
                engine = self._core.table.get(key)
            if engine.get("state") not in _ASKED or not _answers(engine, now):
                continue
            url, generation, again = self._asked.get(key, ("", 0, 0.0))
            if (url, generation) != (engine["url"], engine["generation"]) or now >= again:
                self._asked[key] = (engine["url"], engine["generation"], now + AGAIN_S)
                due.append(self._discover(key, engine))
        await asyncio.gather(*due)

    def begin(self) -> None:
        """Have cells for what is watched, before anybody looks."""
        if not self._urls:
            return
        self._begun = self._core.now()
        words = "engines that others run: rltop reads, and starts and stops nothing"
        self._core.update("run", state="running", framework="sglang", text=words)
        for at, url in enumerate(self._urls):
            self._place(str(at), url, state="SUSPECT", generation=1, cause="not asked yet")

    def _place(self, engine_id: str, url: str, *, state: str, generation: int, cause: str, **more: Any) -> None:
        host = urllib.parse.urlsplit(url).hostname or ""
        facts = {"id": engine_id, "url": url, "kind": "sglang", "state": state, "generation": generation, "pid": 0}
        none = {"host": host, "version": "", "weight_version": "", "model_path": "", "log": ""}
        told = {"since": self._core.now(), "cause": cause}
        self._core.set(f"engine/{engine_id}", {**FLEET_KEYS, **facts, **none, **dict.fromkeys(SCRAPED), **told, **more})

    def name(self, engine_id: str, url: str, *, cause: str, **more: Any) -> None:
        """A log names this engine, or a new process of it: it is asked from now on. more: further keys of its cell."""
        before = self._core.table.get(f"engine/{engine_id}") or {}
        self._named.add(engine_id)
        self._asked.pop(f"engine/{engine_id}", None)
        generation = int(before.get("generation") or 0) + 1
        self._place(engine_id, url, state=NAMED, generation=generation, cause=cause, **more)

    def forget(self, engine_id: str) -> None:
        """No log of this attempt names it."""
        self._named.discard(engine_id)

    def hold(self, engine_id: str, who: str) -> None:
        """It was paused, by whom; "": it goes on. Shown until it is another process, or tokens come again."""
        if (engine := self._core.table.get(f"engine/{engine_id}")) is not None:
            stopped = {"tokens_per_s": 0.0} if who and engine.get("tokens_per_s") else {}
            paused = {"by": who, "since": self._core.now()} if who else None
            self._core.update(f"engine/{engine_id}", paused=paused, **stopped)

    def _judge(self, key: str, engine: Mapping[str, Any], now: float) -> None:
        """State of a watched engine, from what the scraper saw last."""
        was, seen, error = engine["state"], engine.get("seen"), engine.get("error") or ""
        silent = now - (seen or self._begun)
        odd = engine.get("unreadable") or self._odd.get(key, "")
        if seen and silent < SILENT_S and odd:
            state, cause, error = "SUSPECT", f"its answer cannot be read: {odd}", odd
        elif seen and silent < SILENT_S:
            state, cause = "HEALTHY", "it answers"
        elif silent >= LOST_S and was != NAMED:
            state, cause = "LOST", f"no answer for {silent:.0f} s"
        elif not seen and not error:
            return  # not asked yet
        elif was == NAMED:
            state, cause = NAMED, f"a log names it; it does not answer from here: {error}"
        else:
            state, cause = "SUSPECT", f"it does not answer: {error}" if error else "it does not answer"
        if state != "HEALTHY" and was == "HEALTHY":
            self._asked.pop(key, None)  # it may come back as another process
        signals = {"probe": {"ok": state == "HEALTHY", "text": error, "t": seen}}
        moved = {} if was == state else {"since": now}
        self._core.update(key, state=state, cause=cause if state != "HEALTHY" else "", signals=signals, **moved)
        if was != state:
            level = "info" if state in ("HEALTHY", NAMED) else "warn" if state == "SUSPECT" else "error"
            text = f"engine {engine['id']} (others run it): {was} -> {state}: {cause}"
            self._core.event("engine", level, text, "daemon", id=engine["id"], **{"from": was, "to": state})

    async def _discover(self, key: str, engine: Mapping[str, Any]) -> None:
        from rltop.engines.calls import EngineUnreadable

        try:
            async with asyncio.timeout(ASK_S):
                info = await self._ask(engine["url"])
            facts = facts_of(info)
            cells = {name: _shown(value) for name, value in facts["toggles"].items()}
            started = cut(info.get("startup_time"), 4096)
        except EngineUnreadable as error:
            self._odd[key] = f"/server_info: {brief(error.message, 160)}"
            return
        except (RltopError, TimeoutError):
            return  # unknown, asked again
        except Exception as error:  # a foreign answer
            self._odd[key] = f"/server_info: {brief(f'{type(error).__name__}: {error}', 160)}"
            return
        self._odd.pop(key, None)
        now = self._core.table.get(key)
        if now is None or now["url"] != engine["url"] or now["generation"] != engine["generation"]:
            return
        self._asked[key] = (engine["url"], engine["generation"], float("inf"))
        if self._started.setdefault(key, started) != started:
            self._started[key] = started
            facts |= {"generation": engine["generation"] + 1, "paused": None}
            self._asked[key] = (engine["url"], engine["generation"] + 1, float("inf"))
            text = f"engine {engine['id']} (others run it): it was restarted"
            self._core.event("engine", "warn", text, "daemon", id=engine["id"], **{"from": None, "to": now["state"]})
        self._core.update(key, **facts)
        self._core.set(f"toggles/{engine['id']}", cells or None)


def _answers(engine: Mapping[str, Any], now: float) -> bool:
    """It was seen just now, or nobody has looked yet."""
    return not engine.get("seen") or now - engine["seen"] < SILENT_S


def _shown(value: str) -> dict[str, Any]:
    why = "rltop did not start this engine, so it can not restart it"
    return {
        "value": value,
        "wanted": None,
        "choices": [],
        "refused": {"": why},
        "aliases": [],
        "verify": "/server_info",
        "sides": {"engine": value, "trainer": None},
        "free": "",
    }


def facts_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of `/server_info` goes into an engine's cell. Its keys and passwords do not: nothing but this is taken."""
    from rltop.engines.verify import read_server_info

    version = str(info.get("sglang_version") or info.get("version") or "")
    toggles = read_server_info(info, None, version=version)
    facts: dict[str, Any] = {"toggles": {name: cut(value) for name, value in toggles.items() if value is not None}}
    facts["kind"] = _kind(info)
    facts["version"] = cut(info.get("version") or "")
    for name in ("model_path", "weight_version"):
        if isinstance(info.get(name), str):
            facts[name] = cut(info[name], 4096)
    return facts


async def server_info(url: str) -> Mapping[str, Any]:
    """`/server_info` of an engine. Raises RltopError."""
    from rltop.engines.client import AsyncEngineClient

    async with AsyncEngineClient(url) as client:
        return await client.server_info()


async def engine_http(url: str, action: str) -> str:
    """What SGLang's HTTP API allows, asked of any engine. Raises RltopError."""
    from rltop.engines.client import AsyncEngineClient

    async with AsyncEngineClient(url) as client:
        match action:
            case "flush":
                await client.flush_cache()
                return "the cache is empty"
            case "pause":
                # in_place keeps what runs: retract, followed by a weight update with a flush, ends SGLang.
                await client.pause("in_place")
                return "it is paused, and keeps its requests"
            case "continue":
                await client.resume_generation()
                return "it goes on"
            case "profile":
                await client.profile()
                return "it writes a profile of its next steps where SGLANG_TORCH_PROFILER_DIR says"
            case _:
                raise RltopError(f"{action!r} can not be asked of an engine", where=url)


def _kind(info: Mapping[str, Any]) -> str:
    """What answers: SGLang, or one of rltop's stand-ins, which say so."""
    marker = str(info.get("rltop_engine") or "")
    return "sglang" if not marker else "null" if "null engine" in marker else "cpu"
