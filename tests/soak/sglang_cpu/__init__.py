"""Real SGLang 0.5.23 on a CPU: an environment of its own, two stubs, and how to start it.

SGLang declares CUDA packages that it does not need on a CPU, so its dependencies are installed by an exact list without
theirs. Two things that it imports exist only for GPUs and are replaced by small modules in `stubs/`, which come first
on PYTHONPATH: the schemas of torchvision's compiled operators, and three operators of vllm. Scheduler, sampler, HTTP
server and weight updates are SGLang's own.

Linux on x86-64, Python 3.11. 2.3 GiB on disk, about 20 s to start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rltop.engines.launch import EngineSpec
from rltop.errors import RltopError

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
SGLANG = "sglang==0.5.23"

SERVER_ARGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--dtype",
    "float32",
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    "8192",
    "--random-seed",
    "1",
    "--enable-metrics",
)
"""What the CPU needs (the first two), fp32, and a KV pool that a laptop has."""


@dataclass(frozen=True, slots=True)
class SglangCpu:
    """A ready environment."""

    python: Path
    env: Mapping[str, str]
    """On top of the caller's environment."""

    def spec(
        self, model_path: Path, directory: Path, *, run: str, engine_id: str, args: tuple[str, ...] = ()
    ) -> EngineSpec:
        """For `rltop.engines.launch.launch_engine`. args: further server arguments, SGLang's names."""
        return EngineSpec(
            kind="sglang",
            model_path=model_path,
            directory=directory,
            run=run,
            engine_id=engine_id,
            python=self.python,
            env=self.env,
            args=(*SERVER_ARGS, *args),
            start_timeout_s=600,  # 20 s on a quiet machine, minutes on a crowded one
        )


def sglang_cpu_environment(root: Path) -> SglangCpu:
    """The environment under `root/.venv-sglang`, built if it is not there yet (minutes), reused if it is.

    PIP_ARGS in the environment is passed to pip, for example to take the small CPU build of torch from its own index.
    Raises `RltopError` where SGLang has no wheel, or with the end of pip's output.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        raise RltopError(
            "real SGLang cannot be installed here",
            why=f"the pinned list is for Linux x86-64 and Python 3.11, this is {sys.platform} {platform.machine()} "
            f"and Python {platform.python_version()}",
        )
    venv = root / ".venv-sglang"
    complete = venv / "rltop-complete"
    recipe = hashlib.sha256((HERE / "requirements.txt").read_bytes() + TORCH.encode() + SGLANG.encode()).hexdigest()
    with _locked(root):
        if not complete.exists() or complete.read_text() != recipe:
            _build(venv)
            complete.write_text(recipe)
    return SglangCpu(venv / "bin" / "python", _environment())


def _build(venv: Path) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(venv)])
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        *shlex.split(os.environ.get("PIP_ARGS", "")),
    ]
    _run([*pip, TORCH])
    _run([*pip, "--no-deps", "-r", str(HERE / "requirements.txt")])
    _run([*pip, "--no-deps", SGLANG])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RltopError(
            "cannot build SGLang's environment",
            where=shlex.join(command),
            why="\n".join(done.stdout.splitlines()[-15:]),
            exit_code=1,
        )


def _environment() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE / "stubs"), *([before] if before else [])]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Its own CPU engine wants compiled kernels that are not on PyPI.
        "SGLANG_USE_CPU_ENGINE": "0",
    }


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two test processes must not build at the same time."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
