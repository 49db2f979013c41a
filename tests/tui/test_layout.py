"""Panes fill the screen, never overlap, and every pane can be reached at every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rltop.tui.keytable import PANES
from rltop.tui.layout import LEAST, arrange, fits


@given(
    st.integers(LEAST[0], 300),
    st.integers(LEAST[1], 120),
    st.integers(2, 3),
    st.integers(0, 500),
    st.sampled_from(PANES),
    st.booleans(),
)
def test_places_tile_the_body_and_hold_every_pane_once(
    width: int, height: int, header: int, engines: int, active: str, full: bool
) -> None:
    places = arrange(width, height, header, engines, active, "events", full=full)
    assert sorted(pane for place in places for pane in place.panes) == sorted(PANES)
    assert any(place.shown == active for place in places)
    cells = set()
    for place in places:
        box = place.box
        assert box.width > 0
        assert box.height >= 3
        for y in range(box.y, box.y + box.height):
            for x in (box.x, box.x + box.width - 1):
                assert header <= y < height - 1
                assert 0 <= x < width
                assert (x, y) not in cells
                cells.add((x, y))


def test_common_sizes() -> None:
    assert len(arrange(80, 24, 2, 1, "checks", "events", full=False)) == 1
    assert len(arrange(120, 40, 2, 1, "checks", "events", full=False)) == 4
    assert len(arrange(80, 50, 2, 1, "checks", "events", full=False)) == 3
    assert not fits(20, 5)


def test_few_engines_take_little_room_and_many_not_all() -> None:
    def rows(engines: int) -> int:
        places = arrange(120, 40, 2, engines, "checks", "events", full=False)
        return next(place.box.height for place in places if place.shown == "engines")

    assert rows(1) == 3
    assert rows(64) == 11
