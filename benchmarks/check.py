"""How fast `rltop check` reads a log, and in how much memory, beside `grep` over the same bytes.

    python -m benchmarks.check [--megabytes 1000]

Writes a synthetic driver log of one run (batch and access lines of engines, steps, timers, samples, progress bars, and
one fault at the end), reads it with the log reader, then counts with `LC_ALL=C grep -E -c` and as many patterns as the
reader has needles, through a pipe as in `cat log | grep`. Both numbers come from one run each on this machine, in
seconds of CPU time, so that other work on it does not count; the wall time stands beside.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GOAL = 20
"""The reader may take at most this many times as long as grep."""


def lines(number: int) -> Iterator[str]:
    """Lines of round `number` of a run: about 60 kB, a minute of wall time."""
    hour, minute = divmod(number % 1440, 60)
    day = 1 + number // 1440 % 28
    stamp = f"2026-03-{day:02d} {hour:02d}:{minute:02d}"
    for second in range(0, 60, 2):
        for engine in range(4):
            lead = f"\x1b[36m(SGLangEngine pid={3500 + engine}, ip=10.0.0.{engine})\x1b[0m [{stamp}:{second:02d}"
            yield (
                f"{lead} TP0] Decode batch. #running-req: {40 + second}, #token: {91820 + number % 977}, token usage: "
                f"0.{31 + second % 9}, gen throughput (token/s): {1210 + number % 83}.10, #queue-req: {second}, "
            )
            yield (
                f"{lead} TP0] Prefill batch, #new-seq: 1, #new-token: {8192 - second}, #cached-token: 0, token usage: "
                f"0.40, #running-req: 0, #queue-req: {30 - second // 2}, "
            )
            yield f'{lead}] INFO:     10.0.0.2:{4000 + second} - "POST /generate HTTP/1.1" 200 OK'
    lead = f"\x1b[36m(MegatronTrainRayActor pid=4101, ip=10.0.0.1)\x1b[0m [{stamp}:58]"
    text = f"['{_text(number)}'], label: 80, reward: 1"
    yield f"(RolloutManager pid=3001) [{stamp}:50] sglang_rollout.py:447 - Finish rollout: {text}"
    yield f"\rTraining: {number % 100}%|###       | {number}/100000 [00:10<10:00, 1.2it/s]\rTraining: done"
    yield f"{lead} timer.py:24 - Timer actor_train start"
    yield f"{lead} data.py:212 - rollout {number}: {{'rollout/log_probs': -0.31{number % 97}, 'rollout/reward': 0.4}}"
    yield (
        f"{lead} model.py:918 - step {number}: {{'train/loss': 0.0, 'train/pg_loss': 0.0, 'train/entropy_loss': 0.41, "
        f"'train/ppo_kl': 0.0, 'train/kl_loss': 0.000{number % 7}, 'train/grad_norm': 0.2{number % 89}, "
        f"'train/step': {number}}}"
    )
    yield f"{lead} timer.py:32 - Timer actor_train end (elapsed: 34.2s)"
    for worker in range(8):
        yield f"(pid={5000 + worker}) warning {number * 31 + worker:x}: entry {number * 7919 % 99991:05d} was evicted"


def _text(number: int) -> str:
    words = ("let", "me", "set", "up", "the", "equation", "if", "train", "covers", "its", "speed", "is", "so", "answer")
    return " ".join(words[(number * 7 + i * i) % len(words)] for i in range(400))


def write(path: Path, megabytes: int) -> None:
    """A log of about that size."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write("\n".join(lines(number)) + "\n")
            number += 1
        file.write(
            "(SGLangEngine pid=3501, ip=10.0.0.1) [2026-03-28 23:59:59 TP0] Scheduler hit an exception: "
            "Traceback (most recent call last):\n"
            '  File "sglang/srt/managers/scheduler.py", line 2012, in run_batch\n'
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        )


def read(path: Path) -> None:
    """Reads the log in this process; prints seconds, events and the peak of memory."""
    from rltop.evidence.logs import read as read_log
    from rltop.evidence.sink import Sink, Source

    sink = Sink()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    read_log(Source(path, path.name), sink)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    faults = sum(event.kind == "ima" for event in sink.events)
    print(f"{seconds} {cpu} {peak} {len(sink.events)} {len(sink.metrics)} {faults}")


def grep(path: Path) -> tuple[float, float, int]:
    """(seconds, seconds of CPU of grep alone, patterns) of `cat log | grep -E -c`."""
    from rltop.evidence.logs import _TAPS, TABLE

    literals = dict.fromkeys([literal.decode() for literal, _ in TABLE.entries] + [tap.decode() for _, tap in _TAPS])
    pattern = "|".join(re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", literal) for literal in literals)
    begin = time.perf_counter()
    # grep stops at the first match when it writes to /dev/null: its output goes through a pipe too.
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as cat:
        command = ["grep", "-E", "-c", pattern]
        environment = {**os.environ, "LC_ALL": "C"}
        with subprocess.Popen(command, stdin=cat.stdout, stdout=subprocess.PIPE, env=environment) as one:
            assert one.stdout is not None
            one.stdout.read()
            _, _, used = os.wait4(one.pid, 0)
            one.returncode = 0
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, len(literals)


def main() -> int:
    """Writes, reads, compares. Exit 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        write(path, options.megabytes)
        size = path.stat().st_size / 1e6
        child = [sys.executable, "-m", "benchmarks.check", "--read", str(path)]
        words = subprocess.run(child, capture_output=True, text=True, check=True).stdout.split()
        seconds, cpu, peak = map(float, words[:3])
        grep_wall, grep_cpu, patterns = grep(path)
    print(f"log            {size:.0f} MB")
    print(f"rltop          {size / cpu:.1f} MB/s ({cpu:.1f} s CPU, {seconds:.1f} s wall), peak {peak:.0f} MiB")
    print(f"               {words[3]} events and {words[4]} metric rows kept, {words[5]} fault found")
    print(
        f"grep -E -c     {size / grep_cpu:.1f} MB/s ({grep_cpu:.1f} s CPU, {grep_wall:.1f} s wall), {patterns} patterns"
    )
    print(f"grep is        {cpu / grep_cpu:.1f} times as fast (goal: at most {GOAL})")
    return 0 if cpu / grep_cpu <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
