"""Train dumps put beside a rollout dump, in the ways in which frameworks say which sample is which."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_trained import Trained
from tests.evidence.dump_files import rollout, sample, save

COUNT = 8


def joined(at: Path, paths: list[Path]) -> list[float | None]:
    """The trainer's first log-prob of each sample of a rollout, once everything was gone through."""
    with ExitStack() as stack:
        trained = Trained(stack, paths)
        with DumpFile.open(at) as dump:
            samples = list(dump)
            trained.sample(samples[0].at, samples[0].index, samples[0].tokens)
            while trained.more():
                pass
            found = [trained.sample(one.at, one.index, one.tokens) for one in samples]
    return [None if one is None or one.log_probs is None else one.log_probs[0] for one in found]


def entry(at: int, **more: Any) -> dict[str, Any]:
    row = sample(at)
    return {"tokens": row["tokens"], "response_lengths": row["response_length"], "log_probs": [-float(at)] * 3} | more


@pytest.mark.parametrize("key", ["rollout_position", "sample_index"])
def test_by_place_or_index_over_two_shards(tmp_path: Path, key: str) -> None:
    at = rollout(tmp_path / "3.pt", COUNT)
    paths = []
    for rank in range(2):
        rows = [entry(one, **{key: one}) for one in range(COUNT) if one % 2 == rank]
        content = {"format_version": 2, "rollout_id": 3, "samples": rows, "dp_shards": []}
        paths.append(save(tmp_path / "train" / f"3_{rank}.pt", content))
    assert joined(at, paths) == [-float(one) for one in range(COUNT)]


def relax(tmp_path: Path, *, ranks: int = 2) -> list[Path]:
    """Relax's train dumps: one file per rank, `sample_index` counted in it from 0, no other place of a sample."""
    paths = []
    for rank in range(ranks):
        mine = [one for one in range(COUNT) if one % ranks == rank]
        rows = [entry(one, sample_index=place, decoded_tokens=["x"]) for place, one in enumerate(mine)]
        content = {"rollout_id": 3, "rank": rank, "samples": rows}
        paths.append(save(tmp_path / "train_data" / f"3_{rank}.pt", content))
    return paths


def test_relax_by_tokens(tmp_path: Path) -> None:
    assert joined(rollout(tmp_path / "3.pt", COUNT), relax(tmp_path)) == [-float(one) for one in range(COUNT)]
    assert joined(tmp_path / "3.pt", relax(tmp_path, ranks=1)) == [-float(one) for one in range(COUNT)]


def test_relax_never_by_the_number_in_its_rank(tmp_path: Path) -> None:
    at = rollout(tmp_path / "3.pt", COUNT, response="another answer")
    assert joined(at, relax(tmp_path)) == [None] * COUNT
