"""What can be seen of the dumps of a train-only run before anything heavy starts: holes, cut files, other models.

Needs no torch: `rltop.evidence.dump_file` reads the samples, one by one. Small dumps are judged whole, of a large first
one the first samples; what is not looked at here is judged by the same rules when its rollout comes
(`rltop.train.load_dump`).
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.train.arguments import TrainConfig
from rltop.train.load_dump import FLAG, LOADABLE, Expected, check_text, dump_path, examine, expected_of, foreign
from rltop.train.resume import find_checkpoint
from rltop.train.sample import Sample
from rltop.train.tiny_shape import TinyModelConfig

MOST_BYTES = 64 << 20
"""Of all dumps that are read here to the end."""
FIRST_SAMPLES = 2_000
"""Of a first dump that is larger."""
_LISTED = 8


def check_dumps(config: TrainConfig) -> None:
    """Raise RltopError (exit code 2) for the first dump that the run could not train on."""
    pattern = config.load_debug_rollout_data
    if pattern is None:
        return
    found = find_checkpoint(config.load) if config.load is not None else None
    first = 0 if found is None else found.iteration + 1
    paths = list(dict.fromkeys(dump_path(pattern, rollout_id) for rollout_id in range(first, config.num_rollout)))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise _missing(pattern, first, config.num_rollout, missing)
    expected, left = _expected(config), MOST_BYTES
    for at, path in enumerate(paths):
        size = path.stat().st_size
        whole = size <= left
        if at == 0 or whole:
            samples = judge(path, expected, most=None if whole else FIRST_SAMPLES)
            left -= size if whole else 0
            if at == 0:
                _check_reads(config, path, samples)


def judge(path: Path, expected: Expected, *, most: int | None = None) -> list[Sample]:
    """Read a dump without torch, and at most so many samples; returns the first few. Raises RltopError."""
    try:
        with DumpFile.open(path) as dump:
            samples = examine(path, dump.kind, dump, expected, most=most) if dump.kind in LOADABLE else []
            if (refused := foreign(path, dump.foreign)) is not None:
                raise refused
            return samples or examine(path, dump.kind, (), expected)
    except RltopError as error:
        if error.where == str(path):
            error.where = f"{FLAG} {path}"
        raise


def _expected(config: TrainConfig) -> Expected:
    if config.hf_checkpoint is not None:
        return expected_of(config, config.hf_checkpoint)
    return dataclasses.replace(expected_of(config, None), vocab_size=TinyModelConfig().vocab_size)


def _check_reads(config: TrainConfig, path: Path, samples: Sequence[Sample]) -> None:
    """The tokenizer of the checkpoint must read what the dump says it does."""
    if config.hf_checkpoint is not None:
        from rltop.train.chat import Chat  # needs transformers

        check_text(path, samples, Chat(config.hf_checkpoint, use_template=False).read)


def _missing(pattern: str, first: int, end: int, missing: Sequence[Path]) -> RltopError:
    there = _ids(pattern)
    whole = first
    while whole in there:
        whole += 1
    names = ", ".join(str(path) for path in missing[:_LISTED]) + (", ..." if len(missing) > _LISTED else "")
    if not there:
        why = f"there is no {names}" + ("" if "{" in pattern else "; it is one file, without {rollout_id}")
        return RltopError(
            "no such dump", where=f"{FLAG} {pattern}", why=why, do="the path that the dumps were saved to"
        )
    have = f"{', '.join(map(str, there[:_LISTED]))}{', ...' if len(there) > _LISTED else ''}"
    return RltopError(
        "dumps are missing",
        where=f"{FLAG} {pattern}",
        why=f"rollouts {first} to {end - 1} are asked for, {len(missing)} are not there ({names}); there are {have}",
        do=f"--num-rollout {whole}"
        if whole > first
        else f"the dumps from rollout {first} on, or --load of a run to go on",
    )


class _Marker:
    """Stands for a number in a path, whatever the format."""

    text = "\0"

    def __format__(self, spec: str) -> str:
        return self.text


def _ids(pattern: str) -> list[int]:
    """Rollout ids for which there is a file."""
    parts = pattern.format(rollout_id=_Marker()).split(_Marker.text)
    if len(parts) < 2:
        return []
    shape = re.compile("(?P<id>[0-9]+)".join([re.escape(parts[0]), "(?P=id)".join(map(re.escape, parts[1:]))]))
    found = (shape.fullmatch(path) for path in glob.glob("*".join(map(glob.escape, parts))))
    return sorted(int(match["id"]) for match in found if match is not None)
