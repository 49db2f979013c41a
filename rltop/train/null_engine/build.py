"""The start of the null engine, with SGLang's log lines on the way, and the little that stands for a model.

Its weights are a folder: the checksum is over the names, sizes and first bytes of what lies in it, so that two
checkpoints differ and one stays the same. Bad input raises `RltopError`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.control import NO_TENSORS
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.process import Tree
from rltop.train.cpu_engine.request import Endings
from rltop.train.cpu_engine.stages import (
    available_gb,
    capture,
    engine_stats,
    faults_of,
    injection_of,
    model_info,
    tell_limits,
)
from rltop.train.null_engine import MARKER, STEP_S, STEP_VARIABLE
from rltop.train.null_engine.loop import NullLoop

LOGGER = logging.getLogger("rltop.cpu_engine")
CONTEXT = 32_768
VOCABULARY = 151_936
"""Where no config.json says otherwise: Qwen3's."""
HEAD_BYTES = 1 << 16


class NullText:
    """Bytes as tokens."""

    eos_token_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Printable bytes; others are dots."""
        return "".join(chr(token) if 32 <= token < 127 else "." for token in ids)


class NullWeights:
    """A folder and a label."""

    gigabytes = 0.0

    def __init__(self, directory: Path, version: str, *, saver: bool = False) -> None:
        self.version = version
        self._digest = _digest(directory)
        self._saver = saver
        self._released = False

    def load(self, named: Iterable[Any]) -> None:
        """Raises `RltopError`: it has no tensors."""
        raise RltopError(NO_TENSORS, exit_code=1)

    def load_directory(self, directory: Path) -> None:
        """Take another folder for the weights. Raises `RltopError`."""
        self._digest = _digest(directory)

    def release(self) -> bool:
        """They have no memory, but behave as if it were given back. Returns whether it was."""
        self._released = self._saver
        return self._saver

    def resume(self) -> bool:
        """Returns whether weights were lost."""
        lost, self._released = self._released, False
        if lost:
            self._digest = hashlib.sha256(b"released").hexdigest()
        return lost

    def lose_buffers(self) -> None:
        """It has none."""

    def check(self, action: str, skip: Sequence[str] = ()) -> tuple[bool, dict[str, Any]]:
        """`/weights_checker`: the checksum only."""
        if action != "checksum":
            return False, {"success": False, "message": f"Unsupported action={action!r}"}
        rank = {"checksums": {"folder": self._digest}, "per_gpu_checksum": self._digest, "parallelism_info": {}}
        return True, {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": self._digest}


def build(args: EngineArgs, environ: Mapping[str, str], tree: Tree | None = None) -> Engine:
    """Put the parts together. Raises `RltopError`."""
    began = time.perf_counter()
    injection = injection_of(args, environ, tree)
    config = _config(args.model_path)
    context = args.context_length or int(config.get("max_position_embeddings") or CONTEXT)
    LOGGER.info("Load weight begin. avail mem=%.2f GB", available_gb())
    faults_of("load", injection, tree)
    live = NullWeights(args.model_path, args.weight_version, saver=args.enable_memory_saver)
    architecture = str((config.get("architectures") or ["NoModel"])[0])
    gigabytes = available_gb()
    LOGGER.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=0.00 GB.",
        time.perf_counter() - began,
        architecture,
        gigabytes,
    )
    LOGGER.info("Memory pool end. avail mem=%.2f GB", gigabytes)
    capture(args, injection, tree)
    tell_limits(args, context)
    text = NullText()
    loop = NullLoop(
        live,
        Endings(text, frozenset(), args.modern),
        engine_stats(args, context),
        args,
        injection=injection,
        step_s=_step_s(environ.get(STEP_VARIABLE, "")),
    )
    vocabulary = int(config.get("vocab_size") or VOCABULARY)
    reader = RequestReader(text, context_length=context, vocab_size=vocabulary, seed=args.random_seed)
    engine = Engine(
        args,
        loop,
        reader,
        model_info(args, str(config.get("model_type") or "none"), architecture),
        time.perf_counter() - began,
        model_path=str(args.model_path),
        marker=MARKER,
        takes_tensors=False,
    )
    if slow := injection.strike("slow-start", during="warm-up"):
        engine.warm_up_s = slow.number("seconds", 5)
    return engine


def _config(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RltopError("cannot read the model", where=str(directory / "config.json"), why=str(error)) from error
    return found if isinstance(found, dict) else {}


def _digest(directory: Path) -> str:
    found = hashlib.sha256()
    try:
        for path in sorted(path for path in directory.iterdir() if path.is_file()):
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
            found.update(f"{path.name}/{path.stat().st_size}/".encode() + head)
    except OSError as error:
        why = error.strerror or str(error)
        raise RltopError("cannot read the weights", where=str(directory), why=why, do="check --model-path") from error
    return found.hexdigest()


def _step_s(text: str) -> float:
    try:
        return max(0.001, float(text or STEP_S))
    except ValueError:
        raise RltopError(f"{STEP_VARIABLE}: {text!r} is no number", where=f"pid {os.getpid()}") from None
