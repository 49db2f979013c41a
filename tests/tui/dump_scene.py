"""A dump screen under a Pilot, over real files that were made for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from textual.app import App
from textual.pilot import Pilot

from rltop.evidence.dump_find import find_dumps
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery, DumpsAnswer
from rltop.tui.dump_source import DumpSource, LocalDumps
from rltop.tui.pager import PagerApp
from rltop.tui.screens.dump import DumpScreen
from tests.evidence import dump_files

WORDS = [
    "First",
    "we",
    "square",
    "the",
    "number",
    ",",
    "so",
    "it",
    "is",
    "9",
    ".",
    "Wait",
    ",",
    "check",
    "that",
    "again",
    ":",
    "3",
    "times",
    "3",
    "is",
    "9",
    ",",
    "therefore",
]
SHOWN = "/runs/night-shift"


def model_dumps(root: Path, rollouts: Sequence[int] = (3,), *, count: int = 24, train: bool = True) -> Path:
    """A `--dump-details` directory: words as tokens, the tokenizer beside them, gaps that grow along a response."""
    vocab = {word: at for at, word in enumerate(sorted({f"\u0120{word}" for word in WORDS}))}
    (root / "tokenizer").mkdir(parents=True)
    (root / "tokenizer" / "tokenizer.json").write_text(str({"model": {"vocab": vocab}}).replace("'", '"'))
    for rollout in rollouts:
        samples = []
        for at in range(count):
            words = [WORDS[(place + at) % len(WORDS)] for place in range(12 + at)]
            samples.append(
                dump_files.sample(
                    at,
                    prompt=f"What is {at // 4 + 1} squared?\nThink first.",
                    response="".join(f" {word}" for word in words),
                    tokens=[900, 901, *(vocab[f"\u0120{word}"] for word in words)],
                    response_length=len(words),
                    rollout_log_probs=[-0.07 * (place % 6) ** 2 for place in range(len(words))],
                    loss_mask=[1] * (len(words) - 1) + [0],
                )
            )
        dump_files.save(root / "rollout_data" / f"{rollout}.pt", {"rollout_id": rollout, "samples": samples})
        if train:
            dump_files.train(root / "train_data" / f"{rollout}.pt", samples, rollout_id=rollout, off=0.05)
    return root


class Renamed:
    """A source whose files seem to lie in `SHOWN`, so that a picture does not tell where the test ran."""

    def __init__(self, root: Path) -> None:
        self._root, self._inner = str(root), LocalDumps(find_dumps(str(root)))

    async def list(self) -> DumpsAnswer:
        found = await self._inner.list()
        return replace(found, dumps=[one | {"path": one["path"].replace(self._root, SHOWN)} for one in found.dumps])

    async def page(self, query: DumpPageQuery) -> DumpPageAnswer:
        answer = await self._inner.page(replace(query, path=query.path.replace(SHOWN, self._root)))
        samples = [one | {"texts_from": one["texts_from"].replace(self._root, SHOWN)} for one in answer.samples]
        return replace(answer, path=query.path, samples=samples)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class Board:
    """A running dump screen."""

    app: App[int]
    screen: DumpScreen
    pilot: Pilot[Any]

    async def press(self, *keys: str) -> str:
        """Press keys; returns the screen once nothing is asked for any more."""
        for key in keys:
            await self.pilot.press(key)
        return await self.calm()

    async def type(self, text: str) -> str:
        """Type into the line of input, and Enter."""
        await self.until(lambda: self.screen.asking)
        for char in text:
            await self.pilot.press({" ": "space", "=": "equals_sign", "<": "less_than_sign"}.get(char, char))
        return await self.press("enter")

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait for a condition; the test's own timeout ends a vain wait."""
        while not what():
            await self.pilot.pause()
            await asyncio.sleep(0)

    async def calm(self) -> str:
        """Wait until every question is answered; returns the screen."""
        await self.pilot.pause()
        await self.until(lambda: not self.screen.desk.busy)
        await self.pilot.pause()
        return self.text

    async def shows(self, words: str) -> str:
        """Wait until `words` are on the screen; returns the screen."""
        await self.until(lambda: words in self.text)
        return self.text

    @property
    def lines(self) -> list[str]:
        """The characters on the screen, trailing blanks removed."""
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def footer(self) -> str:
        return self.lines[-1]

    def styles(self, row: int) -> list[tuple[str, str]]:
        """(text, style name) of a row of the right side."""
        return list(self.screen._right.rows[row])


@asynccontextmanager
async def pager(
    path: Path, size: tuple[int, int] = (120, 40), *, ascii_only: bool = False, source: DumpSource | None = None
) -> AsyncIterator[Board]:
    """The pager over the dumps of a path, its first picture complete."""
    app = PagerApp(find_dumps(str(path)), ascii_only=ascii_only, source=source)
    async with app.run_test(size=size) as pilot:
        board = Board(app, app.front, pilot)
        await board.until(lambda: bool(board.screen.desk.dumps) or bool(board.screen.desk.list.why))
        await board.calm()
        yield board
