"""A mutation fuzzer over every reader and every rule: damaged evidence must never crash rltop.

    python -m tests.evidence.fuzz [--inputs 100000] [--seed 1]

An input is a folder of one to three files: whole ones of every kind, damaged by flips, cuts, insertions of nasty words,
repetitions, and pieces of other kinds. A crash is an exception other than the one error for unusable input, a reader or
recogniser that failed (told as a defect), or a rule that raised.
"""

from __future__ import annotations

import argparse
import io
import pickle
import random
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rltop.checks.evaluate import evaluate
from rltop.errors import RltopError
from rltop.evidence.collect import collect
from tests.evidence.files import bf16

_LOG = """[2026-03-02 10:00:00] placement_group.py:125 - Creating placement group with 16 GPUs...
[2026-03-02 10:00:01] placement_group.py:64 - Waiting for placement group of 16 GPUs (elapsed 30s): 8 GPUs registered with Ray, 8 available.
[2026-03-02 10:00:01] placement_group.py:92 -   bundle    0, actual_bundle_index:    0, node: node-a, gpu: 4
(MegatronTrainRayActor pid=4101, ip=10.0.0.1) [2026-03-02 10:00:02] checkpointing.py:1 - successfully loaded checkpoint from X [ t 1/2, p 1/1 ] at iteration 0
-------------------- arguments --------------------
  colocate ........................ True
  load ............................ None
-------------------- end of arguments --------------------
\x1b[36m(SGLangEngine pid=3501)\x1b[0m [2026-03-02 10:00:03 DP4 TP1] Prefill batch, #new-seq: 8, #new-token: 4096, #cached-token: 0, token usage: 0.11, #queue-req: 24,
(SGLangEngine pid=3501) [2026-03-02 10:00:04 TP0] Decode batch. #running-req: 44, #token: 91820, token usage: 0.31, avail mem=12.41 GB
(SGLangEngine pid=3501) [2026-03-02 10:00:05] INFO:     10.0.0.2:4411 - "POST /update_weights_from_distributed HTTP/1.1" 200 OK
(RolloutManager pid=3001) [2026-03-02 10:00:06] sglang_rollout.py:447 - Finish rollout: ['Q text \\'x\\''], label: 80, reward: 1
(RolloutManager pid=3001) [2026-03-02 10:00:07] rollout.py:1193 - perf 0: {'rollout/response_len/max': 4011, 'rollout/truncated_ratio': 0.03}
(MegatronTrainRayActor pid=4101) [2026-03-02 10:00:08] data.py:212 - rollout 0: {'rollout/log_probs': -0.31, 'rollout/raw_reward': nan}
(MegatronTrainRayActor pid=4101) [2026-03-02 10:00:09] timer.py:24 - Timer actor_train start
(MegatronTrainRayActor pid=4101) [2026-03-02 10:00:10] model.py:918 - step 0: {'train/loss': np.float64(0.5), 'train/grad_norm': inf, 'train/step': 0}
 iteration        9/     100 | consumed samples: 8 | lm loss: 1.5E+00 | loss scale: 1.0 | grad norm: 2.0 |
step:7 - actor/grad_norm:0.5 - actor/lr:1e-06
(RolloutManager pid=3001) [2026-03-02 10:00:11] http_utils.py:153 - Error: Server error '503 Service Unavailable' for url 'http://10.0.0.2:3776/generate', retrying... (attempt 1/60, response=No available workers)
(RolloutManager pid=3001) [2026-03-02 10:00:12] health_monitor.py:154 - Health check failed for rollout engine 3 (ray timeout or error). Killing actor.
[rank3]:[E302 10:00:13.123456789 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600001 milliseconds, last enqueued work: 9, last completed work: 6
(SGLangEngine pid=3501) [2026-03-02 10:00:14 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 2012, in run_batch
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 58.15 GiB. GPU 0 has a total capacity of 139.81 GiB of which 47.69 GiB is free.
ray.exceptions.RayTaskError(RuntimeError): ray::MegatronTrainRayActor.train() (pid=4107, ip=node-c)
  File "megatron/core/a.py", line 1, in f
RuntimeError: Rank 23, node node-c, device 7, iteration 58: Unexpected result nan (message='found NaN in local grad norm')
torch.AcceleratorError: CUDA error: an illegal memory access was encountered [repeated 7x across cluster]
[Mon Mar  2 10:00:15 2026] NVRM: Xid (PCI:0000:07:00): 31, pid=990, Ch 00000008
torch.distributed.DistNetworkError: failed to listen. port: 41377, name: EADDRINUSE, message: address already in use
"""  # noqa: E501

_JSONL = (
    '{"event": "rollout", "rollout_id": 0, "rollout/raw_reward": 0.41, "rollout/log_probs": -0.3}\n'
    '{"event": "update_weights", "after_step": 0, "ok": true}\n'
    '{"train/step": 0, "train/loss": NaN, "train/grad_norm": 0.2, "train/ppo_kl": 0.0, "run": "a", "rank": 0}\n'
    '{"step": 1, "prompt_id": 3, "mult_prob_error": 12.5}\n'
)
_RAY = """======== Autoscaler status: 2026-03-03 08:00:01 ========
Node status
---------------------------------------------------------------
Active:
 1 node_abc
Pending:
 (no pending nodes)
Resources
---------------------------------------------------------------
Usage:
 0.0/128.0 CPU
 8.0/8.0 GPU
 0B/1.5TiB memory
Demands:
 {'GPU': 1.0, 'CPU': 1.0} * 16 (PACK): 1+ pending placement groups
"""


def _safetensors() -> bytes:
    kind, shape, raw = bf16(4, 4)
    name = "model.layers.0.mlp.gate.weight_scale"
    text = f'{{"{name}": {{"dtype": "{kind}", "shape": {list(shape)}, "data_offsets": [0, {len(raw)}]}}}}'.encode()
    return struct.pack("<Q", len(text)) + text + raw


def _dump() -> bytes:
    samples = [
        {"index": i, "response": "hello", "tokens": [1, 2], "reward": 1.0, "status": "completed"} for i in (0, 1)
    ]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"rollout_id": 0, "samples": samples}, protocol=2))
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return data.getvalue()


SEEDS: tuple[tuple[str, bytes], ...] = (
    ("train.log", _LOG.encode()),
    ("engine_0.log", _LOG.encode()[::1]),
    ("metrics.jsonl", _JSONL.encode()),
    (
        "args.txt",
        b"train.py --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --lr 1e-6",
    ),
    ("args.txt", b"framework=verl data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    ("env.txt", b"export HF_HOME=/x\nhttp_proxy=http://p:1\nno_proxy=localhost\n"),
    (
        "samples.jsonl",
        b'{"rollout_id": 0, "index": 1, "response": "hi", "tokens": [1], "finish_reason": "stop", "reward": 1}\n',
    ),
    (
        "http.jsonl",
        b'{"path": "/update_weights_from_disk", "status": 200, "engine": 2, "answer": {"success": false}}\n',
    ),
    ("greedy_probe.jsonl", b'{"step": 0, "output_sha1": "ab", "weight_version": "1"}\n'),
    ("bisect_runs.jsonl", b'{"cuda_graph": true, "spec": false, "outcome": "ima", "phase": "decode", "t_s": 300}\n'),
    ("gpu_mem.jsonl", b'{"t_s": 1, "gpu": 0, "pid": 990, "gb": 1.5, "owner": "engine"}\n'),
    (
        "server_info.json",
        b'{"model_path": "/x", "mem_fraction_static": 0.8, "api_key": "secret", "stop_token_ids": [1]}',
    ),
    ("router_workers.json", b'{"workers": []}'),
    (
        "weights_checker.json",
        b'{"success": false, "message": "max diff", "tensors": [{"name": "a", "all_zero": true}]}',
    ),
    ("versions.json", b'{"installed": {"sglang": "0.5.12"}, "known_good": {"sglang": "0.5.9"}}'),
    ("gpu_procs.json", b'[{"gpu": 0, "pid": 990, "gb": 77.2, "owner": "other"}]'),
    ("tensor_names.json", b'["model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"]'),
    ("rules.json", b'{"recommended": ["re:.*mlp\\\\.gate\\\\..*", "lm_head"]}'),
    ("ray_status_120s.txt", _RAY.encode()),
    ("operator_note.txt", b"context parallel is on, CUDA graph off\n"),
    ("ip_local_port_range.txt", b"32768 60999\n"),
    ("ckpt/config.json", b'{"num_hidden_layers": 2, "vocab_size": 99, "architectures": ["X"], "eos_token_id": [1, 2]}'),
    ("ckpt/model.safetensors.index.json", b'{"weight_map": {"a.layers.0.x": "model-00001-of-00002.safetensors"}}'),
    ("ckpt/model-00001-of-00002.safetensors", _safetensors()),
    ("ckpt/generation_config.json", b'{"eos_token_id": 106}'),
    ("SAVE/latest_checkpointed_iteration.txt", b"40"),
    ("SAVE/iter_0000040/common.pt", b"PK"),
    ("rollout_data/0.pt", _dump()),
    (
        "train_data/0.pt",
        pickle.dumps({"rollout_id": 0, "rank": 0, "rollout_data": {"sample_indices": [0]}}, protocol=2),
    ),
    ("dmesg.txt", b"[Mon Mar  2 18:00:00 2026] Out of memory: Killed process 3501 (sglang) total-vm:1kB\n"),
)
"""Whole evidence of every kind."""

_WORDS = (
    *(b"nan", b"inf", b"-1", b"1e999", b"9" * 400, b"99999999999999999999", b"1.2.3", b"0x", b"null", b"true"),
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x80\xae", b"\x1b[31m", b"\n", b"\r", b" " * 300),
    *(b"{", b"}", b"[", b"'", b'"', b"\\", b"--", b"=", b"--flag ", b"../../etc/passwd", b"Error: x"),
    *(b"Traceback (most recent call last):\n", b'File "a", line 9\n', b"(A pid=1)", b"step 5: {", b"[response] "),
    *(b"[2026-03-02 10:00:00]", b"[9999-99-99 99:99:99]", b"[repeated 7x across cluster]"),
)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with one to eight wounds; at most 64 KiB."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(9):
            case 0 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 1:
                out[at:at] = rng.choice(_WORDS)
            case 2:
                del out[at : at + rng.choice((1, 2, 8, 64, 512))]
            case 3:
                del out[at:]
            case 4:
                end = at + rng.choice((4, 40, 400))
                out[at:at] = out[at:end] * rng.choice((1, 2, 20))
            case 5:
                other = rng.choice(SEEDS)[1]
                begin = rng.randrange(len(other) + 1)
                out[at:at] = other[begin : begin + rng.choice((10, 100, 1000))]
            case 6:
                digits = [i for i, byte in enumerate(out) if 48 <= byte <= 57]
                if digits:
                    where = rng.choice(digits)
                    out[where : where + 1] = rng.choice(_WORDS)
            case 7:
                lines = out.split(b"\n")
                rng.shuffle(lines)
                out = bytearray(b"\n".join(lines))
            case _:
                out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
    return bytes(out[: 64 * 1024])


def folders(seed: int) -> Iterator[dict[str, bytes]]:
    """Damaged evidence without end: file name -> content."""
    rng = random.Random(seed)
    while True:
        files = {}
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            name, data = rng.choice(SEEDS)
            if rng.random() < 0.05:
                name = rng.choice(SEEDS)[0]  # a name that promises something else
            files[name] = data if rng.random() < 0.1 else mutated(rng, data)
        yield files


def judge(root: Path, files: dict[str, bytes]) -> str:
    """`judged`, or `unusable` for the one error. Raises AssertionError, or whatever crashed."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        obs = collect([root])
    except RltopError as error:
        if error.exit_code != 2 or not error.where:
            raise
        return "unusable"
    defects = [problem for problem in obs.problems if "defect" in problem.why]
    assert not defects, defects
    report = evaluate(obs)
    raised = [v for v in report.verdicts if isinstance(v.value, dict) and "rule_error" in v.value]
    assert not raised, raised
    return "judged"


def run(inputs: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and a description of each crash (at most 20)."""
    counts: Counter[str] = Counter()
    crashes: list[str] = []
    for number, files in zip(range(inputs), folders(seed), strict=False):
        root = folder / "case"
        try:
            counts[judge(root, files)] += 1
        except Exception as error:  # the very thing that is looked for
            counts["crashed"] += 1
            if len(crashes) < 20:
                crashes.append(f"seed {seed} input {number} {sorted(files)}: {type(error).__name__}: {error}"[:600])
        shutil.rmtree(root, ignore_errors=True)
    return counts, crashes


def main() -> int:
    """Exit 1 if anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, crashes = run(options.inputs, options.seed, Path(folder))
    print(f"{sum(counts.values())} inputs in {time.monotonic() - begin:.0f} s: {dict(counts)}")
    print("\n".join(crashes))
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
