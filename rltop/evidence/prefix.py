"""What stands before the message of a log line: actor, rank, time, level, SGLang's rank tags.

Time stamps are those of Python logging, Ray, glog, NCCL, loguru, vLLM, `dmesg -T` and uvicorn; seconds since the epoch,
a clock without a zone taken as UTC (only differences count), one without a year or a date in that
of the line before, where that has none from 1970-01-01.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from rltop.checks.events import engine_life
from rltop.checks.found import Owner

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ACTOR = re.compile(r"\((?P<name>[^()\n]{0,120}?)\s*\bpid=(?P<pid>\d{1,10})(?:, ip=(?P<ip>[^)\s,]{1,80}))?\)\s?")
_DAEMON = re.compile(
    r"\((?P<name>raylet|gcs_server|autoscaler|dashboard|log_monitor)(?:, ip=(?P<ip>[^)\s,]{1,80}))?\)\s?"
)
_RANK = re.compile(r"\[(?:default\d+\]:\[)?(?i:rank)[ _]?(?P<rank>\d{1,7})\]:?\s?")
_STAMP = re.compile(
    r"(?P<open>\[?)(?:(?P<level>[A-Z][a-z]*|[A-Z]+)\s?)??"
    r"(?:(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T]|(?P<short_month>\d{1,2})[-/]?(?P<short_day>\d\d) )?"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_CTIME = re.compile(
    r"\[?(?:\w{3} )(?P<name>\w{3}) +(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r" (?P<year>\d{4})\]?"
)
DAY = 86_400.0
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_TAG = re.compile(r"\b(TP|DP|PP|EP)_?(\d{1,6})\b")
_LEVEL = re.compile(
    r"[\s:|-]*\[?(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|EXCEPTION)\]?(?=[\s:|\]-]|$)[:\s|]*"
)
_LETTERS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "F": "fatal", "C": "fatal"}
_REPEATED = re.compile(r"\s*\[repeated (?P<times>\d{1,9})x across cluster\][^\n]{0,200}$")

_OWNERS: tuple[tuple[re.Pattern[str], Owner], ...] = (
    (re.compile(r"raylet|gcs|autoscaler|dashboard|log_monitor", re.I), "ray"),
    (re.compile(r"router|gateway", re.I), "router"),
    (re.compile(r"sglang|engine|vllm|LLMRayActor|scheduler|tokenizer|http ?server", re.I), "engine"),
    (
        re.compile(
            r"train|critic|megatron|fsdp|ServeReplica:(?:actor|actor_fwd|reference|sft):|WorkerDict|"
            r"Actor(?:Rollout|Model)|ReferenceModel|learner|policy",
            re.I,
        ),
        "trainer",
    ),
    (re.compile(r"rollout|agent|generator|env", re.I), "rollout"),
    (re.compile(r"runner|main|driver|launch", re.I), "launcher"),
)
_FILES: tuple[tuple[re.Pattern[str], Owner], ...] = (
    (re.compile(r"dmesg|syslog|messages|kern"), "host"),
    (re.compile(r"raylet|gcs_server|monitor"), "ray"),
    (re.compile(r"router"), "router"),
    (re.compile(r"engine|sglang|server|scheduler"), "engine"),
    (re.compile(r"rollout"), "rollout"),
    (re.compile(r"train|megatron|rank[-_]?\d|actor|critic"), "trainer"),
    (re.compile(r"driver|job|launch"), "launcher"),
)


_HYBRID = re.compile(r"WorkerDict|ActorRollout", re.I)


def is_hybrid(name: str) -> bool:
    """The actor trains and generates in one process (verl), so its name does not say which side failed."""
    return bool(_HYBRID.search(name))


@lru_cache(maxsize=512)
def owner_of_actor(name: str) -> Owner:
    """Side of a Ray actor by its class name; empty for a name that says nothing."""
    return next((owner for pattern, owner in _OWNERS if pattern.search(name)), "")


def owner_of_file(name: str) -> tuple[Owner, int | None, int | str | None]:
    """(owner, rank, engine) by a log's file name: `rank3.log`, `engine_2.log`, `engines/2/1/stdout.log`."""
    if life := engine_life(name):
        return "engine", None, int(life[0]) if life[0].isdigit() else life[0]
    base = name.rsplit("/", 1)[-1].lower()
    owner: Owner = next((owner for pattern, owner in _FILES if pattern.search(base)), "")
    rank = re.search(r"rank[-_]?(\d{1,7})", base)
    engine = re.search(r"(?:engine|server)[-_]?(\d{1,5})", base)
    return (
        owner,
        int(rank[1]) if rank else None,
        int(engine[1]) if engine and owner == "engine" else None,
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """What one line says itself; None and empty where it does not."""

    text: str
    """The message."""
    plain: str
    """The line without ANSI codes."""
    actor: str = ""
    pid: int | None = None
    node: str = ""
    rank: int | None = None
    time: float | None = None
    dated: bool = False
    """The time has its own date and year."""
    level: str = ""
    tags: dict[str, int] = field(default_factory=dict)
    repeated: int = 0

    @property
    def given(self) -> bool:
        """There is a prefix of any sort."""
        return bool(self.actor or self.pid is not None or self.rank is not None or self.time is not None)


def read_prefix(line: str, near: float | None = None) -> Prefix:
    """Takes the prefixes off one line. near: a time close by with a date, for stamps without one. Never raises."""
    plain = ANSI.sub("", line) if "\x1b" in line else line
    plain = plain.rstrip()
    indent = at = len(plain) - len(plain.lstrip())
    actor, node, pid, rank = "", "", None, None
    if found := (_ACTOR.match(plain, at) or _DAEMON.match(plain, at)):
        actor, node = found["name"].strip(), found["ip"] or ""
        pid = int(found["pid"]) if "pid" in found.groupdict() else None
        at = found.end()
    if found := _RANK.match(plain, at):
        rank, at = int(found["rank"]), found.end()
    time, level, tags, dated, at = _stamp(plain, at, near)
    if rank is None and (found := _RANK.match(plain, at)):
        rank, at = int(found["rank"]), found.end()
    if not level and (found := _LEVEL.match(plain, at)):
        level, at = _level(found["level"]), found.end()
    text = plain if at == indent else plain[at:]
    repeated = 0
    if "across cluster]" in text[-300:] and (found := _REPEATED.search(text)):
        repeated, text = int(found["times"]), text[: found.start()]
    return Prefix(text, plain, actor, pid, node, rank, time, dated, level, tags, repeated)


def _level(word: str) -> str:
    low = word.lower()
    return {"warn": "warning", "critical": "fatal", "exception": "error"}.get(low, low)


def _stamp(plain: str, at: int, near: float | None) -> tuple[float | None, str, dict[str, int], bool, int]:
    """(time, level, tags, dated, end) of a stamp at `at`."""
    start = at
    found = _STAMP.match(plain, at)
    level = ""
    # `INFO 03-02 18:00:00 file.py` of vLLM.
    worded = _LEVEL.match(plain, at) if found is None else None
    if worded and (found := _STAMP.match(plain, worded.end())):
        level = _level(worded["level"])
    if found is None:
        ctime = _CTIME.match(plain, at)
        if ctime is None:
            return None, "", {}, False, start
        return _ctime(ctime), "", {}, True, ctime.end() + (plain[ctime.end() : ctime.end() + 1] == " ")
    time = _seconds(found, near)
    if time is None:
        return None, "", {}, False, start
    level = level or _LETTERS.get(found["level"] or "", "") or (_level(found["level"]) if found["level"] else "")
    end, tags = found.end(), {}
    if found["open"]:
        close = plain.find("]", end, end + 240)
        if close < 0:
            return None, "", {}, False, start
        inside = plain[end:close]
        tags = {name: int(number) for name, number in _TAG.findall(inside)}
        if not level and (letter := re.match(r"[\s,]*([DIWEFC])\b", inside)):
            level = _LETTERS[letter[1]]
        if not level and (word := _LEVEL.match(inside)):
            level = _level(word["level"])
        end = close + 1
    while plain[end : end + 1] in (" ", "\t"):
        end += 1
    return time, level, tags, bool(found["year"]), end


@lru_cache(maxsize=4096)
def _day(year: int, month: int, day: int) -> float | None:
    if not (1 <= month <= 12 and 1 <= day <= 31 and 1 <= year <= 9999):
        return None
    return float(calendar.timegm((year, month, day, 0, 0, 0)))


def _seconds(found: re.Match[str], near: float | None) -> float | None:
    part = float(f"0.{found['part']}") if found["part"] else 0.0
    clock = int(found["hour"]) * 3600 + int(found["minute"]) * 60 + int(found["second"]) + part
    if found["year"]:
        day = _day(int(found["year"]), int(found["month"]), int(found["day"]))
    elif found["short_month"]:
        day = _day(_year(near), int(found["short_month"]), int(found["short_day"]))
    else:
        # Of the two midnights around `near` the one that makes the closer time.
        day = 0.0 if near is None else DAY * round((near - clock) / DAY)
    if day is None or clock >= DAY + 1:
        return None
    zone = found["zone"]
    ahead = 0
    if zone and zone != "Z":
        ahead = (-1 if zone[0] == "-" else 1) * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return day + clock - ahead


def _year(near: float | None) -> int:
    return datetime.fromtimestamp(near, UTC).year if near is not None else 1970


def _ctime(found: re.Match[str]) -> float | None:
    name = found["name"].lower()
    if name not in _MONTHS:
        return None
    day = _day(int(found["year"]), _MONTHS.index(name) + 1, int(found["day"]))
    if day is None:
        return None
    return day + int(found["hour"]) * 3600 + int(found["minute"]) * 60 + int(found["second"])
