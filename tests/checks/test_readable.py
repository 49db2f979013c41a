"""How well `rollout.text` tells healthy responses from broken ones, by kind and language. Prints the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from rltop.checks.rules.rollout_text import pattern_of
from rltop.checks.text import measure
from rltop.checks.thresholds import DEFAULTS
from tests.checks.readable import Response, damaged, generated, healthy

BROKEN = ("salad", "repeated")


def caught(responses: Iterable[Response]) -> list[tuple[Response, bool]]:
    return [(response, pattern_of(measure(response.text), DEFAULTS) in BROKEN) for response in responses]


def share(judged: list[tuple[Response, bool]]) -> float:
    return sum(found for _, found in judged) / len(judged)


def table(title: str, judged: list[tuple[Response, bool]], by: str) -> str:
    total = Counter(getattr(response, by) for response, _ in judged)
    found = Counter(getattr(response, by) for response, is_broken in judged if is_broken)
    rows = [f"  {name:<34} {found[name]:>4} of {count}" for name, count in total.items()]
    return "\n".join([f"{title}: {sum(found.values())} of {len(judged)} ({share(judged):.2%})", *rows])


def test_at_most_one_percent_of_healthy_responses_is_called_broken(capsys: pytest.CaptureFixture[str]) -> None:
    judged = caught(healthy())
    held_out = [pair for pair in judged if pair[0].held_out]
    with capsys.disabled():
        print(f"\n{table('false alarms by kind', judged, 'group')}\nof those not fitted to: {share(held_out):.2%}")
    languages = {response.detail for response, _ in judged if response.group in ("prose", "udhr")}
    assert len(judged) >= 400
    assert len(languages) >= 12
    assert share(judged) <= 0.01
    assert sum(found for _, found in held_out) <= 3


def test_nearly_all_broken_responses_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    real, made = caught(damaged()), caught(generated())
    held_out = [pair for pair in real if pair[0].held_out]
    with capsys.disabled():
        print(f"\n{table('nonsense of damaged models', real, 'group')}\nof those not fitted to: {share(held_out):.2%}")
        print(table("the same by prompt", real, "detail"))
        print(table("generated", made, "group"))
        print(table("impaired, with some sense left (not asserted)", caught(damaged("impaired")), "group"))
    assert len(real) >= 150
    assert len(real) + len(made) >= 400
    assert share(real + made) >= 0.98
    assert share(real) >= 0.96
    assert share(held_out) >= 0.96


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("\ufffd\ufffd\ufffd\ufffd\x12\ufffd\x03", "salad"),
        ("\u00d0\u00bf\u00d1\u0080\u00d0\u00b8\u00d0\u00b2\u00d0\u00b5\u00d1\u0082", "salad"),
        ("<0xE3><0x81><0x82>", "salad"),
        ("caf\u00e9\u00bb", ""),
        ("\u00c9t\u00e9\u2026", ""),
        ("La r\u00e9ponse \ufffd\ufffd", ""),
    ],
)
def test_a_short_response_is_broken_if_it_cannot_be_decoded(text: str, pattern: str) -> None:
    assert pattern_of(measure(text), DEFAULTS) == pattern


def test_a_phrase_that_the_prompt_asks_for_may_be_repeated() -> None:
    answer = "I must not talk in class. " * 40
    assert pattern_of(measure(answer), DEFAULTS) == "repeated"
    assert pattern_of(measure(answer, prompt="Write 40 times: I must not talk in class."), DEFAULTS) == ""


def test_a_loop_at_the_end_of_a_text_is_no_repeated_text() -> None:
    start = next(response.text for response in healthy() if response.group == "prose")
    assert pattern_of(measure(start + " and so on and so on" * 5), DEFAULTS) == ""
