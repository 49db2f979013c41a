"""Access lines in the log of an engine: of requests that were answered well, hundreds a second of them under load."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ACCESS = re.compile(r'"(?:GET|POST|PUT|HEAD|DELETE) \S+ HTTP/[0-9.]+" 2\d\d\b')
"""As uvicorn writes them."""


def without_access(lines: Sequence[str]) -> list[str]:
    """The lines without those of good HTTP requests."""
    return [line for line in lines if not _ACCESS.search(line)]
