"""Small tables: greedy probes, bisection runs, GPU memory over time, errors of single sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rltop.checks.found import Row
from rltop.evidence import jsonl
from rltop.evidence.sink import Reader, Sink, Source

MOST_ROWS = 200_000


def _reader(kind: str) -> Callable[[Source, Sink], None]:
    def read(source: Source, sink: Sink) -> None:
        found: list[Row] = []
        for where, row, _ in jsonl.maps(source, sink, kind, listed=True):
            if len(found) < MOST_ROWS:
                text = ", ".join(f"{key}={value}" for key, value in list(row.items())[:10])[:200]
                found.append(Row(kind, row, replace(where, text=text), len(found)))
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
