"""Megatron's checkpoint directory: which iteration a run resumes from, and how a finished save is announced.

    DIR/latest_checkpointed_iteration.txt   the tracker: it alone decides, never the largest iter_*
    DIR/iter_0000041/                       the state after rollout 41 (slime: the iteration is the rollout id)
    DIR/reference/                          rltop's: the reference model, a Hugging Face checkpoint

The tracker is written last and replaced in one step, so a save that was cut short leaves the previous checkpoint in
charge. slime falls back to `--ref-load` without a word when `--load` has no tracker. Here an empty directory is a fresh
start with a warning (that is what `--load` = `--save` finds the first time), and everything else without a usable
tracker is refused. Prompts are a function of the seed and the rollout id, so there is no data cursor to keep.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from rltop.errors import RltopError

TRACKER = "latest_checkpointed_iteration.txt"
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that the tracker names."""

    root: Path
    iteration: int

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self.root / directory_name(self.iteration)


def directory_name(iteration: int) -> str:
    """Megatron's name for an iteration."""
    return f"iter_{iteration:07d}"


def find_checkpoint(load: Path) -> Checkpoint | None:
    """What `--load` names; None if it is absent or empty.

    Raises RltopError for a directory that holds something else, or a tracker that names nothing usable.
    """
    tracker = load / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        _refuse_leftovers(load)
        return None
    except OSError as error:
        raise _refused(load, f"{TRACKER}: {error.strerror or error}") from error
    if not text.isdecimal():
        raise _refused(
            load, f"{TRACKER} says {text[:40]!r}, which is no iteration", "give weights with --hf-checkpoint"
        )
    found = Checkpoint(load, int(text))
    if not (found.directory / ".metadata").is_file():
        why = f"{TRACKER} says {text}, but {found.directory.name} " + (
            "has no .metadata: it was not saved to the end, or not in the torch_dist format"
            if found.directory.is_dir()
            else "does not exist"
        )
        raise _refused(load, why, f"write the number of a complete iter_* directory into {tracker}")
    return found


def announce(root: Path, iteration: int) -> None:
    """Make the tracker name this iteration, in one step and for good."""
    staging = root / f".{TRACKER}-{os.getpid()}"
    with staging.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, root / TRACKER)


def keep_reference(source: Path, root: Path) -> None:
    """Copy the reference model (a Hugging Face checkpoint) to where a resumed run looks for it."""
    target = root / REFERENCE
    if target.exists() and source.exists() and target.samefile(source):
        return
    root.mkdir(parents=True, exist_ok=True)
    staging = root / f".{REFERENCE}-saving"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    if target.exists():
        shutil.rmtree(target)
    staging.rename(target)


def _refuse_leftovers(load: Path) -> None:
    if load.exists() and not load.is_dir():
        raise _refused(load, "it is a file")
    if re.fullmatch(r"iter_\d+", load.name) and (load / ".metadata").is_file():
        raise _refused(
            load, "it is the directory of one iteration, the tracker is one level up", f"--load {load.parent}"
        )
    left = sorted(path.name for path in load.glob("iter_*")) if load.is_dir() else []
    if left:
        raise _refused(
            load,
            f"it holds {', '.join(left[:3])} but no {TRACKER}: no save was finished, or the file was lost",
            f"if one of them is complete, write its number into {load / TRACKER}",
        )
    if load.is_dir() and (load / "config.json").is_file():
        raise _refused(load, "it is a Hugging Face checkpoint", f"--hf-checkpoint {load}")


def _refused(load: Path, why: str, do: str = "") -> RltopError:
    return RltopError("no checkpoint to resume from", where=f"--load {load}", why=why, do=do)
