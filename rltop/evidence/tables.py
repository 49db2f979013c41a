"""Small tables: greedy probes, bisection runs, GPU memory over time, errors of single sequences."""

from __future__ import annotations

from collections.abc import Callable

from rltop.checks.found import Row
from rltop.checks.observe import Where
from rltop.evidence import json_files
from rltop.evidence.sink import Reader, Sink, Source

MOST_ROWS = 1_000_000


def _reader(kind: str) -> Callable[[Source, Sink], None]:
    def read(source: Source, sink: Sink) -> None:
        found: list[Row] = []
        for number, row, _ in json_files.rows(source, sink, kind):
            if len(found) < MOST_ROWS:
                text = ", ".join(f"{key}={value}" for key, value in list(row.items())[:10])[:200]
                found.append(Row(kind, row, Where(source.name, number, text), len(found)))
        if found:
            sink.rows += found
            sink.files.append(source.name)

    return read


def _has(key: bytes) -> Callable[[Source, bytes], bool]:
    return lambda _source, head: head.lstrip().startswith(b"{") and b'"' + key + b'"' in head


READERS: tuple[Reader, ...] = (
    Reader("rows", ("greedy_probe*.jsonl",), _reader("greedy_probe"), _has(b"output_sha1")),
    Reader("rows", ("bisect_runs*.jsonl", "bisect*.jsonl"), _reader("bisect"), _has(b"outcome")),
    Reader("rows", ("gpu_mem*.jsonl",), _reader("gpu_mem")),
    Reader("rows", ("seq_err*.jsonl",), _reader("seq_error"), _has(b"mult_prob_error")),
)
