"""The weights that the engine serves now: loading, updating, releasing, and SGLang's weights checker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltop.engines.weights import digest_tensors, overall_digest
from rltop.train.cpu_engine.checkpoint import ModelConfig, check_tensors, read_weights
from rltop.train.cpu_engine.model import Weights, pack_weights


class LiveWeights:
    """Named tensors under Hugging Face names, the packed form that the forward pass reads, and the version label.

    Only the scheduler's thread may call anything that changes it.
    """

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], version: str) -> None:
        self.config = config
        self.version = version
        self.tensors = tensors
        self.packed: Weights = pack_weights(config, tensors)
        self._snapshot: dict[str, Tensor] | None = None

    @property
    def gigabytes(self) -> float:
        """Size of the weights, GiB."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) / 2**30

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace some or all tensors. All are checked before the first changes. Raises `RltopError`."""
        self._replace(check_tensors(named, self.config.expected_shapes(), where="weight update"))

    def load_directory(self, directory: Path) -> None:
        """Replace the tensors that a checkpoint directory holds. Raises `RltopError`; then nothing has changed.

        A tensor that the directory lacks keeps its old value, as in SGLang, whose loaders go by what they are given.
        Only the start wants a complete checkpoint.
        """
        self._replace(read_weights(directory, self.config, complete=False))

    def zero(self) -> None:
        """What is left of the weights when their memory was released and given back: nothing."""
        self._replace({name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()})

    def _replace(self, changed: dict[str, Tensor]) -> None:
        self.tensors = self.tensors | changed
        self.packed = pack_weights(self.config, self.tensors)

    def check(self, action: str) -> tuple[bool, dict[str, Any]]:
        """`/weights_checker`: success and the body. `reset_tensors` destroys the weights, on purpose."""
        match action:
            case "snapshot":
                self._snapshot = {name: tensor.clone() for name, tensor in self.tensors.items()}
            case "reset_tensors":
                generator = torch.Generator().manual_seed(0)
                self._replace({name: torch.rand(t.shape, generator=generator) for name, t in self.tensors.items()})
            case "compare":
                return self._compare()
            case "checksum":
                digests = digest_tensors(self.tensors.items())
                rank: dict[str, Any] = {"checksums": digests, "per_gpu_checksum": overall_digest(digests)}
                rank["parallelism_info"] = _one_rank()
                whole = hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()
                body = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}
                return True, body
            case _:
                return False, {"success": False, "message": f"Unsupported action={action!r}"}
        return True, {"success": True, "message": "Success."}

    def _compare(self) -> tuple[bool, dict[str, Any]]:
        if self._snapshot is None:
            return False, {"success": False, "message": "compare needs a snapshot first"}
        lines = []
        for name, tensor in self.tensors.items():
            gap = (tensor - self._snapshot[name]).abs()
            if gap.max() != 0 or not torch.equal(tensor, self._snapshot[name]):
                lines.append(f"name={name} max_abs_err={gap.max().item()} mean_abs_err={gap.mean().item()}")
        if lines:
            return False, {"success": False, "message": "\n".join(["check tensor equality failed:", *lines])}
        return True, {"success": True, "message": "Success."}


def _one_rank() -> list[dict[str, Any]]:
    sizes = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    return [{"role": "target", **sizes, "rank": 0, "size": 1}]
