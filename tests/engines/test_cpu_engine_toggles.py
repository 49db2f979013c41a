"""What SGLang's arguments visibly do in the CPU engine, for both releases: and that no token changes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.options import table
from rltop.engines.scrape import read_metrics
from rltop.engines.toggles import change
from rltop.engines.verify import verify
from rltop.train.cpu_engine import MARKER
from rltop.train.cpu_engine.args import VERSION_VARIABLE, EngineArgs, parse_args
from rltop.train.cpu_engine.effects import Drafter, Graph
from rltop.train.cpu_engine.stats import LOGGER
from tests.engines.conftest import connect, running
from tests.engines.contract import PROMPT, log_shape, shape

DATA = Path(__file__).parents[1] / "data" / "sglang"
VERSIONS = ("0.5.14", "0.5.23")
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5, "n": 3}


@contextmanager
def logged() -> Iterator[list[str]]:
    """The engine's messages, without time."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


async def _look(model: Path, *args: str) -> tuple[list[list[int]], dict[str, Any], str, list[str]]:
    """Sampled tokens, `/server_info`, `/metrics` and log lines of an engine with these arguments."""
    with logged() as lines, running(model, "--decode-log-interval", "5", *args) as engine:
        client = connect(engine)
        answers = await client.generate({"text": PROMPT, "sampling_params": SAMPLED})
        return (
            [answer["output_ids"] for answer in answers],
            await client.server_info(),
            await client.metrics_text(),
            lines,
        )


def _args(*args: str, version: str = "0.5.23") -> EngineArgs:
    return parse_args(["--model-path", "/model", "--sglang-version", version, *args], {})


def _passes(metrics: str) -> dict[str, float]:
    found = re.findall(r'^sglang:cuda_graph_passes_total\{.*mode="(\w+)".*\} (\S+)$', metrics, re.MULTILINE)
    return {mode: float(value) for mode, value in found}


# ---------------------------------------------------------------------- the four toggles, as an engine shows them


@pytest.mark.parametrize("version", VERSIONS)
async def test_toggles_change_what_is_shown_and_no_token(model_path: Path, version: str) -> None:
    release = ("--sglang-version", version)
    tokens, info, metrics, lines = await _look(model_path, *release)
    assert info["cuda_graph_config"]["decode"]["backend"] == "full"
    passes = _passes(metrics)
    assert passes["decode_cuda_graph"] > 0 == passes["decode_none"] == passes["prefill_none"]
    assert any(line.startswith("Capture target decode CUDA graph begin. backend=full") for line in lines)
    assert any("Decode batch" in line and "cuda graph: True" in line for line in lines)

    off = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")
    without, info, metrics, lines = await _look(model_path, *release, *off)
    assert without == tokens
    assert {info["cuda_graph_config"][phase]["backend"] for phase in ("decode", "prefill")} == {"disabled"}
    passes = _passes(metrics)
    assert passes["decode_none"] > 0 == passes["decode_cuda_graph"] == passes["prefill_cuda_graph"]
    assert not any("Capture target" in line or "cuda graph: True" in line for line in lines)
    assert any(line.startswith("Disable prefill CUDA graph because") for line in lines)

    ngram = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    drafted, info, metrics, lines = await _look(model_path, *release, *ngram)
    assert drafted == tokens
    assert (info["speculative_algorithm"], info["max_running_requests"]) == ("NGRAM", 48)
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 48
    assert any(line.startswith("Capture target verify CUDA graph begin.") for line in lines)
    accepted = [float(found) for line in lines for found in re.findall(r"accept len: (\S+),", line)]
    assert accepted
    assert all(1 <= length <= 8 for length in accepted)
    ((_, length),) = read_metrics(metrics)["spec_accept_length"]
    assert 1 <= length <= 8

    deepep = ("--moe-a2a-backend", "deepep", "--deepep-mode", "normal", "--tp-size", "2")
    parallel, info, _, lines = await _look(model_path, *release, *deepep)
    assert parallel == tokens
    assert (info["moe_a2a_backend"], info["deepep_mode"], info["ep_size"]) == ("deepep", "normal", 2)
    assert info["cuda_graph_config"]["decode"]["backend"] == "disabled"


async def test_the_stand_in_says_what_it_is_whatever_it_imitates(model_path: Path) -> None:
    for version in VERSIONS:
        _, info, _, _ = await _look(model_path, "--sglang-version", version)
        assert info["rltop_engine"] == MARKER
        assert info["sglang_version"] == version
        assert info["version"].startswith(f"{version}+rltop.")


# ---------------------------------------------------------------------- against recordings and tables


@pytest.mark.parametrize(("recording", "args"), [("", ()), ("_ngram", ("--speculative-algorithm", "NGRAM"))])
async def test_server_info_is_field_by_field_that_of_0_5_14(
    model_path: Path, recording: str, args: tuple[str, ...]
) -> None:
    real = json.loads((DATA / f"server_info_0.5.14{recording}.json").read_text())
    given = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    given += ["--mem-fraction-static", "0.3", "--random-seed", "1", "--sglang-version", "0.5.14"]
    if args:
        given += ["--speculative-num-draft-tokens", "8"]
    else:
        given += ["--enable-memory-saver"]
    _, ours, _, _ = await _look(model_path, *given, *args)
    states, our_states = real.pop("internal_states"), ours.pop("internal_states")
    own = {"rltop_engine", "sglang_version"}
    changing = {"model_path", "tokenizer_path", "served_model_name", "port", "version", "decode_log_interval"}
    changing |= {"max_total_num_tokens", "max_req_input_len"}
    assert ours.keys() - own == real.keys()
    assert {key: ours[key] for key in real.keys() - changing} == {key: real[key] for key in real.keys() - changing}
    ours_shape, theirs = shape(our_states), shape(states)
    missing = {path for path in theirs if path not in ours_shape}
    # What its scheduler keeps for itself, under names of no use to anybody.
    private = r"\[\]\.(_\w+(\..*|\[\])?|enable_grpc|grpc_port|uses_mamba_radix_cache|use_mla_backend|max_spec\w+)"
    assert [path for path in missing if not re.fullmatch(private, path)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_argument_of_the_table_is_accepted_and_shown(version: str) -> None:
    never = {"config", "help", "collect_tokens_histogram", "prefill_round_robin_balance"}
    never |= {option.dest for option in table(version).options if option.error}
    shown = _args(version=version).sglang
    assert {option.dest for option in table(version).options} - never <= shown.keys()


@pytest.mark.parametrize("version", VERSIONS)
async def test_log_lines_of_graphs_and_speculation_have_the_recorded_shape(model_path: Path, version: str) -> None:
    known = {log_shape(line) for line in (DATA / "log_lines.txt").read_text().splitlines()}
    heads = ("Capture target", "Disable prefill", "max_total_num_tokens", "Decode batch", "Prefill batch")
    for args in ((), ("--disable-cuda-graph",), ("--speculative-algorithm", "NGRAM")):
        _, _, _, lines = await _look(model_path, "--sglang-version", version, *args)
        told = [f"[2026-01-01 00:00:00] {line}" for line in lines if line.startswith(heads)]
        # 0.5.23 was recorded on a CPU only, where nothing is captured: these shapes are from its source.
        told = [line for line in told if version == "0.5.14" or "Capture target" not in line]
        assert [line for line in told if _without_lists(line) not in {_without_lists(one) for one in known}] == []


def _without_lists(line: str) -> str:
    return re.sub(r"\[(<n>|\d+)(, (<n>|\d+))*\]|True|False|[cg]pu_mem", "<value>", log_shape(line))


# ---------------------------------------------------------------------- resolution, by the rules of its sources


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("args", "decode", "prefill"),
    [
        ([], True, True),
        (["--disable-cuda-graph"], False, False),
        (["--disable-decode-cuda-graph"], False, True),
        (["--disable-prefill-cuda-graph"], True, False),
        (["--disable-cuda-graph", "--cuda-graph-backend-decode", "full"], True, False),
        (["--disable-cuda-graph", "--cuda-graph-config", '{"decode":{"backend":"full"}}'], True, False),
        (["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-decode=full"], True, True),
        (["--attention-backend", "torch_native"], False, False),
        (["--moe-a2a-backend", "deepep", "--deepep-mode", "normal", "--cuda-graph-backend-decode=full"], False, False),
        (["--device", "cpu"], False, False),
    ],
)
def test_graphs_resolve_as_in_sglang(version: str, args: list[str], decode: bool, prefill: bool) -> None:
    effects = _args(*args, version=version).effects
    assert (effects.decode.on, effects.prefill.on) == (decode, prefill)


def test_deepep_turns_the_default_prefill_graph_of_0_5_14_off_but_not_an_explicit_one() -> None:
    deepep = ("--moe-a2a-backend", "deepep")
    assert not _args(*deepep, version="0.5.14").effects.prefill.on
    assert _args(*deepep, "--cuda-graph-backend-prefill", "tc_piecewise", version="0.5.14").effects.prefill.on
    assert _args(*deepep, version="0.5.23").effects.prefill.on


def test_toggles_move_the_kv_pool_unless_it_is_pinned() -> None:
    plain, off = _args(), _args("--disable-cuda-graph")
    assert off.sglang["mem_fraction_static"] > plain.sglang["mem_fraction_static"]
    assert off.max_total_tokens > plain.max_total_tokens == 131_072
    pinned = ("--mem-fraction-static", "0.5")
    assert _args(*pinned).max_total_tokens == _args(*pinned, "--disable-cuda-graph").max_total_tokens


def test_a_graph_covers_padded_sizes_and_without_padding_exact_ones() -> None:
    graph = Graph(backend="full", sizes=(1, 2, 4, 8))
    assert [graph.covers(size) for size in (0, 1, 3, 8, 9)] == [False, True, True, True, False]
    exact = Graph(backend="full", sizes=(1, 2, 4, 8), padding=False)
    assert [exact.covers(size) for size in (1, 3, 8, 9)] == [True, False, True, False]
    assert not Graph(backend="disabled", sizes=(1, 2)).covers(1)


def test_the_drafter_counts_accepted_guesses_and_one_token_of_its_own() -> None:
    # After "1 2" came "3 4"; a step verifies 4 tokens, so it guesses 3 and gives at most 4.
    drafter = Drafter([1, 2, 3, 4, 9, 1], 2, draft_tokens=4)
    assert [drafter.saw(token) for token in (3, 4, 9, 7)] == [0, 0, 0, 4]
    assert drafter.saw(5) == 1, "nothing was guessed"


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("version", "args", "message"),
    [
        ("0.5.23", ["--cuda-graph-max-bs", "4"], "ambiguous option: --cuda-graph-max-bs could match"),
        ("0.5.23", ["--enable-breakable-cuda-graph"], "unrecognized arguments: --enable-breakable-cuda-graph"),
        ("0.5.23", ["--cuda-graph-backend-prefill", "tc_piecewise"], "tc_piecewise was removed"),
        ("0.5.14", ["--cuda-graph-backend-prefill", "nonsense"], "invalid choice: 'nonsense'"),
        ("0.5.14", ["--enable-deepep-moe"], "unrecognized arguments: --enable-deepep-moe"),
        ("0.5.14", ["--max-running-requests", "many"], "invalid int value: 'many'"),
        ("0.5.14", ["--max-running-requests", "0"], "must be at least 1, got 0"),
    ],
)
def test_what_sglangs_parser_refuses_ends_with_its_message_and_2(
    version: str, args: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _args(*args, version=version)
    assert stopped.value.code == 2
    assert message in capfd.readouterr().err


def test_the_environment_chooses_the_release_and_the_argument_wins() -> None:
    chosen = {VERSION_VARIABLE: "0.5.14"}
    assert parse_args(["--model-path", "/m"], chosen).sglang_version == "0.5.14"
    assert parse_args(["--model-path", "/m", "--sglang-version", "0.5.23"], chosen).sglang_version == "0.5.23"
    with pytest.raises(SystemExit):
        parse_args(["--model-path", "/m"], {VERSION_VARIABLE: "0.4"})


def test_keys_are_not_shown() -> None:
    args = _args("--api-key", "sesame", "--admin-api-key=tahini")
    assert "sesame" not in args.log_form() + args.launch_command
    assert "tahini" not in args.log_form() + args.launch_command


# ---------------------------------------------------------------------- through rltop's own toggles


CHANGES = (
    {"cuda_graph": "off"},
    {"cuda_graph": "off", "prefill_graph": "off"},
    {"cuda_graph_padding": "off"},
    {"prefill_graph": "off"},
    {"speculative": "NGRAM"},
    {"deepep": "auto"},
    {"deepep": "low_latency"},
    {"deepep": "normal"},
    {"launch_blocking": "on"},
    {"overlap_schedule": "off"},
    {"radix_cache": "off"},
    {"custom_all_reduce": "off"},
    {"chunked_prefill": "off"},
    {"attention_backend": "triton"},
    {"mem_fraction_static": "0.5"},
    {"core_dump": "on"},
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wanted", CHANGES, ids=lambda wanted: ",".join(f"{k}={v}" for k, v in wanted.items()))
async def test_what_a_toggle_asks_for_is_what_the_engine_then_shows(
    model_path: Path, version: str, wanted: dict[str, str]
) -> None:
    made = change([], {}, wanted, version=version)
    assert made.allowed, made.refusals
    _, info, metrics, lines = await _look(model_path, "--sglang-version", version, *made.argv)
    seen = verify(wanted, server_info=info, metrics=metrics, log_lines=lines, environ=made.env, version=version)
    assert {name: effective.holds for name, effective in seen.items()} == dict.fromkeys(wanted, True), seen
    _, info, metrics, lines = await _look(model_path, "--sglang-version", version)
    before = verify(wanted, server_info=info, metrics=metrics, log_lines=lines, environ={}, version=version)
    assert False in {effective.holds for effective in before.values()}, "nothing would have changed"
