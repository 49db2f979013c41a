"""`/start_profile`: torch's profiler over the next batches, as SGLang does it; the trace is Chrome's JSON, gzipped.

It lands in `output_dir` of the request, else in `SGLANG_TORCH_PROFILER_DIR`, else in `/tmp`, under SGLang's file name.
Only the scheduler's thread may use a `Profile`: torch's profiler belongs to the thread that starts it.
"""

from __future__ import annotations

import gzip
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

LOGGER = logging.getLogger("rltop.cpu_engine")


class Profile:
    """One profile that runs. Raises `OSError` at the start where the directory cannot be written."""

    def __init__(self, directory: Path, steps: int | None) -> None:
        """steps: batches until it stops by itself; None: until `stop`."""
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"cannot write to {directory}")
        self._directory, self._left = directory, steps
        # Not torch.profiler.profile: that one imports the whole compiler first, for seconds.
        profiler: Any = torch.autograd.profiler.profile
        self._profiler = profiler(use_cpu=True)
        self._profiler.__enter__()
        LOGGER.info("Profiling starts. Traces will be saved to: %s", directory)

    def batch(self) -> bool:
        """A batch begins. Returns whether the profile is over."""
        if self._left is None:
            return False
        if self._left == 0:
            self.stop()
            return True
        self._left -= 1
        return False

    def stop(self) -> None:
        """Stop and write the trace."""
        LOGGER.info("Stop profiling...")
        self._profiler.__exit__(None, None, None)
        trace = self._directory / f"{time.time()}-TP-0.trace.json"
        self._profiler.export_chrome_trace(str(trace))
        trace.with_name(f"{trace.name}.gz").write_bytes(gzip.compress(trace.read_bytes()))
        trace.unlink()
        LOGGER.info("Profiling done. Traces are saved to: %s", self._directory)
