"""Weights from the trainer to the engines, and the proof that they arrived.

A sync is: bring the tensors (a checkpoint directory on disk, or by value over HTTP), ask the engine for its version and
its checksums, compare these with the trainer's own tensors. What is pushed and what the trainer holds are two different
arguments on purpose: a fault in the push must show up in the comparison.

Engines are served side by side. One that refuses, or goes away in the middle, is in the report with its reason and
keeps nobody else from the weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rltop.engines.client import EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.weights import checksum_differences, digest_tensors, overall_digest
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
    directory: Path | None,
    planted: bool,
) -> SyncReport:
    """Bring `pushed` to every engine as `version`, then compare what each holds with `held`.

    directory: the published version, for the disk transport. planted: a fault was planted in what is pushed. An engine
    that refuses, or does not answer, is in the report, not an exception.
    """

    def bring(client: EngineClient) -> EngineRefused | EngineUnreachable | None:
        try:
            if directory is not None:
                client.update_weights_from_disk(directory, version)
            else:
                client.update_weights_from_tensor(named(pushed), version)
        except (EngineRefused, EngineUnreachable) as error:
            return error
        return None

    with _side_by_side(engines) as pool:
        answers = dict(zip(engines, pool.map(bring, engines.values()), strict=True))
    failed = {name: error for name, error in answers.items() if error is not None}
    report = compare(
        lambda: named(held), version=version, transport=transport, engines=engines, failed=failed, planted=planted
    )
    return dataclasses.replace(report, layers=layer_ids(pushed))


def compare(
    held: Callable[[], Named],
    *,
    version: str,
    transport: str,
    engines: Engines,
    failed: Mapping[str, EngineRefused | EngineUnreachable] | None = None,
    planted: bool = False,
) -> SyncReport:
    """Ask every engine what it holds. `failed`: engines whose update failed already, and why."""
    digest, failed = digest_of(held()), failed or {}

    def look(name: str) -> EngineReply:
        client, error, found = engines[name], failed.get(name), ""
        if not isinstance(error, EngineUnreachable):  # else it would cost another time-out
            try:
                found = client.weight_version()
                if error is None:
                    return _looked_at(client, held, found, digest)
            except (EngineUnreachable, EngineRefused) as now:
                error = error or now
        gone = isinstance(error, EngineUnreachable)
        why = f"{error.what}: {error.why}" if gone else error.why
        return EngineReply(ok=False, version=found, message=why, gone=gone)

    with _side_by_side(engines) as pool:
        replies = dict(zip(engines, pool.map(look, engines), strict=True))
    return SyncReport(version=version, digest=digest, transport=transport, engines=replies, planted=planted)


def _side_by_side(engines: Engines) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="sync")


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
