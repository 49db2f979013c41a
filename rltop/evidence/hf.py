"""A Hugging Face model directory: configs, index, safetensors headers, and the values of quantisation scales.

Headers and scales are read by offset; weights are never read. A file that the index names is opened only if it is a
plain name of this directory, or a link into the `blobs` of the same hub cache.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from array import array
from pathlib import Path
from typing import Any

from rltop.checks.found import BadScale, HfCheckpoint, Tensor
from rltop.evidence.sink import Reader, Sink, Source

MOST_JSON = 128 << 20
MOST_HEADER = 100 << 20
"""Bytes of a safetensors header (the format's own limit)."""
MOST_SCALES = 512 << 20
"""Bytes of scale values that are read of one checkpoint."""
MOST_TENSORS = 2_000_000
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
_OTHERS = (
    "tokenizer.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "quantization_config.json",
)
_INDEX = re.compile(r".*\.(?:safetensors|bin)\.index\.json$")
_WEIGHTS = re.compile(r".*\.safetensors$|pytorch_model.*\.bin$")
_SCALE = re.compile(r"(?:_scale|_scale_inv|\.scales)$")
_WORDS = {
    # type -> (array code, smallest bad pattern from Inf on, sign bit)
    "F64": ("Q", 0x7FF0 << 48, 1 << 63),
    "F32": ("I", 0x7F80 << 16, 1 << 31),
    "BF16": ("H", 0x7F80, 1 << 15),
    "F16": ("H", 0x7C00, 1 << 15),
    "F8_E5M2": ("B", 0x7C, 1 << 7),
    "F8_E4M3": ("B", 0x7F, 1 << 7),
}


def _of_model(name: str) -> bool:
    return name in _CONFIGS or name in _OTHERS or bool(_WEIGHTS.match(name) or _INDEX.match(name))


def claims(source: Source) -> tuple[str, ...]:
    """Files of the directory that belong to a model; empty where it holds none."""
    try:
        with os.scandir(source.path) as entries:  # the name first: a folder may hold a million other files
            names = sorted(e.name for e in entries if _of_model(e.name) and (e.is_symlink() or e.is_file()))
    except OSError:
        return ()
    weights = [name for name in names if _WEIGHTS.match(name) or _INDEX.match(name)]
    configs = [name for name in names if name in _CONFIGS]
    if not weights and not configs:
        return ()
    return (*configs, *weights, *(name for name in names if name in _OTHERS))


def read(source: Source, sink: Sink) -> None:
    """The directory as one checkpoint."""
    names = claims(source)
    if not names:
        return
    configs = {name: _json(source, name, sink) for name in _CONFIGS if name in names}
    tokenizer = configs.get("tokenizer_config.json")
    index_name = next((name for name in names if _INDEX.match(name)), "")
    index, lines, outside = _index(source, index_name, sink) if index_name else (None, {}, ())
    files = tuple(name for name in names if _WEIGHTS.match(name))
    tensors, broken, scales, read_scales = _weights(source, files)
    # A shard without a header says nothing: alone it is no evidence.
    read_shards = {tensor.file for tensor in tensors}
    shards = (name for name in files if name not in broken or name in read_shards)
    for name in (*(n for n, value in configs.items() if value is not None), *shards, *([index_name] if index else [])):
        sink.files.append(inside(source.name, name))
    sink.checkpoints.append(
        HfCheckpoint(
            path=source.name,
            config=configs.get("config.json"),
            generation_config=configs.get("generation_config.json"),
            tokenizer_config=_with_template(source, names, tokenizer),
            tokenizer_tokens=_tokens(source, names, tokenizer, sink),
            index=index,
            index_source=inside(source.name, index_name) if index_name else "",
            index_lines=lines,
            index_outside=outside,
            files=files,
            broken=broken,
            tensors=tuple(tensors),
            bad_scales=tuple(scales),
            scales_read=read_scales,
        )
    )
    for name, why in broken.items():
        sink.problem(Source(source.path / name, inside(source.name, name)), "safetensors", why)


def inside(directory: str, name: str) -> str:
    """Path of a file of the directory, relative to what was checked."""
    return name if directory in ("", ".") else f"{directory}/{name}"


def _allowed(directory: Path, name: str) -> Path | None:
    """The file, if it lies in the directory or in the blobs of the same hub cache."""
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    cache = home.parent.parent / "blobs"
    return path if real.is_file() and (real.parent == home or real.parent == cache) else None


def _json(source: Source, name: str, sink: Sink) -> dict[str, Any] | None:
    """A JSON object of the directory; a problem, and None, when it is none."""
    here = Source(source.path / name, inside(source.name, name))
    path = _allowed(source.path, name)
    try:
        if path is None or path.stat().st_size > MOST_JSON:
            sink.problem(here, "JSON", "it lies outside the directory, or is too large")
            return None
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        sink.problem(here, "JSON", f"no JSON ({error})"[:200], line=getattr(error, "lineno", None), whole=True)
        return None
    if isinstance(value, dict):
        return value
    sink.problem(here, "JSON", "no JSON object", line=1, whole=True)
    return None


def _index(source: Source, name: str, sink: Sink) -> tuple[dict[str, str] | None, dict[str, int], tuple[str, ...]]:
    value = _json(source, name, sink)
    if value is None:
        return None, {}, ()
    here = Source(source.path / name, inside(source.name, name))
    listed = value.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        sink.problem(here, "index", "it has no weight_map of file names", line=1, whole=True)
        return None, {}, ()
    files = set(listed.values())
    lines: dict[str, int] = {}
    quoted = re.compile(r':\s*"(?P<file>(?:[^"\\]|\\.)*)"')
    with (source.path / name).open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            for match in quoted.finditer(line):
                if match["file"] in files:
                    lines.setdefault(match["file"], number)
    outside = tuple(sorted(file for file in files if "/" in file or "\\" in file or file in ("", ".", "..")))
    return listed, lines, outside


def _tokens(source: Source, names: tuple[str, ...], tokenizer: dict[str, Any] | None, sink: Sink) -> dict[str, int]:
    found: dict[str, int] = {}
    added = (tokenizer or {}).get("added_tokens_decoder")
    for key, one in added.items() if isinstance(added, dict) else ():
        if isinstance(one, dict) and isinstance(one.get("content"), str) and str(key).isdigit():
            found[one["content"]] = int(key)
    if found or not any(name in names for name in ("tokenizer.json", "added_tokens.json")):
        return found
    full = _json(source, "tokenizer.json", sink) if "tokenizer.json" in names else None
    listed = (full or {}).get("added_tokens")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and isinstance(one.get("content"), str) and isinstance(one.get("id"), int):
            found[one["content"]] = one["id"]
    more = _json(source, "added_tokens.json", sink) if "added_tokens.json" in names else None
    found |= {key: value for key, value in (more or {}).items() if isinstance(value, int)}
    return found


def _with_template(source: Source, names: tuple[str, ...], tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The tokenizer's config, with the chat template of a file of its own."""
    if tokenizer is not None and "chat_template" in tokenizer:
        return tokenizer
    if "chat_template.jinja" not in names or (path := _allowed(source.path, "chat_template.jinja")) is None:
        return tokenizer
    with path.open("rb") as stream:
        return (tokenizer or {}) | {"chat_template": stream.read(1 << 20).decode("utf-8", "replace")}


# -- safetensors


def _weights(source: Source, files: tuple[str, ...]) -> tuple[list[Tensor], dict[str, str], list[BadScale], int]:
    tensors: list[Tensor] = []
    broken: dict[str, str] = {}
    bad: list[BadScale] = []
    budget, count = MOST_SCALES, 0
    for name in files:
        if not name.endswith(".safetensors"):
            continue
        path = _allowed(source.path, name)
        if path is None:
            broken[name] = "it is a link to a place outside the directory"
            continue
        try:
            header, base, size = header_of(path)
        except (OSError, ValueError) as error:
            broken[name] = str(error)
            continue
        scales = []
        for key, one in header.items():
            if len(tensors) < MOST_TENSORS:
                tensors.append(Tensor(key, one["dtype"], tuple(one["shape"]), name))
            if base + one["data_offsets"][1] > size:
                broken[name] = f"it is cut off: {key} ends behind the end of the file"
            elif _SCALE.search(key) and one["dtype"] in _WORDS:
                scales.append((key, one))
        with path.open("rb") as stream:
            for key, one in scales:
                begin, end = one["data_offsets"]
                if 0 < end - begin <= budget:
                    budget -= end - begin
                    count += 1
                    stream.seek(base + begin)
                    if found := bad_values(stream.read(end - begin), one["dtype"], key, name):
                        bad.append(found)
    return tensors, broken, bad, count


def header_of(path: Path) -> tuple[dict[str, dict[str, Any]], int, int]:
    """(tensors, offset of the data, size of the file). Raises ValueError that says what is wrong."""
    size = path.stat().st_size
    if size < 8:
        raise ValueError("it is too short for a header")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        if length > MOST_HEADER or 8 + length > size:
            raise ValueError(f"its header says that it is {length} bytes: cut off, or no safetensors file")
        try:
            header = json.loads(data[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its header is no JSON ({error})"[:200]) from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    for key, one in header.items():
        if not _is_entry(one):
            raise ValueError(f"its header does not describe {key[:100]!r}")
    return header, 8 + length, size


def _is_entry(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("dtype"), str):
        return False
    shape, offsets = one.get("shape"), one.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(isinstance(x, int) and x >= 0 for x in (*shape, *offsets)) and bool(offsets[0] <= offsets[1])


def bad_values(raw: bytes, dtype: str, name: str, file: str) -> BadScale | None:
    """What is no positive finite number among the scales; compares bit patterns, so nothing is converted."""
    code, infinite, sign = _WORDS[dtype]
    words = array(code)
    if words.itemsize == 0 or len(raw) % words.itemsize:
        return None
    words.frombytes(raw)
    if not words or (min(words) > 0 and max(words) < infinite):
        return None
    top = infinite if dtype != "F8_E4M3" else None  # E4M3 has NaN but no Inf
    nan = inf = zero = negative = 0
    for word in words:
        value = word & (sign - 1)
        if value == 0:
            zero += 1
        elif value == top:
            inf += 1
        elif value >= infinite:
            nan += 1
        elif word & sign:
            negative += 1
    if not nan + inf + zero + negative:
        return None
    return BadScale(name, file, len(words), nan, inf, zero, negative)


READERS: tuple[Reader, ...] = (Reader("hf", ("*",), read, directory=True, claims=claims),)
