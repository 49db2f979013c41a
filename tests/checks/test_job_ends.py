"""A job that plainly died, in the words of the shell, argparse, Slurm, Ray or the kernel; and what is no fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.verdict import Verdict
from rltop.evidence.collect import collect

RUN = tuple(
    f"(MegatronTrainRayActor pid=4101) [2026-03-04 09:{n}0:00] model.py:918 - step {n}: "
    f"{{'train/loss': 0.1, 'train/grad_norm': 0.2, 'train/step': {n}}}"
    for n in range(3)
)
KILLED = (
    "[Wed Mar  4 09:31:10 2026] Out of memory: Killed process 4101 (ray::MegatronTr) total-vm:900kB, "
    "anon-rss:812345678kB, file-rss:0kB"
)
DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: MegatronTrainRayActor",
    "\tpid: 4101",
    "The actor is dead because its worker process has died. There are some potential root causes. (1) The process is "
    "killed by SIGKILL by OOM killer due to high memory usage.",
)


def told(folder: Path, *lines: str, name: str = "train.log", **others: str) -> Verdict:
    """host.unexplained of a log of these lines, beside other files."""
    (folder / name).write_text("\n".join(lines) + "\n")
    for other, text in others.items():
        (folder / f"{other}.txt").write_text(text + "\n")
    return next(v for v in evaluate(collect([folder])).verdicts if v.id == "host.unexplained")


@pytest.mark.parametrize(
    ("line", "owner", "cause", "advice"),
    [
        ("train.py: error: unrecognized arguments: --rollout-batchsize 32", "launcher", "no flag", "--rollout-batchs"),
        ("x.py: error: argument --tp-size: invalid int value: 'x'", "launcher", "--tp-size", "invalid int value"),
        ("run.sh: line 12: source: /root/a.sh: No such file or directory", "launcher", "not there", "ls -l /root/a.sh"),
        ("run.sh: line 90: python3: command not found", "launcher", "does not find python3", "PATH"),
        ("/job/run.sh: line 9: DATA: unbound variable", "launcher", "which nobody set", "export DATA"),
        ("run.sh: line 143: 12345 Killed                  python3 train.py", "host", "SIGKILL", "dmesg"),
        ("run.sh: line 143: 12345 Bus error               python3 train.py", "host", "hared memory", "--shm-size"),
        ("srun: error: node-b: task 3: Out Of Memory", "host", "(node-b): Slurm killed", "--mem"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "host", "ran out of memory", "free -g"),
        (
            "slurmstepd: error: *** JOB 12345 ON node-a CANCELLED AT 2026-03-04T10:00:00 DUE TO TIME LIMIT ***",
            "launcher",
            "time limit",
            "--load",
        ),
    ],
)
def test_a_job_that_died_is_told_with_owner_and_words(
    tmp_path: Path, line: str, owner: str, cause: str, advice: str
) -> None:
    found = told(tmp_path, *RUN, line)
    assert (found.status, found.rank) == ("fail", None)
    assert found.value["owner"] == owner
    assert cause in found.cause
    assert "MegatronTrainRayActor" not in found.cause  # the line above is another process's
    assert any(advice in one for one in found.advice), found.advice
    assert (found.evidence[0].source, found.evidence[0].line) == ("train.log", 4)


@pytest.mark.parametrize(
    "end",
    [
        ("slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-03-04T10:00:00 ***", "srun: error: n: task 0: Killed"),
        ("run.sh: line 143: 12345 Terminated              python3 train.py",),
        ("run.sh: line 3: 77 Killed                  sleep 3600",),
        ("Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "KeyboardInterrupt"),
        ("(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 2 Workers crashed at node",),
        ("run.sh: line 4: ifconfig: command not found", *(f"line {n}" for n in range(30))),
    ],
)
def test_a_run_that_was_stopped_or_only_grumbled_is_silent(tmp_path: Path, end: tuple[str, ...]) -> None:
    assert told(tmp_path, *RUN, *end).status == "pass"


@pytest.mark.parametrize("line", ["run.sh: line 12: python: command not found", "t.py: error: argument -x: invalid"])
def test_what_the_run_went_on_after_is_no_fault(tmp_path: Path, line: str) -> None:
    assert told(tmp_path, RUN[0], line, *RUN[1:]).status == "pass"


def test_the_kernel_s_killer_explains_the_actor_that_ray_lost(tmp_path: Path) -> None:
    found = told(tmp_path, *RUN, *DIED, dmesg=KILLED)
    assert found.status == "fail"
    assert "the kernel killed MegatronTrainRayActor (pid 4101), which held 832 GB" in found.cause
    assert {(e.source, e.line) for e in found.evidence} >= {("dmesg.txt", 1), ("train.log", 4)}
    assert found.value["owner"] == "trainer"


def test_the_kernel_s_killer_alone_is_told_where_its_victim_is_of_a_run(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, name in ((own, "ray::MegatronTr"), (other, "postgres")):
        folder.mkdir()
        (folder / "dmesg.txt").write_text(KILLED.replace("ray::MegatronTr", name) + "\n")
    verdicts = [evaluate(collect([folder])).verdicts for folder in (own, other)]
    found = [next(v for v in each if v.id == "host.unexplained") for each in verdicts]
    assert [v.status for v in found] == ["fail", "pass"]
    assert "832 GB" in found[0].cause


def test_ray_s_memory_monitor_gives_its_figures(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        *RUN,
        "(raylet) 3 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed at node",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "Memory on the node (IP: 10.0.0.2, ID: ab) where the lease (actor ID: ab, name=RolloutManager.__init__, "
        "pid=3001, memory used=900.00GB) was running was 1980.23GB / 2000.00GB (0.99), which exceeds the memory usage "
        "threshold of 0.95.",
    )
    assert "RolloutManager (pid 3001), which held 900 GB, when 1,980 of 2,000 GB" in found.cause
    assert found.value["total_gb"] == 2000.0


TRACE = ("Traceback (most recent call last):", '  File "/root/me/reward.py", line 12, in score', "    x()")


@pytest.mark.parametrize(
    ("error", "cause", "advice"),
    [
        ("OSError: [Errno 28] No space left on device: '/ckpt/a/b.distcp'", "The disk is full", "df -h"),
        ("ModuleNotFoundError: No module named 'slime'", "Python does not find slime", "import slime"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "may not do that", "ls -ld /data/x"),
        ("KeyError: 'answer'", "no entry 'answer'", "/root/me/reward.py:12 in score"),
        ("ZeroDivisionError: division by zero", "No check owns this error", "/root/me/reward.py:12 in score"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/d/y.json'", "not there", "ls -l /d/y.json"),
        ("RuntimeError: CUDA error: device-side assert triggered", "out of range", "CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_advice_goes_by_the_class_of_the_error(tmp_path: Path, error: str, cause: str, advice: str) -> None:
    found = told(tmp_path, *TRACE, error)
    assert found.status == "fail"
    assert cause in found.cause
    assert advice in " / ".join(found.advice)


@pytest.mark.parametrize(
    "lines",
    [
        ('  File "/r/slime/slime/backends/x.py", line 3, in f', "KeyError: 'layers.0'"),  # nothing of the user's data
        ('  File "/r/me/x.py", line 3, in f', "ValueError: tokenizer: not found"),  # no word of a shell
        ('  File "/dev/shm/me/x.py", line 3, in f', "ValueError: of a file in shared memory"),
    ],
)
def test_an_error_of_no_known_class_gets_no_made_up_meaning(tmp_path: Path, lines: tuple[str, ...]) -> None:
    found = told(tmp_path, "Traceback (most recent call last):", *lines)
    assert "No check owns this error" in found.cause
    assert found.confidence == "low"


def test_the_last_exception_counts_more_than_those_before_it(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        *TRACE,
        "FileNotFoundError: [Errno 2] No such file or directory: '/d/y.json'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *TRACE,
        "ModuleNotFoundError: No module named 'orjson'",
    )
    assert "Python does not find orjson" in found.cause


def test_the_peer_that_nccl_names_is_kept(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        *TRACE,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "Last error:",
        "socketPollConnect: connect to 10.0.0.3<41234> returned Connection refused",
    )
    assert "10.0.0.3<41234>" in found.cause
    assert any("10.0.0.3" in one for one in found.advice)


def test_an_engine_without_room_for_its_cache_is_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(
        "[2026-03-04 09:00:40 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/s/sglang/python/sglang/srt/model_executor/model_runner.py", line 1100, in init_memory_pool\n'
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"
    )
    report = evaluate(collect([tmp_path]))
    assert report.root_causes == ("engine.oom",)
    found = next(v for v in report.verdicts if v.id == "engine.oom")
    assert found.advice[0].startswith("a larger --sglang-mem-fraction-static")
