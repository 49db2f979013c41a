"""SGLang's crash dumps, `FOLDER/<host>/crash_dump_<time>.pkl` of `--crash-dump-folder`, read without unpickling.

    {"server_args": ServerArgs, "requests": [(GenerateReqInput, answer so far, created, finished), ...],
     "launch_command": "..."}

(0.5.14 and 0.5.23, managers/tokenizer_manager.py `dump_requests_before_crash`): what finished in the last five minutes,
then what was in flight. Such a file has prompts and may have keys: only what a request asks for is taken over, and
nothing of the server's arguments. No class is imported (`pickles.Walker`).

Failure policy: `Unreadable` with the reason. An entry that is no request is left out and counted.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.evidence.pickle_values import Map, Record, Seq, Unreadable
from rltop.evidence.pickles import Walker

MOST_BYTES = 64 << 20
"""Of a file that is read: its answers, with a log-prob of every token, take some eight times as much memory."""
MOST_DEPTH = 8
_CLASSES = ("GenerateReqInput", "ServerArgs")
_ASKED = (
    *("text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "priority"),
)
"""Fields of a request that say what it computes. Left out: ids, sessions, routing, headers, labels."""
_LOST = ("input_embeds", "image_data", "video_data", "audio_data", "lora_path", "positional_embed_overrides")
"""A request with one of these computes something that can not be asked for again from here."""


@dataclass(frozen=True, slots=True)
class Flown:
    """A request that was made."""

    body: Mapping[str, Any]
    """Of `/generate`, for one prompt or several."""
    began: float
    """Wall clock, seconds."""
    ended: float | None
    """None: it was in flight."""


@dataclass(frozen=True, slots=True)
class CrashDump:
    """What was read."""

    requests: tuple[Flown, ...]
    """In the order in which they came."""
    left_out: int
    """Entries that can not be asked for again: images, embeddings, adapters, or no request at all."""


def crash_dumps(folder: Path) -> list[Path]:
    """The dumps under a `--crash-dump-folder`, the newest first. An unreadable folder has none."""
    found: list[tuple[float, Path]] = []
    for path in (*folder.glob("*.pkl"), *folder.glob("*/*.pkl")):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)]


def read_crash_dump(path: Path) -> CrashDump:
    """Raises Unreadable."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Unreadable(f"it has {size >> 20} MiB, more than the {MOST_BYTES >> 20} that are read")
        if size == 0:
            raise Unreadable("it is empty: the engine was killed before it wrote it")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            view = memoryview(whole)
            try:
                value = Walker(view, records=_CLASSES).next()
            finally:
                view.release()
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    rows = value.get("requests") if isinstance(value, Map) else None
    if not isinstance(rows, Seq):
        raise Unreadable("it is no crash dump: it has no list `requests`")
    made = [_flown(row) for row in rows.items]
    kept = sorted((one for one in made if one is not None), key=lambda one: one.began)
    return CrashDump(tuple(kept), len(made) - len(kept))


def most_at_once(requests: Sequence[Flown]) -> int:
    """The largest number of requests that were open at one time, prompts of a batch one by one."""
    moves: list[tuple[float, int]] = []
    for one in requests:
        size = max(1, prompts(one.body))
        moves.append((one.began, size))
        if one.ended is not None:
            moves.append((max(one.ended, one.began), -size))
    open_now = most = 0
    for _, change in sorted(moves, key=lambda move: (move[0], move[1])):
        open_now += change
        most = max(most, open_now)
    return most


def prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a body of `/generate` has."""
    ids, text = body.get("input_ids"), body.get("text")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return len(text) if isinstance(text, list) else 1


def singles(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A body for each prompt: fields that are lists of one per prompt are taken apart, as SGLang does it."""
    count = prompts(body)
    many = isinstance(body.get("text"), list) or (
        isinstance(body.get("input_ids"), list) and bool(body["input_ids"]) and isinstance(body["input_ids"][0], list)
    )
    for at in range(count):
        yield {
            name: value[at]
            if many and name != "modalities" and isinstance(value, list) and len(value) == count
            else value
            for name, value in body.items()
        }


def _flown(row: Any) -> Flown | None:
    if not isinstance(row, tuple) or len(row) < 4 or not isinstance(row[0], Record):
        return None
    asked, answer, began, ended = row[:4]
    if any(asked.get(name) is not None for name in _LOST):
        return None
    body = {name: plain for name in _ASKED if (plain := _plain(asked.get(name))) not in (None, False, [])}
    if not ("text" in body or "input_ids" in body) or not isinstance(began, int | float):
        return None
    if "input_ids" in body:
        body.pop("text", None)  # SGLang fills in one of the two
    body["sampling_params"] = body.get("sampling_params") or {}
    return Flown(body, float(began), float(ended) if _finished(answer) and isinstance(ended, int | float) else None)


def _finished(answer: Any) -> bool:
    """SGLang writes a time of the end for all of them; what was in flight has no reason for its end."""
    meta = answer.get("meta_info") if isinstance(answer, Map) else None
    return isinstance(meta, Map) and meta.get("finish_reason") is not None


def _plain(value: Any, depth: int = 0) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Seq(items=array()):
            return list(value.items)
        case Map() | Seq() | tuple() if depth >= MOST_DEPTH:
            return None
        case Seq():
            return [_plain(one, depth + 1) for one in value.items]
        case tuple():
            return [_plain(one, depth + 1) for one in value]
        case Map():
            return {str(key): _plain(one, depth + 1) for key, one in value.items.items()}
        case _:
            return None
