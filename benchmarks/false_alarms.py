"""False alarms on healthy runs: the demo with ten seeds, judged live and again from what it left.

    python -m benchmarks.false_alarms [--seeds N] [--num-rollout N]

Every warn or fail is a false alarm: nothing is wrong with these runs. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def alarms(verdicts: dict[str, str]) -> dict[str, str]:
    """Of id -> status those that call for somebody."""
    return {name: status for name, status in verdicts.items() if status in ("warn", "fail")}


def rltop(*words: str, env: dict[str, str]) -> dict[str, Any]:
    """The JSON that a command prints. Raises RuntimeError with its stderr when it prints none."""
    ended = subprocess.run(
        [sys.executable, "-m", "rltop", *words, "--json"], capture_output=True, text=True, env=env, check=False
    )
    try:
        found: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        raise RuntimeError(f"rltop {' '.join(words)}: {ended.stderr[-2000:]}") from None
    return found


def worst(report: dict[str, Any]) -> dict[str, str]:
    """Worst status of each check of a report of `rltop check`."""
    rank = {"fail": 0, "warn": 1, "info": 2, "pass": 3, "skip": 4}
    found: dict[str, str] = {}
    for verdict in report["verdicts"]:
        name, status = verdict["id"], verdict["status"]
        if name not in found or rank[status] < rank[found[name]]:
            found[name] = status
    return found


def main(seeds: int, num_rollout: int) -> int:
    """Print one line per seed and the count."""
    total = 0
    with tempfile.TemporaryDirectory(prefix="rltop-") as folder:
        env = {**os.environ, "RLTOP_DIR": folder}
        for seed in range(1, seeds + 1):
            live = rltop("demo", "--headless", "--seed", str(seed), "--num-rollout", str(num_rollout), env=env)
            now = {name: check["status"] for name, check in live["checks"].items()}
            left = worst(rltop("check", str(Path(folder) / "runs" / live["run"]), env=env))
            found = [alarms(now), alarms(left)]
            total += sum(map(len, found))
            tested = [sum(status != "skip" for status in each.values()) for each in (now, left)]
            print(
                f"seed {seed}: {live['state']}, {tested[0]} checks live, {tested[1]} from files; "
                f"alarms live {found[0] or 'none'}, from files {found[1] or 'none'}",
                flush=True,
            )
    print(f"false alarms on {seeds} healthy runs of {num_rollout} rollouts: {total}")
    return 1 if total else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--num-rollout", type=int, default=40)
    options = parser.parse_args()
    sys.exit(main(options.seeds, options.num_rollout))
