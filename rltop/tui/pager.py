"""The app around the dump screen alone: `rltop dump show` on a terminal. Local files, no daemon.

Failure policy: as the dashboard's; an error restores the terminal and leaves with a traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from rltop.evidence.dump_find import DumpRef
from rltop.tui.dump_source import DumpSource, LocalDumps
from rltop.tui.keymap import works
from rltop.tui.keytable import KEYS
from rltop.tui.screens.dump import DumpScreen
from rltop.tui.terminal import copied_words, forget_frozen_size
from rltop.tui.theme import ASCII, DARK, LIGHT, UNICODE, Palette

INTERRUPTED = 130


class PagerApp(App[int], inherit_bindings=False):
    """Exit value: 0, or 130 after Ctrl-C. source: for tests, in place of the files."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden hidden; }
    Input { position: absolute; background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "interrupt", show=False, priority=True)]

    def __init__(
        self,
        dumps: Sequence[DumpRef],
        *,
        ascii_only: bool = False,
        tokenizer: Path | None = None,
        source: DumpSource | None = None,
    ) -> None:
        no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if no_color else None)
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = "ansi-dark" if no_color else DARK.name
        self._glyphs = ASCII if ascii_only else UNICODE
        self.front = DumpScreen(
            source or LocalDumps(dumps, tokenizer), Palette(self.current_theme), self._glyphs, self.perform, alone=True
        )

    def get_default_screen(self) -> Screen[None]:
        return self.front

    async def run_async(self, **options: Any) -> int | None:
        """As Textual's, but a crash is exit value 1 and not None."""
        forget_frozen_size()
        value = await super().run_async(**options)
        return self.return_code if value is None else value

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, lambda _: self.front.paint_with(Palette(self.current_theme)))
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit, 128 + number, 128 + number)

    def action_interrupt(self) -> None:
        """Ctrl-C leaves with 130, wherever it is pressed."""
        self.exit(INTERRUPTED, INTERRUPTED)

    def perform(self, action: str) -> None:
        """Actions that are not the screen's own."""
        match action:
            case "close":
                self.exit(0)
            case "interrupt":
                self.action_interrupt()
            case "suspend":
                self.action_suspend_process()
            case "help":
                from rltop.tui.screens.dialogs import HelpDialog

                self.push_screen(HelpDialog(self.front.context, self._palette, self._glyphs), self._after)
            case "palette":
                from rltop.tui.screens.dialogs import PaletteDialog, choices

                offered = choices([key for key in KEYS if works(key, self.front.context)], [])
                self.push_screen(PaletteDialog(offered, self._palette, self._glyphs), self._after)
            case "theme":
                from rltop.tui.screens.dialogs import Choice, PaletteDialog

                named = [Choice(f"theme:{name}", name) for name in sorted(self.available_themes)]
                self.push_screen(PaletteDialog(named, self._palette, self._glyphs, "Theme"), self._after)
            case "copy":
                text = self.front.selection()
                self.copy_to_clipboard(text)
                self.front.message = copied_words(text)
            case "screenshot":
                self._save_picture()

    @property
    def _palette(self) -> Palette:
        return Palette(self.current_theme)

    def _after(self, answer: str | None) -> None:
        kind, _, name = (answer or "").partition(":")
        if answer in ("interrupt", "do:interrupt"):
            self.action_interrupt()
        elif kind == "do":
            self.front.action_do(name)
        elif kind == "theme":
            self.theme = name

    def _save_picture(self) -> None:
        name = f"rltop-dump-{time.strftime('%Y%m%d-%H%M%S')}.svg"
        try:
            self.front.message = f"saved {self.save_screenshot(name, '.')}"
        except OSError as error:
            self.front.message = f"cannot save {name} here: {error.strerror}"
