"""SGLang's recorded answers: `tests/data/sglang_arguments/<version>.jsonl`, and how they compare with rltop's rules.

First line: `{"version", "bases": {"model/device": fields}}`, what SGLang resolves without further arguments. Then a
case a line: `{"model", "argv", "env"?, "files"?}` and `"error"`, or `"fields"` (those that differ from its base) and
`"environment"` (what SGLang leaves in the variables that toggles set).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltop.engines.rules import CPU, Host, judge
from rltop.engines.toggle_table import CORE_DUMP, LAUNCH_BLOCKING, is_on, read_fields
from tests.soak.sglang_arguments.cases import MODELS

DATA = Path(__file__).parents[2] / "data" / "sglang_arguments"

FROM_THE_GPU = ("mem_fraction_static",)
"""Fields that the rules leave to SGLang unless they are given."""


def device_of(case: Mapping[str, Any]) -> str:
    """What the case is resolved on."""
    return "cpu" if any(word in ("cpu", "--device=cpu") for word in case["argv"]) else "cuda"


def write(path: Path, version: str, bases: Mapping[str, Any], answered: Iterable[Mapping[str, Any]]) -> None:
    """Record. answered: each case with SGLang's answer merged in."""
    lines = [json.dumps({"version": version, "bases": bases})]
    for case in answered:
        kept = {name: value for name, value in case.items() if value or name in ("argv", "fields")}
        if "fields" in case:
            base = bases[f"{case['model']}/{device_of(case)}"]
            kept["fields"] = {name: value for name, value in case["fields"].items() if value != base[name]}
        lines.append(json.dumps(kept, separators=(",", ":")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def read(version: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(bases, cases with all fields)."""
    first, *rest = (json.loads(line) for line in (DATA / f"{version}.jsonl").read_text().splitlines())
    bases: dict[str, Any] = first["bases"]
    for case in rest:
        if "fields" in case:
            case["fields"] = bases[f"{case['model']}/{device_of(case)}"] | case["fields"]
    return bases, rest


def differences(version: str, bases: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where rltop's rules and SGLang do not agree, one line each."""
    for case in cases:
        yield from _compared(version, bases, case)


def _environment(version: str, case: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[str]:
    """`--crash-dump-folder` turns core dumps on where nothing is said."""
    ours = read_fields(fields, case.get("env", {}))
    theirs = case.get("environment", {})
    for toggle, variable in (("core_dump", CORE_DUMP), ("launch_blocking", LAUNCH_BLOCKING)):
        if (ours[toggle] == "on") != is_on(theirs.get(variable)):
            yield f"{version} {case['argv']} {case.get('env')}: SGLang leaves {variable}={theirs.get(variable)}"


def _compared(version: str, bases: Mapping[str, Any], case: Mapping[str, Any]) -> Iterator[str]:
    device, files = device_of(case), case.get("files", {})
    # The default chunk follows the memory of the machine that was asked.
    chunk = bases[f"{case['model']}/{device}"]["chunked_prefill_size"]
    host = Host(sm=CPU.sm, chunked_prefill=chunk, flashinfer=False) if device == "cpu" else Host(chunked_prefill=chunk)
    made = judge(
        ["--device", device, *case["argv"]],
        case.get("env", {}),
        version=version,
        model=MODELS[case["model"]],
        host=host,
        read=lambda path: str(files[path.removeprefix("%")]),
    )
    if "fields" in case:
        yield from _environment(version, case, made.fields)
    place = f"{version} {case['model']} {case['argv']} {case.get('env', {})}"
    if made.accepted != ("error" not in case):
        yield f"{place}: SGLang {case.get('error', 'accepts')}, rltop {made.errors or 'accepts'}"
        return
    for name, theirs in case.get("fields", {}).items():
        ours = made.fields.get(name)
        if name == "cuda_graph_config":
            ours = {phase: settings["backend"] for phase, settings in made.fields[name].items()}
        if name in FROM_THE_GPU and ours is None:
            continue
        if ours != theirs:
            yield f"{place}: SGLang resolves {name}={theirs!r}, rltop {ours!r}"
