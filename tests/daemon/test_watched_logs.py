"""Logs of a run that knows nothing of rltop are found, followed and cut into attempts, whatever happens to them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.found import LogEvent
from rltop.checks.observe import MetricRow
from rltop.daemon.watched_files import LogFiles, WatchOptions, logs_in
from rltop.daemon.watched_logs import LogReader, News, Restarted, Turn
from tests.daemon.slime_log import Plan, text

OOM = "(MegatronTrainRayActor pid=41) [2026-03-01 10:00:00] a.py:9 - torch.OutOfMemoryError: CUDA out of memory.\n"
CALM = "(MegatronTrainRayActor pid=41) [2026-03-01 09:59:59] model.py:9 - nothing of interest\n"


def step(number: int, pid: int = 41) -> str:
    values = f"{{'rollout/raw_reward': 0.5, 'rollout/step': {number}}}"
    stamp = f"2026-03-01 10:{number:02}:00"
    return f"(MegatronTrainRayActor pid={pid}) [{stamp}] train_metric_utils.py:135 - rollout {number}: {values}\n"


class Clock:
    """Stands still, so that a turn never runs out of time."""

    def __call__(self) -> float:
        return 5.0


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[LogReader]:
    """Follows `*.log` in a directory."""
    made = LogReader(LogFiles([str(tmp_path / "*.log")]), clock=Clock(), wall=lambda: 1000.0)
    yield made
    made.close()


def told(turn: Turn, kind: type) -> list[object]:
    return [item.fact for item in turn.news if isinstance(item, News) and isinstance(item.fact, kind)]


def places(turn: Turn, kind: str) -> list[tuple[str, int | None]]:
    return [(e.where.source, e.where.line) for e in told(turn, LogEvent) if isinstance(e, LogEvent) and e.kind == kind]


def test_files_of_a_pattern_may_come_later_and_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    files = LogFiles([str(tmp_path / "*" / "*.log"), str(tmp_path / "later.log")])
    assert list(files.find()) == ["later.log"]
    (tmp_path / "a" / "rank0.log").touch()
    assert list(files.find()) == ["later.log", "rank0.log"]
    (tmp_path / "b" / "rank0.log").touch()
    assert list(files.find()) == ["later.log", "rank0.log", "b/rank0.log"]


def test_more_files_than_can_be_followed_are_counted(tmp_path: Path) -> None:
    for at in range(5):
        (tmp_path / f"{at}.log").touch()
    files = LogFiles([str(tmp_path)], most=3)
    assert (len(files.find()), files.left_out) == (3, 2)
    assert (len(files.find()), files.left_out) == (3, 2)
    assert files.without_files == ()


def test_of_ray_s_directory_only_workers_and_jobs_are_followed(tmp_path: Path) -> None:
    names = ["raylet.out", "gcs_server.out", "dashboard.log", "worker-aa-01000000-7.err", "job-driver-raysubmit_x.log"]
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in logs_in(tmp_path)} == set(names[3:])


def test_what_a_driver_log_repeats_of_a_worker_is_told_once(tmp_path: Path) -> None:
    raw = step(0).partition(") ")[2]
    (tmp_path / "raylet.out").touch()
    (tmp_path / "worker-aa-01000000-41.err").write_text(":actor_name:MegatronTrainRayActor\n" + raw)
    (tmp_path / "job-driver-raysubmit_x.log").write_text(step(0) + step(0, pid=99))
    one = LogReader(LogFiles([str(tmp_path)]), clock=Clock())
    turn = one.turn()
    one.close()
    assert turn.facts is not None
    rows = [row.where.source for row in turn.facts.metrics if row.where]
    assert sorted(rows) == ["job-driver-raysubmit_x.log", "worker-aa-01000000-41.err"], "pid 99 has no file here"
    assert len(told(turn, MetricRow)) == 2


def test_the_lines_of_a_rotated_and_of_a_cut_log_are_counted_on(tmp_path: Path, reader: LogReader) -> None:
    path = tmp_path / "t.log"
    path.write_text(CALM + OOM)
    assert places(reader.turn(), "oom") == [("t.log", 2)]
    path.rename(tmp_path / "t.log.1")
    with (tmp_path / "t.log.1").open("a") as file:
        file.write(OOM)  # before it noticed
    path.write_text(OOM)
    turn = reader.turn()
    assert places(turn, "oom") == [("t.log", 3), ("t.log", 4)]
    assert (turn.cells["t.log"]["restarts"], turn.cells["t.log"]["before"]) == (1, 3)
    assert turn.facts is not None
    assert [event.where.line for event in turn.facts.events if event.kind == "oom"] == [2, 3, 4]
    path.write_text(CALM)
    reader.turn()
    path.write_text("")
    assert reader.turn().cells["t.log"]["state"] == "followed"


def test_missing_gone_and_unreadable_logs_say_so(tmp_path: Path) -> None:
    path, binary = tmp_path / "t.log", tmp_path / "b.log"
    binary.write_bytes(b"\0\1\2\n" * 9)
    reader = LogReader(LogFiles([str(path), str(binary)]), clock=Clock())
    cells = reader.turn().cells
    assert (cells["t.log"]["state"], cells["b.log"]["state"]) == ("missing", "unreadable")
    path.write_text(CALM)
    assert reader.turn().cells["t.log"]["lines"] == 1
    path.unlink()
    assert reader.turn().cells["t.log"]["state"] == "gone"
    reader.close()


def test_a_pattern_without_a_file_is_missing_until_there_is_one(tmp_path: Path, reader: LogReader) -> None:
    pattern = str(tmp_path / "*.log")
    assert reader.turn().cells[pattern]["state"] == "missing"
    (tmp_path / "t.log").write_text(CALM)
    assert list(reader.turn().cells) == ["t.log"]


def test_a_wide_encoding_is_read_and_a_line_cut_in_half_waits(tmp_path: Path, reader: LogReader) -> None:
    (tmp_path / "w.log").write_bytes((CALM + OOM).encode("utf-16"))
    path = tmp_path / "t.log"
    data = OOM.encode()
    path.write_bytes(b"\xff\xfe latin \xe9\n"[2:] + data[:40])
    assert places(reader.turn(), "oom") == [("w.log", 2)]
    with path.open("ab") as file:
        file.write(data[40:])
    assert places(reader.turn(), "oom") == [("t.log", 2)]


def test_a_log_that_grows_too_fast_loses_lines_that_are_counted_and_keeps_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.log"
    path.write_text(OOM)
    reader = LogReader(LogFiles([str(path)]), clock=Clock(), most_behind=5 << 20)
    assert places(reader.turn(), "oom") == [("t.log", 1)]
    count = (6 << 20) // len(CALM)
    with path.open("a") as file:
        file.write(CALM * count + OOM)
    turn = reader.turn()
    assert places(turn, "oom") == [("t.log", count + 2)]
    cell = turn.cells["t.log"]
    assert 0 < cell["dropped"] < count
    assert cell["lines"] == count + 2
    reader.close()


def test_the_history_of_a_log_is_never_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.log"
    count = (6 << 20) // len(CALM)
    path.write_text(OOM + CALM * count)
    reader = LogReader(LogFiles([str(path)]), clock=Clock(), most_behind=1 << 20)
    turn = reader.turn()
    assert (turn.cells["t.log"]["dropped"], turn.cells["t.log"]["lines"]) == (0, count + 1)
    reader.close()


def test_from_the_end_only_what_comes_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.log"
    path.write_text(OOM * 2)
    reader = LogReader(LogFiles([str(tmp_path / "*.log")]), from_end=True, clock=Clock())
    assert places(reader.turn(), "oom") == []
    with path.open("a") as file:
        file.write(OOM)
    (tmp_path / "new.log").write_text(OOM)
    assert sorted(places(reader.turn(), "oom")) == [("new.log", 1), ("t.log", 3)]
    reader.close()


def test_two_runs_in_one_file_are_two_attempts_and_the_second_begins_at_its_first_line(
    tmp_path: Path, reader: LogReader
) -> None:
    plan = Plan(rollouts=3, garbled_from=None, dies_in=None)
    first = text(plan)
    again = text(
        Plan(rollouts=2, garbled_from=None, dies_in=None, pid=7000, begin=plan.begin - 5000)
    )  # its clock is back
    (tmp_path / "t.log").write_text(first + again)
    turn = reader.turn()
    restarts = [item for item in turn.news if isinstance(item, Restarted)]
    assert [(one.begin.source, one.begin.line) for one in restarts] == [("t.log", first.count("\n") + 1)]
    assert {row.step for row in restarts[0].before.metrics} == {0, 1, 2}
    assert turn.facts is not None
    assert {row.step for row in turn.facts.metrics} == {0, 1}
    at = turn.news.index(restarts[0])
    assert all(
        (n.fact.where.line or 0) > first.count("\n")
        for n in turn.news[at + 1 :]
        if isinstance(n, News) and n.fact.where
    )


def test_a_run_that_goes_on_behind_its_checkpoint_is_another_attempt(tmp_path: Path, reader: LogReader) -> None:
    driver = "[2026-03-01 11:00:00] placement_group.py:125 - Creating placement group with 8 GPUs...\n"
    (tmp_path / "t.log").write_text(step(0) + step(1) + driver + step(2, pid=77))
    restarts = [item for item in reader.turn().news if isinstance(item, Restarted)]
    assert [one.begin.line for one in restarts] == [3]


def test_a_step_that_goes_back_within_one_process_is_no_new_attempt(tmp_path: Path, reader: LogReader) -> None:
    row = "(T pid=4) [2026-03-01 10:00:00] model.py:918 - step {0}: {{'train/loss': 0.1, 'train/step': {0}}}\n"
    (tmp_path / "t.log").write_text("".join(row.format(n) for n in (0, 1, 2, 1, 2, 3)))
    assert not [item for item in reader.turn().news if isinstance(item, Restarted)]


def plain(number: int) -> str:
    """A row as rltop's trainer prints it: nothing says which process it is."""
    return f"[2026-03-01 10:0{number}:00] narrator.py:146 - rollout {number}: {{'rollout/raw_reward': 0.5}}\n"


AT = "[2026-03-01 09:00:00] narrator.py:146 - "


@pytest.mark.parametrize(
    ("starts", "goes_to"),
    [
        (f"{AT}Timer start start\n", 1),
        (f"{AT}Timer cold_start start\n", 1),
        (f"{AT}Load checkpoint from HuggingFace model into Megatron: /models/tiny\n", 1),
        ("  successfully loaded checkpoint from /ckpt [ t 0, p 0 ] at iteration 1\n", 1),
        ("using world size: 8, data-parallel size: 8\n", 1),
        (f"{AT}Timer start start\n", 0),
        ("", 0),
    ],
)
def test_a_run_of_any_trainer_behind_another_is_an_attempt_without_a_process(
    tmp_path: Path, reader: LogReader, starts: str, goes_to: int
) -> None:
    (tmp_path / "t.log").write_text(plain(0) + plain(1) + plain(2) + CALM + starts + plain(goes_to))
    turn = reader.turn()
    restarts = [item for item in turn.news if isinstance(item, Restarted)]
    assert [one.begin.line for one in restarts] == [5]
    assert turn.facts is not None
    assert [row.step for row in turn.facts.metrics] == [goes_to]


@pytest.mark.parametrize(
    "said",
    [
        {"t.log": plain(0) + plain(1) + plain(2) + plain(1)},  # nothing was started
        {"t.log": step(0) + step(1) + step(0)},  # the same process
        {"t.log": plain(0) + plain(1), "u.log": plain(0) + plain(1)},
        {"t.log": plain(0) + plain(1) + f"{AT}Timer start start\n" + plain(2)},
        {"t.log": plain(0) + plain(1) + f"{AT}Timer rollout start\n" + plain(1)},
    ],
)
def test_these_are_one_attempt(tmp_path: Path, reader: LogReader, said: dict[str, str]) -> None:
    for name, lines in said.items():
        (tmp_path / name).write_text(lines)
    assert not [item for item in reader.turn().news if isinstance(item, Restarted)]


def test_a_log_that_is_no_text_is_no_evidence(tmp_path: Path, reader: LogReader) -> None:
    (tmp_path / "b.log").write_bytes(bytes(range(256)) * 8)
    facts = reader.turn().facts
    assert facts is not None
    assert (facts.logs, facts.files, [p.where.source for p in facts.problems]) == ([], [], ["b.log"])
    (tmp_path / "t.log").write_text(CALM)
    facts = reader.turn().facts
    assert facts is not None
    assert ([source.source for source in facts.logs], facts.files) == (["t.log"], ["t.log"])


def test_an_engine_that_is_started_again_begins_no_attempt(tmp_path: Path, reader: LogReader) -> None:
    (tmp_path / "t.log").write_text(text(Plan(rollouts=4, dies_in=2, garbled_from=None)))
    assert not [item for item in reader.turn().news if isinstance(item, Restarted)]


BOTH = (
    text(Plan(rollouts=2, garbled_from=1, dies_in=1)) + text(Plan(rollouts=2, garbled_from=None, dies_in=None, pid=70))
).encode()


def found(reader: LogReader, path: Path, data: bytes, cuts: list[int]) -> tuple[object, ...]:
    """What a log says that is written in pieces and read after each."""
    facts, restarts, told_rows = None, [], 0
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        with path.open("ab") as file:
            file.write(data[start:end])
        turn = reader.turn()
        facts = turn.facts or facts
        restarts += [item.begin for item in turn.news if isinstance(item, Restarted)]
        told_rows += len(told(turn, MetricRow))
    assert facts is not None
    events = [(event.kind, event.where.line) for event in facts.events]
    rows = [(row.step, row.rollout_id, row.step_in_rollout, dict(row.values)) for row in facts.metrics]
    return events, rows, [sample.excerpt for sample in facts.samples], restarts, told_rows


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, len(BOTH) - 1), max_size=12))
def test_however_a_log_is_cut_it_says_the_same(cuts: list[int]) -> None:
    said = []
    for pieces in ([], sorted(cuts)):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "t.log"
            reader = LogReader(LogFiles([str(path)]), clock=Clock())
            said.append(found(reader, path, BOTH, pieces))
            reader.close()
    assert said[0] == said[1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(BOTH.split(b"\n")).flatmap(lambda line: st.binary(max_size=30).map(line.__add__))))
def test_damaged_lines_are_no_fault(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.log"
        path.write_bytes(b"\n".join(lines))
        reader = LogReader(LogFiles([str(path)]), clock=Clock())
        assert reader.turn().cells["t.log"]["state"] in ("followed", "unreadable")
        reader.close()


def test_options_of_a_configuration() -> None:
    assert WatchOptions.of({}) == WatchOptions()
    found = WatchOptions.of({"watch": {"logs": ["/a"], "from": "end", "ray": "http://h:1", "engines": []}})
    assert found == WatchOptions(logs=("/a",), from_end=True, ray="http://h:1")
