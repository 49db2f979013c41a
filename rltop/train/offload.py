"""The trainer's memory, given back to the device between its turns and taken again: `--offload-train`.

What lies on the device is moved storage by storage into a backing and the storage is emptied, so every tensor, view and
optimizer state keeps its identity and finds its bits again after `wake_up`. On a GPU the backing is pinned host memory
and the storage shrinks to nothing. On a CPU "host memory" and "device memory" are the same bytes, so a file in the
run's directory stands in for the host, and the storage's pages are given back to the system: the resident size of the
trainer really falls and grows.

Failure policy: a storage is emptied only after its copy is whole; what fails before that (a full disk, no host memory)
raises `RltopError` and the trainer goes on with everything where it was.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import Tensor

from rltop.errors import RltopError

Part = Literal["weights", "gradients", "rest"]
"""`weights`: the model's parameters and buffers. `gradients`: need no copy, the next step zeroes them. `rest`:
optimizer state, master weights, the reference model."""
PARTS: tuple[Part, ...] = ("gradients", "rest", "weights")


@dataclass(frozen=True, slots=True)
class Held:
    """A storage whose bytes are in the backing."""

    storage: torch.UntypedStorage
    size: int
    backing: Tensor | Path | None
    """Host memory, a file, or nothing where the bytes need not be kept."""


@dataclass(slots=True)
class Offload:
    """What of the trainer is asleep. `tensors` is asked anew at every sleep: optimizers make their state late."""

    tensors: Callable[[], Mapping[Part, Iterable[Tensor]]]
    device: torch.device
    directory: Path
    """Where a CPU trainer's files go; made when it is needed."""
    _asleep: dict[Part, list[Held]] = field(default_factory=dict)

    def asleep(self, part: Part) -> bool:
        """Whether this part is in the backing."""
        return part in self._asleep

    def sleep(self, parts: Iterable[Part]) -> None:
        """Move these parts away. A part that is asleep stays so. Raises RltopError, with all of this part awake."""
        found = self._storages()
        for part in [part for part in PARTS if part in set(parts) and part not in self._asleep]:
            self._asleep[part] = self._moved(part, found[part])
        self._let_go()

    def wake_up(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring these parts back, bit for bit. Raises what torch raises where the device has no room."""
        for part in [part for part in reversed(PARTS) if part in set(parts)]:
            for held in self._asleep.get(part, []):
                if self.device.type != "cpu":
                    held.storage.resize_(held.size)
                flat = torch.tensor([], dtype=torch.uint8, device=self.device).set_(held.storage)
                match held.backing:
                    case None:
                        flat.zero_()
                    case Path() as path:
                        flat.copy_(torch.from_file(str(path), shared=False, size=held.size, dtype=torch.uint8))
                        path.unlink()
                    case Tensor() as host:
                        flat.copy_(host)
            self._asleep.pop(part, None)

    def _storages(self) -> dict[Part, list[torch.UntypedStorage]]:
        """Each storage once, for the first part that has it in the order weights, gradients, rest."""
        tensors, seen = self.tensors(), set[int]()
        found: dict[Part, list[torch.UntypedStorage]] = {part: [] for part in PARTS}
        for part in ("weights", "gradients", "rest"):
            for tensor in tensors.get(part, ()):
                storage = tensor.untyped_storage()
                # Of another device (a step counter on the CPU), empty, or asleep: nothing to move.
                if tensor.device.type == self.device.type and storage.size() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[part].append(storage)
        return found

    def _moved(self, part: Part, storages: list[torch.UntypedStorage]) -> list[Held]:
        copies: list[Held] = []
        try:
            for at, storage in enumerate(storages):
                copies.append(
                    Held(storage, storage.size(), self._copy(storage, f"{part}-{at}") if part != "gradients" else None)
                )
        except (OSError, RuntimeError) as error:
            for held in copies:
                if isinstance(held.backing, Path):
                    held.backing.unlink(missing_ok=True)
            raise RltopError(
                "the trainer cannot be offloaded",
                where=str(self.directory) if self.device.type == "cpu" else "host memory",
                why=f"{type(error).__name__}: {error}",
                do="room for a copy of weights and optimizer state there, or --no-offload-train",
                exit_code=1,
            ) from error
        for held in copies:
            if self.device.type == "cpu":
                _give_pages_back(held.storage)
            else:
                held.storage.resize_(0)
        return copies

    def _copy(self, storage: torch.UntypedStorage, name: str) -> Tensor | Path:
        flat = torch.tensor([], dtype=torch.uint8, device=self.device).set_(storage)
        if self.device.type != "cpu":
            return torch.empty(storage.size(), dtype=torch.uint8, pin_memory=True).copy_(flat)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        flat.numpy().tofile(path)
        return path

    def _let_go(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        elif sys.platform.startswith("linux"):
            # glibc keeps freed blocks below its threshold; without this the resident size stays.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


def _give_pages_back(storage: torch.UntypedStorage) -> None:
    """Drop the whole pages inside it. Its addresses stay, for a storage that numpy has seen cannot shrink."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def memory_now(device: torch.device) -> dict[str, float | str]:
    """slime's `Memory-Usage` fields, GiB. On a CPU the machine's memory stands for the device's, and this process's
    resident size for what it allocated."""
    host = psutil.virtual_memory()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own, kept = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        name = str(device.index or 0)
    else:
        free, total = host.available, host.total
        own = kept = psutil.Process().memory_info().rss
        name = "cpu"
    sizes = {
        "total_GB": total,
        "free_GB": free,
        "used_GB": total - free,
        "allocated_GB": own,
        "reserved_GB": kept,
        "host_total_GB": host.total,
        "host_available_GB": host.available,
        "host_used_GB": host.used,
        "host_free_GB": host.free,
    }
    return {"gpu": name} | {key: round(size / 2**30, 3) for key, size in sizes.items()}
