"""The facts of a launch that has not happened: its arguments, the directories that they name, and the host.

The directories of `--load`, `--ref-load` and their likes are read by the same readers as evidence; only these, and
never their payload. Sources are named as the arguments name them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rltop.checks.found import Document
from rltop.checks.observe import Args, Observations
from rltop.checks.plan import PATHS, PathState
from rltop.evidence import hf, megatron
from rltop.evidence.args import parse_words
from rltop.evidence.collect import observations
from rltop.evidence.host import Host
from rltop.evidence.launch_script import Launch
from rltop.evidence.settings import without_secret, without_unread
from rltop.evidence.sink import Sink, Source

DIRECTORIES = ("hf_checkpoint", "load", "ref_load", "critic_load", "opd_teacher_load", "save", "pretrained_checkpoint")
"""Flags whose value is a checkpoint directory. `save` only says whether it is there."""
ENGINE_PORTS = 15_000
"""slime gives its engines ports from here upward on every node (facts of `rollout.py`)."""
PORTS_PER_ENGINE = 4
"""HTTP, NCCL, and the first of the distributed ports; more where data parallel attention is on."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before a launch."""

    obs: Observations
    launch: Launch
    taken: tuple[tuple[int, str, str], ...] = ()
    """(port, which flag wants it, who listens on it) on this host."""
    versions: tuple[tuple[str, str], ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    """Flags whose value only a shell could work out, as it is written."""


def gather(launch: Launch, host: Host, directory: Path, *, ray_address: str | None = "") -> Facts:
    """Facts of a launch from `directory` (relative paths count from there). `ray_address` None: do not ask Ray."""
    sink = Sink()
    args, unread = without_unread(parse_words(((word.text, word.line) for word in launch.words), launch.source))
    # A directory is shown as it is written; without a state the plan says that it was not looked at.
    sink.args.append(
        replace(args, flags={**args.flags, **{name: unread[name] for name in DIRECTORIES if name in unread}})
    )
    states: dict[str, object] = {}
    for path in _directories(args):
        states[path] = _look(directory, path, sink)
    sink.documents.append(Document(PATHS, launch.source, states))
    if launch.env:
        env = {name: without_secret(name, value) for name, value in launch.env.items()}
        sink.documents.append(Document("env", launch.source, env))
    versions = dict(host.versions())
    sink.documents.append(Document("versions", "this host", versions))
    if ray_address is not None and (snapshot := host.ray(ray_address)):
        sink.ray.append(snapshot)
    wanted = dict(_ports(args))
    taken = tuple((port, wanted[port], who) for port, who in sorted(host.listeners(wanted).items()))
    return Facts(replace(observations(sink), launch=True), launch, taken, tuple(versions.items()), unread)


def _directories(args: Args) -> Iterator[str]:
    yield from dict.fromkeys(args.text(name) for name in DIRECTORIES if args.given(name))


def _look(directory: Path, path: str, sink: Sink) -> PathState:
    """What is at a path; a checkpoint there goes into the sink under the name that the arguments use."""
    place = directory / os.path.expanduser(path)
    try:
        if not place.is_dir():
            return "absent"
        if next(place.iterdir(), None) is None:
            return "empty"
    except OSError:
        return "unreadable"
    source = Source(place, path)
    if megatron.claims(source):
        megatron.read(source, sink)
    elif hf.claims(source):
        hf.read(source, sink)
    return "there"


def _ports(args: Args) -> Iterator[tuple[int, str]]:
    """Ports that the launch will want on this host."""
    for name in args.flags:
        number = args.number(name)
        if name.endswith("_port") and number and number == int(number) and 0 < number < 65_536:
            yield int(number), "--" + name.replace("_", "-")
    if args.given("rollout_num_gpus_per_engine") or args.given("rollout_num_gpus"):
        engines = int(args.number("num_gpus_per_node") or 8) // max(
            1, int(args.number("rollout_num_gpus_per_engine") or 1)
        )
        for port in range(ENGINE_PORTS, ENGINE_PORTS + PORTS_PER_ENGINE * max(1, engines)):
            yield port, "an engine"
