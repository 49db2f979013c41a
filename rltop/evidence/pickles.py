"""Reads what `torch.save` wrote, without unpickling: a walker over the opcodes that builds plain containers only.

It knows containers, numbers, strings, and torch storages and tensors (as places in the archive). It imports nothing and
calls nothing: every other global becomes a `Foreign` with its name, so the rest of the file can still be read. Both the
zip format and the older format of several pickles in a row are read, and a single plain pickle.

Failure policy: `Unreadable` with the reason. Bounds: size and number of opcodes, depth of the stack, size of a number;
nothing is hashed, compared or walked through that a file could have built to take exponential time.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_PICKLE_BYTES = 1 << 30
"""Of the pickle alone; tensors lie outside of it."""
MOST_UNPACKED_BYTES = 256 << 20
"""Of a pickle in a compressed entry (torch compresses none)."""
MOST_OPS = 100_000_000
MOST_STACK = 2_000_000
MOST_MEMO = 8_000_000
MOST_NUMBER_BYTES = 64
MOST_TEXT = 1 << 20
"""Characters of one string that are kept."""
MOST_TENSOR_BYTES = 64 << 20
MOST_FOREIGN = 64
MOST_NAME = 300

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


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
        return self.numel * _WIDTH.get(self.dtype, 4)


@dataclass(slots=True)
class Map:
    """A dict: items, and the bytes of the pickle that each value takes."""

    items: dict[Any, Any] = field(default_factory=dict)
    sizes: dict[Any, int] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Value of a key, None without."""
        return self.items.get(key)


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


_WIDTH = {
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
_ARRAY = {"float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}


def _known(module: str, name: str) -> Known | None:
    """The allow-list: what `torch.load(weights_only=True)` takes, of it the parts that dumps use."""
    if module == "torch" and name in _STORAGES:
        return Known("storage", _STORAGES[name])
    if module == "torch" and (name in _WIDTH or name in ("float", "half", "double", "long", "int")):
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


class Walker:
    """Runs the opcodes of one pickle after another over `data`, from `at` on."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at
        self.foreign: dict[str, None] = {}
        self.stack: list[Any] = []
        self.starts: list[int] = []
        """Where in the pickle the value at the same place of the stack begins."""
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._ops = 0

    def next(self) -> Any:
        """The value of the next pickle. Raises Unreadable."""
        self.stack, self.starts, self.marks, self.memo = [], [], [], {}
        data, end, handlers = self.data, len(self.data), _HANDLERS
        try:
            while self.at < end:
                begin = self.at
                code = data[begin]
                self.at = begin + 1
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                handler = handlers[code]
                if handler is None:
                    raise Unreadable(f"byte {begin} is no pickle opcode (0x{code:02x})")
                handler(self, begin)
                self._ops += 1
                if self._ops > MOST_OPS or len(self.stack) > MOST_STACK or len(self.memo) > MOST_MEMO:
                    raise Unreadable("the pickle is larger than any dump: more objects than are read")
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
            raise Unreadable(f"the pickle is broken near byte {self.at}: {type(error).__name__}") from error
        raise Unreadable("the pickle is cut off: it has no end")

    # -- helpers of the handlers

    def take(self, size: int) -> memoryview:
        if size < 0 or self.at + size > len(self.data):
            raise Unreadable("the pickle is cut off inside a value")
        part = self.data[self.at : self.at + size]
        self.at += size
        return part

    def line(self) -> str:
        for end in range(self.at, min(self.at + 4096, len(self.data))):
            if self.data[end] == 0x0A:
                text = bytes(self.data[self.at : end]).decode("utf-8", "replace")
                self.at = end + 1
                return text
        raise Unreadable("the pickle is cut off inside a line")

    def push(self, value: Any, begin: int) -> None:
        self.stack.append(value)
        self.starts.append(begin)

    def pop(self) -> Any:
        self.starts.pop()
        return self.stack.pop()

    def pop_mark(self) -> tuple[list[Any], list[int], int]:
        mark = self.marks.pop()
        items, starts = self.stack[mark:], self.starts[mark:]
        del self.stack[mark:]
        del self.starts[mark:]
        return items, starts, starts[0] if starts else self.at

    def name(self, module: str, name: str) -> Known | Foreign:
        if known := _known(module, name):
            return known
        full = f"{module}.{name}"[:MOST_NAME]
        if len(self.foreign) < MOST_FOREIGN:
            self.foreign.setdefault(full)
        return Foreign(full)

    def call(self, function: Any, arguments: Any) -> Any:
        args = arguments if isinstance(arguments, tuple) else ()
        if not isinstance(function, Known):
            return function if isinstance(function, Foreign) else Foreign("a call of no function")
        match function.what:
            case "map":
                return Map()
            case "list":
                return args[0] if args and isinstance(args[0], Seq) else Seq()
            case "bytes":
                return args[0] if args and isinstance(args[0], bytes | str) else b""
            case "first":
                return args[0] if args else None
            case "tensor":
                return _tensor(args)
            case "from_type":  # (rebuild, type, arguments, state)
                return self.call(args[0], args[2]) if len(args) > 2 else Foreign("a tensor of no type")
            case _:
                return function.name


def _tensor(args: tuple[Any, ...]) -> Any:
    """`_rebuild_tensor_v2(storage, offset, size, stride, ...)`."""
    if len(args) < 4 or not isinstance(args[0], Storage):
        return Foreign("a tensor of no storage")
    storage, offset, shape, stride = args[:4]
    sizes = tuple(x for x in shape if isinstance(x, int) and 0 <= x < 1 << 48) if isinstance(shape, tuple) else None
    if sizes is None or len(sizes) != len(shape) or len(sizes) > 32 or not isinstance(offset, int) or offset < 0:
        return Foreign("a tensor of no shape")
    expected: list[int] = []
    step = 1
    for size in reversed(sizes):
        expected.insert(0, step)
        step *= max(size, 1)
    flat = isinstance(stride, tuple) and all(s == e or n == 1 for s, e, n in zip(stride, expected, sizes, strict=False))
    return TensorRef(storage.dtype, sizes, storage.key, offset, flat)


def _key(value: Any) -> Any:
    """A key that is safe to hash: strings, numbers, None. Others are named after their kind."""
    return value if isinstance(value, str | int | float | bytes | type(None)) else f"<{type(value).__name__}>"


# -- opcodes


def _text(walker: Walker, size: int, begin: int) -> None:
    raw = walker.take(size)
    if size > MOST_TEXT * 4:
        raw = raw[: MOST_TEXT * 4]
    walker.push(bytes(raw).decode("utf-8", "replace")[:MOST_TEXT], begin)


def _bytes(walker: Walker, size: int, begin: int) -> None:
    walker.push(bytes(walker.take(size)[: MOST_TEXT * 4]), begin)


def _integer(walker: Walker, size: int, begin: int) -> None:
    raw = walker.take(size)
    if size > MOST_NUMBER_BYTES:
        walker.push(Foreign("an integer of more than 64 bytes"), begin)
    else:
        walker.push(int.from_bytes(raw, "little", signed=True), begin)


def _unsigned(size: int) -> Callable[[Walker], int]:
    return lambda walker: int.from_bytes(walker.take(size), "little")


def _sized(read: Callable[[Walker, int, int], None], width: int) -> Callable[[Walker, int], None]:
    length = _unsigned(width)

    def handler(walker: Walker, begin: int) -> None:
        read(walker, length(walker), begin)

    return handler


def _constant(make: Callable[[], Any]) -> Callable[[Walker, int], None]:
    return lambda walker, begin: walker.push(make(), begin)


def _mark(walker: Walker, begin: int) -> None:
    walker.marks.append(len(walker.stack))


def _pop(walker: Walker, begin: int) -> None:
    if walker.marks and walker.marks[-1] == len(walker.stack):
        walker.marks.pop()
    else:
        walker.pop()


def _pop_mark(walker: Walker, begin: int) -> None:
    walker.pop_mark()


def _dup(walker: Walker, begin: int) -> None:
    walker.push(walker.stack[-1], begin)


def _global(walker: Walker, begin: int) -> None:
    module = walker.line()
    walker.push(walker.name(module, walker.line()), begin)


def _stack_global(walker: Walker, begin: int) -> None:
    name, module = walker.pop(), walker.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        walker.push(Foreign("a global of no name"), begin)
        walker.foreign.setdefault("a global of no name")
        return
    walker.push(walker.name(module, name), begin)


def _extension(width: int) -> Callable[[Walker, int], None]:
    length = _unsigned(width)

    def handler(walker: Walker, begin: int) -> None:
        walker.push(walker.name("copyreg", f"extension {length(walker)}"), begin)

    return handler


def _reduce(walker: Walker, begin: int) -> None:
    arguments = walker.pop()
    start = walker.starts[-1]
    function = walker.pop()
    walker.push(walker.call(function, arguments), start)


def _newobj_ex(walker: Walker, begin: int) -> None:
    walker.pop()
    _reduce(walker, begin)


def _obj(walker: Walker, begin: int) -> None:
    items, _, start = walker.pop_mark()
    walker.push(walker.call(items[0], tuple(items[1:])), start)


def _inst(walker: Walker, begin: int) -> None:
    module = walker.line()
    function = walker.name(module, walker.line())
    items, _, start = walker.pop_mark()
    walker.push(walker.call(function, tuple(items)), start)


def _build(walker: Walker, begin: int) -> None:
    walker.pop()  # the state of an object that was not made


def _append(walker: Walker, begin: int) -> None:
    value = walker.pop()
    if isinstance(target := walker.stack[-1], Seq):
        target.extend([value])


def _appends(walker: Walker, begin: int) -> None:
    items, _, _ = walker.pop_mark()
    if items and isinstance(target := walker.stack[-1], Seq):
        target.extend(items)


def _put_items(walker: Walker, pairs: list[Any], starts: list[int], end: int) -> None:
    target = walker.stack[-1]
    if not isinstance(target, Map):
        return
    for at in range(0, len(pairs) - 1, 2):
        key = _key(pairs[at])
        target.items[key] = pairs[at + 1]
        stop = starts[at + 2] if at + 2 < len(starts) else end
        target.sizes[key] = max(0, stop - starts[at + 1])


def _set_item(walker: Walker, begin: int) -> None:
    starts = walker.starts[-2:]
    value, key = walker.pop(), walker.pop()
    _put_items(walker, [key, value], starts, begin)


def _set_items(walker: Walker, begin: int) -> None:
    items, starts, _ = walker.pop_mark()
    _put_items(walker, items, starts, begin)


def _dict(walker: Walker, begin: int) -> None:
    items, starts, start = walker.pop_mark()
    walker.push(Map(), start)
    _put_items(walker, items, starts, begin)


def _list(walker: Walker, begin: int) -> None:
    items, _, start = walker.pop_mark()
    walker.push(Seq(items), start)


def _tuple(walker: Walker, begin: int) -> None:
    items, _, start = walker.pop_mark()
    walker.push(tuple(items), start)


def _tuple_of(size: int) -> Callable[[Walker, int], None]:
    def handler(walker: Walker, begin: int) -> None:
        start = walker.starts[-size]
        items = tuple(walker.stack[-size:])
        if len(items) < size:
            raise Unreadable("the pickle takes more from its stack than is there")
        del walker.stack[-size:]
        del walker.starts[-size:]
        walker.push(items, start)

    return handler


def _put(key: Callable[[Walker], int]) -> Callable[[Walker, int], None]:
    def handler(walker: Walker, begin: int) -> None:
        walker.memo[key(walker)] = walker.stack[-1]

    return handler


def _memoize(walker: Walker, begin: int) -> None:
    walker.memo[len(walker.memo)] = walker.stack[-1]


def _get(key: Callable[[Walker], int]) -> Callable[[Walker, int], None]:
    def handler(walker: Walker, begin: int) -> None:
        walker.push(walker.memo[key(walker)], begin)

    return handler


def _number_line(walker: Walker) -> int:
    return int(walker.line()[:20])


def _int_line(walker: Walker, begin: int) -> None:
    text = walker.line().rstrip("L")
    if text in ("00", "01"):
        walker.push(text == "01", begin)
    else:
        walker.push(int(text) if len(text) <= 150 else Foreign("an integer of more than 64 bytes"), begin)


def _float_line(walker: Walker, begin: int) -> None:
    walker.push(float(walker.line()[:64]), begin)


def _text_line(walker: Walker, begin: int) -> None:
    walker.push(walker.line(), begin)


def _persistent(walker: Walker, begin: int) -> None:
    start = walker.starts[-1]
    value = walker.pop()
    match value:
        case ("storage", Known(what="storage", name=dtype), key, _, int(numel), *_):
            walker.push(Storage(str(key), dtype, numel), start)
        case ("module", *_):
            walker.push(Foreign("a module's source"), start)
        case _:
            walker.push(Foreign("a persistent object"), start)


def _small(walker: Walker, begin: int) -> None:
    walker.stack.append(walker.data[walker.at])
    walker.starts.append(begin)
    walker.at += 1


def _binfloat(walker: Walker, begin: int) -> None:
    end = begin + 9 * _RUN
    if walker.data[begin:end:9] == _RUN_CODES and end <= len(walker.data):  # a long list: many at once
        walker.stack.extend(value for (value,) in _RUN_OF_DOUBLES.iter_unpack(walker.data[begin:end]))
        walker.starts.extend(range(begin, end, 9))
        walker.at = end
        return
    walker.stack.append(_DOUBLE.unpack_from(walker.data, walker.at)[0])
    walker.starts.append(begin)
    walker.at += 8


def _binint(walker: Walker, begin: int) -> None:
    walker.stack.append(_INT.unpack_from(walker.data, walker.at)[0])
    walker.starts.append(begin)
    walker.at += 4


def _binint2(walker: Walker, begin: int) -> None:
    at = walker.at
    walker.stack.append(walker.data[at] | walker.data[at + 1] << 8)
    walker.starts.append(begin)
    walker.at = at + 2


_RUN = 100
_RUN_CODES = b"G" * _RUN
_RUN_OF_DOUBLES = struct.Struct(">xd")
_DOUBLE = struct.Struct(">d")
_INT = struct.Struct("<i")


def _handlers() -> tuple[Callable[[Walker, int], None] | None, ...]:
    known: dict[int, Callable[[Walker, int], None]] = {
        0x28: _mark,
        0x30: _pop,
        0x31: _pop_mark,
        0x32: _dup,
        ord("N"): _constant(lambda: None),
        0x88: _constant(lambda: True),
        0x89: _constant(lambda: False),
        ord("]"): _constant(Seq),
        ord("}"): _constant(Map),
        ord(")"): _constant(tuple),
        0x8F: _constant(Seq),
        ord("l"): _list,
        ord("d"): _dict,
        ord("t"): _tuple,
        0x85: _tuple_of(1),
        0x86: _tuple_of(2),
        0x87: _tuple_of(3),
        0x91: _tuple,
        ord("a"): _append,
        ord("e"): _appends,
        0x90: _appends,
        ord("s"): _set_item,
        ord("u"): _set_items,
        ord("K"): _small,
        ord("M"): _binint2,
        ord("J"): _binint,
        ord("G"): _binfloat,
        0x8A: _sized(_integer, 1),
        0x8B: _sized(_integer, 4),
        ord("I"): _int_line,
        ord("L"): _int_line,
        ord("F"): _float_line,
        ord("S"): _text_line,
        ord("V"): _text_line,
        ord("X"): _sized(_text, 4),
        0x8C: _sized(_text, 1),
        0x8D: _sized(_text, 8),
        ord("U"): _sized(_text, 1),
        ord("T"): _sized(_text, 4),
        ord("C"): _sized(_bytes, 1),
        ord("B"): _sized(_bytes, 4),
        0x8E: _sized(_bytes, 8),
        0x96: _sized(_bytes, 8),
        0x97: _constant(lambda: Foreign("an out-of-band buffer")),
        0x98: lambda walker, begin: None,
        ord("q"): _put(_unsigned(1)),
        ord("r"): _put(_unsigned(4)),
        ord("p"): _put(_number_line),
        0x94: _memoize,
        ord("h"): _get(_unsigned(1)),
        ord("j"): _get(_unsigned(4)),
        ord("g"): _get(_number_line),
        ord("c"): _global,
        0x93: _stack_global,
        0x82: _extension(1),
        0x83: _extension(2),
        0x84: _extension(4),
        ord("R"): _reduce,
        0x81: _reduce,
        0x92: _newobj_ex,
        ord("o"): _obj,
        ord("i"): _inst,
        ord("b"): _build,
        ord("Q"): _persistent,
        ord("P"): lambda walker, begin: walker.push(Foreign("a persistent object " + walker.line()[:40]), begin),
        0x80: lambda walker, begin: _leave(walker, 1),
        0x95: lambda walker, begin: _leave(walker, 8),
    }
    return tuple(known.get(code) for code in range(256))


def _leave(walker: Walker, size: int) -> None:
    walker.take(size)


_HANDLERS = _handlers()


# -- files


@dataclass(slots=True)
class Saved:
    """One file of `torch.save`, open as long as its context."""

    value: Any
    foreign: tuple[str, ...]
    total_bytes: int
    archive: zipfile.ZipFile | None = None
    prefix: str = ""
    swapped: bool = False

    def floats(self, ref: TensorRef) -> list[float]:
        """Values of a tensor, flat. Empty where it can not be read: other layout, too large, cut off."""
        if self.archive is None or not ref.contiguous or ref.nbytes > MOST_TENSOR_BYTES:
            return []
        width = _WIDTH.get(ref.dtype, 0)
        try:
            with self.archive.open(f"{self.prefix}data/{ref.key}") as stream:
                stream.seek(ref.offset * width)
                raw = stream.read(ref.nbytes)
        except Exception:  # absent, cut off, damaged, compressed by a method that is not known
            return []
        return decode(raw, ref.dtype, swapped=self.swapped) if len(raw) == ref.nbytes else []


def decode(raw: bytes, dtype: str, *, swapped: bool = False) -> list[float]:
    """Numbers of little-endian bytes; empty for a type that has none here."""
    order = ">" if swapped else "<"
    if dtype in _ARRAY:
        values = array(_ARRAY[dtype], raw)
        if swapped:
            values.byteswap()
        return list(map(float, values))
    if dtype == "float16":
        return list(struct.unpack(f"{order}{len(raw) // 2}e", raw))
    if dtype == "bfloat16":
        words = array("H", raw)
        if swapped:
            words.byteswap()
        return list(array("f", array("I", [word << 16 for word in words]).tobytes()))
    return [float(byte != 0) for byte in raw] if dtype == "bool" else []


@contextmanager
def opened(path: Path) -> Iterator[Saved]:
    """A `.pt` or pickle file. Raises Unreadable, and OSError when it can not be opened."""
    size = path.stat().st_size
    if size == 0:
        raise Unreadable("the file is empty")
    with path.open("rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(data)
    try:
        if view[:2] != b"PK":
            yield _from_stream(view, size)
            return
        with _zip(path) as archive:
            yield _from_zip(archive, view, size)
    finally:
        with suppress(BufferError):  # an error's frames may still look at it
            view.release()
            data.close()


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise Unreadable(f"truncated or damaged archive ({error})") from error


def _from_zip(archive: zipfile.ZipFile, view: memoryview, size: int) -> Saved:
    inside = [info for info in archive.infolist() if info.filename.endswith("data.pkl") and not info.is_dir()]
    if not inside:
        raise Unreadable("a zip archive without data.pkl: not written by torch.save")
    entry = min(inside, key=lambda info: len(info.filename))
    prefix = entry.filename[: -len("data.pkl")]
    walker = Walker(_stored(entry, view) if entry.compress_type == zipfile.ZIP_STORED else _unpacked(archive, entry))
    value = walker.next()
    return Saved(value, tuple(walker.foreign), size, archive, prefix, _swapped(archive, prefix))


def _stored(entry: zipfile.ZipInfo, view: memoryview) -> memoryview:
    """The bytes of an entry that is not compressed, as they lie in the file."""
    head = view[entry.header_offset : entry.header_offset + 30]
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise Unreadable("damaged archive (an entry without header)")
    begin = entry.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if begin + entry.file_size > len(view) or entry.file_size > MOST_PICKLE_BYTES:
        raise Unreadable(f"damaged archive (its data.pkl says that it is {entry.file_size} bytes)")
    return view[begin : begin + entry.file_size]


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> memoryview:
    if entry.file_size > MOST_UNPACKED_BYTES:
        raise Unreadable(f"its compressed data.pkl says that it is {entry.file_size} bytes, more than is read")
    try:
        with archive.open(entry) as stream:
            raw = stream.read(MOST_UNPACKED_BYTES + 1)
    except Exception as error:  # zlib.error and its kin have no common base
        raise Unreadable(f"damaged archive ({type(error).__name__}: {error})") from error
    if len(raw) > MOST_UNPACKED_BYTES:
        raise Unreadable("its data.pkl unpacks without end: a zip bomb")
    return memoryview(raw)


def _swapped(archive: zipfile.ZipFile, prefix: str) -> bool:
    try:
        with archive.open(f"{prefix}byteorder") as stream:
            return stream.read(8) == b"big"
    except Exception:  # absent in older files, or damaged: little-endian, as everywhere
        return False


def _from_stream(view: memoryview, size: int) -> Saved:
    if len(view) > MOST_PICKLE_BYTES:
        raise Unreadable(f"a pickle of {size} bytes without an archive, more than is read")
    walker = Walker(view)
    value = walker.next()
    if isinstance(value, int) and value == _LEGACY_MAGIC:
        walker.next()  # protocol
        walker.next()  # sizes of the writer's types
        value = walker.next()
    return Saved(value, tuple(walker.foreign), size)
