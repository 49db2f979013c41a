"""`rltop dump show`: the samples of a dump, as text, as JSON, or in the pager on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltop.cli.dump_open import Shown, Wanted, chosen_dumps, opened, picked
from rltop.cli.dump_text import LEGEND, Colour, sample_lines, with_colours
from rltop.cli.output import clean, note, number, print_json, size, table
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_sample import DumpSample
    from rltop.evidence.token_text import TokenTexts

METRICS_BYTES = 32 << 20
"""Of a larger dump the metrics are only computed when they are asked for: it has to be read whole."""
MOST_VALUES = 1 << 20
"""Elements of one tensor in JSON."""


@dataclass(frozen=True, slots=True)
class How:
    """How samples are shown."""

    as_json: bool = False
    plain: bool = False
    metrics: bool | None = None
    whole: bool = False
    tokens: bool = False
    colour: Colour = "auto"
    ascii_only: bool = False
    tokenizer: Path | None = None
    """A checkpoint's directory, for dumps without a tokenizer beside them."""


def show(pattern: str, wanted: Wanted, how: How, *, evaluation: bool) -> int:
    """The command. Raises RltopError for what can not be shown."""
    texts = _Texts(how.tokenizer)
    refs = chosen_dumps(pattern, evaluation=evaluation)
    if not how.as_json and not how.plain and sys.stdout.isatty() and sys.stdin.isatty():
        from rltop.tui.screens.dump import run_pager

        return run_pager(
            refs,
            ascii_only=how.ascii_only,
            tokenizer=how.tokenizer,
            chosen=wanted.chosen,
            sort=wanted.sort,
            search=wanted.search,
            place=wanted.offset,
        )
    shown = picked(refs, wanted)
    if how.as_json:
        return _json(refs, shown, wanted, how)
    return _text(shown, wanted, how, texts)


def _json(refs: Sequence[DumpRef], shown: Any, wanted: Wanted, how: How) -> int:
    samples: list[dict[str, Any]] = []
    told: dict[str, Any] = {"dumps": [], "offset": wanted.offset, "samples": samples}
    broken: RltopError | None = None
    try:
        samples.extend(_sample(one, how) for one in shown)
    except RltopError as error:
        broken, told["broken"] = error, str(error)
    told["dumps"] = [_dump(ref, how) for ref in refs]
    print_json(told)
    if broken is not None:
        raise broken
    return 0


def _text(shown: Any, wanted: Wanted, how: How, texts: _Texts) -> int:
    from rltop.evidence.dump_whole import whole

    colours = with_colours(how.colour)
    last: DumpRef | None = None
    count = 0
    broken: RltopError | None = None
    try:
        for one in shown:
            if one.ref is not last:
                last = one.ref
                print("\n".join(_title(one.ref, how)))
                if colours and not count:
                    note(LEGEND)
            told = whole(one.sample, one.trained, (), texts.of(one.ref))
            print("\n".join(["", *sample_lines(told, colours=colours, everything=how.whole, tokens=how.tokens)]))
            count += 1
    except RltopError as error:  # what came before it was shown
        broken = error
    if not count and broken is not None:
        raise broken
    if not count:
        note("no sample fits" if wanted.chosen or wanted.search or wanted.offset else "the dump has no samples")
    elif count == wanted.limit:
        note(f"{count} samples from {wanted.offset} on; the next: --offset {wanted.offset + count}")
    if broken is not None:
        raise broken
    return 0


def _title(ref: DumpRef, how: How) -> list[str]:
    parts = [str(ref.path), f"{'eval of ' if ref.is_eval else ''}rollout {number(ref.rollout_id)}", size(ref.bytes)]
    parts += [f"train dump {path}" for path in ref.train]
    found, remarks = _metrics(ref, how)
    bad = [f"  DAMAGED: {clean(ref.damage)}"] if ref.damage else []
    if found is None:
        return [
            "  ".join(parts),
            *bad,
            *([f"  metrics: --metrics (reads all of {size(ref.bytes)})"] if how.metrics is None and not bad else []),
        ]
    return ["  ".join(parts), *bad, *table(("metric", "value"), list(found.items()), indent="  "), *_notes(remarks)]


def _notes(remarks: Sequence[str]) -> list[str]:
    return [f"  note: {clean(one)}" for one in remarks]


def _metrics(ref: DumpRef, how: How) -> tuple[dict[str, float] | None, list[str]]:
    """(recomputed from all samples, remarks on them); None unless asked for, or the dump is small."""
    if how.metrics is False or ref.damage or (how.metrics is None and ref.bytes > METRICS_BYTES):
        return None, []
    from rltop.evidence.dump_stats import DumpStats

    found = DumpStats(is_eval=ref.is_eval)
    try:
        with opened(ref) as dump:
            for sample in dump.samples():
                found.add(sample, dump.trained(sample))
    except RltopError:  # said where the samples are shown; metrics of some of them are none
        return None, []
    return found.metrics(), found.remarks()


def _dump(ref: DumpRef, how: How) -> dict[str, Any]:
    metrics, remarks = _metrics(ref, how)
    told = {
        "path": str(ref.path),
        "kind": ref.kind,
        "rollout_id": ref.rollout_id,
        "eval": ref.is_eval,
        "bytes": ref.bytes,
        "train": [str(path) for path in ref.train],
        "damage": ref.damage,
    }
    return told if metrics is None else {**told, "metrics": metrics, "remarks": remarks}


class _Texts:
    """Texts of tokens, from the tokenizer beside a dump, else the given one; read once per directory."""

    def __init__(self, given: Path | None) -> None:
        """given: a checkpoint's directory. Raises RltopError: it has no tokenizer that is understood."""
        from rltop.evidence.token_text import TokenTexts

        self._found: dict[str, TokenTexts | None] = {}
        self._given = None if given is None else TokenTexts.read(given / "tokenizer.json")
        if given is not None and self._given is None:
            there = (given / "tokenizer.json").is_file()
            raise RltopError(
                "there is no tokenizer that can be read",
                where=f"--tokenizer {given}",
                why="its tokenizer.json is of another shape" if there else "it has no tokenizer.json",
                do="name the directory of a checkpoint with a fast tokenizer",
            )

    def of(self, ref: DumpRef) -> TokenTexts | None:
        from rltop.evidence.token_text import TokenTexts

        folder = str(ref.path.parent)
        if folder not in self._found:
            self._found[folder] = TokenTexts.beside(ref.path) or self._given
        return self._found[folder]


def _sample(one: Shown, how: How) -> dict[str, Any]:
    """Every field of a sample under slime's names, `extra` fields beside them; the trainer's under `train`."""
    told = {"dump": str(one.ref.path), **fields(one.sample)}
    if one.trained is not None:
        told["train"] = fields(one.trained)
    return told


def fields(sample: DumpSample) -> dict[str, Any]:
    """A sample as JSON: fields that the dump lacks are left out."""
    from rltop.evidence.dump_whole import remarks

    known = {
        "at": sample.at,
        "index": sample.index,
        "group_index": sample.group_index,
        "prompt": sample.messages if sample.messages is not None else sample.prompt,
        "response": sample.response,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status,
        "weight_versions": sample.weight_versions,
        "rollout_log_probs": sample.rollout_log_probs,
        "log_probs": sample.log_probs,
        "ref_log_probs": sample.ref_log_probs,
        "loss_mask": sample.loss_mask,
        "metadata": sample.metadata,
    }
    found = {key: _plain(value) for key, value in known.items() if value is not None}
    found |= {key: _plain(value) for key, value in sample.extra.items() if key not in found}
    if odd := remarks(sample, None):
        found["remarks"] = odd
    return {**found, "refused": list(sample.refused)} if sample.refused else found


def _plain(value: Any) -> Any:
    from rltop.evidence.dump_sample import DumpTensor, Refused

    match value:
        case DumpTensor():
            told = {"tensor": value.dtype, "shape": list(value.shape)}
            if math.prod(value.shape) <= MOST_VALUES:
                told["values"] = list(value.values())
            return told
        case Refused():
            return {"refused": value.name}
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            # Numbers need no look at each of them.
            return value if value and isinstance(value[0], int | float) else [_plain(item) for item in value]
        case _:
            return value
