"""`rollout.text` over whole rollouts: shares, change points, exemptions."""

from __future__ import annotations

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.observe import EngineFact, Observations, Sample, SyncEvent
from tests.checks.build import GOOD_TEXT, at, firing, healthy, obs, sample, verdict
from tests.checks.corpus import BROKEN, ORDINARY, salad

TEXT = "rollout.text"
HALVES = "Sorted: \ufffd\ufffd 2 \ufffdd: 9."
"""What a model over bytes writes before it has learned not to."""
BASE = {"hf_checkpoint": "/models/Qwen3-4B-Base"}


def texts(*responses: str, rollout: int | None = 0, **more: str) -> list[Sample]:
    return [sample(text, rollout_id=rollout, index=i, **more) for i, text in enumerate(responses)]


def mixed(bad: int, of: int, rollout: int = 0) -> list[Sample]:
    return texts(*[salad(i) for i in range(bad)], *[GOOD_TEXT] * (of - bad), rollout=rollout)


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*texts(*ORDINARY.values())), "pass", "are text"),
        (obs(*mixed(0, 20)), "pass", "20 of 20"),
        (obs(*mixed(1, 20)), "warn", "1 of 20"),
        (obs(*mixed(1, 24)), "pass", "23 of 24"),
        (obs(*mixed(6, 20)), "fail", "30 %"),
        (obs(*mixed(1, 3)), "warn", "1 of 3"),
        (obs(*mixed(1, 2)), "fail", "1 of 2"),
        (obs(*texts("!" * 99, GOOD_TEXT, GOOD_TEXT, GOOD_TEXT)), "warn", "'!'"),
        (obs(*texts("!" * 99, "!" * 99)), "fail", "logits are NaN"),
        (obs(*texts("", "")), "skip", "empty"),
        (obs(*texts("Sorted: 1 3 7.", "Sorted: 2 2 9.")), "pass", "are text"),
        (obs(), "skip", "not in the evidence"),
        (obs(live=True), "skip", "not seen yet"),
        (obs(*mixed(4, 4)), "fail", "candidates"),
        (obs(*mixed(4, 4), mode="rollout-only"), "fail", "without any trainer"),
        (obs(*mixed(4, 4), mode="rollout-only", flags=BASE), "info", "without any trainer"),
        (obs(*mixed(4, 4), flags=BASE), "fail", "candidates"),
        (obs(*mixed(0, 4), *mixed(4, 4, rollout=1)), "fail", "while the responses before were"),
    ],
)
def test_a_rollout_is_judged_by_the_share_of_its_bad_responses(
    observations: Observations, status: str, words: str
) -> None:
    found = verdict(TEXT, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_the_first_bad_rollout_after_a_sync_names_it() -> None:
    rows = [*mixed(0, 4), *mixed(0, 4, rollout=1), *mixed(4, 4, rollout=2)]
    found = verdict(TEXT, obs(*rows, SyncEvent("1", 1), SyncEvent("2", 2)))
    assert (found.status, found.rollout, found.value["pattern"]) == ("fail", 2, "salad")
    assert "weights version 2" in found.cause
    assert any(e.source == "weights@2" for e in found.evidence)


def test_samples_without_rollout_ids_are_ordered_by_what_they_say() -> None:
    before = texts(GOOD_TEXT, rollout=None, when="before_update")
    after = texts(salad(1), rollout=None, when="after_update")
    found = verdict(TEXT, obs(*after, *before))
    assert "In the responses after the update" in found.cause
    assert "while the responses before were" in found.cause


def test_odd_first_tokens_are_a_warning_of_low_confidence_about_the_engine() -> None:
    odd = [BROKEN[name][0] for name in ("stray identifier", "glued word", "other script")]
    rows = texts(*odd, *[GOOD_TEXT] * 3, mode="debug_rollout_only")
    found = verdict(TEXT, obs(*rows, engines=(EngineFact("0", version="0.5.9"),)))
    assert (found.status, found.confidence, found.value["pattern"]) == ("warn", "low", "first-token")
    assert "0.5.9" in found.advice[0]
    assert verdict(TEXT, obs(*texts(odd[0], *[GOOD_TEXT] * 10))).status == "pass"


def test_a_warning_ends_after_enough_good_rollouts_and_a_fail_does_not() -> None:
    bad = mixed(1, 4, rollout=3)
    good = [s for r in range(4, 24) for s in mixed(0, 2, rollout=r)]
    assert verdict(TEXT, obs(*mixed(0, 4), *bad, *good[:-2])).status == "warn"
    assert verdict(TEXT, obs(*mixed(0, 4), *mixed(4, 4, rollout=3), *good)).status == "fail"
    found = verdict(TEXT, obs(*mixed(0, 4), *bad, *good))
    assert (found.status, found.rollout) == ("info", 3)
    assert "The last bad one was rollout 3" in found.cause


def test_evidence_is_the_place_in_a_file_or_the_rollout() -> None:
    offline = verdict(TEXT, obs(sample(salad(1), where=at(7, "samples.jsonl"))))
    assert (offline.evidence[0].source, offline.evidence[0].line) == ("samples.jsonl", 7)
    live = verdict(TEXT, obs(*texts(salad(1), rollout=5)))
    assert (live.evidence[0].source, live.evidence[0].line) == ("samples@5", None)


def test_both_patterns_in_one_rollout_are_counted_together() -> None:
    found = verdict(TEXT, obs(*texts(salad(1), "!" * 99, *[GOOD_TEXT] * 4)))
    assert (found.status, found.value["bad"]) == ("fail", 2)


def test_one_short_response_with_half_a_character_is_no_alarm() -> None:
    """A log prints one response of a rollout."""
    half = obs(sample(HALVES, rollout_id=0), sample("Sorted: 1 2 3", rollout_id=1))
    assert verdict("rollout.text", half).status in ("pass", "info")
    texts_of_two = (sample("Sorted: 1 2 3", rollout_id=0), sample(HALVES, rollout_id=1))
    assert firing(evaluate(obs(*texts_of_two, healthy(0), healthy(1)))) == {}


def test_a_rollout_full_of_them_is_one() -> None:
    assert verdict(TEXT, obs(*texts(*[HALVES] * 8))).status == "fail"
    assert verdict(TEXT, obs(*texts(*[HALVES], *[GOOD_TEXT] * 7))).status == "info"
