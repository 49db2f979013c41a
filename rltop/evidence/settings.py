"""Readers of `args.txt`, `env.txt` and launch scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rltop.checks.found import Document
from rltop.checks.observe import Args
from rltop.evidence.args import parse_args, parse_words
from rltop.evidence.launch_script import is_unread, read_script
from rltop.evidence.pieces import encoding_of, is_binary
from rltop.evidence.sink import Reader, Sink, Source

MOST = 4 * 1024 * 1024
_ENV = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
MASK = "***"
LAUNCH_FLAGS = frozenset(
    {"rollout_batch_size", "global_batch_size", "num_rollout", "prompt_data", "actor_num_gpus_per_node"}
    | {"data.train_batch_size", "actor_rollout_ref.model.path", "advantage_estimator", "algorithm.adv_estimator"}
)
"""Flags that only a training launch has, not the engine's or a converter's."""


def read_text(source: Source, sink: Sink, kind: str) -> str | None:
    """A small text file, in whole; None (and a problem) where it can not be one."""
    try:
        with source.path.open("rb") as file:
            data = file.read(MOST + 1)
    except OSError as error:
        sink.problem(source, kind, f"can not be read: {error.strerror or error}", whole=True)
        return None
    if not data.strip():
        sink.problem(source, kind, "the file is empty", line=1, whole=True)
        return None
    if is_binary(data[:4096]):
        sink.problem(source, kind, "the file is binary", line=1, whole=True)
        return None
    if len(data) > MOST:
        sink.problem(source, kind, "the file is longer than 4 MiB; the rest is not read")
    encoding, mark = encoding_of(data)
    return data[mark:MOST].decode(encoding or "utf-8", "replace")


def without_unread(args: Args) -> tuple[Args, dict[str, str]]:
    """Arguments without the flags whose value only a shell could work out (`${N}`), and those flags as they are
    written: what is not known must not be taken for the default."""
    unread = {name: value for name, value in args.flags.items() if isinstance(value, str) and is_unread(value)}
    kept = {name: value for name, value in args.flags.items() if name not in unread}
    return replace(args, flags=kept), unread


def without_secret(name: str, value: str) -> str:
    """The value of an environment variable, masked where the name says that it is a secret."""
    return MASK if _SECRET.search(name) else value[:4096]


def read_args(source: Source, sink: Sink) -> None:
    """A command line, flags over any number of lines, or the launch script as it is."""
    text = read_text(source, sink, "args")
    if text is None:
        return
    launch = read_script(text, source.name).words
    found = parse_words(((word.text, word.line) for word in launch), source.name)
    found, _ = without_unread(found if found.flags else parse_args(text, source.name))
    if not found.flags and not found.framework:
        sink.problem(source, "args", "there is no flag in it", line=1, whole=True)
        return
    sink.args.append(found)
    sink.files.append(source.name)


def read_launch(source: Source, sink: Sink) -> None:
    """A launch script. One that starts something else (a converter, `ray stop`) is nobody's arguments."""
    try:
        with source.path.open("rb") as file:
            data = file.read(MOST)
    except OSError as error:
        sink.problem(source, "script", f"can not be read: {error.strerror or error}", whole=True)
        return
    if is_binary(data[:4096]):
        return
    words = read_script(data.decode("utf-8", "replace"), source.name, directory=".").words
    found, _ = without_unread(parse_words(((word.text, word.line) for word in words), source.name))
    if launches(found):
        sink.scripts.append(found)


def launches(args: Args) -> bool:
    """The arguments are those of a training launch."""
    return any(name in args.flags for name in LAUNCH_FLAGS)


def with_script(parts: Sequence[Args], scripts: Sequence[Args]) -> tuple[Args, ...]:
    """The arguments that the run left; without them those of its launch script. Several scripts that differ decide
    nothing: which of them was started is not known."""
    if not scripts or any(launches(part) for part in parts):
        return tuple(parts)
    return (scripts[0], *parts) if all(one.flags == scripts[0].flags for one in scripts) else tuple(parts)


def read_env(source: Source, sink: Sink) -> None:
    """`KEY=value` lines. Values of secrets are masked."""
    text = read_text(source, sink, "env")
    if text is None:
        return
    fields: dict[str, object] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := _ENV.match(line.strip()):
            value = found["value"].strip().strip("'\"")
            fields[found["name"]] = without_secret(found["name"], value)
            lines[found["name"]] = number
    if not fields:
        sink.problem(source, "env", "there is no KEY=value line in it", line=1, whole=True)
        return
    sink.documents.append(Document("env", source.name, fields, "", lines))
    sink.files.append(source.name)


READERS: tuple[Reader, ...] = (
    Reader("args", ("args*.txt", "*_args.txt", "cmd*.txt", "command*.txt"), read_args),
    Reader("script", ("*.sh", "*.bash", "*.sbatch", "*.slurm"), read_launch),
    Reader("env", ("env.txt", "env*.txt", "*.env"), read_env),
)
