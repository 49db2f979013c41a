"""Files that a command line names, and why one can not be read, in words."""

from __future__ import annotations

from pathlib import Path

from rltop.errors import RltopError


def read_text(path: Path, what: str, *, do: str, errors: str = "strict") -> str:
    """The text of a file. Raises RltopError (`what`, with `do`), also for a directory or bytes that are no UTF-8."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise RltopError(what, where=str(path), why=unreadable(error), do=do) from None
    except UnicodeDecodeError as error:
        raise RltopError(what, where=str(path), why=f"it is no text: {error}", do=do) from None


def unreadable(error: OSError) -> str:
    """Why, without Python's `[Errno 2]`."""
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case IsADirectoryError():
            return "it is a directory"
        case _:
            return error.strerror or str(error)
