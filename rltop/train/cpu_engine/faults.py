"""Faults that the CPU engine can be told to have, and how they are written. Rehearsals only; off unless asked for.

    RLTOP_CPU_ENGINE_FAULTS='ima:cuda_graph&speculative:hazard=0.02; hang:after=60'

One fault is `name[:condition][:setting=value,...]`; several are separated by semicolons. The condition is a conjunction
of toggles under rltop's names: `cuda_graph` (not off), `!radix_cache` (off), `speculative=NGRAM` (that value). While it
does not hold the fault never strikes: that is what a bisection of toggles has to find out.

A living engine takes them at `POST /rltop/faults` with `{"on": "hang"}` or `{"off": "hang"}`; `GET` lists what is
armed. Every fault that strikes says so in the log, by name, before it does anything.

Pure. Bad text raises `RltopError` with what is wrong in which fault.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rltop.engines.toggle_table import TOGGLES
from rltop.errors import RltopError

VARIABLE = "RLTOP_CPU_ENGINE_FAULTS"
"""Environment variable with the faults of an engine from its start."""

INJECTED = "INJECTED FAULT (rltop's CPU engine, a rehearsal)"
"""Begins every log line that names a fault."""

Stage = Literal["start", "batch", "request", "stop"]

PADDING = "cuda_graph_padding"
"""A fault that needs it strikes only at decode batches that are padded, and counts no others."""

_WHEN: Mapping[str, str] = {
    "hazard": "0..1, chance per batch; drawn from `seed`, so the same batches give the same answer",
    "seed": "of the draws; default: --random-seed and $RLTOP_ENGINE, so that every generation draws anew",
    "batch": "first at this batch, counted from 1 since it was armed",
    "after": "seconds since it was armed before it can strike",
    "at": "`prefill` or `decode`; default: either",
}
"""When a fault of the batch stage strikes. Without any: at the next batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One fault that exists."""

    name: str
    stage: Stage
    does: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """Beside those of `_WHEN`, which every fault of the batch stage has."""
    real: str = ""
    """Where the real behaviour was seen."""

    @property
    def all_settings(self) -> dict[str, str]:
        """Setting -> meaning."""
        return dict(self.settings) | (dict(_WHEN) if self.stage == "batch" else {})


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="ima",
            stage="batch",
            does="illegal memory access: SGLang's traceback (with CUDA_LAUNCH_BLOCKING and no graphs the kernel's "
            "line, with core dumps the `coredump:` lines and a file), then SGLang's death",
            settings={"kernel": "name that the core dump gives; default: injected_oob_kernel"},
            real="0.5.14 on an H200, four ways",
        ),
        Kind(
            name="oom",
            stage="batch",
            does="out of GPU memory: torch.OutOfMemoryError, then SGLang's death",
            settings={"while": "`serving` (default), `load` or `capture`: the last two at the start"},
        ),
        Kind(
            name="nccl-timeout",
            stage="batch",
            does="NCCL's watchdog gives up on a collective and aborts the scheduler (-6)",
        ),
        Kind(
            name="hang",
            stage="batch",
            does="no more batches, counters stand still, /server_info does not answer, while /health and "
            "/health_generate go on answering 200",
            settings={"seconds": "until it goes on; default: for ever"},
            real="SGLang issue 36943",
        ),
        Kind(
            name="watchdog",
            stage="batch",
            does="no more batches, /health times out, and after `seconds` SGLang's watchdog ends the engine",
            settings={"seconds": "default: --watchdog-timeout (300)"},
        ),
        Kind(
            name="slow-prefill",
            stage="batch",
            does="every prefill batch takes longer; nothing is wrong but the time",
            settings={"seconds": "longer, each; default: 2"},
        ),
        Kind(
            name="ngram-stall",
            stage="batch",
            does="the first batch with a sampled request (temperature above 0) stands still: a kernel is compiled",
            settings={"seconds": "default: 94"},
            real="0.5.14 on an H200, twice (94 s and over 60 s)",
        ),
        Kind(
            name="ngram-update-dies",
            stage="request",
            does="/update_weights_from_disk ends an engine with NGRAM: its worker has no such method",
            real="0.5.14 on an H200",
        ),
        Kind(
            name="retract-update-dies",
            stage="request",
            does="an update with flush (its default) while retracted requests wait ends the engine",
            real="0.5.14 on an H200",
        ),
        Kind(
            name="health-kills-released",
            stage="request",
            does="/health or /generate while memory is released ends the engine",
            real="0.5.14 on an H200",
        ),
        Kind(
            name="token-zero",
            stage="request",
            does="after a resume of released weights every token is 0, without any error, until the next update",
            real="0.5.14 on an H200; with --enable-memory-saver it is so without this fault",
        ),
        Kind(
            name="update-refused",
            stage="request",
            does="weight updates answer 400 with success false and change nothing",
            settings={"count": "of refusals; default: all"},
        ),
        Kind(
            name="rotary-lost",
            stage="request",
            does="the next weight update zeroes the rotary tables, which no update brings and no weights checker sees",
            settings={"count": "of updates; default: all"},
            real="buffers in memory that was released and never filled again (vime issue 446)",
        ),
        Kind(
            name="probe-fails",
            stage="request",
            does="/health and /health_generate answer 503 although all is well",
            settings={"count": "of probes; default: all"},
        ),
        Kind(
            name="flag-ignored",
            stage="start",
            does="the arguments of one toggle are accepted and have no effect",
            settings={"toggle": "required: which"},
        ),
        Kind(
            name="port-in-use",
            stage="start",
            does="after the load, uvicorn finds its port taken: exit status 1",
        ),
        Kind(
            name="start-dies",
            stage="start",
            does="the scheduler child is killed (-9) while weights load: exit status 1",
        ),
        Kind(
            name="slow-start",
            stage="start",
            does="one stage of the start takes longer",
            settings={"seconds": "default: 5", "while": "`load` (default), `capture` or `warm-up`"},
        ),
        Kind(
            name="orphan",
            stage="start",
            does="a child of the scheduler leaves the session, ignores SIGTERM and outlives the engine, keeping every "
            "inherited lock; a living engine starts it when it is armed",
            settings={"seconds": "it lives at most; default: 600"},
        ),
        Kind(
            name="drain-stuck",
            stage="stop",
            does="after SIGTERM the engine never finishes draining",
        ),
    )
}
"""Every fault, by name."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One toggle's part of a conjunction."""

    toggle: str
    value: str = ""
    """Empty: anything but off."""
    negated: bool = False

    def holds(self, toggles: Mapping[str, str | None]) -> bool:
        """Whether it does, with these effective values."""
        value = toggles.get(self.toggle)
        is_so = value == self.value if self.value else value not in (None, "off")
        return is_so != self.negated

    def __str__(self) -> str:
        return f"{'!' * self.negated}{self.toggle}{'=' * bool(self.value)}{self.value}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as it was asked for."""

    kind: Kind
    condition: tuple[Condition, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def holds(self, toggles: Mapping[str, str | None]) -> bool:
        """Whether the whole condition does."""
        return all(part.holds(toggles) for part in self.condition)

    def number(self, name: str, default: float) -> float:
        """A setting as a number; checked when it was parsed."""
        return float(self.settings.get(name, default))

    @property
    def of_padding(self) -> bool:
        """It takes a batch that is padded, and not only a setting."""
        return any(one.toggle == PADDING and not one.negated and one.value != "off" for one in self.condition)

    def __str__(self) -> str:
        condition = "&".join(map(str, self.condition))
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return ":".join(part for part in (self.kind.name, condition, settings) if part)


_NUMBERS = ("hazard", "batch", "after", "seconds", "count", "seed")

_WORDS: Mapping[str, tuple[str, ...]] = {
    "at": ("prefill", "decode"),
    "toggle": tuple(name for name, toggle in TOGGLES.items() if toggle.fields),
}


def parse_faults(text: str, *, where: str = VARIABLE) -> tuple[Fault, ...]:
    """Faults separated by semicolons. Raises `RltopError`."""
    return tuple(_parse(part.strip(), where) for part in text.split(";") if part.strip())


def _parse(text: str, where: str) -> Fault:
    name, *parts = (part.strip() for part in text.split(":"))
    kind = KINDS.get(name)
    if kind is None:
        raise _wrong(where, text, f"no fault is called {name!r}", f"the faults are {', '.join(KINDS)}")
    condition: tuple[Condition, ...] = ()
    settings: dict[str, str] = {}
    for part in parts:
        pairs = [pair.partition("=") for pair in part.split(",")]
        if all(sign and key.strip() in kind.all_settings for key, sign, _ in pairs):
            settings |= {key.strip(): value.strip() for key, _, value in pairs}
        elif not condition and not settings:
            condition = tuple(_condition(one.strip(), kind, text, where) for one in part.split("&"))
        else:
            known = ", ".join(kind.all_settings) or "none"
            raise _wrong(where, text, f"{part!r} is no setting of {name}", f"its settings are: {known}")
    _check(kind, settings, text, where)
    return Fault(kind, condition, settings)


def _condition(text: str, kind: Kind, whole: str, where: str) -> Condition:
    name, _, value = text.removeprefix("!").partition("=")
    if name not in TOGGLES:
        known = (
            f"toggles are {', '.join(TOGGLES)}; settings of {kind.name} are {', '.join(kind.all_settings) or 'none'}"
        )
        raise _wrong(where, whole, f"{text!r} is neither a toggle nor a setting", known)
    return Condition(name, value, text.startswith("!"))


def _check(kind: Kind, settings: Mapping[str, str], text: str, where: str) -> None:
    for name, value in settings.items():
        if name in _NUMBERS:
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if not 0 <= number < float("inf") or (name == "hazard" and number > 1):
                limits = "a number from 0 to 1" if name == "hazard" else "a number, 0 or more"
                raise _wrong(where, text, f"{name}={value}", f"{name} is {limits}")
        choices = _WORDS.get(name) or _whiles(kind) if name in (*_WORDS, "while") else ()
        if choices and value not in choices:
            raise _wrong(where, text, f"{name}={value}", f"{name} is one of {', '.join(choices)}")
    if "toggle" in kind.settings and "toggle" not in settings:
        raise _wrong(where, text, f"{kind.name} needs a toggle", f"for example {kind.name}:toggle=cuda_graph")


def _whiles(kind: Kind) -> tuple[str, ...]:
    return ("serving", "load", "capture") if kind.name == "oom" else ("load", "capture", "warm-up")


def _wrong(where: str, text: str, why: str, do: str) -> RltopError:
    return RltopError("cannot inject this fault", where=f"{where}: {text}", why=why, do=do)


def drawn(fault: Fault, batch: int, seed: str) -> bool:
    """Whether the fault strikes at this batch by its hazard: a pure function of seed, fault and batch."""
    text = f"{fault.settings.get('seed', seed)}/{fault.kind.name}/{batch}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return number < fault.number("hazard", 1.0) * 2**64


def listing() -> str:
    """Every fault with its settings, for `--help`: 100 columns."""
    lines: list[str] = []

    def add(text: str, margin: int) -> None:
        lines.extend(textwrap.wrap(text, 100, initial_indent=" " * margin, subsequent_indent=" " * (margin + 4)))

    for kind in KINDS.values():
        add(f"{kind.name}: {kind.does}", 2)
        for name, meaning in kind.settings.items():
            add(f"{name}: {meaning}", 6)
    add("of every fault that strikes at a batch:", 2)
    for name, meaning in _WHEN.items():
        add(f"{name}: {meaning}", 6)
    add(f"One whose condition is {PADDING} counts and strikes only decode batches that are padded.", 2)
    return "\n".join(lines)
