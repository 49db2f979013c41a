"""A Ray actor that owns one engine process in its bundle of the placement group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rltop.engines.client import EngineClient
from rltop.engines.launch import EngineProcess, EngineSpec, launch_engine
from rltop.train.ports import EngineFacts

STOP_S = 5.0
"""How long SIGTERM may take. The daemon gives the whole run ten seconds."""


@dataclass(frozen=True, slots=True)
class EngineLook:
    """Whether the process runs, and the end of its log if it does not."""

    alive: bool
    exit_code: int | None
    tail: str


class EngineActor:
    """Starts, looks at and stops one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: EngineProcess | None = None

    def process_id(self) -> int:
        """Of this worker, not of the engine."""
        return os.getpid()

    def start(self, model_path: str) -> EngineFacts:
        """Start the engine from a checkpoint; returns when it serves."""
        spec = dataclasses.replace(self._spec, model_path=Path(model_path))
        process = self._process = launch_engine(spec)
        with EngineClient(process.url) as client:
            info, server = client.model_info(), client.server_info()
        return EngineFacts(
            id=spec.engine_id,
            url=process.url,
            kind="sglang" if spec.kind == "sglang" else "cpu",
            pid=process.pid,
            host=socket.gethostname(),
            version=str(server.get("version", "")),
            weight_version=str(info.get("weight_version", "")),
            model_path=model_path,
            log=str(process.log),
            generation=spec.generation,
        )

    def look(self, wait_s: float = 0.0) -> EngineLook:
        """A glance at the process; asks the engine nothing.

        wait_s: how long it may take to die. A dying process closes its connections before it is seen to be dead.
        """
        if self._process is None:
            return EngineLook(True, None, "")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.process.wait(wait_s)
        exit_code = self._process.poll()
        return EngineLook(exit_code is None, exit_code, "" if exit_code is None else self._process.log_tail())

    def stop(self) -> None:
        """End the engine and everything it started."""
        if self._process is not None:
            self._process.stop(STOP_S)
