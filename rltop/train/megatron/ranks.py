"""This process among the trainer's ranks: its process groups, and the few exchanges that the backend needs.

Everything here is collective: all ranks of the group call it, in the same order. A rank that dies leaves the others
waiting inside a collective; nothing here recovers from that. The driver watches every rank and ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from rltop.errors import RltopError
from rltop.train.layout import Place
from rltop.train.megatron.compat import Megatron, quietly

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups that this rank belongs to, by what they split."""

    place: Place
    device: torch.device
    tensor: Any
    pipeline: Any
    data: Any

    def sum_over_replicas(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data parallel ranks, in fp64. The names must be the same everywhere."""
        if self.place.layout.data == 1 or not values:
            return dict(values)
        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        distributed.all_reduce(total, group=self.data)
        sums = dict(zip(names, total.tolist(), strict=True))
        return {name: sums[name] for name in values}

    def from_last_stage(self, value: T) -> T:
        """What the last pipeline stage has; the others' `value` is ignored."""
        if self.place.layout.pipeline == 1:
            return value
        box = [value]
        with quietly("torch"):
            distributed.broadcast_object_list(
                box, group=self.pipeline, group_src=self.place.layout.pipeline - 1, device=self.device
            )
        return box[0]

    def union_of_replicas(self, values: dict[int, T]) -> dict[int, T]:
        """All the replicas' entries."""
        if self.place.layout.data == 1:
            return values
        parts: list[Any] = [None] * self.place.layout.data
        with quietly("torch"):
            distributed.all_gather_object(parts, values, group=self.data)
        return {index: value for part in parts for index, value in part.items()}

    def shards(self, tensor: Tensor) -> list[Tensor]:
        """The tensor parallel ranks' tensors of one shape, in their order."""
        if self.place.layout.tensor == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.place.layout.tensor)]
        distributed.all_gather(parts, tensor.contiguous(), group=self.tensor)
        return parts

    def stages(self, named: Sequence[tuple[str, Tensor]]) -> list[dict[str, Tensor]] | None:
        """On the first stage: what every pipeline stage gave, in the order of the stages. None on the others."""
        if self.place.layout.pipeline == 1:
            return [dict(named)]
        about = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
        lists: list[Any] = [None] * self.place.layout.pipeline
        with quietly("torch"):
            distributed.gather_object(
                about, lists if self.place.first_stage else None, group=self.pipeline, group_dst=0
            )
        if not self.place.first_stage:
            for _, tensor in named:
                distributed.send(tensor.contiguous(), group=self.pipeline, group_dst=0)
            return None
        stages = [dict(named)]
        for stage in range(1, self.place.layout.pipeline):
            received = {
                name: torch.empty(shape, dtype=dtype, device=self.device) for name, shape, dtype in lists[stage]
            }
            for tensor in received.values():
                distributed.recv(tensor, group=self.pipeline, group_src=stage)
            stages.append(received)
        return stages

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.place.layout.world > 1:
            distributed.barrier()


@quietly()
def join_ranks(megatron: Megatron, place: Place, *, seed: int, store: Any = None) -> Ranks:
    """Process groups of all ranks, and the random streams of the model. Safe to call again in the same process.

    store: where the ranks meet (a `torch.distributed.Store`); without one the rank is alone, and the store lives in
    this process (no port, no file), so any number of such trainers share a machine.
    Raises `RltopError` if the process already belongs to another layout.
    """
    device = torch.device("cpu")
    if not megatron.on_cpu:
        device = torch.device("cuda", place.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    layout, state = place.layout, megatron.parallel_state
    if not distributed.is_initialized():
        meeting = store or distributed.HashStore()  # type: ignore[attr-defined]  # missing in the stub
        backend = "gloo" if megatron.on_cpu else "nccl"
        distributed.init_process_group(backend, store=meeting, rank=place.rank, world_size=layout.world)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            create_gloo_process_groups=False,
        )
    found = (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_data_parallel_rank(),
        distributed.get_world_size(),
    )
    if found != (place.tensor, place.pipeline, place.data, layout.world):
        raise RltopError(
            "this process already belongs to another layout",
            where="torch.distributed",
            why=f"it is (tensor, pipeline, data, world) {found}, rank {place.rank} of {layout} is wanted",
        )
    megatron.seed_model_parallel(seed)
    return Ranks(
        place,
        device,
        state.get_tensor_model_parallel_group(),
        state.get_pipeline_model_parallel_group(),
        state.get_data_parallel_group(),
    )
