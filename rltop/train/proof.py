"""`--check-weight-update-equal`: nothing can be equal by accident once the engine's weights are random numbers.

As slime does it with SGLang's weights checker, once, before the first rollout: `snapshot`, `reset_tensors`, the first
sync, `compare`. And what that cannot see:

- rltop's own digests on both sides, per tensor: they say what stands where, also where the checker cannot compare
  (0.5.23 on a CPU answers "Torch not compiled with CUDA enabled");
- buffers that the checker leaves out (rotary tables): the log-probabilities of a fixed prompt must be after the sync
  what they were before, because the weights are. At the first position an angle is 0 whatever the table holds, so that
  a gap from the second position on, and none before, is the table's;
- the trainer's own tensors against the checkpoint that it was loaded from, else a conversion that is wrong in both
  directions would compare equal with itself.

`reset_tensors` destroys what an engine serves. So it is only done to an engine that has no request, and the engine's
weights are called `RESET` from then on until the sync names them anew: no sample can be drawn from them by mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rltop.engines.client import EngineClient, EngineRefused
from rltop.engines.probe import lost_buffer, read_probe
from rltop.engines.ranks import ranks_of
from rltop.engines.raw_tensors import FLOATS, Checkpoint, Raw, raw_of
from rltop.engines.weight_findings import (
    UNEQUAL,
    Finding,
    classify_values,
    compared,
    in_order,
    with_told,
    words_of,
)
from rltop.errors import RltopError
from rltop.train.ports import EngineReply, SyncReport
from rltop.train.sync import Engines, Truth, with_findings

RESET = "reset_tensors"
"""What an engine's weights are called while they are random numbers."""
EXACT_GAP = 1e-2
"""The same between a trainer and an engine that both compute in fp32: 1e-5 was seen."""
TRAINER_GAP = 0.5
"""The same otherwise: bf16 kernels differ by up to 0.1 nats per token on an H200."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An engine whose weights are random now."""

    probe: tuple[float, ...]
    """Log-probs of the probe before, from its second token on."""
    weights: Sequence[Mapping[str, str]] = field(default_factory=tuple)
    """Digests of each rank before: the probe's are those of these weights."""
    digests: Sequence[Mapping[str, str]] = field(default_factory=tuple)
    """Of each rank, after the reset."""


def prepare(engines: Engines, vocab_size: int) -> dict[str, Prepared]:
    """Remember every engine's weights, then make them random. Raises RltopError, and has touched nothing then, if one
    is at work."""
    for name, client in engines.items():
        busy = _requests(client)
        if busy:
            raise RltopError(
                f"engine {name} is at work",
                where="--check-weight-update-equal",
                why=f"it has {busy} requests, and reset_tensors would answer them from random weights",
                do="use it before the first rollout only, on engines that serve nobody else",
                exit_code=1,
            )
    return {name: _prepared(client, vocab_size) for name, client in engines.items()}


def _prepared(client: EngineClient, vocab_size: int) -> Prepared:
    probe, weights = read_probe(client, vocab_size), _digests(client)
    client.weights_checker("snapshot")
    client.weights_checker("reset_tensors")
    with contextlib.suppress(EngineRefused):  # an engine that keeps its label loses nothing: nobody asks it now
        client.set_weight_version(RESET)
    with contextlib.suppress(EngineRefused):  # prompts of the old weights
        client.flush_cache()
    return Prepared(probe, weights, _digests(client))


def _digests(client: EngineClient) -> list[dict[str, str]]:
    """Of each rank; none where the engine tells none."""
    try:
        return [held for _, held in ranks_of(client.weights_checker("checksum"))]
    except EngineRefused:
        return []


def _requests(client: EngineClient) -> int:
    loads = client.loads().get("loads")
    total = 0
    for one in loads if isinstance(loads, list) else ():
        for key in ("num_running_reqs", "num_waiting_reqs"):
            total += int(one.get(key) or 0) if isinstance(one, dict) else 0
    return total


def conclude(report: SyncReport, engines: Engines, prepared: Mapping[str, Prepared], vocab_size: int) -> SyncReport:
    """The report of the first sync with what the checker and the probe say of every engine that took it."""
    replies = {
        name: _concluded(name, engines[name], reply, prepared[name], vocab_size)
        if reply.ok and name in prepared
        else reply
        for name, reply in report.engines.items()
    }
    return dataclasses.replace(report, engines=replies, checked=True)


def _concluded(name: str, client: EngineClient, reply: EngineReply, before: Prepared, vocab_size: int) -> EngineReply:
    findings, note = list(reply.findings), ""
    try:
        client.weights_checker("compare")
    except EngineRefused as error:
        said = compared(error.message)
        if UNEQUAL in error.message:
            findings = with_told(findings, said)
            known = {one.parameter or one.name for one in findings}
            for parameter, word in said.items():
                if parameter not in known:
                    findings.append(_only_told(name, parameter, word.max_abs_err))
        else:
            note = f"its own compare cannot run here: {words_of(error.message)}"
    if not findings and reply.same is not False and _digests(client) == list(before.weights):
        lost = lost_buffer(before.probe, read_probe(client, vocab_size))
        findings = [dataclasses.replace(lost, engine=name)] if lost else []
    if findings:
        found = with_findings(reply, findings)
        more = max(0, reply.differing - len(reply.findings))
        return dataclasses.replace(found, differing=found.differing + more)
    return dataclasses.replace(reply, message=note or reply.message)


def _only_told(engine: str, parameter: str, gap: float) -> Finding:
    """The checker alone finds a difference to the snapshot; by their digests both sides agree."""
    if not math.isfinite(gap):
        return Finding(parameter, "nan", engine, "the trainer pushed NaN or infinite values", gap)
    why = "it is what the trainer pushed, and not what the engine was started from"
    return Finding(parameter, "different", engine, why, gap)


# ---------------------------------------------------------------------- buffers


def compare_probes(
    report: SyncReport, engines: Engines, reference: Sequence[float], vocab_size: int, *, exact: bool
) -> SyncReport:
    """The report of a later sync, with what the trainer's own log-probs of the probe say of engines that are equal.

    exact: both sides compute in fp32.
    """

    def look(name: str, reply: EngineReply) -> EngineReply:
        if reply.same is not True:
            return reply
        lost = lost_buffer(reference, read_probe(engines[name], vocab_size), limit=EXACT_GAP if exact else TRAINER_GAP)
        return with_findings(reply, [dataclasses.replace(lost, engine=name)]) if lost else reply

    return dataclasses.replace(report, engines={name: look(name, reply) for name, reply in report.engines.items()})


# ---------------------------------------------------------------------- the trainer's own side


def against_source(truth: Truth, checkpoint: Path) -> list[Finding]:
    """The trainer's tensors against the checkpoint that it was loaded from, by value. Only right before any step."""
    findings: list[Finding] = []
    with Checkpoint(checkpoint) as source:
        for name, tensor in truth.tensors.items():
            raw = raw_of(tensor)
            if name not in source:
                if name != "lm_head.weight":  # tied
                    findings.append(Finding(name, "extra", "trainer", "the checkpoint has no tensor of this name"))
                continue
            should = source.get(name)
            if should.dtype != raw.dtype and should.dtype in FLOATS:
                should = should.cast(raw.dtype)
            if one := classify_values(name, should, raw, belongs=_belongs(source)):
                findings.append(dataclasses.replace(one, engine="trainer"))
        held = truth.tensors.keys() | {"lm_head.weight"}
        unheld = [name for name in source.names() if name not in held and "rotary" not in name]
        findings += [Finding(name, "missing", "trainer", "the trainer does not push it") for name in unheld]
    return in_order(findings)


def _belongs(source: Checkpoint) -> Callable[[str, Raw], str]:
    """Whose a tensor is: looked for among those of its shape, when it is known to be wrong."""

    def look(name: str, found: Raw) -> str:
        for other in source.names():
            alike = source.shape(other) == found.shape and source.dtype(other) in FLOATS
            if other != name and alike and source.get(other).cast(found.dtype).data == found.data:
                return other
        return ""

    return look
