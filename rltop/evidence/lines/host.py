"""Lines about the machine and about GPU memory, whoever writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser

_OOM = re.compile(r"\b(?:CUDA|HIP|NPU|XPU|MUSA) out of memory|OutOfMemoryError", re.I)
_BENIGN = "may not be an issue"
_HOST_MEMORY = "Task was killed"
"""Ray's OutOfMemoryError is about the memory of the host."""
_NO_POOL = re.compile(r"Not enough memory\. Please try to (?:increase|decrease) --mem-fraction-static")
"""SGLang has loaded the weights, and what its share of the GPU leaves is no KV cache at all."""
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>[KMG]iB)"
_TRIED = re.compile("Tried to allocate " + _SIZE.format("tried"))
_GPU = re.compile(
    r"GPU (?P<gpu>\d+) has a total capacity of " + _SIZE.format("total") + " of which " + _SIZE.format("free")
)
_PROCESS = re.compile(r"Process (?P<pid>\d+) has " + _SIZE.format("used") + " memory in use")
_GIB = {"KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0}


def _gib(found: re.Match[str], name: str) -> float | None:
    try:
        return round(float(found[name]) * _GIB[found[f"{name}_unit"]], 4)
    except ValueError:
        return None


def out_of_memory(line: Line) -> Mapping[str, object] | None:
    """PyTorch's message: gpu, tried_gb, total_gb, free_gb (GiB), processes (pid -> GiB); SGLang's own: pool (true)."""
    if _NO_POOL.search(line.text):
        return {"pool": True}
    if not _OOM.search(line.text) or _BENIGN in line.text or _HOST_MEMORY in line.text:
        return None
    data: dict[str, object] = {}
    if tried := _TRIED.search(line.text):
        data["tried_gb"] = _gib(tried, "tried")
    if gpu := _GPU.search(line.text):
        data |= {"gpu": int(gpu["gpu"]), "total_gb": _gib(gpu, "total"), "free_gb": _gib(gpu, "free")}
    processes = {found["pid"]: _gib(found, "used") for found in _PROCESS.finditer(line.text)}
    return data | ({"processes": processes} if processes else {})


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("oom", ("out of memory", "OutOfMemoryError", "Not enough memory"), out_of_memory),
)
