"""Tensors as bytes: read from safetensors files without torch, cast as an engine casts them, and hashed as it hashes.

Digests are SGLang's (`tensor_hash` of 0.5.14 and 0.5.23): of a tensor on the CPU the first 64 bits of SHA-256 over its
bytes, of one on a GPU the result of a Triton kernel (`gpu_tensor_hash`, the same numbers in both releases). Neither
knows of names or shapes. SHA-256 and reading need the standard library only; casting and the GPU's hash need numpy.

Failure policy: a file that cannot be read, and a cast that nothing here can do, is an `RltopError` naming it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rltop.engines.torch_hash import SMALLEST_BYTES, tile_sums, torch_with_cuda
from rltop.errors import RltopError
from rltop.evidence.hf import header_of

if TYPE_CHECKING:
    from torch import Tensor

Array = Any
"""Of numpy, which may be missing."""

Chunks = Iterable[memoryview | bytes]
"""The bytes of a tensor, in order, in pieces."""
HashKind = Literal["cpu", "gpu"]

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
}
"""Safetensors' name of a type -> bytes per element."""
FLOATS = ("F32", "F16", "BF16")
"""Types that are cast into each other."""
_TORCH = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}
INDEX = "model.safetensors.index.json"
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as bytes, rows after rows."""

    dtype: str
    """As safetensors spells it: BF16, F32, ..."""
    shape: tuple[int, ...]
    data: memoryview

    @property
    def row_bytes(self) -> int:
        """Of one entry along the first axis; of a scalar, all."""
        return len(self.data) // self.shape[0] if self.shape and self.shape[0] else len(self.data)

    def rows(self, begin: int, end: int) -> memoryview:
        """Entries `[begin, end)` along the first axis."""
        return self.data[begin * self.row_bytes : end * self.row_bytes]

    def columns(self, begin: int, end: int) -> Iterator[memoryview]:
        """Entries `[begin, end)` along the last axis, as one piece per row."""
        item, width = ITEM_BYTES[self.dtype], self.shape[-1]
        for at in range(0, len(self.data), width * item):
            yield self.data[at + begin * item : at + end * item]

    def cast(self, dtype: str) -> Raw:
        """Rounded to nearest even, as torch does it. Raises RltopError without numpy, and for other types."""
        if dtype == self.dtype:
            return self
        if self.dtype not in FLOATS or dtype not in FLOATS:
            raise RltopError(f"{self.dtype} cannot be cast to {dtype}", why="only F32, F16 and BF16 are")
        return Raw(dtype, self.shape, _from_float(_to_float(self), dtype).data.cast("B"))


def raw_of(tensor: Tensor) -> Raw:
    """A torch tensor's bytes, on the CPU; shared where it lies there already."""
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
    return Raw(_TORCH[str(tensor.dtype)], tuple(tensor.shape), data)


# ---------------------------------------------------------------------- files


class Checkpoint:
    """A Hugging Face directory, or a checkpoint's only file: config, and tensors that are read when asked for.

    A context manager. Its files are held open from the start: a run that deletes them meanwhile takes nothing away.
    Raises RltopError (exit code 2) that names the file: no directory, no safetensors, an index that names a file that
    is not there, a header that does not fit its file, one file of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """As it was given."""
        self.directory = path if path.is_dir() else path.parent
        """Where its config lies."""
        self.config: dict[str, Any] = _json(self.directory / "config.json", required=False)
        listed, files = _found(path)
        self.alone = path == self.directory or files == sorted(self.directory.glob("*.safetensors"))
        """Whoever reads the directory reads the same tensors."""
        self._maps: dict[Path, mmap.mmap] = {}
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        self.absent: tuple[str, ...] = ()
        """Tensors that the index lists and no file holds."""
        for file in files:
            try:
                header, base, size = header_of(file)
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise _unreadable(file, str(error)) from error
            for name, entry in header.items():
                _check(file, name, entry, size - base)
                self._places[name] = (file, base, entry)
        if listed is not None:
            self.absent = tuple(sorted(listed.keys() - self._places.keys()))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out keep their own hold."""
        self._maps.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """All tensors, in the order of the files."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return tuple(self._places[name][2]["shape"])

    def dtype(self, name: str) -> str:
        """Without reading it."""
        return str(self._places[name][2]["dtype"])

    def get(self, name: str) -> Raw:
        """A tensor; its bytes are a window on the file."""
        path, base, entry = self._places[name]
        begin, end = entry["data_offsets"]
        data = memoryview(self._maps[path])[base + begin : base + end]
        return Raw(entry["dtype"], tuple(entry["shape"]), data)


def _found(path: Path) -> tuple[Mapping[str, str] | None, list[Path]]:
    """What the index says, if there is one that counts, and the files to read."""
    if path.is_dir():
        return _listed(path)
    if not path.exists():
        raise _unreadable(path, "no such directory or file")
    if path.suffix != ".safetensors":
        raise _unreadable(path, "it is neither a directory nor a .safetensors file")
    listed = (_json(path.parent / INDEX, required=False).get("weight_map") or {}) if path.is_file() else {}
    files = set(listed.values()) if isinstance(listed, dict) else set()
    if path.name in files and len(files) > 1:
        why = f"it is one of the {len(files)} files of this checkpoint"
        raise RltopError(
            "cannot read the checkpoint", where=str(path), why=why, do=f"give the directory: {path.parent}"
        )
    return None, [path]


def _listed(directory: Path) -> tuple[Mapping[str, str] | None, list[Path]]:
    """What the index says, if there is one, and the files to read."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise _unreadable(directory, "it holds no *.safetensors file")
        return None, files
    listed = _json(index, required=True).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise _unreadable(index, "it has no weight_map of file names")
    names = sorted(set(listed.values()))
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise _unreadable(index, f"it names {name!r}, which is no file beside it")
    return listed, [directory / name for name in names]


def _json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise _unreadable(path, "no such file") from error
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, f"no JSON ({error})"[:200]) from error
    if not isinstance(value, dict):
        raise _unreadable(path, "no JSON object")
    return value


def _check(path: Path, name: str, entry: Mapping[str, Any], size: int) -> None:
    begin, end = entry["data_offsets"]
    if end > size:
        raise _unreadable(path, f"it is cut off: {name} ends behind the end of the file")
    count = 1
    for length in entry["shape"]:
        count *= length
    item = ITEM_BYTES.get(entry["dtype"])
    if item is not None and count * item != end - begin:
        raise _unreadable(path, f"{name}: {end - begin} bytes for shape {entry['shape']} of {entry['dtype']}")


def _unreadable(path: Path, why: str) -> RltopError:
    return RltopError("cannot read the checkpoint", where=str(path), why=why, do="a Hugging Face directory")


# ---------------------------------------------------------------------- digests


def sha_digest(chunks: Chunks) -> str:
    """SGLang's hash of a tensor on the CPU: 16 hexadecimal digits."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()[:16]


TILE_WORDS = 8192
"""32-bit words per program of the kernel; a tile's two hashes are mixed on their own, then all tiles are added."""
_SEED = 0x243F6A88
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32)
_POSITION = (0x27D4EB2D, 0x165667B1)
_TURN = (15, 13)
_BLOCK_TILES = 8
"""Tiles per step here: what the arithmetic needs stays in the processor's cache."""


def gpu_digest(chunks: Chunks) -> str:
    """SGLang's hash of a tensor on a GPU (`gpu_tensor_hash`): 16 hexadecimal digits.

    Every 32-bit word, the last one filled up with zero bytes, is mixed with two functions of its position by Murmur3's
    finaliser; a tile of 8192 words adds up its words modulo 2^32, mixes in the number of bytes of the whole tensor, and
    gives 64 bits; tiles are added modulo 2^64 and splitmix64's finaliser ends it. Needs numpy.
    """
    if (torch := torch_with_cuda()) is not None:
        data = bytearray().join(chunks)
        return _digest_on_gpu(torch, data) if len(data) >= SMALLEST_BYTES else gpu_digest_here([bytes(data)])
    return gpu_digest_here(chunks)


def _digest_on_gpu(torch: Any, data: bytearray, device: str = "cuda") -> str:
    data += b"\0" * (-len(data) % 4)
    sums = tile_sums(torch, data, device, tile=TILE_WORDS, seeds=_SEEDS, factors=_POSITION, turns=_TURN)
    return _ended(_numpy().array(sums, dtype=_numpy().uint32), len(data) // 4)


def gpu_digest_here(chunks: Chunks) -> str:
    """`gpu_digest` with numpy."""
    np = _numpy()
    step, rest, count = 4 * TILE_WORDS * _BLOCK_TILES, bytearray(), 0
    sums: list[Array] = []
    for chunk in chunks:
        view = memoryview(chunk)
        if rest:  # fill it up to a whole step first
            missing = step - len(rest)
            rest += view[:missing]
            view = view[missing:]
            if len(rest) < step:
                continue
            sums.append(_tile_sums(np.frombuffer(rest, "<u4"), count))
            count += step // 4
            rest = bytearray()
        whole = len(view) // step * step
        for at in range(0, whole, step):
            sums.append(_tile_sums(np.frombuffer(view[at : at + step], "<u4"), count))
            count += step // 4
        rest += view[whole:]
    if rest:
        rest += b"\0" * (-len(rest) % 4)
        sums.append(_tile_sums(np.frombuffer(rest, "<u4"), count))
        count += len(rest) // 4
    return _ended(np.concatenate(sums, axis=1), count) if count else f"{0:016x}"


def _ended(sums: Array, count: int) -> str:
    """From `[2, tiles]` sums and the number of words."""
    np = _numpy()
    every = sums ^ np.uint32(count * 4 & _MASK32)
    high, low = (_mix(every[at].copy()).astype(np.uint64) for at in range(2))
    total = int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))
    return f"{_splitmix64(total):016x}"


def _tile_sums(words: Array, first: int) -> Array:
    """`[2, tiles]`: both sums of each tile, modulo 2^32. first: position of the first word, a multiple of the tile."""
    np = _numpy()
    begin = first & _MASK32
    at = np.arange(begin, begin + len(words), dtype=np.uint64).astype(np.uint32)
    bounds = np.arange(0, len(words), TILE_WORDS)
    sums = np.empty((2, len(bounds)), np.uint32)
    turned, other = np.empty_like(at), np.empty_like(at)
    for row, (seed, factor, turn) in enumerate(zip(_SEEDS, _POSITION, _TURN, strict=True)):
        np.left_shift(at, np.uint32(turn), out=turned)
        np.right_shift(at, np.uint32(32 - turn), out=other)
        turned |= other
        np.multiply(at, np.uint32(factor), out=other)
        other += np.uint32(seed)
        other ^= turned
        other ^= words
        sums[row] = np.add.reduceat(_mix(other), bounds, dtype=np.uint32)
    return sums


def _mix(x: Array) -> Array:
    """Murmur3's 32-bit finaliser, in place."""
    np = _numpy()
    shifted = np.empty_like(x)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)):
        np.right_shift(x, np.uint32(shift), out=shifted)
        x ^= shifted
        if factor:
            x *= np.uint32(factor)
    return x


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


HASHES: Mapping[HashKind, Callable[[Chunks], str]] = {"cpu": sha_digest, "gpu": gpu_digest}
"""Where the engine's tensors are -> how SGLang hashes them."""


def zeros(nbytes: int) -> Iterator[memoryview]:
    """So many zero bytes, in pieces."""
    whole = memoryview(_ZEROS)
    while nbytes > 0:
        yield whole[: min(nbytes, len(whole))]
        nbytes -= len(whole)


# ---------------------------------------------------------------------- numbers


@functools.cache
def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise RltopError(
            "numpy is needed for this",
            where="rltop weights diff",
            why="the engine's weights lie on a GPU, or in another type than the checkpoint's",
            do="pip install numpy",
        ) from error
    return numpy


def _to_float(raw: Raw) -> Any:
    np = _numpy()
    match raw.dtype:
        case "F32":
            return np.frombuffer(raw.data, "<f4")
        case "F16":
            return np.frombuffer(raw.data, "<f2").astype("<f4")
        case "BF16":
            return (np.frombuffer(raw.data, "<u2").astype(np.uint32) << np.uint32(16)).view("<f4")
    raise RltopError(f"no numbers can be read from {raw.dtype}")


def _from_float(values: Any, dtype: str) -> Any:
    np = _numpy()
    match dtype:
        case "F32":
            return values
        case "F16":
            with np.errstate(over="ignore"):
                return values.astype("<f2")
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype("<u2")


def not_finite(raw: Raw) -> int:
    """How many values are NaN or infinite; 0 for types that are no numbers here. Needs numpy."""
    if raw.dtype not in FLOATS:
        return 0
    np = _numpy()
    return int((~np.isfinite(_to_float(raw))).sum())


def max_abs_gap(one: Raw, other: Raw) -> float:
    """Largest absolute difference of two tensors of one shape; NaN where either holds one. Needs numpy."""
    np = _numpy()
    with np.errstate(invalid="ignore"):
        gap = np.abs(_to_float(one) - _to_float(other))
    return float(gap.max()) if gap.size else 0.0


def is_zero(raw: Raw) -> bool:
    """All bytes are 0, and there is one."""
    data: Sequence[Any] = raw.data
    return len(data) > 0 and not any(
        bytes(raw.data[at : at + (1 << 20)]).strip(b"\0") for at in range(0, len(data), 1 << 20)
    )
