"""`rltop doctor`: judges a launch that has not happened. It reads arguments and checkpoints, asks the host, and edits
nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rltop.checks.catalogue import LAUNCH
from rltop.checks.evaluate import assemble, evaluate
from rltop.checks.layout import wrap
from rltop.checks.plan import OwnTrainer, Step, launch_plan
from rltop.checks.render import render, render_folded
from rltop.checks.thresholds import DEFAULTS
from rltop.checks.verdict import Report, Verdict
from rltop.cli.check import read_thresholds
from rltop.cli.files import unreadable
from rltop.cli.output import note, print_json
from rltop.cli.own_trainer import refusal
from rltop.errors import RltopError
from rltop.evidence.host import Host, ThisHost
from rltop.evidence.launch import Facts, gather
from rltop.evidence.launch_script import Launch, from_argv, is_unread, program_of, read_script
from rltop.evidence.patches import ignore_patches
from rltop.evidence.shell import Word

MOST_BYTES = 4 << 20
_GIVE = "rltop doctor FILE (a launch script, flags, a config.toml), or rltop doctor -- python train.py …"
_LABEL = 10


def doctor(
    words: Sequence[str],
    *,
    as_json: bool = False,
    ray_address: str | None = "",
    patch_only: bool = False,
    config: Path | None = None,
    refs: bool = False,
    whole: bool = False,
    host: Host | None = None,
) -> int:
    """Gathers, judges, prints. 0: nothing stops this launch; 1: a check failed, the plan cannot work, a port is taken.

    Raises RltopError (exit 2): nothing given, a file that can not be read, nothing in it that starts a run.
    """
    thresholds = read_thresholds(config) if config is not None else DEFAULTS
    launch, directory = read_launch(words)
    facts = gather(launch, host or ThisHost(), directory, ray_address=ray_address)
    report = judged(evaluate(facts.obs, thresholds), facts)
    plan = launch_plan(facts.obs, _own(launch, facts, directory))
    plan = (*plan, *_refused(launch, plan))
    stops = [_short(step) for step in plan if step.fatal] + [f"port {port} is taken" for port, _, _ in facts.taken]
    failed = 1 if report.summary.get("fail") or stops else 0
    patch = "".join(ignore_patches(facts.obs, directory))
    if patch_only:
        sys.stdout.write(patch)
        if not patch:
            note("rltop doctor: there is no quantisation list to correct")
        failed = 0
    elif as_json:
        print_json({**document(facts, plan, report), "patch": patch})
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        print("\n".join(_told(facts, plan, width)))
        calm = {"nothing": "No check finds anything, but this launch cannot work."} if stops else {}
        folded = render_folded(report, width=width, command="rltop doctor --all", **calm)
        print(render(report, width=width, refs=refs) if whole or refs else folded)
        if stops:
            print("\n".join(["", *_row("stop", f"this launch cannot work: {'; '.join(stops)}", width, warn=True)]))
        if patch:
            print(f"\nthe list of quant.map, corrected (rltop doctor --patch … | patch -p0):\n\n{patch}", end="")
    sys.stdout.flush()
    return failed


NEEDS: Mapping[str, tuple[str, ...]] = {
    "args.batch": (
        *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout", "num_rollout"),
        *("over_sampling_batch_size", "micro_batch_size"),
    ),
    "args.token-budget": (
        *("use_dynamic_batch_size", "max_tokens_per_gpu", "rollout_max_response_len", "context_parallel_size"),
    ),
    "args.kernels": ("attention_backend", "context_parallel_size", "num_experts"),
    "args.debug-flags": ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data", "dump_details"),
    "cluster.placement": (
        *("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
        *("num_gpus_per_node",),
    ),
    "ckpt.resume": ("load", "ref_load", "ckpt_step", "ref_ckpt_step"),
    "rollout.stop-set": ("hf_checkpoint", "rollout_stop_token_ids", "rollout_stop"),
}
"""Flags that decide a check: with one of them unread it is not judged."""


def judged(report: Report, facts: Facts) -> Report:
    """Of a report what can be judged before a launch, with the values that are known."""
    found = []
    for verdict in report.verdicts:
        if verdict.id not in LAUNCH:
            continue
        unread = [name for name in NEEDS.get(verdict.id, ()) if name in facts.unread]
        if unread and verdict.status != "skip":
            told = ", ".join(f"--{name.replace('_', '-')} {facts.unread[name]}" for name in unread)
            verdict = Verdict(verdict.id, "skip", cause=f"only a shell knows {told}", refs=verdict.refs)
        found.append(verdict)
    return assemble(found)


def read_launch(words: Sequence[str]) -> tuple[Launch, Path]:
    """The launch, and the directory from which its relative paths count.

    Raises RltopError (exit 2) as `doctor`.
    """
    if not words:
        raise RltopError(
            "what is to be launched?",
            where="rltop doctor",
            do=_GIVE,
        )
    path = Path(words[0])
    if words[0] == "-":
        raise RltopError(
            "standard input is not read", where="rltop doctor -", do="give the file, or the command behind --"
        )
    if len(words) > 1 and not words[0].startswith("-") and path.is_file() and not _starts_program(words):
        raise RltopError(
            "one launch at a time", where=" ".join(words[:3]), do="rltop doctor FILE, or a command behind --"
        )
    if len(words) > 1 or words[0].startswith("-") or not path.exists():
        if len(words) == 1 and not words[0].startswith("-"):
            raise RltopError("there is no such file", where=words[0], do="a command goes behind --")
        launch = from_argv(words)
        if not any(word.text.startswith("-") or "=" in word.text for word in launch.words):
            raise RltopError(
                "it starts no run that rltop understands",
                where=" ".join(words[:4]),
                why="there is no flag in it",
                do="rltop doctor FILE, or rltop doctor -- python train.py …",
            )
        return launch, Path.cwd()
    text = _text(path)
    if path.suffix == ".toml":
        return _config(text, path), Path.cwd()
    launch = read_script(text, str(path), os.environ, directory=str(path.parent), load=_load)
    if not launch.words:
        from rltop.evidence.args import words_of

        flags = tuple(Word(word, line) for word, line in words_of(text))
        launch = Launch(str(path), flags)
    if not any(word.text.startswith("-") or "=" in word.text for word in launch.words):
        raise RltopError(
            "it starts no run that rltop understands",
            where=str(path),
            why="there is no `python …` with flags in it, and it is no list of flags",
            do="give the command itself: rltop doctor -- python train.py …",
        )
    return launch, Path.cwd()


def _starts_program(words: Sequence[str]) -> bool:
    return bool(program_of([Word(word, 1) for word in words[:1]]))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RltopError("is too long for a launch script", where=str(path), why="it has more than 4 MiB")
        return data.decode("utf-8")
    except OSError as error:
        raise RltopError("can not be read", where=str(path), why=unreadable(error), do=_GIVE) from None
    except UnicodeDecodeError as error:
        raise RltopError("is no text", where=str(path), why=str(error), do=_GIVE) from None


def _load(path: str) -> str | None:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return None


def _own(launch: Launch, facts: Facts, directory: Path) -> OwnTrainer | None:
    """What only `rltop train` has, where that is what is launched."""
    if _own_flags(launch) is None:
        return None
    load = facts.obs.args.text("load")
    kept = directory / load / "reference" if load else None
    return OwnTrainer(f"{load.rstrip('/')}/reference" if load and kept is not None and kept.is_dir() else "")


def _refused(launch: Launch, plan: Sequence[Step]) -> Iterator[Step]:
    """What `rltop train` would say before its start, where it is what is launched, all is known, and nothing fatal
    is said yet."""
    flags = _own_flags(launch)
    if (
        flags is None
        or any(step.fatal for step in plan)
        or any(word.unread or is_unread(word.text) for word in launch.words)
    ):
        return
    if {"-h", "--help"} & {word.text for word in flags}:
        return
    lines = {word.text.partition("=")[0]: word.line for word in flags if word.text.startswith("--")}
    in_file = launch.source != "command line"
    environ = {**os.environ, **launch.env}
    error = refusal([word.text for word in flags], lines if in_file else {}, launch.source, environ, touch=False)
    if error is not None:
        text = f"rltop train refuses this: {error.where}: {error.what}" if error.where else error.what
        told = "; ".join(part for part in (text, error.why, error.do) if part)
        yield Step("refused", " ".join(told.split()), warn=True, fatal=True)


def _short(step: Step) -> str:
    """Of a step that is shown in full: why the launch cannot work."""
    return step.text.partition("; ")[0] if step.topic == "refused" else step.text


def _own_flags(launch: Launch) -> Sequence[Word] | None:
    """What stands behind `rltop train`; None: something else is launched."""
    for at, (program, command) in enumerate(itertools.pairwise(word.text for word in launch.words)):
        if (Path(program).name, command) == ("rltop", "train"):
            return launch.words[at + 2 :]
    return None


def _config(text: str, path: Path) -> Launch:
    """The trainer of a config of `rltop up`."""
    from rltop.config import parse_up
    from rltop.train.arguments import TrainConfig
    from rltop.train.flags import flag_names, negated_names

    config = parse_up(text, where=str(path), trainer_flags=[*flag_names(TrainConfig), *negated_names(TrainConfig)])
    words = config.command or ("rltop", "train", *config.flags)
    at = config.lines.get("command", 1)
    found: list[Word] = []
    for word in words:
        at = config.lines.get(word.partition("=")[0], at)
        found.append(Word(word, at))
    return Launch(str(path), tuple(found), config.env)


def document(facts: Facts, plan: Sequence[Step], report: Report) -> dict[str, Any]:
    """The JSON of `--json`, without its schema."""
    verdicts: dict[str, Any] = msgspec.to_builtins(report)
    return {
        "source": facts.launch.source,
        "command": facts.launch.text,
        "plan": [step._asdict() for step in plan],
        "ports": [{"port": port, "wanted_by": flag, "taken_by": who} for port, flag, who in facts.taken],
        "versions": dict(facts.versions),
        "unresolved": list(facts.launch.unresolved),
        **{key: value for key, value in verdicts.items() if key != "schema"},
    }


def _told(facts: Facts, plan: Sequence[Step], width: int) -> Iterator[str]:
    """What is judged, plan and host, for people; ends with an empty line."""
    launch = facts.launch
    place = f"{launch.source}:{launch.line}: " if launch.line and launch.source != "command line" else ""
    words = " ".join(word.text for word in launch.words[:4])
    yield from _row("judged", f"{place}{words} … ({len(facts.obs.args.flags) + len(facts.unread)} flags)", width)
    for step in plan:
        yield from _row(step.topic, step.text, width, warn=step.warn)
    for port, flag, who in facts.taken:
        yield from _row("port", f"{port}, wanted by {flag}, is taken on this host by {who}", width, warn=True)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions)
    yield from _row("host", versions, width)
    if not facts.obs.ray:
        yield from _row("cluster", "no Ray cluster was asked; placement is judged without one", width)
    for text in facts.launch.unresolved:
        yield from _row("unread", f"{' '.join(text.split())} (only a shell can work it out)", width)
    yield ""


def _row(label: str, text: str, width: int, *, warn: bool = False) -> list[str]:
    mark = "! " if warn else "  "
    return wrap(text, f"{label:<{_LABEL}}{mark}", max(width, 40))
