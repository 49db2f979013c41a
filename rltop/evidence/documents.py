"""Small documents that rules look up: server settings, workers, versions, name and rule lists, GPU processes, notes.

Keys and tokens of servers are masked when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltop.checks.found import Document
from rltop.evidence import json_files
from rltop.evidence.sink import Reader, Sink, Source

MOST_NOTE = 64 << 10


def _reader(kind: str, wrap: str) -> Callable[[Source, Sink], None]:
    def read(source: Source, sink: Sink) -> None:
        loaded = json_files.document(source, sink, kind)
        if loaded is None:
            return
        value, lines = loaded
        fields: dict[str, Any] = value if isinstance(value, dict) else {wrap: value}
        sink.documents.append(Document(kind, source.name, json_files.masked(fields), lines=lines))
        sink.files.append(source.name)

    return read


def read_note(source: Source, sink: Sink) -> None:
    """What the operator believes, as text."""
    with source.path.open("rb") as stream:
        text = stream.read(MOST_NOTE).decode("utf-8", "replace")
    sink.documents.append(Document("note", source.name, text=text))
    sink.files.append(source.name)


READERS: tuple[Reader, ...] = (
    Reader("document", ("server_info*.json",), _reader("server_info", "servers")),
    Reader("document", ("router_workers*.json", "workers*.json"), _reader("router_workers", "workers")),
    Reader("document", ("versions*.json",), _reader("versions", "versions")),
    Reader("document", ("tensor_names*.json", "*_tensor_names.json"), _reader("tensor_names", "names")),
    Reader("document", ("rules*.json", "*ignore*.json"), _reader("ignore_rules", "rules")),
    Reader("document", ("gpu_procs*.json",), _reader("gpu_procs", "processes")),
    Reader("note", ("*note*.txt", "*note*.md"), read_note),
)
