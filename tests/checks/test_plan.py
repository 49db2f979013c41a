"""The resume plan says what slime would do, silently, with the checkpoints that are there."""

from __future__ import annotations

import pytest

from rltop.checks.found import Document, HfCheckpoint, Iteration, MegatronCheckpoint
from rltop.checks.observe import Args, Mode, Observations
from rltop.checks.plan import PATHS, PathState, Step, launch_plan

OUT = MegatronCheckpoint(
    "/out",
    "40",
    (Iteration("iter_0000020", 20, 3, True), Iteration("iter_0000040", 40, 3, True)),
    rollout_states=(20, 40),
)
BASE = MegatronCheckpoint("/base", "release", (Iteration("release", None, 3, True),))


def plan(
    flags: dict[str, object],
    *megatron: MegatronCheckpoint,
    hf: tuple[HfCheckpoint, ...] = (),
    paths: dict[str, PathState] | None = None,
    mode: Mode = "full",
) -> tuple[Step, ...]:
    there: list[str] = [found.path for found in megatron] + [found.path for found in hf]
    states: dict[str, object] = {**dict.fromkeys(there, "there"), **(paths or {})}
    documents = (Document(PATHS, "launch", states),)
    return launch_plan(
        Observations(args=Args(flags), megatron=megatron, checkpoints=hf, documents=documents, mode=mode, launch=True)
    )


def says(steps: tuple[Step, ...], text: str, *, warn: bool) -> bool:
    return any(text in step.text and step.warn is warn for step in steps)


def test_a_resume_starts_behind_the_iteration_of_the_tracker() -> None:
    steps = plan({"load": "/out", "save": "/out", "save_interval": 20, "ref_load": "/base"}, OUT, BASE)
    assert steps[0].text == "this will start at rollout 41 from /out/iter_0000040 (the tracker)"
    assert says(steps, "optimizer, learning rate schedule and random state go on", warn=False)
    assert says(steps, "the dataset goes on behind rollout 40", warn=False)
    assert says(steps, "the reference model is /base/release", warn=False)
    assert says(steps, "saves to /out every 20 rollouts, first after rollout 59", warn=False)
    assert not [step for step in steps if step.warn]


def test_ckpt_step_wins_over_the_tracker() -> None:
    steps = plan({"load": "/out", "ckpt_step": "20", "save": "/out", "save_interval": "20"}, OUT)
    assert steps[0].text == "this will start at rollout 21 from /out/iter_0000020 (--ckpt-step)"


def test_a_load_without_tracker_falls_back_in_silence() -> None:
    torn = MegatronCheckpoint("/out", None, OUT.iterations)
    steps = plan({"load": "/out", "ref_load": "/base"}, torn, BASE)
    assert steps[0].warn
    assert "silently falls back to /base, without optimizer, from rollout 0" in steps[0].text
    itself = MegatronCheckpoint("/out/iter_0000040", None, (OUT.iterations[1],), is_iteration=True)
    assert "is one iteration's directory" in plan({"load": "/out/iter_0000040", "ref_load": "/base"}, itself)[0].text


@pytest.mark.parametrize("state", ["empty", "absent"])
def test_a_first_launch_starts_from_the_reference(state: PathState) -> None:
    steps = plan({"load": "/new", "ref_load": "/base"}, BASE, paths={"/new": state})
    assert steps[0] == Step("start", f"--load /new is {state}: starts at rollout 0 from /base, weights only")


def test_what_cannot_be_loaded_is_said_before_the_launch() -> None:
    gone = MegatronCheckpoint("/out", "60", OUT.iterations)
    assert "the tracker names iter_0000060, which is not in /out" in plan({"load": "/out"}, gone)[0].text
    assert plan({"load": "/out", "ckpt_step": 10}, OUT)[0].warn
    assert says(plan({"save": "/out"}), "--ref-load is not given: the trainer has no weights", warn=True)
    assert says(plan({"load": "/x"}, paths={"/x": "there"}), "no checkpoint of any kind", warn=True)


def test_an_unfinished_save_a_lost_dataset_and_a_finished_run_are_said() -> None:
    late = MegatronCheckpoint("/out", "20", OUT.iterations, rollout_states=())
    steps = plan({"load": "/out", "num_rollout": "21"}, late)
    assert says(steps, "iter_0000040 is newer than the tracker", warn=False)
    assert says(steps, "the dataset starts over", warn=True)
    assert says(steps, "--num-rollout 21 is not above rollout 21", warn=True)


def test_a_converted_checkpoint_as_load_is_no_fresh_start() -> None:
    assert "starts at rollout 1" in plan({"load": "/base"}, BASE)[0].text


def test_hugging_face_weights_start_a_fresh_optimizer() -> None:
    steps = plan({"load": "/hf", "hf_checkpoint": "/hf"}, hf=(HfCheckpoint("/hf"),))
    assert steps[0].text == "starts at rollout 0 from the Hugging Face weights in /hf; the optimizer starts fresh"
    assert says(steps, "then take the trainer's weights before the first rollout", warn=False)


def test_a_kl_term_needs_a_reference_and_a_resume_needs_a_save() -> None:
    steps = plan({"load": "/out", "use_kl_loss": True}, OUT)
    assert says(steps, "there is no reference model", warn=True)
    assert says(steps, "nothing of this run can be resumed", warn=True)


def test_split_debugging_has_a_plan_of_its_own() -> None:
    assert plan({"hf_checkpoint": "/hf"}, mode="rollout-only")[0].topic == "engines"
    assert says(plan({"load": "/out", "hf_checkpoint": "/hf"}, OUT, mode="train-only"), "no engine starts", warn=False)


def test_without_checkpoints_there_is_no_plan() -> None:
    assert plan({"lr": 1e-6}) == ()
