"""Spellings of log lines, each with the events that its recognisers make."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rltop.checks.found import LOG_KINDS
from rltop.evidence.lines import RECOGNISERS, Line


def kinds(text: str) -> dict[str, Mapping[str, object]]:
    """kind -> data of a line, as the reader asks the recognisers."""
    line = Line(text, text, "a.log", 1)
    found = {}
    for recogniser in RECOGNISERS:
        if any(needle in text for needle in recogniser.needles) and (data := recogniser.parse(line)) is not None:
            found[recogniser.kind] = data
    return found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "illegal memory access"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal memory access"),
        ("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered", "illegal memory access"),
        ("CUDA error (/x/hopper/flash_api.cpp:200): an illegal memory access was encountered", "illegal memory access"),
        ("CUDA Error: an illegal memory access was encountered (CUDA Error: 700 )", "illegal memory access"),
        ("FusedAddRMSNorm failed with error code an illegal memory access was encountered", "illegal memory access"),
        ("coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)", "illegal memory access"),
        ("RuntimeError: CUDA error: misaligned address", "misaligned address"),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", "launch failure"),
        ("RuntimeError: CUDA error: an illegal instruction was encountered", "illegal instruction"),
    ],
)
def test_every_spelling_of_an_illegal_access(text: str, fault: str) -> None:
    assert kinds(text)["ima"]["fault"] == fault


def test_the_server_s_own_arguments_say_what_is_switched_on() -> None:
    text = "server_args=ServerArgs(model_path='/m', " + "x=1, " * 200 + "speculative_algorithm='EAGLE', "
    found = kinds(text + "disable_cuda_graph=False, enable_dp_attention=True, moe_a2a_backend=None)")["engine_stage"]
    assert found["switches"] == {
        "speculative_algorithm": "EAGLE",
        "disable_cuda_graph": "False",
        "enable_dp_attention": "True",
        "moe_a2a_backend": "None",
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("WeightsUnpickler error: Unsupported global: GLOBAL a.b_c.Thing was not an allowed global by", "a.b_c.Thing"),
        ("Unsupported class argparse.Namespace", "argparse.Namespace"),
        ("WeightsUnpickler error: Can only build Tensor, but got <class 'my.module.Thing'>", "my.module.Thing"),
    ],
)
def test_a_refused_pickle_names_its_class(text: str, name: str) -> None:
    assert kinds(text)["pickle_refused"] == {"class": name}
    assert "pickle_refused" not in kinds("Unsupported class of GPU, falling back")


def test_ray_s_list_of_potential_causes_is_no_memory_killer() -> None:
    lost = (
        "A worker died or was killed while executing a task. Worker PID: 71 Worker exit type: SYSTEM_ERROR There are "
    )
    found = kinds(lost + "some potential root causes. (1) The process is killed by SIGKILL by OOM killer")
    assert found["death"]["victim"] == 71
    assert "oom_killer" not in found
    newer = "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
    assert "oom_killer" not in kinds(lost + newer), "Ray 2.60 names it for any lost worker"
    start = (
        "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is "
    )
    found = kinds(start + "the OS OOM killer. Run `dmesg -T | grep -i oom` to check.")
    assert (found["death"]["how"], found["death"]["code"]) == ("init", -9)
    assert "oom_killer" not in found
    low = kinds("Task was killed due to the node running low on memory. Memory on the node where the task (pid=71) ran")
    assert low["oom_killer"] == {"by": "ray", "victim": 71}


@pytest.mark.parametrize(
    "text",
    [
        "> building HuggingFaceTokenizer tokenizer ...",
        "HF config loaded: X",
        "loaded tokenizer",
        "Loading checkpoint shards",
    ],
)
def test_a_process_that_got_through_says_so(text: str) -> None:
    assert "loaded" in kinds(text)


@pytest.mark.parametrize("device", ["CUDA", "HIP", "NPU", "XPU"])
def test_every_device_runs_out_of_memory(device: str) -> None:
    assert kinds(f"RuntimeError: {device} out of memory. Tried to allocate 1.25 GiB")["oom"]["tried_gb"] == 1.25


def test_an_engine_says_that_a_request_is_too_long() -> None:
    text = "400: Requested token count exceeds the model's maximum context length of 900 tokens. You requested a total "
    found = kinds(text + "of 1200 tokens: 300 tokens from the input messages and 900 tokens for the completion.")
    assert (found["over_length"]["limit"], found["over_length"]["requested"]) == (900, 1200)


def test_the_trainers_own_comparison_names_version_and_engines() -> None:
    text = "Weights version '3' checked after reset_tensors: every tensor of {} engines is equal (no prompt)"
    assert kinds(text.format(2))["weights_equal"] == {"version": "3", "engines": 2}
    assert "weights_equal" not in kinds(text.format(0))


def test_the_weights_checker_speaks_of_tensors_that_differ() -> None:
    assert kinds("Exception: check tensor equality failed:")["weights_check"]["ok"] is False
    assert kinds("name=model.norm.weight max_abs_err=0.5 mean_abs_err=0.1")["weights_check"]["ok"] is False
    assert kinds('1.2.3.4:5 - "POST /weights_checker HTTP/1.1" 400 Bad Request')["weights_check"]["ok"] is False
    assert "weights_check" not in kinds('1.2.3.4:5 - "POST /weights_checker HTTP/1.1" 200 OK')
    assert "weights_check" not in kinds("[check_tensors] info: ['name=rotary.cos_sin_cache max_abs_err=0.5']")


@pytest.mark.parametrize(
    "text",
    [
        "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "the docs explain an illegal memory access",
    ],
)
def test_advice_about_an_illegal_access_is_none(text: str) -> None:
    assert "ima" not in kinds(text)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (
            "Load checkpoint from HuggingFace model into Megatron: /models/tiny",
            "ckpt_loaded",
            {"directory": "/models/tiny", "hf": True},
        ),
        ("Load checkpoint from HuggingFace model into Megatron", "ckpt_loaded", {"directory": "", "hf": True}),
        (
            "successfully loaded checkpoint from out/x [ t 1/2, p 1/1 ] at iteration 40",
            "ckpt_loaded",
            {"directory": "out/x", "iteration": 40},
        ),
        ("Cache flushed successfully!", "flushed", {}),
        (
            "[rank1]:[E101 03:04:05.6 ProcessGroupNCCL.cpp:2057] [PG ID 2 PG GUID 3 Rank 1] Process group watchdog "
            "thread terminated with exception: CUDA error: an illegal memory access was encountered",
            "ima",
            {"from": "nccl-watchdog", "rank": 1},
        ),
        ("Exception: Capture cuda graph failed: CUDA error: an illegal memory access", "ima", {"phase": "capture"}),
        ("coredump:   #0\t0x7f74ffa5f0b0\tgather_kernel", "kernel", {"kernel": "gather_kernel"}),
        (
            "The exception was triggered at PC 0x7ff6a37a0ff0  store_kernel  (a.py:5)",
            "kernel",
            {"kernel": "store_kernel"},
        ),
        (
            "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=172",
            "memory_saver",
            {"function": "resume", "benign": False},
        ),
        (
            "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. retry)",
            "memory_saver",
            {"benign": True},
        ),
        ("NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=sglang, MMU Fault", "xid", {"xid": 31, "process": 77}),
        ("Out of memory: Killed process 91 (python3) total-vm:1kB", "oom_killer", {"victim": 91, "name": "python3"}),
        ("3 Workers (tasks / actors) killed due to memory pressure (OOM)", "oom_killer", {"by": "ray"}),
        ("Exception: Server process terminated unexpectedly.", "death", {"how": "server"}),
        ("Rank 0 scheduler died during initialization (exit code: -9).", "death", {"how": "init", "code": -9}),
        ("Subprocess scheduler_1 (pid=42) crashed with exit code -6. Triggering", "death", {"victim": 42, "code": -6}),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "death", {"how": "watchdog"}),
        (
            "ray.exceptions.ActorDiedError: The actor died unexpectedly. class_name: SGLangEngine pid: 5",
            "death",
            {"how": "actor", "name": "SGLangEngine", "victim": 5},
        ),
        (
            "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 30005)",
            "port_in_use",
            {"port": 30005},
        ),
        (
            "The server socket has failed to listen. port: 41001, code: -98, name: EADDRINUSE",
            "port_in_use",
            {"port": 41001},
        ),
        (
            "[rank4]:[E1 x ProcessGroupNCCL.cpp:1664] [PG 3 Rank 4] Exception detected by watchdog at work: 9141, last "
            "enqueued NCCL work: 9141, last completed NCCL work: 9140.",
            "collective",
            {"enqueued": 9141, "completed": 9140, "group": "3", "rank_in_group": 4},
        ),
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9, "
            "NumelOut=9, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
            "collective",
            {"seq": 808, "op": "ALLREDUCE", "timeout_ms": 600000, "rank_in_group": 1},
        ),
        ("python: can't open file '/a/pkg.cli.x': [Errno 2] No such file", "entry_missing", {"path": "/a/pkg.cli.x"}),
        ("/usr/bin/python3: No module named pkg.cli", "entry_missing", {"module": "pkg.cli"}),
        ("bash: run.sh: No such file or directory", "entry_missing", {"path": "run.sh"}),
        ("ValueError: No dot product attention backend is available for the inputs.", "no_attention", {}),
        ("Job 'raysubmit_x' failed", "job_end", {"state": "failed"}),
        ("Timer actor_train start", "timer", {"name": "actor_train", "edge": "start"}),
        ("Timer ref_log_probs end (elapsed: 4.1s)", "timer", {"edge": "end", "elapsed_s": 4.1}),
        (
            "Health check failed for rollout engine 2 (ray timeout or error). Killing actor. Exception: x",
            "health",
            {"by": "monitor", "engine": 2, "kills": True},
        ),
        (
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic",
            "health",
            {"by": "server", "window_s": 20},
        ),
        (
            "Error: Server error '503 Service Unavailable' for url 'http://h:1/generate', retrying... (attempt 3/60",
            "retry",
            {"status": 503, "path": "/generate", "attempt": 3, "most": 60},
        ),
        (
            "HTTPConnectionPool(host='10.0.0.2', port=15000): Max retries exceeded with url: /get_model_info (Caused "
            "by NewConnectionError('Connection refused'))",
            "retry",
            {"refused": True, "path": "/get_model_info", "url": "http://10.0.0.2:15000"},
        ),
        (
            " iteration        5/     100 | lm loss: 2.5E+00 | loss scale: 32768.0 | grad norm: 1.0 | number of "
            "skipped iterations:   1 | number of nan iterations:   0 |",
            "iteration",
            {"step": 5, "scale": 32768.0, "skipped": 1, "nans": 0},
        ),
    ],
)
def test_lines_and_their_data(text: str, kind: str, expected: dict[str, object]) -> None:
    found = kinds(text)
    assert kind in found
    assert {key: found[kind].get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "Soft watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
        "SIGTERM received. Draining requests and shutting down...",
        "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0",
        "[rank0]:[W1 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called before program exit",
        "The actor is dead because its owner has died. Owner Id: 01000000",
        "Worker exit type: INTENDED_USER_EXIT Worker exit detail: the actor died by ray.kill",
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 4096",
    ],
)
def test_lines_that_are_no_fault(text: str) -> None:
    faults = {"ima", "oom", "death", "port_in_use", "collective", "fatal", "memory_saver", "entry_missing", "job_end"}
    assert not faults & set(kinds(text))


def test_every_kind_that_the_rules_read_is_made() -> None:
    made = {recogniser.kind for recogniser in RECOGNISERS}
    assert set(LOG_KINDS) <= made
