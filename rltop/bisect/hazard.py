"""How long a crash takes to come: unknown, so a grid of possibilities that the trials weigh.

A possibility is a Weibull law: mean minutes to the crash, and a shape. Shape 1 is "equally likely at every moment";
below 1 it comes early or very late (a wrong batch size met at once, or not for long), above 1 it needs time to build up
(a pool that fills). The means go from seconds (it dies as it starts) to hours, equally believed on a logarithmic scale:
nothing is assumed, the first crash already tells.

A crash before the first request is another thing: how long the engine had been up says nothing, every start is one try.
Then the possibilities are chances per start (`starts_grid`), and a trial is one exposure, whatever its minutes.

All that the laws need of the trials in an arm is a `Tally`: how many crashes, the sum of the logarithms of their times,
and per shape the sum of all times to that power. Tallies add up, so that a belief costs as much after a hundred trials
as after two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from math import expm1, gamma, log, log1p

SHAPES = ((0.7, 0.25), (1.0, 0.5), (2.0, 0.25))
"""(shape, belief)."""
SHORTEST_MIN, LONGEST_MIN, MEANS = 0.1, 480.0, 13
STRAY_MIN = 3000.0
"""Mean minutes to a crash that has another cause than the hunted one: such a crash must not rule out everything."""
STRAY_START = 0.002
"""Chance that a start fails for another cause."""
SOONEST_MIN = 1e-3
"""A crash is never taken to be sooner: the density of a shape below 1 has no bound."""

Tally = tuple[float, ...]
"""(crashes, sum of log minutes of the crashes, sum of minutes ** shape for each of `SHAPES`)."""
EMPTY: Tally = (0.0,) * (2 + len(SHAPES))
OUT = 30.0
"""A law that is e**30 times less likely than the best is left out: no trials bring it back."""


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
        at = max(minutes, SOONEST_MIN)
        ratio = at / self.scale_min
        return log(self.shape / self.scale_min) + (self.shape - 1.0) * log(ratio) - float(ratio**self.shape)


@lru_cache(maxsize=1)
def laws() -> tuple[Law, ...]:
    """The grid, shape by shape; the beliefs sum to 1."""
    step = (LONGEST_MIN / SHORTEST_MIN) ** (1.0 / (MEANS - 1))
    means = [SHORTEST_MIN * step**at for at in range(MEANS)]
    return tuple(
        Law(mean / gamma(1.0 + 1.0 / shape), shape, belief / MEANS) for shape, belief in SHAPES for mean in means
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """Laws, shape by shape, and what a tally costs under each."""

    scales: tuple[float, ...]
    """Per law: about how many minutes (or starts) a crash takes."""
    _rows: tuple[tuple[tuple[float, float, float], ...], ...]
    """Per shape, per law: log belief, what each crash adds besides its time, and what each power takes."""
    starts: bool = False
    """Exposure is counted in starts, not in minutes."""

    def log_weights(self, seen: Tally) -> list[float]:
        """Per law: log of its belief times the likelihood of what was seen."""
        crashes, logs = seen[0], seen[1]
        found: list[float] = []
        for (shape, _), power, rows in zip(SHAPES, seen[2:], self._rows, strict=True):
            more = (shape - 1.0) * logs
            found += [start + crashes * each + more - power * takes for start, each, takes in rows]
        return found

    def log_quiet(self, seen: Tally) -> list[float]:
        """Per law: log of the chance of being quiet for so long."""
        return [-power * takes for power, rows in zip(seen[2:], self._rows, strict=True) for _, _, takes in rows]

    def dies(self, minutes: float, *, age: float = 0.0) -> list[float]:
        """Per law: the chance of a crash within `minutes`, after it was quiet for `age` minutes."""
        powers = [(age + minutes) ** shape - (age**shape if age else 0.0) for shape, _ in SHAPES]
        return [-expm1(-power * takes) for power, rows in zip(powers, self._rows, strict=True) for _, _, takes in rows]

    def tally(self, minutes: float, *, crashed: bool) -> Tally:
        """Of one trial."""
        if self.starts:
            return (1.0, 0.0, 0.0, 0.0, 0.0) if crashed else (0.0, 0.0, 0.0, 1.0, 0.0)
        if crashed:
            at = max(minutes, SOONEST_MIN)
            return (1.0, log(at), *(at**shape for shape, _ in SHAPES))
        return (0.0, 0.0, *(minutes**shape if minutes > 0 else 0.0 for shape, _ in SHAPES))

    def stray_log(self, crashes: float, exposure: float) -> float:
        """Log likelihood of so many crashes in so many minutes (or starts) where the hunted crash can not come."""
        if self.starts:
            return crashes * log(STRAY_START) + (exposure - crashes) * log1p(-STRAY_START)
        return -exposure / STRAY_MIN - crashes * log(STRAY_MIN)

    def likely(self, seen: Tally) -> Grid:
        """Without the laws that these trials make all but impossible: of what a culprit of any kind has seen."""
        logs = self.log_weights(seen)
        least = max(logs) - OUT
        keep = [value > least for value in logs]
        rows, at = [], 0
        for shape_rows in self._rows:
            rows.append(tuple(compress(shape_rows, keep[at : at + len(shape_rows)])))
            at += len(shape_rows)
        return Grid(tuple(compress(self.scales, keep)), tuple(rows), self.starts)


@lru_cache(maxsize=1)
def load_grid() -> Grid:
    """All of `laws()`: crashes under load."""
    return _grid(laws())


def known_grid(mean_min: float) -> Grid:
    """Where the mean time to a crash is known, and only when it comes is not."""
    return _grid([Law(mean_min / gamma(1.0 + 1.0 / shape), shape, belief) for shape, belief in SHAPES])


def _grid(found: Sequence[Law]) -> Grid:
    return Grid(
        tuple(law.scale_min for law in found),
        tuple(
            tuple(
                (log(law.belief), log(shape) - shape * log(law.scale_min), law.scale_min**-shape)
                for law in found
                if law.shape == shape
            )
            for shape, _ in SHAPES
        ),
    )


@lru_cache(maxsize=1)
def starts_grid() -> Grid:
    """Crashes before the first request: chances per start, all equally believed but "always", which has half.

    Threads about crashes at start-up mostly tell of every start (SGLang 21112, 13789).
    """
    chances = [(0.98, 0.5)] + [(chance, 0.5 / 6) for chance in (0.8, 0.6, 0.4, 0.25, 0.15, 0.07)]
    rows = tuple((log(belief), log(chance), -log1p(-chance)) for chance, belief in chances)
    return Grid(tuple(1.0 / chance for chance, _ in chances), ((), rows, ()), starts=True)


def added(tallies: Iterable[Tally]) -> Tally:
    """Of several trials, or arms."""
    found = list(tallies)
    return found[0] if len(found) == 1 else tuple(map(sum, zip(EMPTY, *found, strict=True)))
