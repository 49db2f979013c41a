"""SGLang's weights checker over the CPU engine's weights: snapshot, reset_tensors, compare, checksum.

As in `srt/utils/weight_checker.py` of 0.5.14 and 0.5.23, with its gaps, because a tool that relies on it must know:

- it looks at parameters and buffers, but leaves out whatever has a name of `LEFT_OUT`: rotary tables are neither reset
  nor compared nor hashed, so a lost one is not found here;
- values are compared with `==`: two NaN differ, and a tensor with a NaN differs from its own snapshot;
- `compare` without a snapshot is refused with an empty message; 0.5.23 forgets the snapshot once all is equal.

What differs: the CPU engine keeps Hugging Face names (SGLang fuses q, k, v and gate, up) and compares on the CPU, where
a real 0.5.23 answers "Torch not compiled with CUDA enabled".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rltop.engines.weights import digest_tensors, overall_digest

if TYPE_CHECKING:
    from rltop.train.cpu_engine.live_weights import LiveWeights

LEFT_OUT = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
"""Parts of names of buffers that are made by the model and not loaded."""

Answer = tuple[bool, dict[str, Any]]
"""Success, and the body."""


class WeightChecker:
    """Of one engine. Only the scheduler's thread may call it."""

    def __init__(self, live: LiveWeights, *, modern: bool) -> None:
        """modern: as 0.5.23 answers, not as 0.5.14."""
        self._live, self._modern = live, modern
        self._snapshot: dict[str, Tensor] | None = None

    def handle(self, action: str, skip: Sequence[str] = ()) -> Answer:
        """One call. `reset_tensors` destroys the weights, on purpose.

        skip: parts of names that reset, compare and checksum leave out (0.5.23's `skip_tensor_list`).
        """
        left_out = (*LEFT_OUT, *skip) if self._modern else LEFT_OUT
        match action:
            case "snapshot":
                self._snapshot = {name: tensor.clone() for name, tensor in self._state().items()}
            case "reset_tensors":
                chosen = _chosen(self._live.tensors, left_out)
                own = torch.Generator().manual_seed(0)  # the engine's draws do not depend on what was checked
                self._live.replace({name: torch.rand(t.shape, generator=own) for name, t in chosen.items()})
            case "compare":
                return self._compare(left_out)
            case "checksum":
                return True, self._checksum(_chosen(self._state(), left_out))
            case _:
                return _no(f"Unsupported {action=}")
        return True, {"success": True, "message": "Success."}

    def _state(self) -> dict[str, Tensor]:
        return {**self._live.tensors, **self._live.buffers()}

    def _compare(self, left_out: Sequence[str]) -> Answer:
        if self._snapshot is None:
            return _no("")
        lines = []
        for name, now in _chosen(self._state(), left_out).items():
            if not bool(torch.all(now == self._snapshot[name])):
                lines.append(self._line(name, self._snapshot[name], now))
        if lines:
            return _no("\n".join(["check tensor equality failed:", *lines]))
        if self._modern:
            self._snapshot = None
        return True, {"success": True, "message": "Success."}

    def _line(self, name: str, expect: Tensor, actual: Tensor) -> str:
        gap = (actual.float() - expect.float()).abs()
        line = f"name={name} max_abs_err={gap.max().item()} mean_abs_err={gap.mean().item()} "
        if self._modern:
            return line + f"num_exceed={int((~(gap <= 0)).sum())} expect={_raw(expect)} actual={_raw(actual)} "
        return line + f"get_tensor_info(expect)={_info(expect)!r} get_tensor_info(actual)={_info(actual)!r} "

    def _checksum(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        digests = digest_tensors(tensors.items())
        place: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        place |= {"rank": 0, "size": 1}
        rank: dict[str, Any] = {"checksums": digests, "per_gpu_checksum": overall_digest(digests)}
        rank["parallelism_info"] = [{"role": "target", **place}] if self._modern else place
        whole = hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}


def _chosen(tensors: Mapping[str, Tensor], left_out: Sequence[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in left_out)}


def _no(message: str) -> Answer:
    return False, {"success": False, "message": message}


def _raw(tensor: Tensor) -> str:
    return f"raw(shape={tuple(tensor.shape)} dtype={tensor.dtype})"


def _info(tensor: Tensor) -> str:
    values = tensor.float()
    return (
        f"type={type(tensor)} shape={tensor.shape} dtype={tensor.dtype} device={tensor.device} "
        f"stride={tensor.stride()} req_grad=False min={values.min()} max={values.max()} mean={values.mean()} "
        f"x_sample_head={tensor.flatten()[:5]} x_sample_tail={tensor.flatten()[-5:]}"
    )
