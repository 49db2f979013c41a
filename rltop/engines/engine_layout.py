"""How an engine lays out a checkpoint's tensors: what is fused, sharded and padded, name by name.

SGLang's layout of dense and mixture-of-experts decoders of the Llama family (Llama, Qwen2, Qwen3, Qwen3-MoE), from
0.5.23's `srt/layers/linear.py`, `vocab_parallel_embedding.py` and `moe/fused_moe_triton/layer.py`:

| checkpoint | engine | one of T tensor parallel ranks has |
|---|---|---|
| {q,k,v}_proj | qkv_proj, stacked along the rows | its heads; a key/value head is copied where there are more ranks |
| {gate,up}_proj | gate_up_proj, stacked along the rows | its rows of gate above its rows of up |
| o_proj.weight, down_proj.weight | the same | its columns |
| embed_tokens, lm_head | the same, zero rows up to a multiple of 64 (of 64 T if T does not divide it) | its rows |
| experts.N.{gate,up}_proj | experts.w13_weight, `[experts, 2 x rows, columns]` | its rows of each |
| experts.N.down_proj | experts.w2_weight, `[experts, rows, columns]` | its columns of each |
| everything else | the same | all of it |

rltop's CPU engine keeps the checkpoint's names. Pure: shapes in, recipes out; `chunks` turns a recipe into bytes.
Expert parallelism and kernels that repack experts are not modelled: `repacked` names what may then not be comparable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rltop.engines.raw_tensors import Raw, zeros

VOCABULARY_PADDING = 64
"""SGLang's DEFAULT_VOCAB_PADDING_SIZE (0.5.23, `srt/layers/vocab_parallel_embedding.py`)."""

LAYER = re.compile(r"(?P<head>.*?\blayers\.)(?P<layer>\d+)(?P<tail>\..+)")
_EXPERT = re.compile(r"(?P<head>.*\.experts\.)(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_FUSED = (
    ("q_proj", "qkv_proj"),
    ("k_proj", "qkv_proj"),
    ("v_proj", "qkv_proj"),
    ("gate_proj", "gate_up_proj"),
    ("up_proj", "gate_up_proj"),
)
_COLUMNS = ("o_proj.weight", "down_proj.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
Shapes = Mapping[str, tuple[int, ...]]
Get = Callable[[str], Raw]


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor parallel rank of an engine."""

    rank: int = 0
    size: int = 1
    kv_heads: int = 1
    """Key/value heads of the whole model; only read where `size` is above 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a checkpoint's tensor inside an engine's parameter."""

    source: str
    axis: str = ""
    """`rows`, `columns`, or empty: all of it."""
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the engine: its parts in order, then so many rows of zeros."""

    name: str
    parts: tuple[Part, ...]
    zero_rows: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's tensors in it."""
        return tuple(dict.fromkeys(part.source for part in self.parts))

    @property
    def repacked(self) -> bool:
        """Whether a kernel may store it in an order of its own (`--moe-runner-backend`)."""
        return self.name.endswith(("experts.w13_weight", "experts.w2_weight"))


def is_fused(names: Mapping[str, Any]) -> bool:
    """Whether these are an engine's names, not a checkpoint's."""
    return any(part in name for name in names for part in (".qkv_proj.", ".gate_up_proj.", ".experts.w13_weight"))


def parameters(shapes: Shapes, *, fused: bool, shard: Shard = Shard()) -> dict[str, Parameter]:
    """Engine's name -> recipe, for every tensor of a checkpoint.

    fused: SGLang's layout; else the checkpoint's own names, for the CPU engine.
    """
    if not fused:
        return {name: Parameter(name, (Part(name),)) for name in shapes}
    found: dict[str, dict[tuple[int, int], Part]] = {}
    padding: dict[str, int] = {}
    for source, shape in shapes.items():
        name, order = _engine_name(source)
        found.setdefault(name, {})[order] = _part(source, shape, shard)
        if source.endswith(_VOCABULARY):
            part, padding[name] = _vocabulary(source, shape[0], shard)
            found[name][order] = part
    return {
        name: Parameter(name, tuple(parts[order] for order in sorted(parts)), padding.get(name, 0))
        for name, parts in found.items()
    }


def _engine_name(source: str) -> tuple[str, tuple[int, int]]:
    """The parameter that a tensor ends up in, and its place there."""
    if expert := _EXPERT.fullmatch(source):
        weight = "w2_weight" if expert["part"] == "down_proj" else "w13_weight"
        return expert["head"] + weight, (int(expert["expert"]), int(expert["part"] == "up_proj"))
    for index, (part, whole) in enumerate(_FUSED):
        if f".{part}." in source:
            return source.replace(f".{part}.", f".{whole}."), (0, index)
    return source, (0, 0)


def _part(source: str, shape: tuple[int, ...], shard: Shard) -> Part:
    if shard.size == 1 or not shape:
        return Part(source)
    if source.endswith(_COLUMNS) and len(shape) == 2:
        width = shape[1] // shard.size
        return Part(source, "columns", shard.rank * width, (shard.rank + 1) * width)
    if ".k_proj." in source or ".v_proj." in source:
        heads = max(1, shard.kv_heads // shard.size)
        copies = max(1, shard.size // shard.kv_heads)
        rows = shape[0] // shard.kv_heads * heads
        first = shard.rank // copies * rows
        return Part(source, "rows", first, first + rows)
    if any(f".{part}." in source for part, _ in _FUSED):
        rows = shape[0] // shard.size
        return Part(source, "rows", shard.rank * rows, (shard.rank + 1) * rows)
    return Part(source)


def _vocabulary(source: str, rows: int, shard: Shard) -> tuple[Part, int]:
    """A rank's rows of the vocabulary, and how many zero rows follow."""
    unit = VOCABULARY_PADDING
    if -(-rows // unit) * unit % shard.size:
        unit *= shard.size
    each = -(-rows // unit) * unit // shard.size
    begin, end = min(rows, shard.rank * each), min(rows, (shard.rank + 1) * each)
    part = Part(source) if shard.size == 1 else Part(source, "rows", begin, end)
    return part, each - (end - begin)


def chunks(parameter: Parameter, get: Get, dtype: str = "") -> Iterator[memoryview]:
    """The parameter's bytes as the engine holds them.

    get: the checkpoint's tensors. dtype: what the engine casts to; empty: as they are. Raises RltopError for a cast
    that cannot be done.
    """
    row = 0
    for part in parameter.parts:
        raw = get(part.source)
        if dtype:
            raw = raw.cast(dtype)
        row = raw.row_bytes
        match part.axis:
            case "rows":
                yield raw.rows(part.begin, part.end)
            case "columns":
                yield from raw.columns(part.begin, part.end)
            case _:
                yield raw.data
    yield from zeros(parameter.zero_rows * row)


def layer_of(name: str) -> tuple[str, int]:
    """The name with its layer number taken out, and the number; -1 for names outside layers."""
    found = LAYER.fullmatch(name)
    return (f"{found['head']}N{found['tail']}", int(found["layer"])) if found else (name, -1)
