"""The lines at the bottom of the engine screen: what is staged and not sent, and the operations that run."""

from __future__ import annotations

from rltop.tui.engine_scene import Scene
from rltop.tui.operations import OpView
from rltop.tui.rows import Row, crop
from rltop.tui.staging import Staging, changes_text
from rltop.tui.text import age

_MOST_OPS = 3


def strip_rows(scene: Scene, staging: Staging, width: int) -> list[Row]:
    """What is staged, and the operations that run."""
    rows: list[Row] = []
    if staging.changes:
        told = f"{scene.named(scene.targets)}: "
        told += scene.frame.safe(changes_text(staging.changes))
        rows.append(crop(((" staged for ", "accent"), (told, "accent+b")), width))
    for op in [op for op in scene.ops if op.runs][:_MOST_OPS]:
        rows.append(_op_row(op, scene, width))
    return rows


def _op_row(op: OpView, scene: Scene, width: int) -> Row:
    frame = scene.frame
    timed = op.timed(frame.server_now)
    seconds = timed[-1][1] if timed else frame.since(op.t)
    stage = frame.safe(op.stage or op.state)
    who = f" {frame.glyphs.dot} {frame.safe(op.who)}" if op.who else ""
    row: Row = (
        (f" {frame.glyphs.wait} {op.name} {frame.safe(op.target)}", "accent+b"),
        (f"  {stage}", "text"),
        (f" {age(seconds)}" if seconds is not None else "", "strong"),
        (f"  {op.percent:.0f}%" if op.percent is not None else "", "text"),
        (who, "dim"),
    )
    return crop(row, width)
