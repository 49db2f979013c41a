"""`args.debug-flags`: split debugging is set up as meant."""

from __future__ import annotations

import string
from collections.abc import Iterable

from rltop.checks.observe import Args, Observations
from rltop.checks.phrase import missing, of_flags
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

ID = "args.debug-flags"
_SAVES = ("save_debug_rollout_data", "save_debug_train_data")
_LOAD = "load_debug_rollout_data"
_FLAGS = (
    "debug_rollout_only",
    "debug_train_only",
    _LOAD,
    *_SAVES,
    "dump_details",
    "load_debug_rollout_data_subsample",
)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per finding; `pass` when there is nothing to say."""
    args = obs.args
    if not args.flags:
        return [Verdict(ID, "skip", cause=missing(obs, "the arguments"))]
    if not any(args.on(name) for name in _FLAGS):
        return [Verdict(ID, "pass", cause="No flag of split debugging is given.")]
    found = [*_contradictions(args), *_paths(args), *_meanings(args)]
    return found or [Verdict(ID, "pass", cause="The flags of split debugging fit.", evidence=of_flags(args, *_FLAGS))]


def _verdict(args: Args, status: Status, cause: str, *flags: str, advice: tuple[str, ...] = ()) -> Verdict:
    value = {name: args.flags[name] for name in flags if name in args.flags}
    return Verdict(
        ID, status, value=value, threshold="consistent", evidence=of_flags(args, *flags), cause=cause, advice=advice
    )


def _contradictions(args: Args) -> list[Verdict]:
    found = []
    if args.on("debug_rollout_only") and (args.on("debug_train_only") or args.given(_LOAD)):
        other = "debug_train_only" if args.on("debug_train_only") else _LOAD
        why = "" if args.on("debug_train_only") else ", which implies --debug-train-only"
        cause = (
            f"--debug-rollout-only (no trainer) and {_flag(other)}{why} (no engines) exclude each other: nothing would "
            "be left to run, and slime asserts it."
        )
        advice = (
            "--debug-rollout-only alone, with --save-debug-rollout-data DIR/{rollout_id}.pt",
            f"or {_flag(other)} alone",
        )
        found.append(_verdict(args, "fail", cause, "debug_rollout_only", other, advice=advice))
    left, right = (args.text(name) for name in _SAVES)
    if left and left == right and not args.on("dump_details"):
        cause = f"--save-debug-train-data and --save-debug-rollout-data both name {left}: one overwrites the other."
        apart = ("--save-debug-train-data DIR/train_data/{rollout_id}.pt",)
        found.append(_verdict(args, "fail", cause, *_SAVES, advice=apart))
    return found


def _paths(args: Args) -> list[Verdict]:
    found = []
    for name in (*_SAVES, _LOAD):
        path = args.text(name)
        if not path or (name in _SAVES and args.on("dump_details")):
            continue
        fields, broken = _placeholders(path)
        allowed = {"rollout_id", "rank"} if name == "save_debug_train_data" else {"rollout_id"}
        stem, dot, end = path.rpartition(".")
        better = f"{stem}_{{rollout_id}}.{end}" if dot and "/" not in end else f"{path}_{{rollout_id}}.pt"
        if broken or fields - allowed:
            odd = ", ".join(sorted(fields - allowed)) or "an open brace"
            cause = f"{_flag(name)} {path} has a placeholder that slime does not fill ({odd}): the first dump raises."
            found.append(_verdict(args, "warn", cause, name, advice=(f"{_flag(name)} with {{rollout_id}} only",)))
        elif "rollout_id" not in fields:
            effect = (
                "every rollout replays the same file" if name == _LOAD else "every rollout overwrites the same file"
            )
            cause = f"{_flag(name)} {path} lacks {{rollout_id}}: {effect}."
            found.append(_verdict(args, "warn", cause, name, advice=(f"{_flag(name)} {better}",)))
        elif name == "save_debug_train_data" and args.framework == "relax" and "rank" not in fields:
            cause = (
                f"{_flag(name)} {path} lacks {{rank}}: in Relax every trainer rank writes this file, over the others'."
            )
            better = path.replace("{rollout_id", "{rank}_{rollout_id", 1)
            found.append(_verdict(args, "warn", cause, name, advice=(f"{_flag(name)} {better}",)))
    return found


def _placeholders(path: str) -> tuple[set[str], bool]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(path) if name is not None}, False
    except ValueError:
        return set(), True


def _meanings(args: Args) -> list[Verdict]:
    """What the flags imply; worth knowing, nothing to do."""
    found = []
    if args.given(_LOAD) and not args.on("debug_rollout_only"):
        cause = f"{_flag(_LOAD)} implies --debug-train-only: no SGLang server and no router are started."
        found.append(_verdict(args, "info", cause, _LOAD))
    if args.on("debug_rollout_only") and not args.on("debug_train_only") and not args.given(_LOAD):
        gpus = args.text("rollout_num_gpus") or "rollout_num_gpus"
        cause = (
            f"--debug-rollout-only turns colocate and offload off and sizes the job by {gpus} rollout GPUs, so its "
            "pass does not clear the second step of a colocated run."
        )
        found.append(_verdict(args, "info", cause, "debug_rollout_only", "colocate", "rollout_num_gpus"))
    if args.on("dump_details"):
        folder = args.text("dump_details").rstrip("/")
        train = "{rollout_id}_{rank}.pt" if args.framework == "relax" else "{rollout_id}.pt"
        cause = (
            f"--dump-details sets the dumps to {folder}/rollout_data/{{rollout_id}}.pt (evaluations with the prefix "
            f"eval_) and {folder}/train_data/{train}, whatever --save-debug-* say."
        )
        found.append(_verdict(args, "info", cause, "dump_details", *_SAVES))
    if args.given("load_debug_rollout_data_subsample"):
        share = args.text("load_debug_rollout_data_subsample")
        cause = f"--load-debug-rollout-data-subsample {share} shrinks the replay: the first and last samples only."
        found.append(_verdict(args, "info", cause, "load_debug_rollout_data_subsample"))
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
