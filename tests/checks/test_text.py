"""`rollout.text`: which texts are no text. The corpus holds what must pass and what must not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.rules.rollout_text import pattern_of
from rltop.checks.scripts import families, mixture, runs
from rltop.checks.text import measure
from rltop.checks.thresholds import DEFAULTS
from tests.checks.corpus import BROKEN, ORDINARY, salad


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_text_of_any_kind_raises_no_alarm(name: str) -> None:
    facts = measure(ORDINARY[name])
    assert pattern_of(facts, DEFAULTS) == "", facts


@pytest.mark.parametrize("name", [name for name, text in ORDINARY.items() if len(text) >= 60])
def test_ordinary_text_stays_ordinary_when_it_is_long(name: str) -> None:
    facts = measure("\n\n".join([ORDINARY[name].rstrip("\ufffd")] * 60))
    assert pattern_of(facts, DEFAULTS) == "", facts


@pytest.mark.parametrize("name", BROKEN)
def test_broken_text_is_recognised(name: str) -> None:
    text, pattern = BROKEN[name]
    facts = measure(text)
    assert pattern_of(facts, DEFAULTS) == pattern, facts


def test_text_below_sixty_characters_is_salad_only_if_undecodable_but_may_be_repeated() -> None:
    assert pattern_of(measure("馬車 ндло ขอ λόγ مدر ביצ 石 zust"), DEFAULTS) == ""
    assert pattern_of(measure("馬車 ндло ขอ λόγ \ufffd\x01\x02\x03"), DEFAULTS) == "salad"
    assert pattern_of(measure("!" * 30), DEFAULTS) == "repeated"


def test_one_token_id_throughout_is_repeated_even_when_the_text_is_empty() -> None:
    assert pattern_of(measure("", token_ids=[0] * 64), DEFAULTS) == "repeated"
    assert pattern_of(measure("", token_ids=[0] * 19), DEFAULTS) == ""


@pytest.mark.parametrize("prompt", ["Translate into ten languages: hello", "馬車 ндло ขอ λόγος?"])
def test_a_mixture_of_scripts_that_the_prompt_asks_for_is_fine(prompt: str) -> None:
    answer = "English: hello. Русский: привет. 中文: 你好. العربية: مرحبا. ไทย: สวัสดี. Ελληνικά: γειά. हिन्दी: नमस्ते."
    assert pattern_of(measure(answer, prompt=prompt), DEFAULTS) == ""
    assert pattern_of(measure(answer, prompt="Solve 3 + 4"), DEFAULTS) == "salad"


def test_a_prompt_about_languages_does_not_excuse_undecodable_bytes() -> None:
    assert pattern_of(measure(BROKEN["undecodable 0"][0], prompt="translate this"), DEFAULTS) == "salad"


def test_thresholds_decide_after_the_measuring() -> None:
    facts = measure(salad(1))
    lenient: dict[str, Any] = {
        "text_scripts": 99,
        "text_function_share": 0.0,
        "text_joined_share": 1.1,
        "text_third_share": 1.1,
    }
    assert pattern_of(facts, dataclasses.replace(DEFAULTS, **lenient, text_disorder=99.0)) == ""


def test_kana_and_han_are_one_family_and_lone_greek_letters_none() -> None:
    assert families("東京タワーへ行く") == {"cjk"}
    assert families("α = 2π") == frozenset()
    assert [word for _, _, word in runs("zurück馬車")] == ["zurück", "馬車"]


def test_a_mixture_counts_only_within_the_window() -> None:
    far = [(0, "latin"), (500, "cjk"), (1000, "thai"), (1500, "cyrillic")]
    near = [(0, "latin"), (5, "cjk"), (10, "thai"), (15, "cyrillic")]
    assert mixture(far, window=400, least=4) == (0, 0.0)
    assert mixture(near, window=400, least=4) == (4, 1.0)


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=50), st.lists(st.integers(0, 5), max_size=40))
def test_any_text_can_be_measured(response: str, prompt: str, token_ids: list[int]) -> None:
    facts = measure(response, prompt=prompt, token_ids=token_ids)
    shares = (facts.switch_share, facts.control_share, facts.function_share, facts.structure, facts.top_char_share)
    assert all(0 <= share <= 1 for share in (*shares, facts.top_id_share))
    assert pattern_of(facts, DEFAULTS) in ("", "salad", "repeated", "first-token")
