"""The rules against what SGLang itself answered: `tests/data/sglang_arguments/`, recorded by `make soak`'s target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.engines.flags import parse
from rltop.engines.options import VERSIONS, Option, table
from rltop.engines.rules import judge
from tests.soak.sglang_arguments.cases import POOL
from tests.soak.sglang_arguments.recording import differences, read


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_answer_is_rltops_answer(version: str) -> None:
    bases, cases = read(version)
    random_cases = cases[-300:]
    assert len(cases) > 600
    assert sum("error" in case for case in random_cases) > 60
    assert sum("error" not in case for case in random_cases) > 100
    assert list(differences(version, bases, cases)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_error_is_in_sglangs_words(version: str) -> None:
    """What argparse says; later errors are told in words of our own."""
    _, cases = read(version)
    for case in cases:
        error = case.get("error", "")
        if error.startswith(("ambiguous", "unrecognized", "argument ")):
            files = case.get("files", {})
            made = judge(case["argv"], {}, version=version, read=_reader(files))
            assert made.errors[0] == error


def _reader(files: Mapping[str, str]) -> Callable[[str], str]:
    return lambda path: files[path.removeprefix("%")]


ODD = ["--", "-x", "-1", "--tp=", "--no-lora-strict-loading", "--kv", "4"]
WORDS = [*(word for piece in POOL for word in piece), *ODD]


def _real(option: Option) -> dict[str, Any]:
    """argparse's arguments for one option of the table."""
    match option.kind:
        case "true":
            return {"action": "store_true"}
        case "on_off":
            return {"action": argparse.BooleanOptionalAction}
        case "none" | "const":
            return {"action": "store_const", "const": option.const} if option.nargs == 0 else {"action": "store"}
    types: dict[str, Any] = {"int": int, "float": float, "json": json.loads, "human_int": int}
    kind = types.get(option.type, str)
    return {"nargs": option.nargs, "type": kind, "choices": option.choices, "const": option.const}


class _Stop(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _Stop(message)


PARSERS = {}
for _version in VERSIONS:
    PARSERS[_version] = _Parser(prog="sglang", add_help=False)
    for _option in table(_version).options:
        _arguments = {name: value for name, value in _real(_option).items() if value is not None}
        _spellings = [text for text in _option.spellings if not text.startswith("--no-")]
        PARSERS[_version].add_argument(*_spellings, dest=_option.dest, **_arguments)


def _argparse(version: str, argv: list[str]) -> dict[str, Any] | None:
    """What argparse makes of it; None when it refuses."""
    try:
        return vars(PARSERS[version].parse_args(argv))
    except _Stop:
        return None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VERSIONS), st.lists(st.sampled_from(WORDS), max_size=8), st.data())
def test_the_parser_accepts_what_argparse_accepts(version: str, words: list[str], data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(min(len(word), 6), len(word))) for word in words]
    argv = [word[:length] if word[:2] == "--" else word for word, length in zip(words, lengths, strict=True)]
    own = parse(argv, version=version)
    theirs = _argparse(version, argv)
    if theirs is None:
        assert own.errors
        return
    if any("cuda_graph" in text or "config" in text for text in own.errors):
        return  # types of our own, and --config, which argparse does not read
    assert own.errors == ()
    for one in own.given:
        last = [given for given in own.given if given.option.dest == one.option.dest][-1]
        if last.option.type in ("str", "int", "float") and last.option.kind != "const":
            assert own.values[one.option.dest] == theirs[one.option.dest]
