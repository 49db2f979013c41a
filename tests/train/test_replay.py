"""A replay beside the run before it: what is compared, with which tolerance, and what is not comparable."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.narrator import LOGGER, Narrator
from rltop.train.ports import StepSample
from rltop.train.replay import Replay, gap, model_sizes
from rltop.train.step_record import read_record
from rltop.train.tiny_model import make_tiny_model
from rltop.train.tolerance import ModelSizes, tolerance

TINY = ModelSizes(layers=2, hidden=64, intermediate=128, vocab=260)
SAMPLES = [StepSample((1, 2, 3), 2, 0.5, (-0.1, -0.2), None, None)]
BACKEND = "megatron-core 1, cpu/gloo"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@dataclasses.dataclass
class Runs:
    """Runs on the dumps of one directory."""

    directory: Path
    checkpoint: str
    totals: dict[str, float] = dataclasses.field(default_factory=dict)

    def play(
        self,
        *steps: tuple[float, float],
        mode: str = "train-only",
        weights: str = "w",
        first: int = 0,
        samples: list[StepSample] = SAMPLES,
        **flags: Any,
    ) -> list[dict[str, float]]:
        """One rollout's steps as (loss, grad_norm); returns the metrics of the comparison."""
        pattern = f"{self.directory}/{{rollout_id}}.pt"
        flag = "load_debug_rollout_data" if mode == "train-only" else "save_debug_rollout_data"
        config = TrainConfig(**{flag: pattern} | flags)
        self.totals = {}
        replay = Replay(config, Narrator(Reporter(address=""), lambda: 0.0), self.totals)
        replay.begin(weights=weights, backend=BACKEND, first=first, checkpoint=self.checkpoint)
        beside = replay.rollout(0, samples)
        found = [beside.step({"loss": loss, "grad_norm": norm, "lr": 1e-3}, tokens=100) for loss, norm in steps]
        beside.end()
        return found

    @property
    def record(self) -> Path:
        return self.directory / "0.steps.json"


@pytest.fixture
def runs(tmp_path: Path, checkpoint: str) -> Runs:
    return Runs(tmp_path, checkpoint)


@pytest.mark.parametrize("mode", ["full", "train-only"])
def test_the_second_run_is_compared_with_the_first(runs: Runs, mode: str) -> None:
    assert runs.play((0.1, 0.3), (0.2, 0.4), mode=mode) == [{}, {}]
    found = runs.play((0.1, 0.3), (0.2, 0.4))
    assert found[1] == {
        "train/replay_loss": 0.2,
        "train/replay_grad_norm": 0.4,
        "train/replay_loss_tolerance": 0.0,
        "train/replay_grad_norm_tolerance": 0.0,
    }
    assert (runs.totals["steps"], runs.totals["bitwise"], runs.totals["outside"]) == (2, 2, 0)


def test_the_same_layout_allows_nothing(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    runs.play((0.1, 0.3))
    with caplog.at_level("INFO", logger=LOGGER):
        runs.play((0.1, math.nextafter(0.3, 1)))
    assert (runs.totals["outside"], runs.totals["bitwise"]) == (1, 0)
    assert "should give the same bits; outside: 1 of 1 steps" in caplog.text


@pytest.mark.parametrize(("norm", "outside"), [(0.3 * (1 + 5e-6), 0), (0.3 * 1.001, 1), (math.nan, 1)])
def test_another_layout_allows_what_rounding_explains(runs: Runs, norm: float, outside: int) -> None:
    runs.play((0.1, 0.3))
    (found,) = runs.play((0.1, norm), tensor_model_parallel_size=2, actor_num_gpus_per_node=2)
    assert runs.totals["outside"] == outside
    if math.isfinite(norm):
        expected = tolerance(TINY, tokens=100, updates=0, lr=1e-3, grad_norm=norm)
        assert found["train/replay_grad_norm_tolerance"] == pytest.approx(expected.grad_norm * 0.3)
        assert found["train/replay_loss_tolerance"] == pytest.approx(expected.loss)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "v"}, "other weights at the start (w -> v)"),
        ({"first": 3}, "it began at rollout 0, this run at 3"),
        ({"lr": 2e-3}, "--lr 0.001 -> 0.002"),
        ({"use_kl_loss": True}, "--use-kl-loss False -> True"),
        ({"samples": SAMPLES * 2}, "it trained on 1 samples, this run on 2"),
    ],
)
def test_what_is_not_comparable_says_why_and_has_no_tolerance(
    runs: Runs, change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs.play((0.1, 0.3))
    with caplog.at_level("INFO", logger=LOGGER):
        found = runs.play((0.5, 0.9), **change)
    assert found == [{"train/replay_loss": 0.1, "train/replay_grad_norm": 0.3}]
    assert words in caplog.text
    assert runs.totals == {}


def test_steps_of_an_older_dump_are_replaced(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    runs.play((0.1, 0.3))
    other = [dataclasses.replace(SAMPLES[0], tokens=(1, 2, 4))]
    with caplog.at_level("INFO", logger=LOGGER):
        assert runs.play((0.5, 0.9), samples=other) == [{}]
    assert "is of other samples, of an older dump" in caplog.text
    assert json.loads(runs.record.read_text())["steps"] == [{"loss": 0.5, "grad_norm": 0.9}]


def test_a_replay_leaves_what_it_found(runs: Runs) -> None:
    runs.play((0.1, 0.3))
    before = runs.record.read_bytes()
    runs.play((0.2, 0.4))
    runs.play((0.2, 0.4), lr=2e-3)
    assert runs.record.read_bytes() == before


def test_a_part_of_a_dump_leaves_no_steps(runs: Runs) -> None:
    runs.play((0.1, 0.3), load_debug_rollout_data_subsample=0.5)
    assert not runs.record.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": "rltop-steps", "version": 9}', '{"format": "rltop-steps", "version": 1}']
)
def test_a_record_that_cannot_be_read_costs_the_comparison_and_stays(
    runs: Runs, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs.record.write_text(text)
    with caplog.at_level("INFO", logger=LOGGER):
        assert runs.play((0.1, 0.3)) == [{}]
    assert f"compared with nothing: {runs.record}" in caplog.text
    assert runs.record.read_text() == text


def test_numbers_that_are_none_survive_the_file(runs: Runs) -> None:
    runs.play((math.nan, math.inf))
    record = read_record(runs.record)
    assert not isinstance(record, str | None)
    assert math.isnan(record.steps[0]["loss"])
    assert record.steps[0]["grad_norm"] == math.inf
    runs.play((math.nan, math.inf))
    assert runs.totals["bitwise"] == 1


def test_a_directory_that_takes_nothing_costs_the_comparison_only(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    runs.directory = runs.directory / "file"
    runs.directory.write_text("no directory")
    with caplog.at_level("INFO", logger=LOGGER):
        assert runs.play((0.1, 0.3)) == [{}]
    assert "the run goes on" in caplog.text or "compared with nothing" in caplog.text


def test_the_tolerance_is_the_formula_of_its_module() -> None:
    assert TINY.terms == 2 * (64 + 128) + 260
    first = tolerance(TINY, tokens=500, updates=0, lr=1e-3, grad_norm=1.0)
    u = 2.0**-24
    assert first.loss == pytest.approx(3 * u * math.sqrt(644) * math.log(260))
    assert first.grad_norm == pytest.approx(3 * u * math.sqrt(3 * 644 + 500))
    later = tolerance(TINY, tokens=500, updates=4, lr=1e-3, grad_norm=1.0)
    rho = math.sqrt(3.2 * first.grad_norm)
    assert later.grad_norm == pytest.approx(first.grad_norm + 2 * rho)
    assert later.loss == pytest.approx(first.loss + 2 * rho * 1e-3)


def test_the_sizes_come_from_the_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    assert model_sizes(Path(checkpoint)) == TINY
    assert model_sizes(tmp_path) is None


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [(1.0, 1.5, 0.5), (math.nan, math.nan, 0.0), (math.inf, math.inf, 0.0), (math.nan, 1.0, math.inf)],
)
def test_the_gap_of_numbers_that_are_none(left: float, right: float, expected: float) -> None:
    assert gap(left, right) == expected
