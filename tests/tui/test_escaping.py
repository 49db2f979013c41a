"""Whatever a run, an engine or a model writes is text on the screen and nothing else."""

from __future__ import annotations

from rich.cells import cell_len

from rltop.tui.rows import plain_text
from rltop.tui.widgets.pane import Pane
from tests.tui.dash import dash


async def test_hostile_text_is_shown_and_steers_nothing() -> None:
    async with dash("hostile") as board:
        for key in "123456":
            text = await board.press(key)
            assert all(char.isprintable() or char == "\n" for char in text)
            assert all(cell_len(line) <= 120 for line in text.splitlines())
        text = await board.press("1", "4")
        assert "[bold red]not markup[/] red  cleared" in text
        assert "你好，世界 e\u0301e\u0301 🙂 evil zerowidth tab↵second line" in text
        assert "[blink]名前" in text
        assert "▲ injected: [/]" in text
        assert "x.[y]" in text
        assert "[link=x]原因" in text
        assert "HEALTHY" not in text.replace("healthy", "")
        assert "\x1b" not in text


async def test_what_is_copied_is_clean_too() -> None:
    async with dash("hostile") as board:
        for key in "123456":
            await board.press(key)
            copied = board.view.selection(board.app.model.frame())
            assert all(char.isprintable() or char in "\n\t" for char in copied)


async def test_ascii_shows_no_other_character_anywhere() -> None:
    for scene in ("hostile", "failing"):
        async with dash(scene, ascii_only=True) as board:
            for key in ("2", "enter", "3", "5", "6", "question_mark"):
                text = await board.press(key)
                assert text.isascii() or key == "question_mark", (scene, key)
            await board.shows("esc closes")
            assert plain_text(board.app.screen.query_one(Pane).rows).isascii()


async def test_wide_characters_do_not_shift_what_stands_right_of_them() -> None:
    async with dash("hostile") as board:
        head = next(line for line in board.lines if "queue" in line and "tok/s" in line)
        kinds = [(line, word) for line in board.lines for word in ("SGLang", "CPU engine") if f"  {word}  " in line]
        assert len(kinds) == 2
        assert {cell_len(line[: line.index(word)]) for line, word in kinds} == {head.index("kind")}
        ends = {cell_len(line[: line.rindex("1    -")]) for line, _ in kinds}
        assert ends == {head.index("gen")}
