"""The Textual app: one timer, one client task, the screens. It shows what the mirror holds and never decides anything.

Failure policy: a lost connection greys the picture and names the age; a client that fails for good is named in the
header; an error in the dashboard itself restores the terminal and leaves with a traceback, the run does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen

from rltop.errors import RltopError
from rltop.protocol.messages import LinesAnswer, Rejected
from rltop.tui.clientlike import ClientLike
from rltop.tui.keymap import works
from rltop.tui.keytable import KEYS, PANES
from rltop.tui.model import Clocks, Model
from rltop.tui.rows import Row
from rltop.tui.screens.live import LiveScreen
from rltop.tui.terminal import copied_words, forget_frozen_size, keep_copy
from rltop.tui.theme import ASCII, DARK, LIGHT, UNICODE, Palette

if TYPE_CHECKING:
    from rltop.tui.bisect_desk import BisectDesk
    from rltop.tui.desk import Desk
    from rltop.tui.screens.bisect import BisectScreen
    from rltop.tui.screens.dump import DumpScreen
    from rltop.tui.screens.engines import EnginesScreen
    from rltop.tui.screens.source import SourceDialog
    from rltop.tui.staging import Staging

BUCKETS = 400
"""Buckets of the first history query: enough for the widest chart, 2 dots per cell."""
_SERIES_AGAIN_S = 10.0
"""Least time between two queries that only fill holes between live points."""
_LOCAL_ANSWER_S = 0.15
_MESSAGE_S = 5.0
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def local_clocks() -> Clocks:
    """The clocks of this machine."""
    return Clocks(time.monotonic, time.time, lambda when: time.strftime("%H:%M:%S", time.localtime(when)))


class RltopApp(App[int], inherit_bindings=False):
    """The dashboard on one client.

    control: offer actions that change the run (the daemon must have given the role too).
    fps: most repaints per second. ascii_only: no character outside ASCII.
    started: `time.perf_counter()` before the imports, for the note on how long the first picture took.
    Exit value: 0, or 130 after Ctrl-C.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden hidden; }
    Input { position: absolute; background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "interrupt", show=False, priority=True)]

    def __init__(
        self,
        client: ClientLike,
        *,
        control: bool = False,
        fps: float = 2.0,
        ascii_only: bool = False,
        started: float | None = None,
        title: str = "",
        clocks: Clocks | None = None,
    ) -> None:
        # NO_COLOR with a normal theme turns colours into greys that cannot be read; the ansi theme has none to turn.
        no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if no_color else None)
        self.title = title or "rltop"
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = "ansi-dark" if no_color else DARK.name
        self._client = client
        self._glyphs = ASCII if ascii_only else UNICODE
        self._clocks = clocks or local_clocks()
        self._fps = min(30.0, max(0.1, fps))
        self._started = started
        self.model = Model(client, self._clocks, self._glyphs, control=control)
        self._palette = Palette(self.current_theme)
        self.live = LiveScreen(self.model.frame, self._palette, self.perform, ascii_only=ascii_only)
        self.engines: EnginesScreen | None = None
        """The engine screen while it is open."""
        self.dump: DumpScreen | None = None
        """The dump screen while it is open."""
        self.bisect: BisectScreen | None = None
        """The Bisect screen while it is open, over the Live or the engine screen."""
        self._bisect_desk: BisectDesk | None = None
        self._desk: Desk | None = None
        self._staging: Staging | None = None
        """What was picked on the engine screen: a screen that is closed and opened again has lost nothing."""
        self._client_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[str] = set()
        self._unpainted: set[str] = set()
        """State keys of histories that came and are not on the screen yet."""
        self._asked_at = -1e9
        self._looked: tuple[float, ...] = ()
        self._message_until = 0.0
        self._was_live = False
        self.first_picture_s: float | None = None
        """Seconds from `started` to the first frame with data of the run."""

    def get_default_screen(self) -> Screen[None]:
        return self.live

    async def run_async(self, **options: Any) -> int | None:
        """As Textual's, but a crash of the dashboard is exit value 1 and not None."""
        forget_frozen_size()
        value = await super().run_async(**options)
        return self.return_code if value is None else value

    # -------------------------------------------------------------- life

    async def on_load(self) -> None:
        # Before the screen exists. A daemon on this machine answers in a few milliseconds: worth waiting for, because
        # then the first frame already has data and no empty one is painted before it.
        self._client_task = asyncio.get_running_loop().create_task(self._client.run(), name="rltop-client")
        try:
            await self._client.wait_live(_LOCAL_ANSWER_S)
        except (RltopError, TimeoutError):
            self.spawn(self._first())
        else:
            self.tick()

    def on_mount(self) -> None:
        self.set_interval(1 / self._fps, self.tick)
        self.theme_changed_signal.subscribe(self, self._on_theme)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            # Without a handler these would leave the terminal in the alternate screen.
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit, 128 + number, 128 + number)

    async def on_unmount(self) -> None:
        for task in (self._client_task, *self._tasks):
            if task is not None:
                task.cancel()
        await self._client.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the screen; its failure is told in the footer."""

        async def told() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self.say(f"{type(error).__name__}: {error}")

        task = asyncio.get_running_loop().create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _first(self) -> None:
        """The first picture as soon as there is one, not at the next tick of the timer."""
        while True:
            try:
                await self._client.wait_live(timeout=3600.0)
                break
            except (RltopError, TimeoutError):
                await asyncio.sleep(1.0)  # the header says what is wrong; the client keeps trying
        self.tick()

    # -------------------------------------------------------------- the tick

    def tick(self) -> None:
        """Take what changed and repaint only that. Everything on the screen happens here or after a key."""
        dirty: set[str] | None = self.model.pull()
        if dirty and "epoch" in dirty:
            self._asked.clear()
            dirty = None
        frame = self.model.frame()
        if not frame.link.lost and frame.link.status == "live":
            if self.first_picture_s is None and frame.state and self._started is not None:
                self.first_picture_s = time.perf_counter() - self._started
            if not self._was_live:
                self._asked.clear()  # something may have happened while away
            self._ask_series()
        self._was_live = frame.link.status == "live"
        front = self.front
        if front.message and not front.asking and self._clocks.monotonic() > self._message_until:
            front.message = ""
        if self._desk is not None:
            self._desk.tick(self._clocks.monotonic())
        if self.live.is_mounted:
            self._paint(set() if self.model.paused else dirty)

    @property
    def front(self) -> LiveScreen | EnginesScreen | DumpScreen | BisectScreen:
        """The full screen that is in sight, dialogs aside."""
        return self.bisect or self.dump or self.engines or self.live

    def _paint(self, dirty: set[str] | None) -> None:
        if self.bisect is not None:
            if self.bisect.is_mounted:
                self.bisect.paint(dirty)
            return
        if self.dump is not None:
            if self.dump.is_mounted:
                self.dump.paint(dirty)
            return
        if self.engines is not None:  # the Live screen behind it is made anew when it comes back
            if self.engines.is_mounted:
                self.engines.paint(dirty)
            return
        self.live.paint(None if dirty is None else dirty | self._unpainted)
        if self.live.size.width:
            self._unpainted.clear()

    def _ask_series(self) -> None:
        """History for charts that have none, and again when live points left holes."""
        keys = self.model.chart_keys()
        fresh = [key for key in keys if key not in self._asked]
        now = self._clocks.monotonic()
        if not fresh and now - self._asked_at > _SERIES_AGAIN_S:
            fresh = [key for key in keys if key in self.model.histories and self.model.histories[key].holes]
        if fresh:
            self._asked.update(fresh)
            self._asked_at = now
            self.spawn(self._load(fresh))

    async def _load(self, keys: list[str], lo: float | None = None, hi: float | None = None) -> None:
        try:
            answer = await self._client.series(keys, lo, hi, BUCKETS)
        except (RltopError, TimeoutError):
            self._asked.difference_update(keys)
            return
        self.model.take_series(answer, lo)
        self._unpainted |= {f"metric/{key}" for key in keys}
        if self.live.is_mounted:  # else the next tick does it: a screen may be painted before it counts as mounted
            self._paint(set())

    def _look(self) -> None:
        """After a zoom, a pan or a scroll: fetch what is now in sight and not held."""
        charts = self.live.charts
        look = (float(charts.zoom), charts.end)
        if charts.zoom and look != self._looked:
            frame = self.model.frame()
            for axis in ("train/", "rollout/"):
                keys = [key for key in self.model.chart_keys() if key.startswith(axis) and key in frame.histories]
                span = charts.range_of(frame.histories[keys[0]]) if keys else None
                if span is not None:
                    self.spawn(self._load(keys, *span))
        self._looked = look
        view = self.live.events_view
        if self.live.active == "events" and view.at_start and self.model.oldest_event > 1:
            self.spawn(self._older())

    async def _older(self) -> None:
        answer = await self._client.events(hi=self.model.oldest_event - 1, limit=200)
        if self.model.add_older(answer.events):
            self.live.paint(None)

    # -------------------------------------------------------------- actions

    def perform(self, action: str) -> None:
        """Actions that are not the screen's own."""
        match action:
            case "quit":
                self.exit(0)
            case "engines":
                self._open_engines()
            case "dumps":
                self._open_dumps()
            case "bisect":
                self._open_bisect()
            case "close" if self.bisect is not None:
                self._close_bisect()
            case "close":
                self._close_dumps() if self.dump is not None else self._close_engines()
            case "interrupt":
                self.action_interrupt()
            case "look":
                self._look()
            case "help":
                self._help()
            case "palette":
                self._palette_dialog()
            case "theme":
                self._choose_theme()
            case "changed":
                self._changed()
            case "source":
                self._source()
            case "pause":
                self.model.resume() if self.model.paused else self.model.pause()
            case "copy":
                self._copy()
            case "screenshot":
                self._save_picture()
            case "suspend":
                self.action_suspend_process()
            case "note":
                self.live.ask("note to everybody: ", self._note)
            case "mute":
                self._mute()
            case "stop-run":
                self._confirm_stop()
            case _ if self.bisect is not None and self._bisect_desk is not None:
                self._bisect_desk.perform(action, self.model.frame(), self._palette)
            case _ if self._desk is not None:
                self._desk.perform(action, self._palette)

    def _open_engines(self) -> None:
        from rltop.tui.desk import Desk
        from rltop.tui.screens.engines import EnginesScreen

        cursor = self.live.engines_view.cursor(self.model.frame()) if self.live.active == "engines" else None
        ascii_only = self._glyphs.ascii_only
        screen = EnginesScreen(
            self.model.frame,
            self._palette,
            self.perform,
            ascii_only=ascii_only,
            cursor=cursor,
            staging=self._staging,
        )
        self._staging = screen.staging
        self.engines, self._desk = screen, Desk(self, self._client, screen, self._glyphs)
        self.live.message = ""
        self.model.resume()  # nobody acts on a frozen picture
        self.push_screen(screen)

    def _close_engines(self) -> None:
        if self.engines is not None and self.screen is self.engines:
            self.engines = self._desk = None
            self.pop_screen()
            self.live.paint(None)

    def _open_dumps(self) -> None:
        from rltop.tui.dump_source import DaemonDumps
        from rltop.tui.screens.dump import DumpScreen
        from rltop.tui.widgets.header import link_row

        def link() -> Row:
            frame = self.model.frame()
            return link_row(frame.link, frame.glyphs, control=False)

        self.live.message = ""
        self.dump = DumpScreen(DaemonDumps(self._client), self._palette, self._glyphs, self.perform, link=link)
        self.push_screen(self.dump)

    def _close_dumps(self) -> None:
        if self.dump is not None and self.screen is self.dump:
            self.dump = None
            self.pop_screen()
            self.live.paint(None)

    def _open_bisect(self) -> None:
        from rltop.tui.bisect_desk import BisectDesk
        from rltop.tui.screens.bisect import BisectScreen

        cursor = self.engines.scene().cursor if self.engines is not None else None
        screen = BisectScreen(
            self.model.frame,
            self._palette,
            self.perform,
            ascii_only=self._glyphs.ascii_only,
            engine=cursor.id if cursor is not None and cursor.hunted else "",
        )
        self.bisect, self._bisect_desk = screen, BisectDesk(self, self._client, screen, self._glyphs)
        self.live.message = ""
        self.model.resume()  # nobody acts on a frozen picture
        self.push_screen(screen)

    def _close_bisect(self) -> None:
        if self.bisect is not None and self.screen is self.bisect:
            self.bisect = self._bisect_desk = None
            self.pop_screen()
            self.front.paint(None)

    def open_dialog(self, dialog: ModalScreen[str | None], done: Callable[[str | None], None]) -> None:
        """Put a dialog on top; `done` gets what it was dismissed with, but Ctrl-C leaves."""

        def closed(answer: str | None) -> None:
            if answer in ("interrupt", "do:interrupt"):
                self.action_interrupt()
            else:
                done(answer)

        self.push_screen(dialog, closed)

    def put_aside(self, text: str) -> None:
        """Copy a text of a dialog."""
        self.copy_to_clipboard(text)
        with contextlib.suppress(OSError):
            keep_copy(text)

    def action_interrupt(self) -> None:
        """Ctrl-C leaves with 130, wherever it is pressed."""
        self.exit(INTERRUPTED, INTERRUPTED)

    def say(self, text: str) -> None:
        """A short message in the footer."""
        front = self.front
        front.message = self.model.frame().safe(text)
        self._message_until = self._clocks.monotonic() + _MESSAGE_S
        if front.is_mounted:
            front.paint(None)

    def _help(self) -> None:
        from rltop.tui.screens.dialogs import HelpDialog

        self.push_screen(HelpDialog(self.front.context, self._palette, self._glyphs), self._after_help)

    def _changed(self) -> None:
        from rltop.tui.screens.changed import ChangedDialog

        frame = self.model.frame()
        self.push_screen(ChangedDialog(frame, self._palette, self._glyphs), self._after_help)

    def _source(self) -> None:
        """Open the evidence of the selected check: its lines if it has any, else its first metric."""
        from rltop.tui.screens.source import SourceDialog

        lines, charts = self.live.evidence(self.model.frame())
        if lines:
            self.push_screen(SourceDialog(lines, self._palette, self._glyphs, self._ask_lines), self._after_help)
        elif charts:
            self.live.show_step(charts[0])

    def _ask_lines(self, dialog: SourceDialog, number: int) -> None:
        place = dialog.places[number]

        async def ask() -> None:
            try:
                answer = await self._client.lines(place.source, place.line)
            except RltopError as error:
                answer = LinesAnswer(place.source, why=f"{error.what}: {error.why}" if error.why else error.what)
            dialog.take(number, answer)

        self.spawn(ask())

    def _after_help(self, answer: str | None) -> None:
        if answer == "interrupt":
            self.action_interrupt()

    def _palette_dialog(self) -> None:
        from rltop.tui.screens.dialogs import Choice, PaletteDialog, choices

        context = self.front.context
        extra = [
            Choice(f"go:{name}", f"Go to {name}", str(PANES.index(name) + 1))
            for name in PANES
            if self.front is self.live
        ]
        offered = choices([key for key in KEYS if works(key, context)], extra)
        self.push_screen(PaletteDialog(offered, self._palette, self._glyphs), self._chosen)

    def _choose_theme(self) -> None:
        from rltop.tui.screens.dialogs import Choice, PaletteDialog

        offered = [Choice(f"theme:{name}", name) for name in sorted(self.available_themes)]
        self.push_screen(PaletteDialog(offered, self._palette, self._glyphs, "Theme"), self._chosen)

    def _chosen(self, value: str | None) -> None:
        kind, _, name = (value or "").partition(":")
        match kind:
            case "do":
                self.front.action_do(name)
            case "go":
                self.live.go(name)
                self.live.paint(None)
            case "theme":
                self.theme = name

    def _on_theme(self, theme: object) -> None:
        self._palette = Palette(self.current_theme)
        self.live.paint_with(self._palette)
        for screen in (self.engines, self.dump, self.bisect):
            if screen is not None:
                screen.paint_with(self._palette)

    def _copy(self) -> None:
        text = self.front.selection(self.model.frame())
        if not text:
            return
        self.copy_to_clipboard(text)
        self.say(copied_words(text))

    def _save_picture(self) -> None:
        run = "".join(char if char.isalnum() or char in "-_" else "_" for char in self._client.mirror.run) or "run"
        name = f"rltop-{run}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(self._clocks.wall()))}.svg"
        try:
            self.say(f"saved {self.save_screenshot(name, '.')}")
        except OSError as error:
            self.say(f"cannot save {name} here: {error.strerror}")

    def _note(self, text: str | None) -> None:
        if text and text.strip():
            self.spawn(self._command("note", args={"text": text.strip()}))

    def _mute(self) -> None:
        view = self.live.chosen_check(self.model.frame())
        if view is None:
            self.say("select a check first")
        elif view.muted:
            self.spawn(self._command("unmute", target=view.id))
        else:
            self.live.ask(f"mute {view.id} because: ", lambda reason: self._mute_because(view.id, reason))

    def _mute_because(self, check_id: str, reason: str | None) -> None:
        if reason and reason.strip():
            self.spawn(self._command("mute", target=check_id, reason=reason.strip()))
        elif reason is not None:
            self.say("nothing was muted: a mute needs a reason")

    def _confirm_stop(self) -> None:
        from rltop.tui.screens.dialogs import ConfirmDialog

        frame = self.model.frame()
        trainer = frame.state.get("trainer")
        pid = trainer.get("pid") if isinstance(trainer, dict) else None
        question = f"Stop the trainer of run {frame.safe(self._client.mirror.run)} (pid {pid})?"
        details = ["Its engines and the rollouts in flight end with it.", "The daemon stays; the journal is kept."]
        dialog = ConfirmDialog(question, details, self._palette, self._glyphs)
        self.push_screen(
            dialog, lambda yes: self.spawn(self._command("stop-run")) if yes else self.say("nothing was stopped")
        )

    async def _command(
        self, name: str, *, target: str = "", args: dict[str, Any] | None = None, reason: str = "dashboard"
    ) -> None:
        answer = await self._client.command(name, target, args=args, reason=reason)
        if isinstance(answer, Rejected):
            self.say(f"{name} refused: {answer.why} {answer.do}".rstrip())
        else:
            self.say(f"{name} accepted")

    def on_app_focus(self, event: events.AppFocus) -> None:
        """The terminal came back to the front: show the newest at once."""
        self.tick()
