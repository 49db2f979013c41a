"""What a pickle is turned into: plain containers, places of tensors, and names of what is not made.

The allow-list (`known`) is the part of `torch.load(weights_only=True)`'s that dumps use.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


class Unreadable(Exception):
    """The file is not what it should be; the text says why."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something of a class or function outside the allow-list. It was not made."""

    name: str


@dataclass(frozen=True, slots=True)
class Known:
    """A global of the allow-list; `what` says how its calls are read."""

    what: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage: bytes of the archive under `key`."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not read yet."""

    dtype: str
    shape: tuple[int, ...]
    key: str
    offset: int
    """Elements from the start of the storage."""
    contiguous: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * WIDTH.get(self.dtype, 4)


@dataclass(slots=True)
class Map:
    """A dict: items, and the bytes of the pickle that each value takes."""

    items: dict[Any, Any] = field(default_factory=dict)
    sizes: dict[Any, int] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Value of a key, None without."""
        return self.items.get(key)


@dataclass(slots=True)
class Record(Map):
    """The attributes of an object whose class a caller asked for by name. The class was neither imported nor made."""


@dataclass(slots=True)
class Seq:
    """A list (or a set). Numbers of one type take eight bytes each."""

    items: list[Any] | array[int] | array[float] = field(default_factory=list)

    def extend(self, more: list[Any]) -> None:
        """Append, compactly where all are floats or all integers."""
        code = {frozenset({int}): "q", frozenset({float}): "d"}.get(frozenset(map(type, more)))
        if isinstance(self.items, array):
            if code == self.items.typecode and _fits(code, more):
                self.items.extend(more)
            else:
                self.items = [*self.items, *more]
        elif code and not self.items and len(more) > 1 and _fits(code, more):
            self.items = array(code, more)
        else:
            self.items.extend(more)

    def __len__(self) -> int:
        return len(self.items)


def _fits(code: str, values: list[Any]) -> bool:
    return code == "d" or (max(values) < 1 << 63 and min(values) >= -(1 << 63))


WIDTH = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


def known(module: str, name: str) -> Known | None:
    """The allow-list: what `torch.load(weights_only=True)` takes, of it the parts that dumps use."""
    if module == "torch" and name in _STORAGES:
        return Known("storage", _STORAGES[name])
    if module == "torch" and (name in WIDTH or name in ("float", "half", "double", "long", "int")):
        return Known("dtype", name)
    if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"):
        return Known("storage", "uint8")
    return {
        ("torch._utils", "_rebuild_tensor_v2"): Known("tensor"),
        ("torch._utils", "_rebuild_tensor"): Known("tensor"),
        ("torch._utils", "_rebuild_parameter"): Known("first"),
        ("torch._tensor", "_rebuild_from_type_v2"): Known("from_type"),
        ("torch", "Tensor"): Known("dtype", "Tensor"),
        ("torch", "Size"): Known("first"),
        ("torch", "device"): Known("text", "device"),
        ("torch.nn.parameter", "Parameter"): Known("dtype", "Parameter"),
        ("torch.serialization", "_get_layout"): Known("first"),
        ("collections", "OrderedDict"): Known("map"),
        ("collections", "Counter"): Known("map"),
        ("builtins", "set"): Known("list"),
        ("__builtin__", "set"): Known("list"),
        ("builtins", "frozenset"): Known("list"),
        ("builtins", "bytearray"): Known("bytes"),
        ("__builtin__", "bytearray"): Known("bytes"),
        ("_codecs", "encode"): Known("bytes"),
        ("builtins", "complex"): Known("text", "complex"),
        ("__builtin__", "complex"): Known("text", "complex"),
    }.get((module, name))
