"""From toggles to arguments and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.engines.flags import parse
from rltop.engines.options import VERSIONS, table
from rltop.engines.planning import stays
from rltop.engines.rules import judge
from rltop.engines.toggle_table import with_core_dump_file
from rltop.engines.toggles import TOGGLES, change, choices, read_argv
from tests.soak.sglang_arguments.cases import MODELS

H200: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang" / "server_info_0.5.14.json").read_text()
)

TO_AND_FRO = [
    ("cuda_graph", "off", "on"),
    ("cuda_graph_padding", "off", "on"),
    ("prefill_graph", "off", "on"),
    ("speculative", "NGRAM", "off"),
    ("deepep", "normal", "off"),
    ("deepep", "low_latency", "off"),
    ("launch_blocking", "on", "off"),
    ("overlap_schedule", "off", "on"),
    ("radix_cache", "off", "on"),
    ("custom_all_reduce", "off", "on"),
    ("dp_attention", "on", "off"),
    ("hicache", "on", "off"),
    ("chunked_prefill", "2048", "off"),
    ("attention_backend", "triton", "fa3"),
    ("mem_fraction_static", "0.5", "0.6"),
    ("core_dump", "on", "off"),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "value", "first"), TO_AND_FRO)
def test_a_toggle_is_read_back_and_taken_away_again(version: str, name: str, value: str, first: str) -> None:
    argv = ("--tp-size", "2")
    there = change(argv, {}, {name: value}, version=version)
    assert there.refusals == ()
    assert judge(there.argv, there.env, version=version).accepted
    if name != "chunked_prefill":
        assert read_argv(there.argv, there.env, version=version)[name] == value
    back = change(there.argv, there.env, {name: first}, version=version)
    assert back.refusals == ()
    assert read_argv(back.argv, back.env, version=version)[name] == first


def test_every_toggle_is_tried() -> None:
    assert {name for name, _, _ in TO_AND_FRO} == set(TOGGLES)


WRITTEN = {
    "cuda_graph": [
        ["--disable-cuda-graph"],
        ["--disable-cuda-graph", "--cuda-graph-backend-decode=full", "--cuda-graph-backend-prefill", "breakable"],
        ["--disable-decode-cuda-g", "--disable-prefill-cuda"],
        ["--cuda-graph-config", '{"decode": {"backend": "full", "max_bs": 8}}', "--cuda-graph-backend-d=breakable"],
        ["--debug-cuda-graph", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-decode", "full"],
    ],
    "speculative": [
        ["--speculative-alg", "NGRAM", "--speculative-num-draft-tokens=8"],
        ["--speculative-algorithm=ngram"],
    ],
    "deepep": [
        ["--moe-a2a-backend=deepep", "--deepep-mode", "normal", "--enable-two-batch-overlap"],
        ["--moe-a2a-b", "none", "--moe-a2a-backend", "deepep"],
    ],
    "overlap_schedule": [["--disable-overlap"], ["--disable-overlap-schedule", "--disable-overlap-schedule"]],
}
"""Ways in which people write these toggles."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "written"), [(name, argv) for name, every in WRITTEN.items() for argv in every])
def test_every_spelling_is_taken_away_before_anything_is_added(version: str, name: str, written: list[str]) -> None:
    argv = ["--tp", "2", *written, "--log-level", "info"]
    for value in ("off", {"speculative": "NGRAM", "deepep": "auto"}.get(name, "on")):
        made = change(argv, {}, {name: value}, version=version)
        assert made.refusals == ()
        assert read_argv(made.argv, {}, version=version)[name] == value
        assert judge(made.argv, {}, version=version).accepted
        assert made.argv[:2] == ("--tp", "2")
        flags = [one.written for one in parse(made.argv, version=version).given]
        if made.removed:
            assert len(flags) == len(set(flags)), "nothing is written twice"


@pytest.mark.parametrize("version", VERSIONS)
def test_sizes_in_a_graph_config_outlive_its_backend(version: str) -> None:
    argv = ("--cuda-graph-config", '{"decode": {"backend": "full", "max_bs": 8}}')
    made = change(argv, {}, {"cuda_graph": "off"}, version=version)
    assert made.removed == (" ".join(argv),)
    assert '{"decode": {"max_bs": 8}}' in made.argv
    assert made.aliases["prefill_graph"].value == "off"


def test_arguments_of_a_file_are_stripped_too(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "engine.yaml"
    file.write_text("tp-size: 2\ndisable-overlap-schedule: true\n")
    made = change(["--config", str(file), "--log-level", "info"], {}, {"overlap_schedule": "on"}, version="0.5.23")
    assert made.argv == ("--tp-size", "2", "--log-level", "info")
    ignored = parse([f"--config={file}"], version="0.5.23")
    assert ignored.errors == ()
    assert "ignored by SGLang" in ignored.warnings[0]
    missing = change(["--config", str(tmp_path / "no.yaml")], {}, {"overlap_schedule": "on"}, version="0.5.23")
    assert "no.yaml" in missing.refusals[0].why


@pytest.mark.parametrize(
    ("argv", "changes", "why"),
    [
        ((), {"deepep": "fast"}, "cannot be 'fast'"),
        ((), {"teleport": "on"}, "no toggle 'teleport'"),
        ((), {"attention_backend": "fa9"}, "has no 'fa9'"),
        ((), {"mem_fraction_static": "1.5"}, "cannot be '1.5'"),
        (("--tp", "2", "--deepep-mode", "fast"), {"overlap_schedule": "off"}, "invalid choice: 'fast'"),
        (("--enable-torch-compile",), {"cuda_graph_padding": "off"}, "incompatible with --enable-torch-compile"),
        (("--disable-radix-cache",), {"hicache": "on"}, "mutually exclusive"),
        (("--enable-hierarchical-cache",), {"radix_cache": "off"}, "mutually exclusive"),
        (("--pp-size", "2"), {"speculative": "NGRAM"}, "ipeline"),
        (("--page-size", "64"), {"chunked_prefill": "1000"}, "divisible by page_size"),
        (("--tp", "2", "--dp-size", "2", "--enable-dp-attention"), {"speculative": "NGRAM"}, "dp attention"),
        (("--tp", "2", "--moe-a2a-backend=deepep", "--deepep-mode=normal"), {"cuda_graph": "on"}, "deepep_mode=normal"),
        (("--attention-backend", "torch_native"), {"cuda_graph": "on"}, "torch_native"),
        (("--device", "cpu"), {"cuda_graph": "on"}, "CPU"),
        ((), {"dp_attention": "on"}, "one GPU"),
        (("--dp-size", "4"), {"dp_attention": "on"}, "replicas"),
        ((), {"speculative": "EAGLE"}, "draft model"),
        (("--pp-size", "2"), {"overlap_schedule": "on"}, "pipeline parallelism"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_sglang_rejects_or_ignores_is_refused(
    version: str, argv: tuple[str, ...], changes: dict[str, str], why: str
) -> None:
    made = change(argv, {}, changes, version=version, model=MODELS["moe"])
    assert why in made.refusals[0].why
    assert made.refusals[0].do
    assert (made.argv, made.env) == (argv, {}), "nothing is changed"
    assert not made.allowed


def test_two_changes_that_need_each_other_are_made_together() -> None:
    argv = ("--tp", "2", "--moe-a2a-backend=deepep", "--deepep-mode=normal", "--disable-cuda-graph")
    made = change(argv, {}, {"deepep": "low_latency", "cuda_graph": "on"}, version="0.5.23")
    assert made.refusals == ()
    assert read_argv(made.argv, {}, version="0.5.23")["cuda_graph"] == "on"


@pytest.mark.parametrize("version", VERSIONS)
def test_deepep_moves_graphs_and_says_so(version: str) -> None:
    normal = change(("--tp", "2"), {}, {"deepep": "normal"}, version=version)
    assert {name: alias.value for name, alias in normal.aliases.items()} == {
        "cuda_graph": "off",
        "prefill_graph": "off",
    }
    assert "deepep_mode=normal" in normal.aliases["cuda_graph"].why


def test_turning_deepep_off_does_not_turn_the_prefill_graph_on() -> None:
    argv = ("--tp", "2", "--moe-a2a-backend", "deepep")
    made = change(argv, {}, {"deepep": "off"}, version="0.5.14")
    assert made.pins == ("--cuda-graph-backend-prefill disabled",)
    assert "prefill_graph" not in made.aliases
    # 0.5.23 keeps its breakable graph with DeepEP: nothing moves.
    newer = change(argv, {}, {"deepep": "off"}, version="0.5.23")
    assert (newer.pins, newer.aliases) == ((), {})


def test_a_prefill_graph_that_sglang_would_not_make_is_forced_and_that_is_said() -> None:
    argv = ("--tp", "2", "--moe-a2a-backend", "deepep")
    made = change(argv, {}, {"prefill_graph": "on"}, version="0.5.14")
    assert made.refusals == ()
    assert any("--moe-a2a-backend deepep): it is forced" in text for text in made.warnings)
    assert change(argv, {}, {"prefill_graph": "on"}, version="0.5.23").warnings == ()
    alone = change(("--cuda-graph-backend-prefill=disabled",), {}, {"prefill_graph": "on"}, version="0.5.14")
    assert alone.warnings == ()


def test_the_same_draft_again_changes_nothing() -> None:
    argv = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "/draft", "--tp", "2")
    for same in ("EAGLE", "eagle:/draft", "NEXTN"):
        assert change(argv, {}, {"speculative": same}, version="0.5.23").argv == argv
    other = change(argv, {}, {"speculative": "EAGLE:/other"}, version="0.5.23")
    assert "/other" in other.argv
    assert "/draft" not in other.argv


def test_speculation_would_limit_requests_to_48() -> None:
    alone = change((), {}, {"speculative": "NGRAM"}, version="0.5.14")
    assert any("48" in text for text in alone.warnings)
    pinned = change((), {}, {"speculative": "NGRAM"}, version="0.5.14", baseline=H200)
    assert "--max-running-requests 4096" in pinned.pins
    assert not any("48" in text for text in pinned.warnings)
    assert judge(pinned.argv, {}, version="0.5.14").fields["max_running_requests"] == 4096


def test_only_what_a_toggle_moves_is_pinned() -> None:
    made = change((), {}, {"cuda_graph": "off"}, version="0.5.14", baseline=H200)
    assert made.pins == ("--mem-fraction-static 0.3", "--max-total-tokens 21853334", "--random-seed 1")
    given = change(("--max-total-tokens", "1000"), {}, {"cuda_graph": "off"}, version="0.5.14", baseline=H200)
    assert "--max-total-tokens 21853334" not in given.pins
    for quiet in ("launch_blocking", "overlap_schedule", "radix_cache", "core_dump"):
        value = "on" if quiet in ("launch_blocking", "core_dump") else "off"
        assert change((), {}, {quiet: value}, version="0.5.14", baseline=H200).pins == ()


def test_launch_blocking_is_an_environment_variable_that_cannot_be_inherited() -> None:
    on = change((), {}, {"launch_blocking": "on"}, version="0.5.23")
    assert (on.argv, on.env_set) == ((), {"CUDA_LAUNCH_BLOCKING": "1"})
    assert any("CUDA graphs off" in text for text in on.warnings)
    off = change((), on.env, {"launch_blocking": "off"}, version="0.5.23")
    assert off.env["CUDA_LAUNCH_BLOCKING"] == "0"
    without = change(("--disable-cuda-graph",), {}, {"launch_blocking": "on"}, version="0.5.23")
    assert not any("CUDA graphs off" in text for text in without.warnings)


def test_a_core_dump_sets_only_what_is_not_set() -> None:
    mine = {"CUDA_COREDUMP_SHOW_PROGRESS": "0", "CUDA_COREDUMP_FILE": "/mine"}
    made = change((), mine, {"core_dump": "on"}, version="0.5.14")
    assert made.env["CUDA_COREDUMP_SHOW_PROGRESS"] == "0"
    assert with_core_dump_file(made.env, "/run")["CUDA_COREDUMP_FILE"] == "/mine"
    plain = change((), {}, {"core_dump": "on"}, version="0.5.14")
    assert "skip_abort" not in plain.env["CUDA_COREDUMP_GENERATION_FLAGS"]
    assert with_core_dump_file(plain.env, "/run")["CUDA_COREDUMP_FILE"].startswith("/run/coredump/")
    assert with_core_dump_file({}, "/run") == {}
    # SGLang turns it on by itself with a crash folder, where nothing is said.
    argv = ("--crash-dump-folder", "/tmp/crash")
    assert read_argv(argv, {}, version="0.5.14")["core_dump"] == "on"
    off = change(argv, {}, {"core_dump": "off"}, version="0.5.14")
    assert off.env_set == {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}


def test_an_unknown_release_is_served_by_the_nearest_one_and_says_so() -> None:
    for version, used in (("0.5.18", "0.5.14"), ("0.5.99", "0.5.23"), ("0.4.1", "0.5.14"), ("main", "0.5.23")):
        made = change(("--tp", "2"), {}, {"overlap_schedule": "off"}, version=version)
        assert any(used in text for text in made.warnings), version
        assert table(version).version == used
    assert change(("--tp", "2"), {}, {"overlap_schedule": "off"}, version="0.5.23").warnings == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_choices_tell_why_they_are_refused(version: str) -> None:
    offered = choices(("--pp-size", "2", "--disable-radix-cache"), {}, version=version)
    assert set(offered) == set(TOGGLES)
    assert offered["launch_blocking"] == {"on": "", "off": ""}
    assert "mutually exclusive" in offered["hicache"]["on"]
    assert "ipeline" in offered["speculative"]["NGRAM"]
    assert offered["speculative"]["off"] == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_named_is_read_as_sglang_resolves_it(version: str) -> None:
    argv = ("--tp", "2", "--moe-a2a-backend", "deepep", "--deepep-mode", "normal")
    assert read_argv(argv, {}, version=version)["cuda_graph"] == "off"
    named = read_argv((*argv, "--cuda-graph-backend-decode", "full"), {}, version=version)
    assert named["cuda_graph"] == "on", "it was asked for: that SGLang ignores it is for verification to say"
    assert "chunked_prefill" not in read_argv((), {}, version=version)
    assert read_argv(("--speculative-algorithm", "nextn"), {}, version=version)["speculative"] == "EAGLE"


VALUES = {name: [value, first] for name, value, first in TO_AND_FRO}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(VERSIONS),
    st.lists(st.sampled_from([(name, value) for name, both in VALUES.items() for value in both]), max_size=6),
    st.sampled_from(list(MODELS)),
)
def test_a_chain_of_changes_ends_where_it_was_led(version: str, steps: list[tuple[str, str]], model: str) -> None:
    argv: tuple[str, ...] = ("--tp", "4")
    env: dict[str, str] = {}
    for name, value in steps:
        made = change(argv, env, {name: value}, version=version, model=MODELS[model])
        if made.refusals:
            assert (made.argv, made.env) == (argv, env)
            continue
        argv, env = made.argv, dict(made.env)
        answer = judge(argv, env, version=version, model=MODELS[model])
        assert answer.accepted, answer.errors
        if name != "chunked_prefill":
            assert read_argv(argv, env, version=version, model=MODELS[model])[name] == value
        again = change(argv, env, {name: value}, version=version, model=MODELS[model])
        assert again.argv == argv, "a change that was made is not made again"


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
@pytest.mark.parametrize("argv", [(), ("--disable-cuda-graph",), ("--cuda-graph-backend-decode", "full")])
def test_what_is_asked_for_is_refused_when_it_cannot_be_kept_whatever_it_is_now(
    argv: tuple[str, ...], version: str
) -> None:
    made = change(argv, {}, {"deepep": "normal", "cuda_graph": "on"}, version=version)
    assert not made.allowed
    assert "deepep_mode=normal turns CUDA graphs off, even if they are asked for" in made.refusals[0].why


def test_padding_is_off_where_every_size_is_captured_and_graphs_are_still_replayed() -> None:
    """0.5.14 and 0.5.15 replay no graph with --disable-cuda-graph-padding, later ones none between given sizes."""
    info = H200 | {"max_running_requests": 24}
    every = ["--cuda-graph-bs-decode", *map(str, range(1, 25))]
    off = change((), {}, {"cuda_graph_padding": "off"}, version="0.5.14", baseline=info)
    assert list(off.argv[:25]) == every
    assert "--disable-cuda-graph-padding" not in off.argv
    assert read_argv(off.argv, {}, version="0.5.14")["cuda_graph_padding"] == "off"
    on = change(off.argv, {}, {"cuda_graph_padding": "on"}, version="0.5.14", baseline=info)
    assert "--cuda-graph-bs-decode" not in on.argv
    given = ("--cuda-graph-bs-decode", "1", "2", "8")
    later = change(given, {}, {"cuda_graph_padding": "off"}, version="0.5.23", baseline={})
    assert list(later.argv[:9]) == ["--cuda-graph-bs-decode", *map(str, range(1, 9))]
    flag = change((), {}, {"cuda_graph_padding": "off"}, version="0.5.23", baseline={})
    assert (flag.argv, flag.warnings) == (("--disable-cuda-graph-padding",), ())
    blind = change((), {}, {"cuda_graph_padding": "off"}, version="0.5.14", baseline={})
    assert blind.argv == ("--disable-cuda-graph-padding",)
    assert "replay no decode graph" in blind.warnings[0]
    ranks = {"dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 9}]}
    shared = H200 | ranks | {"max_running_requests": None}
    off = change((), {}, {"cuda_graph_padding": "off"}, version="0.5.14", baseline=shared)
    assert list(off.argv[:19]) == every[:19], "no size that cannot come, and every one that can"
    assert off.argv[19:20] != ("19",)
    both = change((), {}, {"cuda_graph_padding": "off", "speculative": "off"}, version="0.5.14", baseline=info)
    assert both.argv.count("--cuda-graph-bs-decode") == 1


def test_what_an_earlier_change_pinned_and_this_one_leaves_is_said() -> None:
    version, info = VERSIONS[-1], {"max_total_num_tokens": 131507, "random_seed": 7}
    off = change(["--tp", "1"], {}, {"cuda_graph_padding": "off"}, version=version, baseline=info)
    assert {"--max-total-tokens 131507", "--random-seed 7"} <= set(off.pins)
    assert stays(["--tp", "1"], off, version=version) == [], "the plan tells of it as pinned"
    on = change(off.argv, {}, {"cuda_graph_padding": "on"}, version=version, baseline=info)
    assert stays(["--tp", "1"], on, version=version) == [
        "stays as an earlier change set it: --max-total-tokens 131507, --random-seed 7"
    ]
    own = ["--tp", "1", "--random-seed", "7"]
    assert stays(own, on, version=version) == ["stays as an earlier change set it: --max-total-tokens 131507"]
