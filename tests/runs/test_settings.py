"""`rltop.toml`: defaults, sizes and times, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.settings import JournalLimit, Settings, load_settings, parse_settings

GOOD = """\
[keep]
runs_bytes = "1.5 GiB"
runs_age = "2 w"
auto_prune = true

[keep.journal.events]
rows = 1000
age = "12 h"
bytes = "5MB"

[keep.journal.records.samples]
bytes = 4096
"""


def test_what_is_written_is_read() -> None:
    assert parse_settings(GOOD, where="x") == Settings(
        runs_bytes=3 * 2**29,
        runs_age_s=14 * 86400.0,
        auto_prune=True,
        journal={
            "events": JournalLimit(1000, 12 * 3600.0, 5_000_000),
            "records:samples": JournalLimit(None, None, 4096),
        },
    )
    assert parse_settings("", where="x") == Settings()


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[keep]\nruns_byte = 1", 2, "did you mean 'runs_bytes'?"),
        ('[keep]\nruns_bytes = "20 bananas"', 2, "must be a size"),
        ('[keep]\n\nruns_age = "3"', 3, "must be a time"),
        ("[keep]\nauto_prune = 1", 2, "true or false"),
        ("[kept]\n", 1, "unknown table or key 'kept'"),
        ("[keep.journal.event]\nrows = 1", 1, "did you mean 'events'?"),
        ("[keep.journal.events]\nrows = 0", 2, "a whole number from 1"),
        ("[keep.journal.events]\nrow = 1", 2, "did you mean 'rows'?"),
        ("[keep", 1, "not TOML"),
    ],
)
def test_errors_name_the_line(text: str, line: int, said: str) -> None:
    with pytest.raises(RltopError) as caught:
        parse_settings(text, where="rltop.toml")
    assert said in str(caught.value)
    assert caught.value.where == f"rltop.toml:{line}"


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLTOP_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings() == Settings()
    (tmp_path / "rltop").mkdir()
    (tmp_path / "rltop" / "rltop.toml").write_text("[keep]\nruns_bytes = 1\n")
    assert load_settings().runs_bytes == 1
    monkeypatch.setenv("RLTOP_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(RltopError, match="there is no settings file"):
        load_settings()
