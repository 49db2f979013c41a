"""Weights from the trainer to the engines, and the proof that they arrived.

A sync is: bring the tensors (a checkpoint directory on disk, or by value over HTTP), ask the engine for its version and
its checksums, compare these with the trainer's own tensors. What is pushed and what the trainer holds are two different
arguments on purpose: a fault in the push must show up in the comparison.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltop.engines.client import EngineClient, EngineRefused
from rltop.engines.weights import checksum_differences, digest_tensors, overall_digest, publish
from rltop.train.arguments import Transport
from rltop.train.ports import EngineReply, SyncReport

if TYPE_CHECKING:
    from torch import Tensor

Engines = Mapping[str, EngineClient]
"""Engine id -> its client. Clients live as long as the run: making one costs more than a sync of a tiny model."""
Named = Iterable[tuple[str, "Tensor"]]
Stages = Sequence[Mapping[str, "Tensor"]]
"""The whole model by Hugging Face name, one mapping per pipeline stage of the trainer."""
_NAMES_SHOWN = 3


def digest_of(named: Named) -> str:
    """One digest over all tensors, under their Hugging Face names."""
    return overall_digest(digest_tensors(named))


def named(stages: Stages) -> Iterable[tuple[str, Tensor]]:
    """All tensors in the order of the stages. A name that two stages have comes twice."""
    return (item for stage in stages for item in stage.items())


def layer_ids(stages: Stages) -> tuple[tuple[int, ...], ...]:
    """The layer numbers in the names of every stage, ascending."""
    layer = re.compile(r"model\.layers\.(\d+)\.")
    return tuple(tuple(sorted({int(found[1]) for name in stage if (found := layer.match(name))})) for stage in stages)


def push(
    pushed: Stages,
    held: Stages,
    *,
    version: str,
    transport: Transport,
    engines: Engines,
    directory: Path,
    checkpoint: Path,
    planted: bool,
) -> SyncReport:
    """Bring `pushed` to every engine as `version`, then compare what each holds with `held`.

    directory: where the disk transport publishes versions. checkpoint: whose configuration files they carry.
    planted: a fault was planted in what is pushed. An engine that refuses is in the report, not an exception; one that
    does not answer raises `EngineUnreachable`.
    """
    path = publish(directory, int(version), named(pushed), checkpoint=checkpoint) if transport == "disk" else None
    refused: dict[str, str] = {}
    for name, client in engines.items():
        try:
            if path is not None:
                client.update_weights_from_disk(path, version)
            else:
                client.update_weights_from_tensor(named(pushed), version)
        except EngineRefused as error:
            refused[name] = error.why
    report = compare(
        lambda: named(held), version=version, transport=transport, engines=engines, refused=refused, planted=planted
    )
    return dataclasses.replace(report, layers=layer_ids(pushed))


def compare(
    held: Callable[[], Named],
    *,
    version: str,
    transport: str,
    engines: Engines,
    refused: dict[str, str] | None = None,
    planted: bool = False,
) -> SyncReport:
    """Ask every engine what it holds. `refused`: engines that already said no, with their words."""
    digest = digest_of(held())
    replies: dict[str, EngineReply] = {}
    for name, client in engines.items():
        found = client.weight_version()
        if refused and name in refused:
            replies[name] = EngineReply(ok=False, version=found, message=refused[name])
        else:
            replies[name] = _looked_at(client, held, found, digest)
    return SyncReport(version=version, digest=digest, transport=transport, engines=replies, planted=planted)


def _looked_at(client: EngineClient, held: Callable[[], Named], version: str, digest: str) -> EngineReply:
    try:
        answer = client.weights_checker("checksum")
    except EngineRefused as error:
        return EngineReply(ok=True, version=version, message=f"no checksum: {error.message}")
    ranks = answer.get("ranks") or []
    if len(ranks) != 1:
        return EngineReply(
            ok=True, version=version, message=f"{len(ranks)} ranks: not comparable with one trainer rank"
        )
    differences = checksum_differences(held(), answer)
    if not differences:
        return EngineReply(ok=True, version=version, digest=digest, same=True)
    shown = ", ".join(differences[:_NAMES_SHOWN]) + (", …" if len(differences) > _NAMES_SHOWN else "")
    return EngineReply(
        ok=True,
        version=version,
        message=f"{len(differences)} tensors differ: {shown}",
        digest=overall_digest(ranks[0]["checksums"]),
        same=False,
    )
