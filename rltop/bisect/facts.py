"""What one crash says before any restart: its kernel, its phase, what was just done.

Each fact moves the priors by likelihood factors: how much likelier this fact is if the toggle is part of the culprit
than if it is not. A kernel's name moves most: a dispatch kernel of DeepEP that reads out of bounds is hardly the fault
of the overlap schedule. No fact rules anything out, for a kernel may be handed a wrong index by somebody else. The
factors are estimates from the threads that the priors come from; they are data (`priors.toml`), and a person may
replace them. Every fact that moved something says so, in words, so that it can be doubted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from rltop.bisect.space import Priors


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels whose names are alike, and what a fault in one of them says."""

    name: str
    pattern: str
    factors: Mapping[str, float]
    """Toggle -> factor; the key `none` is for none of the toggles."""


@dataclass(frozen=True, slots=True)
class Tables:
    """All that is believed before the first restart: `priors.toml`, read by `rltop.evidence.priors`."""

    priors: Priors
    families: Sequence[Family] = ()
    """The first that fits is taken: the more telling come first."""
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Phase of the crash (the middle of a crash's fingerprint) -> factors."""
    signs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`padded`, `not_padded`, `after_resume`, `after_sync`, `hardware` -> factors."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """`toggles.cuda_graph`, `together.a+b`, `kernels.DeepEP` -> where the number is from."""


PART_OF: Mapping[str, str] = {"cuda_graph_padding": "cuda_graph", "resume_order": "memory_saver"}
"""Toggle -> the one without which it is nothing: on every engine it goes off with that."""
SIGNS = ("padded", "not_padded", "after_resume", "after_sync", "hardware")
_HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95})
"""ECC, row remapping, NVLink, "fallen off the bus": no toggle causes these. 13 and 31 are software's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashFacts:
    """What is known of the captured crash. Unknown is empty or None."""

    owner: str = "engine"
    """`engine` or `trainer`: whose fault came first."""
    kernel: str = ""
    phase: str = ""
    padded: bool | None = None
    """The batch was smaller than the graph that was replayed."""
    after_resume: bool = False
    """Within the first requests after its memory was resumed."""
    after_sync: bool = False
    xids: tuple[int, ...] = ()
    """The driver's error numbers at that time."""
    rank: int | None = None
    """That faulted first."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One fact and what it moved."""

    fact: str
    factors: Mapping[str, float]
    sign: str = ""
    """Which field of `CrashFacts` it is."""

    def text(self) -> str:
        """For people: `kernel … (attention): attention_backend x12, speculative x2`."""
        parts = ", ".join(f"{name} x{factor:g}" for name, factor in self.factors.items())
        return f"{self.fact}: {parts}" if parts else self.fact


def weigh(facts: CrashFacts, toggles: Sequence[str], tables: Tables) -> tuple[dict[str, float], list[Moved]]:
    """Factors for `space(..., factors=…)` over these toggles, and the reasons.

    A fact that speaks for a toggle that is not in the bisection speaks for the one that it is part of (`PART_OF`), else
    for `none` of it, by the same factor: a padded batch, where padding is not tried, is the graphs'; a fault in
    DeepEP's kernel, where DeepEP can not be turned off, is not.
    """
    moved = [_concerning(one, toggles) for one in _all(facts, tables)]
    names = {name for one in moved for name in one.factors}
    return {name: prod(one.factors.get(name, 1.0) for one in moved) for name in sorted(names)}, moved


def why_not(facts: CrashFacts) -> str:
    """Why no bisection of engine toggles should start; empty if it should."""
    if facts.owner == "trainer":
        return (
            "the trainer faulted first: replay its data with --load-debug-rollout-data and CUDA_LAUNCH_BLOCKING=1 "
            "instead; restarting engines would tell nothing"
        )
    if broken := sorted(_HARDWARE_XIDS.intersection(facts.xids)):
        return f"the driver reported Xid {', '.join(map(str, broken))}: that is hardware, no toggle causes it"
    return ""


def family_of(kernel: str, families: Sequence[Family]) -> Family | None:
    """The family that a kernel's name belongs to."""
    return next((one for one in families if re.search(one.pattern, kernel, re.IGNORECASE)), None)


def _all(facts: CrashFacts, tables: Tables) -> list[Moved]:
    found = []
    if facts.kernel and (family := family_of(facts.kernel, tables.families)) is not None:
        found.append(Moved(f"kernel {facts.kernel[:80]} ({family.name})", family.factors, "kernel"))
    elif facts.kernel:
        found.append(Moved(f"kernel {facts.kernel[:80]} (no known family)", {}, "kernel"))
    if facts.phase in tables.phases:
        found.append(Moved(f"it died in phase {facts.phase}", tables.phases[facts.phase], "phase"))
    signs = {
        "padded": (facts.padded is True, "its batch was padded"),
        "not_padded": (facts.padded is False, "its batch was not padded"),
        "after_resume": (facts.after_resume, "just after its memory was resumed"),
        "after_sync": (facts.after_sync, "just after a weight update"),
        "hardware": (bool(_HARDWARE_XIDS.intersection(facts.xids)), f"Xid {', '.join(map(str, facts.xids))}"),
    }
    fields = {"not_padded": "padded", "hardware": "xids"}
    return found + [
        Moved(words, tables.signs.get(name, {}), fields.get(name, name))
        for name, (seen, words) in signs.items()
        if seen
    ]


def _concerning(one: Moved, toggles: Sequence[str]) -> Moved:
    here = {name: factor for name, factor in one.factors.items() if name in toggles or name == "none"}
    away = 0.0
    for name, factor in one.factors.items():
        if name in here or factor <= 1.0:
            continue
        if (whole := PART_OF.get(name, "")) in toggles:
            here[whole] = max(here.get(whole, 1.0), factor)
        else:
            away = max(away, factor)
    if away > max(here.values(), default=1.0):
        here["none"] = max(here.get("none", 1.0), away)
    return Moved(one.fact, here, one.sign)
