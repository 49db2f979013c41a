"""The dashboard under a Pilot: start it on a scene, press keys, read the characters on the screen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from textual.pilot import Pilot

from rltop.tui.app import RltopApp
from rltop.tui.view import View
from tests.tui.fake import FakeClient
from tests.tui.scenes import SCENES


@dataclass(slots=True)
class Dash:
    """A running dashboard and its fake client."""

    app: RltopApp
    client: FakeClient
    pilot: Pilot[int]

    async def press(self, *keys: str) -> str:
        """Press keys; returns the screen afterwards."""
        for key in keys:
            await self.pilot.press(key)
        return self.text

    async def tick(self, seconds: float = 0.5) -> str:
        """Let time pass and the timer fire; returns the screen afterwards."""
        self.client.now += seconds
        if self.client.status == "live":
            self.client.since = self.client.now
        self.app.tick()
        await self.pilot.pause()
        return self.text

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait for a condition; the test's own timeout ends a vain wait."""
        while not what():
            await self.pilot.pause()
            await asyncio.sleep(0)

    async def shows(self, words: str) -> str:
        """Wait until `words` are on the screen (a dialog comes up in its own time); returns the screen."""
        await self.until(lambda: words in self.text)
        return self.text

    @property
    def lines(self) -> list[str]:
        """The characters on the screen, trailing blanks removed."""
        # The compositor knows what is where; a screenshot would have to be parsed back.
        strips = self.app.screen._compositor.render_strips()
        return [strip.text.rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def footer(self) -> str:
        return self.lines[-1]

    @property
    def view(self) -> View:
        """The view of the pane with the keyboard."""
        return self.app.live.views[self.app.live.active]


@asynccontextmanager
async def dash(
    scene: str = "healthy",
    size: tuple[int, int] = (120, 40),
    *,
    control: bool = False,
    role: str | None = None,
    ascii_only: bool = False,
    client: FakeClient | None = None,
) -> AsyncIterator[Dash]:
    """A dashboard on a scene, its first picture complete. role: what the daemon gave; default: what was asked for."""
    fake = client or FakeClient()
    fake.mirror.role = role or ("control" if control else "view")
    SCENES[scene](fake)
    app = RltopApp(fake, control=control, ascii_only=ascii_only, clocks=fake.clocks, fps=0.1)
    async with app.run_test(size=size) as pilot:
        running = Dash(app, fake, pilot)
        await pilot.pause()
        if fake.status == "live":
            await running.until(lambda: bool(fake.queries))
            await pilot.pause()
        fake.after()
        app.tick()
        await pilot.pause()
        yield running
