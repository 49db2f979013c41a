"""An illegal access that was planted in SGLang 0.5.14 on an H200: its logs, ends and bisections, read again.

`tests/data/planted_ima` (provenance: `tests/data/sglang/README.md`); the scenario: `examples/bisect_planted_ima.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rltop.bisect.story import arm_words, minutes_text, same_fault
from rltop.cli.main import main
from rltop.daemon.bisect_model import Model
from rltop.daemon.bisect_record import Record
from rltop.engines.crash import Crash
from rltop.engines.gdb import Kernel, of_blocking, of_log
from rltop.engines.log import EngineLog
from rltop.evidence import known
from rltop.evidence.priors import load
from tests.engines.contract import log_shape

DATA = Path(__file__).parents[1] / "data" / "planted_ima"
KERNEL = "planted_oob_kernel"
CULPRITS = {"padding": ["cuda_graph", "cuda_graph_padding"], "verify": ["cuda_graph", "speculative"]}


def lines(bug: str) -> list[str]:
    return (DATA / bug / "crash.log").read_text(errors="replace").splitlines()


def told(bug: str, name: str) -> Any:
    return json.loads((DATA / bug / name).read_text())


def crash_of(bug: str, *, blocking: bool = False) -> Crash:
    log = EngineLog(known=known.shipped())
    log.feed((DATA / bug / "crash.log").read_bytes(), 1.0)
    log.quiet(2.0)
    log.blocking = blocking
    return log.crash(exit_code=told(bug, "crash.json")["exit_code"])


@pytest.mark.parametrize("bug", sorted(CULPRITS))
def test_the_core_dump_in_the_log_names_the_kernel(bug: str) -> None:
    found, then = crash_of(bug), told(bug, "crash.json")
    assert (found.kind, found.phase, found.kernel) == ("ima", "serve", KERNEL)
    assert (found.fingerprint, found.cause) == (then["crash"]["fingerprint"], then["crash"]["cause"])
    assert (then["exit_code"], then["signal"]) == (-9, 9), "SGLang kills its own tree, whatever the cause"
    kernel = of_log(lines(bug))
    assert kernel is not None
    assert (kernel.name, kernel.weaker) == (KERNEL, False)


def test_both_bugs_are_one_kernel_and_so_one_fault() -> None:
    assert same_fault(crash_of("padding").fingerprint, crash_of("verify").fingerprint)
    trials = [row for bug in CULPRITS for row in told(bug, "record.json")["trials"] if row["outcome"] == "crashed"]
    assert {row["fingerprint"].split("/")[1] for row in trials} == {"serve", "decode-graph"}
    assert all(same_fault(row["fingerprint"], "ima/serve/a366dd") for row in trials)


def test_a_launch_that_blocks_names_its_frame_and_is_not_called_a_prefill() -> None:
    found = crash_of("frame", blocking=True)
    assert found.cause == (
        "Illegal memory access on the GPU while it served, launched at model.py:95 in _plant "
        "(CUDA_LAUNCH_BLOCKING, graphs off)."
    )
    assert "Prefill batch" in found.evidence[1], "the newest batch line says prefill; it was a verification of drafts"
    kernel = of_blocking(lines("frame"), graphs=False)
    assert kernel is not None
    assert (kernel.name, kernel.place, kernel.weaker) == (KERNEL, "model.py:95", True)
    assert of_blocking(lines("frame"), graphs=True) is None
    assert told("frame", "crash.json")["env"]["CUDA_LAUNCH_BLOCKING"] == "1"


@pytest.mark.parametrize("bug", ["frame", *sorted(CULPRITS)])
def test_batch_lines_have_the_shapes_that_the_cpu_engine_is_held_to(bug: str) -> None:
    def shape(line: str) -> str:
        """Whether a graph was replayed and whose model it is are values."""
        return log_shape(line).replace("graph: True", "graph: False").replace("PlantedQwen", "Qwen")

    held = {shape(line) for line in (DATA.parent / "sglang" / "log_lines.txt").read_text().splitlines()}
    batches = [
        line for line in lines(bug) if re.search(r"\] (Prefill|Decode) batch, |\] Load weight (begin|end)", line)
    ]
    assert len(batches) > 3
    assert {shape(line) for line in batches} <= held


@pytest.fixture(params=sorted(CULPRITS))
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A run directory of what was kept: (bug, run)."""
    bug = str(request.param)
    run = tmp_path / "runs" / f"planted-{bug}"
    crash = told(bug, "record.json")["crash"]
    folder = run / "engines" / crash["engine"] / str(crash["generation"])
    for path in (folder, run / "bisect" / "1"):
        path.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    shutil.copy(DATA / bug / "record.json", run / "bisect" / "1")
    shutil.copy(DATA / bug / "crash.json", folder)
    shutil.copy(DATA / bug / "crash.log", folder)
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    return bug, run.name


def test_its_report_says_today_what_it_said_then(recorded: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    bug, run = recorded
    assert main(["bisect", "export", "--run", run, "--to", "json"]) == 0
    now, then = json.loads(capsys.readouterr().out), told(bug, "report.json")
    for key in ("state", "culprit", "probability", "text", "kernel", "toggles", "posterior", "pins", "crashes_min"):
        assert now[key] == then[key], key
    for one, other in zip(now["trials"], then["trials"], strict=True):
        assert {key: one[key] for key in ("n", "on", "outcome", "minutes", "kernel", "argv")} == {
            key: other[key] for key in ("n", "on", "outcome", "minutes", "kernel", "argv")
        }
    assert now["culprit"] == CULPRITS[bug]
    assert now["kernel"]["place"] == "model.py:55"


def test_the_page_has_what_a_maintainer_needs(recorded: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    bug, run = recorded
    assert main(["bisect", "export", "--run", run]) == 0
    page = capsys.readouterr().out
    words = {"padding": "cuda_graph_padding, alone or with cuda_graph", "verify": "cuda_graph x speculative"}[bug]
    assert page.startswith(f"# Illegal memory access while serving with {words} (SGLang 0.5.14)\n")
    assert "- kernel: `planted_oob_kernel`, model.py:55, block (0,0,0), thread (0,0,0): Warp Illegal Address" in page
    log = page.split("## Log of the crash")[1]
    assert "Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS" in log
    assert "resolve_seq_lens_cpu" in log, "where the host stood: the last of the stacks"
    assert "crashed with exit code -6" in log
    assert "has finished state collection" not in log.replace("Device 1/1 has finished", "")
    assert "those of the checkpoint" in page
    assert "cuda_graph_padding off: a graph for every batch size" in page


@pytest.mark.parametrize("bug", sorted(CULPRITS))
def test_the_worked_example_tells_the_trials_as_they_were(bug: str) -> None:
    page = (DATA.parents[2] / "docs" / "bisect-example.md").read_text()
    table = page.split(f"`{bug}`: ")[1].split("|---|---|---|---|---|---|\n")[1].split("\n\n")[0]
    record = told(bug, "record.json")
    rows = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    for row, trial in zip(rows, record["trials"], strict=True):
        since = [(trial[key] - record["started"]) / 60 for key in ("started", "ended")]
        when = f"{since[0]:.1f} to {since[1]:.1f}"
        exposure = minutes_text(round(trial["minutes"], 2))  # as the cell has it
        assert [*row[:4], row[5]] == [str(trial["n"]), trial["engine"], when, exposure, trial["outcome"]]
        on = trial["asked_on"] if trial.get("on") is None else trial["on"]
        off = [name for name in record["ground"]["toggles"] if name not in on]
        assert row[4].replace(" (and padding with it)", ", cuda_graph_padding") == arm_words(on, off)
    assert record["verdict"]["text"] in " ".join(page.replace("*", "").split()).replace(" (98%)", "")
    shown = json.loads((DATA / bug / "report.json").read_text())["minutes"]
    assert f"{shown:.1f} minutes" in page.split(f"`{bug}`: ")[1].split("\n")[0]


@pytest.mark.parametrize("bug", sorted(CULPRITS))
def test_the_planner_of_today_finds_it_in_the_same_trials(bug: str) -> None:
    record = msgspec.json.decode((DATA / bug / "record.json").read_bytes(), type=Record)
    model = Model(record, load())
    found = model.planner.verdict(model.evidence())
    assert found.state == "found"
    assert found.culprit is not None
    assert sorted(model.space.names(found.culprit)) == CULPRITS[bug]
    located = Kernel(**told(bug, "record.json")["located"])
    assert (located.name, located.place, located.exception) == (KERNEL, "model.py:55", "Warp Illegal Address")
