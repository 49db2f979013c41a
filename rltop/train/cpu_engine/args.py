"""Command line of the CPU engine: SGLang's, taken and refused as SGLang would, and a few arguments of its own.

SGLang's arguments are parsed with its own table (`rltop.engines.options`), then filled in and rewritten as SGLang does
on one H200 (`imitation`). What the engine cannot do it accepts; `/server_info` and the log then show what SGLang's
would. Which release is imitated: `--sglang-version`, else the environment variable `RLTOP_CPU_ENGINE_SGLANG`.

Failure policy: an argument that SGLang's parser refuses ends the process with status 2, a combination that SGLang
refuses with status 1, each with SGLang's text on stderr.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rltop.engines.flags import Parsed, parse, strip
from rltop.engines.options import VERSIONS
from rltop.engines.rules import judge
from rltop.engines.toggle_table import TOGGLES
from rltop.train.cpu_engine import SPOKEN_API
from rltop.train.cpu_engine.effects import Effects
from rltop.train.cpu_engine.faults import VARIABLE, Fault, listing, parse_faults
from rltop.train.cpu_engine.imitation import imitate

PROGRAM = "rltop.train.cpu_engine"

VERSION_VARIABLE = "RLTOP_CPU_ENGINE_SGLANG"
"""Release to imitate, where `--sglang-version` is not given."""

POOL_TOKENS = 131_072
"""KV positions without `--max-total-tokens`, at SGLang's default memory fraction."""

DEFAULT_FRACTION = 0.903
"""`mem_fraction_static` of SGLang 0.5.23 on an H200 when nothing is given: what POOL_TOKENS belongs to."""

MOST_REQUESTS = 1024
"""Requests run at once without `--max-running-requests`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """One engine's settings: what its own code reads, and all of SGLang's fields for show (`sglang`)."""

    model_path: Path
    tokenizer_path: Path
    host: str
    port: int
    """0: the engine takes a free port and reports it (`port_file`, the uvicorn line)."""
    served_model_name: str
    context_length: int | None
    """None: config.json's max_position_embeddings."""
    max_total_tokens: int
    """KV positions reserved at once. Without the argument it follows `mem_fraction_static`, as SGLang's pool does."""
    max_running_requests: int
    random_seed: int
    """For requests without a sampling_seed; 0 if not given, where SGLang takes a random one."""
    weight_version: str
    decode_log_interval: int
    log_level: str
    disable_radix_cache: bool
    enable_metrics: bool
    enable_memory_saver: bool
    sglang_version: str
    """Own: the release that is imitated."""
    port_file: Path | None
    """Own: written, atomically, with the port number once the engine listens."""
    parent_pid: int | None
    """Own: the engine stops when this process is gone."""
    sglang: Mapping[str, Any] = field(repr=False)
    """Every field of SGLang's ServerArgs, as SGLang would have filled it in."""
    launch_command: str = field(repr=False)
    """The arguments as they were given, API keys left out."""
    effects: Effects = field(repr=False)
    remarks: tuple[str, ...] = field(repr=False)
    """What SGLang logs about changes that it made to its arguments."""
    faults: tuple[Fault, ...]
    """To be injected from the start on."""

    def log_form(self) -> str:
        """`server_args=ServerArgs(…)`, the line that SGLang logs first and log readers look for."""
        listed = ", ".join(f"{name}={value!r}" for name, value in self.sglang.items())
        return f"server_args=ServerArgs({listed})"

    @property
    def modern(self) -> bool:
        """Not 0.5.14: answers and log lines that changed since."""
        return self.sglang_version != "0.5.14"


def parse_args(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> EngineArgs:
    """Parse or exit: status 2 and argparse's message, or 1 and `ValueError: …`, as SGLang does."""
    own, rest = _own_parser().parse_known_args(argv)
    version = own.sglang_version or environ.get(VERSION_VARIABLE) or SPOKEN_API
    if version not in VERSIONS:
        _refuse(f"{VERSION_VARIABLE}: no such release: {version!r} (choose from {', '.join(VERSIONS)})")
    parsed = parse(rest, version=version)
    if parsed.errors:
        _refuse(parsed.errors[0])
    if not parsed.values.get("model_path"):
        _refuse("the following arguments are required: --model-path/--model")
    verdict = judge(rest, environ, version=version)
    if not verdict.accepted:
        print(f"ValueError: {verdict.errors[0]}", file=sys.stderr)
        raise SystemExit(1)
    faults = parse_faults(environ.get(VARIABLE, ""))
    obeyed = parsed
    if ignored := _ignored(parsed, faults):
        obeyed = parse(strip(parsed, ignored)[0], version=version)
        verdict = judge(obeyed.argv, environ, version=version)
    imitation = imitate(obeyed, verdict, version=version)
    values = imitation.values
    # An ignored flag is still listed as it was given where its outcome is listed elsewhere: in cuda_graph_config.
    values |= {name: parsed.values[name] for name in ignored if name != "cuda_graph_config" and "cuda_graph" in name}
    for name in ("tokenizer_path", "served_model_name"):
        values[name] = values[name] or values["model_path"]
    values["random_seed"] = values["random_seed"] or 0
    for name in ("api_key", "admin_api_key"):  # SGLang shows them; this engine does not even ask for them
        values[name] = "***" if values[name] else None
    _check_own_limits(values)
    return EngineArgs(
        model_path=Path(values["model_path"]),
        tokenizer_path=Path(values["tokenizer_path"]),
        host=values["host"],
        port=values["port"],
        served_model_name=values["served_model_name"],
        context_length=values["context_length"],
        max_total_tokens=values["max_total_tokens"]
        or max(1, round(POOL_TOKENS * values["mem_fraction_static"] / DEFAULT_FRACTION)),
        max_running_requests=values["max_running_requests"] or MOST_REQUESTS,
        random_seed=values["random_seed"],
        weight_version=values["weight_version"],
        decode_log_interval=values["decode_log_interval"],
        log_level=values["log_level"],
        disable_radix_cache=values["disable_radix_cache"],
        enable_metrics=values["enable_metrics"],
        enable_memory_saver=values["enable_memory_saver"],
        sglang_version=version,
        port_file=own.port_file,
        parent_pid=own.parent_pid,
        sglang=values,
        launch_command=shlex.join(_without_keys(rest)),
        effects=imitation.effects,
        remarks=(*parsed.warnings, *imitation.lines),
        faults=faults,
    )


def _without_keys(argv: Sequence[str]) -> list[str]:
    shown, hide = [], False
    for token in argv:
        name, equals, _ = token.partition("=")
        secret = name in ("--api-key", "--admin-api-key")
        shown.append("***" if hide else f"{name}=***" if secret and equals else token)
        hide = secret and not equals
    return shown


def _ignored(parsed: Parsed, faults: Sequence[Fault]) -> set[str]:
    """Fields whose arguments a `flag-ignored` makes ineffective."""
    toggles = [fault.settings["toggle"] for fault in faults if fault.kind.name == "flag-ignored"]
    fields = {name for toggle in toggles for name in TOGGLES[toggle].fields}
    if "speculative" in toggles:
        fields |= {name for name in parsed.values if name.startswith("speculative_")}
    return fields


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="rltop CPU engine, a stand-in for SGLang: its HTTP API over a small Qwen3 checkpoint on the CPU.\n"
        "It accepts every argument of SGLang (--model-path DIR is required) and these of its own:",
        epilog=f"Faults for rehearsals, in ${VARIABLE} (docs/engines.md):\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--port-file", type=Path, help="file to write the bound port to (`--port 0` takes a free one)")
    parser.add_argument("--parent-pid", type=_positive, help="stop when this process is gone")
    parser.add_argument(
        "--sglang-version",
        choices=VERSIONS,
        help=f"release whose arguments and answers are imitated; default: ${VERSION_VARIABLE}, else {SPOKEN_API}",
    )
    return parser


def _check_own_limits(values: Mapping[str, Any]) -> None:
    """What SGLang's parser lets through and its process then dies of."""
    for name in ("context_length", "max_total_tokens", "max_running_requests", "decode_log_interval"):
        if values[name] is not None and values[name] < 1:
            _refuse(f"argument --{name.replace('_', '-')}: must be at least 1, got {values[name]}")
    if values["log_level"].lower() not in ("debug", "info", "warning", "error", "critical"):
        _refuse(f"argument --log-level: invalid choice: {values['log_level']!r}")


def _refuse(message: str) -> NoReturn:
    print(f"usage: {PROGRAM} --model-path DIR [arguments of SGLang] [--help]", file=sys.stderr)
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
