"""Crashes that are known: a fingerprint of a crash, and a table of public reports that it is compared with.

The fingerprint of a crash is what stays the same when it happens again: the error without addresses, pids, ranks, line
numbers, sizes and host names, and the innermost frames. The table is data (`known_crashes.toml`, and one of the user);
matching is soft: it says "looks like", never "is".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltop.checks.events import frames, own_frame, whole_text
from rltop.checks.facts import sglang_version
from rltop.checks.faults import Fault
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations

_VOLATILE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<addr>"),
    (re.compile(r"\b(?:pid|tid|parent_pid)[= ]\d+", re.I), "<pid>"),
    (re.compile(r"\b(?:rank|TP|DP|PP|EP|device|GPU|node|cuda:)[ =:]?\d+", re.I), "<rank>"),
    (re.compile(r"\bip=[\w.:-]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<host>"),
    (re.compile(r"(?:[\w.~<>-]*/)+(?=[\w<>.-]+)"), ""),
    (re.compile(r"\bline \d+|(?<=\.py):\d+|(?<=\.cu):\d+|(?<=\.cuh):\d+|(?<=\.h):\d+|(?<=\.cpp):\d+"), "<line>"),
    (re.compile(r"\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\s?(?:[KMGT]i?B|ms|s)?\b"), "<n>"),
)
_SPACE = re.compile(r"\s+")
_FRAME_PATH = re.compile(r"(?:[\w.~<>-]*/)+")
MOST_FRAMES = 4
"""Innermost frames that make a fingerprint."""


def normalise(text: str) -> str:
    """Text of an error without what differs from run to run."""
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return _SPACE.sub(" ", text).strip()


def fingerprint(error: str, trace: Sequence[str] = (), kernel: str = "") -> str:
    """16 hex digits for a crash: the same for the same fault on another rank, host, pid, address or source line.

    `trace` are frames as `path/file.py:function`, outermost first; only file name and function of the innermost count.
    """
    inner = [_FRAME_PATH.sub("", re.sub(r":\d+(?=:|$)", "", frame)) for frame in trace][-MOST_FRAMES:]
    whole = "\n".join([normalise(error), *inner, kernel])
    return hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KnownCrash:
    """One public report. Empty conditions do not restrict; all given ones must hold."""

    issue: str
    """`sgl-project/sglang#12345`."""
    title: str
    fingerprints: tuple[str, ...] = ()
    """An equal fingerprint is a match by itself."""
    kernels: tuple[str, ...] = ()
    """Parts of a kernel's name."""
    text: tuple[str, ...] = ()
    """Parts of error, frames or log lines around it; one of them must be there."""
    phases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """All must be in effect: `speculative_algorithm=EAGLE`, `enable_dp_attention`."""
    since: str = ""
    """First version that has it; a run with a known older version is no match."""
    until: str = ""
    """Last version that has it; empty: not known to be fixed."""
    fix: str = ""
    """`PR #10892` or what else ends it."""
    toggle: str = ""
    """What made it vanish in the report."""
    source: str = field(default="shipped", compare=False)

    def sentence(self) -> str:
        """`looks like sgl-project/sglang#1 (title), fixed by ...`."""
        fix = f", fixed by {self.fix}" if self.fix else ", which names no fix"
        return f"looks like {self.issue} ({self.title}){fix}"

    def advice(self) -> str:
        """What the report says to try."""
        told = f"; there it vanished with {self.toggle}" if self.toggle else ""
        return f"compare with {self.issue}{told}"


def version_key(text: str) -> tuple[int, ...]:
    """Comparable numbers of a version: `0.5.12.post1` -> (0, 5, 12, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:5])


def match_fault(obs: Observations, fault: Fault) -> tuple[KnownCrash, ...]:
    """Known crashes that an illegal access looks like, the most specific first; at most three."""
    return match(obs, fault.event, kernel=fault.kernel, phase=fault.phase)


def match(
    obs: Observations, event: LogEvent, *, kernel: str = "", phase: str = "", message_only: bool = False
) -> tuple[KnownCrash, ...]:
    """Known crashes that the event looks like, the most specific first; at most three.

    `message_only`: the frames say nothing (most entries are about illegal accesses, and any error may pass there).
    """
    print_ = fingerprint(event.text, frames(event), kernel)
    near = [other.text for other in obs.events if other.where.source == event.where.source and _close(other, event)]
    text = event.text.lower()
    if not message_only:
        text = "\n".join([whole_text(event), own_frame(event), kernel, *near]).lower()
    found = []
    for crash in obs.known_crashes:
        score = _score(obs, crash, print_, text, kernel, phase)
        if score:
            found.append((score, crash))
    found.sort(key=lambda one: -one[0])
    return tuple(crash for _, crash in found[:3])


def _close(other: LogEvent, event: LogEvent) -> bool:
    return abs((other.where.line or 0) - (event.where.line or 0)) <= 60 and other.kind in (
        "engine_stage",
        "kernel",
        "traceback",
    )


def _score(obs: Observations, crash: KnownCrash, print_: str, text: str, kernel: str, phase: str) -> int:
    """How specific the match is; 0 for none. Phase or flags alone are too little."""
    if print_ in crash.fingerprints:
        return 100
    version = sglang_version(obs)
    if version:
        key = version_key(version)
        if crash.since and key < version_key(crash.since):
            return 0
        if crash.until and key > version_key(crash.until):
            return 0
    score = 0
    if crash.kernels:
        if not any(part.lower() in kernel.lower() or part.lower() in text for part in crash.kernels):
            return 0
        score += 20
    if crash.text:
        if not any(part.lower() in text for part in crash.text):
            return 0
        score += 10
    if crash.phases:
        if phase and not any(one in phase for one in crash.phases):
            return 0
        score += 1
    if crash.flags:
        if not all(_in_effect(obs, flag) for flag in crash.flags):
            return 0
        score += 3 * len(crash.flags)
    specific = bool(crash.kernels or crash.text) or len(crash.flags) >= 2
    return score if specific else 0


def _in_effect(obs: Observations, flag: str) -> bool:
    """A setting of the engine: from the server's own report, else from slime's or SGLang's flags."""
    name, _, wanted = flag.partition("=")
    values: list[object] = [d.fields[name] for d in obs.documents if d.kind == "server_info" and name in d.fields]
    values += [obs.args.flags[key] for key in (f"sglang_{name}", name) if key in obs.args.flags]
    if not values:
        return False
    value = str(values[0]).lower()
    if wanted:
        return any(value == one or value.startswith(one) for one in wanted.lower().split("|"))
    return value not in ("", "0", "false", "none", "no")
