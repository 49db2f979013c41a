"""Rules over syncs, versions, wake-ups, errors of sequences and how responses end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import Document, HfCheckpoint, HttpCall, LogEvent, Row
from rltop.checks.observe import EngineSync, Observations, RunStart, Sample, SyncEvent
from rltop.checks.rules.stop_set import terminators
from tests.checks.build import GOOD_TEXT, at, healthy, obs, rollout, sample, train, verdict
from tests.checks.corpus import ORDINARY

NAN = float("nan")
SALAD = (
    "gör 湖水 mutable ψ ünlü 石 queryset 苹果 ндло getenv 窓 thôn ௐ müssen 走 ForEach ขอ лес 湖水 mutable ψ ünlü 石 "
    "So zurück 馬車 kapıda queryset 苹果 ндло getenv 窓 thôn ௐ müssen 走 ForEach ขอ лес 湖水 mutable ψ ünlü 石 gör"
)


def event(kind: str, line: int, **more: Any) -> LogEvent:
    fields = {key: more.pop(key) for key in ("pid", "engine", "text") if key in more}
    return LogEvent(kind, fields.pop("text", kind), at(line, "engine.log"), data=more, order=line, **fields)


def http(line: int, path: str, status: int = 200, **more: Any) -> LogEvent:
    return event("http", line, path=path, status=status, **more)


def call(path: str, *, tags: list[str] | None = None, order: int = 0, status: int = 200, **more: Any) -> HttpCall:
    body = {"tags": tags} if tags else {}
    return HttpCall(path, status, body=body, order=order, where=at(order + 1, "http.jsonl"), **more)


# -- weights.sync-garble


def run(*texts: str, **more: Any) -> Observations:
    samples = [sample(text, rollout_id=r, index=i) for r, text in enumerate(texts) for i in range(4)]
    return obs(*samples, *more.pop("rows", ()), **more)


def test_salad_in_the_first_rollout_after_a_sync_is_the_sync() -> None:
    found = verdict("weights.sync-garble", run(GOOD_TEXT, SALAD, rows=(healthy(0),)))
    assert (found.status, found.rollout, found.confidence) == ("fail", 1, "high")
    report = evaluate(run(GOOD_TEXT, SALAD, rows=(healthy(0),)))
    assert report.root_causes[0] == "weights.sync-garble"
    (text,) = (v for v in report.verdicts if v.id == "rollout.text")
    assert "weights.sync-garble" in text.consequence_of


def test_without_the_metrics_of_the_step_it_is_less_sure() -> None:
    assert verdict("weights.sync-garble", run(GOOD_TEXT, SALAD)).confidence == "medium"


@pytest.mark.parametrize(
    "seen",
    [
        run(GOOD_TEXT, GOOD_TEXT),
        run(GOOD_TEXT, SALAD, rows=(healthy(0, loss=NAN),)),
        run(GOOD_TEXT, SALAD, rows=(healthy(0, grad_norm=5e4),)),
        run(GOOD_TEXT, "!" * 200),
    ],
)
def test_other_causes_are_left_alone(seen: Observations) -> None:
    assert verdict("weights.sync-garble", seen).status in ("pass", "skip")


def test_a_rollout_only_run_decides_about_rollout_zero() -> None:
    full = [sample(SALAD, rollout_id=0, index=i, mode="full") for i in range(4)]
    alone = [sample(GOOD_TEXT, rollout_id=0, index=i, mode="debug_rollout_only") for i in range(4)]
    bad = [sample(SALAD, rollout_id=0, index=i, mode="debug_rollout_only") for i in range(4)]
    assert verdict("weights.sync-garble", obs(*full, *alone)).status == "fail"
    assert verdict("weights.sync-garble", obs(*full, *bad)).status == "pass"
    assert verdict("weights.sync-garble", obs(*full)).status == "skip"
    assert verdict("weights.sync-garble", obs(*bad)).status == "skip"


def test_the_metrics_of_the_rollout_before_stand_in_for_its_text() -> None:
    bad = [sample(SALAD, rollout_id=5, index=i) for i in range(4)]
    before = rollout(4, log_probs=-0.4, truncated_ratio=0.05, raw_reward=0.5)
    assert verdict("weights.sync-garble", obs(*bad, before)).status == "fail"
    assert verdict("weights.sync-garble", obs(*bad, rollout(4, log_probs=-9.0))).status == "skip"


def test_the_mechanism_is_named_where_the_evidence_tells() -> None:
    def mechanism(**more: Any) -> Any:
        return verdict("weights.sync-garble", run(GOOD_TEXT, SALAD, rows=(healthy(0),), **more)).value["mechanism"]

    buckets = event("update_summary", 3, buckets=12, arch="DeepseekV3ForCausalLM")
    assert mechanism(events=(buckets,)) == "buckets"
    assert mechanism(events=(event("update_summary", 3, buckets=1, arch="DeepseekV3ForCausalLM"),)) == "unknown"
    versions = Document("versions", "versions.json", {"sglang": "0.6.1", "known_good_sglang": "0.6.0"})
    assert mechanism(documents=(versions,)) == "engine-version"
    assert mechanism(documents=(replace(versions, fields={"sglang": "1", "known_good_sglang": "1"}),)) == "unknown"
    assert mechanism(flags={"pipeline_model_parallel_size": 2}) == "conversion"
    calls = (call("/release_memory_occupation"), call("/weights_checker", answer={"success": True}))
    assert mechanism(http=calls) == "buffers"
    assert mechanism() == "unknown"


# -- weights.update-failed and weights.compare


@pytest.mark.parametrize(
    ("status", "answer", "refused"),
    [
        (200, {"success": True}, False),
        (200, {"success": False, "message": "bad checksum"}, True),
        (500, {"error": "boom"}, True),
        (200, {}, False),
    ],
)
def test_the_answer_counts_as_much_as_the_status(status: int, answer: dict[str, Any], refused: bool) -> None:
    one = call("/update_weights_from_disk", status=status, answer=answer, engine=3)
    found = verdict("weights.update-failed", obs(http=(one,)))
    assert (found.status, found.engine) == (("fail", 3) if refused else ("pass", None))


def test_a_refusal_of_no_known_endpoint_has_no_gap_in_its_sentence() -> None:
    long = "Downcasting not allowed. The weights are partially updated. " + "Please discard them " * 20
    told = event("update_refused", 4, pid=17, message=long)
    found = verdict("weights.update-failed", obs(events=(told,)))
    assert " :" not in found.cause
    assert "refused the update: Downcasting not allowed. The weights are partially updated. It holds" in found.cause


@pytest.mark.parametrize(("when", "words"), [(True, "The responses before the update are fine"), (False, "0 is fine")])
def test_the_subject_of_a_sentence_has_its_verb(when: bool, words: str) -> None:
    ids: dict[str, Any] = {"rollout_id": None} if when else {}
    parts = [("before_update", GOOD_TEXT), ("after_update", SALAD)]
    rows = [
        sample(text, index=i, **(ids | ({"when": name} if when else {"rollout_id": i})))
        for i, (name, text) in enumerate(parts)
    ]
    found = verdict("weights.sync-garble", obs(*rows))
    assert found.status == "fail"
    assert words in found.cause
    assert "(1 of 1 response)" in found.cause


def test_a_refusal_in_the_log_and_one_of_a_live_engine() -> None:
    told = event("update_refused", 4, pid=17, message="The weights are partially updated.")
    found = verdict("weights.update-failed", obs(events=(told,)))
    assert (found.status, found.value["partial"]) == ("fail", True)
    sync = SyncEvent("4", 4, ok=False, engines=(EngineSync("0"), EngineSync("1", ok=False, message="no space")))
    found = verdict("weights.update-failed", obs(sync))
    assert (found.status, found.engine, found.rollout, found.value["message"]) == ("fail", 1, 4, "no space")


def test_other_endpoints_are_no_updates() -> None:
    calls = (call("/update_weight_version", status=500), call("/generate", status=500))
    assert verdict("weights.update-failed", obs(http=calls)).status == "skip"


def test_the_checker_names_zero_tensors_first() -> None:
    text = "a.b.weight: max_abs_err=0.1; model.layers.3.mlp.gate.weight: engine tensor all zeros"
    one = call("/weights_checker", status=400, answer={"success": False, "message": text})
    found = verdict("weights.compare", obs(http=(one,)))
    assert found.status == "fail"
    assert found.value["zero"] == ["model.layers.3.mlp.gate.weight"]
    assert found.value["different"] == ["a.b.weight"]
    equal = call("/weights_checker", answer={"success": True})
    assert verdict("weights.compare", obs(http=(equal,))).status == "pass"
    snapshot = HttpCall("/weights_checker", 200, body={"action": "snapshot"}, answer={"success": True})
    assert verdict("weights.compare", obs(http=(snapshot,))).status == "skip"


def test_name_lists_of_both_sides() -> None:
    def names(*numbers: int) -> list[str]:
        return [f"model.layers.{n}.q.weight" for n in numbers]

    def seen(pushed: Any, expected: Any) -> Any:
        document = Document("tensor_names", "tensor_names.json", {"pushed": pushed, "expected": expected})
        return verdict("weights.compare", obs(documents=(document,)))

    assert seen(names(0, 1, 2, 3), names(0, 1, 2, 3)).status == "pass"
    restarted = seen({"pp0": names(0, 1), "pp1": names(0, 1)}, names(0, 1, 2, 3))
    assert restarted.status == "fail"
    assert "layers 2-3" in restarted.cause
    assert seen([*names(0, 1), "x.weight"], names(0, 1)).value["extra"] == ["x.weight"]


# -- weights.frozen


def probes(*answers: str, gap: float = 0.0, **changes: float) -> Observations:
    rows = tuple(
        Row("greedy_probe", {"step": s, "prompt": "p", "output_sha1": a}, at(s + 1), s) for s, a in enumerate(answers)
    )
    calls = tuple(
        call("/update_weights_from_tensor", step=s, order=s, answer={"success": True}) for s in range(len(answers))
    )
    steps = [healthy(s, **({"train_rollout_logprob_abs_diff": 0.02 + gap * s} | changes)) for s in range(len(answers))]
    return obs(*steps, rows=rows, http=calls)


def test_a_frozen_answer_with_a_growing_gap_is_a_fail_and_without_a_warning() -> None:
    assert verdict("weights.frozen", probes(*"aaaaaa", gap=0.02)).status == "fail"
    assert verdict("weights.frozen", probes(*"aaaaaa")).status == "warn"
    assert verdict("weights.frozen", probes(*"aaabcd", gap=0.02)).status == "pass"
    assert verdict("weights.frozen", probes(*"aaa", gap=0.02)).status == "pass"
    assert verdict("weights.frozen", probes(*"aaaaaa", grad_norm=0.0)).status == "pass"


def test_a_version_that_never_changes_over_syncs() -> None:
    def seen(*versions: str) -> Observations:
        samples = [sample(rollout_id=r, weight_version=v) for r, v in enumerate(versions)]
        syncs = [SyncEvent(str(r + 1), r + 1) for r in range(len(versions))]
        return obs(*samples, *syncs)

    assert verdict("weights.frozen", seen(*"111111")).status == "fail"
    assert verdict("weights.frozen", seen(*"123456")).status == "pass"
    assert verdict("weights.frozen", seen(*"11")).status == "skip"  # too few syncs to say anything


@pytest.mark.parametrize("mode", ["rollout-only", "train-only"])
def test_one_version_is_right_where_nothing_is_ever_pushed(mode: str) -> None:
    samples = [sample(rollout_id=r, weight_version="7") for r in range(6)]
    steps = [train(step, rollout=step, loss=0.1, grad_norm=0.3) for step in range(6)]
    assert verdict("weights.frozen", obs(*samples, *steps, mode=mode)).status == "skip"


# -- weights.mixed-version


def versions(*listed: str, **more: Any) -> Observations:
    return obs(*(sample(rollout_id=2, index=i, weight_version=v) for i, v in enumerate(listed)), **more)


@pytest.mark.parametrize(
    ("listed", "flags", "status"),
    [
        (("5", "5", "5"), {}, "pass"),
        (("5", "default", "5"), {}, "fail"),
        (("5", "", "5"), {}, "fail"),
        (("5", "0", "5"), {}, "fail"),
        (("5", "4", "5"), {}, "warn"),
        (("5", "4", "5"), {"fully_async": True}, "pass"),
        (("5", "3", "5"), {"fully_async": True}, "warn"),
        (("default", "default"), {}, "skip"),
    ],
)
def test_one_rollout_has_one_policy(listed: tuple[str, ...], flags: dict[str, Any], status: str) -> None:
    assert verdict("weights.mixed-version", versions(*listed, flags=flags)).status == status


def test_an_aborted_sample_without_tokens_has_no_version() -> None:
    ran = [sample(rollout_id=2, index=i, weight_version="5") for i in range(3)]
    never = sample("", rollout_id=2, index=9, status="aborted")
    assert verdict("weights.mixed-version", obs(*ran, never)).status == "pass"


# -- weights.resume-stale


def resumed(*gaps: float) -> Observations:
    before = [replace(healthy(s), segment=0) for s in range(4)]
    after = [replace(healthy(4 + i, train_rollout_logprob_abs_diff=gap), segment=1) for i, gap in enumerate(gaps)]
    return obs(*before, *after, starts=(RunStart(0, 0, True), RunStart(1, 4, False)))


def test_only_the_first_rollout_after_a_resume_stands_out() -> None:
    assert verdict("weights.resume-stale", resumed(0.9, 0.012, 0.012)).status == "warn"
    assert verdict("weights.resume-stale", resumed(0.012, 0.012, 0.012)).status == "pass"
    assert verdict("weights.resume-stale", resumed(0.9, 0.9, 0.9)).status == "pass"
    assert verdict("weights.resume-stale", resumed(0.08, 0.012, 0.012)).status == "pass"
    fresh = obs(*(healthy(s) for s in range(5)))
    assert verdict("weights.resume-stale", fresh).status == "skip"


# -- engine.resume-order

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
UPDATE = "/update_weights_from_tensor"


def sequence(*steps: tuple[str, list[str] | None], **more: Any) -> Any:
    calls = tuple(call(path, tags=tags, order=i) for i, (path, tags) in enumerate(steps))
    return verdict("engine.resume-order", obs(http=calls, **more))


LEGAL = (
    ("/generate", None),
    (RELEASE, None),
    (RESUME, ["weights"]),
    (UPDATE, None),
    (RESUME, ["kv_cache", "cuda_graph"]),
    ("/generate", None),
)


def test_the_legal_order_passes() -> None:
    assert sequence(*LEGAL).status == "pass"
    assert sequence((RELEASE, None), (RESUME, None), (UPDATE, None), ("/generate", None)).status == "pass"
    assert sequence((RELEASE, ["kv_cache"]), (RESUME, ["kv_cache"]), ("/generate", None)).status == "pass"


@pytest.mark.parametrize(("left_out", "kind"), [(2, "early-update"), (3, "no-update"), (4, "missing-tag")])
def test_a_step_that_is_left_out_is_named(left_out: int, kind: str) -> None:
    found = sequence(*(step for i, step in enumerate(LEGAL) if i != left_out))
    assert (found.status, found.value["kind"]) == ("fail", kind)


def test_weights_kept_on_the_host_need_no_update() -> None:
    steps = tuple(step for i, step in enumerate(LEGAL) if i != 3)
    assert sequence(*steps, flags={"sglang_enable_weights_cpu_backup": True}).status == "pass"


def test_the_illegal_access_after_it_is_its_consequence() -> None:
    calls = tuple(call(path, tags=tags, order=i) for i, (path, tags) in enumerate(LEGAL) if i != 4)
    ima = replace(event("ima", 9), owner="engine")
    report = evaluate(obs(http=calls, events=(ima,)))
    assert report.root_causes[0] == "engine.resume-order"


# -- engine.stale-kv


def cache(*events: LogEvent) -> Any:
    return verdict("engine.stale-kv", obs(events=events))


def test_tokens_of_the_old_cache_after_an_update() -> None:
    before = event("prefill", 1, cached_token=0)
    reused, clean = event("prefill", 5, cached_token=512), event("prefill", 5, cached_token=0)
    later = event("prefill", 6, cached_token=900)
    failed = event("flush_failed", 3, message="busy")
    found = cache(before, http(2, UPDATE), reused)
    assert (found.status, found.value["cached_tokens"], found.confidence) == ("warn", 512, "medium")
    assert cache(before, http(2, UPDATE), failed, reused).confidence == "high"
    assert cache(before, http(2, UPDATE), http(3, "/flush_cache"), reused).status == "pass"
    assert cache(before, http(2, "/flush_cache"), http(3, UPDATE), reused).status == "pass"
    assert cache(before, http(2, "/flush_cache", 400), http(3, UPDATE), reused).status == "warn"
    assert cache(before, http(2, UPDATE), clean, later).status == "pass"
    within_the_update = event("flushed", 2)
    assert cache(before, within_the_update, http(3, UPDATE), reused).status == "pass"
    assert cache(before, reused).status == "skip"


# -- logprob.outliers


def errors(*steps: dict[int, float], of: int = 40) -> Any:
    rows = [
        Row("seq_error", {"step": s, "prompt_id": p, "mult_prob_error": step.get(p, 1.01)}, at(p + 1), p)
        for s, step in enumerate(steps)
        for p in range(of)
    ]
    return verdict("logprob.outliers", obs(rows=tuple(rows)))


def test_outliers_by_share_and_by_prompt() -> None:
    five = dict.fromkeys(range(5), 50.0)
    others = dict.fromkeys(range(20, 25), 50.0)
    assert errors(five, five).status == "fail"
    assert errors(five, others).status == "warn"
    assert errors(dict.fromkeys(range(3), 9.0)).status == "warn"
    assert errors({1: 9.0}).status == "info"
    assert errors({}).status == "pass"
    assert errors(dict.fromkeys(range(30), 9.0)).status == "info"


def test_one_spike_of_a_mean_is_no_alarm() -> None:
    values = [1.1, 1.2, 1.1, 300.0, 1.1, 1.2]
    seen = obs(*(train(s, token_mult_prob_error=v) for s, v in enumerate(values)))
    assert verdict("logprob.outliers", seen).status == "info"
    assert verdict("logprob.outliers", obs(*(train(s, token_mult_prob_error=1.2) for s in range(6)))).status == "pass"


# -- rollout.*


@pytest.mark.parametrize(("ratio", "status"), [(0.1, "pass"), (0.3, "warn"), (0.95, "fail")])
def test_the_share_of_truncated_responses(ratio: float, status: str) -> None:
    assert verdict("rollout.truncated", obs(rollout(0, truncated_ratio=ratio))).status == status


def test_a_ratio_that_lengths_or_finish_reasons_contradict_is_an_artefact() -> None:
    row = replace(rollout(0), values={"rollout/truncated_ratio": 0.97, "rollout/response_len/max": 400.0})
    assert verdict("rollout.truncated", obs(row, flags={"rollout_max_response_len": 2048})).status == "info"
    assert verdict("rollout.truncated", obs(row, flags={"rollout_max_response_len": 400})).status == "fail"
    stopped = [sample(rollout_id=0, index=i, finish_reason="stop") for i in range(4)]
    assert verdict("rollout.truncated", obs(rollout(0, truncated_ratio=0.97), *stopped)).status == "info"
    cut = [sample(rollout_id=0, index=i, finish_reason="length") for i in range(4)]
    assert verdict("rollout.truncated", obs(*cut)).status == "fail"


def longest(tokens: float, **flags: Any) -> Any:
    row = replace(rollout(2), values={"rollout/response_len/max": tokens})
    return verdict("rollout.len-over-cap", obs(row, flags=flags))


def test_no_response_is_longer_than_its_cap() -> None:
    assert longest(2049, rollout_max_response_len=2048).status == "fail"
    assert longest(2048, rollout_max_response_len=2048).status == "pass"
    assert longest(2049).status == "skip"
    assert longest(9000, rollout_max_response_len=2048, custom_generate_function_path="x.y").status == "skip"
    refused = event("over_length", 1, text="Requested token count exceeds the model's maximum context length")
    assert verdict("rollout.len-over-cap", obs(events=(refused,))).status == "fail"


TEMPLATE = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
TOKENS = {"<|endoftext|>": 7, "<|im_start|>": 8, "<|im_end|>": 9}


def stops(*eos: int, seen: tuple[Sample, ...] = (), eos_token: str = "<|endoftext|>", **more: Any) -> Any:
    config = {"chat_template": TEMPLATE, "eos_token": eos_token}
    generation = {"eos_token_id": list(eos)}
    one = HfCheckpoint("m", {}, generation, tokenizer_config=config, tokenizer_tokens=TOKENS)
    return verdict("rollout.stop-set", obs(*seen, *more.pop("rows", ()), checkpoints=(one,), **more))


def test_the_terminator_has_to_be_in_the_stop_set() -> None:
    past = sample("The answer is 80, as I said.<|im_end|>\n<|im_start|>user\nand more")
    assert stops(7, 9).status == "pass"
    before_launch = stops(7)
    assert (before_launch.status, before_launch.value["token_id"]) == ("warn", 9)
    assert stops(7, seen=(past,)).status == "fail"
    assert stops(7, 9, seen=(past,)).status == "pass"
    assert stops(7, rows=(rollout(0, truncated_ratio=0.9),)).status == "fail"
    assert stops(7, flags={"rollout_stop_token_ids": [9]}).status == "pass"
    assert stops(7, flags={"rollout_stop": ["<|im_end|>"]}).status == "pass"
    assert stops(7, eos_token="<|im_end|>").status == "pass"


def test_what_the_server_reports_wins() -> None:
    server = Document("server_info", "server_info.json", {"internal": {"eos_token_id": [9]}})
    assert stops(7, documents=(server,)).status == "warn"
    assert stops(7, 9, documents=(replace(server, fields={"eos_token_id": 7}),)).status == "warn"
    assert stops(7, 9, documents=(replace(server, fields={"eos_token_id": [7, 9]}),)).status == "pass"


def test_a_terminator_is_found_by_what_it_closes() -> None:
    def closing(template: str, tokens: dict[str, int]) -> list[str]:
        one = HfCheckpoint("m", {}, {}, tokenizer_config={"chat_template": template}, tokenizer_tokens=tokens)
        return [found.token for found in terminators(one)]

    loop = "{% for m in messages %}OPEN{{ m.role }}\n{{ m.content }}CLOSE\n{% endfor %}"
    mirrored = {"<eos>": 1, "<|turn>": 5, "<turn|>": 6, "<|channel>": 7, "<channel|>": 8}
    template = loop.replace("OPEN", "<|turn>").replace("CLOSE", "<turn|>") + "<|channel>thought<channel|>"
    assert closing(template, mirrored) == ["<turn|>"]
    assert closing(loop.replace("OPEN", "]~b]").replace("CLOSE", "[e~["), {"]~b]": 3, "[e~[": 4}) == ["[e~["]
    by_role = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|bot|>{{ m.content }}"
    assert closing(by_role, {"<|user|>": 3, "<|bot|>": 4}) == []


def test_length_alone_never_speaks_of_the_stop_set() -> None:
    assert verdict("rollout.stop-set", obs(rollout(0, truncated_ratio=1.0))).status == "skip"


def rewards(*means: float, text: str = GOOD_TEXT, label: str = "", flags: dict[str, Any] | None = None) -> Any:
    rows = []
    for r, mean in enumerate(means):
        flat = mean in (0.0, 1.0)
        values = {"rollout/raw_reward": mean, f"rollout/zero_std/count_{mean}": 4.0 if flat else 1.0}
        rows.append(replace(rollout(r), values=values))
    samples = [sample(text, rollout_id=r, reward=0.0, label=label, index=r) for r in range(len(means))]
    return verdict("rollout.reward-flat", obs(*rows, *samples, flags={"rollout_batch_size": 4} | (flags or {})))


def test_rewards_without_any_spread() -> None:
    assert rewards(0.0, 0.0).status == "warn"
    assert rewards(0.4, 0.0).status == "pass"
    assert rewards(0.0, 0.4).status == "pass"
    assert rewards(1.0, 1.0).status == "info"
    assert rewards(0.0, 0.0, label="80").status == "fail"
    assert rewards(0.0, 0.0, label="81").status == "warn"
    assert rewards(0.0, 0.0, text=SALAD).status == "skip"


def test_ordinary_text_is_never_salad_after_a_sync() -> None:
    samples = [sample(text, rollout_id=1, index=i) for i, text in enumerate(ORDINARY.values())]
    seen = obs(sample(GOOD_TEXT, rollout_id=0), *samples)
    assert verdict("weights.sync-garble", seen).status == "pass"


def test_a_server_that_drops_an_id_is_seen_without_a_template() -> None:
    one = HfCheckpoint("m", {}, {"eos_token_id": [7, 9]})
    over = {"model_config": {"eos_token_id": [7, 9]}, "override_generation_config": {"eos_token_id": 7}}
    server = Document("server_info", "server_info.json", over)
    found = verdict("rollout.stop-set", obs(checkpoints=(one,), documents=(server,)))
    assert (found.status, found.value["lost"]) == ("warn", [9])
    cut = obs(rollout(0, truncated_ratio=0.6), checkpoints=(one,), documents=(server,))
    assert verdict("rollout.stop-set", cut).status == "fail"
    same = replace(server, fields={"eos_token_id": [9, 7]})
    assert verdict("rollout.stop-set", obs(checkpoints=(one,), documents=(same,))).status == "pass"


def test_zero_for_every_sample_is_flat_without_counts() -> None:
    rows = [rollout(r, raw_reward=0.0) for r in range(2)]
    zero = [sample(rollout_id=r, index=i, reward=0.0, label="80") for r in range(2) for i in range(2)]
    assert verdict("rollout.reward-flat", obs(*rows, *zero)).status == "fail"
    mixed = [sample(rollout_id=r, index=i, reward=float(i) - 0.5) for r in range(2) for i in range(2)]
    assert verdict("rollout.reward-flat", obs(*rows, *mixed)).status == "pass"


def test_the_checker_s_lines_of_one_engine_are_one_answer() -> None:
    texts = ("check tensor equality failed:", "name=model.layers.1.mlp.gate.weight max_abs_err=0.4 actual=all zeros")
    lines = tuple(event("weights_check", n, ok=False, message=text) for n, text in enumerate(texts, 4))
    found = [v for v in evaluate(obs(events=lines)).verdicts if v.id == "weights.compare"]
    assert [v.status for v in found] == ["fail"]
    assert found[0].value["zero"] == ["model.layers.1.mlp.gate.weight"]
