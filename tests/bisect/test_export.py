"""What goes into a bug report, and what people are told of a bisection."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from rltop.bisect.export import Evidence, as_markdown
from rltop.bisect.export_json import as_json
from rltop.bisect.recipe import recipe
from rltop.bisect.story import Story, arm_words, minutes_text, percent, same_fault
from rltop.bisect.story_of import story_of
from tests.bisect.stories import CULPRIT, ended, found, running, trial

EVIDENCE = Evidence(
    kind="sglang",
    versions={"sglang": "0.5.23", "torch": "2.9.1"},
    argv=[
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "PATH/qwen",
        "--page-size",
        "1",
        "--trust-remote-code",
    ],
    crashed=["python", "-m", "sglang.launch_server", "--model-path", "PATH/qwen", "--trust-remote-code"],
    smallest=["python", "-m", "sglang.launch_server", "--model-path", "PATH/qwen", "--disable-overlap-schedule"],
    smallest_on=CULPRIT,
    crashes_min=[12.0, None],
    env={"CUDA_LAUNCH_BLOCKING": "0"},
    pins=["--page-size 1"],
    log=["Traceback", "```", "CUDA error: an illegal memory access was encountered"],
)


def story(cell: dict[str, Any]) -> Story:
    made = story_of(cell)
    assert made is not None
    return made


def page(cell: dict[str, Any], evidence: Evidence = EVIDENCE) -> str:
    return as_markdown(story(cell), evidence)


def test_a_maintainer_finds_what_crashes_how_sure_it_is_and_what_to_type() -> None:
    told = page(found())
    assert told.startswith(
        "# Illegal memory access in decode (CUDA graph) with cuda_graph x speculative (SGLang 0.5.23)\n"
    )
    assert "**found: cuda_graph x speculative (97%)** crashes with nothing else on, quiet with any of it off" in told
    assert "- kernel: `build_tree_efficient`, block 12, 0, 0 (from core dump)" in told
    assert "| on | on | **off** | **off** | **1** | 1 | 3.2 min |" in told
    assert "| 1 | **off** | on | on | on | quiet | 30 min |  |" in told
    assert "| cuda_graph x speculative | 71.0% |" in told
    assert "none of these | 0.4" not in told, "what is hardly believed is left out"
    assert "| on | on | on | on | **2** | no trial: in service | not known |" in told
    assert "**speculative off** (trial 2, 28 min under traffic)\n\n- SGLang, leave out: `--speculative-algo" in told
    assert "- slime, leave out: `--sglang-speculative-algorithm NGRAM`" in told
    assert "- SGLang, add: `--disable-cuda-graph`\n- slime, add: `--sglang-disable-cuda-graph`\n" in told
    assert "CUDA_LAUNCH_BLOCKING=0 \\\n  python -m sglang.launch_server \\\n  --model-path PATH/qwen" in told
    assert "- torch 2.9.1" in told
    assert "ana" not in told
    assert "ticket 7" not in told
    assert "rehearsal" not in told.lower()


def test_the_command_of_the_page_is_one_for_the_shell() -> None:
    block = page(found()).split("As it crashed first, after 12 min of service:")[1].split("```")[1].removeprefix("sh\n")
    assert shlex.split(block.replace("\\\n", " ")) == ["CUDA_LAUNCH_BLOCKING=0", *EVIDENCE.crashed]


def test_only_what_was_run_is_said_to_crash_and_to_be_quiet() -> None:
    told = page(found())
    assert (
        "With the fewest features that crashed (cuda_graph, speculative): 1 of 1 trial crashed, after 3.2 min" in told
    )
    twice = [*found()["trials"], trial(4, ["deepep", "overlap_schedule"], "quiet", 9.0)]
    assert "(cuda_graph, speculative): 1 of 2 trials crashed" in page(found(trials=twice))
    never = page(found(), Evidence(crashed=["python", "-m", "x"]))
    assert "fewest features" not in never, "none crashed with anything off"
    assert "As it crashed first:" in never
    running_still = [trial(1, ["cuda_graph"], "running", 9.0), trial(2, ["speculative"], "quiet", 0.0)]
    assert "## Workaround" not in page(found(trials=running_still)), "neither was quiet for any time"


def test_the_kernel_has_its_line_and_the_exception_and_extra_runs_are_no_trials() -> None:
    kernel = {"name": "f", "block": "(1,0,0), thread (64,0,0)", "place": "s.py:9", "exception": "Warp Illegal Address"}
    cell = found(
        kernel=kernel | {"source": "core dump, cuda-gdb", "weaker": False},
        kernel_runs=[{"engine": "0", "why": "once more, with core dumps", "outcome": "crashed", "minutes": 2.0}],
    )
    told = page(cell)
    where = "s.py:9, block (1,0,0), thread (64,0,0): Warp Illegal Address"
    assert f"- kernel: `f`, {where} (from core dump, cuda-gdb)" in told
    assert "- for the kernel, no trial: once more, with core dumps: crashed" in told
    data = as_json(story(cell), EVIDENCE)
    assert (data["kernel"]["place"], data["kernel"]["exception"]) == ("s.py:9", "Warp Illegal Address")
    assert data["kernel_runs"] == [
        {"why": "once more, with core dumps", "outcome": "crashed", "minutes": 2.0, "note": ""}
    ]


def test_what_on_and_off_stand_for_is_said() -> None:
    values = {"cuda_graph": ("on", "off"), "attention_backend": ("fa3", "triton"), "speculative": ("NGRAM", "off")}
    told = page(found(), Evidence(values=values))
    assert "attention_backend on: fa3, off: triton; speculative on: NGRAM." in told
    assert as_json(story(found()), Evidence(values=values))["values"]["attention_backend"]["off"] == "triton"


def test_a_command_for_this_machine_is_no_remark() -> None:
    notes = [f"there is no cuda-gdb here; where there is one: cuda-gdb -ex 'target cudacore PATH/{n}'" for n in "ab"]
    told = page(found(notes=notes))
    assert told.count("- there is no cuda-gdb here\n") == 1
    assert "target cudacore" not in told


def test_crashes_of_another_kind_are_counted_apart() -> None:
    rows = [*found()["trials"], trial(4, [], "crashed", 1.0, counts=False, fingerprint="oom/serve/1")]
    told = page(found(trials=rows))
    assert "4 trials: 1 crashed, 2 quiet, 1 crashed of another kind" in told
    assert "- 1 not counted: 1 another crash (oom/serve/1)" in told
    assert "3 trials: 1 crashed, 1 crashed of another kind" in page(
        found(counts={"trials": 3, "crashed": 1, "other": 1})
    )


def test_one_fault_in_another_phase_is_no_other_crash() -> None:
    rows = [trial(1, ["deepep"], "crashed", 1.0, fingerprint="ima/serve/656fb6")]
    assert "ima/serve" not in page(found(trials=rows)), "class and hash are those of the hunted one"
    rows = [trial(1, ["deepep"], "crashed", 1.0, fingerprint="ima/decode-graph/000000")]
    assert "`ima/decode-graph/000000`" in page(found(trials=rows))
    assert same_fault("ima/serve/1", "ima/decode/1")
    assert not same_fault("ima/serve/1", "misaligned/serve/1")
    assert not same_fault("silent/serve", "ima/serve/1")


def test_what_is_pinned_is_not_said_of_trials_that_have_their_own() -> None:
    every = ["- --page-size 1", "+ --page-size 64"]
    rows = [trial(1, ["deepep"], "quiet", 9.0), trial(2, ["speculative"], "quiet", 9.0, argv=every)]
    assert "\n- `--page-size 1` (but in trial 2: it is how a feature is off there)\n" in page(found(trials=rows))
    assert "\n- `--page-size 1`\n" in page(found(trials=rows[:1]))
    padded = trial(3, ["cuda_graph_padding"], "quiet", 9.0, argv=["+ --cuda-graph-bs-decode 1 2 3"])
    assert "cuda_graph_padding off: a graph for every batch size" in page(found(trials=[padded]))


def test_the_first_weights_are_the_checkpoints() -> None:
    crash = found()["crash"]
    assert "those of the checkpoint\n" in page(found(crash=crash | {"weight_version": "default"}))
    assert "- weights in every trial: version 7\n" in page(found(crash=crash | {"weight_version": "7"}))


def test_a_run_that_went_down_says_so_in_the_report() -> None:
    assert "the run went down" in page(ended("stopped", "the run went down", cut_off=True))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            ["+ --disable-radix-cache"],
            ["SGLang, add: --disable-radix-cache", "slime, add: --sglang-disable-radix-cache"],
        ),
        (
            ["- --attention-backend fa3", "+ --attention-backend triton"],
            ["SGLang, add: --attention-backend triton", "slime, add: --sglang-attention-backend triton"],
        ),
        (
            ["- --speculative-algorithm EAGLE", "- --enable-memory-saver", "+ SGLANG_X=1", "- Y=2"],
            [
                "SGLang, leave out: --speculative-algorithm EAGLE --enable-memory-saver",
                "slime, leave out: --sglang-speculative-algorithm EAGLE",
                "environment, set: SGLANG_X=1",
                "environment, unset: Y",
            ],
        ),
        (["- Z (not inherited any more)"], ["environment, unset: Z"]),
        (["- A=1", "+ A=0"], ["environment, set: A=0"]),
        (['+ --json {"a": 1}'], ["SGLang, add: --json '{\"a\": 1}'", "slime, add: --sglang-json '{\"a\": 1}'"]),
        (["+ --random-seed 7"], ["SGLang, add: --random-seed 7"]),
        (["the same", ""], []),
    ],
)
def test_what_turns_a_feature_off_is_ready_to_paste(lines: list[str], told: list[str]) -> None:
    made = recipe(lines)
    assert made.lines() == told
    for line in told:  # a shell takes each apart into whole words again
        assert shlex.split(line)
    own = [line[2:] for line in lines if "memory-saver" in line or "random-seed" in line]
    assert list(made.slime_sets) == own


def test_a_log_cannot_end_its_own_block() -> None:
    assert "````\nTraceback\n```\nCUDA error" in page(found())


def test_text_of_a_run_is_no_markup() -> None:
    crash = found()["crash"] | {"cause": "[x](http://evil) | <b>\x1b[31m", "fingerprint": "ima/`rm`|x"}
    told = page(found(crash=crash))
    assert "\\[x\\](http://evil) \\| \\<b\\>" in told
    assert "\x1b" not in told
    assert "`ima/'rm'/x`" in told


def test_every_trial_is_there_with_what_does_not_count() -> None:
    told = page(running())
    assert "**searching; so far cuda_graph x speculative (71%)**" in told
    assert "| 4 | **off** | on | **off** | **off** | lost | 0 s | not counted; no port was free |" in told
    assert "| 5 | on | on | **off** | **off** | running | 4.1 min |  |" in told
    assert told.count("\n| ") > 8


def test_a_rehearsal_is_called_one_and_so_is_a_stand_in() -> None:
    crash = found()["crash"] | {"injected": "ima"}
    told = page(found(crash=crash, time_scale=60.0), Evidence(kind="null", versions={"sglang": "0.5.23"}))
    assert "> **A rehearsal, not a bug report:** the fault ima was injected into a stand-in engine" in told
    assert "seen on rltop's null engine, a stand-in" in told.splitlines()[0]


def test_what_cannot_be_told_apart_and_what_is_missing_is_said() -> None:
    left = {"left": [[["cuda_graph"], 0.5], [["cuda_graph", "cuda_graph_padding"], 0.48]]}
    told = page(ended("not-separable", "graphs or their padding", verdict=left), Evidence(missing=["crash.log: gone"]))
    assert "not told apart: cuda_graph (50%), cuda_graph x cuda_graph_padding (48%)" in told
    assert "- crash.log: gone" in told
    assert "## To reproduce" not in told
    assert "## Workaround" not in told


def test_who_stopped_it_is_left_out() -> None:
    cell = ended("stopped", "stopped by ana, uid 7: a secret project")
    for told in (page(cell), json.dumps(as_json(story(cell), EVIDENCE))):
        assert "ended by its operator before it was clear" in told
        assert "ana" not in told
        assert "secret" not in told


def test_a_member_that_crashed_without_it_is_no_workaround() -> None:
    trials = [*found()["trials"], trial(4, ["speculative"], "crashed", 1.0)]
    told = page(found(trials=trials))
    assert "**speculative off**" not in told
    assert "**cuda_graph off** (trial 1, 30 min under traffic)" in told


def test_the_data_is_json_and_has_names() -> None:
    told = json.loads(json.dumps(as_json(story(found()), EVIDENCE)))
    assert (told["schema"], told["state"], told["culprit"], told["probability"]) == (1, "found", CULPRIT, 0.97)
    assert told["trials"][2]["off"] == ["deepep", "overlap_schedule"]
    assert told["workarounds"][1] == {
        "off": "speculative",
        "argv": ["- --speculative-algorithm NGRAM"],
        "quiet_min": 28,
        "trials": [2],
        "add": [],
        "leave_out": ["--speculative-algorithm NGRAM"],
        "env": [],
        "unset": [],
        "slime_add": None,
        "slime_leave_out": "--sglang-speculative-algorithm NGRAM",
    }
    assert told["kernel"]["name"] == "build_tree_efficient"
    assert told["kernel"]["block"] == "12, 0, 0"
    assert (told["smallest_on"], told["crashes_min"]) == (CULPRIT, [12.0, None])
    assert "who" not in told


@pytest.mark.parametrize(
    "cell",
    [
        {"id": 1},
        {"state": None, "trials": [None, 3, {"on": "x", "minutes": "long"}], "left_min": [1], "posterior": {}},
        {"state": "strange", "verdict": {"left": [[1], ["a", "b"], 7]}, "facts": [{"moves": [[["a"], None]]}]},
        {"state": "found", "verdict": {"p": "x", "culprit": "ab"}, "kernel": {"name": ""}, "crash": [], "next": [{}]},
        running(toggles=None, trials=None, crash=None, traffic=None, involved=None, aliases=[], restored=3),
    ],
)
def test_a_cell_of_another_rltop_breaks_nothing(cell: dict[str, Any]) -> None:
    made = story(cell)
    assert as_markdown(made, Evidence())
    assert json.dumps(as_json(made, Evidence()))
    assert made.headline()


def test_no_cell_is_no_bisection() -> None:
    cells: list[Any] = [None, {}, [], 3, "x"]
    assert [story_of(cell) for cell in cells] == [None] * 5


def test_words() -> None:
    assert [percent(p) for p in (0.0, 0.004, 0.5, 0.994, 0.999, 1.0)] == ["0%", "<1%", "50%", ">99%", ">99%", "100%"]
    assert [minutes_text(m) for m in (0, 0.5, 3.21, 48.2, 300, float("nan"))] == [
        *("0 s", "30 s", "3.2 min", "48 min", "5.0 h", "?")
    ]
    assert arm_words("abc", "") == "everything on"
    assert arm_words("", "abc") == "everything off"
    assert arm_words("b", "ac") == "only b"
    assert arm_words("ac", "b") == "without b"
    assert story(running()).time_left() == "20 to 90 min left"
    assert story(found()).time_left() == ""
    assert story(running(restored={"0": "its disk is full"})).wrong() == ["engine 0: its disk is full"]


def test_a_workaround_says_what_went_off_along_and_whose_minutes_it_has() -> None:
    trials = [
        trial(1, list(CULPRIT), "quiet", 30.0),
        trial(2, ["deepep", "overlap_schedule"], "crashed", 2.0),
    ]
    told = page(found(trials=trials, aliases={"cuda_graph": ["speculative"]}, time_scale=60.0))
    assert "; speculative went off with it)" in told
    assert "A rehearsal, so minutes are scaled: one second of clock is 60 seconds here." in told
    assert "minutes are scaled" not in page(found())


def test_versions_that_are_not_known_are_named() -> None:
    how = "(`python -m sglang.check_env` prints them)"
    assert f"- not known here, please add: GPU, driver, CUDA {how}\n" in page(found())
    assert "check_env" not in page(found(), Evidence(kind="cpu")), "a stand-in has none"
    assert "please add: GPU, driver, CUDA, torch" in page(found(), Evidence(kind="sglang"))
