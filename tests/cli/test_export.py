"""`rltop export`: exact values of a run, restarts, several tables, files that are whole, and bad input."""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
from collections.abc import Iterator
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from rltop.cli import export as exporting
from rltop.cli.main import main
from rltop.cli.tfevents import EventFile, crc32c, masked
from rltop.daemon import schema
from rltop.daemon.core import Core
from rltop.daemon.journal import CHUNK_POINTS, Journal
from rltop.daemon.points import Curve, points

Capture = pytest.CaptureFixture[str]
LONG = CHUNK_POINTS + 100


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a run that restarted from step 300, with a late point, NaN and Inf, an event and a verdict."""
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    folder = tmp_path / "runs" / "old-1"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "run.json").write_text(json.dumps({"name": "old-1", "pid": 1, "started": 1.0}), encoding="utf-8")
    journal = Journal(folder / "journal.sqlite")
    core = Core(journal, now=lambda: 5.0)
    journal.start()
    core.set("run", {"name": "old-1", "framework": "mine", "state": "done"})
    core.set("metric/train/loss", {"step": 1, "value": 0.1, "axis": "train"})
    for step in range(LONG):
        core.point("train/loss", step, step + 1 / 3, 1000.0 + step / 8)
    for step, value in ((0, nan), (1, inf), (3, 0.1), (2, -inf), (3, 0.25)):
        core.point("rollout/raw_reward", step, value, None if step == 1 else 50.0 + step)
    core.series.restart()
    for step in range(300, 310):
        core.point("train/loss", step, -float(step), 2000.0 + step)
    core.event("run", "info", 'ended, "well"', "daemon", state="done")
    journal.verdict(7.0, {"id": "train.nan", "status": "fail", "step": 3, "value": {"a": nan}, "cause": "NaN"}, "pass")
    assert journal.close()
    return folder


def table(capsys: Capture, *argv: str) -> list[dict[str, str]]:
    assert main(["export", *argv]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_every_value_comes_out_as_it_went_in(dead: Path, capsys: Capture) -> None:
    rows = table(capsys, "old-1", "--name", "train/loss")
    assert [int(row["step"]) for row in rows] == list(range(310))
    assert [float(row["value"]) for row in rows[:300]] == [step + 1 / 3 for step in range(300)]
    assert [(float(row["value"]), row["attempt"]) for row in rows[300:]] == [(-float(s), "2") for s in range(300, 310)]
    assert {(row["run"], row["axis"], row["name"]) for row in rows} == {("old-1", "train", "train/loss")}


def test_late_and_repeated_points_are_in_order_and_nan_and_inf_stay(dead: Path, capsys: Capture) -> None:
    rows = table(capsys, "old-1", "--name", "rollout/*")
    assert [(row["step"], row["value"]) for row in rows] == [
        ("0", "NaN"), ("1", "Infinity"), ("2", "-Infinity"), ("3", "0.25"),
    ]  # fmt: skip


def test_attempts_tell_what_was_gone_over_again(dead: Path, capsys: Capture) -> None:
    rows = table(capsys, "old-1", "--name", "train/loss", "--attempts")
    assert [sum(row["attempt"] == number for row in rows) for number in "12"] == [LONG, 10]


def test_every_value_has_its_time_and_none_where_nobody_knows_it(dead: Path, capsys: Capture) -> None:
    rows = table(capsys, "old-1", "--name", "train/loss", "--attempts")
    assert [float(row["time"]) for row in rows[:LONG]] == [1000.0 + step / 8 for step in range(LONG)]
    assert [float(row["time"]) for row in rows[LONG:]] == [2000.0 + step for step in range(300, 310)]
    assert [row["time"] for row in table(capsys, "old-1", "--name", "rollout/*")] == ["50.0", "", "52.0", "53.0"]
    wide = table(capsys, "old-1", "--wide")
    assert [(row["axis"], row["step"], row["time"]) for row in wide[3:6]] == [
        ("rollout", "3", "53.0"), ("train", "0", "1000.0"), ("train", "1", "1000.125"),
    ]  # fmt: skip


def test_a_journal_that_kept_no_times_is_read_as_it_is(dead: Path, capsys: Capture) -> None:
    """Of an older rltop, whose daemon lives: nobody else changes its file."""
    connection = schema.connect(dead / "journal.sqlite")
    for statement in ("ALTER TABLE points DROP COLUMN t", "ALTER TABLE series DROP COLUMN times"):
        connection.execute(statement)
    connection.execute("UPDATE series SET t = 7.5")
    found = list(points(connection, Curve("train/loss", "train"), every=True))
    connection.close()
    assert [(at, one.time) for at, one in enumerate(found) if one.time is not None] == [
        (CHUNK_POINTS - 1, 7.5),
        (LONG - 1, 7.5),
    ]


def test_wide_has_one_row_per_step_of_an_axis(dead: Path, capsys: Capture) -> None:
    rows = table(capsys, "old-1", "--wide")
    assert list(rows[0]) == ["run", "axis", "step", "time", "rollout/raw_reward", "train/loss"]
    assert [row["axis"] for row in rows] == ["rollout"] * 4 + ["train"] * 310
    assert (rows[0]["rollout/raw_reward"], rows[0]["train/loss"]) == ("NaN", "")
    assert rows[-1]["train/loss"] == "-309.0"


def test_several_tables_go_to_files_of_a_folder(dead: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert main(["export", "old-1", "--what", "series,events,checks", "-o", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["checks.csv", "events.csv", "series.csv"]
    (event,) = csv.DictReader(io.StringIO((out / "events.csv").read_text(encoding="utf-8")))
    assert (event["text"], json.loads(event["more"])) == ('ended, "well"', {"state": "done"})
    (check,) = csv.DictReader(io.StringIO((out / "checks.csv").read_text(encoding="utf-8")))
    assert (check["id"], check["status"], check["was"], check["value"]) == ("train.nan", "fail", "pass", '{"a": "NaN"}')


def test_a_file_that_is_there_is_not_replaced(dead: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "s.csv"
    out.write_text("mine", encoding="utf-8")
    assert main(["export", "old-1", "-o", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"
    assert main(["export", "old-1", "-o", str(out), "--force"]) == 0
    assert out.read_text(encoding="utf-8").startswith("run,attempt,axis,step,name,value,time\n")


def test_what_breaks_off_leaves_no_file(
    dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def broken(*_: Any, **__: Any) -> list[Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "points", broken)
    out = tmp_path / "out"
    assert main(["export", "old-1", "-o", str(out / "s.csv")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--to", "cvs"], "did you mean 'csv'"),
        (["--to", "xls"], "--to csv"),
        (["--what", "serie"], "did you mean 'series'"),
        (["--name", "train/los"], "close ones: train/loss"),
        (["--wide", "--to", "tensorboard", "-o", "x"], "only series as csv can be wide"),
        (["--wide", "--attempts"], "one row per step"),
        (["--to", "tensorboard", "--what", "events", "-o", "x"], "curves only"),
        (["--to", "tensorboard"], "-o DIR"),
        (["--to", "parquet"], "-o FILE"),
        (["--what", "series,events"], "-o DIR"),
    ],
)
def test_bad_input_is_one_error(dead: Path, argv: list[str], said: str, capsys: Capture) -> None:
    assert main(["export", "old-1", *argv]) == 2
    assert said in capsys.readouterr().err


def test_parquet_without_pyarrow_says_what_to_install(
    dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", "old-1", "--to", "parquet", "-o", str(tmp_path / "a.parquet")]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.parquet*"))


def test_parquet_holds_the_same_values(dead: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "a.parquet"
    assert main(["export", "old-1", "--to", "parquet", "-o", str(out)]) == 0
    found = parquet.read_table(out).to_pydict()
    assert len(found["value"]) == 314
    assert found["value"][-1] == -309.0


def records(data: bytes) -> Iterator[bytes]:
    """Data of the TFRecords of a file, checksums verified."""
    at = 0
    while at < len(data):
        length, check = struct.unpack_from("<QI", data, at)
        assert check == masked(data[at : at + 8])
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
        yield body
        at += 16 + length


def test_tensorboard_gets_an_event_file(dead: Path, tmp_path: Path) -> None:
    out = tmp_path / "tb"
    assert main(["export", "old-1", "--to", "tensorboard", "-o", str(out)]) == 0
    (path,) = out.glob("events.out.tfevents.*")
    first, *rest = records(path.read_bytes())
    assert first.endswith(b"brain.Event:2")
    assert len(rest) == 314
    assert b"train/loss" in rest[-1]
    assert rest[-1].endswith(struct.pack("<f", -309.0))


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path = tmp_path / "events.out.tfevents.1.x"
    with path.open("wb") as file:
        events = EventFile(file, started=1.0)
        for step, value in ((0, 1.5), (300, nan), (2**40, 1e300)):
            events.scalar("train/größe", step, value, 12.5)
    found = [event for event in reader.EventFileLoader(str(path)).Load() if event.summary.value]
    assert [event.step for event in found] == [0, 300, 2**40]
    assert all(event.summary.value[0].tag == "train/größe" for event in found)


def test_the_checksum_is_crc32c() -> None:
    # RFC 3720, B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_a_run_behind_a_prefix_is_exported_there(dead: Path, tmp_path: Path, capsys: Capture) -> None:
    via = ("--via", f"{sys.executable} -m", "--name", "rollout/raw_reward")
    rows = table(capsys, "old-1", *via)
    assert [row["value"] for row in rows] == ["NaN", "Infinity", "-Infinity", "0.25"]
    out = tmp_path / "tb"
    assert main(["export", "old-1", *via, "--to", "tensorboard", "-o", str(out)]) == 0
    (path,) = out.iterdir()
    values = [struct.unpack("<f", body[-4:])[0] for body in list(records(path.read_bytes()))[1:]]
    assert isnan(values[0])
    assert values[1:] == [inf, -inf, 0.25]
    assert main(["export", "none-1", *via[:2]]) == 1
    assert "none-1" in capsys.readouterr().err
