"""Write a run directory with a long journal, fast: `python -m benchmarks.journal_seed --run-dir DIR`.

100,000 steps of 20 series take a few seconds. A daemon started on the directory shows a finished run.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from rltop import runs
from rltop.daemon import schema
from rltop.daemon.journal import CHUNK_POINTS, insert_chunk

NAMES = (
    "rollout/raw_reward",
    "train/kl_loss",
    "train/grad_norm",
    "rollout/response_len/mean",
    "train/train_rollout_logprob_abs_diff",
    "train/loss",
    "train/pg_loss",
    "train/entropy_loss",
    "train/ppo_kl",
    "train/pg_clipfrac",
    "rollout/rewards",
    "rollout/log_probs",
    "rollout/ref_log_probs",
    "rollout/rollout_log_probs",
    "rollout/truncated_ratio",
    "rollout/entropy",
    "perf/step_time",
    "perf/rollout_time",
    "perf/update_weights_time",
    "perf/actor_train_tok_per_s",
)


def seed(run_dir: Path, *, steps: int = 100_000, series: int = 20, events: int = 2000, seed: int = 0) -> Path:
    """Fill the journal of `run_dir` (made if need be); returns its path. The same seed gives the same values.

    Now and then a value is NaN, as in a real run.
    """
    runs.private_dir(run_dir)
    path = run_dir / "journal.sqlite"
    names = [NAMES[i] if i < len(NAMES) else f"extra/series_{i}" for i in range(series)]
    rng = random.Random(seed)
    now = time.time()
    with closing(schema.connect(path)) as connection:
        schema.prepare(connection, path, wal=True)
        connection.execute("BEGIN")
        state: dict[str, object] = {"run": _run(run_dir.name, steps, now)}
        for number, name in enumerate(names):
            values = _curve(rng, steps, number)
            for start in range(0, steps, CHUNK_POINTS):
                stop = min(start + CHUNK_POINTS, steps)
                insert_chunk(connection, name, array("d", map(float, range(start, stop))), values[start:stop])
            bad = sum(1 for value in values if not math.isfinite(value))
            newest = {"step": steps - 1, "value": values[-1], "t": now, "axis": "rollout"}
            state[f"metric/{name}"] = {**newest, "rollout_id": steps - 1, "nan": bad}
        encode = msgspec.msgpack.encode
        connection.executemany(
            "INSERT INTO events VALUES (?, ?, 'log', 'info', ?, 'trainer/0', NULL)",
            ((i, now - events + i, f"rollout {i}: all is well") for i in range(1, events + 1)),
        )
        connection.executemany(
            "INSERT OR REPLACE INTO state VALUES (?, ?, ?)", ((key, now, encode(value)) for key, value in state.items())
        )
        connection.execute("COMMIT")
    return path


def _curve(rng: random.Random, steps: int, number: int) -> array[float]:
    scale = 1.0 / (1 + number)
    values = array("d", [0.0]) * steps
    for step in range(steps):
        values[step] = scale * (1.0 - math.exp(-step / (steps / 5))) + 0.02 * rng.random()
    for _ in range(steps // 10_000):
        values[rng.randrange(steps)] = math.nan
    return values


def _run(name: str, steps: int, now: float) -> dict[str, object]:
    return {
        "name": name,
        "framework": "rltop",
        "mode": "full",
        "state": "done",
        "text": "",
        "started": now - steps,
        "ended": now,
        "backend": "seeded journal, no trainer",
        "start_rollout_id": 0,
        "fresh_start": True,
        "num_rollout": steps,
        "vocab_size": 259,
        "injected_faults": [],
        "stand_ins": ["this journal was made up by benchmarks/journal_seed.py"],
        "args": {},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=20)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    began = time.perf_counter()
    path = seed(options.run_dir, steps=options.steps, series=options.series, events=options.events, seed=options.seed)
    size = path.stat().st_size / 1e6
    print(
        f"{path}: {options.series} series of {options.steps} steps, {size:.1f} MB, {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
