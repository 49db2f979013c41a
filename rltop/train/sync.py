"""Weights from the trainer to the engines, and the proof that they arrived.

A sync is: bring the tensors (a checkpoint directory on disk, or by value over HTTP), ask the engine for its version and
its checksums, compare these with the trainer's own tensors. What is pushed and what the trainer holds are two different
arguments on purpose: a fault in the push must show up in the comparison. Every tensor that differs is named, with what
stands there instead (`weight_findings`).

Engines are served side by side. One that refuses, or goes away in the middle, is in the report with its reason and
keeps nobody else from the weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rltop.engines.client import EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.engine_layout import Shapes, Shard, is_fused
from rltop.engines.ranks import ranks_of
from rltop.engines.raw_tensors import Raw, raw_of, sha_digest
from rltop.engines.weight_findings import (
    Before,
    Expected,
    Finding,
    classify,
    classify_values,
    in_order,
    told,
)
from rltop.engines.weights import digest_tensors, expected_of, overall_digest
from rltop.train.arguments import Transport
from rltop.train.ports import MOST_FINDINGS, EngineReply, SyncReport

if TYPE_CHECKING:
    from torch import Tensor

Engines = Mapping[str, EngineClient]
"""Engine id -> its client. Clients live as long as the run: making one costs more than a sync of a tiny model."""
Named = Iterable[tuple[str, "Tensor"]]
Stages = Sequence[Mapping[str, "Tensor"]]
"""The whole model by Hugging Face name, one mapping per pipeline stage of the trainer."""
Failure = EngineRefused | EngineUnreachable


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


# ---------------------------------------------------------------------- what should be there

_Layout = tuple[bool, Shard]
"""SGLang's names or the checkpoint's, and which tensor parallel rank."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the sync before this one brought: an engine may still hold it."""

    version: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face name -> digest."""
    by_layout: Mapping[_Layout, Mapping[str, str]] = field(default_factory=dict)
    """The same under the engines' names."""

    def before(self, layout: _Layout) -> list[Before]:
        """For `classify`; nothing before the first sync."""
        found = self.by_layout.get(layout)
        return [Before(f"version {self.version!r}", found)] if found else []


class Truth:
    """The trainer's tensors, and the digests that follow from them. Each is worked out once, whoever asks."""

    def __init__(self, held: Stages, *, kv_heads: int = 1) -> None:
        self.tensors = dict(named(held))
        self.digests = digest_tensors(self.tensors.items())
        self.kv_heads = kv_heads
        self._expected: dict[_Layout, Expected] = {}

    @property
    def digest(self) -> str:
        """Over all tensors, under their Hugging Face names."""
        return overall_digest(self.digests)

    def expected(self, layout: _Layout, held: Mapping[str, str]) -> Expected:
        """What an engine rank of this layout should hold. held: its digests, which show how it hashes and rounds."""
        if layout not in self._expected:
            fused, shard = layout
            one = expected_of(self.tensors.items(), fused=fused, shard=shard)
            one.recognise(held, dtypes=("", "BF16", "F16"))
            self._expected[layout] = one
        return self._expected[layout]

    @property
    def exact(self) -> bool:
        """fp32 here and on every engine that was looked at: the same arithmetic but for the order of sums."""
        rounded = any(one.dtype for one in self._expected.values())
        return not rounded and all(str(tensor.dtype) == "torch.float32" for tensor in self.tensors.values())

    def memory(self, version: str) -> Memory:
        """What the next sync should know of this one."""
        return Memory(version, self.digests, {key: one.digests() for key, one in self._expected.items()})


@dataclass(frozen=True, slots=True)
class Suspects:
    """What else an engine may hold, to name what it holds instead of the right tensor."""

    memory: Memory = field(default_factory=Memory)
    pushed: Stages | None = None
    """What was really sent, where that is something else than the trainer holds."""
    shapes: Shapes = field(default_factory=dict)
    """Of the checkpoint that the engines were started from."""
    resets: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Engine -> digests of each of its ranks after `reset_tensors`."""


# ---------------------------------------------------------------------- pushing


def push(
    pushed: Stages,
    held: Stages,
    *,
    version: str,
    transport: Transport,
    engines: Engines,
    directory: Path | None,
    planted: bool,
    truth: Truth | None = None,
    suspects: Suspects | None = None,
    shared: bool = False,
    send: Callable[[str, EngineClient, Named], None] | None = None,
) -> SyncReport:
    """Bring `pushed` to every engine as `version`, then compare what each holds with `held`.

    directory: the published version, for the disk transport. planted: a fault was planted in this push. truth: of
    `held`, if it is there already. shared: the engines are on this GPU and open the tensors where they lie. send:
    brings them to an engine in a way of its own. An engine that refuses, or does not answer, is in the report, not an
    exception.
    """

    def bring(name: str) -> Failure | None:
        client = engines[name]
        try:
            if send is not None:
                send(name, client, named(pushed))
            elif directory is not None:
                client.update_weights_from_disk(directory, version)
            elif shared:
                client.update_weights_from_shared(named(pushed), version)
            else:
                client.update_weights_from_tensor(named(pushed), version)
        except (EngineRefused, EngineUnreachable) as error:
            return error
        return None

    with _side_by_side(engines) as pool:
        answers = dict(zip(engines, pool.map(bring, engines), strict=True))
    failed = {name: error for name, error in answers.items() if error is not None}
    report = compare(
        truth or Truth(held),
        version=version,
        transport=transport,
        engines=engines,
        failed=failed,
        planted=planted,
        suspects=dataclasses.replace(suspects or Suspects(), pushed=None if pushed is held else pushed),
    )
    return dataclasses.replace(report, layers=layer_ids(pushed))


def compare(
    truth: Truth,
    *,
    version: str,
    transport: str,
    engines: Engines,
    failed: Mapping[str, Failure] | None = None,
    planted: bool = False,
    suspects: Suspects | None = None,
) -> SyncReport:
    """Ask every engine what it holds. `failed`: engines whose update failed already, and why."""
    failed, suspects = failed or {}, suspects or Suspects()
    values = pushed_values(truth, suspects)

    def look(name: str) -> EngineReply:
        client, error, found = engines[name], failed.get(name), ""
        if not isinstance(error, EngineUnreachable):  # else it would cost another time-out
            try:
                found = client.weight_version()
                if error is None:
                    return _looked_at(name, client, truth, found, suspects, values)
            except (EngineUnreachable, EngineRefused) as now:
                error = error or now
        gone = isinstance(error, EngineUnreachable)
        why = f"{error.what}: {error.why}" if gone else error.why
        bent = [dataclasses.replace(one, engine=name) for one in values.values() if one.kind == "wrong-shape"]
        if bent:  # also of one that is gone: a tensor of another shape ends a real SGLang
            why += "; " + told(bent)
        return EngineReply(
            ok=False, version=found, message=why, gone=gone and not bent, findings=tuple(bent), differing=len(bent)
        )

    with _side_by_side(engines) as pool:
        replies = dict(zip(engines, pool.map(look, engines), strict=True))
    return SyncReport(version=version, digest=truth.digest, transport=transport, engines=replies, planted=planted)


def _side_by_side(engines: Engines) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="sync")


def _looked_at(
    name: str,
    client: EngineClient,
    truth: Truth,
    version: str,
    suspects: Suspects,
    values: Mapping[str, Finding],
) -> EngineReply:
    try:
        answer = client.weights_checker("checksum")
    except EngineRefused as error:
        return EngineReply(ok=True, version=version, message=f"no checksum: {error.message}")
    findings: list[Finding] = []
    ranks = ranks_of(answer)
    if not ranks:
        return EngineReply(ok=True, version=version, message="no checksum: its answer has no ranks")
    for at, (shard, held) in enumerate(ranks):
        shard = dataclasses.replace(shard, kv_heads=truth.kv_heads) if shard.size > 1 else shard
        layout = (is_fused(held), shard)
        before = suspects.memory.before(layout)
        resets = suspects.resets.get(name, ())
        if at < len(resets):
            why = "not brought: it is still the random numbers of reset_tensors"
            before.append(Before("reset_tensors", resets[at], kind="missing", detail=why))
        expected = truth.expected(layout, held)
        found = classify(expected, held, before=before, engine=name)
        if suspects.pushed is not None and found:
            found = _explained(found, held, expected, suspects.pushed, layout, values)
        findings += found
    fused = any(is_fused(held) for _, held in ranks)
    own = overall_digest(ranks[0][1])
    if not findings:
        return EngineReply(ok=True, version=version, digest=own if fused else truth.digest, same=True)
    return with_findings(EngineReply(ok=True, version=version, digest=own), findings)


def with_findings(reply: EngineReply, findings: Iterable[Finding]) -> EngineReply:
    """The reply of an engine that does not hold what it should."""
    every = in_order(dict.fromkeys(findings))
    return dataclasses.replace(
        reply, same=False, message=told(every), findings=tuple(every[:MOST_FINDINGS]), differing=len(every)
    )


# ---------------------------------------------------------------------- naming what is wrong


def pushed_values(truth: Truth, suspects: Suspects) -> dict[str, Finding]:
    """Hugging Face name -> what is wrong with the tensor that was pushed. Empty where exactly the held ones were."""
    if suspects.pushed is None:
        return {}
    pushed = {name: raw_of(tensor) for name, tensor in named(suspects.pushed)}
    owners: dict[str, list[str]] = {}
    for name, digest in truth.digests.items():
        owners.setdefault(digest, []).append(name)
    found: dict[str, Finding] = {}
    for name, tensor in truth.tensors.items():
        raw = pushed.get(name)
        digest = digest_tensors([(name, tensor)])[name] if raw is None else _digest(raw)
        one = classify_values(
            name,
            raw_of(tensor),
            raw,
            belongs=lambda _, __, digest=digest: next(iter(owners.get(digest, ())), ""),  # type: ignore[misc]
            old=suspects.memory.digests.get(name) == digest,
        )
        wanted = suspects.shapes.get(name)
        if one is None and raw is not None and wanted is not None and raw.shape != wanted:
            one = Finding(name, "wrong-shape", detail=f"{list(raw.shape)}, the engine's checkpoint has {list(wanted)}")
        if one is not None:
            found[name] = one
    return found


def _digest(raw: Raw) -> str:
    return sha_digest([raw.data])


def _explained(
    findings: Sequence[Finding],
    held: Mapping[str, str],
    expected: Expected,
    pushed: Stages,
    layout: _Layout,
    values: Mapping[str, Finding],
) -> list[Finding]:
    """Findings of parameters that are exactly what was pushed, in the words of what was pushed: values were at hand."""
    sent = expected_of(named(pushed), fused=layout[0], shard=layout[1])
    sent.hash, sent.dtype = expected.hash, expected.dtype
    better: list[Finding] = []
    for one in findings:
        name = one.parameter or one.name
        sources = expected.recipes[name].sources if name in expected.recipes else ()
        whole = name in sent.recipes and sent.recipes[name].sources == sources
        known = [values[source] for source in sources if source in values]
        if known and whole and sent.digest(name) == held.get(name):
            parameter = name if len(sources) > 1 else ""
            better += [dataclasses.replace(value, engine=one.engine, parameter=parameter) for value in known]
        elif known and not whole and one.kind in ("stale", "missing"):
            better.append(dataclasses.replace(one, detail=f"{one.detail}; not all of it was pushed"))
        else:
            better.append(one)
    return in_order(dict.fromkeys(better))
