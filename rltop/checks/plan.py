"""What a launch will do, in words, before it is launched: where it resumes, what it loads, what it will save.

Pure. The rules are slime's (`arguments.py` and its checkpoint loading): the tracker file decides and never the largest
`iter_*`; a `--load` without tracker that is no Hugging Face directory falls back to `--ref-load` without an error,
without optimizer, from rollout 0; a resume starts at the loaded iteration + 1; the place in the dataset is read from
`<load>/rollout/global_dataset_state_dict_<iteration>.pt`, and without that file the dataset starts over.

Relax with Megatron-Bridge (its way unless `--megatron-to-hf-mode raw`) falls back to `--hf-checkpoint` instead.

rltop's own trainer differs in three things (`OwnTrainer`): it has a model without any checkpoint, keeps its reference
model beside its checkpoints, and draws its prompts from the seed and the rollout id, so there is no dataset file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from rltop.checks.facts import relax_bridge
from rltop.checks.found import HfCheckpoint, MegatronCheckpoint
from rltop.checks.observe import Observations

PathState = Literal["there", "empty", "absent", "unreadable"]
PATHS = "paths"
"""Kind of the document that says which directories of the arguments are there: path -> `PathState`."""


class Step(NamedTuple):
    """One sentence of the plan."""

    topic: Literal["start", "optimizer", "data", "reference", "engines", "save", "end", "refused"]
    text: str
    warn: bool = False
    """Probably not what is meant."""
    fatal: bool = False
    """The launch cannot get past this."""


class OwnTrainer(NamedTuple):
    """The launch is of `rltop train`."""

    kept_reference: str = ""
    """The reference model in the directory of --load; "": there is none."""


def launch_plan(obs: Observations, own: OwnTrainer | None = None) -> tuple[Step, ...]:
    """The plan, in the order of events; empty where the arguments name no checkpoint at all. own: None for slime's."""
    args = obs.args
    if obs.mode == "rollout-only":
        engines = args.text("hf_checkpoint") or "nothing (--hf-checkpoint is missing)"
        return (
            Step("engines", f"rollout-only: the engines serve {engines}; no trainer starts, nothing is loaded by it"),
        )
    if not any(args.given(name) for name in ("load", "ref_load", "hf_checkpoint", "save")):
        return ()
    start, first = _start(obs, own)
    return (*start, *_reference(obs, own, resumes=bool(first)), *_engines(obs), *_save(obs, first))


def _start(obs: Observations, own: OwnTrainer | None) -> tuple[tuple[Step, ...], int | None]:
    """Sentences, and the first rollout id (None where it cannot be known)."""
    args = obs.args
    load = args.text("load")
    if not load:
        return (_fresh(obs, own, "--load is not given"),), 0
    state = _states(obs).get(load)
    megatron = _megatron(obs).get(load)
    if megatron and megatron.tracker is not None:
        return _resume(obs, own, megatron)
    if megatron:
        what = (
            "is one iteration's directory" if megatron.is_iteration else f"holds {_names(megatron)} but no tracker file"
        )
        flag = _fallback(obs)
        back = args.text(flag) or f"{_flag(flag)}, which is not given"
        text = (
            f"--load {load} {what} (latest_checkpointed_iteration.txt): this silently falls back to {back}, "
            "without optimizer, from rollout 0"
        )
        return (Step("start", text, warn=True),), 0
    if load in _hf(obs):
        text = f"starts at rollout 0 from the Hugging Face weights in {load}; the optimizer starts fresh"
        return (Step("start", text),), 0
    if state in ("empty", "absent"):
        return (_fresh(obs, own, f"--load {load} is {state}"),), 0
    if state == "there":
        back = args.text(_fallback(obs)) or _flag(_fallback(obs))
        text = f"--load {load} is no checkpoint of any kind: this silently falls back to {back}"
        return (Step("start", text, warn=True),), 0
    return (Step("start", f"--load {load} was not looked at: it cannot be said where this starts", warn=True),), None


def _fresh(obs: Observations, own: OwnTrainer | None, why: str) -> Step:
    if own is not None:
        weights = obs.args.text("hf_checkpoint") or "a tiny model of its own"
        return Step("start", f"{why}: starts at rollout 0 from {weights}")
    flag = _fallback(obs) if obs.args.text("load") else "ref_load"
    source = obs.args.text(flag) or (obs.args.text("hf_checkpoint") if relax_bridge(obs) else "")
    if not source:
        return Step(
            "start",
            f"{why} and {_flag(flag)} is not given: the trainer has no weights to start from",
            warn=True,
            fatal=True,
        )
    return Step("start", f"{why}: starts at rollout 0 from {source}, weights only")


def _fallback(obs: Observations) -> str:
    """The flag whose checkpoint is taken where `--load` holds none."""
    return "hf_checkpoint" if relax_bridge(obs) else "ref_load"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _resume(
    obs: Observations, own: OwnTrainer | None, found: MegatronCheckpoint
) -> tuple[tuple[Step, ...], int | None]:
    args, tracker = obs.args, (found.tracker or "").strip()
    chosen = args.number("ckpt_step")
    name = f"iter_{int(chosen):07d}" if chosen is not None else _directory(tracker)
    by = "--ckpt-step" if chosen is not None else "the tracker"
    if name not in {iteration.name for iteration in found.iterations}:
        return (
            Step(
                "start",
                f"{by} names {name or 'nothing'}, which is not in {found.path}: the load fails",
                warn=True,
                fatal=True,
            ),
        ), None
    if name == "release":
        text = (
            f"{found.path} is a converted checkpoint (`release`): as --load it counts as a resume from iteration 0, so "
            "this starts at rollout 1 and skips the evaluation of rollout 0; give it as --ref-load for a fresh start"
        )
        return (Step("start", text, warn=True),), 1
    number = int(name.removeprefix("iter_"))
    first = int(args.number("start_rollout_id") or number + 1)
    steps = [Step("start", f"this will start at rollout {first} from {found.path}/{name} ({by})")]
    newer = [i.name for i in found.iterations if i.number is not None and i.number > number]
    if newer and chosen is None:
        steps.append(Step("start", f"{newer[-1]} is newer than the tracker and is not loaded: an interrupted save?"))
    steps += _left_out(obs)
    if own is not None:
        steps.append(Step("data", "the prompts go on: they are drawn from the seed and the rollout id"))
    elif number not in found.rollout_states:
        there = f"rollout/global_dataset_state_dict_{number}.pt is not in {found.path}"
        steps.append(Step("data", f"{there}: the dataset starts over, with one info line", warn=True))
    else:
        steps.append(Step("data", f"the dataset goes on behind rollout {number}"))
    total = args.number("num_rollout")
    if total is not None and first >= total:
        text = f"--num-rollout {int(total)} is not above rollout {first}: the run ends without a step"
        steps.append(Step("end", text, warn=True))
    return tuple(steps), first


def _left_out(obs: Observations) -> Iterator[Step]:
    left = [name for name in ("no_load_optim", "no_load_rng", "finetune") if obs.args.on(name)]
    if left:
        flags = ", ".join("--" + name.replace("_", "-") for name in left)
        yield Step(
            "optimizer",
            f"{flags}: the weights are loaded, that part of the state starts fresh",
            warn="finetune" in left,
        )
    else:
        yield Step("optimizer", "optimizer, learning rate schedule and random state go on")


def _reference(obs: Observations, own: OwnTrainer | None, *, resumes: bool) -> Iterator[Step]:
    ref = obs.args.text("ref_load")
    wanted = obs.args.on("use_kl_loss") or (obs.args.number("kl_coef") or 0) != 0
    if not ref:
        if wanted and own is not None:
            yield _own_reference(own, resumes=resumes)
        elif wanted:
            yield Step(
                "reference", "a KL term is on but --ref-load is not given: there is no reference model", warn=True
            )
        return
    state, found = _states(obs).get(ref), _megatron(obs).get(ref)
    if state in ("absent", "empty"):
        yield Step("reference", f"--ref-load {ref} is {state}", warn=True, fatal=True)
    elif found is not None and found.tracker is None:
        yield Step("reference", f"--ref-load {ref} has no tracker file (latest_checkpointed_iteration.txt)", warn=True)
    elif found is not None or ref in _hf(obs):
        name = f"/{_directory((found.tracker or '').strip())}" if found is not None else " (Hugging Face weights)"
        yield Step("reference", f"the reference model is {ref}{name}")


def _own_reference(own: OwnTrainer, *, resumes: bool) -> Step:
    if not resumes:
        return Step("reference", "the reference model is the weights that this run starts with")
    if own.kept_reference:
        return Step("reference", f"the reference model is {own.kept_reference}, kept since the run's start")
    text = "the checkpoint keeps no reference model and --ref-load is not given: the trainer refuses to start"
    return Step("reference", text, warn=True, fatal=True)


def _engines(obs: Observations) -> Iterator[Step]:
    if obs.mode == "train-only":
        data = obs.args.text("load_debug_rollout_data")
        text = f"samples come from {data}" if data else "where its samples come from the arguments do not say"
        yield Step("engines", f"train-only: no engine starts; {text}")
    elif hf := obs.args.text("hf_checkpoint"):
        absent = _states(obs).get(hf) in ("absent", "empty")
        told = "which is not there" if absent else "then take the trainer's weights before the first rollout"
        yield Step("engines", f"the engines load {hf}, {told}", warn=absent, fatal=absent)


def _save(obs: Observations, first: int | None) -> Iterator[Step]:
    args = obs.args
    save, load, every = args.text("save"), args.text("load"), args.number("save_interval")
    if not save:
        yield Step("save", "--save is not given: nothing of this run can be resumed", warn=True)
        return
    if not every:
        yield Step("save", "--save without --save-interval: the trainer refuses to start", warn=True, fatal=True)
        return
    step = int(every)
    text = f"saves to {save} every {step} rollouts"
    if first is not None and step > 0:
        text += f", first after rollout {(first // step + 1) * step - 1}"
    if load and load.rstrip("/") != save.rstrip("/"):
        text += f"; resume it with --load {save}, not with --load {load}"
    yield Step("save", text)


def _directory(tracker: str) -> str:
    return f"iter_{int(tracker):07d}" if tracker.isdecimal() else tracker


def _names(found: MegatronCheckpoint) -> str:
    names = [iteration.name for iteration in found.iterations]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _states(obs: Observations) -> Mapping[str, object]:
    return next((document.fields for document in obs.documents if document.kind == PATHS), {})


def _megatron(obs: Observations) -> dict[str, MegatronCheckpoint]:
    return {found.path: found for found in obs.megatron}


def _hf(obs: Observations) -> dict[str, HfCheckpoint]:
    return {found.path: found for found in obs.checkpoints}
