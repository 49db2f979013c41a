"""Planted faults: `rltop train --inject NAME[@ROLLOUT]` breaks the run on purpose, to see the checks find it.

A fault does what its description says and nothing else, and the run's record names it, so that nobody takes a rehearsal
for an accident. Who applies it: the backend (`reference`, `loss`, `gradient`), the loop (`prompt`, `sync`), the swap of
memory (`swap`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rltop.errors import RltopError

Where = Literal["reference", "prompt", "gradient", "loss", "sync", "swap"]

REF_NOISE_STD = 1e-2
"""Standard deviation of the noise of `ref-perturb`: far above any rounding, too small to see in the text."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """An entry of the catalogue."""

    name: str
    where: Where
    default_rollout: int
    lasting: bool
    """From its rollout to the end of the run; otherwise in that rollout only."""
    text: str


_KINDS = (
    FaultKind("ref-perturb", "reference", 0, True, "reference weights + normal noise of standard deviation 1e-2"),
    FaultKind("no-template", "prompt", 0, True, "prompts are built without the chat template"),
    FaultKind("nan-grad", "gradient", 1, False, "one element of the gradient is NaN, once"),
    FaultKind("loss-sum", "loss", 0, True, "the loss is summed over tokens and not divided by their count"),
    FaultKind(
        "swap-layers", "sync", 0, False, "the first and the last layer change places in the pushed weights, once"
    ),
    FaultKind(
        "pp-layer-ids", "sync", 0, False, "the second pipeline stage pushes its layers under its local layer ids, once"
    ),
    FaultKind("zero-norm", "sync", 0, False, "one norm (of a mixture of experts: one router) is pushed as zeros, once"),
    FaultKind("nan-block", "sync", 0, False, "a block of one weight is pushed as NaN, once"),
    FaultKind("wrong-shape", "sync", 0, False, "one weight is pushed without its last row, once"),
    FaultKind("stale-tensor", "sync", 1, False, "one weight is pushed as it was in the version before, once"),
    FaultKind("lost-rotary", "sync", 0, False, "every engine loses its rotary tables in the update (CPU engine only)"),
    FaultKind(
        "late-release",
        "swap",
        1,
        False,
        "one engine is not released when the trainer wakes up (with --offload-rollout)",
    ),
    FaultKind(
        "no-update-after-resume",
        "swap",
        0,
        False,
        "one engine is released and resumed after the weight update (with --offload-rollout): it has no weights",
    ),
)
START = -1
"""The rollout of faults of the sync that comes before rollout 0 (`--check-weight-update-equal`)."""
CATALOGUE = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault of this run. For `sync` faults the rollout is the one after whose step the weights are pushed."""

    kind: FaultKind
    rollout: int

    @property
    def name(self) -> str:
        return self.kind.name

    def active(self, rollout: int) -> bool:
        """Whether it acts in this rollout."""
        return rollout >= self.rollout if self.kind.lasting else rollout == self.rollout

    @property
    def at_start(self) -> bool:
        """It acts in the sync before rollout 0."""
        return self.rollout == START

    def __str__(self) -> str:
        return f"{self.name}@{'start' if self.rollout == START else self.rollout}"


def parse_fault(text: str) -> Fault:
    """`NAME`, `NAME@ROLLOUT`, or `NAME@start` for a fault of the sync before the first rollout.

    Raises `RltopError` that lists the catalogue, or says that a fault cannot act then.
    """
    match = re.fullmatch(r"([a-z-]+)(?:@(\d+|start))?", text)
    kind = CATALOGUE.get(match[1]) if match else None
    if match is None or kind is None:
        raise RltopError(
            f"unknown fault {text!r}",
            where="--inject",
            why="faults: " + "; ".join(f"{kind.name}: {kind.text}" for kind in _KINDS),
            do="NAME or NAME@ROLLOUT, for example nan-grad@1",
        )
    if match[2] == "start":
        if kind.where != "sync" or kind.name == "stale-tensor":
            why = "nothing was pushed before" if kind.where == "sync" else "it is no fault of the sync"
            raise RltopError(f"{kind.name} cannot act at the start", where=f"--inject {text}", why=why)
        return Fault(kind, START)
    rollout = int(match[2]) if match[2] else kind.default_rollout
    if kind.where == "reference" and rollout:
        raise RltopError(
            f"{kind.name} cannot wait for rollout {rollout}",
            where="--inject",
            why="it acts when the reference is taken, before rollout 0",
            do=f"--inject {kind.name}",
        )
    return Fault(kind, rollout)


def active(faults: Sequence[Fault], name: str, rollout: int) -> bool:
    """Whether the fault `name` is among `faults` and acts in this rollout."""
    if name not in CATALOGUE:
        raise KeyError(name)
    return any(fault.name == name and fault.active(rollout) for fault in faults)


def perturb(weights: Iterable[torch.Tensor], *, seed: int, std: float = REF_NOISE_STD) -> None:
    """Add normal noise to the tensors, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights:
        tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * std)


def poison(gradients: Iterable[torch.Tensor]) -> None:
    """Make the first element of the first gradient NaN, in place."""
    for gradient in gradients:
        gradient.view(-1)[0] = float("nan")
        return


def swap_layers(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The `(Hugging Face name, tensor)` stream of a weight push with the first and the last layer exchanged.

    Names, order, shapes and the checksum over all tensors stay plausible; only the assignment is wrong. That is what a
    real conversion fault looks like. A model of one layer comes out as it went in.
    """
    stream = list(tensors)
    layer = re.compile(r"(model\.layers\.)(\d+)(\..+)")
    by_name = dict(stream)
    numbers = [int(found[2]) for name in by_name if (found := layer.fullmatch(name))]
    if not numbers:
        raise RltopError(
            "no layers in the pushed tensors", where="swap-layers", why="no name starts with model.layers."
        )
    other = {min(numbers): max(numbers), max(numbers): min(numbers)}
    for name, tensor in stream:
        found = layer.fullmatch(name)
        if found and int(found[2]) in other:
            yield name, by_name[f"{found[1]}{other[int(found[2])]}{found[3]}"]
        else:
            yield name, tensor


def local_layer_ids(stages: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The pushed weights, one dict per pipeline stage, with the second stage's layers counted from 0.

    That is what a name map does that forgets the stage's offset: these layers land on the first stage's, and the
    engine keeps the old weights of their own. Raises `RltopError` if there is no second stage.
    """
    if len(stages) < 2:
        raise RltopError("no second pipeline stage", where="pp-layer-ids", why=f"{len(stages)} stage in this push")
    layer = re.compile(r"(model\.layers\.)(\d+)(\..+)")
    found = {name: match for name in stages[1] if (match := layer.fullmatch(name))}
    first = min((int(match[2]) for match in found.values()), default=0)

    def local(name: str) -> str:
        match = found.get(name)
        return f"{match[1]}{int(match[2]) - first}{match[3]}" if match else name

    wrong = {local(name): tensor for name, tensor in stages[1].items()}
    return [dict(stages[0]), wrong, *(dict(stage) for stage in stages[2:])]


BENT = ("zero-norm", "nan-block", "wrong-shape", "stale-tensor")
"""Faults that bend one tensor of the pushed weights: see `bend`."""
NAN_BLOCK = 4
"""Rows and columns of the block."""
_BENT_TAILS = {
    "zero-norm": (".mlp.gate.weight", ".input_layernorm.weight"),
    "nan-block": (".mlp.down_proj.weight",),
    "wrong-shape": (".self_attn.o_proj.weight",),
    "stale-tensor": (".self_attn.k_proj.weight",),
}
"""Ends of the names of the tensors that a fault may bend; the first that the model has."""

Stages = Sequence[Mapping[str, torch.Tensor]]


def bent_tensor(fault: str, stages: Stages) -> str:
    """The tensor that a fault of `BENT` bends: the last layer's, so that no name map that only knows layer 0 is right
    by accident. Raises `RltopError` if the model has none such."""
    names = [name for stage in stages for name in stage]
    for tail in _BENT_TAILS[fault]:
        layers = [(int(name.split(".")[2]), name) for name in names if name.endswith(tail) and ".layers." in name]
        if layers:
            return max(layers)[1]
    raise RltopError("the model has no tensor for this fault", where=f"--inject {fault}", why=str(_BENT_TAILS[fault]))


def bend(fault: str, stages: Stages, before: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The pushed weights with one tensor bent. before: what `remembered` kept of the version before."""
    chosen = bent_tensor(fault, stages)

    def bent(tensor: torch.Tensor) -> torch.Tensor:
        match fault:
            case "zero-norm":
                return torch.zeros_like(tensor)
            case "wrong-shape":
                return tensor[:-1].clone()
            case "stale-tensor":
                if chosen not in before:
                    raise RltopError("nothing was pushed before", where="--inject stale-tensor", exit_code=1)
                return before[chosen]
        tensor = tensor.clone()
        tensor[:NAN_BLOCK, :NAN_BLOCK] = float("nan")
        return tensor

    return [{name: bent(tensor) if name == chosen else tensor for name, tensor in stage.items()} for stage in stages]


def remembered(stages: Stages) -> dict[str, torch.Tensor]:
    """A copy of the tensor that `stale-tensor` pushes once more."""
    chosen = bent_tensor("stale-tensor", stages)
    return {name: stage[name].detach().clone() for stage in stages for name in stage if name == chosen}
