"""Bytes painted per tick at 120x40 with 64 engines. Deterministic: the same rounds, the same colours, no clock.

    python -m benchmarks.bytes

Counts what the dashboard hands to the terminal, before any compression (`ssh -C` divides it by 5 to 10 again).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

from textual.drivers.headless_driver import HeadlessDriver

from rltop.tui.app import RltopApp
from tests.tui.fake import FakeClient
from tests.tui.scenes import fleet, fleet_round

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = (120, 40)
BUDGET_ALL = 10_000
"""Most bytes per tick when every engine, every chart and the event feed changed."""
BUDGET_TENTH = 5_000
"""The same when a tenth of the engines changed."""


class CountingDriver(HeadlessDriver):
    """A terminal that only counts. `painted` is the sum of bytes written, UTF-8."""

    painted = 0

    @property
    def is_headless(self) -> bool:
        """The app must believe in a terminal, else it writes nothing."""
        return False

    def write(self, data: str) -> None:
        self.painted += len(data.encode())


@dataclass(frozen=True, slots=True)
class Painted:
    """Bytes of each tick, and of the first full picture."""

    first: int
    ticks: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Bytes per tick."""
        return sum(self.ticks) / len(self.ticks)

    @property
    def most(self) -> int:
        """Bytes of the largest tick."""
        return max(self.ticks)


@contextmanager
def _truecolor() -> Iterator[None]:
    """The most expensive colours, whatever the terminal of the caller."""
    with patch.dict(os.environ, {"TERM": "xterm-256color", "COLORTERM": "truecolor"}):
        os.environ.pop("NO_COLOR", None)
        yield


async def painted_bytes(*, share: float, rounds: int = 10, keys: tuple[str, ...] = (), news: bool = True) -> Painted:
    """Run the dashboard on 64 engines and count.

    share: part of the engines that changes in each tick (all charts and the event feed change as well).
    keys: pressed first, for example `("3", "f")` for the engine table alone. news: False: ticks without any change.
    """
    with _truecolor():
        client = FakeClient()
        fleet(client)
        # A long interval: ticks come from here only.
        app = RltopApp(client, clocks=client.clocks, fps=0.1)
        app.driver_class = CountingDriver
        async with app.run_test(headless=False, size=SIZE) as pilot:
            await pilot.pause()
            await pilot.press(*keys)
            driver = app._driver
            assert isinstance(driver, CountingDriver)
            await _quiet(app, driver)
            first = driver.painted
            ticks = []
            for number in range(1, rounds + 1):
                before = driver.painted
                client.now += 0.5
                if news:
                    fleet_round(client, number, share)
                client.since = client.now
                app.tick()
                await _quiet(app, driver)
                ticks.append(driver.painted - before)
            return Painted(first, tuple(ticks))


async def _quiet(app: RltopApp, driver: CountingDriver) -> None:
    """Until nothing waits to be painted."""
    while True:
        before = driver.painted
        await asyncio.sleep(0.03)
        if driver.painted == before and not app.screen._dirty_widgets:
            return


def rows() -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks."""
    out = []
    for what, share, keys, budget in (
        ("painted bytes per tick, all of 64 engines changed", 1.0, (), BUDGET_ALL),
        ("painted bytes per tick, a tenth changed", 0.1, (), BUDGET_TENTH),
        ("the same, engine table full screen, all changed", 1.0, ("3", "f"), None),
        ("painted bytes per tick, engine screen, all of 64 engines changed", 1.0, ("e",), BUDGET_ALL),
        ("painted bytes per tick, engine screen, a tenth changed", 0.1, ("e",), BUDGET_TENTH),
    ):
        result = asyncio.run(painted_bytes(share=share, keys=keys))
        told = f"{result.mean:,.0f} (most {result.most:,})"
        out.append((what, told, f"<= {budget:,}" if budget else ""))
    return out


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
