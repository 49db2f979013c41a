"""The session of `docs/debug.md`, as it stands there: rollouts alone, training alone twice, and on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rltop.evidence.dump_file import DumpFile

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]
DOC = Path(__file__).parents[2] / "docs" / "debug.md"
ENGINE = re.compile(r"cpu_engine|sglang|ray::EngineActor")
TRAINER = re.compile(r"ray::TrainActor|megatron", re.IGNORECASE)
MANAGER = re.compile(r"ray::RolloutManager")


def session() -> list[str]:
    """The command lines of the page, in order; continuation lines are joined."""
    text = DOC.read_text().partition("<!-- session -->")[2].partition("<!-- end -->")[0]
    code = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    lines: list[str] = []
    for line in code.replace("\\\n", " ").splitlines():
        if lines and lines[-1].count('"') % 2:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


@dataclass
class Seen:
    """Command lines of the processes that a command ever had below it, by process."""

    words: dict[tuple[int, float], set[str]] = field(default_factory=dict)

    def look(self, root: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            for process in root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    key = (process.pid, process.create_time())
                    self.words.setdefault(key, set()).add(" ".join(process.cmdline()))

    def any(self, pattern: re.Pattern[str]) -> list[str]:
        return sorted({line for lines in self.words.values() for line in lines if pattern.search(line)})


@dataclass(frozen=True)
class Session:
    """What the page's commands left."""

    directory: Path
    seen: Mapping[str, Seen]
    stderr: Mapping[str, str]

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return found


def play(lines: list[str], directory: Path) -> Session:
    """Run the lines in a shell, one process at a time, watching what it starts."""
    bin_dir = directory / "bin"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "rltop").write_text(f'#!/bin/sh\nexec {sys.executable} -m rltop "$@"\n')
    (bin_dir / "rltop").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLTOP_", "RAY_"))}
    env |= {"PATH": f"{bin_dir}:{env['PATH']}"}
    variables = [line for line in lines if re.match(r"[A-Z]+=", line)]
    seen: dict[str, Seen] = {}
    stderr: dict[str, str] = {}
    for line in lines:
        if line in variables:
            continue
        name = line.rpartition("> ")[2].removesuffix(".json")
        seen[name] = Seen()
        log = directory / f"{name}.err"
        with log.open("w") as errors:
            shell = subprocess.Popen(
                ["bash", "-c", "\n".join([*variables, line])], cwd=directory, env=env, stderr=errors
            )
            root = psutil.Process(shell.pid)
            while True:
                seen[name].look(root)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    shell.wait(timeout=0.1)
                    break
        stderr[name] = log.read_text()
        assert shell.returncode == 0, f"{line}\n{stderr[name][-3000:]}"
    return Session(directory, seen, stderr)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return play(session(), tmp_path_factory.mktemp("session"))


def test_the_page_has_the_whole_session() -> None:
    names = [line.rpartition("> ")[2] for line in session() if line.startswith("rltop ")]
    assert names == ["base.json", "rollout-only.json", "first.json", "second.json", "tensor-parallel.json"]


def test_rollouts_alone_have_engines_and_no_megatron_process(played: Session) -> None:
    seen, result = played.seen["rollout-only"], played.result("rollout-only")
    assert seen.any(ENGINE)
    assert seen.any(MANAGER)
    assert seen.any(TRAINER) == []
    assert (result["mode"], result["steps"], result["syncs"], len(result["rewards"])) == ("rollout-only", 0, 0, 2)
    assert len(result["evaluations"]) == 2
    for line in ("rollout 1: {'rollout/response_lengths'", "'rollout/raw_reward'", "passrate 1: {'passrate/pass@1'"):
        assert line in played.stderr["rollout-only"]
    assert sorted(path.name for path in (played.directory / "dump").glob("*.pt")) == [
        *("0.pt", "1.pt", "eval_0.pt", "eval_1.pt"),
    ]


@pytest.mark.parametrize("name", ["first", "second", "tensor-parallel"])
def test_training_alone_has_a_trainer_and_no_engine_process(played: Session, name: str) -> None:
    seen, result = played.seen[name], played.result(name)
    assert seen.any(TRAINER)
    assert seen.any(ENGINE) == []
    assert (result["mode"], result["steps"], result["syncs"], result["evaluations"]) == ("train-only", 4, 0, [])
    assert result["rewards"] == played.result("rollout-only")["rewards"]


def test_the_same_dump_gives_the_same_bits(played: Session) -> None:
    first, second = played.result("first"), played.result("second")
    assert first["losses"] == second["losses"]
    assert first["grad_norms"] == second["grad_norms"]
    assert min(first["grad_norms"]) > 0.01  # there was something to learn, so equal numbers say something
    assert first["replay"] == {}
    assert (second["replay"]["steps"], second["replay"]["bitwise"], second["replay"]["outside"]) == (4, 4, 0)
    assert "bit for bit" in played.stderr["second"]


def test_two_ranks_give_the_same_within_the_stated_tolerance(played: Session) -> None:
    first, other = played.result("first"), played.result("tensor-parallel")
    assert other["losses"] != first["losses"] or other["grad_norms"] != first["grad_norms"]
    compared = other["replay"]
    assert (compared["steps"], compared["outside"]) == (4, 0)
    assert 0 < compared["grad_norm_gap"] <= compared["grad_norm_tolerance"] < 0.02
    assert compared["loss_gap"] <= compared["loss_tolerance"] < 1e-4
    print(f"TP2 against TP1: {compared}")
    assert "TP1 PP1 DP1, 4096 tokens per micro-batch -> TP2 PP1 DP1" in played.stderr["tensor-parallel"]


def test_the_train_dump_joins_the_rollout_dump(played: Session) -> None:
    rollout = torch.load(played.directory / "dump" / "1.pt", weights_only=True)
    trained = torch.load(played.directory / "train" / "1_0.pt", weights_only=True)
    assert (trained["format_version"], trained["rollout_id"], trained["rank"]) == (2, 1, 0)
    assert trained["raw_reward"] == [sample["reward"] for sample in rollout["samples"]]
    for at, (one, sample) in enumerate(zip(trained["samples"], rollout["samples"], strict=True)):
        assert (one["rollout_position"], one["sample_index"]) == (at, sample["index"])
        assert one["tokens"].tolist() == sample["tokens"]
        assert one["rollout_log_probs"].tolist() == pytest.approx(sample["rollout_log_probs"])
        assert len(one["log_probs"]) == len(one["advantages"]) == sample["response_length"]
    (shard,) = trained["dp_shards"]
    assert sorted(shard["partition"]) == list(range(64))
    assert [at for batch in shard["micro_batch_indices"] for at in batch] == list(range(64))
    assert shard["global_batch_sizes"] == [32, 32]
    with DumpFile.open(played.directory / "train" / "1_0.pt") as dump:
        assert (dump.kind, dump.rollout_id, dump.foreign) == ("train-v2", 1, ())
        assert sum(1 for _ in dump) == 64


@pytest.mark.soak
@pytest.mark.parametrize("sizes", ["--pipeline-model-parallel-size 2", ""])
def test_two_stages_or_two_replicas_give_the_same_within_the_tolerance(played: Session, sizes: str) -> None:
    lines = session()
    variables = [line for line in lines if re.match(r"[A-Z]+=", line)]
    (line,) = [line for line in lines if line.endswith("tensor-parallel.json")]
    line = line.replace("--tensor-model-parallel-size 2", sizes).replace("tensor-parallel.json", "other.json")
    compared = play([*variables, line], played.directory).result("other")["replay"]
    print(f"{sizes or 'data parallel 2'} against one rank: {compared}")
    assert (compared["steps"], compared["outside"]) == (4, 0)
