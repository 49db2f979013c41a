"""What the arms of a bisection stand on: which toggles can be turned off, with what, and the arguments of every arm.

An arm turns some toggles off and must change nothing else: whatever any of the toggles would move (KV pool, request
limit, backends, capture sizes, seed: `pins.py`) is read from the baseline's `/server_info` and written out in every
arm, also in the one with everything on. CUDA_LAUNCH_BLOCKING is off in all of them: it changes the timing, so that what
is quiet with it is not known to be quiet.

Failure policy: what SGLang refuses makes a toggle fixed, with the reason, or an arm that cannot be; `RltopError` means
that there is nothing to bisect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rltop.engines.flags import parse, strip
from rltop.engines.options import table
from rltop.engines.pins import pins
from rltop.engines.planning import config_of, inherited_toggles
from rltop.engines.requests import Config
from rltop.engines.rules import judge
from rltop.engines.toggle_table import LAUNCH_BLOCKING, TOGGLES, read_fields
from rltop.engines.toggles import Change, change, read_argv
from rltop.engines.trials import SAVER_FIELD, Subject, model_of
from rltop.errors import RltopError

MEMORY = "memory"
"""The hypothesis that the pool is too large: off is `mem_fraction_static` lowered by `MEMORY_STEP`."""
MEMORY_STEP = 0.1
MEMORY_SAVER = "memory_saver"
"""`--enable-memory-saver`, which a trainer that takes its engines' memory needs. On trial nobody takes it."""
RESUME_ORDER = "resume_order"
"""The hypothesis that sleeping and waking is at fault: off is the same load without it, with the same arguments."""
NEVER = {
    "launch_blocking": "it localises a fault and changes the timing: a quiet engine with it proves nothing",
    "core_dump": "it only writes down what happened",
    "mem_fraction_static": f"name {MEMORY!r} to try a smaller pool",
}
ASKED_FOR = ("chunked_prefill", MEMORY)
"""Always on, seldom the culprit: only if they are named."""
ALL_REDUCE = "custom_all_reduce"
BACKENDS = ("triton", "flashinfer")
"""That stand in for an attention backend that is to be "off"."""
NOT_NAMED = "not named: it stays as it is in every arm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """Everything that all arms share."""

    toggles: tuple[str, ...]
    """That are on and take part, in the order of `TOGGLES`."""
    off: Mapping[str, str]
    """Toggle -> the value that turns it off."""
    on: Mapping[str, str]
    """Toggle -> its value when it is on."""
    fixed: Mapping[str, str]
    """Toggle -> why it cannot be turned off."""
    together: Mapping[str, tuple[str, ...]]
    """Toggle -> others that go off with it."""
    config: Config
    """Arguments with everything on, pinned."""
    pins: tuple[str, ...]
    notes: tuple[str, ...]
    sleeps: bool = False
    """The traffic has sleeps between its waves: they go off with the memory saver, which makes them possible."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Toggle that is on and could be tried -> why it is not, unless it is named."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One set of toggles."""

    config: Config | None
    """None: it cannot be."""
    on: frozenset[str] = frozenset()
    """That will be on in effect, as far as arguments tell."""
    why_not: str = ""
    notes: tuple[str, ...] = field(default=())


def ground(subject: Subject, wanted: Collection[str] = (), *, cycle: str = "") -> Ground:
    """What can be bisected on engines like this one. wanted: these toggles only.

    cycle: the traffic has sleeps ("sleep") or weight updates ("sync") between its waves, which can be left out
    (`resume_order`).

    Raises RltopError: a toggle that there is not, none that is on and can be turned off, arguments that SGLang refuses.
    """
    every = (*TOGGLES, MEMORY_SAVER, MEMORY, RESUME_ORDER)
    unknown = [name for name in wanted if name not in every]
    if unknown:
        known = ", ".join(name for name in every if name not in NEVER)
        raise RltopError(f"there is no toggle {unknown[0]!r}", do=f"use some of: {known}")
    if never := [name for name in wanted if name in NEVER]:
        raise RltopError(f"{never[0]} is no toggle of a bisection", why=NEVER[never[0]], do=f"leave {never[0]} out")
    now = {**toggles_now(subject), RESUME_ORDER: "on" if cycle else "off"}
    named = [name for name in every if name not in NEVER]
    named = [name for name in named if name in wanted or (not wanted and name not in ASKED_FOR)]
    off_already = [name for name in named if now.get(name) in (None, "off")]
    toggles = [name for name in named if name not in off_already]
    if wanted and off_already:
        if now.get(off_already[0]) is None:
            why = "its arguments do not name it, and no /server_info was seen"
            do = "leave it out, or name it in the engine's arguments and let it crash once more"
            raise RltopError(f"{off_already[0]}: it is not known what it was", why=why, do=do)
        why = "it was off when the engine crashed"
        if off_already[0] == RESUME_ORDER:
            why = "the crash came neither just after a resume nor just after a weight update"
        usable = [name for name in every if name not in NEVER and now.get(name) not in (None, "off")]
        raise RltopError(f"{off_already[0]} is off already", why=why, do=f"name some that are on: {', '.join(usable)}")
    if not wanted and _ranks(subject) < 2:
        toggles = [name for name in toggles if name != ALL_REDUCE]
    untried = [name for name in every if name not in NEVER and name not in toggles]
    if wanted:
        untried = [name for name in untried if name not in ASKED_FOR and (name != ALL_REDUCE or _ranks(subject) > 1)]
    reasons = {name: NOT_NAMED if wanted else _why_left_out(name) for name in untried}
    left_out = {name: why for name, why in reasons.items() if now.get(name) not in (None, "off")}
    off = {name: _off(name, now) for name in toggles}
    config, pinned, notes = _pinned(subject, off)
    made = _Maker(subject, config, off, sleeps=cycle == "sleep")
    fixed: dict[str, str] = {}
    together: dict[str, tuple[str, ...]] = {}
    for name in toggles:
        also, why = made.companions(name, toggles)
        if why:
            fixed[name] = why
        elif also:
            together[name] = also
    if len(fixed) == len(toggles):
        why = "; ".join(f"{name}: {text}" for name, text in fixed.items()) or "none of them is on"
        raise RltopError("there is no toggle that could be turned off", why=why, exit_code=1)
    return Ground(
        toggles=tuple(toggles),
        off=off,
        on={name: str(now[name]) for name in toggles},
        fixed=fixed,
        together=together,
        config=config,
        pins=pinned,
        notes=tuple(notes),
        sleeps=cycle == "sleep",
        left_out=left_out,
    )


def _why_left_out(name: str) -> str:
    why = "one GPU reduces nothing" if name == ALL_REDUCE else "seldom the culprit"
    return f"{why}; it is tried if it is named"


def arm(subject: Subject, base: Ground, off: Collection[str]) -> Arm:
    """The arguments in which these toggles are off, with whatever goes off with them."""
    return _Maker(subject, base.config, base.off, sleeps=base.sleeps).arm(off, base.toggles, base.fixed)


def effective(base: Ground, asked_on: Collection[str], seen: Mapping[str, str | None]) -> tuple[str, ...]:
    """Toggles of the bisection that are on in a running engine. What cannot be seen is as it was asked for."""
    found = []
    for name in base.toggles:
        value = seen.get(_field(name))
        if value is None:
            on = name in asked_on
        elif name == MEMORY:
            on = float(value) > float(base.on[name]) - MEMORY_STEP / 2
        elif name == "attention_backend":
            on = value == base.on[name]
        else:
            on = value != "off"
        if on:
            found.append(name)
    return tuple(found)


def toggles_now(subject: Subject) -> dict[str, str | None]:
    """The toggles' values: in effect where that was seen, else as the arguments ask for."""
    inherited = inherited_toggles(subject.config, subject.launcher)
    env = inherited | dict(subject.config.env)
    asked = read_argv(subject.config.args, env, version=subject.version, model=model_of(subject))
    now: dict[str, str | None] = {**asked, **{k: v for k, v in subject.toggles.items() if v is not None}}
    if now.get("cuda_graph") == "off":
        now["cuda_graph_padding"] = "off"
    parsed = parse(subject.config.args, version=subject.version).values
    saver = subject.info.get(SAVER_FIELD, parsed.get(SAVER_FIELD))
    now[MEMORY_SAVER] = None if saver is None else "on" if saver else "off"
    fraction = now.get("mem_fraction_static") or subject.info.get("mem_fraction_static")
    now[MEMORY] = None if fraction is None else str(fraction)
    backend = now.get("attention_backend") or subject.info.get("attention_backend")
    now["attention_backend"] = None if backend is None else str(backend)
    return now


def _field(name: str) -> str:
    return "mem_fraction_static" if name == MEMORY else name


def _ranks(subject: Subject) -> int:
    parsed = parse(subject.config.args, version=subject.version)
    return int(parsed.values.get("tp_size") or 1)


def _off(name: str, now: Mapping[str, str | None]) -> str:
    if name == MEMORY:
        return f"{max(0.05, float(now[name] or 0.9) - MEMORY_STEP):.3f}"
    if name == "attention_backend":
        return next(one for one in BACKENDS if one != now[name])
    return "off"


def _pinned(subject: Subject, off: Mapping[str, str]) -> tuple[Config, tuple[str, ...], list[str]]:
    """The baseline's arguments with everything written out that some arm would move, and without launch blocking."""
    old, notes = subject.config, list[str]()
    inherited = inherited_toggles(old, subject.launcher)
    env = inherited | dict(old.env)
    model = model_of(subject)
    unblocked = change(old.args, env, {"launch_blocking": "off"}, version=subject.version, model=model)
    if not unblocked.allowed:
        first = unblocked.refusals[0]
        raise RltopError("the engine's arguments cannot be changed", why=first.why, do=first.do, exit_code=1)
    if read_fields({}, env)["launch_blocking"] == "on":
        notes.append(f"{LAUNCH_BLOCKING} was on in the crash; every arm runs without it")
    parsed = parse(unblocked.argv, version=subject.version)
    # The backend is written out too, for its own arm replaces it.
    asked = {_field(name): value for name, value in off.items() if name != "attention_backend" or len(off) == 1}
    for mine in (RESUME_ORDER, MEMORY_SAVER):
        asked.pop(mine, None)
    options = pins(asked, parsed, table(subject.version), subject.info)
    if not subject.info:
        notes.append(
            "the crashed engine's /server_info was not seen: what its toggles move by themselves is not pinned"
        )
    argv = [*unblocked.argv, *(token for option in options for token in option)]
    judged = judge(argv, unblocked.env, version=subject.version, model=model)
    if not judged.accepted:
        notes.append(f"nothing is pinned: with the baseline's values SGLang refuses its arguments ({judged.errors[0]})")
        argv, options = list(unblocked.argv), []
    made = config_of(unblocked, old, inherited)
    config = Config(args=tuple(argv), env=made.env, unset=made.unset)
    return config, tuple(" ".join(option) for option in options), notes


class _Maker:
    """Makes the arguments of arms."""

    def __init__(self, subject: Subject, config: Config, off: Mapping[str, str], *, sleeps: bool) -> None:
        self._subject, self._config, self._off, self._sleeps = subject, config, off, sleeps
        self._inherited = inherited_toggles(config, subject.launcher)
        self._model: dict[str, Any] | None = model_of(subject)

    def companions(self, name: str, toggles: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Toggles that go off with this one, and why it cannot go off at all ("": it can)."""
        alone = self.arm([name], toggles, {})
        if alone.config is not None:
            return tuple(one for one in toggles if one != name and one not in alone.on), ""
        for other in toggles:  # SGLang wants another one off first
            if other != name and (pair := self.arm([name, other], toggles, {})).config is not None:
                return tuple(one for one in toggles if one != name and one not in pair.on), ""
        return (), alone.why_not

    def arm(self, off: Collection[str], toggles: Sequence[str], fixed: Mapping[str, str]) -> Arm:
        """One arm; the toggles of `fixed` are never off."""
        off = [name for name in toggles if name in off and name not in fixed]
        if not off:
            return Arm(self._config, frozenset(toggles))
        base, gone = self._config, set(off)
        if MEMORY_SAVER in off:
            base = replace(base, args=tuple(strip(parse(base.args, version=self._subject.version), (SAVER_FIELD,))[0]))
            gone |= {RESUME_ORDER} if self._sleeps else set()
        wanted = {_field(name): self._off[name] for name in off if name not in (RESUME_ORDER, MEMORY_SAVER)}
        if not wanted:
            return Arm(base, frozenset(toggles) - gone)
        if "cuda_graph" in off:
            wanted.pop("cuda_graph_padding", None)
        env = self._inherited | dict(base.env)
        made = self._change(base.args, env, wanted)
        if not made.allowed:
            first = made.refusals[0]
            return Arm(None, why_not=f"{first.toggle}: {first.why}" if first.toggle else first.why)
        if "cuda_graph" in off and "prefill_graph" in toggles and "prefill_graph" not in off:
            # The two go together unless somebody asks for the other by itself.
            apart = self._change(made.argv, made.env, {"prefill_graph": "on"})
            made = apart if apart.allowed else made
        config = config_of(made, base, self._inherited)
        shown = read_fields(
            judge(made.argv, made.env, version=self._subject.version, model=self._model).fields, made.env
        )
        on = {name for name in toggles if name not in gone and shown.get(name) != "off"}
        if shown.get("cuda_graph") == "off":
            on.discard("cuda_graph_padding")
        notes = [f"moves too: {name}={alias.value}: {alias.why}" for name, alias in made.aliases.items()]
        return Arm(config, frozenset(on), notes=tuple(notes))

    def _change(self, args: Sequence[str], env: Mapping[str, str], wanted: Mapping[str, str]) -> Change:
        version, info = self._subject.version, self._subject.info
        return change(args, env, wanted, version=version, baseline=info, model=self._model)
