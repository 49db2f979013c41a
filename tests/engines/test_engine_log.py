"""The log of one engine: stages, batches, why it died; from logs that real engines wrote, and from their spellings."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.engines.crash import Crash
from rltop.engines.crash_phase import Stage
from rltop.engines.log import EngineLog, LogNews, NewsKind
from rltop.evidence import known

LOGS = Path(__file__).parents[1] / "data" / "logs"
AT = "[2026-01-02 03:04:05]"
START = (
    f"{AT} server_args=ServerArgs(model_path='/m')\n{AT} Init torch distributed begin.\n"
    f"{AT} Load weight begin. avail mem=139.00 GB\n{AT} Load weight end. elapsed=1.0 s, type=Q, avail mem=110.20 GB\n"
)
CAPTURE = (
    f"{AT} Capture target decode CUDA graph begin. backend=full, bs=[1, 2], avail mem=43.90 GB\n"
    "Capturing batches (bs=1 avail_mem=41.20 GB): 100%|##########| 2/2 [00:05<00:00,  1.30s/it]\n"
)
CAPTURED = f"{AT} Capture target decode CUDA graph end. elapsed=5.90 s, mem usage=1.80 GB, avail mem=42.10 GB.\n"
WARM = (
    f"{AT} INFO:     Started server process [9]\n{AT} INFO:     Uvicorn running on http://127.0.0.1:1 (Press CTRL+C)\n"
)
READY = f"{AT} The server is fired up and ready to roll!\n"
UP = START + CAPTURE + CAPTURED + WARM + READY
PREFILL = (
    f"{AT} Prefill batch, #new-seq: 1, #new-token: 27, #cached-token: 0, token usage: 0.00, #running-req: 0, "
    "#queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 24.98\n"
)
DECODE = (
    f"{AT} Decode batch, #running-req: 8, #token: 4096, token usage: 0.02, accept len: 2.45, accept rate: 0.48, "
    "cuda graph: True, gen throughput (token/s): 919.88, #queue-req: 3\n"
)
QUIT = f"{AT} SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"


def trace(error: str, *frames: str, rank: str = "", main: str = "run_scheduler_process") -> str:
    lines = [f"[2026-01-02 03:04:06{rank}] Scheduler hit an exception: Traceback (most recent call last):"]
    for file, function in [("scheduler.py", main), *(frame.split(":") for frame in frames)]:
        lines += [f'  File "/site/sglang/srt/{file}", line 42, in {function}', "    go()"]
    return "\n".join([*lines, error, "", ""])


IMA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
DECODING = ("batch_result_processor.py:process_batch_result_decode",)


def fed(text: str | bytes, *, flags: dict[str, object] | None = None) -> tuple[EngineLog, list[LogNews]]:
    log = EngineLog(flags=flags or {}, known=known.shipped())
    news = log.feed(text if isinstance(text, bytes) else text.encode(), 1.0)
    return log, news + log.quiet(2.0)


def crash_of(text: str | bytes, *, flags: dict[str, object] | None = None) -> Crash:
    return fed(text, flags=flags)[0].crash(exit_code=-9)


# -- recorded


def test_core_dumps_that_are_on_are_not_advised() -> None:
    log, _ = fed((LOGS / "whole_ima_async_graphs.log").read_bytes())
    assert log.crash(exit_code=-9).do == "with core_dump=on the log names the kernel at the next crash"
    log.dumping = True
    assert log.crash(exit_code=-9).do == "core dumps are on, and this crash left none: the next one may name the kernel"


def test_under_launch_blocking_without_graphs_the_frame_is_the_launch() -> None:
    log, _ = fed((LOGS / "whole_ima_blocking_no_graphs.log").read_bytes())
    log.blocking = True
    cause = log.crash(exit_code=-9).cause
    assert "launched at qwen3bad.py:15 in forward (CUDA_LAUNCH_BLOCKING, graphs off)" in cause
    assert "noticed" not in cause


@pytest.mark.parametrize(
    ("name", "stage", "fingerprint", "kernel", "cause"),
    [
        ("sglang_healthy.log", "ready", "silent/serve", "", "its log tells of no error"),
        ("sglang_cpu_0_5_23.log", "warming", "silent/warm-up", "", "its log tells of no error"),
        ("sglang_ima_async_graphs.log", "ready", "ima/decode-graph", "", "process_batch_result_decode"),
        ("sglang_ima_blocking.log", "ready", "ima/prefill", "", "qwen3bad.py"),
        ("sglang_ima_coredump.log", "ready", "ima/decode", "test_oob_gather_kernel", "in kernel test_oob_gather"),
        ("sglang_start_fails.log", "launching", "jit/launch", "", "could not be compiled"),
        ("sglang_health_after_release.log", "ready", "released/released", "", "while its memory was released"),
        ("whole_ima_async_graphs.log", "ready", "ima/decode-graph", "", "in decode with CUDA graphs"),
        ("whole_ima_async_no_graphs.log", "ready", "ima/prefill", "", "process_batch_result_prefill"),
        ("whole_ima_coredump_graphs.log", "ready", "ima/decode-graph", "test_oob_gather_kernel", "CUDA graphs"),
        ("whole_ima_blocking_no_graphs.log", "ready", "ima/prefill", "", "noticed at qwen3bad.py"),
        ("whole_ngram_stall_then_update_from_disk.log", "ready", "update/update", "", "cannot take weights that way"),
        ("whole_fp32_fails_in_warm_up.log", "warming", "error/warm-up", "", "failed to dispatch data type Float"),
        ("whole_capture_fails_to_compile.log", "capturing", "jit/capture", "", "could not be compiled"),
        ("whole_released_then_health.log", "ready", "released/released", "", "while its memory was released"),
    ],
)
def test_a_recorded_log_says_how_far_it_came_and_why_it_ended(
    name: str, stage: str, fingerprint: str, kernel: str, cause: str
) -> None:
    log, _ = fed((LOGS / name).read_bytes())
    crash = log.crash(exit_code=-9)
    assert log.stage == stage
    assert crash.fingerprint.startswith(fingerprint + "/")
    assert (crash.kind, crash.phase) == tuple(fingerprint.split("/"))
    assert crash.kernel == kernel
    assert cause in crash.cause
    if crash.kind != "silent":
        assert f"stdout.log:{crash.line}:" in "\n".join(crash.evidence)
        assert log.fault is not None


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.log")))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_it_does_not_matter_how_the_bytes_are_cut(name: str, seed: int) -> None:
    data = (LOGS / name).read_bytes()
    whole, news = fed(data)
    cut, choose, parts, at = EngineLog(known=known.shipped()), random.Random(seed), [], 0
    while at < len(data):
        size = choose.choice([1, 2, 50, 4096])
        parts += cut.feed(data[at : at + size], 1.0)
        at += size
        assert cut.offset == min(at, len(data))
    parts += cut.quiet(2.0)
    assert [(n.kind, n.what, n.line, n.text) for n in parts] == [(n.kind, n.what, n.line, n.text) for n in news]
    assert cut.crash(exit_code=-9) == whole.crash(exit_code=-9)
    assert cut.stage == whole.stage


def test_the_kernel_makes_the_fingerprint_where_a_core_dump_names_it() -> None:
    excerpt = crash_of((LOGS / "sglang_ima_coredump.log").read_bytes())
    whole = crash_of((LOGS / "whole_ima_coredump_graphs.log").read_bytes())
    assert excerpt.fingerprint.rsplit("/", 1)[1] == whole.fingerprint.rsplit("/", 1)[1]


# -- stages and batches


def test_stages_come_in_order_each_once() -> None:
    log = EngineLog()
    seen: list[tuple[str, float]] = []
    for now, part in enumerate((START, CAPTURE, CAPTURED, WARM, PREFILL, READY, PREFILL + DECODE)):
        seen += [(n.what, n.seen) for n in log.feed(part.encode(), now) if n.kind is NewsKind.STAGE]
    assert seen == [("loading", 0), ("capturing", 1), ("warming", 3), ("ready", 5)]
    assert log.since[Stage.READY] == 5
    log.feed(CAPTURE.encode(), 9)  # graphs are captured again after an update: it stays ready
    assert log.stage is Stage.READY


def test_a_batch_line_says_what_runs() -> None:
    log, news = fed(UP + PREFILL + DECODE)
    assert [n.what for n in news if n.kind is NewsKind.BATCH] == ["prefill", "decode"]
    assert log.decode is not None
    assert log.prefill is not None
    found = (log.decode.running, log.decode.queued, log.decode.tokens_per_s, log.decode.accept_len)
    assert found == (8, 3, 919.88, 2.45)
    assert (log.decode.cuda_graph, log.prefill.cuda_graph, log.prefill.new_tokens) == (True, False, 27)
    assert log.batch is log.decode


def test_a_refused_update_is_news_and_no_fault() -> None:
    refused = f'{AT} INFO:     1.2.3.4:5 - "POST /update_weights_from_disk HTTP/1.1" 400 Bad Request\n'
    log, news = fed(UP + refused)
    assert [(n.kind, n.what) for n in news][-1] == (NewsKind.REFUSAL, "/update_weights_from_disk")
    assert log.fault is None


def test_memory_does_not_grow_with_the_log() -> None:
    log = EngineLog()
    chunk = ((PREFILL + DECODE + trace("ValueError: no", *DECODING)) * 100).encode()
    tracemalloc.start()
    sizes = []
    for now in range(9):  # of every kind 400 are kept: full after four
        log.feed(chunk, float(now))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert log.offset == 9 * len(chunk)
    assert sizes[8] < sizes[4] + (64 << 10)


# -- what broke


@pytest.mark.parametrize(
    ("text", "fingerprint", "cause"),
    [
        (UP + trace(IMA, *DECODING) + QUIT, "ima/decode-graph", "Illegal memory access on the GPU in decode with CUDA"),
        (UP + trace("RuntimeError: CUDA error (fa.h:200): an illegal memory access was encountered"), "ima/serve", ""),
        (
            UP + DECODE + trace("RuntimeError: CUDA Error: an illegal memory access (CUDA Error: 700)"),
            "ima/serve",
            "Illegal memory access on the GPU while it served",
        ),
        (UP + PREFILL + trace("RuntimeError: Triton Error [CUDA]: an illegal memory access was"), "ima/serve", ""),
        (
            UP + trace("RuntimeError: FusedAddRMSNorm failed with error code an illegal memory access"),
            "ima/serve",
            "in kernel FusedAddRMSNorm",
        ),
        (
            UP + "[rank1]:[E102 03:04:05.1 ProcessGroupNCCL.cpp:2057] [PG ID 2 PG GUID 3 Rank 1] Process group "
            "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n",
            "ima/serve",
            "rank 1 first",
        ),
        (
            UP + trace("RuntimeError: CUDA error: misaligned address", *DECODING),
            "misaligned/decode-graph",
            "Misaligned",
        ),
        (UP + trace("torch.AcceleratorError: CUDA error: unspecified launch failure"), "launch-failure/", "launch"),
        (UP + trace("RuntimeError: CUDA error: device-side assert triggered"), "assert/serve", "assertion"),
        (UP + trace("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when"), "cublas/serve", "cuBLAS"),
        (
            UP + trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", *DECODING),
            "oom/decode-graph",
            "Out of GPU memory in decode",
        ),
        (
            START + trace("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
            "oom/load",
            "Out of GPU memory while weights were loaded",
        ),
        (
            START + CAPTURE + trace("Exception: Capture cuda graph failed: CUDA out of memory. Tried"),
            "oom/capture",
            "while CUDA graphs were captured",
        ),
        (START + CAPTURE + trace("Exception: Capture cuda graph failed: boom"), "capture/capture", "not be captured"),
        (UP + trace("torch.distributed.DistBackendError: NCCL error in: x.cpp:1"), "nccl/serve", "NCCL failed"),
        (
            UP + "[rank0]:[E102 03:04:05.1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 "
            "milliseconds before timing out.\n",
            "nccl/serve",
            "A collective did not end",
        ),
        (
            UP + f"{AT[:-1]} TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n" + QUIT,
            "hang/serve",
            "no progress for 300 s",
        ),
        (UP + trace("ValueError: token_to_kv_pool_allocator: pool memory leak detected!"), "leak/serve", "KV pool"),
        (
            UP + trace("AssertionError: Cache flush failed after updating weights", "weight_updater.py:update"),
            "update/update",
            "paused requests held the cache",
        ),
        (
            WARM + f"{AT} ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address "
            "already in use\n",
            "port/warm-up",
            "Port 30000 was already in use",
        ),
        (
            "usage: launch_server.py [-h]\nlaunch_server.py: error: ambiguous option: --disable-cuda-gr could match\n",
            "usage/launch",
            "ambiguous option",
        ),
        (
            'Traceback (most recent call last):\n  File "/site/sglang/launch_server.py", line 9, in <module>\n'
            '  File "/site/sglang/srt/server_args.py", line 9, in check_server_args\n    raise\n'
            "AssertionError: enable_torch_compile and disable_cuda_graph_padding\n",
            "usage/launch",
            "SGLang refuses its arguments, at server_args.py:9 in check_server_args: enable_torch_compile",
        ),
        (
            START
            + f"{AT} Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
            "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n",
            "child/load",
            "was killed (SIGKILL) while weights were loaded",
        ),
        (
            UP
            + f"{AT} Subprocess scheduler_0 (pid=4242) crashed with exit code -11. Triggering SIGQUIT for cleanup...\n"
            + QUIT,
            "child/serve",
            "segmentation fault",
        ),
        (
            UP + f"{AT} SIGTERM received. signum=None. Draining requests and shutting down...\n",
            "terminated/",
            "SIGTERM",
        ),
        (UP + trace("KeyError: 'x'", "qwen3.py:forward"), "error/serve", "KeyError ended it while it served"),
        (UP + DECODE, "silent/serve", "ended by signal 9"),
    ],
)
def test_every_class_of_fault_is_told_apart(text: str, fingerprint: str, cause: str) -> None:
    crash = crash_of(text)
    assert crash.fingerprint.startswith(fingerprint)
    assert cause in crash.cause
    assert len(crash.evidence) <= 12


def test_the_rank_that_faults_first_counts_and_not_what_others_report() -> None:
    first = trace(IMA, *DECODING, rank=" TP3")
    later = trace(IMA, "communicator.py:all_reduce", rank=" TP0").replace("03:04:06", "03:04:09")
    crash = crash_of(UP + DECODE + first + later + QUIT)
    assert crash.rank == 3
    assert "rank 3 first" in crash.cause
    assert crash.fingerprint == crash_of(UP + DECODE + trace(IMA, *DECODING, rank=" TP1") + QUIT).fingerprint


def test_a_false_illegal_access_after_an_exception_is_a_consequence() -> None:
    crash = crash_of(
        UP + trace("KeyError: 'x'", "qwen3.py:forward") + trace(IMA).replace("03:04:06", "03:04:08") + QUIT
    )
    assert crash.kind == "error"


def test_an_error_that_was_survived_is_not_the_cause_of_a_later_death() -> None:
    request = (
        f"{AT} INFO: x\n{AT} [http_server] Error: Traceback (most recent call last):\n"
        '  File "/site/sglang/srt/http_server.py", line 4, in generate\n    go()\nValueError: bad request\n'
        f"{AT} INFO: y\n"
    )
    assert crash_of(UP + request + DECODE + trace(IMA, *DECODING)).kind == "ima"
    log, _ = fed(UP + request + DECODE)
    assert log.fault is None


def test_a_fingerprint_is_the_same_in_every_run_and_another_for_another_fault() -> None:
    one = UP + DECODE + trace(IMA, *DECODING, rank=" TP0")
    other = (
        one.replace("2026-01-02", "2027-11-30")
        .replace("line 42", "line 57")
        .replace("/site/", "/opt/venv/lib/")
        .replace("TP0", "TP7")
    )
    assert crash_of(one).fingerprint == crash_of(other).fingerprint
    assert (
        crash_of(one).fingerprint != crash_of(one.replace("process_batch_result_decode", "forward_decode")).fingerprint
    )
    assert len(crash_of(one).fingerprint) < 40


def test_a_known_crash_is_named_with_its_fix() -> None:
    flags: dict[str, object] = {"speculative_algorithm": "EAGLE", "enable_hierarchical_cache": True}
    crash = crash_of(UP + DECODE + trace(IMA, "eagle_worker.py:verify", "graph_runner.py:replay"), flags=flags)
    assert "sgl-project/sglang#25512" in crash.known
    assert "looks like" in crash.cause
    assert crash.do


def test_an_injected_fault_is_called_a_rehearsal_wherever_it_is_told() -> None:
    strikes = f"{AT} INJECTED FAULT (rltop's CPU engine, a rehearsal): strikes: ima:cuda_graph:hazard=0.02\n"
    log, news = fed(UP + DECODE + strikes + trace(IMA, *DECODING) + QUIT)
    assert [n.what for n in news if n.kind is NewsKind.INJECTED] == ["ima"]
    crash = log.crash(exit_code=-9)
    assert crash.injected == "ima"
    assert crash.cause.endswith("A rehearsal: the fault ima was injected.")
    assert crash.fingerprint == crash_of(UP + DECODE + trace(IMA, *DECODING) + QUIT).fingerprint
    log, _ = fed(UP + strikes + strikes.replace("strikes", "disarmed") + DECODE)
    assert log.injected == ""


def test_a_stop_that_was_asked_for_is_no_crash() -> None:
    log, _ = fed(UP + f"{AT} SIGTERM received. signum=None. Draining requests and shutting down...\n")
    assert log.crash(exit_code=-9, asked=True).kind == "stopped"
    log, _ = fed(UP + trace(IMA, *DECODING) + QUIT)
    assert log.crash(exit_code=-9, asked=True).kind == "ima"


def test_a_fault_is_news_while_the_process_still_lives() -> None:
    log = EngineLog()
    log.feed((UP + trace(IMA, *DECODING)).encode(), 1.0)
    news = log.feed(QUIT.encode(), 2.0)  # the next line with a time ends the traceback
    assert [n.what for n in news if n.kind is NewsKind.FAULT] == ["ima", "traceback", "death"]
    assert log.fault is not None
    assert (log.fault.what, log.fault.seen) == ("ima", 2.0)


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_taken(data: bytes) -> None:
    log, _ = fed(data)
    assert log.crash(exit_code=None).fingerprint


# -- a process that dies at its start, before anything is logged

USAGE = "usage: launch_server.py [-h] [--model-path MODEL_PATH]\n"


@pytest.mark.parametrize(
    ("text", "fingerprint", "cause"),
    [
        (
            "/usr/bin/python3: Error while finding module specification for 'sglang.launch_server' "
            "(ModuleNotFoundError: No module named 'sglang')\n",
            "import/launch",
            "What it needs cannot be imported at the start: Error while finding module specification for "
            "'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang').",
        ),
        (
            "/opt/venv/bin/python3.12: No module named sglang\n",
            "import/launch",
            "at the start: No module named sglang.",
        ),
        ("ModuleNotFoundError: No module named 'sglang'\n", "import/launch", "No module named 'sglang'."),
        (
            'Traceback (most recent call last):\n  File "/s/sglang/launch_server.py", line 3, in <module>\n    x\n'
            "ImportError: cannot import name 'a' from 'b' (unknown location)\n",
            "import/launch",
            "cannot import name 'a'",
        ),
        (
            "error: /nonexistent/config.json: cannot read the checkpoint\n  why: No such file or directory\n"
            "  do:  point --model-path at a folder\n",
            "checkpoint/launch",
            "Its checkpoint cannot be read: /nonexistent/config.json: cannot read the checkpoint: No such file or "
            "directory.",
        ),
        (
            "OSError: /nope is not a local folder and is not a valid model identifier listed on 'https://hf'\n",
            "checkpoint/launch",
            "/nope is not a local folder",
        ),
        (USAGE + "launch_server.py: error: argument --tp-size: invalid int value: 'x'\n", "usage/launch", "'x'."),
        (
            USAGE + "launch_server.py: error: expected a checkpoint\n",
            "usage/launch",
            "It refuses its arguments: expected a checkpoint.",
        ),
        ("error: --max-total-tokens 0: must be positive\n", "usage/launch", "--max-total-tokens 0: must be positive."),
        ("ValueError: invalid literal for int()\n", "error/launch", "ValueError"),
        (
            "pkg.sub.StrangeError: boom\n  a hint below\nanother line\n",
            "error/launch",
            "StrangeError ended it at the start: boom.",
        ),
        ("KeyboardInterrupt\n", "silent/launch", "tells of no error and ends with “KeyboardInterrupt”."),
        ("/opt/run.sh: line 3: sglang: command not found\n", "error/launch", "sglang: command not found."),
        (
            "python: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file\n",
            "import/launch",
            "libpython3.11.so.1.0",
        ),
        ("Fatal Python error: init_fs_encoding: failed\n", "error/launch", "init_fs_encoding: failed."),
        (
            "some banner\n",
            "silent/launch",
            "status 1 at the start; its log tells of no error and ends with “some banner”.",
        ),
        ("", "silent/launch", "its log tells of no error: it is empty."),
    ],
)
@pytest.mark.parametrize("ending", ["\n", ""])
def test_the_last_words_of_a_start_are_its_cause(text: str, fingerprint: str, cause: str, ending: str) -> None:
    log, _ = fed(text.removesuffix("\n") + (ending if text else ""))
    crash = log.crash(exit_code=1)
    assert crash.fingerprint.startswith(fingerprint + "/")
    assert cause in crash.cause
    if crash.kind != "silent":
        assert "no error" not in crash.cause
        assert crash.evidence[0].startswith(f"stdout.log:{crash.line}: ")


def test_last_words_are_the_last_and_only_of_a_start() -> None:
    survived = "ImportError: no flash_attn\n" + f"{AT} falling back to triton\n"
    assert log_of(survived).crash(exit_code=-9).kind == "import", "an error is better than none"
    later = survived + "error: /m/config.json: cannot read the checkpoint\n"
    assert log_of(later).crash(exit_code=2).kind == "checkpoint"
    assert log_of(later).crash(exit_code=2, asked=True).kind == "stopped"
    assert log_of(UP + "error: a line of a serving engine\n").crash(exit_code=-9).kind == "silent"
    first, second = (log_of(f"error: pid {pid} has no --x\n").crash(exit_code=2) for pid in (41, 42))
    assert first.fingerprint == second.fingerprint


def log_of(text: str) -> EngineLog:
    return fed(text)[0]
