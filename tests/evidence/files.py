"""Writes evidence files and reads them with the table of readers, file by file."""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rltop.evidence.readers import READERS
from rltop.evidence.sink import Sink, Source

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> (type, shape, bytes)."""


def read(root: Path, sink: Sink | None = None) -> Sink:
    """Everything under `root`, each file by the first reader whose name pattern fits."""
    sink = sink or Sink()
    directories = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
    claimed: set[Path] = set()
    for directory in directories:
        name = directory.relative_to(root).as_posix()
        source = Source(directory, "" if name == "." else name)
        for reader in READERS:
            if reader.directory and reader.claims and directory not in claimed and (names := reader.claims(source)):
                reader.read(source, sink)
                for one in names:
                    claimed |= {directory / one, *(directory / one).rglob("*")}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path not in claimed):
        source = Source(path, path.relative_to(root).as_posix())
        for reader in READERS:
            if not reader.directory and any(fnmatch.fnmatch(path.name.lower(), name) for name in reader.names):
                reader.read(source, sink)
                break
    return sink


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file of one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def document(path: Path, value: Any) -> Path:
    """A JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    return path


def safetensors(path: Path, tensors: Tensors) -> Path:
    """A safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def bf16(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """A BF16 tensor of ones."""
    size = 1
    for one in shape:
        size *= one
    return "BF16", shape, b"\x80\x3f" * size


def f32(values: Iterable[float]) -> tuple[str, tuple[int, ...], bytes]:
    """A flat F32 tensor."""
    listed = list(values)
    return "F32", (len(listed),), struct.pack(f"<{len(listed)}f", *listed)
