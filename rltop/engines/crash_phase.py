"""What an engine was at when its first fault came: how far its start was, or which part of serving."""

from __future__ import annotations

import re
from enum import StrEnum

from rltop.checks.events import frames, of_kind, word
from rltop.checks.faults import EITHER, engine_phase
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations


class Stage(StrEnum):
    """How far an engine's start is, by its log. In this order; a stage may be skipped, never gone back to."""

    LAUNCHING = "launching"
    """The process exists: imports, arguments. Refused connections mean nothing here."""
    LOADING = "loading"
    CAPTURING = "capturing"
    WARMING = "warming"
    """The port answers, `/health` says 503."""
    READY = "ready"

    @property
    def rank(self) -> int:
        """Place in the order."""
        return list(Stage).index(self)


START = {
    Stage.LAUNCHING: ("launch", "start-up"),
    Stage.LOADING: ("load", "load"),
    Stage.CAPTURING: ("capture", "capture"),
    Stage.WARMING: ("warm-up", "start-up"),
}
"""Phase before an engine is ready: here, and in the words of the table of known crashes."""
STARTS = frozenset(phase for phase, _ in START.values())
WORDS = {
    "launch": "at the start",
    "load": "while weights were loaded",
    "capture": "while CUDA graphs were captured",
    "warm-up": "in the warm-up",
    "prefill": "in prefill",
    "prefill-graph": "in prefill in a CUDA graph",
    "decode": "in decode",
    "decode-graph": "in decode with CUDA graphs",
    "update": "in a weight update",
    "wake": "in the first request after its memory came back",
    "released": "while its memory was released",
    "serve": "while it served",
}
"""Phase -> when it was, for people."""


def phase_of(obs: Observations, event: LogEvent, stage: Stage) -> tuple[str, str]:
    """Phase as here, and in the words of the table of known crashes."""
    if stage is not Stage.READY:
        return START[stage]
    if re.search(r"weight_updater|update_weights", "\n".join(frames(event))):
        return "update", "weight sync"
    if _released(obs, event):
        return "released", "serving"
    name = engine_phase(obs, event)
    if name == "first request after wake-up":
        return "wake", name
    # By the newest batch line the phase would be a guess, and another one at the next crash: the fingerprint must stay.
    path = "\n".join(frames(event))
    for pattern, short in _PATHS:
        if pattern.search(path):
            return ("decode-graph" if short == "decode" and _decodes_in_graphs(obs, event) else short), name
    return "serve", name


_PATHS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"prefill_cuda_graph_runner|piecewise_cuda_graph_runner"), "prefill-graph"),
    (re.compile(r"init_\w*cuda_graph|capture_one_batch|_graph_runner\.py:capture"), "capture"),
    (re.compile(r"replay"), "decode-graph"),
    (re.compile(r"process_batch_result_decode|forward_decode|execute_decode|verify"), "decode"),
    (EITHER, "serve"),
    (re.compile(r"process_batch_result_prefill|extend|prefill"), "prefill"),
)
"""Phase by the frames of a fault in an engine that serves."""


def _released(obs: Observations, event: LogEvent) -> bool:
    """Its memory was released and not brought back."""
    state = False
    for other in of_kind(obs, "http", "release", "resume"):
        if other.order > event.order:
            break
        path = word(other, "path")
        if other.kind == "release" or path.startswith("/release_memory"):
            state = True
        elif other.kind == "resume" or path.startswith("/resume_memory"):
            state = False
    return state


_CAPTURED = re.compile(r"Captur\w+ (?:target )?(?:decode|verify|cuda)", re.I)


def _decodes_in_graphs(obs: Observations, event: LogEvent) -> bool:
    """Because such a graph was captured, else by the newest decode line."""
    if any(_CAPTURED.search(one.text) for one in of_kind(obs, "engine_stage") if one.order < event.order):
        return True
    batches = [one for one in of_kind(obs, "decode") if one.order < event.order]
    return bool(batches) and "cuda graph: True" in batches[-1].text
