"""The rules over log lines see a live run: what its logs say arrives with file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rltop.daemon.live_checks import LiveChecks
from rltop.daemon.log_watch import KEPT_FIRST, KEPT_NEWEST, LogWatch, position
from tests.daemon.util import Viewer, real_daemon

OOM = (
    "(MegatronTrainRayActor pid=41) [2026-03-01 10:00:00] model.py:9 - torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.00 GiB is free.\n"
)
CALM = "(MegatronTrainRayActor pid=41) [2026-03-01 09:59:59] model.py:9 - step 3\n"


@pytest.fixture
def found() -> Iterator[LogWatch]:
    """A watch that is told what to follow at each poll."""
    watch = LogWatch(dict)
    yield watch
    watch.close()


def test_new_lines_become_events_with_their_lines(tmp_path: Path, found: LogWatch) -> None:
    path = tmp_path / "trainer.log"
    wanted = {"trainer.log": (path, 0)}
    assert found.poll(wanted) is None
    path.write_text(CALM * 2)
    first = found.poll(wanted)
    assert first is not None
    assert first.sources[0].lines == 2
    assert found.poll(wanted) is None
    with path.open("a") as file:
        file.write(OOM)
    second = found.poll(wanted)
    assert second is not None
    ooms = [event for event in second.events if "oom" in event.kind]
    assert [(event.where.source, event.where.line, event.owner) for event in ooms] == [("trainer.log", 3, "trainer")]


def test_what_an_earlier_attempt_wrote_is_not_of_this_run(tmp_path: Path, found: LogWatch) -> None:
    path = tmp_path / "trainer.log"
    path.write_text(OOM)
    start = path.stat().st_size
    wanted = {"trainer.log": (path, start)}
    found.poll(wanted)
    with path.open("a") as file:
        file.write(CALM + OOM)
    seen = found.poll(wanted)
    assert seen is not None
    assert [event.where.line for event in seen.events if "oom" in event.kind] == [3]


def test_a_position_behind_the_end_is_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("a\n")
    assert position(path, 100) is None
    assert position(tmp_path / "none", 1) is None


def test_what_a_log_said_stays_when_it_is_replaced(tmp_path: Path, found: LogWatch) -> None:
    path = tmp_path / "trainer.log"
    path.write_text(OOM)
    wanted = {"trainer.log": (path, 0)}
    found.poll(wanted)
    path.rename(tmp_path / "trainer.log.1")
    path.write_text(CALM)
    seen = found.poll(wanted)
    assert seen is not None
    path.write_text("")
    found.poll(wanted)
    path.write_text(CALM + OOM)
    seen = found.poll(wanted)
    assert seen is not None
    lines, calm = OOM.count("\n"), CALM.count("\n")
    places = [event.where.line or 0 for event in seen.events if "oom" in event.kind]
    assert [place <= lines for place in places] == [True, False]
    assert places[1] - places[0] == lines + 2 * calm
    assert found.before() == {"trainer.log": lines + calm}


def test_each_process_of_an_engine_has_its_own_log_and_its_number(tmp_path: Path, found: LogWatch) -> None:
    wanted: dict[str, tuple[Path, int]] = {}
    for at, life in enumerate(("0/1", "0/2", "eu-1/1")):
        path = tmp_path / life.replace("/", "-")
        path.write_text("CUDA error: an illegal memory access was encountered\n" * (at + 1))
        wanted = {f"train/engines/{life}/stdout.log": (path, 0)}  # only the newest is wanted
        seen = found.poll(wanted)
    assert seen is not None
    faults = [event for event in seen.events if event.kind == "ima"]
    assert {(event.engine, event.owner) for event in faults} == {(0, "engine"), ("eu-1", "engine")}
    assert len(faults) == 6, "what the processes before wrote is still known"


def test_an_engine_that_crashes_for_ever_does_not_fill_the_memory(tmp_path: Path, found: LogWatch) -> None:
    most = KEPT_FIRST + KEPT_NEWEST
    for generation in range(1, most + 20):
        path = tmp_path / str(generation)
        path.write_text("CUDA error: an illegal memory access was encountered\n")
        seen = found.poll({f"engines/0/{generation}/stdout.log": (path, 0)})
    assert seen is not None
    assert len(seen.sources) == most + 1
    names = [source.source for source in seen.sources]
    assert names[0] == "engines/0/1/stdout.log", "the first fault stays"
    assert names[-1] == f"engines/0/{most + 19}/stdout.log"


def test_metrics_of_a_log_count_where_nobody_streams_any(tmp_path: Path, found: LogWatch) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("step 0: {'train/loss': 0.1, 'train/grad_norm': nan, 'train/step': 0}\n")
    seen = found.poll({"trainer.log": (path, 0)})
    assert seen is not None
    checks = LiveChecks()
    checks.see_logs(seen)
    verdict = next(one for one in checks.report().verdicts if one.id == "train.nan")
    assert verdict.status == "fail"
    assert verdict.evidence[0].source == "trainer.log"


def test_a_crash_of_a_live_run_is_compared_with_the_user_s_own_reports(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('[[crash]]\nissue = "me/mine#7"\ntitle = "t"\ntext = ["my_rare_kernel"]\n')
    ima = "RuntimeError: CUDA error: an illegal memory access was encountered in my_rare_kernel"
    line = f"(SGLangEngine pid=7) [2026-03-01 10:00:00] scheduler.py:9 - {ima}\n"
    program = f"import sys, time; sys.stdout.write({line!r}); sys.stdout.flush(); time.sleep(600)"
    config = {"checks": {"known_crashes": str(own)}}
    with real_daemon(tmp_path, trainer=[sys.executable, "-c", program], config=config) as run, Viewer(run) as viewer:
        viewer.hello()
        state = viewer.until_state(lambda s: s.get("check/engine.ima", {}).get("status") == "fail")
        assert state["check/engine.ima"]["value"]["known"] == ["me/mine#7"]
        assert "looks like me/mine#7" in state["check/engine.ima"]["cause"]


def test_a_live_trainer_that_runs_out_of_memory_is_told_with_file_and_line(tmp_path: Path) -> None:
    program = f"import sys, time; sys.stdout.write({CALM + OOM!r}); sys.stdout.flush(); time.sleep(600)"
    with real_daemon(tmp_path, trainer=[sys.executable, "-c", program]) as run, Viewer(run) as viewer:
        viewer.hello()
        state = viewer.until_state(lambda s: s.get("check/train.oom", {}).get("status") == "fail")
        evidence = state["check/train.oom"]["evidence"][0]
        assert (evidence["source"], evidence["line"]) == ("trainer.log", 2)


def test_a_traceback_at_the_end_of_a_log_is_told_when_nothing_follows(tmp_path: Path, found: LogWatch) -> None:
    path = tmp_path / "trainer.log"
    path.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: 3\n')
    wanted = {"trainer.log": (path, 0)}
    polls = [found.poll(wanted) for _ in range(6)]
    told = [seen for seen in polls if seen is not None]
    assert [event.kind for event in told[0].events] == []
    assert [event.kind for event in told[-1].events] == ["traceback"]
    assert len(told) == 2, "and only once"
