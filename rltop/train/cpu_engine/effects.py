"""What SGLang's toggles visibly do in the CPU engine: CUDA graph bookkeeping and speculative acceptance.

Nothing here changes a token. A graph is only accounted for (which batch sizes would replay one), and speculation is
only measured: an n-gram drafter guesses, and the tokens that the engine draws anyway say how many guesses would have
been accepted. So the same seed gives the same tokens whatever is toggled, and no toggle makes the stand-in faster.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """CUDA graphs of one phase, as SGLang would have captured them."""

    backend: str = DISABLED
    sizes: tuple[int, ...] = ()
    """Captured, ascending: sequences (decode) or tokens (prefill)."""
    padding: bool = True
    """A batch is padded up to the next captured size; without, only exact sizes replay."""

    @property
    def on(self) -> bool:
        """Whether graphs were captured."""
        return self.backend != DISABLED and bool(self.sizes)

    def covers(self, size: int) -> bool:
        """Whether a batch of this size replays a graph."""
        if not self.on or size < 1:
            return False
        place = bisect.bisect_left(self.sizes, size)
        return place < len(self.sizes) and (self.padding or self.sizes[place] == size)

    def pads(self, size: int) -> bool:
        """Whether a batch of this size replays a larger graph."""
        return self.covers(size) and size not in self.sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """What the scheduler needs to know of the toggles."""

    decode: Graph = field(default_factory=Graph)
    prefill: Graph = field(default_factory=Graph)
    draft_tokens: int = 0
    """Tokens verified per step (`--speculative-num-draft-tokens`); 0: no speculative decoding."""


class Drafter:
    """One sample's n-gram drafter: guesses what follows the last two tokens from where they last stood.

    One verify step proposes `draft_tokens - 1` tokens and yields the accepted ones plus one of its own, as in SGLang.
    """

    __slots__ = ("_after", "_count", "_draft", "_given", "_history")

    def __init__(self, prompt: Sequence[int], first: int, draft_tokens: int) -> None:
        """first: the token that the prefill gave."""
        self._count = draft_tokens - 1
        self._history: list[int] = []
        self._after: dict[tuple[int, int], int] = {}
        self._given = 0
        for token in (*prompt, first):
            self._append(token)
        self._draft = self._guess()

    def saw(self, token: int) -> int:
        """One more token. Returns how many tokens the verify step gave that it ends, or 0: the step goes on."""
        self._given += 1
        self._append(token)
        if self._draft and self._draft[0] == token:
            del self._draft[0]
            return 0
        given, self._given = self._given, 0
        self._draft = self._guess()
        return given

    def _append(self, token: int) -> None:
        history = self._history
        if len(history) > 1:
            self._after[history[-2], history[-1]] = len(history)
        history.append(token)

    def _guess(self) -> list[int]:
        if len(self._history) < 2:
            return []
        at = self._after.get((self._history[-2], self._history[-1]))
        return [] if at is None else self._history[at : at + self._count]
