"""Lines of Megatron trainers: loads, saves, weight checks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser, number

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
    r"> setting (?:random seeds|tensorboard)|building \S+ (?:tokenizer|model)|Ports for engine|"
    r"Router launched (?:locally )?at|Creating placement group|bundle\s+\d+, actual_bundle_index|"
    r"server_args=|Namespace\(|number of parameters on \(tensor, pipeline\)",
    re.I,
)


def _started(line: Line) -> Mapping[str, object] | None:
    return {} if _STARTS.search(line.text) else None


_HELD = re.compile(
    r"wake_up: memory of device (?P<device>\S+) is still held (?P<after>[\d.]+) s after its release: (?P<holders>.+)"
)
_HOLDER = re.compile(r"engine (?P<engine>\S+) \(pid (?P<pid>\d+)\) (?P<gb>[\d.]+) GB")


def memory_held(line: Line) -> Mapping[str, object] | None:
    """rltop's trainer found memory held at its wake-up: device, after_s, engines, holders (for people), processes
    (pid -> GB)."""
    found = _HELD.search(line.text)
    if found is None:
        return None
    each = list(_HOLDER.finditer(found["holders"]))
    return {
        "device": found["device"],
        "after_s": number(found["after"]),
        "engines": ", ".join(one["engine"] for one in each),
        "holders": "; ".join(f"{one['engine']} (pid {one['pid']}: {one['gb']} GB)" for one in each),
        "processes": {one["pid"]: number(one["gb"]) for one in each},
        "owner": "trainer",
    }


_EMPTY = re.compile(
    r"Engine (?P<engine>\S+) (?P<how>answered token 0 alone|gave every token the log-prob -[\d.]+) "
    r"in all (?P<samples>\d+) samples of rollout (?P<rollout>\d+)"
)


def no_weights(line: Line) -> Mapping[str, object] | None:
    """rltop's trainer got answers of an engine without weights: engine_id, how, samples, rollout."""
    found = _EMPTY.search(line.text)
    if found is None:
        return None
    return {
        "engine_id": found["engine"],
        "how": found["how"],
        "samples": int(found["samples"]),
        "rollout": int(found["rollout"]),
    }


_EQUAL = re.compile(
    r"Weights version '(?P<version>[^']{0,80})' checked after reset_tensors: "
    r"every tensor of (?P<engines>[1-9]\d{0,6}) engines is equal"
)


def _weights_equal(line: Line) -> Mapping[str, object] | None:
    """rltop's trainer compared what it pushed with what its engines hold: version, engines (how many)."""
    found = _EQUAL.search(line.text)
    return {"version": found["version"], "engines": int(found["engines"])} if found else None


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("ckpt_loaded", ("loaded checkpoint", "egatron"), _loaded),
    Recogniser("memory_held", ("is still held",), memory_held),
    Recogniser("no_weights", ("answered token", "gave every token"), no_weights),
    Recogniser("weights_equal", ("checked after reset_tensors",), _weights_equal),
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
