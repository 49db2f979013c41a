"""Whether a planted fault can act in this run. One that cannot is refused: a rehearsal that plants nothing would show
checks that stay green, and nobody would know why.

Each entry of the catalogue (`rltop.train.inject`) needs something: a side of the run, a reference model, a sync before
rollout 0, offloading, a second layer or pipeline stage, an engine that can have it, and a rollout that comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.train.arguments import TrainConfig
    from rltop.train.inject import Fault

_CPU_BACKUP = "--enable-weights-cpu-backup"
"""SGLang's: the weights come back by themselves when the memory does."""
_SIDES = {
    "reference": ("rollout-only", "has no trainer"),
    "gradient": ("rollout-only", "has no trainer"),
    "loss": ("rollout-only", "has no trainer"),
    "prompt": ("train-only", "makes no prompt: its samples are loaded"),
}
"""Where a fault acts -> the mode in which that does not exist, and why; the faults of sync and swap need both sides."""
_START = -1
"""`rltop.train.inject.START`, which needs torch to be imported."""


def check_faults(config: TrainConfig) -> None:
    """Raise RltopError for the first planted fault for which the arguments leave no place."""
    if not config.inject:
        return
    from rltop.train.inject import parse_fault  # needs torch, which a plain mistake must not wait for

    for fault in [parse_fault(text) for text in config.inject]:
        for refused in (_side(config, fault), _place(config, fault), _engine(config, fault), _time(config, fault)):
            if refused is not None:
                raise refused


def check_faults_of_start(config: TrainConfig, first: int | None, layers: int) -> None:
    """Raise RltopError for the first planted fault for which the start of the run leaves no place.

    first: the first rollout of a run that resumes; None: it does not. layers: of the model; 0: not known.
    """
    if not config.inject:
        return
    from rltop.train.inject import parse_fault

    for fault in [parse_fault(text) for text in config.inject]:
        if fault.name == "swap-layers" and layers == 1:
            raise _refused(fault, "a fault of two layers without a second one", "the model has one layer")
        if first is None or fault.kind.lasting:
            continue
        # The sync after the last saved rollout is repeated at the start of a run that resumes.
        earliest = first - 1 if fault.kind.where == "sync" and fault.name != "stale-tensor" else first
        if fault.rollout < earliest:
            when = "the sync before rollout 0" if fault.at_start else f"rollout {fault.rollout}"
            raise _refused(
                fault,
                "a fault of a rollout that is over",
                f"it acts in {when}, and --load {config.load} goes on with rollout {first}",
                f"--inject {fault.name}@{first}",
            )


def _side(config: TrainConfig, fault: Fault) -> RltopError | None:
    """The side of the run that the fault is planted in must exist."""
    where, mode = fault.kind.where, config.mode
    if where in ("sync", "swap"):
        if mode == "full":
            return None
        lacks = "has no trainer: nothing is pushed" if mode == "rollout-only" else "has no engine: nothing is pushed"
        what = "a fault of a sync that does not happen" if where == "sync" else "a fault of a swap that does not happen"
        return _refused(fault, what, f"a {mode} run {lacks}", f"leave out --debug-{mode} or the fault")
    lacking, why = _SIDES[where]
    if mode == lacking:
        return _refused(fault, "a fault of a side that does not run", f"a {mode} run {why}")
    return None


def _place(config: TrainConfig, fault: Fault) -> RltopError | None:
    """What of its side the fault breaks must exist."""
    match fault.name:
        case "ref-perturb" if not config.use_kl_loss:
            why = "without --use-kl-loss the reference model never runs"
            return _refused(fault, "a fault of a reference model that does not run", why, "--use-kl-loss")
        case "no-template" if not config.apply_chat_template:
            why = "without --apply-chat-template prompts have none"
            return _refused(fault, "a fault of a chat template that is not used", why, "--apply-chat-template")
        case "pp-layer-ids" if config.pipeline_model_parallel_size == 1:
            why = "--pipeline-model-parallel-size is 1"
            do = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2"
            return _refused(fault, "a fault of the second pipeline stage without one", why, do)
    if fault.at_start and not config.check_weight_update_equal:
        why = "weights are only pushed before rollout 0 with --check-weight-update-equal"
        do = f"--check-weight-update-equal, or --inject {fault.name}@0"
        return _refused(fault, "a fault of a sync that does not happen", why, do)
    if fault.kind.where == "swap" and not config.offloads_rollout:
        why = "the engines keep their memory while the trainer works: no release, no resume"
        return _refused(fault, "a fault of a swap that does not happen", why, "--colocate, or --offload-rollout")
    return None


def _engine(config: TrainConfig, fault: Fault) -> RltopError | None:
    """The kind of engine must be able to have the fault."""
    if fault.name == "lost-rotary" and config.engine != "cpu":
        why = f"--engine is {config.engine}, and no call makes SGLang lose a buffer"
        return _refused(fault, "a fault that only the CPU engine can have", why, "--engine cpu")
    if fault.name == "no-update-after-resume" and _CPU_BACKUP in config.sglang_args:
        why = f"--sglang-{_CPU_BACKUP.removeprefix('--')}: the weights come back with their memory, no update is needed"
        return _refused(fault, "a fault that these engines do not have", why, "leave out one of the two")
    return None


def _time(config: TrainConfig, fault: Fault) -> RltopError | None:
    """The rollout that the fault waits for must come, and something must come after it that shows it."""
    last = config.num_rollout - 1
    if fault.rollout > last:
        why = f"it acts in rollout {fault.rollout}, and --num-rollout {config.num_rollout} ends with rollout {last}"
        return _refused(fault, "a fault of a rollout that does not come", why, _later(fault, last))
    if fault.name == "no-update-after-resume" and fault.rollout == last and not config.evaluates_after(last):
        why = f"it acts after rollout {last}, the last one: nobody asks the engine after that"
        return _refused(fault, "a fault that nothing meets", why, f"--num-rollout {last + 2}")
    first_push = 0 if not config.check_weight_update_equal else _START
    if fault.name == "stale-tensor" and fault.rollout == first_push:
        why = "it is pushed as it was in the push before, and there is none before the first"
        do = "--inject stale-tensor@1, or --check-weight-update-equal, which pushes before rollout 0 too"
        return _refused(fault, "a fault of a second push in the first one", why, do)
    return None


def _later(fault: Fault, last: int) -> str:
    return f"--num-rollout {fault.rollout + 1}, or --inject {fault.name}@{last}"


def _refused(fault: Fault, what: str, why: str, do: str = "") -> RltopError:
    given = fault.name if fault.rollout == fault.kind.default_rollout else str(fault)
    return RltopError(what, where=f"--inject {given}", why=why, do=do)
