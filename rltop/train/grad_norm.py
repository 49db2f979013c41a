"""slime's `--ci-save-grad-norm` and `--ci-load-grad-norm`: one file per step, a float by `torch.save`."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

from rltop.errors import RltopError
from rltop.train.dump import Dumped, write_dump

ROLE = "actor"
"""slime's word for the model that is trained."""
RELATIVE = ABSOLUTE = 0.01
"""slime's tolerance: `math.isclose(rel_tol=0.01, abs_tol=0.01)`."""


def grad_norm_path(pattern: str, rollout_id: int, step_id: int) -> Path:
    """The file of a step."""
    return Path(pattern.format(rollout_id=rollout_id, step_id=step_id, role=ROLE))


def save_grad_norm(pattern: str, rollout_id: int, step_id: int, grad_norm: float) -> Dumped:
    """Keep it for a later run."""
    return write_dump(grad_norm_path(pattern, rollout_id, step_id), grad_norm)


def compare_grad_norm(pattern: str, rollout_id: int, step_id: int, grad_norm: float) -> None:
    """Raise RltopError: exit code 1 for another one than was saved, 2 where there is nothing to compare with."""
    import torch

    path = grad_norm_path(pattern, rollout_id, step_id)
    where = f"--ci-load-grad-norm {path}"
    try:
        saved = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise RltopError(
            "no grad_norm to compare with",
            where=where,
            why="there is no file",
            do="--ci-save-grad-norm of a run before",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise RltopError(
            "not a saved grad_norm", where=where, why=(str(error) or type(error).__name__)[:200]
        ) from error
    if isinstance(saved, torch.Tensor) and saved.numel() == 1:
        saved = saved.item()
    if not isinstance(saved, int | float):
        raise RltopError("not a saved grad_norm", where=where, why=f"it holds a {type(saved).__name__}")
    if not math.isclose(grad_norm, saved, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
        raise RltopError(
            "another grad_norm than was saved",
            where=f"rollout {rollout_id}, step {step_id}",
            why=f"{grad_norm:.9g} here, {saved:.9g} in {path}: they differ by more than 1 % and 0.01",
            do="same samples, same weights, same arguments? then it is the parallel sizes, or the code",
            exit_code=1,
        )
