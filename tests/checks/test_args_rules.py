"""The checks on arguments: batch arithmetic, token budget, kernels, debug flags, notes, the entry file."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import Document, LogSource
from rltop.checks.observe import Args, Observations, Where
from rltop.checks.verdict import Verdict
from tests.checks.build import event, healthy, obs, rollout, train, verdict


def with_args(framework: str = "slime", **flags: Any) -> Observations:
    lines = {name: i for i, name in enumerate(flags, 1)}
    return Observations(args=Args(flags, framework, Where("args.txt", 1), lines=lines))


def found(check: str, observations: Observations) -> list[Verdict]:
    return [v for v in evaluate(observations).verdicts if v.id == check]


BATCH: list[tuple[dict[str, Any], str, str]] = [
    ({"rollout_batch_size": 16, "n_samples_per_prompt": 4, "global_batch_size": 64}, "pass", "fit"),
    ({"rollout_batch_size": 16, "n_samples_per_prompt": 4, "global_batch_size": 32}, "pass", "fit"),
    (
        {"rollout_batch_size": 16, "n_samples_per_prompt": 4, "global_batch_size": 65},
        "fail",
        "16 x n_samples_per_prompt 4",
    ),
    ({"rollout_batch_size": 16, "n_samples_per_prompt": 4, "global_batch_size": 48}, "warn", "16 samples are never"),
    ({"rollout_batch_size": 16, "n_samples_per_prompt": 4, "num_steps_per_rollout": 2}, "pass", "global_batch_size 32"),
    (
        {"rollout_batch_size": 16, "n_samples_per_prompt": 4, "num_steps_per_rollout": 2, "global_batch_size": 64},
        "fail",
        "64 // 2 = 32",
    ),
    ({"rollout_batch_size": 2, "n_samples_per_prompt": 1, "num_steps_per_rollout": 4}, "fail", "has no sample"),
    ({"rollout_batch_size": 16, "over_sampling_batch_size": 8}, "fail", "never fills"),
    ({"rollout_batch_size": 16, "over_sampling_batch_size": 16}, "pass", "fit"),
    (
        {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 32, "num_rollout": 0},
        "fail",
        "0 x 32 // 32 = 0",
    ),
    ({"lr": 1e-6}, "skip", "no batch sizes"),
    ({}, "skip", "not in the evidence"),
]


@pytest.mark.parametrize(("flags", "status", "words"), BATCH)
def test_slime_counts_samples(flags: dict[str, Any], status: str, words: str) -> None:
    one = verdict("args.batch", with_args(**flags))
    assert (one.status, words in one.cause) == (status, True), one
    if status == "fail":
        assert one.evidence[0].source == "args.txt"
        assert one.advice


ADVISED: list[tuple[dict[str, int], set[str]]] = [
    (
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 512, "num_steps_per_rollout": 2},
        {"--global-batch-size 128", "--rollout-batch-size 128"},
    ),
    (
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 100},
        {"--global-batch-size 64", "--global-batch-size 128", "--rollout-batch-size 25"},
    ),
    (
        {
            "rollout_batch_size": 48,
            "n_samples_per_prompt": 5,
            "global_batch_size": 100,
            "actor_num_gpus_per_node": 8,
            "tensor_model_parallel_size": 2,
        },
        {"--global-batch-size 80", "--global-batch-size 120", "--rollout-batch-size 40"},
    ),
    (
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 512, "num_rollout": 1},
        {"--global-batch-size 256", "--rollout-batch-size 64"},
    ),
    (
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "num_steps_per_rollout": 3},
        {"--num-steps-per-rollout 2", "--num-steps-per-rollout 4"},
    ),
    (
        {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 32, "num_rollout": 0},
        {"--num-rollout 1"},
    ),
    ({"rollout_batch_size": 7, "global_batch_size": 0, "num_steps_per_rollout": 2}, {"--global-batch-size 3"}),
]


@pytest.mark.parametrize(("flags", "advice"), ADVISED)
def test_each_advice_alone_mends_the_batch_sizes(flags: dict[str, Any], advice: set[str]) -> None:
    found = verdict("args.batch", with_args(**flags))
    assert advice <= {text.removeprefix("or ") for text in found.advice}
    problems = 1 + ("must be equal" in found.cause and "never trained on" in found.cause)
    assert sum(text.startswith("--") for text in found.advice) == problems
    for text in advice:
        name, number = text.removeprefix("--").split()
        mended = flags | {name.replace("-", "_"): int(number)}
        assert verdict("args.batch", with_args(**mended)).status in ("pass", "warn"), (text, mended)
        if "steps" not in name and flags["global_batch_size"]:
            assert verdict("args.batch", with_args(**mended)).status == "pass", (text, mended)


ACTOR = "actor_rollout_ref.actor."
VERL: list[tuple[dict[str, Any], str, str]] = [
    ({"data.train_batch_size": "128", f"{ACTOR}ppo_mini_batch_size": "64"}, "pass", "fit"),
    (
        {"data.train_batch_size": "48", f"{ACTOR}ppo_mini_batch_size": "96", "actor_rollout_ref.rollout.n": "16"},
        "fail",
        "both count prompts",
    ),
    ({f"{ACTOR}ppo_mini_batch_size": "4", f"{ACTOR}ppo_micro_batch_size_per_gpu": "8"}, "fail", "4 // 8 = 0"),
    (
        {
            f"{ACTOR}ppo_mini_batch_size": "16",
            f"{ACTOR}ppo_micro_batch_size_per_gpu": "4",
            "trainer.n_gpus_per_node": "8",
            "trainer.nnodes": "2",
        },
        "fail",
        "(16 prompts x 1 samples // 16 GPUs) // 4 = 0",
    ),
    (
        {
            f"{ACTOR}ppo_mini_batch_size": "16",
            f"{ACTOR}ppo_micro_batch_size_per_gpu": "4",
            "trainer.n_gpus_per_node": "8",
            "actor_rollout_ref.rollout.n": "8",
        },
        "pass",
        "gradient_accumulation 4",
    ),
    (
        {
            f"{ACTOR}ppo_mini_batch_size": "4",
            f"{ACTOR}ppo_micro_batch_size_per_gpu": "8",
            f"{ACTOR}use_dynamic_bsz": "True",
        },
        "pass",
        "fit",
    ),
]


@pytest.mark.parametrize(("flags", "status", "words"), VERL)
def test_verl_counts_prompts(flags: dict[str, Any], status: str, words: str) -> None:
    one = verdict("args.batch", with_args("verl", **flags))
    assert (one.status, words in one.cause) == (status, True), one


def test_an_assertion_confirms_and_stands_alone_where_there_are_no_arguments() -> None:
    lost = event("batch_assert", "assert self.lr_decay_steps > 0", line=9)
    flags = Args({"num_rollout": 1, "rollout_batch_size": 4, "global_batch_size": 8}, "slime", Where("args.txt", 1))
    one = verdict("args.batch", Observations(events=(lost,), args=flags))
    assert one.evidence[-1].line == 9
    assert one.confidence == "high"
    alone = verdict("args.batch", Observations(events=(lost,)))
    assert (alone.status, alone.confidence) == ("fail", "medium")
    text = "ValueError: train_batch_size (8) must be >= actor.ppo_mini_batch_size (24)"
    told = verdict("args.batch", Observations(events=(event("batch_assert", text),)))
    assert told.value == {"train_batch_size": 8, "ppo_mini_batch_size": 24}


BUDGET: list[tuple[dict[str, Any], str, str]] = [
    ({"use_dynamic_batch_size": True, "rollout_max_response_len": 12000}, "fail", "no budget"),
    ({"max_tokens_per_gpu": 4096}, "warn", "no effect"),
    (
        {
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 9000,
            "rollout_max_response_len": 12000,
            "context_parallel_size": 4,
        },
        "info",
        "3 x the safe start value 12000 // 4 = 3000",
    ),
    ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9000}, "info", "no hard cap"),
    ({"micro_batch_size": 1}, "pass", "counted in samples"),
    ({}, "skip", "not in the evidence"),
]


@pytest.mark.parametrize(("flags", "status", "words"), BUDGET)
def test_the_token_budget(flags: dict[str, Any], status: str, words: str) -> None:
    one = verdict("args.token-budget", with_args(**flags))
    assert (one.status, words in one.cause) == (status, True), one
    if status == "fail":
        assert one.advice == ("--max-tokens-per-gpu 12000",)


def test_the_token_budget_is_slime_s_and_the_trainer_s() -> None:
    assert verdict("args.token-budget", with_args("verl", **{"data.train_batch_size": 8})).status == "skip"
    alone = obs(flags={"use_dynamic_batch_size": True}, mode="rollout-only")
    assert verdict("args.token-budget", alone).status == "skip"


def test_the_allgather_dispatcher_is_replaced() -> None:
    both = found("args.token-budget", with_args(moe_token_dispatcher_type="allgather"))
    assert [v.status for v in both] == ["pass", "info"]
    assert "alltoall" in both[1].cause


MOE = {"num_experts": 64}


def test_an_unfused_permute_is_news_and_a_warning_when_the_step_one_check_fires() -> None:
    quiet = verdict("args.kernels", obs(healthy(0), rollout(0, log_probs=-0.3), flags=MOE))
    assert quiet.status == "info"
    drift = obs(healthy(0, ppo_kl=2e-4), rollout(0, log_probs=-0.3), flags=MOE)
    loud = verdict("args.kernels", drift)
    assert (loud.status, loud.advice, loud.confidence) == ("warn", ("--moe-permute-fusion",), "high")
    assert evaluate(drift).root_causes == ("args.kernels",)
    fused = obs(healthy(0, ppo_kl=2e-4), rollout(0, log_probs=-0.3), flags=MOE | {"moe_permute_fusion": True})
    assert verdict("args.kernels", fused).status == "pass"
    config = Document("config", "config.json", {"model_type": "any", "num_local_experts": 8})
    assert verdict("args.kernels", obs(flags={"lr": 1e-6}, documents=(config,))).status == "info"


def test_context_parallel_without_flash_is_a_suspect_only_when_actor_and_reference_differ() -> None:
    flags: dict[str, Any] = {"context_parallel_size": 2}
    same = obs(rollout(0, log_probs=-0.3, ref_log_probs=-0.3), healthy(0), flags=flags)
    assert verdict("args.kernels", same).status == "info"
    differ = obs(rollout(0, log_probs=-0.3, ref_log_probs=-0.301), healthy(0), flags=flags)
    one = verdict("args.kernels", differ)
    assert (one.status, one.confidence, one.advice) == ("warn", "low", ("--attention-backend flash",))
    latent = verdict("args.kernels", obs(*differ.metrics, flags=flags | {"multi_latent_attention": True}))
    assert not any("flash" in advice for advice in latent.advice)
    flash = obs(*differ.metrics, flags=flags | {"attention_backend": "flash"})
    assert verdict("args.kernels", flash).status == "pass"


HEADS = {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 96, "model_type": "x"}


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "warn"),
        ({"events": True}, "fail"),
        ({"versions": {"flash_attn_3": "3.0.0"}}, "pass"),
        ({"versions": {"flash_attn_3": "not installed"}}, "warn"),
    ],
)
def test_flash_attention_on_a_latent_model_needs_version_3(more: dict[str, Any], status: str) -> None:
    documents = [Document("config", "config.json", HEADS)]
    if "versions" in more:
        documents.append(Document("versions", "versions.json", more["versions"]))
    events = (
        (event("no_attention", "ValueError: No dot product attention backend is available"),)
        if "events" in more
        else ()
    )
    one = verdict("args.kernels", obs(flags={"attention_backend": "flash"}, documents=tuple(documents), events=events))
    assert one.status == status
    if status != "pass":
        assert one.advice[0].startswith("--attention-backend auto")


def test_printed_head_sizes_make_no_latent_model_and_a_step_that_was_done_had_a_backend() -> None:
    printed = {"qk_head_dim": 96, "qk_pos_emb_head_dim": 32, "v_head_dim": 96, "attention_backend": "flash"}
    assert verdict("args.kernels", obs(flags=printed)).status == "warn"
    assert verdict("args.kernels", obs(flags=printed | {"multi_latent_attention": False})).status == "pass"
    latent = {"attention_backend": "flash", "multi_latent_attention": True}
    assert verdict("args.kernels", obs(train(0), flags=latent)).status == "pass"


def test_flash_attention_on_an_ordinary_model_is_fine() -> None:
    config = Document("config", "config.json", {"model_type": "x", "head_dim": 128})
    assert verdict("args.kernels", obs(flags={"attention_backend": "flash"}, documents=(config,))).status == "pass"
    assert verdict("args.kernels", obs(flags=MOE, mode="rollout-only")).status == "skip"
    assert verdict("args.kernels", Observations()).status == "skip"


DEBUG: list[tuple[dict[str, Any], list[str], str]] = [
    ({"debug_rollout_only": True, "debug_train_only": True}, ["fail"], "exclude each other"),
    ({"debug_rollout_only": True, "load_debug_rollout_data": "d/{rollout_id}.pt"}, ["fail"], "implies"),
    (
        {"save_debug_rollout_data": "d/{rollout_id}.pt", "save_debug_train_data": "d/{rollout_id}.pt"},
        ["fail"],
        "both name",
    ),
    ({"save_debug_rollout_data": "d/rollout.pt"}, ["warn"], "overwrites the same file"),
    ({"save_debug_rollout_data": "d/{rollout_id}_{step}.pt"}, ["warn"], "does not fill (step)"),
    ({"save_debug_train_data": "d/{rollout_id}_{rank}.pt"}, ["pass"], "fit"),
    ({"load_debug_rollout_data": "d/0.pt"}, ["warn", "info"], "replays the same file"),
    ({"load_debug_rollout_data": "d/{rollout_id}.pt"}, ["info"], "no SGLang server"),
    ({"debug_rollout_only": True, "colocate": True}, ["info"], "second step"),
    ({"dump_details": "out/"}, ["info"], "out/rollout_data/{rollout_id}.pt"),
    (
        {"load_debug_rollout_data": "d/{rollout_id}.pt", "load_debug_rollout_data_subsample": "0.1"},
        ["info", "info"],
        "implies",
    ),
    ({"lr": 1}, ["pass"], "No flag"),
    ({}, ["skip"], "not in the evidence"),
]


@pytest.mark.parametrize(("flags", "statuses", "words"), DEBUG)
def test_split_debugging_is_set_up_as_meant(flags: dict[str, Any], statuses: list[str], words: str) -> None:
    verdicts = found("args.debug-flags", with_args(**flags))
    assert [v.status for v in verdicts] == statuses
    assert words in verdicts[0].cause


NOTES: list[tuple[str, dict[str, Any], str]] = [
    ("We train with context parallel 4.", {"context_parallel_size": 1}, "warn"),
    ("We train with context parallel 4.", {"context_parallel_size": 4}, "pass"),
    ("CP is on", {"context_parallel_size": 1}, "warn"),
    ("CP is on", {"context_parallel_size": 2}, "pass"),
    ("Context parallel size = 8", {"context_parallel_size": 4}, "warn"),
    ("colocate is off here", {"colocate": True}, "warn"),
    ("We use colocate", {"colocate": True, "debug_rollout_only": True}, "warn"),
    ("ran it without CUDA graphs", {"lr": 1}, "warn"),
    ("ran it without CUDA graphs", {"sglang_disable_cuda_graph": True}, "pass"),
    ("Speculative decoding is disabled.", {"sglang_speculative_algorithm": "EAGLE"}, "warn"),
    ("DeepEP enabled on both sides", {"moe_enable_deepep": True}, "pass"),
    ("DeepEP enabled on both sides", {"num_experts": 8}, "warn"),
    ("dynamic batching is on", {"micro_batch_size": 1}, "warn"),
    ("routing replay is not used", {"use_rollout_routing_replay": True}, "warn"),
    # a mention, a question and a plan are no claims
    ("Could routing replay be on?", {"lr": 1}, "pass"),
    ("See the paper about DeepEP", {"lr": 1}, "pass"),
    ("We want to run with context parallel 4", {"context_parallel_size": 1}, "pass"),
]


@pytest.mark.parametrize(("text", "flags", "status"), NOTES)
def test_a_note_is_compared_with_the_effective_arguments(text: str, flags: dict[str, Any], status: str) -> None:
    note = Document("note", "note.txt", text=f"Notes of the shift\n{text}\n")
    one = verdict("args.effective", obs(flags=flags, documents=(note,)))
    assert one.status == status, one
    if status == "warn":
        assert (one.evidence[0].source, one.evidence[0].line) == ("note.txt", 2)
        assert "claims" in one.cause


def test_what_the_server_reports_wins_over_the_flags() -> None:
    note = Document("note", "note.txt", text="CUDA graphs are off")
    server = Document("server_info", "server_info.json", {"disable_cuda_graph": False})
    flags = {"sglang_disable_cuda_graph": True}
    assert verdict("args.effective", obs(flags=flags, documents=(note, server))).status == "warn"


def test_a_flag_given_twice_is_shown_with_the_value_that_wins() -> None:
    args = Args({"lr": "2e-6"}, "slime", Where("args.txt", 1), {"lr": ("1e-6", "2e-6")}, lines={"lr": 4})
    one = verdict("args.effective", Observations(args=args))
    assert (one.status, one.value["effective"], one.evidence[0].line) == ("info", "2e-6", 4)
    assert verdict("args.effective", Observations()).status == "skip"


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        ({"path": "/work/run/pkg.cli.train"}, "python -m pkg.cli.train"),
        ({"path": "/work/run/train.py"}, "correct the path of train.py, or the working_dir of the job"),
        ({"module": "pkg.cli"}, "set PYTHONPATH or working_dir so that pkg.cli can be imported"),
    ],
)
def test_an_entry_that_cannot_be_opened(data: dict[str, Any], advice: str) -> None:
    seen = Observations(events=(event("entry_missing", "python: can't open file", **data),))
    one = verdict("args.entrypoint", seen)
    assert (one.status, one.advice) == ("fail", (advice,))
    assert verdict("args.entrypoint", Observations(logs=(LogSource("a.log"),))).status == "pass"
    assert verdict("args.entrypoint", Observations()).status == "skip"
