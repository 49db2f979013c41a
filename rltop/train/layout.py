"""How the ranks of a trainer split the work: tensor, pipeline and data parallel. Pure arithmetic, needs no torch.

Ranks are numbered in Megatron's default order `tp-cp-ep-dp-pp`: neighbours share a layer (tensor parallel), then come
the replicas (data parallel), then the stages (pipeline parallel). Context and expert parallel sizes are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rltop.errors import RltopError


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the three splits; their product is the number of ranks."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.data

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Place(self, rank, tensor, pipeline, data)

    def ranks(self, *, pipeline: int, data: int) -> list[int]:
        """The ranks that hold the shards of one stage of one replica, in the order of the shards."""
        first = self.tensor * (data + self.data * pipeline)
        return list(range(first, first + self.tensor))

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline} DP{self.data}"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank in its layout."""

    layout: Layout
    rank: int
    tensor: int
    """Position among the shards of a layer."""
    pipeline: int
    """Stage."""
    data: int
    """Replica."""

    @property
    def first_stage(self) -> bool:
        """Has the embedding."""
        return self.pipeline == 0

    @property
    def last_stage(self) -> bool:
        """Has the output layer, so it alone sees log-probs and losses."""
        return self.pipeline == self.layout.pipeline - 1

    @property
    def sends_weights(self) -> bool:
        """One replica is enough for a weight sync."""
        return self.data == 0

    def __str__(self) -> str:
        """Megatron's words, counted from 1."""
        return f"[ t {self.tensor + 1}/{self.layout.tensor}, p {self.pipeline + 1}/{self.layout.pipeline} ]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Divisible:
    """What of a model must divide among ranks."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


def check_layout(layout: Layout, model: Divisible, *, where: str) -> None:
    """Raise RltopError for the first size of the model that the layout does not divide.

    where: what the numbers were read from. The vocabulary is padded to the tensor parallel size, so it always divides.
    """
    if model.num_layers % layout.pipeline:
        raise RltopError(
            "layers do not divide among pipeline stages",
            where="--pipeline-model-parallel-size",
            why=f"{model.num_layers} layers ({where}) / {layout.pipeline} stages leaves "
            f"{model.num_layers % layout.pipeline} over",
            do=f"--pipeline-model-parallel-size {_largest_divisor(layout.pipeline, [model.num_layers])}",
        )
    parts = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "MLP rows": model.intermediate_size,
    }
    for what, count in parts.items():
        if count % layout.tensor:
            raise RltopError(
                f"{what} do not divide among tensor parallel ranks",
                where="--tensor-model-parallel-size",
                why=f"{count} {what} ({where}) / {layout.tensor} ranks leaves {count % layout.tensor} over",
                do=f"--tensor-model-parallel-size {_largest_divisor(layout.tensor, list(parts.values()))}",
            )


def _largest_divisor(limit: int, counts: Sequence[int]) -> int:
    return max(n for n in range(1, limit + 1) if all(count % n == 0 for count in counts))


def balanced(lengths: Sequence[int], replicas: int, *, step_samples: int | None = None) -> list[tuple[int, ...]]:
    """Sample indices per replica, ascending: the same number of samples everywhere, and about the same tokens.

    The longest sample first, each to the replica with the fewest tokens that has room (ties: the lower index, the lower
    replica), within every optimizer step of `step_samples` by itself. It is a function of the lengths alone, so every
    rank computes it for itself, and the log-prob passes split a rollout as its steps do. One replica gets everything.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    step = step_samples or max(len(lengths), 1)
    for start in range(0, len(lengths), step):
        indices = range(start, min(start + step, len(lengths)))
        tokens, counts = [0] * replicas, [0] * replicas
        room = -(-len(indices) // replicas)
        for index in sorted(indices, key=lambda index: -lengths[index]):
            at = min((r for r in range(replicas) if counts[r] < room), key=lambda r: (tokens[r], r))
            shares[at].append(index)
            tokens[at] += lengths[index]
            counts[at] += 1
    return [tuple(sorted(share)) for share in shares]
