"""A traceback as one thing: its frames, its exceptions, whose it is, and the events that its lines are.

Lines of many processes come interleaved, so a log has one open block per process. A block begins at `Traceback (most
recent call last)`, at a frame, at Ray's `RayTaskError`, at SGLang's `hit an exception`, or at a line that is an
exception and its message; it ends at a line that cannot belong to it. Bounded: a block keeps its first and newest
frames and ends after `MOST_LINES` lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rltop.checks.found import LogEvent, Owner
from rltop.checks.observe import Where
from rltop.evidence.lines.line import EVENT_FIELDS, Line
from rltop.evidence.prefix import is_hybrid, owner_of_actor

MOST_LINES = 2000
MOST_FRAMES = 64
MOST_TRAILER = 12
"""Lines after the exception that still belong to it (PyTorch's advice, SGLang's possible solutions)."""
MESSAGE = 1000

HEADER = "Traceback (most recent call last)"
_CHAIN = re.compile(
    r"\s*(?:During handling of the above exception|The above exception was the direct cause|"
    r"The original cause of the)"
)
FRAME = re.compile(r'\s*File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9}|\?\?\?)(?:,? in (?P<function>.{1,200}))?')
"""Of a traceback (`line 1, in f`), or of the stack that Python's fault handler dumps (`line 1 in f`)."""
EXCEPTION = re.compile(
    r"(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*(?:Error|Exception|Interrupt|Failure|Failed|Died|Timeout)|"
    r"Exception|SystemExit)"
    r"(?:\(\w+\))?)(?:: ?(?P<message>.*)|\s*)$",
    re.DOTALL,
)
_ANY_EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<message>.*)|\s*)$", re.DOTALL)
_HIT = re.compile(r"hit an exception\b|[Ee]xception in thread\b|[Uu]ncaught exception")
RAY_ACTOR = re.compile(
    r"ray::(?P<actor>[A-Za-z_]\w*)(?:\.(?P<method>\w+))?\(\)?"
    r"(?:[^)]*?\(?pid=(?P<pid>\d{1,10})(?:, ip=(?P<ip>[^),\s]+))?)?"
)
_DIED = re.compile(r"\s+(class_name|pid|ip): (\S{1,120})\s*")
_ENGINE_PATH = re.compile(r"sglang/srt|sglang\.srt|/sgl_kernel/|vllm/")
_TRAINER_PATH = re.compile(
    r"megatron/|(?:slime|relax|miles)/backends/(?:megatron|fsdp)_?utils|verl/workers/(?:actor|critic|megatron)"
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python|<frozen|<string>|/torch/|^torch/|^ray/|/ray/_|importlib"
)


def opens(text: str) -> bool:
    """A block may begin with this line."""
    return (
        HEADER in text
        or FRAME.match(text) is not None
        or EXCEPTION.match(text) is not None
        or _HIT.search(text) is not None
    )


def owner_of_path(path: str) -> Owner:
    """Side of a process by a source file that it runs."""
    if _TRAINER_PATH.search(path):
        return "trainer"
    return "engine" if _ENGINE_PATH.search(path) else ""


@dataclass(slots=True)
class Block:
    """One traceback that is being read."""

    first: Line
    lines: int = 0
    newest: int = 0
    """Number of the newest line that belongs to it."""
    header: bool = False
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    left_out: int = 0
    exceptions: list[tuple[str, str, Line]] = field(default_factory=list)
    chained: bool = False
    """The next lines continue a chain of exceptions."""
    expecting: bool = False
    """A traceback has begun whose exception has not come yet."""
    trailer: int = 0
    detail: str = ""
    """What NCCL says after `Last error:`, the line that names the peer."""
    asked: bool = False
    """The line before was `Last error:`."""
    ray: re.Match[str] | None = None
    died: dict[str, str] = field(default_factory=dict)
    """class_name, pid and ip of the actor that Ray's ActorDiedError names."""
    events: list[tuple[LogEvent, frozenset[str]]] = field(default_factory=list)
    """Events of its lines, each with the fields that its message told."""

    def takes(self, line: Line) -> bool:
        """The line belongs to this block; it is then part of it."""
        if self.lines and not self._continues(line):
            return False
        self.lines += 1
        self.newest = line.number
        text = line.text
        if HEADER in text:
            self.header, self.expecting, self.chained, self.trailer = True, True, False, 0
        elif _CHAIN.match(text):
            self.chained = True
        elif frame := FRAME.match(text):
            self._frame(frame)
        elif found := self._exception(text):
            if len(self.exceptions) < MOST_FRAMES:
                self.exceptions.append((found["name"], (found["message"] or "").strip()[:MESSAGE], line))
            self.expecting, self.chained, self.trailer = False, False, 0
        elif self.exceptions and text.strip():
            self.trailer += 1
            if self.asked:
                self.detail = text.strip()[:MESSAGE]
            self.asked = text.strip() == "Last error:"
        if (named := _DIED.fullmatch(text)) and self.exceptions:
            self.died.setdefault(named[1], named[2])
        if self.ray is None and "ray::" in text:
            self.ray = RAY_ACTOR.search(text)
        return True

    def _continues(self, line: Line) -> bool:
        text = line.text
        if self.lines >= MOST_LINES or line.time_of_its_own:
            return False
        if not text.strip() or _CHAIN.match(text) or FRAME.match(text):
            return True
        if HEADER in text:
            return self.chained or not self.exceptions
        indented = text[0] in " \t" or text.startswith(("^", "~"))
        if not self.exceptions:
            return indented or self.header or EXCEPTION.match(text) is not None
        if indented:
            return True
        if EXCEPTION.match(text):
            # Ray prints the wrapped traceback under its own exception.
            return self.expecting or self.chained or bool(self.ray and self.frames)
        return self.expecting or (self.trailer < MOST_TRAILER and not self.chained)

    def _frame(self, frame: re.Match[str]) -> None:
        if len(self.frames) >= MOST_FRAMES:
            del self.frames[MOST_FRAMES // 2]
            self.left_out += 1
        self.frames.append(
            (frame["file"], int(frame["line"]) if frame["line"].isdecimal() else 0, (frame["function"] or "").strip())
        )

    def _exception(self, text: str) -> re.Match[str] | None:
        if found := EXCEPTION.match(text):
            return found
        plain = self.expecting and self.frames and text[:1] not in (" ", "\t", "")
        return _ANY_EXCEPTION.match(text) if plain else None

    def close(self) -> list[LogEvent]:
        """The events of its lines, with the traceback itself last; owner and frames filled in."""
        fields = self._subject()
        events = [self._owned(event, told, fields) for event, told in self.events]
        if not self.exceptions and not self.frames:
            return events
        name, message, line = self.exceptions[-1] if self.exceptions else ("", "", self.first)
        own = next((frame for frame in reversed(self.frames) if not _LIBRARY.search(frame[0])), None)
        data: dict[str, object] = {
            "exception": name,
            "message": message,
            "frames": tuple(self.frames),
            "own_frame": own or (self.frames[-1] if self.frames else None),
            "chain": tuple((one, text) for one, text, _ in self.exceptions[:-1]),
            "method": self.ray["method"] or "" if self.ray else "",
            "first_line": self.first.number,
            "lines": self.lines,
            "header": self.header,
        }
        if self.detail:
            data["detail"] = self.detail
        # Frames alone are the stack of a thread that something dumped (`Fatal Python error`, py-spy).
        kind = "traceback" if self.exceptions or self.header else "stack"
        event, told = event_of(kind, line, data)
        return [*events, self._owned(event, told, fields)]

    def _subject(self) -> dict[str, Any]:
        """Owner and process: the prefix, Ray's word in the traceback, the frames, what was inherited."""
        line = self.first
        if name := self.died.get("class_name", ""):
            # The driver tells of the death: the one that died is the subject.
            pid = self.died.get("pid", "")
            subject = {"actor": name, "owner": owner_of_actor(name), "node": self.died.get("ip", "")}
            return subject | {"pid": int(pid) if pid.isdecimal() else None, "rank": None}
        if line.own_prefix and line.owner and line.certain_owner:
            return {}
        if is_hybrid(self.ray["actor"] if self.ray else line.actor):
            owner = next((owner for frame in self.frames if (owner := owner_of_path(frame[0]))), "")
            if owner:
                return {"owner": owner}
        if self.ray:
            fields: dict[str, object] = {"actor": self.ray["actor"], "owner": owner_of_actor(self.ray["actor"])}
            if self.ray["pid"]:
                fields |= {"pid": int(self.ray["pid"]), "node": self.ray["ip"] or ""}
            return {key: value for key, value in fields.items() if value != ""}
        if line.owner and line.certain_owner:
            return {}
        owner = next((owner for frame in self.frames if (owner := owner_of_path(frame[0]))), "")
        return {"owner": owner} if owner else {}

    def _owned(self, event: LogEvent, told: frozenset[str], fields: Mapping[str, Any]) -> LogEvent:
        kept = {key: value for key, value in fields.items() if key not in told}
        if event.rank is None and "rank" not in told and self.first.rank is not None and event.pid == self.first.pid:
            kept["rank"] = self.first.rank
        data = event.data
        if event.kind not in ("traceback", "stack") and self.frames:
            data = {**data, "frames": tuple(self.frames)}
        return replace(event, data=data, **kept)


def event_of(kind: str, line: Line, data: Mapping[str, object]) -> tuple[LogEvent, frozenset[str]]:
    """An event of one line, and which of its fields `data` set (`EVENT_FIELDS`)."""
    fields: dict[str, Any] = {
        "owner": line.owner,
        "actor": line.actor,
        "pid": line.pid,
        "node": line.node,
        "rank": line.rank,
        "engine": line.engine,
        "level": line.level,
    }
    told = {key: value for key, value in data.items() if key in EVENT_FIELDS and value not in (None, "")}
    if told.get("owner") in ("launcher", "host") and not line.own_prefix:
        # The shell, the scheduler or the kernel speaks, not the process that printed the line above.
        fields |= {"actor": "", "pid": None, "node": "", "rank": None, "engine": None}
    kept = {key: value for key, value in data.items() if key not in EVENT_FIELDS}
    event = LogEvent(
        kind,
        line.text.strip()[:MESSAGE],
        Where(line.source, line.number, line.raw.strip()[:400]),
        **(fields | told),
        time=line.time,
        repeated=line.repeated,
        data=kept,
    )
    return event, frozenset(told)
