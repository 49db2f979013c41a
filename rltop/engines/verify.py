"""Whether a toggle took effect: from `/server_info`, `/metrics`, the log of the start and `/proc/PID/environ`.

A flag may be accepted and silently ignored. So what was asked for is never taken for what is: each toggle is looked up
in what the engine itself shows, the nearest thing to its kernels first. A counter of passes proves a CUDA graph, then a
capture that the log tells of, and the resolved arguments of `/server_info` only where neither speaks.

Failure policy: what cannot be seen is None, never an assumption.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.engines.toggle_table import DECODE_SIZES, LAUNCH_BLOCKING, every_size, read_fields


@dataclass(frozen=True, slots=True)
class Effective:
    """What one toggle is in the running engine."""

    value: str | None
    """None: cannot be seen."""
    holds: bool | None
    """Whether it is what was wanted; None: cannot be told."""
    source: str
    """Where it was seen, with the value found there; or why it cannot be seen."""


SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Fields of `/server_info` that SGLang shows in clear."""

READY = "The server is fired up and ready to roll!"
"""A log that has this line shows the whole start."""


def read_server_info(
    info: Mapping[str, Any], environ: Mapping[str, str] | None, *, version: str
) -> dict[str, str | None]:
    """The toggles of a running engine, from `/server_info` and its environment. None: not shown there.

    What the scheduler says of itself (`internal_states`) goes before what the server was started with.
    """
    return read_fields(_fields(info), environ)


def _fields(info: Mapping[str, Any]) -> dict[str, Any]:
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    return {**info, **{name: value for name, value in inner.items() if name in info and value is not None}}


def scrub(info: Mapping[str, Any]) -> dict[str, Any]:
    """`/server_info` without its keys and passwords, at any depth, also inside a command line."""
    return {name: "***" if name in SECRETS and value else _scrubbed(value) for name, value in info.items()}


_SECRET_FLAG = re.compile(r"(--(?:admin-)?api-key|--ssl-keyfile-password)([= ]+)('[^']*'|\"[^\"]*\"|\S+)")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return scrub(value)
    if isinstance(value, (list, tuple)):
        return [_scrubbed(item) for item in value]
    return _SECRET_FLAG.sub(r"\1\2***", value) if isinstance(value, str) else value


def verify(
    wanted: Mapping[str, str],
    *,
    server_info: Mapping[str, Any],
    metrics: str,
    log_lines: Iterable[str],
    environ: Mapping[str, str] | None,
    version: str,
) -> dict[str, Effective]:
    """Of each wanted toggle the value in effect.

    metrics: text of `/metrics` ("" if there is none). log_lines: of this generation's start. environ: of the engine's
    process; None on another host.
    """
    fields = _fields(server_info)
    shown = read_fields(fields, environ)
    seen = _Seen(shown, metrics, [line for line in log_lines if "raph" in line or READY in line], fields)
    result: dict[str, Effective] = {}
    for name, value in wanted.items():
        match name:
            case "cuda_graph" | "prefill_graph":
                found, source = seen.graph("decode" if name == "cuda_graph" else "prefill", name)
            case "cuda_graph_padding":
                result[name] = _padding(value, shown, seen)
                continue
            case "speculative":
                found, source = seen.speculative()
            case "launch_blocking" | "core_dump":
                found, source = shown[name], _environment(name, environ)
            case _:
                found, source = shown.get(name), "/server_info"
                if found is None:
                    source = "/server_info does not show it"
        result[name] = Effective(found, None if found is None else _same(name, value, found), source)
    return result


def _same(name: str, wanted: str, found: str) -> bool:
    if name == "mem_fraction_static":
        return abs(float(wanted) - float(found)) < 1e-6
    if name == "speculative":
        algorithm = wanted.partition(":")[0].upper()
        return {"NEXTN": "EAGLE", "OFF": "off"}.get(algorithm, algorithm) == found
    return wanted == found


def _environment(name: str, environ: Mapping[str, str] | None) -> str:
    if environ is None:
        return "the environment of the process cannot be seen from here"
    if name == "launch_blocking":
        return f"/proc/PID/environ: {LAUNCH_BLOCKING}={environ.get(LAUNCH_BLOCKING, '(not set)')}"
    return "/proc/PID/environ"


def _padding(wanted: str, shown: Mapping[str, str | None], seen: _Seen) -> Effective:
    """Padding means something only where a decode graph is."""
    graph, source = seen.graph("decode", "cuda_graph")
    if graph == "off":
        # The default is nothing that anybody asked for.
        holds = None if wanted == "on" else False
        return Effective(None, holds, f"no decode graph, so padding has no effect ({source})")
    value = shown["cuda_graph_padding"]
    if value is None:
        return Effective(None, None, "/server_info does not show it")
    sizes = seen.sizes()
    if given := seen.fields.get(DECODE_SIZES):  # a list that was given is captured as it is, padded or not
        source = "/server_info: every size is captured" if every_size(given) else "/server_info"
        return Effective(value, wanted == value, source)
    if every_size(sizes):
        return Effective("off", wanted == "off", f"capture line of the log: every size from 1 to {max(sizes)}")
    if sizes and value == "off":
        return Effective("on", wanted == "on", f"capture line of the log: only sizes {sizes[:6]}…")
    return Effective(value, wanted == value, "/server_info")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the engine shows, besides its arguments."""

    shown: Mapping[str, str | None]
    metrics: str
    lines: Sequence[str]
    fields: Mapping[str, Any]

    def count(self, metric: str, **labels: str) -> float | None:
        """Sum of a metric's samples with these labels; None: there is none."""
        total = None
        for line in re.findall(rf"^sglang:{metric}(?:\{{.*)? .*$", self.metrics, re.MULTILINE):
            if all(f'{name}="{value}"' in line for name, value in labels.items()):
                total = (total or 0.0) + float(line.rsplit(" ", 1)[1])
        return total

    def graph(self, phase: str, toggle: str) -> tuple[str | None, str]:
        """("on" | "off" | None, where that was seen)."""
        passes = self.count("cuda_graph_passes_total", mode=f"{phase}_cuda_graph")
        if passes:
            return "on", f"/metrics: {passes:g} {phase} passes through a CUDA graph"
        names = "(?:decode|verify)" if phase == "decode" else "prefill"
        for line in self.lines:
            # 0.5.14 and 0.5.23, then older releases, which had a decode graph only.
            old = phase == "decode" and "Capture cuda graph begin" in line
            if old or re.search(rf"Capture target {names} CUDA graph (?:begin|end)", line):
                return "on", f"log: {_message(line)}"
            off = rf"Cuda graph is disabled because|Disable {phase} CUDA graph because"
            if re.search(off, line):
                return "off", f"log: {_message(line)}"
        if any(READY in line for line in self.lines) and self.shown[toggle] == "on":
            return "off", f"log: the start shows no capture of a {phase} graph, though /server_info names a backend"
        value = self.shown[toggle]
        return value, "/server_info" if value is not None else "/server_info does not show it"

    def sizes(self) -> list[int]:
        """Batch sizes of the decode graph's capture line."""
        for line in self.lines:
            match = re.search(r"Capture target (?:decode|verify) CUDA graph begin.* bs=\[([\d, ]+)\]", line)
            if match:
                return [int(size) for size in match[1].split(",")]
        return []

    def speculative(self) -> tuple[str | None, str]:
        """The algorithm, proved by verify calls where there were some."""
        value = self.shown["speculative"]
        calls = self.count("spec_verify_calls_total")
        if value not in (None, "off") and calls:
            return value, f"/server_info, and /metrics: {calls:g} verify calls"
        if value is None:
            return None, "/server_info does not show it"
        if value == "off" and calls:
            return None, f"/server_info says off, /metrics counts {calls:g} verify calls"
        return value, "/server_info"


def _message(line: str) -> str:
    """A log line without its time and ranks."""
    return re.sub(r"^\[[^]]*\] ", "", line).strip()[:120]
