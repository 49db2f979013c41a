"""Lines of Megatron trainers: loads, saves, weight checks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser

_LOADED = re.compile(
    r"successfully loaded checkpoint from (?P<directory>\S+)(?: \[[^\]]*\])*(?: at iteration (?P<iteration>\d+))?"
)
_LOADED_HF = re.compile(
    r"(?:load(?:ed|ing)?)\b.{0,60}?\b(?:hf|hugging ?face)\b.{0,60}?(?:into|to) megatron|"
    r"megatron model from (?:hf|hugging ?face)",
    re.I,
)
_PATH = re.compile(r"(?<![\w/.])(?P<path>[\w.~-]*/[\w./~@+-]*\w)")


def _loaded(line: Line) -> Mapping[str, object] | None:
    found = _LOADED.search(line.text)
    if found:
        iteration = found["iteration"]
        return {"directory": found["directory"], "iteration": int(iteration) if iteration else None}
    if _LOADED_HF.search(line.text):
        path = _PATH.search(line.text)
        return {"directory": path["path"] if path else "", "hf": True}
    return None


_SAVED = re.compile(r"successfully saved checkpoint from iteration\s+(?P<iteration>\d+) to (?P<directory>\S+)")


def _saved(line: Line) -> Mapping[str, object] | None:
    found = _SAVED.search(line.text)
    return {"directory": found["directory"], "iteration": int(found["iteration"])} if found else None


_STARTS = re.compile(
    r"-+ arguments -+|using world size: \d+|initializ(?:ed|ing) (?:torch distributed|tensor model parallel)|"
    r"> setting (?:random seeds|tensorboard)|building \S+ (?:tokenizer|model)|Ports for engine|Router launched at|"
    r"Creating placement group|bundle\s+\d+, actual_bundle_index|server_args=|Namespace\(|"
    r"number of parameters on \(tensor, pipeline\)",
    re.I,
)


def _started(line: Line) -> Mapping[str, object] | None:
    return {} if _STARTS.search(line.text) else None


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("ckpt_loaded", ("loaded checkpoint", "egatron"), _loaded),
    Recogniser("ckpt_saved", ("successfully saved checkpoint",), _saved),
    Recogniser(
        "startup",
        (
            "arguments -",
            "using world size",
            "nitializ",
            "> setting",
            "building ",
            "Ports for engine",
            "Router launched",
            "Creating placement group",
            "actual_bundle_index",
            "server_args=",
            "Namespace(",
            "number of parameters on",
        ),
        _started,
    ),
)
