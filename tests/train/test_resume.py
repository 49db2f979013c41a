"""Save, stop, go on: the same bits as without the stop, and never a lost checkpoint."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.weights import digest_tensors
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.layout import Layout, Place
from rltop.train.loss import LossConfig
from rltop.train.megatron.backend import BackendConfig, MegatronBackend
from rltop.train.megatron.batching import TrainSample
from rltop.train.narrator import LOGGER
from rltop.train.preflight import preflight
from rltop.train.presets import demo_args
from rltop.train.resume import TRACKER, announce, find_checkpoint, keep_reference
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from tests.train.fakes import FakeTrainer
from tests.train.local import Outcome, run_locally
from tests.train.spawn import run_ranks
from tests.train.test_loop import make_loop
from tests.train.test_ranks import samples_of

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

CONFIG = BackendConfig(lr=1e-3, lr_warmup_steps=5, max_tokens_per_micro_batch=256, deterministic=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TinyModelConfig(num_layers=2))


def steps(backend: MegatronBackend, rollouts: range) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Metrics of one step per rollout, and the digests of the weights after the last."""
    metrics = []
    for rollout in rollouts:
        batch = [
            TrainSample(s.tokens, s.response_length, (-1.0) ** at * (1 + at / 10))
            for at, s in enumerate(samples_of(rollout))
        ]
        metrics.append(backend.train_step(batch, LossConfig(), rollout_id=rollout))
    return metrics, digest_tensors(backend.hf_tensors())


def save_and_go_on(place: Place, store: Any, checkpoint: Path, root: Path) -> Any:
    """What two more steps give after a save: without and with the way through the disk."""
    backend = MegatronBackend(checkpoint, config=CONFIG, place=place, store=store)
    steps(backend, range(2))
    backend.save_checkpoint(root, 1)
    fresh = MegatronBackend(checkpoint, config=CONFIG, place=place, store=store)
    found = find_checkpoint(root)
    assert found is not None
    fresh.load_checkpoint(found)
    return steps(backend, range(2, 4)), steps(fresh, range(2, 4))


def load_elsewhere(place: Place, store: Any, checkpoint: Path, root: Path) -> Any:
    backend = MegatronBackend(checkpoint, config=CONFIG, place=place, store=store)
    found = find_checkpoint(root)
    assert found is not None
    backend.load_checkpoint(found)
    return steps(backend, range(2, 4))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        pytest.param(Layout(tensor=2), marks=pytest.mark.soak),
        pytest.param(Layout(pipeline=2), marks=pytest.mark.soak),
        pytest.param(Layout(data=2), marks=pytest.mark.soak),
        pytest.param(Layout(tensor=2, pipeline=2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_state_that_went_through_the_disk_goes_on_with_the_same_bits(
    layout: Layout, checkpoint: Path, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    if layout.world == 1:
        outcomes = [save_and_go_on(layout.place(0), None, checkpoint, root)]
    else:
        outcomes = run_ranks(layout, tmp_path, save_and_go_on, checkpoint, root)
    for straight, resumed in outcomes:
        assert resumed == straight
    assert {path.name for path in root.iterdir()} == {"iter_0000001", TRACKER}
    assert (root / TRACKER).read_text() == "1"
    assert (root / "iter_0000001" / ".metadata").is_file()


@pytest.mark.soak
def test_another_layout_can_go_on_though_not_bitwise(checkpoint: Path, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    ((straight, _), *_) = run_ranks(Layout(tensor=2), tmp_path, save_and_go_on, checkpoint, root)
    for layout in (Layout(), Layout(pipeline=2)):
        (tmp_path / str(layout)).mkdir()
        if layout.world == 1:
            metrics, _ = load_elsewhere(layout.place(0), None, checkpoint, root)
        else:
            metrics, _ = run_ranks(layout, tmp_path / str(layout), load_elsewhere, checkpoint, root)[0]
        for mine, theirs in zip(metrics, straight[0], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-3)


@pytest.fixture
def saved(checkpoint: Path, tmp_path: Path) -> tuple[MegatronBackend, Path]:
    backend, root = MegatronBackend(checkpoint, config=CONFIG), tmp_path / "saved"
    steps(backend, range(1))
    backend.save_checkpoint(root, 0)
    return backend, root


def test_a_save_that_fails_half_way_leaves_the_previous_one_in_charge(
    saved: tuple[MegatronBackend, Path], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, root = saved
    steps(backend, range(1, 2))
    real = backend._megatron.checkpoints()

    def half(_tree: Any, directory: str) -> None:
        (Path(directory) / "__0_0.distcp").write_bytes(b"half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_megatron", replace(backend._megatron, checkpoints=lambda: replace(real, save=half)))
        with pytest.raises(RltopError, match="the checkpoint was not saved") as caught:
            backend.save_checkpoint(root, 1)
    assert "No space left" in caught.value.why
    assert caught.value.exit_code == 1
    found = find_checkpoint(root)
    assert found is not None
    assert found.iteration == 0
    MegatronBackend(checkpoint, config=CONFIG).load_checkpoint(found)
    backend.save_checkpoint(root, 1)  # the leftovers are not in the way
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000000", "iter_0000001", TRACKER]


def test_saving_the_same_iteration_again_replaces_it(saved: tuple[MegatronBackend, Path]) -> None:
    backend, root = saved
    backend.save_checkpoint(root, 0)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000000", TRACKER]


@pytest.mark.parametrize("harm", ["cut", "other model"])
def test_a_damaged_or_foreign_checkpoint_is_named(
    saved: tuple[MegatronBackend, Path], checkpoint: Path, tmp_path: Path, harm: str
) -> None:
    _, root = saved
    found = find_checkpoint(root)
    assert found is not None
    if harm == "cut":
        for path in found.directory.glob("*.distcp"):
            path.write_bytes(path.read_bytes()[:200])
    else:
        checkpoint = make_tiny_model(tmp_path / "wide", TinyModelConfig(num_layers=2, hidden_size=32))
    with pytest.raises(RltopError, match="the checkpoint cannot be loaded") as caught:
        MegatronBackend(checkpoint, config=CONFIG).load_checkpoint(found)
    assert caught.value.where == str(found.directory)


# --- which checkpoint ----------------------------------------------------------------------------------------------


def directory(root: Path, *iterations: int, tracker: str | None = None) -> Path:
    for iteration in iterations:
        (root / f"iter_{iteration:07d}").mkdir(parents=True)
        (root / f"iter_{iteration:07d}" / ".metadata").touch()
    if tracker is not None:
        root.mkdir(exist_ok=True)
        (root / TRACKER).write_text(tracker)
    return root


def test_the_tracker_decides_and_not_the_largest_number(tmp_path: Path) -> None:
    found = find_checkpoint(directory(tmp_path, 3, 7, tracker="3\n"))
    assert found is not None
    assert (found.iteration, found.directory.name) == (3, "iter_0000003")
    announce(tmp_path, 7)
    again = find_checkpoint(tmp_path)
    assert again is not None
    assert again.iteration == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "iter_0000007", TRACKER]


def test_an_absent_or_empty_directory_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: directory(root, 3), ["iter_0000003", "no latest_checkpointed_iteration.txt"]),
        (lambda root: directory(root, 3) / "iter_0000003", ["one level up", "do:  --load"]),
        (lambda root: directory(root, 3, tracker="4"), ["says 4", "iter_0000004 does not exist"]),
        (lambda root: directory(root, tracker="release"), ["'release'", "no iteration"]),
        (lambda root: directory(root, tracker=""), ["''", "no iteration"]),
        (lambda root: make_tiny_model(root / "hf"), ["Hugging Face checkpoint", "--hf-checkpoint"]),
    ],
)
def test_what_cannot_be_resumed_from_is_said_and_never_passed_over(
    make: Callable[[Path], Path], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RltopError, match="no checkpoint to resume from") as caught:
        find_checkpoint(make(tmp_path))
    for word in words:
        assert word in str(caught.value)


def test_an_iteration_without_metadata_was_not_saved_to_the_end(tmp_path: Path) -> None:
    directory(tmp_path, 3, tracker="3")
    (tmp_path / "iter_0000003" / ".metadata").unlink()
    with pytest.raises(RltopError, match="no checkpoint to resume from") as caught:
        find_checkpoint(tmp_path)
    assert "no .metadata" in caught.value.why


def test_the_arguments_of_a_resume_are_checked_before_anything_starts(tmp_path: Path, checkpoint: Path) -> None:
    root = directory(tmp_path / "saved", 3, tracker="3")
    with pytest.raises(RltopError, match="nothing is left to train") as caught:
        preflight(parse_args(["--load", str(root), "--num-rollout", "4"]))
    assert "--num-rollout 5" in caught.value.do
    preflight(parse_args(["--load", str(root), "--num-rollout", "5"]))
    with pytest.raises(RltopError, match="no reference model"):
        preflight(parse_args(["--load", str(root), "--num-rollout", "5", "--use-kl-loss"]))
    keep_reference(checkpoint, root)
    preflight(parse_args(["--load", str(root), "--num-rollout", "5", "--use-kl-loss"]))
    for flags in (["--save", "x"], ["--save-interval", "2"]):
        with pytest.raises(RltopError, match="needs --save"):
            parse_args(flags)
    save = ["--save", str(root), "--save-interval", "2", "--num-rollout", "5"]
    with pytest.raises(RltopError, match="another run's checkpoints are there") as caught:
        preflight(parse_args(save))
    assert f"--load {root} to go on" in caught.value.do
    preflight(parse_args([*save, "--load", f"{root}/../saved"]))
    (tmp_path / "file").touch()
    with pytest.raises(RltopError, match="cannot write there"):
        preflight(parse_args(["--save", str(tmp_path / "file"), "--save-interval", "1"]))


# --- the loop ------------------------------------------------------------------------------------------------------


def test_every_interval_and_the_last_rollout_are_saved(tmp_path: Path) -> None:
    config = TrainConfig(num_rollout=5, rollout_batch_size=2, n_samples_per_prompt=2, save=tmp_path, save_interval=2)
    trainer = FakeTrainer([])
    make_loop(config, trainer).run()
    assert [call[1] for call in trainer.calls if call[0] == "save_checkpoint"] == [1, 3, 4]
    at = trainer.calls.index(("save_checkpoint", 1))
    assert trainer.calls[at - 1][0] == "train_step"
    assert trainer.calls[at + 1][0] == "publish"


@pytest.fixture(scope="module")
def tiny_run() -> TrainConfig:
    config = parse_args(demo_args(deterministic=True, num_engines=1))
    return replace(
        config, num_rollout=4, rollout_batch_size=4, n_samples_per_prompt=4, global_batch_size=8, cold_start_steps=60
    )


@pytest.fixture(scope="module")
def straight(tiny_run: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A run of four rollouts that saves after the second, and where it saved."""
    root = tmp_path_factory.mktemp("straight")
    outcome = run_locally(replace(tiny_run, save=root / "saved", save_interval=2), root)
    announce(root / "saved", 1)  # as if it had been interrupted after the first save
    return outcome, root / "saved"


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(
    tiny_run: TrainConfig, straight: tuple[Outcome, Path], tmp_path: Path
) -> None:
    whole, saved = straight
    root = Path(shutil.copytree(saved, tmp_path / "saved"))
    config = replace(tiny_run, load=root, save=root, save_interval=2)
    resumed = run_locally(config, tmp_path)
    assert resumed.history.rewards == whole.history.rewards[2:]
    assert resumed.history.steps == whole.history.steps[4:]
    digests = [[sync["digest"] for sync in o.payloads("weights")] for o in (whole, resumed)]
    assert digests[1] == digests[0][2:]
    (run,) = resumed.payloads("run")
    assert (run["start_rollout_id"], run["fresh_start"]) == (2, False)
    lines = [log["text"] for log in resumed.payloads("log")]
    assert f"successfully loaded checkpoint from {root} [ t 1/1, p 1/1 ] at iteration 1" in lines
    assert f"successfully saved checkpoint from iteration {3:7d} to {root} [ t 1/1, p 1/1 ]" in lines
    assert any(step["grad_norm"] > 1e-3 for step in resumed.history.steps)
    assert resumed.history.steps[0]["kl_loss"] > 0  # the reference is the run's first weights, not the loaded ones
    found = find_checkpoint(root)
    assert found is not None
    assert found.iteration == 3


def test_a_load_without_a_checkpoint_starts_afresh_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    config = TrainConfig(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2, load=tmp_path)
    trainer = FakeTrainer([])
    with caplog.at_level(logging.INFO, LOGGER):
        make_loop(config, trainer).run()
    assert "verify" in trainer.calls
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"--load {tmp_path} holds no checkpoint (no latest_checkpointed_iteration.txt): a fresh start" in warning
    assert "Load checkpoint from HuggingFace model into Megatron: /model" in caplog.text


def test_a_resumed_run_pushes_before_its_first_rollout_and_has_no_cold_start(tmp_path: Path) -> None:
    config = TrainConfig(num_rollout=4, rollout_batch_size=2, n_samples_per_prompt=2, cold_start_steps=5, load=tmp_path)
    trainer = FakeTrainer([], loaded_iteration=2)
    loop = make_loop(config, trainer)
    loop.run()
    kinds = [call if isinstance(call, str) else call[0] for call in trainer.calls]
    assert "cold_start" not in kinds
    assert "verify" not in kinds
    published = [call for call in trainer.calls if call[0] == "publish"]
    assert published == [("publish", "3", 2), ("publish", "4", 3)]
    assert [call[1] for call in trainer.calls if call[0] == "train_step"] == [3]
    assert loop.history.first_rollout
