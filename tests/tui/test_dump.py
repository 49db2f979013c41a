"""The dump screen: what is on it, what its keys do, and that neither size nor content of a dump can hurt it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.theme import BUILTIN_THEMES

from rltop.evidence.dump_find import find_dumps
from rltop.evidence.dump_pages import DumpPages, listed
from rltop.protocol.messages import DumpPageQuery
from rltop.tui import dump_desk
from rltop.tui.pager import PagerApp
from rltop.tui.screens.dump import run_pager
from rltop.tui.theme import Palette
from tests.evidence import dump_files
from tests.tui.dash import dash
from tests.tui.dump_scene import Board, Renamed, model_dumps, pager

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_picture(tmp_path: Path, size: tuple[int, int]) -> None:
    root = model_dumps(tmp_path / "d", (3, 4, 7))
    async with pager(root, size, source=Renamed(root)) as board:
        await board.press("down", "enter", "right", "right", "right", "right", "right")
        shown = board.app.export_screenshot(title="rltop dump")
    path = SNAPSHOTS / f"dump-{size[0]}x{size[1]}.svg"
    if os.environ.get("RLTOP_UPDATE_SNAPSHOTS"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), "RLTOP_UPDATE_SNAPSHOTS=1 takes the new one"


async def test_list_and_sample_stand_side_by_side(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path, (3, 5))) as board:
        text = board.text
        assert "rltop dump rollout 3" in text
        assert "file 1/2 · 24 samples" in text
        assert "1 train dump joined · no dump of rollout 4" in text
        assert "Sample 0, group 0" in text
        assert "reward 0  status completed  tokens 12" in text
        assert "group mean 0.5 of 4, std 0.5" in text
        assert "What is 1 squared?↵" in text
        assert " First we square the number ," in text
        assert "tokens by " in text
        text = await board.press("down")
        assert "Sample 1, group 0" in text
        assert "2/24" in text
        text = await board.press("right_square_bracket")
        assert "rltop dump rollout 5" in text
        assert "Sample 1, group 0" in text, "the place stays"
        assert "rollout 3" in await board.press("left_square_bracket")


async def test_the_cursor_tells_what_is_known_of_a_token(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path)) as board:
        text = await board.press("down", "enter", "right", "right")
        assert "token 3/13" in text
        assert "token 3 ' the'" in text
        assert "rollout -0.2800  train -0.3300  p 0.756" in text
        assert "gap 0.05  advantage +1" in text
        assert "token 2/13" in await board.press("left")
        text = await board.press("end")
        assert "token 13/13" in text
        assert "masked: not in the loss" in text
        assert "token 1/13" in await board.press("home")
        assert "token 1/13" in await board.press("left")


async def test_colours_change_with_the_mode_and_mean_what_the_legend_says(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path)) as board:
        assert "gap from  0.01   0.03   0.1   0.3 " in board.text

        def style(word: str) -> set[str]:
            return {name for row in board.screen._right.rows for text, name in row if text.strip() == word}

        assert style("square") == {"heat2"}
        assert "advantage  +   -  of the train dump" in await board.press("c")
        assert style("square") == {"minus"}
        assert "no colours" in await board.press("c")
        assert style("square") == {"text"}
        assert "p below  0.9   0.5   0.1   0.01 " in await board.press("c")
        assert style("square") == {"heat1"}, "p is 0.76"
        assert style(",") >= {"heat2"}
        await board.press("enter", *["right"] * 2)
        assert "heat1+cur" in {name for row in board.screen._right.rows for _, name in row}


def test_what_the_colours_say_is_said_without_colours_too() -> None:
    palette = Palette(BUILTIN_THEMES["ansi-dark"])
    names = ["text", "faint", *(f"heat{level}" for level in (1, 2, 3, 4)), "plus", "minus", "text+cur"]
    told = []
    for name in names:
        style = palette[name]
        told.append((style.bold, style.dim, style.italic, style.underline, style.reverse))
    signs = {told[names.index("plus")], told[names.index("minus")], told[0], told[-1]}
    assert len(signs) == 4
    heats = [one for name, one in zip(names, told, strict=True) if name not in ("plus", "minus")]
    assert len(set(heats)) == len(heats)


async def test_without_train_dump_and_tokenizer_it_says_what_is_missing(tmp_path: Path) -> None:
    path = dump_files.save(
        tmp_path / "0.pt",
        {"rollout_id": 0, "samples": [dump_files.sample(0, response="ab cd", tokens=[7, 8], response_length=2)]},
    )
    async with pager(path) as board:
        text = board.text
        assert "no train dump" in text
        assert "ab cd" in text
        assert "response (no tokenizer beside the dump: tokens below)" in text
        assert "── token ids ──" in text
        assert "7 8" in board.text
        assert "p below" in text
        assert "no gap: no train dump is joined" in await board.press("c")


async def test_filter_sort_group_and_back(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path)) as board:
        await board.press("slash")
        text = await board.type("reward=1 length<16")
        assert "/reward=1 length<16" in text
        assert "1/2" in text
        assert "clear filter" in board.footer
        assert "1/24" in await board.press("escape")
        text = await board.press("s", "s", "s")
        assert "by reward ↓" in text
        assert "Sample 1, group 0" in text
        text = await board.press("s", "s", "s", "down", "down", "down", "down", "down", "v")
        assert "one group" in text
        assert "1/4" in text
        assert "Sample 4, group 1" in text
        text = await board.press("escape")
        assert "6/24" in text, "back to where it was"
        assert board.app.is_running
        await board.press("slash")
        assert "no sample fits" in await board.type("nothing has this")


async def test_perf_metrics_of_the_file(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path), (80, 24)) as board:
        text = await board.press("p")
        assert "Perf metrics of the file" in text
        text = await board.press("tab", "pagedown", "pagedown")
        assert "p text" in board.footer
        text += await board.press("home")
        assert "rollout/response_len/mean" in text
        assert "Sample 0, group 0" in await board.press("p")


async def test_a_search_goes_from_sample_to_sample_and_shows_the_place(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path)) as board:
        await board.press("F")
        text = await board.type("4 squared")
        assert "Sample 12, group 3" in text
        assert ("4 squared", "warn+b+cur") in [span for row in board.screen._right.rows for span in row]
        assert "Sample 13" in await board.press("n")
        text = await board.press("N", "N")
        assert "no sample before this has '4 squared'" in text
        await board.press("i")
        assert "Sample 20, group 5" in await board.type("21")
        await board.press("i")
        assert "neither a place" in await board.type("x")
        await board.press("i")
        assert "1/1" in await board.type("index=7")


async def test_fields_and_worst_token(tmp_path: Path) -> None:
    samples = [dump_files.sample(0, trace={"attempt": 3}, metadata={"engine": "2", "note": "line\n" * 60})]
    path = dump_files.save(tmp_path / "rollout_data" / "1.pt", {"rollout_id": 1, "samples": samples})
    entry = {
        "rollout_position": 0,
        "log_probs": [x - (at == 9) for at, x in enumerate(samples[0]["rollout_log_probs"])],
    }
    train = {"format_version": 2, "rollout_id": 1, "rank": 0, "dp_shards": [], "samples": [entry]}
    dump_files.save(tmp_path / "train_data" / "1.pt", train)
    async with pager(path, (80, 24)) as board:
        text = await board.press("m")
        assert "metadata.engine 2" in text
        assert "trace" not in text
        text = await board.press("tab", "end")
        assert "trace {attempt: 3}" in text
        assert "m text" in board.footer
        text = await board.press("m")
        assert "trace" not in text
        text = await board.press("x")
        assert "token 10/13" in text
        assert "gap 1 " in text


@pytest.mark.parametrize("size", [(80, 24), (50, 14), (30, 8)])
async def test_hostile_text_is_shown_and_steers_nothing(tmp_path: Path, size: tuple[int, int]) -> None:
    evil = "\x1b[31mred\x07 \u202egnp.exe\u202c zero\u200bwidth \x9b2J \ufffd e" + "\u0301" * 50
    evil += " \u4f60\u597d\t[bold]x[/] \r\n"
    fields: dict[str, Any] = {"status": "\x1b]0;own\x07", "metadata": {evil: evil}, "label": evil}
    samples = [
        dump_files.sample(0, prompt=evil * 3, response=evil, **fields),
        dump_files.sample(1, response="x" * 100_000, prompt=[{"role": evil, "content": evil}]),
    ]
    path = dump_files.save(tmp_path / "0.pt", {"rollout_id": 0, "samples": samples})
    async with pager(path, size) as board:

        def safe(text: str) -> None:
            assert all(char.isprintable() or char == "\n" for char in text)
            assert all(cell_len(line) <= size[0] for line in text.splitlines())

        safe(board.text)
        for keys in ("enter", "c", "end", "home", "m", "m", "escape down", "enter end", "pageup", "v", "escape", "y"):
            safe(await board.press(*keys.split()))
        assert all(char.isprintable() or char in "\n\t" for char in board.screen.selection())
        if size[0] >= 80:
            text = await board.press("escape", "escape", "home", "tab", "home")
            assert "<1B>[31mred<07> <202E>gnp.exe<202C>" in text


async def test_ascii_screens_stay_ascii(tmp_path: Path) -> None:
    async with pager(model_dumps(tmp_path), (80, 24), ascii_only=True) as board:
        for keys in ("enter", "c", "c", "m", "escape escape", "question_mark"):
            assert (await board.press(*keys.split())).isascii()


async def test_a_million_samples_scroll_without_being_loaded(tmp_path: Path) -> None:
    """A stand-in for the file: what matters is how much the screen asks for."""
    path = dump_files.rollout(tmp_path / "0.pt", 1)

    class Huge(Renamed):
        asked = 0

        async def page(self, query: DumpPageQuery):  # type: ignore[no-untyped-def]  # as Renamed
            answer = await super().page(DumpPageQuery(query.path, want=query.want))
            count = 1_000_000
            start = min(query.start, count - 1)
            stop = min(max(query.stop, start), start + 1000, count)
            if query.start >= count:
                start = count - 50
                stop = count
            type(self).asked += stop - start
            rows = [answer.rows[0] | {"at": at, "index": at} for at in range(start, stop)] if answer.rows else []
            samples = [one | {"at": query.start, "index": query.start} for one in answer.samples]
            from msgspec.structs import replace

            return replace(answer, start=start, rows=rows, samples=samples, count=count)

    async with pager(path, source=Huge(tmp_path)) as board:
        assert "1/1000000" in board.text
        text = await board.press(*["pagedown"] * 30)
        assert "Sample 1020" in text
        text = await board.press("end")
        assert "1000000/1000000" in text
        assert "Sample 999999" in text
        assert "1/1000000" in await board.press("home")
        assert Huge.asked < 10_000


async def test_the_dashboard_opens_the_runs_dumps_over_the_daemon(tmp_path: Path) -> None:
    root = model_dumps(tmp_path, (2, 3))
    pages, refs = DumpPages(), find_dumps(str(root))
    by_path = {str(ref.path): ref for ref in refs}
    async with dash("healthy") as running:
        running.client.dump_list = listed(refs, [])
        running.client.dump_answer = lambda query: pages.answer(by_path[query.path], query)
        await running.press("5")
        assert "d dumps" in running.footer
        await running.press("d")
        await running.until(lambda: running.app.dump is not None and running.app.dump.desk.text is not None)
        assert running.app.dump is not None
        board = Board(running.app, running.app.dump, running.pilot)
        text = await board.calm()
        assert "rltop dump rollout 3" in text, "the newest"
        assert "read-only" in text
        assert "Sample 0, group 0" in text
        assert "this is the newest dump" in await board.press("right_square_bracket")
        new = dump_files.rollout(root / "rollout_data" / "4.pt", 2, rollout_id=4)
        by_path |= {str(ref.path): ref for ref in find_dumps(str(new))}
        running.client.dump_list = listed(list(by_path.values()), [])
        assert "rltop dump rollout 4" in await board.press("right_square_bracket")
        assert "rltop dump rollout 2" in await board.press("left_square_bracket", "left_square_bracket")
        assert {query.path for query in running.client.dump_queries} == set(by_path)
        await running.press("question_mark")
        await running.shows("esc closes")
        await running.press("escape")
        await running.press("escape")
        await running.until(lambda: running.app.screen is running.app.live)
        assert "rltop dump" not in await running.tick()
    pages.close()


async def test_dumps_that_come_meanwhile_are_learnt_of_and_the_place_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_desk, "NEWER_S", 0.05)
    root = model_dumps(tmp_path, (2, 3))
    pages, refs = DumpPages(), find_dumps(str(root))
    by_path = {str(ref.path): ref for ref in refs}
    async with dash("healthy") as running:
        running.client.dump_list = listed(refs, [])
        running.client.dump_answer = lambda query: pages.answer(by_path[query.path], query)
        await running.press("5")
        await running.press("d")
        await running.until(lambda: running.app.dump is not None and running.app.dump.desk.text is not None)
        assert running.app.dump is not None
        desk = running.app.dump.desk
        for at in (1, 4, 5):
            dump_files.rollout(root / "rollout_data" / f"{at}.pt", 2, rollout_id=at)
        running.client.dump_list = listed(find_dumps(str(root)), [])
        await running.until(lambda: len(desk.dumps) == 5)
        assert [text for text, _ in desk.file_facts()][:2] == ["file 3/5", "newer: 2"]
        assert desk.file_words() == "rollout 3"
        running.client.dump_list = listed([ref for ref in find_dumps(str(root)) if ref.rollout_id not in (3, 4)], [])
        await running.until(lambda: len(desk.dumps) == 4)
        assert desk.file_words() == "rollout 3", "a file that was deleted stays on the screen"
    pages.close()


async def test_an_answer_that_does_not_come_leaves_the_picture_and_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_desk, "RETRY_S", 0.0)
    root = model_dumps(tmp_path, count=200)
    pages, refs = DumpPages(), find_dumps(str(root))
    async with dash("healthy") as running:
        running.client.busy = True
        running.client.dump_list = listed(refs, [])
        running.client.dump_answer = lambda query: pages.answer(refs[0], query)
        await running.press("d")
        await running.shows("no answer to 'dumps?' in 10 s")
        running.client.busy = False
        await running.tick()
        await running.shows("Sample 0, group 0")
        running.client.busy = True
        text = await running.press("pagedown", "pagedown", "pagedown", "pageup")
        await running.shows("no answer to")
        assert " 0      0       0 completed" in await running.press("home"), "what was there stays"
        running.client.busy = False
        await running.press("end")
        text = await running.shows("Sample 199")
        assert "no answer to" not in text
    pages.close()


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("too_old", "the daemon of this run is older than this rltop"),
        ("busy", "no answer to 'dumps?' in 10 s"),
        ("", "no dump lies at /runs/night-shift/dumps"),
    ],
)
async def test_what_the_daemon_cannot_do_is_said(trouble: str, told: str) -> None:
    async with dash("healthy") as running:
        if trouble:
            setattr(running.client, trouble, True)
        await running.press("d")
        await running.shows(told)
        await running.press("q")
        await running.until(lambda: running.app.dump is None)


async def test_a_file_that_breaks_says_so_where_its_samples_would_be(tmp_path: Path) -> None:
    root = model_dumps(tmp_path, (3, 4))
    async with pager(root) as board:
        (root / "rollout_data" / "4.pt").unlink()
        assert "No such file" in await board.press("right_square_bracket")
        assert "Sample 0" in await board.press("left_square_bracket")


def test_the_pager_leaves_with_1_where_a_dump_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = model_dumps(tmp_path, (3,))
    refs = find_dumps(str(root))
    monkeypatch.setattr(PagerApp, "run", lambda self: 0)
    assert run_pager(refs) == 0
    seen = {str(refs[0].path): "it ends in the middle"}
    monkeypatch.setattr(PagerApp, "run", lambda self: self.front.desk.damaged.update(seen) or 0)
    assert run_pager(refs) == 1
    assert f"rltop: {refs[0].path}: it ends in the middle" in capsys.readouterr().err
    monkeypatch.setattr(PagerApp, "run", lambda self: 130)
    assert run_pager(refs) == 130


async def test_a_damage_that_was_met_is_remembered(tmp_path: Path) -> None:
    root = model_dumps(tmp_path, (3, 4))
    async with pager(root) as board:
        (root / "rollout_data" / "4.pt").unlink()
        await board.press("right_square_bracket", "left_square_bracket")
        assert isinstance(board.app, PagerApp)
        assert [path.rpartition("/")[2] for path in board.app.front.desk.damaged] == ["4.pt"]


async def test_the_command_line_says_what_is_shown_first(tmp_path: Path) -> None:
    app = PagerApp(find_dumps(str(model_dumps(tmp_path))))
    app.front.desk.begin(text="reward=1", sort="-length", search="3 squared")
    async with app.run_test(size=(120, 40)) as pilot:
        board = Board(app, app.front, pilot)
        await board.shows("Sample 11, group 2")
        text = await board.calm()
        assert "/reward=1 by length ↓" in text
        assert "7/12" in text


async def test_every_way_out(tmp_path: Path) -> None:
    root = model_dumps(tmp_path)
    async with pager(root) as board:
        await board.press("escape", "escape", "escape")
        assert board.app.is_running, "Esc does not leave a pager"
        await board.pilot.press("q")
        await board.until(lambda: board.app.return_value is not None)
        assert board.app.return_value == 0
    async with pager(root) as board:
        await board.pilot.press("ctrl+c")
        await board.until(lambda: board.app.return_value is not None)
        assert board.app.return_value == 130
