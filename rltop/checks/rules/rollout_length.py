"""`rollout.truncated` and `rollout.len-over-cap`: do responses end by themselves, and within their limit?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import fires
from rltop.checks.observe import Axis, Observations, Sample
from rltop.checks.phrase import missing, num, of_event, of_flags, of_place, of_points, of_samples, percent
from rltop.checks.series import Point, finite, points
from rltop.checks.syncs import message
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

TRUNCATED = "rollout.truncated"
OVER = "rollout.len-over-cap"
RATIO = ("rollout/truncated_ratio", "rollout/truncated", "completions/clipped_ratio")
LONGEST = ("rollout/response_len/max", "completions/max_length")
CAP = "rollout_max_response_len"
_TOO_LONG = "Requested token count exceeds"
CAP_METRICS = ("max_completion_length", "rollout/max_completion_length", "train/max_completion_length")
_LENGTH = ("length", "truncated")
_AXES: tuple[Axis, ...] = ("rollout", "train")
_OWN_LENGTHS = ("custom_generate_function_path", "max_turns", "max_assistant_turns", "multi_turn", "rollout_max_turns")
"""Arguments under which a response is several generations: its total may exceed the cap of one."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """How the responses of one rollout ended."""

    rollout: int | None
    ratio: float
    evidence: tuple[Evidence, ...]
    longest: float | None = None
    stopped: float | None = None
    """Share of samples that say that they stopped by themselves."""


def cap_of(obs: Observations) -> float | None:
    """Tokens that one response may have."""
    given = obs.args.number(CAP)
    if given:
        return given
    for name in CAP_METRICS:
        for axis in _AXES:
            found = finite(points(obs, name, axis))
            if found:
                return found[-1].value
    return obs.args.number("max_completion_length")


def first_series(obs: Observations, names: Iterable[str]) -> tuple[Point, ...]:
    """Points of the first of these metrics that is there."""
    for name in names:
        for axis in _AXES:
            if found := finite(points(obs, name, axis)):
                return found
    return ()


# -- rollout.truncated


def check_truncated(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the newest rollouts: the first of them with the worst share."""
    rollouts = _rollouts(obs)
    if not rollouts:
        return [Verdict(TRUNCATED, "skip", cause=missing(obs, "the share of truncated responses, or finish reasons"))]
    cap = cap_of(obs)
    rollouts = rollouts[-t.recovered_rollouts :]
    levels = [_level(one, cap, t) for one in rollouts]
    worst: Status = next((level for level in ("fail", "warn", "info") if level in levels), "pass")
    at = levels.index(worst) if worst != "pass" else len(levels) - 1
    return [_verdict(obs, t, rollouts[at], worst, cap)]


def _level(one: Rollout, cap: float | None, t: Thresholds) -> Status:
    if one.ratio < t.truncated_warn:
        return "pass"
    below = cap is not None and one.longest is not None and one.longest < cap
    if below or (one.stopped is not None and one.stopped > 1 - t.truncated_warn):
        return "info"
    return "fail" if one.ratio >= t.truncated_fail else "warn"


def _rollouts(obs: Observations) -> list[Rollout]:
    groups: dict[tuple[int, int | None], list[Sample]] = {}
    for sample in obs.samples:
        if sample.finish_reason or sample.status in ("completed", "truncated"):
            groups.setdefault((sample.segment, sample.rollout_id), []).append(sample)
    series = first_series(obs, RATIO)
    if series:
        longest = {(p.segment, p.step): p.value for p in first_series(obs, LONGEST)}
        anywhere = groups.get((0, None)) if len(groups) == 1 else None
        found = []
        for point in series:
            group = groups.get((point.segment, point.rollout), anywhere or [])
            top = longest.get((point.segment, point.step))
            found.append(Rollout(point.rollout, point.value, of_points((point,)), top, _stopped(group)))
        return found
    found = []
    for (_, rollout), group in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        cut = [sample for sample in group if sample.finish_reason in _LENGTH or sample.status == "truncated"]
        found.append(Rollout(rollout, len(cut) / len(group), of_samples(cut or group[:1]), _longest(group), None))
    return found


def _stopped(group: list[Sample]) -> float | None:
    said = [sample for sample in group if sample.finish_reason]
    return sum(sample.finish_reason in ("stop", "eos") for sample in said) / len(said) if said else None


def _longest(group: list[Sample]) -> float | None:
    return max((sample.response_length for sample in group if sample.response_length is not None), default=None)


def _verdict(obs: Observations, t: Thresholds, one: Rollout, status: Status, cap: float | None) -> Verdict:
    where = "The evidence" if one.rollout is None else f"Rollout {one.rollout}"
    limit = f"the cap of {cap:.0f} tokens" if cap else "the cap"
    cause = f"{where}: {percent(one.ratio)} of the responses were cut at {limit}."
    advice: tuple[str, ...] = ()
    if status in ("warn", "fail"):
        cause = f"{where}: {percent(one.ratio)} of the responses did not end by themselves but at {limit}."
        advice = (
            "check that the turn terminator is in the stop set (generation_config.json, --rollout-stop-token-ids)",
            "--rollout-max-response-len: a larger value, if the responses are sound and merely long",
            "read one whole response: broken weights give the same picture",
        )
        if others := fires(obs, "rollout.text", "train.nan"):
            cause += f" {others[0].id} says what these responses are."
            advice = ("mend the text first: responses of broken weights do not end",)
    elif status == "info":
        longest = f" (the longest response has {one.longest:.0f} tokens)" if one.longest is not None else ""
        stopped = f", and {percent(one.stopped)} of the samples say that they stopped" if one.stopped else ""
        cause = f"{where}: the metric says that {percent(one.ratio)} of the responses were truncated, but they were not"
        cause += f"{longest}{stopped}: it does not count a second end-of-text token as an end."
        advice = ("count every eos_token_id of generation_config.json as an end",)
    return Verdict(
        TRUNCATED,
        status,
        rollout=one.rollout,
        value={"ratio": one.ratio, "longest": one.longest, "cap": cap, "stopped": one.stopped},
        threshold={"warn": t.truncated_warn, "fail": t.truncated_fail},
        evidence=(*one.evidence, *of_flags(obs.args, CAP)),
        cause=cause,
        advice=advice,
    )


# -- rollout.len-over-cap


def check_over(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the first rollout with a response above the cap."""
    refused = [of_event(event) for event in obs.events if event.kind == "over_length"]
    refused += [of_place(call.where) for call in obs.http if call.where and _TOO_LONG in message(call)]
    cap = cap_of(obs)
    turns = next((name for name in _OWN_LENGTHS if obs.args.on(name)), "")
    if turns and not refused:
        cause = f"--{turns.replace('_', '-')} makes a response of several generations: the cap is that of one"
        return [Verdict(OVER, "skip", cause=cause)]
    series = [] if turns else list(first_series(obs, LONGEST))
    lengths = [] if turns else [s for s in obs.samples if s.response_length is not None]
    if not refused and (cap is None or not (series or lengths)):
        what = "--rollout-max-response-len" if cap is None else "the length of a response"
        return [Verdict(OVER, "skip", cause=missing(obs, what))]
    above = next((point for point in series if cap is not None and point.value > cap), None)
    long = [s for s in lengths if cap is not None and (s.response_length or 0) > cap]
    if above is None and not long and not refused:
        most = max([point.value for point in series] + [float(s.response_length or 0) for s in lengths])
        cause = f"The longest response has {num(most)} tokens, the cap is {cap:.0f}."
        return [Verdict(OVER, "pass", value={"longest": most}, threshold=cap, cause=cause)]
    return [_over(obs, cap, above, long, refused)]


def _over(
    obs: Observations, cap: float | None, above: Point | None, long: list[Sample], refused: list[Evidence]
) -> Verdict:
    longest: float | None = above.value if above else None
    rollout = above.rollout if above else None
    if longest is None and long:
        told = [s.rollout_id for s in long if s.rollout_id is not None]
        longest, rollout = float(max(s.response_length or 0 for s in long)), min(told, default=None)
    if longest is not None:
        where = "" if rollout is None else f" in rollout {rollout}"
        cause = f"A response{where} has {longest:.0f} tokens, the cap --rollout-max-response-len is {cap:.0f}"
        cause += ": an aborted sample keeps its tokens and gets the full budget again when it is retried."
    else:
        cause = "An engine refused a request because prompt and budget together exceed the context"
        asked = next((e.data for e in obs.events if e.kind == "over_length" and e.data.get("requested")), {})
        cause += f": {asked['requested']} tokens, {asked.get('limit')} fit" if asked else f": {refused[0].text[:200]}"
        cause += "; an aborted sample keeps its tokens and asks for the full budget again when it is retried."
    partial = obs.args.on("partial_rollout")
    return Verdict(
        OVER,
        "fail",
        rollout=rollout,
        value={"longest": longest, "refused": len(refused)},
        threshold={"cap": cap},
        evidence=(
            *(of_points((above,)) if above else of_samples(long)),
            *refused[:2],
            *of_flags(obs.args, CAP, "partial_rollout"),
        ),
        cause=cause,
        advice=(
            "subtract the kept tokens from the budget of the retry",
            "leave out --partial-rollout until then" if partial else "--rollout-max-context-len",
        ),
    )
