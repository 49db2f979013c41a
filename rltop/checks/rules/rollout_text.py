"""`rollout.text`: the responses are human language.

Three patterns. *salad*: no human language, for one of the signs of `salad_signs`. *repeated*: one character, token id
or short phrase throughout, the mark of NaN logits or of dead weights. *first-token*: only the start does not belong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rltop.checks.facts import pretrained
from rltop.checks.observe import Observations, Sample, SyncEvent
from rltop.checks.phrase import count, missing, of_samples, of_sync, percent
from rltop.checks.syncs import COMPARE
from rltop.checks.text import MOST_CODE, TextFacts
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

ID = "rollout.text"
_FEW = 4
"""Below so many samples half of them must be bad, not 30 %."""
_ONLY = re.compile(r"rollout[-_ ]?only", re.IGNORECASE)
_WHEN = ("", "before_update", "after_update")


def pattern_of(text: TextFacts, t: Thresholds) -> str:
    """`repeated`, `salad`, `first-token`, or empty for text as it should be."""
    if is_repeated(text, t):
        return "repeated"
    if salad_signs(text, t):
        return "salad"
    return "first-token" if text.first_token else ""


def is_repeated(text: TextFacts, t: Thresholds) -> bool:
    """One character, token id or short phrase makes up the response."""
    return (
        (text.counted_ids >= t.text_repeat_least and text.top_id_share >= t.text_repeat_share)
        or (text.counted_chars >= t.text_repeat_least and text.top_char_share >= t.text_repeat_share)
        or (
            text.phrase_share >= t.text_repeat_share
            and not text.prompted
            and text.control_share <= t.text_control_share
        )
    )


def salad_signs(text: TextFacts, t: Thresholds) -> tuple[str, ...]:
    """What says that the response is no human language, as clauses for people; empty for text as it should be."""
    if text.chars < t.text_least_chars:
        broken = text.control_share >= t.text_short_control_share or text.undecoded_share >= t.text_short_control_share
        return ("undecodable bytes",) if broken and text.chars else ()
    known = text.coverage >= t.text_unknown_coverage
    signs = {
        "several scripts word by word": not text.prompted
        and (
            (text.families >= t.text_scripts and text.switch_share >= t.text_switch_share)
            or (text.families >= t.text_many_scripts and text.switch_share >= t.text_many_switch_share)
            or (text.third_share >= t.text_third_share and text.joined_share >= t.text_third_joined_share)
            or text.joined_share >= t.text_joined_share
        ),
        "undecodable bytes": text.control_share > t.text_control_share
        or text.undecoded_share >= t.text_undecoded_share,
        "words of no language": text.latin_words >= t.text_least_words
        and text.latin_share >= t.text_latin_share
        and text.function_share < t.text_function_share
        and text.structure < t.text_structure
        and not known
        and text.stops_share < t.text_list_stops,
        "few words in random order": text.words >= t.text_babble_words
        and text.distinct_share <= t.text_babble_distinct
        and text.pairs_per_word >= t.text_babble_pairs
        and text.code_share <= MOST_CODE
        and text.language != "code",
        "punctuation between stray words": (text.stops_share >= t.text_stops_share and text.code_share <= MOST_CODE)
        or text.stutter_share >= t.text_stutter_share,
        "words without order": text.disorder >= t.text_disorder,
    }
    return tuple(sign for sign, found in signs.items() if found)


def is_short(sample: Sample, t: Thresholds) -> bool:
    """Bytes that are no text in fewer characters than the signs of salad were made for. A model over bytes cuts
    characters in halves before it has learned not to: a few such responses are shown and are no alarm, a rollout full
    of them is. Text in the wrong encoding is no such accident."""
    return 0 < sample.text.chars < t.text_least_chars and sample.text.undecoded_share < t.text_short_control_share


def salad_of(members: Sequence[Sample], t: Thresholds) -> tuple[Sample, ...]:
    """The salad among the responses of one rollout. Of too few responses to have a share, a short one says nothing."""
    found = (sample for sample in members if pattern_of(sample.text, t) == "salad")
    return tuple(sample for sample in found if len(members) >= _FEW or not is_short(sample, t))


@dataclass(frozen=True, slots=True)
class _Group:
    """The responses of one rollout."""

    rollout: int | None
    segment: int
    when: str
    size: int
    salad: tuple[Sample, ...]
    repeated: tuple[Sample, ...]
    odd_start: tuple[Sample, ...]

    @property
    def bad(self) -> tuple[Sample, ...]:
        return self.salad + self.repeated

    @property
    def pattern(self) -> str:
        if not self.bad:
            return "first-token"
        return "repeated" if len(self.repeated) >= len(self.salad) else "salad"

    @property
    def label(self) -> str:
        if self.rollout is not None:
            return f"rollout {self.rollout}"
        return f"the responses {self.when.replace('_', ' the ')}" if self.when else "the evidence"

    def level(self, t: Thresholds) -> Status:
        """Verdict on this rollout alone."""
        share = len(self.bad) / self.size
        clear = sum(not is_short(sample, t) for sample in self.salad) + len(self.repeated)
        if (2 * clear >= self.size and clear) if self.size < _FEW else share >= t.text_fail_share:
            return "fail"
        odd = len(self.odd_start) / self.size >= t.text_first_share
        if clear / self.size >= t.text_warn_share or odd:
            return "warn"
        return "info" if share >= t.text_warn_share else "pass"


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all rollouts: the first one with the worst level decides."""
    groups = _groups(obs, t)
    if not groups:
        return [Verdict(ID, "skip", cause=missing(obs, "the text of a response"))]
    if all(sample.text.chars == 0 and not sample.text.counted_ids for sample in obs.samples):
        return [Verdict(ID, "skip", cause=f"all {len(obs.samples)} responses are empty: there is no text to read")]
    levels = [group.level(t) for group in groups]
    worst: Status = "fail" if "fail" in levels else "warn" if "warn" in levels else "pass"
    if worst == "pass":
        return [_short(groups[-1], t) if levels[-1] == "info" else _fine(groups, t)]
    at = levels.index(worst)
    last = max(i for i, level in enumerate(levels) if level not in ("pass", "info"))
    clean = len(groups) - 1 - last
    over = worst == "warn" and clean >= t.recovered_rollouts
    return [_alarm(obs, t, groups, at, worst, groups[last] if over else None)]


def _groups(obs: Observations, t: Thresholds) -> list[_Group]:
    parts: dict[tuple[int, int, int, str, bool], list[Sample]] = {}
    for sample in obs.samples:
        rollout = sample.rollout_id if sample.rollout_id is not None else -1
        turn = _WHEN.index(sample.when) if sample.when in _WHEN else len(_WHEN)
        alone = bool(_ONLY.search(sample.mode))  # another run, kept apart: its good answers do not thin out bad ones
        parts.setdefault((sample.segment, rollout, turn, sample.when, alone), []).append(sample)
    groups = []
    for (segment, rollout, _, when, _alone), members in sorted(parts.items()):
        members.sort(key=lambda sample: (sample.index, sample.excerpt))
        kinds: dict[str, list[Sample]] = {"salad": [], "repeated": [], "first-token": [], "": []}
        for sample in members:
            kinds[pattern_of(sample.text, t)].append(sample)
        bad = (tuple(kinds["salad"]), tuple(kinds["repeated"]), tuple(kinds["first-token"]))
        groups.append(_Group(None if rollout < 0 else rollout, segment, when, len(members), *bad))
    return groups


def _short(group: _Group, t: Thresholds) -> Verdict:
    """Some responses hold bytes that are no text, and are too short to say more."""
    return Verdict(
        ID,
        "info",
        rollout=group.rollout,
        value={"pattern": "salad", "bad": len(group.bad), "of": group.size},
        threshold={"characters": t.text_least_chars, "fail": t.text_fail_share},
        evidence=of_samples(group.salad),
        cause=f"In {group.label} {len(group.salad)} of {group.size} responses hold bytes that are no text, in fewer "
        f"than {t.text_least_chars} characters.",
        advice=("look at longer responses, and at logprob.train-rollout",),
        confidence="low",
    )


def _fine(groups: list[_Group], t: Thresholds) -> Verdict:
    last = groups[-1]
    return Verdict(
        ID,
        "pass",
        rollout=last.rollout,
        value={"pattern": None, "bad": len(last.bad), "of": last.size},
        threshold={"warn": t.text_warn_share, "fail": t.text_fail_share},
        cause=f"The responses are text: {last.size - len(last.bad)} of {last.size} in {last.label}.",
    )


def _alarm(
    obs: Observations, t: Thresholds, groups: list[_Group], at: int, worst: Status, over: _Group | None
) -> Verdict:
    group = groups[at]
    sync = _sync_before(obs, group) if at and groups[at - 1].segment == group.segment else None
    base = pretrained(obs) and at == 0 and group.bad and _rollout_only(obs)
    shown = group.bad or group.odd_start
    cause = f"In {group.label}, {len(shown)} of {count(group.size, 'response')} ({percent(len(shown) / group.size)}) "
    cause += _mechanism(group, at, sync, obs)
    signs = _signs(group, t)
    if signs:
        cause += f" Signs: {', '.join(f'{sign} ({count})' for sign, count in signs.items())}."
    if over is not None:
        cause += f" The last bad one was {over.label}; the rollouts since are text."
    return Verdict(
        ID,
        "info" if base or over is not None else worst,
        rollout=group.rollout,
        value={"pattern": group.pattern, "bad": len(shown), "of": group.size} | ({"signs": signs} if signs else {}),
        threshold={"first_token": t.text_first_share}
        if group.pattern == "first-token"
        else {"warn": t.text_warn_share, "fail": t.text_fail_share},
        evidence=of_samples(shown) + ((of_sync(sync),) if sync else ()),
        cause=cause,
        advice=_advice(group, at, sync, bool(base), obs),
        confidence="low" if group.pattern == "first-token" else "high",
    )


def _signs(group: _Group, t: Thresholds) -> dict[str, int]:
    """How many of the salad responses show which sign, the most frequent first."""
    counts = Counter(sign for sample in group.salad for sign in salad_signs(sample.text, t))
    return dict(counts.most_common())


def _mechanism(group: _Group, at: int, sync: SyncEvent | None, obs: Observations) -> str:
    if group.pattern == "first-token":
        return (
            "start with a token that does not belong to the text after it: a defect of the engine, most likely of its "
            "version."
        )
    if group.pattern == "repeated":
        text = group.repeated[0].text
        if text.phrase_share > max(text.top_id_share, text.top_char_share):
            return f"are {text.phrase!r} over and over: the weights are damaged, or the decoding is greedy and stuck."
        what = f"token id {text.top_id}" if text.top_id_share >= text.top_char_share else f"{text.top_char!r}"
        return f"repeat {what}: the engine's logits are NaN or its weights are zero."
    if sync is not None:
        return (
            f"are no human language, and the rollout before is fine: it is the first one sampled with weights version "
            f"{sync.version}, so that sync spoiled the text."
        )
    if at:
        return "are no human language, while the responses before were."
    if _rollout_only(obs):
        return "are no human language without any trainer: the HF checkpoint or the engine is the cause."
    return (
        "are no human language from the start: the trainer's load, the conversion to HF names, the HF checkpoint and "
        "the engine are candidates, and a rollout-only run separates them."
    )


def _advice(group: _Group, at: int, sync: SyncEvent | None, base: bool, obs: Observations) -> tuple[str, ...]:
    if base:
        return ("--hf-checkpoint: try the instruct model of the same architecture",)
    versions = sorted({engine.version for engine in obs.engines if engine.version})
    if group.pattern == "first-token":
        running = f" (this run has {', '.join(versions)})" if versions else ""
        return (f"run the same prompts on the last engine version that was good{running}", "--debug-rollout-only")
    if group.pattern == "repeated":
        return (
            "look for the first NaN in train/loss, train/grad_norm and rollout/log_probs before this rollout",
            "stop before the next --save-interval: the weights may be spoiled",
            "--debug-rollout-only with the same --hf-checkpoint",
        )
    if sync is not None:
        return (COMPARE, "restart the engines with a full load and compare the next rollout")
    if _rollout_only(obs):
        return ("compare with transformers' own generate() on the same --hf-checkpoint", "another engine version")
    return (
        "--debug-rollout-only with the same --hf-checkpoint",
        "grep 'successfully loaded checkpoint' in the trainer's log",
        COMPARE,
    )


def _sync_before(obs: Observations, group: _Group) -> SyncEvent | None:
    """The sync whose weights this rollout was the first to use."""
    found = [s for s in obs.syncs if s.segment == group.segment and s.rollout_id == group.rollout is not None]
    return max(found, key=lambda sync: (sync.time or 0.0, sync.version), default=None)


def _rollout_only(obs: Observations) -> bool:
    modes = {sample.mode for sample in obs.samples}
    return obs.mode == "rollout-only" or (bool(modes) and all(_ONLY.search(mode) for mode in modes))
