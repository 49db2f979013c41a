"""What was tried and what is being tried: the facts of a bisection, without any opinion about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """One engine with one set of toggles, under the captured traffic."""

    arm: int
    """Mask of the toggles that were on, effectively (after what SGLang rewrites)."""
    minutes: float
    """Exposure: from ready to the crash, or to now."""
    crashed: bool
    counts: bool = True
    """False: it localises only (launch blocking), or was lost for another reason. It changes nothing."""
    engine: str = ""
    """Where it ran, if that is known. Quiet on an engine that never crashed is not held for a confirmation."""


@dataclass(frozen=True, slots=True)
class Running:
    """A trial on an engine now."""

    engine: str
    arm: int
    minutes: float
    """So far."""
