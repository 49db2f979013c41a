"""The state table: `key -> (value, version)`, from which every client's next frame is made.

Version numbers count changes of the whole table. "All keys with a version above what you last got" is a client's next
delta however slow it is: a slow client skips intermediate values, never the last one.

Values are never changed in place: setting a key replaces the value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_TOMBSTONES = 1000
"""Removed keys that are remembered, so that a client that resumes can be told. Older versions get a full snapshot."""


class StateTable:
    """Versioned key table. Both maps are kept in the order of their versions, so a delta costs what it carries."""

    __slots__ = ("_floor", "_gone", "_values", "ver")

    def __init__(self) -> None:
        self.ver = 0
        self._values: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._floor = 0

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """The value, None when the key is not there."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def keys(self, prefix: str = "") -> list[str]:
        """Keys that start with `prefix`, in the order of their last change."""
        return [key for key in self._values if key.startswith(prefix)]

    def set(self, key: str, value: Any) -> bool:
        """Set a key; an equal value is no change. Returns whether the table changed."""
        found = self._values.get(key)
        if found is not None and found[0] == value:
            return False
        self.ver += 1
        self._values[key] = (value, self.ver)
        self._values.move_to_end(key)
        self._gone.pop(key, None)
        return True

    def remove(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        if self._values.pop(key, None) is None:
            return False
        self.ver += 1
        self._gone[key] = self.ver
        if len(self._gone) > MAX_TOMBSTONES:
            _, self._floor = self._gone.popitem(last=False)
        return True

    def knows(self, ver: int) -> bool:
        """Whether `changes(ver)` can be complete: `ver` is one of ours and no removal since then was forgotten."""
        return self._floor <= ver <= self.ver

    def snapshot(self, want: Callable[[str], bool]) -> dict[str, Any]:
        """Every wanted key."""
        return {key: value for key, (value, _) in self._values.items() if want(key)}

    def changes(self, since: int, want: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
        """Wanted keys set and removed after version `since`, in no particular order."""
        changed = {}
        for key in reversed(self._values):
            value, ver = self._values[key]
            if ver <= since:
                break
            if want(key):
                changed[key] = value
        gone = []
        for key in reversed(self._gone):
            if self._gone[key] <= since:
                break
            if want(key):
                gone.append(key)
        return changed, gone
