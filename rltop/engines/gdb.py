"""The kernel that made an illegal access, from a CUDA core dump (`cuda-gdb -batch`) or, weaker, from a log.

    cuda-gdb -batch -ex "target cudacore FILE" -ex "info cuda kernels" -ex bt

cuda-gdb 13.0 prints what is wanted and then, after an illegal write of a warp that has ended, aborts itself (rc 134,
4 of 4 times on an H200): its output counts, whatever its exit status. It is run where the core dump lies.

Failure policy: nothing raises. What is not there is None, with the reason in `Looked.why`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUDA_GDB = "cuda-gdb"
GDB_S = 120.0
"""A core dump of 116 MB took a few seconds on an H200; one on a network disk may take long."""
MOST_OUTPUT = 1 << 20
_HOMES = ("/usr/local/cuda/bin", "/opt/cuda/bin")

_EXCEPTION = re.compile(r"^CUDA Exception: (?P<what>.+)$", re.M)
_TRIGGERED = re.compile(
    r"The exception was triggered at PC (?P<pc>0x[0-9a-f]+)\s+(?P<kernel>[^\s(]+)[^\n]*?"
    r"(?:\((?P<file>[^()\s]+):(?P<line>\d+)\))?\s*$",
    re.M,
)
_FRAME = re.compile(
    r"^#0\s+0x[0-9a-f]+ in (?P<kernel>.+?)<<<(?P<grid>\([\d,]+\)),(?P<block>\([\d,]+\))>>>"
    r".*?(?: at (?P<file>\S+):(?P<line>\d+))?$",
    re.M,
)
_FOCUS = re.compile(
    r"focus set to CUDA kernel \d+, grid \d+, block (?P<block>\([\d,]+\)), thread (?P<thread>\([\d,]+\))"
)
_CORE_FRAME = re.compile(r"coredump:\s+#0\s+0x[0-9a-f]+\s+(?P<kernel>\S.*)$")
_LAUNCH = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_BLOCKED = re.compile(r"illegal memory access|misaligned address|illegal instruction|launch failure")
_CALL = re.compile(r"^\s*(?P<kernel>[A-Za-z_][\w.]*)\[")
"""`kernel[grid](...)`: how Triton launches."""
_PLUMBING = re.compile(r"/torch/|/triton/|<frozen|contextlib")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Where it happened."""

    name: str
    block: str = ""
    """`(0,0,0), thread (64,0,0)`, as far as it is known."""
    place: str = ""
    """`file.py:9`, where the kernel has line information."""
    exception: str = ""
    source: str
    """Where this is known from, for people."""
    weaker: bool = False
    """Not from a core dump: the timing was another, and another kernel may have been at fault."""

    def cell(self) -> dict[str, Any]:
        """For the cell `bisect`."""
        return {
            "name": self.name,
            "block": self.block or None,
            "source": self.source,
            "weaker": self.weaker,
            "place": self.place or None,
            "exception": self.exception or None,
        }


@dataclass(frozen=True, slots=True)
class Looked:
    """What a core dump told."""

    kernel: Kernel | None
    why: str = ""
    """Why there is no kernel, or why only its name is known."""


def parse_cuda_gdb(text: str) -> Kernel | None:
    """The kernel in cuda-gdb's output; None where it names none."""
    triggered, frame, focus = _TRIGGERED.search(text), _FRAME.search(text), _FOCUS.search(text)
    if triggered is None and frame is None:
        return None
    told = triggered or frame
    assert told is not None, "one of the two"
    file, line = told["file"], told["line"]
    if file is None and frame is not None:
        file, line = frame["file"], frame["line"]
    exception = _EXCEPTION.search(text)
    return Kernel(
        name=told["kernel"].strip(),
        block=f"{focus['block']}, thread {focus['thread']}" if focus is not None else "",
        place=f"{file.rsplit('/', 1)[-1]}:{line}" if file else "",
        exception=exception["what"].strip() if exception is not None else "",
        source="core dump, cuda-gdb",
    )


def of_log(lines: Sequence[str]) -> Kernel | None:
    """The kernel of the `coredump:` lines that CUDA writes into the log: its name alone."""
    for line in lines:
        if (match := _CORE_FRAME.search(line)) is not None:
            return Kernel(name=match["kernel"].strip(), source="core dump, the log's coredump: lines")
    return None


def of_blocking(lines: Sequence[str], *, graphs: bool) -> Kernel | None:
    """The launch that a traceback under CUDA_LAUNCH_BLOCKING ends at: a hint.

    graphs: CUDA graphs were on; a replay launches many kernels at once, so nothing is told then. Nor is it where the
    error was noticed later than it happened.
    """
    if graphs or any("asynchronously reported" in line for line in lines):
        return None  # torch leaves these words out where launches block
    last: tuple[re.Match[str], str] | None = None
    for at, line in enumerate(lines):
        if (match := _LAUNCH.match(line)) is not None and not _PLUMBING.search(match["file"]):
            last = (match, lines[at + 1] if at + 1 < len(lines) else "")
        elif _BLOCKED.search(line) and last is not None:
            frame, code = last
            call = _CALL.match(code)
            return Kernel(
                name=call["kernel"] if call is not None else frame["function"],
                place=f"{frame['file'].rsplit('/', 1)[-1]}:{frame['line']}",
                source="the launch that blocked (CUDA_LAUNCH_BLOCKING, graphs off)",
                weaker=True,
            )
    return None


def find_cuda_gdb(environ: Mapping[str, str] = os.environ) -> str | None:
    """Its path on this machine."""
    places = [f"{home}/bin" for home in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH")) if home]
    return shutil.which(CUDA_GDB, path=os.pathsep.join([environ.get("PATH", ""), *places, *_HOMES]))


async def read_core(core: Path, *, gdb: str | None = None, limit_s: float = GDB_S) -> Looked:
    """Ask cuda-gdb for the kernel of a core dump. gdb: its path; None: it is looked for."""
    gdb = gdb or find_cuda_gdb()
    if gdb is None:
        return Looked(None, f"there is no cuda-gdb here; where there is one: {by_hand(core)}")
    try:
        process = await asyncio.create_subprocess_exec(
            *(gdb, "-batch", "-ex", f"target cudacore {core}", "-ex", "info cuda kernels", "-ex", "bt"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Looked(None, f"{gdb} can not be run: {error.strerror or error}")
    assert process.stdout is not None, "asked for"
    output, late = b"", ""
    try:
        async with asyncio.timeout(limit_s):
            while len(output) < MOST_OUTPUT and (part := await process.stdout.read(1 << 16)):
                output += part
            await process.wait()
    except TimeoutError:
        late = f" (it was ended after {limit_s:g} s)"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    text = output.decode("utf-8", "replace")
    found = parse_cuda_gdb(text)
    if found is not None:
        return Looked(found)
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return Looked(None, f"cuda-gdb names no kernel of {core.name}{late}; it says: {said[:160]}")


def by_hand(core: Path) -> str:
    """The command that a person would run."""
    return f"{CUDA_GDB} -batch -ex 'target cudacore {core}' -ex 'info cuda kernels' -ex bt"
