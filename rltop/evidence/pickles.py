"""A walker over the opcodes of a pickle that builds plain containers only.

It knows containers, numbers, strings, and torch storages and tensors (as places in the archive). It imports nothing and
calls nothing: every other global becomes a `Foreign` with its name, so the rest of the file can still be read.

Failure policy: `Unreadable` with the reason. Bounds: number of opcodes, depth of the stack, size of a number; nothing
is hashed, compared or walked through that a file could have built to take exponential time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection
from typing import Any

from rltop.evidence.pickle_values import Foreign, Known, Map, Record, Seq, Storage, TensorRef, Unreadable, known

MOST_OPS = 100_000_000
MOST_STACK = 2_000_000
MOST_MEMO = 8_000_000
MOST_NUMBER_BYTES = 64
MOST_TEXT = 1 << 20
"""Characters of one string that are kept."""
MOST_FOREIGN = 64
MOST_REMEMBERED = 1 << 17
"""Integers whose value is looked up instead of made."""
MOST_NAME = 300


class Walker:
    """Runs the opcodes of one pickle after another over `data`, from `at` on."""

    def __init__(self, data: memoryview, at: int = 0, *, records: Collection[str] = ()) -> None:
        """records: names of classes, without their modules, of whose objects the attributes are kept (`Record`)."""
        self.data = data
        self.at = at
        self._records = frozenset(records)
        self.foreign: dict[str, None] = {}
        self.stack: list[Any] = []
        self.starts: list[int] = []
        """Where in the pickle the value at the same place of the stack begins."""
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.memoized = 0
        """The number that the next value has which is memoized without one."""
        self.integers = _Integers()
        self.end = len(data)
        """`run` goes so far."""
        self._ops = 0

    def next(self) -> Any:
        """The value of the next pickle. Raises Unreadable."""
        self.stack, self.starts, self.marks, self.memo, self.memoized = [], [], [], {}, 0
        if self.run(len(self.data)):
            return self.stack[-1]
        raise Unreadable("the pickle is cut off: it has no end")

    def run(self, end: int, until: Callable[[Walker], bool] | None = None) -> bool:
        """Goes on to place `end`, or until the pickle is over (True), its value on the stack. Raises Unreadable.

        until: asked after every list that is begun; True stops behind its opcode.
        """
        data, handlers, self.end = self.data, _HANDLERS, end
        try:
            while self.at < end:
                begin = self.at
                code = data[begin]
                self.at = begin + 1
                if code == 0x2E:  # STOP
                    if not self.stack:
                        raise Unreadable("the pickle is broken: it ends without a value")
                    return True
                handler = handlers[code]
                if handler is None:
                    raise Unreadable(f"byte {begin} is no pickle opcode (0x{code:02x})")
                handler(self, begin)
                self._ops += 1
                if self._ops > MOST_OPS or len(self.stack) > MOST_STACK or len(self.memo) > MOST_MEMO:
                    raise Unreadable("the pickle is larger than any dump: more objects than are read")
                if code == 0x5D and until is not None and until(self):
                    return False
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
            raise Unreadable(f"the pickle is broken near byte {self.at}: {type(error).__name__}") from error
        return False

    # -- helpers of the handlers

    def take(self, size: int) -> memoryview:
        if size < 0 or self.at + size > len(self.data):
            raise Unreadable("the pickle is cut off inside a value")
        part = self.data[self.at : self.at + size]
        self.at += size
        return part

    def line(self, encoding: str = "utf-8") -> str:
        """The rest of a line, as the text opcodes of the first protocols have it."""
        end = self.at
        while end < len(self.data):
            found = bytes(self.data[end : end + _LINE_CHUNK]).find(b"\n")
            if found >= 0:
                text = bytes(self.data[self.at : min(end + found, self.at + MOST_TEXT)]).decode(encoding, "replace")
                self.at = end + found + 1
                return text
            end += _LINE_CHUNK
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
        if allowed := known(module, name):
            return allowed
        if name in self._records:
            return Known("record", name)
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
            case "record":
                return Record()
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
    state = walker.pop()
    if not isinstance(target := walker.stack[-1], Record):
        return  # the state of an object that was not made
    for part in state if isinstance(state, tuple) else (state,):  # (attributes, slots) of classes that have slots
        if isinstance(part, Map):
            target.items.update(part.items)
            target.sizes.update(part.sizes)


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
        number = key(walker)
        walker.memo[number] = walker.stack[-1]
        walker.memoized = max(walker.memoized, number + 1)

    return handler


def _memoize(walker: Walker, begin: int) -> None:
    walker.memo[walker.memoized] = walker.stack[-1]
    walker.memoized += 1


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


def _unicode_line(walker: Walker, begin: int) -> None:
    walker.push(walker.line("raw_unicode_escape"), begin)


def _quoted_line(walker: Walker, begin: int) -> None:
    text = walker.line("latin-1").strip()
    walker.push(text[1:-1] if text[:1] in ("'", '"') and text[:1] == text[-1:] else text, begin)


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
    at = walker.at
    if walker.data[at + 1] in _INTEGERS:
        return _integers(walker, begin)
    walker.stack.append(walker.data[at])
    walker.starts.append(begin)
    walker.at = at + 1


def _integers(walker: Walker, begin: int) -> None:
    """A list of integers: many at once. Token ids come again and again, so that most are looked up."""
    found = _RUN_OF_INTEGERS.match(walker.data, begin, walker.end)
    if found is None:
        raise Unreadable("the pickle is cut off inside a value")
    walker.stack.extend(map(walker.integers.__getitem__, _INTEGER.findall(found[0])))
    walker.starts.extend([begin] * (len(walker.stack) - len(walker.starts)))
    walker.at = found.end()


class _Integers(dict[bytes, int]):
    """Value of an opcode with its bytes; remembers those that came first, of which frequent tokens are."""

    def __missing__(self, code: bytes) -> int:
        value = int.from_bytes(code[1:], "little", signed=code[0] == 0x4A)
        if len(self) < MOST_REMEMBERED:
            self[code] = value
        return value


def _binfloat(walker: Walker, begin: int) -> None:
    if walker.data[walker.at + 8] == 0x47:  # a list: many at once
        found = _RUN_OF_FLOATS.match(walker.data, begin, walker.end)
        if found is not None:
            walker.stack.extend(value for (value,) in _DOUBLE_BEHIND_CODE.iter_unpack(found[0]))
            walker.starts.extend([begin] * (len(walker.stack) - len(walker.starts)))
            walker.at = found.end()
            return
    walker.stack.append(_DOUBLE.unpack_from(walker.data, walker.at)[0])
    walker.starts.append(begin)
    walker.at += 8


def _binint(walker: Walker, begin: int) -> None:
    if walker.data[walker.at + 4] in _INTEGERS:
        return _integers(walker, begin)
    walker.stack.append(_INT.unpack_from(walker.data, walker.at)[0])
    walker.starts.append(begin)
    walker.at += 4


def _binint2(walker: Walker, begin: int) -> None:
    at = walker.at
    if walker.data[at + 2] in _INTEGERS:
        return _integers(walker, begin)
    walker.stack.append(walker.data[at] | walker.data[at + 1] << 8)
    walker.starts.append(begin)
    walker.at = at + 2


_LINE_CHUNK = 4096
_INTEGERS = frozenset(b"KMJ")
_INTEGER = re.compile(rb"(?s:K.|M..|J.{4})")
_RUN_OF_INTEGERS = re.compile(rb"(?s:(?:K.|M..|J.{4}){1,10000}+)")
_RUN_OF_FLOATS = re.compile(rb"(?s:(?:G.{8}){1,10000}+)")
_DOUBLE_BEHIND_CODE = struct.Struct(">xd")
_DOUBLE = struct.Struct(">d")
_INT = struct.Struct("<i")


def _handlers() -> tuple[Callable[[Walker, int], None] | None, ...]:
    table: dict[int, Callable[[Walker, int], None]] = {
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
        ord("S"): _quoted_line,
        ord("V"): _unicode_line,
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
    return tuple(table.get(code) for code in range(256))


def _leave(walker: Walker, size: int) -> None:
    walker.take(size)


_HANDLERS = _handlers()
