"""`.pt` dumps: rollout dumps, train dumps of both formats, the data source's state. Nothing is unpickled.

A rollout dump gives one sample per entry, reduced to measures one by one; a train dump gives the error of each sequence
between engine and trainer, where it holds both log-probs.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rltop.checks.found import Dump, Row
from rltop.checks.observe import Where
from rltop.evidence import samples
from rltop.evidence.dump_entries import Entries
from rltop.evidence.pickle_values import Foreign, Known, Map, Seq, TensorRef, Unreadable
from rltop.evidence.saved import MOST_PICKLE_BYTES, Mapped, mapped
from rltop.evidence.sink import Reader, Sink, Source

MOST_DEPTH = 6
MOST_ITEMS = 200_000
"""Entries of one sample that are turned into plain values."""
_RANK = re.compile(r"_(\d{1,6})$")
_STATE_KEYS = frozenset({"sample_offset", "epoch_id", "sample_group_index", "sample_index"})


def read(source: Source, sink: Sink) -> None:
    """One file."""
    try:
        with mapped(source.path) as file:
            if len(file.data) > MOST_PICKLE_BYTES:
                raise Unreadable(f"a pickle of {len(file.data)} bytes, more than is checked: `rltop dump` shows it")
            _read(source, sink, file)
    except Unreadable as error:
        sink.problem(source, "dump", str(error), whole=True)
    except OSError as error:
        sink.problem(source, "dump", f"it can not be read ({error.strerror or error})", whole=True)


def _read(source: Source, sink: Sink, saved: Mapped) -> None:
    entries = Entries(saved)
    kind = entries.kind
    sizes: Counter[str] = Counter()
    have: Counter[str] = Counter()
    indices: list[int] = []
    keys: list[int] = []
    rollout_id = _of_head(entries, "rollout_id")
    if not samples.is_id(rollout_id):
        rollout_id = samples.rollout_of_name(source) if kind != "state" else None
    is_eval = source.path.name.startswith("eval_")
    count = 0
    for at, entry in () if kind in ("state", "other") or entries.columns else entries.maps():
        count += 1
        for key, size in entry.sizes.items():
            sizes[str(key)] += size + tensor_bytes(entry.items[key])
            have[str(key)] += entry.items[key] is not None
        index = entry.get("index" if kind == "rollout" else "sample_index")
        by_tokens = "decoded_tokens" in entry.items  # Relax writes it, and counts the samples of each rank from 0
        if by_tokens:
            keys.append(hash(tuple(plain(entry.get("tokens"), saved) or ())))
        if samples.is_id(index) and not (by_tokens and kind.startswith("train")):
            indices.append(index)
        where = Where(source.name, None, f"samples[{at}] of {source.path.name}")
        if kind == "rollout" and not is_eval:
            samples.add(sink, _plain_sample(entry, saved), source.name, where, at, rollout_id=rollout_id)
        elif kind.startswith("train"):
            _sequence_error(entry, saved, sink, rollout_id, where)
    value = entries.head
    if entries.columns and isinstance(value, Map):
        indices, sizes, have = _columns(value)
    rank = _of_head(entries, "rank")
    if not samples.is_id(rank) and kind == "train-v1" and (found := _RANK.search(source.path.stem)):
        rank = int(found[1])
    sink.dumps.append(
        Dump(
            source.name,
            kind,
            rollout_id=rollout_id,
            rank=rank if samples.is_id(rank) else None,
            is_eval=is_eval,
            samples=count or len(indices),
            indices=tuple(indices),
            keys=tuple(keys),
            shards=_shards(value) if kind == "train-v2" else {},
            field_bytes=dict(sizes),
            fields=dict(have),
            foreign=entries.foreign,
            total_bytes=saved.total_bytes,
        )
    )
    sink.files.append(source.name)


def _of_head(entries: Entries, key: str) -> Any:
    return entries.head.get(key) if isinstance(entries.head, Map) else None


def _columns(value: Map) -> tuple[list[int], Counter[str], Counter[str]]:
    """v1 of slime: one list per field under `rollout_data`."""
    data = value.get("rollout_data")
    sizes: Counter[str] = Counter()
    have: Counter[str] = Counter()
    indices: list[int] = []
    if isinstance(data, Map):
        for key, size in data.sizes.items():
            sizes[str(key)] = size + tensor_bytes(data.items[key])
            have[str(key)] = len(data.items[key]) if isinstance(data.items[key], Seq) else 1
        for key in ("sample_indices", "sample_index", "indices"):
            listed = data.get(key)
            if isinstance(listed, Seq) and not indices:
                indices = [one for one in listed.items if isinstance(one, int)]
    return indices, sizes, have


def _shards(value: Any) -> dict[str, object]:
    """What `dp_shards` promises: the indices of every shard, and the ranks that are here."""
    listed = value.get("dp_shards")
    promised: list[int] = []
    ranks: list[int] = []
    for shard in listed.items if isinstance(listed, Seq) else ():
        if not isinstance(shard, Map):
            continue
        part = shard.get("sample_indices")
        promised += [one for one in (part.items if isinstance(part, Seq) else ()) if isinstance(one, int)]
        rank = shard.get("data_parallel_rank")
        ranks += [rank] if samples.is_id(rank) else []
    return {"count": len(listed) if isinstance(listed, Seq) else 0, "indices": promised, "ranks": ranks}


def tensor_bytes(value: Any, depth: int = 0) -> int:
    """Bytes of the tensors inside a value; they lie outside the pickle."""
    if isinstance(value, TensorRef):
        return value.nbytes
    if depth >= MOST_DEPTH:
        return 0
    if isinstance(value, Seq):
        inner = () if isinstance(value.items, array) else value.items[:1000]
        return sum(tensor_bytes(one, depth + 1) for one in inner if isinstance(one, TensorRef | Seq | Map))
    if isinstance(value, Map):
        return sum(tensor_bytes(one, depth + 1) for one in list(value.items.values())[:100])
    return 0


def _plain_sample(entry: Map, saved: Mapped) -> dict[str, Any]:
    wanted = (
        "index",
        "group_index",
        "prompt",
        "response",
        "tokens",
        "response_length",
        "label",
        "reward",
        "status",
        "finish_reason",
        "weight_version",
        "weight_versions",
        "rollout_log_probs",
    )
    found = {key: plain(entry.items[key], saved) for key in wanted if key in entry.items}
    status = entry.get("status")
    if isinstance(status, Foreign):
        found["status"] = ""
    return found


def plain(value: Any, saved: Mapped, depth: int = 0) -> Any:
    """Plain lists, maps and numbers; what is foreign, or too deep, is None."""
    if isinstance(value, Foreign | Known) or depth >= MOST_DEPTH:
        return None
    if isinstance(value, TensorRef):
        numbers = saved.floats(value)
        return [int(x) for x in numbers] if value.dtype.startswith(("int", "uint")) else numbers
    if isinstance(value, Seq):
        if isinstance(value.items, array):
            return list(value.items)
        return [plain(one, saved, depth + 1) for one in value.items[:MOST_ITEMS]]
    if isinstance(value, Map):
        return {str(key): plain(one, saved, depth + 1) for key, one in list(value.items.items())[:1000]}
    if isinstance(value, tuple):
        return [plain(one, saved, depth + 1) for one in value[:1000]]
    return value if isinstance(value, str | int | float | bool | bytes | type(None)) else None


def _sequence_error(entry: Map, saved: Mapped, sink: Sink, rollout_id: int | None, where: Where) -> None:
    """Multiplicative error of one sequence: mean over its tokens of exp |trainer - engine|."""
    trainer = _numbers(entry.get("log_probs"), saved)
    engine = _numbers(entry.get("rollout_log_probs"), saved)
    if not trainer or len(trainer) != len(engine):
        return
    gaps = [abs(a - b) for a, b in zip(trainer, engine, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not gaps:
        return
    error = math.fsum(math.exp(min(gap, 700.0)) for gap in gaps) / len(gaps)
    index = entry.get("sample_index")
    fields: Mapping[str, object] = {"step": rollout_id, "sample_index": index, "mult_prob_error": error}
    sink.rows.append(Row("seq_error", fields, where, len(sink.rows)))


def _numbers(value: Any, saved: Mapped) -> list[float]:
    found = plain(value, saved)
    if not isinstance(found, list) or not all(isinstance(x, int | float) for x in found):
        return []
    return [float(x) for x in found]


READERS: tuple[Reader, ...] = (Reader("dump", ("*.pt", "*.pkl", "*.pickle"), read),)
