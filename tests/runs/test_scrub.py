"""What may not leave the machine, and what a reader of the report needs."""

from __future__ import annotations

import pytest

from rltop.runs.scrub import Scrub

SCRUB = Scrub(hosts=("gpu-node-17", "gpu-node-17.lab.example.org"), users=("mallory",))


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnopqrst loaded", "HF_TOKEN=*** loaded"),
        ("export WANDB_API_KEY=0123456789abcdef", "export WANDB_API_KEY=***"),
        ("ServerArgs(api_key='abc def', tp_size=2)", "ServerArgs(api_key='***', tp_size=2)"),
        ("launch --api-key s3cr3t --tp 2", "launch --api-key *** --tp 2"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer ***"),
        ("key sk-abcdefghijklmnop1234 was used", "key *** was used"),
        ("POST http://10.1.2.3:30000/generate", "POST http://HOST:30000/generate"),
        ("POST http://127.0.0.1:30000/generate", "POST http://127.0.0.1:30000/generate"),
        ("https://me:pw@git.example.org/x", "https://HOST/x"),
        ("connect to 192.168.4.7:5000", "connect to ADDRESS:5000"),
        ("on gpu-node-17 rank 3", "on HOST rank 3"),
        ("on gpu-node-17.lab.example.org rank 3", "on HOST rank 3"),
        ("at ip-10-0-3-4.ec2.internal now", "at HOST now"),
        ("mallory@gpu-node-17: no space", "USER@HOST: no space"),
        ("run of mallory on 2001:db8:0:1::17", "run of USER on ADDRESS"),
        ("listen on fe80::1", "listen on ADDRESS"),
        ("model /home/mallory/models/qwen3-30b loaded", "model PATH/qwen3-30b loaded"),
        ("dump in ~/runs/night/core.123", "dump in PATH/core.123"),
        (
            'File "/home/mallory/env/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 61, in run',
            'File "sglang/srt/managers/scheduler.py", line 61, in run',
        ),
        (
            'File "/usr/lib/python3.11/multiprocessing/process.py", line 108, in run',
            'File "multiprocessing/process.py", line 108, in run',
        ),
        (
            'File "/sgl-workspace/sglang/python/sglang/srt/utils.py", line 6',
            'File "sglang/srt/utils.py", line 6',
        ),
    ],
)
def test_what_is_taken_out(line: str, left: str) -> None:
    assert SCRUB.text(line) == left


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-30 04:04:01] Decode batch, #running-req: 12, #token: 4711, token usage: 0.42, cuda graph: True",
        "[2026-11-30 04:04:01] Prefill batch, #new-seq: 1, #new-token: 27, #cached-token: 0, #pending-token: 0",
        '[2026-11-30 04:04:01] "POST /weights_checker HTTP/1.1" 500 Internal Server Error',
        "[2026-11-30 04:04:01 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "kernel void fused_moe<float, 128>(int const*, float*) at block (12, 0, 0)",
        "frame #4: c10::TensorImpl::~TensorImpl() + 0x9 (0x7fd3c474e279 in libc10.so)",
        "max_total_num_tokens=131507, chunked_prefill_size=8192, max_new_tokens=17",
        "Process 0x7f / 3 of 4, 1/2 done, and/or not",
        "sglang 0.5.14.post1, torch 2.9.1+cu128, flashinfer 0.5.3",
        "reading /dev/nvidia0 and /proc/123/environ",
        "std::vector<int>::operator[] in at::native::copy_",
    ],
)
def test_what_stays(line: str) -> None:
    assert SCRUB.text(line) == line


def test_a_command_line_keeps_its_flags() -> None:
    argv = ["python", "-m", "sglang.launch_server", "--model-path", "/data/mallory/qwen", "--api-key", "abc"]
    argv += ["--dist-init-addr", "10.0.0.7:5000", "--host", "127.0.0.1", "--host=node9", "--tp-size", "2"]
    assert SCRUB.argv(argv) == [
        *("python", "-m", "sglang.launch_server", "--model-path", "PATH/qwen", "--api-key", "***"),
        *("--dist-init-addr", "HOST:5000", "--host", "127.0.0.1", "--host=HOST", "--tp-size", "2"),
    ]


def test_of_variables_the_technical_ones_stay() -> None:
    env = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "NCCL_DEBUG_FILE": "/home/mallory/nccl.log",
        "HF_TOKEN": "hf_abcdefghijklmnopqrst",
        "PATH": "/home/mallory/bin:/usr/bin",
        "MY_LAB": "x",
    }
    assert SCRUB.environment(env) == {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG_FILE": "PATH/nccl.log"}


def test_a_name_that_is_a_word_is_not_hunted() -> None:
    assert Scrub(users=("root",), hosts=("vm",)).text("root cause: vm_map failed") == "root cause: vm_map failed"
