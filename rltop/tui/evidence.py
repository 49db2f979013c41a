"""Where the evidence of a verdict can be opened: a line of a log, or a metric at a step. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from rltop.tui.picture import CHARTS, CheckView, State, chart_key

_METRIC = re.compile(r"(?P<name>[^@]+/[^@]+)@(?P<step>\d{1,15})$")


class LinePlace(Struct, frozen=True):
    """A line of a log."""

    source: str
    line: int
    text: str = ""


class ChartPlace(Struct, frozen=True):
    """A step of a chart."""

    chart: int
    """Index in `CHARTS`."""
    key: str
    step: int


Place = LinePlace | ChartPlace


def places(view: CheckView, state: State) -> tuple[list[LinePlace], list[ChartPlace]]:
    """Lines and charts of a check's evidence, in its order, each once."""
    lines: list[LinePlace] = []
    charts: list[ChartPlace] = []
    for item in view.evidence:
        place = place_of(item, state)
        if isinstance(place, LinePlace) and place not in lines:
            lines.append(place)
        elif isinstance(place, ChartPlace) and place not in charts:
            charts.append(place)
    return lines, charts


def place_of(item: Mapping[str, Any], state: State) -> Place | None:
    """Where one piece of evidence can be looked at; None where nowhere."""
    source, line = item.get("source"), item.get("line")
    if not isinstance(source, str):
        return None
    if isinstance(line, int) and not isinstance(line, bool) and line > 0:
        return LinePlace(source, line, str(item.get("text") or ""))
    found = _METRIC.match(source)
    if found is None:
        return None
    for index, spec in enumerate(CHARTS):
        if chart_key(spec, state) == found["name"]:
            return ChartPlace(index, found["name"], int(found["step"]))
    return None
