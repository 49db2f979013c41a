"""`raw_tensors.gpu_digest` on a GPU: the same 32-bit arithmetic with torch, for a trainer that has one.

A model of half a billion parameters takes a numpy thread most of a minute and a GPU a fraction of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

SMALLEST_BYTES = 1 << 20
"""Below, the way to the GPU costs more than the work."""


def torch_with_cuda() -> Any:
    """The torch of this process if it has a GPU; None else. Never imports it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def tile_sums(
    torch: Any,
    data: bytearray,
    device: str,
    *,
    tile: int,
    seeds: Sequence[int],
    factors: Sequence[int],
    turns: Sequence[int],
) -> list[list[int]]:
    """Per seed the sums of all tiles, modulo 2^32. data: little-endian 32-bit words."""
    words = torch.frombuffer(data, dtype=torch.int32).to(device)
    at = torch.arange(len(words), dtype=torch.int32, device=device)
    whole = len(words) // tile * tile
    found = []
    for seed, factor, turn in zip(seeds, factors, turns, strict=True):
        turned = (at << turn) | _shifted(at, 32 - turn)
        mixed = _mixed(words ^ ((at * _signed(factor) + _signed(seed)) ^ turned))
        sums = (mixed[:whole].view(-1, tile).to(torch.int64) & 0xFFFFFFFF).sum(dim=1) & 0xFFFFFFFF
        told: list[int] = sums.tolist()
        if whole < len(words):
            told.append(int((mixed[whole:].to(torch.int64) & 0xFFFFFFFF).sum()) & 0xFFFFFFFF)
        found.append(told)
    return found


def _mixed(x: Any) -> Any:
    """Murmur3's finaliser; products of int32 wrap as those of uint32 do."""
    x = x ^ _shifted(x, 16)
    x = x * _signed(0x85EBCA6B)
    x = x ^ _shifted(x, 13)
    x = x * _signed(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def _shifted(x: Any, by: int) -> Any:
    """To the right, with zeros coming in: torch's own shift of a signed number brings its sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
