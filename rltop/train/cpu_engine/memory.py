"""Memory that can be given back to the system and taken again at the same addresses: SGLang's memory saver on a CPU.

On a GPU `torch_memory_saver` unmaps the physical pages behind tensors whose addresses stay. Here an anonymous mapping
does the same with `madvise(MADV_DONTNEED)`: its pages go (the process's resident size falls), its tensors stay, and
after a resume they hold zeros. What was in them is not restored, here as there.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

ALIGNMENT = 64
"""As torch's own allocator: vectorised loops then take the same path, bit for bit."""


class Arena:
    """So many bytes, handed out once each as tensors of zeros."""

    def __init__(self, size: int) -> None:
        """size: bytes; taken at once."""
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self.released = False
        self._fill()

    @property
    def gigabytes(self) -> float:
        """Its size, GiB."""
        return len(self._map) / 2**30

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor | None:
        """A tensor in it; None when it has no room left."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if start + size > len(self._map):
            return None
        self._used = start + size
        return self._bytes[start : start + size].view(dtype).view(shape)

    def empty(self) -> None:
        """Hand everything out again, as zeros. Nobody may use what was handed out before."""
        self._used = 0
        if not self.released:
            self._bytes.zero_()

    def release(self) -> None:
        """Give the pages back to the system. Until `resume` nobody may look at its tensors."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self.released = True

    def resume(self) -> None:
        """Take the pages again; all its tensors hold zeros."""
        if self.released:
            self._fill()
            self.released = False

    def _fill(self) -> None:
        """Every page is touched: untouched ones would only be taken when somebody writes."""
        self._bytes.zero_()


def size_of(tensors: list[Tensor]) -> int:
    """Bytes of an arena that holds these tensors."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
