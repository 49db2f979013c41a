"""Text of the run is made safe and measured; numbers and ages are short."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.tui import text

calm = settings(deadline=None)  # a shared machine has no clock to rely on
ANYTHING = st.text(alphabet=st.characters(codec=None), max_size=60)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;window title\x07after", "after"),
        ("\x1b]52;c;ZXZpbA==\x1b\\after", "after"),
        ("\x9b31mred", "red"),
        ("\x1bPq#0\x1b\\after", "after"),
        ("\x1b[2J\x1b[H", ""),
        ("bell\x07 back\x08space null\x00", "bell backspace null"),
        ("two\nlines\ttab", "two↵lines tab"),
        ("carriage\r\nreturn\rX", "carriage↵return X"),
        ("[bold]markup stays text[/]", "[bold]markup stays text[/]"),
        ("\u202eright to left\u202c", "right to left"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("heart \u2764\ufe0f", "heart \u2764"),
        ("a" + "\u0301" * 9, "a\u0301\u0301"),
        ("private \ue0b0", "private \N{REPLACEMENT CHARACTER}"),
        ("lone \ud800", "lone \N{REPLACEMENT CHARACTER}"),
        ("你好", "你好"),
        ("unfinished \x1b]0;title that never ends", "unfinished "),
    ],
)
def test_what_could_steer_the_terminal_is_removed(raw: str, shown: str) -> None:
    assert text.clean(raw) == shown


@calm
@given(ANYTHING)
def test_clean_text_has_no_control_format_or_surrogate_character(raw: str) -> None:
    shown = text.clean(raw)
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn") for char in shown)
    assert text.clean(shown) == shown


@calm
@given(ANYTHING)
def test_ascii_mode_leaves_only_printable_ascii(raw: str) -> None:
    assert all(" " <= char <= "~" for char in text.clean(raw, ascii_only=True))


@calm
@given(ANYTHING, st.integers(0, 30))
def test_fitted_and_padded_text_has_the_width_that_was_asked_for(raw: str, width: int) -> None:
    shown = text.clean(raw)
    assert text.cells(text.fit(shown, width)) <= width
    assert text.cells(text.fit_middle(shown, width)) <= width
    assert text.cells(text.pad(shown, width)) == width


@calm
@given(ANYTHING, st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_nothing_but_blanks(raw: str, width: int) -> None:
    shown = text.clean(raw)
    lines = text.wrap(shown, width)
    assert all(text.cells(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == shown.replace(" ", "")


def test_wide_and_combining_characters_are_measured_in_cells() -> None:
    assert text.cells("你好") == 4
    assert text.cells("e\u0301") == 1
    assert text.pad("你好吗", 5) == "你好…"
    assert text.fit_middle("gpu-node-0123456789", 9) == "gpu-…6789"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.81234, "0.812"),
        (0.0123456, "0.0123"),
        (1e-8, "1e-8"),
        (3.26e-9, "3.3e-9"),
        (42, "42"),
        (9.9996, "10"),
        (99.96, "100"),
        (1234, "1234"),
        (12345, "12.3k"),
        (999_999, "1000k"),
        (1.5e9, "1500M"),
        (4e15, "4e15"),
        (-0.5, "-0.5"),
        (math.nan, "NaN"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
    ],
)
def test_numbers_are_short_and_say_what_they_are(value: float | None, shown: str) -> None:
    assert text.num(value) == shown


@calm
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_has_at_most_eight_characters(value: float) -> None:
    assert len(text.num(value)) <= 8
    assert len(text.num(value, steady=True)) <= 8


@pytest.mark.parametrize(
    ("seconds", "fine", "coarse"),
    [
        (0.42, "0.4s", "now"),
        (9.96, "9s", "5s"),
        (59.9, "59s", "55s"),
        (200, "3m20s", "3m"),
        (7500, "2h05m", "2h"),
        (400_000, "4d15h", "4d"),
        (-1.0, "0.0s", "now"),
    ],
)
def test_ages(seconds: float, fine: str, coarse: str) -> None:
    assert (text.age(seconds), text.coarse_age(seconds)) == (fine, coarse)
