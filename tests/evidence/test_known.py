"""The table of known crashes: what ships, and what a user adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.evidence.known import parse, shipped, with_table

MINE = '[[crash]]\nissue = "{0}"\ntitle = "mine"\nkernels = ["my_kernel"]\n'


def test_the_shipped_table_is_whole() -> None:
    table = shipped()
    assert len(table) == len({crash.issue for crash in table}) > 25
    assert all("#" in crash.issue and crash.title for crash in table)


def test_an_entry_of_the_user_comes_first_and_replaces_the_shipped_one(tmp_path: Path) -> None:
    issue = shipped()[3].issue
    path = tmp_path / "mine.toml"
    path.write_text(MINE.format(issue) + MINE.format("me/mine#1"))
    table = with_table(path)
    assert [crash.issue for crash in table[:2]] == [issue, "me/mine#1"]
    assert len(table) == len(shipped()) + 1
    assert table[0].title == "mine"
    assert with_table(None) == shipped()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[crash", "is no TOML"),
        ("[crashes]\n", "entries only"),
        (MINE.format("a#1") + "kernel = []\n", "unknown key 'kernel'"),
        ('[[crash]]\nissue = "a#1"\ntitle = "t"\n', "nothing to match by"),
        ('[[crash]]\nissue = "a#1"\ntitle = "t"\nflags = ["one"]\n', "nothing to match by"),
        ('[[crash]]\ntitle = "t"\nkernels = ["k"]\n', "issue and title"),
        ('[[crash]]\nissue = 3\ntitle = "t"\n', "issue must be a text"),
        ('[[crash]]\nissue = "a#1"\ntitle = "t"\nkernels = "k"\n', "kernels must be a list"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(RltopError, match=words):
        parse(text, where="mine.toml")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="can not be read"):
        with_table(tmp_path / "none.toml")
