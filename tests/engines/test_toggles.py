"""From toggles to arguments and back."""

from __future__ import annotations

import pytest

from rltop.engines.options import VERSIONS
from rltop.engines.toggles import change, read_argv


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "value", "first"),
    [
        ("cuda_graph", "off", "on"),
        ("speculative", "NGRAM", "off"),
        ("deepep", "normal", "off"),
        ("launch_blocking", "on", "off"),
    ],
)
def test_a_toggle_is_read_back_and_taken_away_again(version: str, name: str, value: str, first: str) -> None:
    argv = ("--tp-size", "2")
    there = change(argv, {}, {name: value}, version=version)
    assert there.refusals == ()
    assert read_argv(there.argv, there.env, version=version)[name] == value
    back = change(there.argv, there.env, {name: first}, version=version)
    assert read_argv(back.argv, back.env, version=version)[name] == first


@pytest.mark.parametrize("version", VERSIONS)
def test_an_option_that_would_win_is_taken_away(version: str) -> None:
    config = '{"decode": {"backend": "full", "max_bs": 8}}'
    argv = ("--cuda-graph-config", config, "--cuda-graph-backend-decode=full", "--disable-decode-cuda")
    made = change(argv, {}, {"cuda_graph": "off"}, version=version)
    assert read_argv(made.argv, {}, version=version)["cuda_graph"] == "off"
    assert made.removed == (
        f"--cuda-graph-config {config}",
        "--cuda-graph-backend-decode=full",
        "--disable-decode-cuda",
    )
    assert '{"decode": {"max_bs": 8}}' in made.argv
