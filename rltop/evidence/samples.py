"""Files of one sample per line: `samples*.jsonl`, `rollouts*.jsonl`, and Relax's `rollout_result/*/N.jsonl`.

A response is reduced to measures when its line is read, so memory does not grow with its length. Beside the samples the
file leaves one `Dump` of kind `samples` with the bytes of each field.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rltop.checks.found import Dump
from rltop.checks.observe import Sample, Where
from rltop.checks.samples import make_sample
from rltop.evidence import jsonl
from rltop.evidence.sink import Reader, Sink, Source

MOST_SAMPLES = 50_000
"""Samples of all files together (5 KB each); of more, whole rollouts are left out evenly."""
MOST_LINE = 32 << 20
"""Bytes of one sample: a response of 100,000 tokens with log-probs and routing indices has some 10 MiB."""
_NUMBERED = re.compile(r"(?:^|_)(\d+)$")


def read(source: Source, sink: Sink) -> None:
    """One sample per line."""
    sizes: Counter[str] = Counter()
    have: Counter[str] = Counter()
    indices = []
    total = count = 0
    from_name = rollout_of_name(source)
    for where, row, size in jsonl.maps(source, sink, "samples", most=MOST_LINE, listed=True):
        count += 1
        total += size
        measure_fields(row, sizes, have)
        place = Where(source.name, where.line)
        indices.append(add(sink, row, source.name, place, count - 1, rollout_id=from_name).index)
    if count:
        sink.dumps.append(
            Dump(
                source.name,
                "samples",
                samples=count,
                indices=tuple(indices),
                field_bytes=dict(sizes),
                fields=dict(have),
                total_bytes=total,
            )
        )
        sink.files.append(source.name)


def rollout_of_name(source: Source) -> int | None:
    """Rollout id of a file that is called after it (`17.jsonl`, `eval_17.pt`)."""
    found = _NUMBERED.search(source.path.stem)
    return int(found[1]) if found and len(found[1]) <= 12 and source.path.stem[0] in "0123456789e" else None


def measure_fields(row: Mapping[str, Any], sizes: Counter[str], have: Counter[str]) -> None:
    """Counts bytes (as JSON) and presence of each field of a row."""
    for key, value in row.items():
        sizes[key] += len(value) + 2 if isinstance(value, str) else len(json.dumps(value, default=str))
        have[key] += value is not None


def add(
    sink: Sink,
    row: Mapping[str, Any],
    source: str,
    where: Where,
    position: int,
    *,
    rollout_id: int | None = None,
) -> Sample:
    """Makes the sample of one row and puts it into the sink."""
    rollout = next((row[key] for key in ("rollout_id", "rollout", "step") if is_id(row.get(key))), rollout_id)
    sample = make_sample(
        plain(row, position),
        rollout_id=rollout,
        mode=str(row.get("mode") or ""),
        when=str(row.get("when") or ""),
        where=where,
    )
    sink.samples.append(sample)
    if len(sink.samples) > MOST_SAMPLES:
        sink.samples[:] = thinned(sink.samples)
    return sample


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """About half of the samples: every second rollout with all that is in it, the first and the newest among them;
    where that leaves too many (a single large rollout), every second sample."""
    rollouts = list(dict.fromkeys((one.mode, one.rollout_id) for one in samples))
    kept = {*rollouts[::2], rollouts[-1]}
    found = [one for one in samples if (one.mode, one.rollout_id) in kept]
    return found if len(found) <= 3 * len(samples) // 4 else found[::2]


def is_id(value: object) -> bool:
    """A whole number that can be an id."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(row: Mapping[str, Any], position: int) -> dict[str, Any]:
    """The row under the wire's names. `tokens` of slime's samples are prompt and response; of a row without a response
    length they are taken as the response's."""
    fields = dict(row)
    response = row.get("response", row.get("output", row.get("completion", row.get("text"))))
    fields["response"] = response if isinstance(response, str) else ""
    fields["prompt"] = row.get("prompt") if isinstance(row.get("prompt"), str) else _messages(row.get("prompt"))
    fields["index"] = row["index"] if is_id(row.get("index")) else position
    length = row.get("response_length", row.get("length"))
    fields["response_length"] = length if is_id(length) else None
    tokens = row.get("token_ids", row.get("response_token_ids"))
    if not isinstance(tokens, list):
        tokens = row.get("tokens")
        tokens = tokens if isinstance(tokens, list) else []
        if is_id(length) and 0 <= length < len(tokens):
            tokens = tokens[len(tokens) - length :]
    fields["token_ids"] = tokens
    if not is_id(row.get("last_token_id")) and tokens and isinstance(tokens[-1], int):
        fields["last_token_id"] = tokens[-1]
    fields["reward"] = reward_of(row.get("reward", row.get("score")))
    if not row.get("weight_version") and row.get("weight_versions") is not None:
        fields["weight_version"] = row["weight_versions"]
    return fields


def reward_of(value: object) -> float | None:
    """A number, or the one number (or `score`) of a map of rewards."""
    if isinstance(value, Mapping):
        value = value.get(reward_key_of(value))
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) else None


def reward_key_of(value: Mapping[Any, Any]) -> Any:
    """The key of a map of rewards that counts where nobody named one: `score`, `reward`, `acc`, or its only number."""
    numbers = [k for k, v in value.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    chosen = next((key for key in ("score", "reward", "acc") if key in numbers), None)
    return chosen if chosen is not None else numbers[0] if len(numbers) == 1 else None


def _messages(value: object) -> str:
    """Text of a list of chat messages."""
    if not isinstance(value, list):
        return ""
    return "\n".join(str(one.get("content", ""))[:4000] for one in value[:50] if isinstance(one, dict))


def _sniff(_source: Source, head: bytes) -> bool:
    return (
        head.lstrip().startswith(b"{") and b'"response": "' in head.replace(b'":"', b'": "') and b'"path"' not in head
    )


READERS: tuple[Reader, ...] = (
    Reader("samples", ("samples*.jsonl", "rollouts*.jsonl", "*_samples.jsonl"), read, _sniff),
)
