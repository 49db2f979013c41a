"""`args.batch`: batch sizes are consistent in the framework's own units.

slime and Relax count samples in `global_batch_size` (facts on slime, batch arithmetic); verl counts prompts in both of
its sizes, and the worker multiplies the mini-batch by n later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rltop.checks.events import of_kind
from rltop.checks.facts import relax_gpus
from rltop.checks.found import LogEvent
from rltop.checks.observe import Args, Observations
from rltop.checks.phrase import missing, of_event, of_flags
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Status, Verdict

ID = "args.batch"
_VERL_TEXT = re.compile(r"train_batch_size \((?P<train>\d+)\) must be >= actor\.ppo_mini_batch_size \((?P<mini>\d+)\)")
_ACTOR = "actor_rollout_ref.actor."


@dataclass(slots=True)
class _Finding:
    """What is wrong, with the arithmetic written out."""

    status: Status
    cause: str
    advice: tuple[str, ...]
    flags: tuple[str, ...]
    value: dict[str, object] = field(default_factory=dict)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the worst finding, the others named after it."""
    asserted = list(of_kind(obs, "batch_assert"))
    if not obs.args.flags:
        found = _from_log(asserted)
        if found is None:
            return [Verdict(ID, "skip", cause=missing(obs, "the arguments"))]
        return [_verdict(obs, [found], asserted, "medium")]
    values, findings = _verl(obs.args) if obs.args.framework == "verl" else _slime(obs.args)
    if findings:
        for finding in findings:
            finding.value = values
        return [_verdict(obs, sorted(findings, key=lambda one: one.status != "fail"), asserted, "high")]
    if not values:
        return [Verdict(ID, "skip", cause="the arguments give no batch sizes to compare")]
    cause = f"The batch sizes fit: {', '.join(f'{name} {number}' for name, number in values.items())}."
    return [Verdict(ID, "pass", value=values, evidence=of_flags(obs.args, *values), cause=cause)]


def _verdict(obs: Observations, findings: list[_Finding], asserted: list[LogEvent], sure: Confidence) -> Verdict:
    first = findings[0]
    evidence: tuple[Evidence, ...] = of_flags(obs.args, *dict.fromkeys(f for one in findings for f in one.flags))
    return Verdict(
        ID,
        first.status,
        value=first.value,
        threshold="consistent",
        evidence=evidence + tuple(of_event(event) for event in asserted[:2]),
        cause=" ".join(finding.cause for finding in findings),
        advice=tuple(dict.fromkeys(a for finding in findings for a in finding.advice)),
        confidence=sure,
    )


def _whole(args: Args, name: str) -> int | None:
    value = args.number(name)
    return int(value) if value is not None and value == int(value) else None


def _slime(args: Args) -> tuple[dict[str, object], list[_Finding]]:
    prompts, batch = _whole(args, "rollout_batch_size"), _whole(args, "global_batch_size")
    per_prompt = _whole(args, "n_samples_per_prompt") or 1
    steps, rollouts = _whole(args, "num_steps_per_rollout"), _whole(args, "num_rollout")
    over = _whole(args, "over_sampling_batch_size")
    values: dict[str, object] = {}
    findings: list[_Finding] = []
    advice: tuple[str, ...]
    if prompts is not None and over is not None and over < prompts:
        values["over_sampling_batch_size"] = over
        cause = f"over_sampling_batch_size {over} is less than rollout_batch_size {prompts}: a rollout never fills."
        both = ("over_sampling_batch_size", "rollout_batch_size")
        findings.append(_Finding("fail", cause, (f"--over-sampling-batch-size {prompts}",), both))
    if prompts is None:
        return values, findings
    samples = prompts * per_prompt
    values |= {"rollout_batch_size": prompts, "n_samples_per_prompt": per_prompt, "samples_per_rollout": samples}
    product = f"rollout_batch_size {prompts} x n_samples_per_prompt {per_prompt} = {samples} samples per rollout"
    flags: tuple[str, ...] = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
    if steps:
        values["num_steps_per_rollout"] = steps
        derived = samples // steps
        if derived < 1:
            cause = f"{product}, fewer than num_steps_per_rollout {steps}: a step has no sample."
            findings.append(_Finding("fail", cause, (f"--num-steps-per-rollout {samples}",), (*flags, _STEPS)))
        elif batch is not None and batch != derived:
            values["global_batch_size"] = batch
            cause = (
                f"num_steps_per_rollout {steps} sets global_batch_size to {samples} // {steps} = {derived}, but "
                f"{batch} is given: the two must be equal."
            )
            other = (_prompts_for(batch * steps, per_prompt, prompts),) if batch > 0 else ()
            advice = _either(f"--global-batch-size {derived}", *other)
            findings.append(_Finding("fail", cause, advice, (*flags, _STEPS)))
            batch = derived
        batch = batch or derived or None
    if batch is None:
        return values, findings
    values.setdefault("global_batch_size", batch)
    if batch > samples:
        cause = f"global_batch_size {batch} counts samples and is more than {product}: no step can be filled."
        advice = _either(f"--global-batch-size {samples}", _prompts_for(batch, per_prompt, prompts))
        findings.append(_Finding("fail", cause, advice, flags))
    elif batch > 0 and samples % batch:
        cause = (
            f"{product} is no multiple of global_batch_size {batch}: {samples % batch} samples are never trained on."
        )
        if steps:
            advice = _either(*(f"--num-steps-per-rollout {number}" for number in _divisors_near(samples, steps, 1)))
        else:
            sizes = _divisors_near(samples, batch, _ranks(args))
            fits = (f"--global-batch-size {size}" for size in sizes)
            advice = _either(*fits, _prompts_for(batch, per_prompt, prompts))
        findings.append(_Finding("warn", cause, advice, (*flags, *((_STEPS,) if steps else ()))))
    if rollouts is not None and batch > 0:
        total = rollouts * samples // batch
        values |= {"num_rollout": rollouts, "train_iters": total}
        if total < 1:
            cause = (
                f"train_iters = num_rollout x samples // global_batch_size = {rollouts} x {samples} // {batch} = "
                f"{total}: Megatron's learning-rate schedule has no step (lr_decay_steps > 0 fails)."
            )
            # Where a rollout fills no step, more rollouts do not help.
            more = (f"--num-rollout {math.ceil(batch / samples)}",) if 0 < batch <= samples else ()
            findings.append(_Finding("fail", cause, more, ("num_rollout", *flags)))
    return values, findings


_STEPS = "num_steps_per_rollout"
_MOST_SAMPLES = 10_000_000


def _either(*advice: str) -> tuple[str, ...]:
    """Each of them mends it alone; all of them together do not."""
    return (advice[0], *(f"or {text}" for text in advice[1:]))


def _prompts_for(samples: int, per_prompt: int, prompts: int) -> str:
    """The rollout batch size next to `prompts` whose samples fill batches of `samples`."""
    unit = max(1, math.lcm(samples, per_prompt) // per_prompt)
    return f"--rollout-batch-size {unit * max(1, round(prompts / unit))}"


def _divisors_near(number: int, wanted: int, unit: int) -> tuple[int, ...]:
    """Divisors of `number` just below and just above `wanted`: multiples of `unit`, where there are such."""
    root = math.isqrt(min(number, _MOST_SAMPLES))
    every = {one for low in range(1, root + 1) if number % low == 0 for one in (low, number // low)}
    fit = {one for one in every if one % unit == 0} or every
    below, above = [one for one in fit if one <= wanted], [one for one in fit if one > wanted]
    return tuple([max(below)] if below else []) + tuple([min(above)] if above else [])


def _ranks(args: Args) -> int:
    """Data-parallel ranks of the trainer, which share a batch evenly; 1 where the arguments do not say."""
    nodes = _whole(args, "actor_num_nodes") or 1
    gpus = relax_gpus(args).get("actor", 0) or (_whole(args, "actor_num_gpus_per_node") or 0) * nodes
    if not gpus:
        return 1
    split = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        split *= _whole(args, name) or 1
    return max(1, gpus // max(1, split))


def _verl(args: Args) -> tuple[dict[str, object], list[_Finding]]:
    train = _whole(args, "data.train_batch_size")
    values: dict[str, object] = {"train_batch_size": train} if train is not None else {}
    findings: list[_Finding] = []
    for part, name in ((_ACTOR, "actor"), ("critic.", "critic")):
        mini = _whole(args, f"{part}ppo_mini_batch_size")
        if mini is None:
            continue
        values["ppo_mini_batch_size" if name == "actor" else "critic_mini_batch_size"] = mini
        if train is not None and train < mini:
            findings.append(_prompts(train, mini, part))
        findings += _accumulation(args, part, name, mini, values)
    return values, findings


def no_accumulation(obs: Observations) -> bool:
    """Gradient accumulation is 0 (verl): the loss of the first step is divided by 0."""
    if obs.args.framework != "verl":
        return False
    values, _ = _verl(obs.args)
    return values.get("gradient_accumulation") == 0


def _prompts(train: int, mini: int, part: str) -> _Finding:
    cause = (
        f"data.train_batch_size {train} is less than {part}ppo_mini_batch_size {mini}; both count prompts (the worker "
        "multiplies the mini-batch by n later), so no mini-batch can be filled."
    )
    advice = _either(f"data.train_batch_size={mini}", f"{part}ppo_mini_batch_size={train}")
    return _Finding("fail", cause, advice, ("data.train_batch_size", f"{part}ppo_mini_batch_size"))


def _accumulation(args: Args, part: str, name: str, mini: int, values: dict[str, object]) -> list[_Finding]:
    """Gradient accumulation of verl's worker: mini-batch // micro-batch, per GPU where the layout is known."""
    if args.on(f"{part}use_dynamic_bsz"):
        return []
    flag = f"{part}ppo_micro_batch_size_per_gpu"
    if not args.given(flag):
        flag = f"{part}ppo_micro_batch_size"
    micro = _whole(args, flag)
    if not micro:
        return []
    values["ppo_micro_batch_size_per_gpu" if flag.endswith("gpu") else "ppo_micro_batch_size"] = micro
    shown, count = f"{mini} // {micro}", mini
    world = _data_parallel(args, part)
    if mini // micro and flag.endswith("gpu") and world:
        repeat = _whole(args, "actor_rollout_ref.rollout.n") or 1
        count = mini * repeat // world
        shown = f"({mini} prompts x {repeat} samples // {world} GPUs) // {micro}"
    total = count // micro
    values["gradient_accumulation"] = total
    if total:
        return []
    cause = (
        f"Gradient accumulation of the {name} is {part}ppo_mini_batch_size // micro-batch = {shown} = 0: the loss is "
        "divided by 0, so loss and norm are NaN at the first step without any numeric trouble."
    )
    smallest = micro * (world or 1)
    advice = _either(f"{flag}={max(1, count)}", f"{part}ppo_mini_batch_size={smallest} (or more)")
    return [_Finding("fail", cause, advice, (f"{part}ppo_mini_batch_size", flag, "trainer.n_gpus_per_node"))]


def _data_parallel(args: Args, part: str) -> int | None:
    """GPUs that share a mini-batch; None where the arguments do not say."""
    gpus = _whole(args, "trainer.n_gpus_per_node")
    if gpus is None:
        return None
    world = gpus * (_whole(args, "trainer.nnodes") or 1)
    split = _whole(args, f"{part}ulysses_sequence_parallel_size") or 1
    for name in ("tensor", "pipeline"):
        split *= _whole(args, f"{part}megatron.{name}_model_parallel_size") or 1
    split *= _whole(args, f"{part}megatron.context_parallel_size") or 1
    return max(1, world // split)


def _from_log(asserted: list[LogEvent]) -> _Finding | None:
    """Only the log is there: what its assertion says."""
    for event in asserted:
        if found := _VERL_TEXT.search(event.text):
            train, mini = int(found["train"]), int(found["mini"])
            finding = _prompts(train, mini, _ACTOR)
            finding.value = {"train_batch_size": train, "ppo_mini_batch_size": mini}
            return finding
    if not asserted:
        return None
    text = asserted[0].text
    if "lr_decay_steps" in text:
        cause = (
            "Megatron refuses a learning-rate schedule without a step: train_iters = num_rollout x samples per rollout "
            "// global_batch_size is 0."
        )
        advice: tuple[str, ...] = ("--num-rollout, or a smaller --global-batch-size",)
        return _Finding("fail", cause, advice, (), {"train_iters": 0})
    return _Finding(
        "fail", f"The framework refuses the batch sizes: {asserted[0].text}.", ("correct the flag named",), ()
    )
