"""All benchmarks: `python -m benchmarks` (or `make bench`). Byte counts are exact; times are of this machine, now.

A benchmark that cannot run here says why, and the others go on; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence

from benchmarks import attach, bisect, dump, reporter, restart, text
from benchmarks import bytes as painted

Rows = list[tuple[str, str, str]]


def table(title: str, rows: Rows) -> str:
    """Aligned columns: what, measured, budget."""
    wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"  {what:<{wide[0]}}  {told:<{wide[1]}}  {budget}".rstrip() for what, told, budget in rows]
    return "\n".join([title, *lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and a shorter journal")
    quick = parser.parse_args(argv).quick
    print(f"Python {platform.python_version()}, {platform.machine()}, {platform.system()}\n")

    def paint() -> None:
        print(table("Painted bytes (120x40, 64 engines)", painted.rows()))

    def first() -> None:
        rows = attach.rows(repeat=3, steps=10_000) if quick else attach.rows()
        print(table("First paint of `rltop attach`", rows))

    def report() -> None:
        reporter.main(["--steps", "300"] if quick else [])

    def judge() -> None:
        print(table("Text check", text.rows(100 if quick else 300)))

    def again() -> None:
        print(table("Restart of an engine (CPU stand-in)", restart.rows(4 if quick else 10)))

    def look() -> None:
        print(table("A large dump without torch", dump.rows(200 if quick else 2_000)))

    def hunt() -> None:
        found = bisect.rows(20 if quick else 100, names=["plain", "two bugs at once"], engines=[1, 8])
        print(table("Bisection of simulated bugs (the whole: python -m benchmarks.bisect --full)", list(found)))

    return max([_try(paint), _try(first), _try(report), _try(judge), _try(again), _try(look), _try(hunt)])


def _try(benchmark: Callable[[], None]) -> int:
    try:
        benchmark()
    except Exception as error:
        print(f"{benchmark.__name__}: {type(error).__name__}: {error}\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
