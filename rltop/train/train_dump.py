"""What the samples of a rollout were trained with, in slime's train dump, version 2.

    {"format_version": 2, "rollout_id", "rank", "samples": [...], "dp_shards": [...], "raw_reward": [...]}

`samples` is in the order of the rollout dump; `rollout_position` is the place there. A shard lists its samples
(`partition`, positions again) in the order in which its data parallel rank went over them, and its micro-batches as
positions in that list, so that what one rank saw can be put together again. One file per rollout: every rank's values
meet at rank 0 anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, float32, full, int32, tensor

from rltop.train.layout import Layout
from rltop.train.ports import StepSample
from rltop.train.sample import Sample

FORMAT_VERSION = 2


@dataclass(slots=True)
class TrainRecord:
    """Collects the optimizer steps of one rollout."""

    layout: Layout
    samples: list[StepSample] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    """Per sample, of the training forward."""
    entropy: list[Tensor] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Samples per step."""
    parts: list[list[list[list[int]]]] = field(default_factory=list)
    """Per data parallel rank, per step: its micro-batches, as positions in the rollout."""

    def __post_init__(self) -> None:
        self.parts = [[] for _ in range(self.layout.data)]

    def add(
        self,
        samples: Sequence[StepSample],
        log_probs: Sequence[Tensor],
        entropy: Sequence[Tensor],
        schedule: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        """One step. schedule: per data parallel rank the micro-batches, as positions in `samples`."""
        first = len(self.samples)
        self.samples += samples
        self.log_probs += log_probs
        self.entropy += entropy
        self.steps.append(len(samples))
        for mine, batches in zip(self.parts, schedule, strict=True):
            mine.append([[first + at for at in batch] for batch in batches])

    def payload(self, rollout_id: int, samples: Sequence[Sample]) -> dict[str, Any]:
        """The content of the file. samples: of the rollout, in its order; those without a step are left out."""
        count = len(self.samples)
        first = rollout_id * len(samples)
        indices = [
            first + sample.index if sample.source_index is None else sample.source_index for sample in samples[:count]
        ]
        replica = {at: data for data, mine in enumerate(self.parts) for at in _order(mine)}
        return {
            "format_version": FORMAT_VERSION,
            "rollout_id": rollout_id,
            "rank": 0,
            "samples": [self._entry(at, samples[at], indices[at], replica[at]) for at in range(count)],
            "dp_shards": [self._shard(data, indices) for data in range(self.layout.data)],
            "raw_reward": [sample.reward for sample in samples],
        }

    def _entry(self, at: int, sample: Sample, index: int, replica: int) -> dict[str, Any]:
        step, length = self.samples[at], self.samples[at].response_length
        mask = step.loss_mask if step.loss_mask is not None else (1,) * length
        entry: dict[str, Any] = {
            "data_parallel_rank": replica,
            "sample_index": index,
            "rollout_position": at,
            "tokens": tensor(step.tokens),
            "response_lengths": length,
            "total_lengths": len(step.tokens),
            "rewards": step.advantage,
            "truncated": int(sample.status == "truncated"),
            "loss_masks": tensor(mask, dtype=int32),
            "rollout_ids": index,
            "rollout_mask_sums": tensor(float(sum(mask)), dtype=float32),
            "log_probs": self.log_probs[at] if step.log_probs is None else tensor(step.log_probs, dtype=float32),
            "advantages": full((length,), step.advantage, dtype=float32),
            "returns": full((length,), step.advantage, dtype=float32),
            "entropy": self.entropy[at],
        }
        for name, values in (("ref_log_probs", step.ref_log_probs), ("rollout_log_probs", step.rollout_log_probs)):
            if values is not None:
                entry[name] = tensor(values, dtype=float32)
        return entry

    def _shard(self, data: int, indices: Sequence[int]) -> dict[str, Any]:
        steps = self.parts[data]
        partition = _order(steps)
        batches: list[list[int]] = []
        seen = 0
        for batch in (batch for step in steps for batch in step):
            batches.append(list(range(seen, seen + len(batch))))
            seen += len(batch)
        return {
            # slime names the rank that wrote the shard's values: the first of the replica's last stage.
            "rank": self.layout.ranks(pipeline=self.layout.pipeline - 1, data=data)[0],
            "data_parallel_rank": data,
            "sample_indices": [indices[at] for at in partition],
            "partition": partition,
            "micro_batch_indices": batches,
            "num_microbatches": [len(step) for step in steps],
            "global_batch_sizes": list(self.steps),
        }


def _order(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [at for step in steps for batch in step for at in batch]
