"""What a bisection costs and how often it is right, beside what people do today, on the same bugs and engines.

    python -m benchmarks.bisect [--full] [--bugs 200] [--engines 1 8] [--setting plain] [--jobs 1] [--seed 7]

Strategies: rltop's planner, and `rltop.bisect.baselines`. The bugs are pinned in `bisect_scenarios.toml` and made
by a simulator that knows nothing of the planner's model; hazards are told to nobody. The baselines' repetition is tuned
on other bugs until they are right as often as the planner is on these: the ratio of minutes is at equal correctness.
With `--seed` the bugs are others of the same mixes, which nobody has looked at.

"right": the very culprit was named. "wrong": another was. The rest said that it can not be told. Intervals are 95 %:
Wilson's for shares, the delta method on pairs for ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

from rltop.bisect.baselines import Checklist, Ddmin, Exhaustive
from rltop.bisect.facts import CrashFacts, Tables, weigh
from rltop.bisect.hazard import known_grid
from rltop.bisect.planner import Budget, Planner
from rltop.bisect.rehearse import Ours
from rltop.bisect.simulate import Bug, Mix, Strategy, bisect, bugs
from rltop.bisect.space import Space, space
from rltop.evidence.priors import load

SCENARIOS = Path(__file__).with_name("bisect_scenarios.toml")
RIGHT = {1: 0.95, 4: 0.95, 8: 0.98, 32: 0.98}
"""Goals, per number of engines."""
HONEST = 0.90
QUICK = 200
"""Bugs per setting without `--full`."""
BASELINES = (1, 2, 4, 8)
REPEATS = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0)
OTHER_WORLDS = 5_000_000
"""Numbers of the random worlds that bugs of another seed are played in begin here."""
ORACLE = "rltop, if it were told the mean time to a crash"
TUNING_BUGS = {"exhaustive": 2000, "ddmin": 400}
"""At the most; a run on few bugs tunes on few. On too few a bad choice looks good, and is right less elsewhere."""
KERNELS = {
    "speculative": ("build_tree_efficient", "verify_tree_greedy"),
    "overlap_schedule": ("at::native::vectorized_gather_kernel<16, long>", "at::native::index_elementwise_kernel"),
    "deepep": (
        "void deep_ep::internode_ll::dispatch<true, false, 7168>",
        "void deep_ep::intranode::combine<__nv_bfloat16>",
    ),
    "prefill_graph": ("triton_poi_fused_add_mul_3",),
}
"""Kernels that are found at a fault of this toggle, as threads have them. Graphs have no kernel of their own."""
ANY_KERNEL = (
    "nvjet_tst_128x64_64x8",
    "flash_fwd_splitkv_kernel",
    "fused_moe_kernel",
    "rms_norm_kernel",
    "write_req_to_token_pool_triton",
    "at::native::vectorized_gather_kernel<16, long>",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Bugs of one sort, and what is asked of the planner there."""

    name: str
    engines: tuple[int, ...]
    goal: str
    """`right`, `half` (of the exhaustive's minutes), `honest`."""
    sha256: str
    mix: Mix
    evidence: str = ""
    budget_min: float = 0.0
    start: bool = False


@dataclass(frozen=True, slots=True)
class Scenarios:
    """The pinned file."""

    toggles: tuple[str, ...]
    bugs: int
    restart_min: float
    seed: int
    tuning_seed: int
    settings: tuple[Setting, ...]

    def found(self, setting: Setting, count: int, *, tuning: bool = False, seed: int | None = None) -> list[Bug]:
        """The bugs of a setting. seed: others than the pinned."""
        seed = self.tuning_seed if tuning else self.seed if seed is None else seed
        return list(bugs(self.toggles, _space(self.toggles).mask, count=count, seed=seed, mix=setting.mix))

    def digest(self, setting: Setting) -> str:
        """Of all its bugs."""
        return hashlib.sha256("\n".join(map(repr, self.found(setting, self.bugs))).encode()).hexdigest()


@lru_cache(maxsize=1)
def scenarios() -> Scenarios:
    """Read the pinned file."""
    document = tomllib.loads(SCENARIOS.read_text(encoding="utf-8"))
    settings = tuple(_setting(row, document) for row in document["setting"])
    return Scenarios(
        tuple(document["toggles"]),
        document["bugs"],
        document["restart_min"],
        document["seed"],
        document["tuning_seed"],
        settings,
    )


def _setting(row: Mapping[str, Any], document: Mapping[str, Any]) -> Setting:
    of_mix = {key: row[key] for key in ("laws", "at_once", "first", "off", "hosts", "again") if key in row}
    if "sizes" in row:
        of_mix["sizes"] = {int(size): share for size, share in row["sizes"].items()}
    if "chance" in row:
        of_mix["chance"] = tuple(row["chance"])
    return Setting(
        row["name"],
        tuple(row["engines"]),
        row["goal"],
        row["sha256"],
        Mix(**of_mix),
        row.get("evidence", ""),
        row.get("budget_min", document["budget_min"]),
        "start" in row.get("laws", ()),
    )


@lru_cache(maxsize=1)
def _tables() -> Tables:
    return load()


@lru_cache(maxsize=4)
def _space(toggles: tuple[str, ...]) -> Space:
    return space(toggles, _tables().priors)


@dataclass(frozen=True, slots=True)
class Job:
    """One bisection."""

    seed: int
    bug: Bug
    engines: int
    what: str
    setting: Setting
    knobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended."""

    said: str
    """`right`, `wrong`, `open`."""
    minutes: float


def play(job: Job) -> Ended:
    """One bisection from the first crash to the verdict."""
    given = scenarios()
    outcome = bisect(
        job.bug,
        _strategy(job),
        all_on=_space(given.toggles).all_on,
        engines=job.engines,
        restart_min=given.restart_min,
        draw=random.Random(f"world/{job.seed}"),
        budget_min=job.setting.budget_min,
    )
    if outcome.culprit is None:
        return Ended("open", outcome.minutes)
    return Ended("right" if {outcome.culprit} == set(job.bug.needs) else "wrong", outcome.minutes)


def _strategy(job: Job) -> Strategy:
    given = scenarios()
    width = len(given.toggles)
    match job.what:
        case "checklist":
            return Checklist(width)
        case "exhaustive":
            return Exhaustive(width, int(job.knobs[0]), job.knobs[1])
        case "ddmin":
            return Ddmin(width, int(job.knobs[0]), job.knobs[1])
    factors = _evidence(job, random.Random(f"kernel/{job.seed}"))
    planner = Planner(
        space(given.toggles, _tables().priors, factors=factors) if factors else _space(given.toggles),
        Budget(job.setting.budget_min, given.restart_min),
        seed=job.seed,
        exposure="start" if job.setting.start else "load",
        grid=known_grid(job.bug.mean_min) if job.what == ORACLE else None,
        engines=job.engines,
    )
    return Ours(planner)


def _evidence(job: Job, draw: random.Random) -> dict[str, float]:
    """What the first crash's core dump said, as factors."""
    toggles = scenarios().toggles
    members = _space(toggles).names(job.bug.needs[0])
    if job.setting.evidence == "member":
        if draw.random() >= 0.8:
            return {draw.choice(toggles): 15.0}
        return {draw.choice(members): 15.0} if members else {"none": 15.0}
    if job.setting.evidence == "table":
        member = draw.choice(members) if members else ""
        kernels = KERNELS.get(member, ANY_KERNEL) if draw.random() < 0.8 else ANY_KERNEL
        return weigh(CrashFacts(kernel=draw.choice(kernels), phase=_phase(members, draw)), toggles, _tables())[0]
    return {}


def _phase(members: Sequence[str], draw: random.Random) -> str:
    """A member's own phase in 80 %; else what an engine mostly does."""
    own = {"cuda_graph": "decode-graph", "prefill_graph": "prefill-graph", "speculative": "verify"}
    told = [own[name] for name in members if name in own]
    if told and draw.random() < 0.8:
        return draw.choice(told)
    return draw.choices(("decode-graph", "prefill-graph", "verify", "draft"), (0.5, 0.2, 0.2, 0.1))[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one number of engines."""

    what: str
    engines: int
    ended: tuple[Ended, ...] = field(repr=False)

    def share(self, said: str) -> float:
        """How often it ended so."""
        return sum(one.said == said for one in self.ended) / len(self.ended)

    @property
    def mean(self) -> float:
        """Minutes."""
        return statistics.fmean(one.minutes for one in self.ended)

    @property
    def median(self) -> float:
        """Minutes."""
        return statistics.median(one.minutes for one in self.ended)


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def ratio(mine: Row, theirs: Row) -> tuple[float, float]:
    """(ratio of the mean minutes on the same bugs, half of its 95 % interval)."""
    found = mine.mean / theirs.mean
    rest = [one.minutes - found * other.minutes for one, other in zip(mine.ended, theirs.ended, strict=True)]
    return found, 1.96 * sqrt(statistics.fmean(value * value for value in rest) / len(rest)) / theirs.mean


class Bench:
    """Plays bugs on this machine's cores."""

    def __init__(self, pool: ProcessPoolExecutor | None, count: int, *, seed: int | None = None) -> None:
        self._pool = pool
        self._count = count
        self._seed = seed

    def measure(self, what: str, setting: Setting, engines: int, *, knobs: tuple[float, ...] = ()) -> Row:
        """All bugs of a setting with one strategy."""
        found = scenarios().found(setting, self._count, seed=self._seed)
        return self._play(what, setting, engines, found, 0 if self._seed is None else OTHER_WORLDS, knobs)

    def tuned(self, what: str, setting: Setting, engines: int, right: float) -> tuple[float, ...]:
        """The cheapest (baseline crashes, repetitions) that is right so often on other bugs; else the most often right.

        Per number of baselines the fewest repetitions that are enough are found by halving.
        """
        found = scenarios().found(setting, min(TUNING_BUGS[what], 2 * self._count), tuning=True)
        enough: list[tuple[float, tuple[float, ...]]] = []
        best: tuple[float, tuple[float, ...]] = (0.0, (BASELINES[-1], REPEATS[-1]))
        for baseline in BASELINES:
            low, high = 0, len(REPEATS)
            while low < high:
                middle = (low + high) // 2
                knobs = (float(baseline), REPEATS[middle])
                row = self._play(what, setting, engines, found, 10**6, knobs)
                best = max(best, (row.share("right"), knobs))
                if row.share("right") >= right:
                    enough.append((row.mean, knobs))
                    high = middle
                else:
                    low = middle + 1
        return min(enough)[1] if enough else best[1]

    def _play(
        self, what: str, setting: Setting, engines: int, found: Sequence[Bug], first: int, knobs: tuple[float, ...]
    ) -> Row:
        jobs = [Job(first + at, bug, engines, what, setting, knobs) for at, bug in enumerate(found)]
        ended = self._pool.map(play, jobs, chunksize=16) if self._pool is not None else map(play, jobs)
        return Row(what, engines, tuple(ended))


def rows(
    count: int, *, names: Sequence[str] = (), engines: Sequence[int] = (), jobs: int = 1, seed: int | None = None
) -> Iterator[tuple[str, str, str]]:
    """(what, measured, goal) for the table, as they come."""
    pool = ProcessPoolExecutor(jobs) if jobs > 1 else None
    bench = Bench(pool, count, seed=seed)
    for setting in scenarios().settings:
        if names and setting.name not in names:
            continue
        for number in setting.engines:
            if not engines or number in engines:
                yield from _of(bench, setting, number)
    if pool is not None:
        pool.shutdown()


def _of(bench: Bench, setting: Setting, engines: int) -> Iterator[tuple[str, str, str]]:
    where = f"{setting.name}, {engines} {'engine' if engines == 1 else 'engines'}"
    mine = bench.measure("rltop", setting, engines)
    if setting.start or setting.goal == "honest":
        # What counts minutes has no use of starts; where nothing can be right, only what is wrong is compared.
        yield _line(where, mine, setting, None)
        if not setting.start:
            yield _line(where, bench.measure("checklist", setting, engines), setting, None)
        return
    peers = {
        what: bench.tuned(what, setting, engines, mine.share("right"))
        for what in (("exhaustive", "ddmin") if setting.name == "plain" else ("exhaustive",))
    }
    measured = {what: bench.measure(what, setting, engines, knobs=knobs) for what, knobs in peers.items()}
    yield _line(where, mine, setting, measured["exhaustive"])
    if setting.goal == "half" or setting.name == "plain":
        yield _line(where, bench.measure(ORACLE, setting, engines), setting, measured["exhaustive"])
    for what, row in measured.items():
        told = f"{what} ({peers[what][0]:.0f} baselines, x{peers[what][1]:g})"
        yield _line(where, Row(told, engines, row.ended), setting, measured["exhaustive"])
    yield _line(where, bench.measure("checklist", setting, engines), setting, measured["exhaustive"])


def _line(where: str, row: Row, setting: Setting, beside: Row | None) -> tuple[str, str, str]:
    count = len(row.ended)
    low, high = wilson(row.share("right"), count)
    told = f"right {row.share('right'):.1%} ({low:.1%} to {high:.1%}), wrong {row.share('wrong'):.1%}"
    told += f", {row.mean:.0f} min (median {row.median:.0f})"
    times, half = ratio(row, beside) if beside is not None else (0.0, 0.0)
    if beside is not None:
        told += f", {times:.2f} +- {half:.2f} x"
    if row.what != "rltop":
        return f"{where}: {row.what}", told, ""
    least = RIGHT[row.engines]
    match setting.goal:
        case "honest":
            goal, met = f"wrong <= {1 - HONEST:.0%}", row.share("wrong") <= 1 - HONEST
        case "half":
            goal, met = f"right >= {least:.0%}, <= 0.5 x", row.share("right") >= least and times <= 0.5
        case _ if setting.start or setting.name != "plain":
            goal, met = "right >= 95%", row.share("right") >= 0.95
        case _:
            goal, met = f"right >= {least:.0%}, <= 1.0 x", row.share("right") >= least and times <= 1.0
    return f"{where}: {row.what}", told, f"{goal}: {'met' if met else 'MISSED'}"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bisect", description=__doc__)
    parser.add_argument("--full", action="store_true", help=f"all {scenarios().bugs} bugs of each setting")
    parser.add_argument("--bugs", type=int, default=QUICK, help="the first so many of each setting")
    parser.add_argument("--engines", type=int, nargs="+", default=[])
    parser.add_argument("--setting", nargs="+", default=[], choices=[one.name for one in scenarios().settings])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="other bugs than the pinned, of the same mixes")
    given = parser.parse_args(argv)
    count = scenarios().bugs if given.full else given.bugs
    which = "pinned" if given.seed is None else f"seed {given.seed}"
    print(
        f"{count} bugs per setting, {which}; x: of the exhaustive's minutes at equal correctness, same engines and bugs"
    )
    began = time.monotonic()
    for what, told, goal in rows(count, names=given.setting, engines=given.engines, jobs=given.jobs, seed=given.seed):
        print(f"{what:<72}  {told:<88}  {goal}".rstrip(), flush=True)
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
