"""How long a crash takes to come: unknown, so a grid of possibilities that the trials weigh.

A possibility is a Weibull law: mean minutes to the crash, and a shape. Shape 1 is "equally likely at every moment";
below 1 it comes early or very late (a wrong batch size met at once, or not for long), above 1 it needs time to build up
(a pool that fills). The means go from seconds (it dies as it starts) to hours, equally believed on a logarithmic scale:
nothing is assumed, the first crash already tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, gamma, inf, log

SHAPES = ((0.7, 0.25), (1.0, 0.5), (2.0, 0.25))
"""(shape, belief)."""
SHORTEST_MIN, LONGEST_MIN, MEANS = 0.1, 480.0, 18
STRAY_MIN = 3000.0
"""Mean minutes to a crash that has another cause than the hunted one: such a crash must not rule out everything."""


@dataclass(frozen=True, slots=True)
class Law:
    """One possibility."""

    scale_min: float
    shape: float
    belief: float

    def log_survival(self, minutes: float) -> float:
        """Natural log of the chance that nothing happens within that time."""
        return -((minutes / self.scale_min) ** self.shape) if minutes > 0 else 0.0

    def log_density(self, minutes: float) -> float:
        """Natural log of the density (per minute) of a crash after exactly that time."""
        at = max(minutes, 1e-3)
        ratio = at / self.scale_min
        return log(self.shape / self.scale_min) + (self.shape - 1.0) * log(ratio) - float(ratio**self.shape)


@lru_cache(maxsize=1)
def laws() -> tuple[Law, ...]:
    """The grid; the beliefs sum to 1."""
    step = (LONGEST_MIN / SHORTEST_MIN) ** (1.0 / (MEANS - 1))
    means = [SHORTEST_MIN * step**at for at in range(MEANS)]
    return tuple(
        Law(mean / gamma(1.0 + 1.0 / shape), shape, belief / MEANS) for mean in means for shape, belief in SHAPES
    )


def stray_log(crashed: bool, minutes: float) -> float:
    """Log likelihood of an outcome in an arm where the hunted crash can not come."""
    return -minutes / STRAY_MIN - (log(STRAY_MIN) if crashed else 0.0)


def log_sum(values: list[float]) -> float:
    """log(sum(exp(values))), without overflow; -inf of nothing."""
    top = max(values, default=-inf)
    return top if top == -inf else top + log(sum(exp(value - top) for value in values))
