"""The weights that the engine serves now: loading, updating, releasing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rltop.errors import RltopError
from rltop.train.cpu_engine.checker import WeightChecker
from rltop.train.cpu_engine.checkpoint import ModelConfig, check_tensors, read_weights
from rltop.train.cpu_engine.memory import Arena, size_of
from rltop.train.cpu_engine.model import Layer, Qwen3, Weights, pack_weights


class LiveWeights:
    """Named tensors under Hugging Face names, the packed form that the forward pass reads, and the version label.

    Only the scheduler's thread may call anything that changes it. With `saver` they live in memory that `release` gives
    back to the system; an update then writes into it.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        version: str,
        *,
        saver: bool = False,
        model: Qwen3 | None = None,
        modern: bool = True,
    ) -> None:
        """model: whose rotary tables count as buffers. modern: the checker answers as 0.5.23's, not as 0.5.14's."""
        self.config = config
        self.version = version
        self.tensors = tensors
        self.packed: Weights = pack_weights(config, tensors)
        self._model = model
        self._checker = WeightChecker(self, modern=modern)
        self._arena: Arena | None = None
        if saver:
            self._move_in()

    @property
    def gigabytes(self) -> float:
        """Size of the weights, GiB."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) / 2**30

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace some or all tensors. All are checked before the first changes. Raises `RltopError`."""
        self.replace(check_tensors(named, self.config.expected_shapes(), where="weight update"))

    def load_directory(self, directory: Path) -> None:
        """Replace the tensors that a checkpoint directory holds. Raises `RltopError`; then nothing has changed.

        A tensor that the directory lacks keeps its old value, as in SGLang, whose loaders go by what they are given.
        Only the start wants a complete checkpoint.
        """
        self.replace(read_weights(directory, self.config, complete=False))

    @property
    def released(self) -> bool:
        """Their memory is not there."""
        return self._arena is not None and self._arena.released

    def release(self) -> bool:
        """Give their memory back, where it can be. Returns whether it was."""
        if self._arena is None:
            return False
        self._arena.release()
        return True

    def resume(self) -> bool:
        """Take the memory again, full of zeros. Returns whether weights were lost."""
        if self._arena is None or not self._arena.released:
            return False
        self._arena.resume()
        return True

    def _move_in(self) -> None:
        """Copy everything into an arena; the arrays that the packed form shares with the named tensors stay shared."""
        own = list(self.tensors.values())
        shared = {tensor.data_ptr() for tensor in own}
        made = [tensor for tensor in _arrays(self.packed) if tensor.data_ptr() not in shared]
        self._arena = arena = Arena(size_of(own) + size_of(made))

        def move(tensor: Tensor) -> Tensor:
            home = arena.zeros(tuple(tensor.shape), tensor.dtype)
            assert home is not None, "the arena is as large as all of them"
            return home.copy_(tensor)

        self.tensors = {name: move(tensor) for name, tensor in self.tensors.items()}
        fresh = pack_weights(self.config, self.tensors)
        homes = {tensor.data_ptr() for tensor in self.tensors.values()}
        self.packed = _mapped(fresh, lambda tensor: tensor if tensor.data_ptr() in homes else move(tensor))

    def replace(self, changed: dict[str, Tensor]) -> None:
        """Take these tensors, which nobody checked. Raises `RltopError` while their memory is released."""
        if self._arena is None:
            self.tensors = self.tensors | changed
            self.packed = pack_weights(self.config, self.tensors)
            return
        if self._arena.released:
            raise RltopError(
                "the weights' memory is released",
                why="real SGLang writes into memory that is not mapped",
                do='/resume_memory_occupation {"tags": ["weights"]} first',
                exit_code=1,
            )
        for name, tensor in changed.items():
            self.tensors[name].copy_(tensor)
        for home, tensor in zip(_arrays(self.packed), _arrays(pack_weights(self.config, self.tensors)), strict=True):
            if home.data_ptr() != tensor.data_ptr():
                home.copy_(tensor)

    def buffers(self) -> Mapping[str, Tensor]:
        """What the model made for itself and no update brings, under SGLang's names."""
        return self._model.buffers() if self._model is not None else {}

    def lose_buffers(self) -> None:
        """Lose what the model made for itself, an injected fault."""
        if self._model is not None:
            self._model.lose_buffers()

    def check(self, action: str, skip: Sequence[str] = ()) -> tuple[bool, dict[str, Any]]:
        """`/weights_checker`: success and the body. `reset_tensors` destroys the weights, on purpose."""
        return self._checker.handle(action, skip)


def _arrays(packed: Weights) -> list[Tensor]:
    """Its tensors, in a fixed order."""
    found: list[Tensor] = []
    _mapped(packed, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _mapped(packed: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    layers = tuple(
        Layer(**{field.name: change(getattr(layer, field.name)) for field in dataclasses.fields(Layer)})
        for layer in packed.layers
    )
    return Weights(change(packed.embedding), layers, change(packed.norm), change(packed.head))
