"""Printed samples: where the prompt ends; and a rollout-only run that lies beside the full one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.evidence.collect import collect
from rltop.evidence.printed import split

LINE = (
    "(RolloutManager pid=71) [2026-06-01 09:00:0{at}] sglang_rollout.py:446 - Finish rollout: {text!r}, label: 12, "
    "reward: {reward}\n"
)
CHATML = "<|im_start|>user\nHow many eggs are in 12 boxes of one?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Every box holds one egg, and there are a dozen boxes, so the answer is \\boxed{12}."
MIXED = " ".join(["κάτω ระบบ сквозь 木漏れ日 हिन्दी ladrillo 한국 مرحبا"] * 8)


@pytest.mark.parametrize(
    "prompt",
    [
        CHATML,
        "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n",
        "<\uff5cUser\uff5c>How many?<\uff5cAssistant\uff5c>",
        "[gMASK]<sop><|user|>\nHow many?<|assistant|>\n",
        "<s>[INST] How many? [/INST]",
        "[{'role': 'user', 'content': 'How many [eggs]?'}]",
    ],
)
def test_the_response_begins_after_the_template(prompt: str) -> None:
    parts = split(prompt + ANSWER)
    assert (parts.prompt, parts.response, parts.last) == (prompt, ANSWER, ANSWER)


def test_text_without_a_known_mark_is_a_response() -> None:
    assert split("Q " + ANSWER).response == "Q " + ANSWER
    assert split("[{'role': 'user'").response == "[{'role': 'user'"


def test_turns_that_the_model_made_up_belong_to_the_response() -> None:
    more = "<|im_end|>\n<|im_start|>user\nAnd 13?<|im_end|>\n<|im_start|>assistant\nok"
    parts = split(CHATML + ANSWER + more)
    assert (parts.response, parts.last) == (ANSWER + more, "ok")


def _log(tmp_path: Path, name: str, *texts: str) -> None:
    lines = [LINE.format(at=at, text=[text], reward=0) for at, text in enumerate(texts)]
    end = "(RolloutManager pid=71) [2026-06-01 09:01:00] rollout.py:9 - perf 0: {'perf/rollout_time': 61.4}\n"
    (tmp_path / name).write_text("".join(lines) + end, encoding="utf-8")


def test_a_printed_response_is_measured_without_its_prompt(tmp_path: Path) -> None:
    _log(tmp_path, "train.log", CHATML + ANSWER, CHATML + MIXED, CHATML + ANSWER + "<|im_end|>\n" + CHATML + MIXED)
    good, bad, conversation = collect([tmp_path]).samples
    assert (good.text.families, good.text.chars, good.ran_past) == (0, len(ANSWER), ())
    assert bad.text.families >= 4
    assert conversation.text.families >= 4


def test_a_label_in_the_question_is_no_answer(tmp_path: Path) -> None:
    _log(tmp_path, "train.log", CHATML + "I can not say.", CHATML + ANSWER)
    assert [sample.label_shown for sample in collect([tmp_path]).samples] == [False, True]


def test_a_rollout_only_log_beside_a_full_run_is_another_run(tmp_path: Path) -> None:
    _log(tmp_path, "rollout_only.log", CHATML + ANSWER)
    _log(tmp_path, "train.log", CHATML + MIXED)
    with (tmp_path / "train.log").open("a") as log:
        log.write("(MegatronTrainRayActor pid=77) [2026-06-01 09:05:00] model.py:9 - step 0: {'train/loss': 0.1}\n")
    obs = collect([tmp_path])
    assert obs.mode == "full"
    assert {sample.mode for sample in obs.samples} == {"", "rollout-only"}
    assert {row.where.source for row in obs.metrics if row.where} == {"train.log"}


def test_folders_of_their_own_arguments_are_runs_of_their_own(tmp_path: Path) -> None:
    for name, flags in (("a", "--colocate"), ("b", "--debug-rollout-only")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.txt").write_text(f"--rollout-batch-size 4 {flags}\n")
        _log(tmp_path / name, "job.log", CHATML + ANSWER)
    obs = collect([tmp_path])
    assert (obs.mode, obs.args.on("debug_rollout_only")) == ("full", False)
    assert [sample.mode for sample in obs.samples] == ["", "rollout-only"]


def test_a_rollout_only_run_alone_stays_what_it_is(tmp_path: Path) -> None:
    _log(tmp_path, "rollout_only.log", CHATML + ANSWER)
    obs = collect([tmp_path])
    assert (obs.mode, len(obs.metrics)) == ("rollout-only", 1)


FRAMES = (
    '  File "/opt/{where}", line 7, in run',
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
)


@pytest.mark.parametrize(
    ("actor", "where", "owner"),
    [
        ("SGLangEngine", "sglang/srt/managers/scheduler.py", "engine"),
        ("WorkerDict", "sglang/srt/managers/scheduler.py", "engine"),
        ("WorkerDict", "megatron/core/pipeline_parallel/schedules.py", "trainer"),
    ],
)
def test_a_traceback_keeps_the_rank_of_its_first_line(tmp_path: Path, actor: str, where: str, owner: str) -> None:
    """Ray repeats the actor on every line, SGLang its rank on the first only."""
    tag = " TP3" if actor == "SGLangEngine" else ""
    head = f"[2026-06-01 09:00:00{tag}] Scheduler hit an exception: Traceback (most recent call last):"
    lines = [f"({actor} pid=88) {line}" for line in (head, *(frame.format(where=where) for frame in FRAMES))]
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    event = next(event for event in collect([tmp_path]).events if event.kind == "ima")
    assert (event.owner, event.rank) == (owner, 3 if tag else None)
