"""The CPU engine answers, logs and counts like recorded SGLang servers, apart from the differences listed here."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from rltop.engines.options import table
from rltop.train.cpu_engine import MARKER
from rltop.train.cpu_engine.server import make_app
from rltop.train.cpu_engine.stats import LOGGER
from tests.engines.conftest import Blocking, running
from tests.engines.contract import PROMPT, calls, content_of, log_shape, metric_families, shape
from tests.soak.sglang_cpu.record import SERVER_INFO_KEYS

DATA = Path(__file__).parents[1] / "data" / "sglang"

DIFFERENCES = {
    r"/(get_)?model_info \.content\.embedding(\..*)?": "missing: settings of embedding models",
    r"/(get_)?model_info \.content\.rltop_engine": "extra: the mark of the stand-in",
    r"/server_info \.content\.rltop_engine": "extra: the mark of the stand-in",
    r"/server_info \.content\.(frontend|launch_command|custom_sigquit_handler|stat_loggers)": "extra: not recorded",
    r"/server_info \.content\.sglang_version": "extra: the release that it imitates, beside its own version",
    r"/server_info \.content\.startup_time\.(?!scheduler_e2e).*": "missing: stages that it does not have",
    r"/server_info .*\.memory_usage\.(startup_available|graph\..*)": "missing: memory of what it does not have",
    r"/v1/loads .*\.disaggregation(\..*)?": "missing: no separate prefill and decode servers",
    r"/v1/loads .*\.(decode_moments|total_prefill_busy_us)(\[\])?": "missing: moments of step times",
    r"generate: token ids .*\.cached_tokens_details(\..*)?": "its cache knows whole prompts, SGLang's any prefix",
}
"""Pattern over "call path" -> why the shape differs. Anything else that differs fails, so does an entry without use."""

OWN_LOG_LINES = {
    rf"\[time\] {re.escape(MARKER)}": "the mark of the stand-in",
    r"\[time\] server_args=": "hundreds of settings, compared field by field elsewhere",
    r"\[time\] \[WeightChecker\] handle action=": "without arguments that it does not have",
    r"\[time\] \[http_server\] Error: ": "its own words for a refusal",
    r"\[time\] Failed to update weights: ": "its own words for a refusal",
    r"\[time\] check_weights see error: ": "SGLang's words (scheduler_components/weight_updater.py), not recorded",
}


@pytest.fixture(scope="module")
def answers(model_path: Path) -> dict[str, dict[str, Any]]:
    """The CPU engine's answers to the calls that were recorded."""
    return _ask_here(model_path)


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """Real SGLang's."""
    content: dict[str, dict[str, Any]] = json.loads((DATA / "answers_0.5.23_cpu.json").read_text())
    return content


def _ask_here(model: Path) -> dict[str, dict[str, Any]]:
    with (
        running(model, "--device", "cpu", "--max-total-tokens", "8192") as engine,
        httpx.Client(transport=Blocking(make_app(engine)), base_url="http://engine") as http,
    ):
        answers = {}
        for call in calls(model):
            response = http.request(call.method, call.path, json=None if call.body is None else dict(call.body))
            answers[call.name] = {"status": response.status_code, "content": content_of(response.text, model)}
        # The recording holds a choice of the settings; that the others are SGLang's is another test's subject.
        settings = {option.dest for option in table("0.5.23").options} - set(SERVER_INFO_KEYS)
        info = answers["/server_info"]["content"]
        answers["/server_info"]["content"] = {key: value for key, value in info.items() if key not in settings}
        answers["metrics"] = {"status": 200, "content": http.get("/metrics").text}
    return answers


def test_every_call_has_the_recorded_status(
    answers: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    statuses = {name: answer["status"] for name, answer in recorded.items()}
    assert {name: answers[name]["status"] for name in statuses} == statuses


def test_every_answer_has_the_recorded_fields_and_types(
    answers: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    unexplained, used = [], set()
    for name, real in recorded.items():
        theirs, ours = shape(real), shape(answers[name])
        for path in sorted(theirs.keys() | ours.keys()):
            if theirs.get(path) == ours.get(path):
                continue
            reasons = [pattern for pattern in DIFFERENCES if re.fullmatch(pattern, f"{name} {path}")]
            used.update(reasons)
            if not reasons:
                unexplained.append(f"{name} {path}: SGLang {theirs.get(path)}, CPU engine {ours.get(path)}")
    assert not unexplained, "\n".join(unexplained)
    assert used == set(DIFFERENCES), "a listed difference is gone: remove it from DIFFERENCES"


def test_every_answer_has_the_fields_and_types_of_0_5_14(model_path: Path) -> None:
    recorded = json.loads((DATA / "answers_0.5.14.json").read_text())
    ours_real: list[tuple[str, int, int]] = []
    unexplained: list[str] = []
    args = ("--sglang-version", "0.5.14", "--enable-memory-saver")
    with (
        running(model_path, *args) as engine,
        httpx.Client(transport=Blocking(make_app(engine)), base_url="http://e") as http,
    ):
        for place, call in enumerate(recorded):
            body = json.loads(json.dumps(call["body"]).replace("<model>", str(model_path)))
            response = http.request(call["method"], call["path"], json=body)
            where = f"{place} {call['name']}"
            ours_real.append((where, response.status_code, call["status"]))
            if "content" not in call:
                continue
            theirs, ours = shape(call["content"]), shape(content_of(response.text, model_path))
            unexplained += [
                f"{where} {path}: SGLang {theirs.get(path)}, CPU engine {ours.get(path)}"
                for path in sorted(theirs.keys() | ours.keys())
                if theirs.get(path) != ours.get(path) and not re.fullmatch(_OLDER_DIFFERENCES, path)
            ]
            if "without update" in call["name"] and "gen" in call["name"]:
                assert json.loads(response.text)["output_ids"] == call["content"]["output_ids"] == [0] * 8
    assert [one for one in ours_real if one[1] != one[2]] == []
    assert unexplained == []


_OLDER_DIFFERENCES = r"\.rltop_engine|\.meta_info\.cached_tokens_details(\..*)?"
"""The mark of the stand-in; its cache knows whole prompts, SGLang's any prefix."""


def test_prompt_log_probs_are_those_of_sglang(
    answers: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    for name in ("generate: greedy with log-probs", "generate: log-probs from a position"):
        theirs = recorded[name]["content"]["meta_info"]["input_token_logprobs"]
        ours = answers[name]["content"]["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
        assert ours[0][0] is None
        assert [value for value, _, _ in ours[1:]] == pytest.approx([value for value, _, _ in theirs[1:]], abs=1e-4)


def test_greedy_answer_is_that_of_sglang(
    answers: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    theirs, ours = recorded["generate: greedy with log-probs"], answers["generate: greedy with log-probs"]
    for key in ("text", "output_ids"):
        assert ours["content"][key] == theirs["content"][key]
    for key in ("finish_reason", "prompt_tokens", "completion_tokens", "weight_versions"):
        assert ours["content"]["meta_info"][key] == theirs["content"]["meta_info"][key]


def test_weight_versions_follow_the_same_calls(
    answers: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    for name in ("control: tensors", "control: disk", "control: disk without version", "control: version label"):
        assert recorded[name]["content"]["success"] is answers[name]["content"]["success"] is True
    theirs = recorded["control: version after tensors"]["content"]["meta_info"]["weight_version"]
    assert answers["control: version after tensors"]["content"]["meta_info"]["weight_version"] == theirs == "tensor-1"


@pytest.mark.parametrize("recording", ["metrics_0.5.14.prom", "metrics_0.5.23_cpu.prom"])
def test_metrics_have_the_recorded_names_types_and_labels(answers: dict[str, dict[str, Any]], recording: str) -> None:
    theirs = metric_families((DATA / recording).read_text())
    ours = metric_families(answers["metrics"]["content"])
    assert {"sglang:num_running_reqs", "sglang:token_usage", "sglang:realtime_tokens_total"} <= ours.keys()
    for name in ours.keys() & theirs.keys():
        kind, labels = theirs[name]
        # `pid` comes from prometheus' multi-process collector; 0.5.23 splits some counters by `is_streaming`.
        assert ours[name] == (kind, labels - {"pid", "is_streaming"}), name


def test_metrics_that_one_recording_lacks_exist_in_the_other(answers: dict[str, dict[str, Any]]) -> None:
    known = {
        name
        for recording in ("metrics_0.5.14.prom", "metrics_0.5.23_cpu.prom")
        for name in metric_families((DATA / recording).read_text())
    }
    # Counters appear in SGLang only after they first counted, and neither recording aborted or retracted anything.
    unseen = {"sglang:num_aborted_requests_total", "sglang:num_retracted_requests_total"}
    assert metric_families(answers["metrics"]["content"]).keys() - known - unseen == set()


def test_log_lines_have_recorded_shapes(model_path: Path) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"[2026-01-01 00:00:00] {record.getMessage()}")

    handler = Keep()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        _ask_here(model_path)
        with (
            running(model_path, "--device", "cpu", "--decode-log-interval", "2") as engine,
            httpx.Client(transport=Blocking(make_app(engine)), base_url="http://engine") as http,
        ):
            http.post("/generate", json={"text": PROMPT, "sampling_params": {"ignore_eos": True, "max_new_tokens": 6}})
    finally:
        LOGGER.removeHandler(handler)
    known = {log_shape(line) for line in (DATA / "log_lines.txt").read_text().splitlines()}
    strange = sorted(
        {log_shape(line.splitlines()[0]) for line in lines} - known,
    )
    unexplained = [line for line in strange if not any(re.match(pattern, line) for pattern in OWN_LOG_LINES)]
    assert unexplained == []
    for head in ("Prefill batch", "Decode batch", "Load weight end", "Weight version changed", "Cache flushed"):
        assert any(f"] {head}" in line for line in lines), head
