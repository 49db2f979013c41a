"""SGLang's own argument resolution, 0.5.14 and 0.5.23, asked on a machine without a GPU.

Both live in one environment: that of `tests/soak/sglang_cpu` (which is 0.5.23), and a folder with 0.5.14 and the
versions of transformers, tokenizers and huggingface_hub that it wants, which comes first on PYTHONPATH. They are kept
under `$RLTOP_SOAK_CACHE`, else the user's cache directory. 2.3 GiB on disk; a few minutes to build.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from tests.soak.sglang_arguments.cases import MODELS
from tests.soak.sglang_cpu import SglangCpu, sglang_cpu_environment

HERE = Path(__file__).parent

OLDER = ("sglang==0.5.14", "transformers==5.8.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0")
"""On top of the environment of 0.5.23, without dependencies."""


@dataclass(frozen=True, slots=True)
class Sglang:
    """One release, ready to be asked."""

    version: str
    python: Path
    env: Mapping[str, str]

    def run(self, script: str, arguments: Sequence[str], text: str = "") -> str:
        """Output of a script of this folder under SGLang's Python. Raises `RltopError` with the end of its errors."""
        done = subprocess.run(
            [str(self.python), str(HERE / script), *arguments],
            input=text,
            capture_output=True,
            text=True,
            env=os.environ | dict(self.env) | {"CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-15:])
            raise RltopError(f"SGLang {self.version} did not answer", where=script, why=tail, exit_code=1)
        return done.stdout

    def table(self) -> str:
        """Its command line as the table that rltop ships."""
        return self.run("table.py", [])

    def answers(self, cases: Iterable[Mapping[str, Any]], models: Path, device: str) -> list[dict[str, Any]]:
        """Its answer to each case. models: a folder for the checkpoints' config.json."""
        for name, config in MODELS.items():
            (models / name).mkdir(parents=True, exist_ok=True)
            (models / name / "config.json").write_text(json.dumps(config))
        text = "".join(json.dumps(case) + "\n" for case in cases)
        return [json.loads(line) for line in self.run("resolve.py", [str(models), device], text).splitlines()]


def cache() -> Path:
    """Where the environments are kept."""
    named = os.environ.get("RLTOP_SOAK_CACHE")
    root = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rltop" / "soak"
    root.mkdir(parents=True, exist_ok=True)
    return root


def releases() -> list[Sglang]:
    """Both, installed if they are not there yet. Raises `RltopError` where SGLang has no wheel."""
    newer = sglang_cpu_environment(cache())
    folder = _older(newer, cache() / "sglang-0.5.14")
    path = os.pathsep.join([str(folder), newer.env["PYTHONPATH"]])
    return [
        Sglang("0.5.14", newer.python, dict(newer.env) | {"PYTHONPATH": path}),
        Sglang("0.5.23", newer.python, newer.env),
    ]


def _older(newer: SglangCpu, folder: Path) -> Path:
    complete = folder / "rltop-complete"
    recipe = hashlib.sha256(" ".join(OLDER).encode()).hexdigest()
    if complete.exists() and complete.read_text() == recipe:
        return folder
    command = [str(newer.python), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    command += [*shlex.split(os.environ.get("PIP_ARGS", "")), *OLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise RltopError("cannot install SGLang 0.5.14", where=shlex.join(command), why=tail, exit_code=1)
    complete.write_text(recipe)
    return folder
