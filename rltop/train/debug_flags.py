"""Flags that debug rollout and training apart: what excludes what, and paths that are one per rollout.

The names and meanings are slime's. Where slime goes on with something else than was asked for (dump paths that
--dump-details replaces, a file that every rollout overwrites, a subsample of nothing that keeps everything), this
refuses with the flag to give instead; `docs/debug.md` lists the differences.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.train.arguments import TrainConfig

ROLLOUT = frozenset({"rollout_id"})
TRAIN = frozenset({"rollout_id", "rank"})
STEP = frozenset({"rollout_id", "step_id", "role"})
"""Placeholders of a path, by what is written there."""


def check_modes(config: TrainConfig) -> None:
    """Raise RltopError for the first flag that contradicts the mode of the run, or another one."""
    _check_sides(config)
    _check_saves(config)
    _check_subsample(config)
    _check_evaluation(config)
    _check_grad_norms(config)


def _check_sides(config: TrainConfig) -> None:
    if config.debug_rollout_only and (config.debug_train_only or config.load_debug_rollout_data is not None):
        other = "--debug-train-only" if config.debug_train_only else "--load-debug-rollout-data"
        raise RltopError(
            "two modes at once",
            where=f"--debug-rollout-only {other}",
            why=f"--debug-rollout-only runs no trainer and {other} no engine: nothing would be left",
            do="one after the other: --debug-rollout-only --save-debug-rollout-data 'DIR/{rollout_id}.pt', "
            "then --load-debug-rollout-data 'DIR/{rollout_id}.pt'",
        )
    if config.debug_train_only and config.load_debug_rollout_data is None:
        raise RltopError(
            "nothing to train on",
            where="--debug-train-only",
            why="without engines the samples must come from a file",
            do="--load-debug-rollout-data 'DIR/{rollout_id}.pt'",
        )
    if config.debug_rollout_only and config.cold_start_steps:
        raise RltopError(
            "a cold start without a trainer",
            where=f"--cold-start-steps {config.cold_start_steps}",
            why="--debug-rollout-only runs no trainer, the engines serve --hf-checkpoint as it is",
            do="--hf-checkpoint DIR/initial of a run with --save-dir DIR: its weights after the cold start",
        )
    if config.load_debug_rollout_data is not None:
        check_path("--load-debug-rollout-data", config.load_debug_rollout_data, ROLLOUT, one_file=True)


def _check_saves(config: TrainConfig) -> None:
    saves = (
        ("--save-debug-rollout-data", config.save_debug_rollout_data, "rollout_data", "train-only", ROLLOUT),
        ("--save-debug-train-data", config.save_debug_train_data, "train_data", "rollout-only", TRAIN),
    )
    for flag, path, folder, never, names in saves:
        if path is None:
            continue
        if config.dump_details is not None:
            raise RltopError(
                "two paths for one dump",
                where=f"{flag} {path}",
                why=f"--dump-details {config.dump_details} puts it into {config.dump_details}/{folder} (slime would "
                "overwrite the other path without a word)",
                do=f"leave out {flag} or --dump-details",
            )
        if config.mode == never:
            what = "generates no rollout" if never == "train-only" else "trains on none"
            raise RltopError("a dump of what does not happen", where=f"{flag} {path}", why=f"a {never} run {what}")
        check_path(flag, path, names)
    one, other = config.save_debug_rollout_data, config.save_debug_train_data
    if one is not None and other is not None:
        path = one.format(rollout_id=0)
        if path == other.format(rollout_id=0, rank=0):
            raise RltopError(
                "two dumps in one file",
                where=f"--save-debug-train-data {other}",
                why=f"--save-debug-rollout-data {one} is {path} too: one would overwrite the other",
                do="--save-debug-train-data 'DIR/train_data/{rollout_id}.pt'",
            )


def _check_subsample(config: TrainConfig) -> None:
    share = config.load_debug_rollout_data_subsample
    if share is None:
        return
    where = f"--load-debug-rollout-data-subsample {share}"
    if config.load_debug_rollout_data is None:
        raise RltopError(
            "a share of nothing", where=where, why="no samples are loaded", do="--load-debug-rollout-data 'PATH'"
        )
    if not 0 < share <= 1:
        raise RltopError("not a share of the samples", where=where, why="it must be above 0 and at most 1")


def _check_evaluation(config: TrainConfig) -> None:
    if config.eval_interval is not None:
        return
    for flag, given in (
        ("--n-samples-per-eval-prompt", config.n_samples_per_eval_prompt != 1),
        ("--skip-eval-before-train", config.skip_eval_before_train),
    ):
        if given:
            raise RltopError(
                "a setting of evaluations without one",
                where=flag,
                why="without --eval-interval nothing is evaluated",
                do="--eval-interval N",
            )


def _check_grad_norms(config: TrainConfig) -> None:
    paths = (("--ci-save-grad-norm", config.ci_save_grad_norm), ("--ci-load-grad-norm", config.ci_load_grad_norm))
    for flag, path in paths:
        if path is None:
            continue
        if config.mode == "rollout-only":
            raise RltopError("a grad_norm of no step", where=f"{flag} {path}", why="a rollout-only run trains nothing")
        check_path(flag, path, STEP)
        if config.steps_per_rollout > 1 and "{step_id" not in path:
            raise RltopError(
                "one path for several steps",
                where=f"{flag} {path}",
                why=f"a rollout has {config.steps_per_rollout} steps: each would overwrite the one before",
                do=f"{flag} 'DIR/{{rollout_id}}_{{step_id}}.pt'",
            )
    if all(path is not None for _, path in paths):
        raise RltopError(
            "saving and loading at once",
            where="--ci-load-grad-norm",
            why="--ci-save-grad-norm is given too (slime would save and compare nothing)",
            do="first a run with --ci-save-grad-norm, then one with --ci-load-grad-norm",
        )


def check_path(flag: str, path: str, names: Collection[str], *, one_file: bool = False) -> None:
    """Raise RltopError unless only `names` stand in the path, and it is another one for every rollout.

    one_file: it may be the same for every rollout.
    """
    values = dict.fromkeys(names, 0)
    try:
        first, second = (path.format(**(values | {"rollout_id": at})) for at in range(2))
        same = "" if one_file else "it is the same for every rollout: each would overwrite the one before"
        why = same if first == second else ""
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        listed = ", ".join(f"{{{name}}}" for name in sorted(names))
        why = f"only {listed} can stand in it ({type(error).__name__}: {error})"
    if why:
        raise RltopError("not a path for dumps", where=f"{flag} {path}", why=why, do=f"{flag} 'DIR/{{rollout_id}}.pt'")
