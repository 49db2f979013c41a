"""Saves and loads the whole state of the trainer in Megatron's `torch_dist` format: weights, optimizer, random streams.

Collective: every rank writes what it holds, replicas once. A checkpoint is written beside its place and renamed when
all ranks are done; the tracker follows (`rltop.train.resume`). So `iter_NNNNNNN` is complete or absent, and a save that
fails or is cut short leaves the previous checkpoint usable. Weights and optimizer can be loaded on another layout; the
random streams, and with them bitwise equality, only on the same tensor and pipeline sizes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rltop.errors import RltopError
from rltop.train.megatron.compat import Megatron, quietly
from rltop.train.megatron.ranks import Ranks
from rltop.train.resume import Checkpoint, announce, directory_name

FORMAT = "torch_dist"
VERSION = 3.0
"""Megatron's `checkpoint_version`."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """What is saved of one rank."""

    megatron: Megatron
    ranks: Ranks
    model: Any
    optimizer: Any

    def save(self, root: Path, iteration: int, extra: Mapping[str, int]) -> None:
        """Write `root/iter_NNNNNNN` and name it in the tracker. extra: plain numbers, the same on every rank.

        Raises `RltopError` (exit code 1) when it cannot be written; then the tracker still names the previous one.
        """
        target = root / directory_name(iteration)
        staging = root / f".{target.name}-saving"
        try:
            if self.ranks.place.rank == 0:
                root.mkdir(parents=True, exist_ok=True)
                for left in root.glob(".iter_*-saving"):
                    shutil.rmtree(left)
                staging.mkdir()
            self.ranks.barrier()
            with quietly():
                self.megatron.checkpoints().save(self._tree(iteration, extra, loading=False), str(staging))
            self.ranks.barrier()
            if self.ranks.place.rank == 0:
                _put_in_place(staging, target)
                announce(root, iteration)
        except self._failures() as error:
            raise RltopError(
                "the checkpoint was not saved",
                where=str(target),
                why=_reason(error),
                do="is there room on the disk? The previous checkpoint is untouched: --load resumes from it",
                exit_code=1,
            ) from error
        self.ranks.barrier()

    def load(self, found: Checkpoint) -> dict[str, int]:
        """Put the checkpoint into the model, the optimizer and the random streams; returns `extra` of `save`.

        Raises `RltopError` for a checkpoint that is damaged, or of another model.
        """
        try:
            with quietly():
                state = self._read(found)
        except self._failures() as error:
            raise RltopError(
                "the checkpoint cannot be loaded",
                where=str(found.directory),
                why=_reason(error),
                do="is it of this model (--hf-checkpoint), and was it copied completely?",
            ) from error
        return dict(state["rltop"])

    def _read(self, found: Checkpoint) -> dict[str, Any]:
        checkpoints, directory = self.megatron.checkpoints(), str(found.directory)
        extra = checkpoints.common(directory)["rltop"]
        same = (extra["tensor"], extra["pipeline"]) == self._split()
        tree = self._tree(found.iteration, {}, loading=True)
        if not same:
            del tree["rng_state"]
        state: dict[str, Any] = checkpoints.load(tree, directory)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if same:
            self._put_random(state["rng_state"][0])
        return state

    def _tree(self, iteration: int, extra: Mapping[str, int], *, loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        tensor, pipeline = self._split()
        return {
            "checkpoint_version": VERSION,
            "iteration": iteration,
            "rltop": dict(extra) | {"tensor": tensor, "pipeline": pipeline},
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading),
            "rng_state": self._random(),
        }

    def _failures(self) -> tuple[type[BaseException], ...]:
        """What a full disk, a damaged file or another model raise."""
        return (OSError, RuntimeError, KeyError, ValueError, *self.megatron.checkpoints().errors)

    def _split(self) -> tuple[int, int]:
        layout = self.ranks.place.layout
        return layout.tensor, layout.pipeline

    def _random(self) -> Any:
        """As Megatron keeps it: one entry per (pipeline, tensor) rank. Nothing here draws from Python or numpy."""
        states = {
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": self.megatron.rng_tracker().get_states(),
        }
        if self.ranks.device.type == "cuda":
            states["cuda_rng_state"] = torch.cuda.get_rng_state()
        tensor, pipeline = self._split()
        place = self.ranks.place
        return self.megatron.checkpoints().sharded_object(
            "rng_state", [states], (pipeline, tensor), (place.pipeline, place.tensor), replica_id=place.data
        )

    def _put_random(self, states: Mapping[str, Any]) -> None:
        torch.set_rng_state(states["torch_rng_state"])
        self.megatron.rng_tracker().set_states(states["rng_tracker_states"])
        if "cuda_rng_state" in states:
            torch.cuda.set_rng_state(states["cuda_rng_state"])


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename. What is there already was saved by a run that this one does not continue: it steps aside first."""
    if target.exists():
        aside = target.parent / f".{target.name}-old-saving"
        target.rename(aside)
        staging.rename(target)
        shutil.rmtree(aside)
    else:
        staging.rename(target)


def _reason(error: BaseException) -> str:
    """One line. torch's exception carries the traceback of every rank; the last line is the cause."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"
