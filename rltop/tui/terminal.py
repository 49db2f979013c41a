"""What every app of rltop does with the terminal: its size, copies, pictures of the screen."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def keep_copy(text: str) -> str:
    """Write the text where a terminal without OSC 52 can fetch it: below RLTOP_DIR where that is set. Returns the path.
    Raises OSError."""
    from platformdirs import user_state_path

    if told := os.environ.get("RLTOP_DIR"):
        folder = Path(told).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        folder = user_state_path("rltop", ensure_exists=True)
    path = folder / "clipboard.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return str(path)


def copied_words(text: str) -> str:
    """What is said of a copy; writes it to a file too."""
    lines = text.count("\n") + 1
    what = f"copied {lines} line{'s' * (lines > 1)} by OSC 52"
    try:
        return f"{what}; also in {keep_copy(text)}"
    except OSError as error:
        return f"{what}; no file: {error.strerror}"


def forget_frozen_size() -> None:
    """Let the terminal say its size: an exported COLUMNS or LINES (watch, CI, some shells) would hide every resize."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        size = os.get_terminal_size(sys.__stderr__.fileno())  # type: ignore[union-attr]  # None: suppressed
        if size.columns and size.lines:
            os.environ.pop("COLUMNS", None)
            os.environ.pop("LINES", None)
