"""`weights.sync-garble`: the weights that the trainer pushes spoil the text.

Two proofs. (1) The full run is salad from its first rollout while a rollout-only run of the same checkpoint is fine: in
slime even rollout 0 is served from pushed weights, so the trainer's load or the conversion is wrong. (2) Text is fine,
and salad in the first rollout after a sync, while the optimizer step before it has no bad metrics: the sync is wrong. A
finished step between two rollouts implies a sync.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rltop.checks.facts import fires, quantised_rollout
from rltop.checks.names import text_config
from rltop.checks.observe import Observations, Sample
from rltop.checks.phrase import count, missing, num, of_event, of_points, of_samples, of_sync
from rltop.checks.rules.logprob_gap import METRIC as GAP
from rltop.checks.rules.rollout_length import RATIO
from rltop.checks.rules.rollout_text import pattern_of, salad_of
from rltop.checks.series import Point, points
from rltop.checks.syncs import COMPARE, is_update
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ID = "weights.sync-garble"
_LOG_PROBS = "rollout/log_probs"
_REWARD = "rollout/raw_reward"
METRICS = (_LOG_PROBS, _REWARD, GAP, "train/loss", "train/grad_norm", "train/ppo_kl", "train/kl_loss")
_ONLY = "rollout_only"
_KNOWN_GOOD = re.compile(r"^(?:last_)?(?:known_good|working|good)_?|_(?:last_)?(?:known_good|good)$")
_INSTALLED = ("installed", "current", "versions", "now")
_RELEASE = re.compile(r"release|/sleep$")
_STEP = ("train/loss", "train/grad_norm", "train/ppo_kl", "train/kl_loss")
_MLA = re.compile(r"deepseek_?v[23]|kimi|glm_?moe_?dsa|longcat|minicpm3|mla", re.IGNORECASE)
_HYBRID = re.compile(r"linear_attention|mamba|gated|delta|recurrent|ssm", re.IGNORECASE)
_WHEN = ("before_update", "", "after_update")


@dataclass(frozen=True, slots=True)
class Group:
    """The responses of one rollout of one run."""

    segment: int
    rollout: int | None
    when: str
    samples: tuple[Sample, ...]
    salad: tuple[Sample, ...]
    other: int
    """Bad in another way."""

    def bad(self, t: Thresholds) -> bool:
        size = len(self.samples)
        return 2 * len(self.salad) >= size if size < 4 else len(self.salad) >= t.text_fail_share * size

    def fine(self, t: Thresholds) -> bool:
        return len(self.salad) + self.other < max(t.text_warn_share * len(self.samples), 1)

    def are(self, what: str) -> str:
        """A sentence on it: `rollout 3 is fine`, `the responses are fine`."""
        return f"{self.label} {'is' if self.rollout is not None else 'are'} {what}"

    @property
    def label(self) -> str:
        if self.rollout is not None:
            return f"rollout {self.rollout}"
        return f"the responses {self.when.replace('_', ' the ')}" if self.when else "the responses"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What is wrong with the sync, as far as the evidence tells."""

    name: str
    text: str
    value: dict[str, object]
    advice: tuple[str, ...]
    evidence: tuple[Evidence, ...] = ()


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    if not obs.samples:
        return [Verdict(ID, "skip", cause=missing(obs, "the text of a response"))]
    alone = _groups([s for s in obs.samples if _alone(s)], t)
    full = _groups([s for s in obs.samples if not _alone(s)], t)
    if obs.mode == "rollout-only":
        alone, full = _groups(list(obs.samples), t), []
    if not full:
        return [Verdict(ID, "skip", cause="a rollout-only run pushes no weights")]
    if any(group.bad(t) for group in alone):
        cause = "A rollout-only run of the same checkpoint is bad too: no push of weights has a part in it."
        return [Verdict(ID, "pass", cause=cause)]
    first = next((at for at, group in enumerate(full) if group.bad(t)), None)
    if first is None:
        return [Verdict(ID, "pass", cause="No rollout is salad.")]
    bad = full[first]
    by_metrics = _healthy_before(obs, bad, t) if first == 0 and not alone else []
    if first == 0 and not by_metrics:
        if alone:
            return [_from_start(obs, t, bad, alone)]
        cause = f"{bad.are('bad').capitalize()}, and no rollout before it and no rollout-only run is there to compare "
        return [
            Verdict(ID, "skip", cause=cause + "with: --debug-rollout-only decides", advice=("--debug-rollout-only",))
        ]
    before = full[first - 1] if not by_metrics else Group(bad.segment, by_metrics[0].rollout, "", (), (), 0)
    if (before.rollout is None) != (bad.rollout is None):
        cause = f"{bad.are('bad').capitalize()}, and what came before it has no rollout id to order it by"
        return [Verdict(ID, "skip", cause=cause)]
    if not before.fine(t) or before.segment != bad.segment:
        cause = f"{bad.are('bad').capitalize()}, and {before.label} before that too: no single sync changed it."
        return [Verdict(ID, "pass", rollout=bad.rollout, cause=cause)]
    if nan := [
        v for v in fires(obs, "train.nan") if v.rollout is None or bad.rollout is None or v.rollout <= bad.rollout
    ]:
        cause = f"{nan[0].id} comes first: the pushed weights were bad before the sync."
        return [Verdict(ID, "pass", rollout=bad.rollout, cause=cause)]
    steps = _steps_between(obs, before, bad)
    if ill := _ill(steps, t):
        cause = f"{ill.name} was {num(ill.value)} at step {ill.step} before {bad.label}: the training itself may have "
        return [Verdict(ID, "pass", rollout=bad.rollout, cause=cause + "spoiled the weights.", confidence="medium")]
    return [_by_sync(obs, t, before, bad, steps, by_metrics)]


def _alone(sample: Sample) -> bool:
    """Made by a run without a trainer, as the sample's own mode says."""
    return _ONLY in sample.mode.lower().replace("-", "_").replace(" ", "_")


def _groups(samples: list[Sample], t: Thresholds) -> list[Group]:
    parts: dict[tuple[int, int, int, str], list[Sample]] = {}
    for sample in samples:
        turn = _WHEN.index(sample.when) if sample.when in _WHEN else len(_WHEN)
        rollout = sample.rollout_id if sample.rollout_id is not None else -1
        parts.setdefault((sample.segment, rollout, turn, sample.when), []).append(sample)
    found = []
    for (segment, rollout, _, when), members in sorted(parts.items()):
        if not any(sample.text.chars for sample in members):
            continue
        salad = salad_of(members, t)
        other = sum(pattern_of(sample.text, t) == "repeated" for sample in members)
        found.append(Group(segment, None if rollout < 0 else rollout, when, tuple(members), salad, other))
    return found


def _steps_between(obs: Observations, before: Group, bad: Group) -> list[Point]:
    """Metrics of the optimizer steps between two rollouts."""
    if before.rollout is None or bad.rollout is None:
        return []
    found = []
    for name in (*_STEP, GAP):
        for point in points(obs, name):
            rollout = point.rollout if point.rollout is not None else point.step
            if point.segment == bad.segment and before.rollout <= rollout < bad.rollout:
                found.append(point)
    return found


def _healthy_before(obs: Observations, bad: Group, t: Thresholds) -> list[Point]:
    """Metrics that show the rollout just before as sound, where its text is not in the evidence: probable text, or
    responses that end by themselves and earn a reward."""
    if not bad.rollout:
        return []
    found: dict[str, Point] = {}
    for name in (_LOG_PROBS, _REWARD, *RATIO):
        for point in points(obs, name, "rollout"):
            if point.segment == bad.segment and point.step == bad.rollout - 1 and math.isfinite(point.value):
                found.setdefault(name, point)
    probable = _LOG_PROBS in found and abs(found[_LOG_PROBS].value) < t.magnitude_warn
    ends = any(name in found and found[name].value < t.truncated_warn for name in RATIO)
    earns = _REWARD in found and found[_REWARD].value > 0
    if probable and not any(name in found and found[name].value >= t.truncated_fail for name in RATIO):
        return [found[_LOG_PROBS]]
    return [found[_REWARD]] if ends and earns else []


def _ill(steps: list[Point], t: Thresholds) -> Point | None:
    limits = {"train/grad_norm": t.grad_first_fail, "train/ppo_kl": 1.0, "train/kl_loss": 10.0, GAP: t.gap_fail}
    for point in steps:
        if not math.isfinite(point.value) or abs(point.value) > limits.get(point.name, math.inf):
            return point
    return None


def _from_start(obs: Observations, t: Thresholds, bad: Group, alone: list[Group]) -> Verdict:
    mechanism = _mechanism(obs, None, bad)
    fine = sum(len(group.samples) for group in alone)
    return Verdict(
        ID,
        "fail",
        rollout=bad.rollout,
        threshold={"salad": t.text_fail_share},
        value={"mechanism": mechanism.name, "change": "start", **mechanism.value},
        evidence=(*of_samples(bad.salad), *of_samples(alone[0].samples[:1]), *mechanism.evidence),
        cause=f"The full run is no language from {bad.label} on ({len(bad.salad)} of "
        f"{count(len(bad.samples), 'response')}), "
        f"while {fine} responses of a rollout-only run with the same checkpoint are fine: the trainer's load or "
        f"the conversion to the engine's weights is wrong, for even the first rollout is served from pushed weights. "
        f"{mechanism.text}",
        advice=(
            *mechanism.advice,
            COMPARE,
            "grep 'successfully loaded checkpoint' in the trainer's log",
        ),
    )


def _by_sync(
    obs: Observations, t: Thresholds, before: Group, bad: Group, steps: list[Point], by_metrics: list[Point]
) -> Verdict:
    mechanism = _mechanism(obs, before, bad)
    syncs = [
        s for s in obs.syncs if s.segment == bad.segment and s.rollout_id is not None and s.rollout_id == bad.rollout
    ]
    confidence: Confidence = "high" if steps else "medium"
    cause = (
        f"{before.are('fine').capitalize()} and {bad.are('no language')} ({len(bad.salad)} of "
        f"{count(len(bad.samples), 'response')})"
    )
    cause += ": the change lies exactly at the weight sync between them"
    if steps:
        shown = next((p for p in steps if p.name == "train/grad_norm"), steps[0])
        cause += f", and the step before it is healthy ({shown.name} = {num(shown.value)})"
    else:
        cause += "; metrics of the step before it are not logged"
    if by_metrics:
        cause += f" (judged by metrics: {by_metrics[0].name} = {num(by_metrics[0].value)})"
    cause += f". {mechanism.text}"
    return Verdict(
        ID,
        "fail",
        rollout=bad.rollout,
        threshold={"salad": t.text_fail_share},
        value={"mechanism": mechanism.name, "change": bad.label, **mechanism.value},
        evidence=(
            *of_samples(before.samples, most=1),
            *of_points(by_metrics[:1]),
            *of_samples(bad.salad, most=2),
            *(of_sync(sync) for sync in syncs[:1]),
            *of_points(steps[:2]),
            *mechanism.evidence,
        ),
        cause=cause,
        advice=(
            *mechanism.advice,
            COMPARE,
            "dump in the model's load_weights and compare with the checkpoint",
            "--debug-rollout-only with the same --hf-checkpoint, for the comparison",
        ),
        confidence=confidence,
    )


# -- mechanism


def _mechanism(obs: Observations, before: Group | None, bad: Group) -> Mechanism:
    if fires(obs, "ckpt.loaded") and any(v.status == "fail" for v in fires(obs, "ckpt.loaded")):
        text = "No line of the trainer's log confirms that it loaded a checkpoint."
        return Mechanism("load", text, {}, ("--load and --ref-load: check the directories",))
    return _buckets(obs, told=True) or _buffers(obs) or _buckets(obs) or _version(obs) or _conversion(obs)


def _buckets(obs: Observations, *, told: bool = False) -> Mechanism | None:
    """told: only where the log itself counts the buckets; else requests in a row are counted."""
    summary = next(
        (event for event in obs.events if event.kind == "update_summary" and event.data.get("buckets")), None
    )
    count: int | None = None
    evidence: tuple[Evidence, ...] = ()
    if summary is not None and isinstance(summary.data.get("buckets"), int):
        count, evidence = int(str(summary.data["buckets"])), (of_event(summary),)
    elif not told:
        count = _requests_in_a_row(obs)
    facts = " ".join((str(summary.data) if summary else "", _architecture(obs)))
    mla = bool(_MLA.search(facts)) or obs.args.on("multi_latent_attention")
    mla = mla or any(text_config(one.config).get("kv_lora_rank") for one in obs.checkpoints)
    if count is None or count < 2 or not (mla or _quantised(obs)):
        return None
    what = "MLA" if mla else "quantised"
    text = (
        f"The sync was split into {count} buckets, one request each, and on a model that is {what} the engine "
        "finalises derived weights after every bucket instead of once at the end; HTTP 200 to each proves nothing."
    )
    value: dict[str, object] = {"buckets": count, "model": what}
    if summary is not None:
        value |= {key: summary.data[key] for key in ("sglang", "arch", "tensors") if key in summary.data}
    advice = (
        "--update-weight-buffer-size: larger, so that one bucket holds all",
        "an engine version with a begin and an end of an update session",
    )
    return Mechanism("buckets", text, value, advice, evidence)


def _requests_in_a_row(obs: Observations) -> int | None:
    """Most update requests of one engine without any other request between."""
    best: dict[object, int] = {}
    now: dict[object, int] = {}
    calls: list[tuple[int, object, str]] = [(call.order, call.engine, call.path) for call in obs.http]
    calls += [
        (event.order, event.engine if event.engine is not None else event.pid, str(event.data.get("path") or ""))
        for event in obs.events
        if event.kind == "http"
    ]
    for _, engine, path in sorted(calls, key=lambda call: call[0]):
        now[engine] = now.get(engine, 0) + 1 if is_update(path) else 0
        best[engine] = max(best.get(engine, 0), now[engine])
    return max(best.values(), default=0) or None


def _buffers(obs: Observations) -> Mechanism | None:
    """The checker's pass holds for its moment only, so a release must lie before it, where the order is known."""
    calls = [(call.order, call.path, call.answer.get("success") is True) for call in obs.http]
    lines = [
        (event.order, str(event.data.get("path") or event.kind), event.data.get("ok") is True) for event in obs.events
    ]
    released = [[at for at, path, _ in one if _RELEASE.search(path)] for one in (calls, lines)]
    equal = [[at for at, path, ok in one if ok and "weights_check" in path] for one in (calls, lines)]
    if not any(equal) or not any(released):
        return None
    for before, after in zip(released, equal, strict=True):
        if before and after and min(before) > max(after):
            return None
    text = "The weights checker says that all parameters are equal, and the engine's memory was released and resumed "
    text += "before: rotary tables or other buffers, which no push restores, were lost."
    return Mechanism(
        "buffers",
        text,
        {},
        (
            "an engine version that keeps its buffers over a release",
            "order: release, resume weights, update, resume KV",
        ),
    )


def _version(obs: Observations) -> Mechanism | None:
    for one in obs.documents:
        if one.kind != "versions":
            continue
        for name, installed, good in _compared(one.fields):
            text = f"The installed {name} is {installed}, the version that was known to be good is {good}."
            evidence = (Evidence(one.source, one.lines.get(name), f"{name}: {installed}, known good: {good}"),)
            value: dict[str, object] = {"package": name, "installed": str(installed), "known_good": good}
            return Mechanism("engine-version", text, value, (f"{name}=={good}, the known-good image",), evidence)
    return None


def _compared(fields: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    """(package, installed, known good) of packages whose two versions differ: as flat keys (`known_good_sglang`) or as
    a map of known good versions beside the installed ones."""
    inner = next((v for k, v in fields.items() if k in _INSTALLED and isinstance(v, Mapping)), {})
    installed = {**fields, **inner}
    for key, good in fields.items():
        if isinstance(good, Mapping) and _KNOWN_GOOD.fullmatch(key):
            pairs = [(str(name), version) for name, version in good.items()]
        else:
            pairs = [(_KNOWN_GOOD.sub("", key).strip("_"), good)] if _KNOWN_GOOD.search(key) else []
        for name, version in pairs:
            found = installed.get(name)
            if found is not None and isinstance(version, str) and str(found) != version:
                yield name, found, version


def _conversion(obs: Observations) -> Mechanism:
    why: list[str] = []
    for one in obs.checkpoints:
        config = text_config(one.config)
        if _HYBRID.search(str(config.get("layer_types", ""))) or config.get("hybrid_override_pattern"):
            why.append("its layers are of several attention types")
    pipeline = obs.args.number("pipeline_model_parallel_size")
    if pipeline and pipeline > 1:
        why.append(f"the trainer has {pipeline:.0f} pipeline stages")
    if _quantised(obs):
        why.append("the engine's weights are quantised")
    per_engine = obs.args.number("rollout_num_gpus_per_engine")
    if per_engine and per_engine > 1:
        why.append(f"each engine is split over {per_engine:.0f} GPUs")
    if not why:
        text = "The evidence does not tell whether conversion, transport or the engine is at fault: compare one tensor."
        return Mechanism("unknown", text, {"candidates": ["conversion", "transport", "engine version"]}, ())
    text = (
        f"The conversion from Megatron's to the engine's weights is the first suspect: {', '.join(dict.fromkeys(why))}."
    )
    return Mechanism(
        "conversion",
        text,
        {"why": list(dict.fromkeys(why))},
        ("check the conversion's name map for this architecture",),
    )


def _quantised(obs: Observations) -> bool:
    if any((one.config or {}).get("quantization_config") for one in obs.checkpoints):
        return True
    return quantised_rollout(obs)


def _architecture(obs: Observations) -> str:
    return " ".join(
        f"{(one.config or {}).get('model_type', '')} {(one.config or {}).get('architectures', '')}"
        for one in obs.checkpoints
    )
