"""Runs prompts, each distinct one once, and remembers the latest: the engine's prefix cache.

SGLang shares any common prefix; this cache knows whole prompts only, which is what the samples of one group share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from rltop.train.cpu_engine.model import Prefill, Qwen3, Weights
from rltop.train.cpu_engine.request import Sample

Key = tuple[int, ...]


class Prompts:
    """Prefills for samples, from memory where possible. Forgets the least recently used beyond `capacity` positions."""

    __slots__ = ("_cache", "_capacity", "_model", "_positions", "passes")

    def __init__(self, model: Qwen3, *, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self._cache: OrderedDict[Key, Prefill] = OrderedDict()
        self._positions = 0
        self.passes = 0
        """Forward passes so far."""

    def run(self, weights: Weights, samples: Sequence[Sample]) -> tuple[int, list[Prefill]]:
        """The tokens that were not computed again, and each sample's prefill; sets `cached_tokens` of the samples.

        A sample that comes back after a retraction brings the tokens it already has.
        """
        keys = [tuple(sample.prompt + sample.output) for sample in samples]
        # Prompt log-probs need the logits of every position, which the cache does not keep.
        whole = {key for sample, key in zip(samples, keys, strict=True) if sample.wishes.start >= 0}
        found: dict[Key, Prefill] = {}
        missing: dict[int, dict[Key, None]] = {}
        saved = 0
        for sample, key in zip(samples, keys, strict=True):
            same_length = missing.setdefault(len(key), {})
            if key in self._cache and key not in whole:
                self._cache.move_to_end(key)
                found[key] = self._cache[key]
            elif key not in same_length:
                same_length[key] = None
                continue
            sample.cached_tokens = len(key) - 1
            saved += len(key) - 1
        for same_length in missing.values():
            found |= self._compute(weights, list(same_length))
        return saved, [found[key] for key in keys]

    def _compute(self, weights: Weights, keys: list[Key]) -> dict[Key, Prefill]:
        """Prompts of one length."""
        found: dict[Key, Prefill] = {}
        at_once = self._model.prompts_per_prefill
        for start in range(0, len(keys), at_once):
            chunk = keys[start : start + at_once]
            self.passes += 1
            found |= zip(chunk, self._model.prefill(weights, torch.tensor(chunk)), strict=True)
        for key, prefill in found.items():
            self._remember(key, prefill)
        return found

    def _remember(self, key: Key, prefill: Prefill) -> None:
        if key in self._cache or len(key) > self._capacity:
            return
        # Copies, so that one prompt does not keep the whole call's tensors alive; the last logits are enough.
        self._cache[key] = Prefill(prefill.keys.clone(), prefill.values.clone(), prefill.logits[-1:].clone())
        self._positions += len(key)
        while self._positions > self._capacity:
            oldest, _ = self._cache.popitem(last=False)
            self._positions -= len(oldest)

    def forget(self) -> None:
        """Drop everything: the weights changed."""
        self._cache.clear()
        self._positions = 0
