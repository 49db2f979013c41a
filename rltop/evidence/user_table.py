"""The text of a table that the user edits: known crashes, names of metrics, what a bisection believes beforehand."""

from __future__ import annotations

from pathlib import Path

from rltop.errors import RltopError


def read_text(path: Path) -> str:
    """Its text. Raises RltopError: it can not be read, or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RltopError("can not be read", where=str(path), why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise RltopError("is no text", where=str(path), why=str(error)) from None
