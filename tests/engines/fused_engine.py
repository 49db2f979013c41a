"""What SGLang's weights checker would answer about tensors that it was given: fused, sharded, cast, hashed as on a GPU.

An independent model of the layout, in torch, for tests of the code that works on bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from rltop.engines.raw_tensors import HASHES, HashKind, raw_of


def parameters(tensors: Mapping[str, Tensor], *, tp: int = 1, rank: int = 0, kv_heads: int = 2) -> dict[str, Tensor]:
    """One rank's parameters, as `QKVParallelLinear` and its relatives make them."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp)[rank]

    def heads(tensor: Tensor) -> Tensor:
        if tp <= kv_heads:
            return rows(tensor)
        return tensor.chunk(kv_heads)[rank * kv_heads // tp]

    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            k, v = (tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([rows(tensor), heads(k), heads(v)])
        elif ".experts." in name:
            head, _, _ = name.partition(".experts.")
            count = len({other.split(".experts.")[1].split(".")[0] for other in tensors if head + ".experts." in other})
            of = [
                {part: tensors[f"{head}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
                for e in range(count)
            ]
            found[head + ".experts.w13_weight"] = torch.stack([torch.cat([rows(e["gate"]), rows(e["up"])]) for e in of])
            found[head + ".experts.w2_weight"] = torch.stack([e["down"].chunk(tp, dim=1)[rank] for e in of])
        elif ".gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([rows(tensor), rows(up)])
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            unit = 64 if -(-tensor.shape[0] // 64) * 64 % tp == 0 else 64 * tp
            found[name] = rows(functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % unit)))
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif not any(f".{part}_proj." in name for part in ("k", "v", "up")):
            found[name] = tensor
    return found


@dataclass
class FusedEngine(httpx.BaseTransport):
    """A server that holds these tensors. It answers what `rltop weights diff` asks, and nothing else."""

    tensors: dict[str, Tensor]
    tp: int = 1
    kv_heads: int = 2
    hash: HashKind = "gpu"
    dtype: torch.dtype = torch.bfloat16
    server: dict[str, Any] = field(default_factory=dict)
    samples: bool = False
    """Its model class has get_weights_by_name."""
    compares: bool = True
    """Its checker can compare: it is on a GPU."""
    log_probs: list[float] | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    model_path: str = "/elsewhere/model"
    version: str = "7"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.read() or b"{}")
        self.asked.append((request.url.path, body))
        status, answer = self._answer(request.url.path, body)
        return httpx.Response(status, content=msgspec.json.encode(answer))

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path, body.get("action"):
            case "/model_info", _:
                return 200, {"model_path": self.model_path, "weight_version": self.version}
            case "/server_info", _:
                return 200, {"version": "0.5.14", "dtype": "auto", "quantization": None} | self.server
            case "/weights_checker", "checksum":
                return 200, {"success": True, "message": "Success.", "ranks": [self._rank(at) for at in range(self.tp)]}
            case "/weights_checker", "snapshot":
                return 200, {"success": True, "message": "Success."}
            case "/weights_checker", "compare":
                return self._compare()
            case "/get_weights_by_name", _ if self.samples and body["name"] in self.tensors:
                return 200, self.tensors[body["name"]].float()[: body["truncate_size"]].tolist()
            case "/generate", _ if self.log_probs is not None:
                triples = [[None, 1, None], *([value, 1, None] for value in self.log_probs)]
                return 200, {"meta_info": {"input_token_logprobs": triples}}
        return 400, {"error": {"message": "Get parameter by name failed"}}

    def _held(self, rank: int) -> dict[str, Tensor]:
        held = parameters(self.tensors, tp=self.tp, rank=rank, kv_heads=self.kv_heads)
        return {name: tensor.to(self.dtype) for name, tensor in held.items()}

    def _rank(self, rank: int) -> dict[str, Any]:
        digests = {name: HASHES[self.hash]([raw_of(tensor).data]) for name, tensor in self._held(rank).items()}
        place = {"tp_rank": rank, "tp_size": self.tp, "dp_rank": 0, "pp_rank": 0}
        return {"checksums": digests, "per_gpu_checksum": "x", "parallelism_info": place}

    def _compare(self) -> tuple[int, Any]:
        """With its own snapshot: what holds NaN differs from itself."""
        if not self.compares:
            return 400, {"success": False, "message": "Torch not compiled with CUDA enabled"}
        held = self._held(0)
        bad = [name for name, tensor in held.items() if bool((tensor != tensor).any())]
        if not bad:
            return 200, {"success": True, "message": "Success."}
        lines = [f"name={name} max_abs_err=nan mean_abs_err=nan " for name in bad]
        return 400, {"success": False, "message": "\n".join(["check tensor equality failed:", *lines])}
