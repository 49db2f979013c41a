"""Lines of Ray and of the placement of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence import literal
from rltop.evidence.lines.line import Line, Recogniser, number

_CREATE = re.compile(r"Creating placement group with (?P<gpus>\d+) GPUs?")
_WAIT = re.compile(
    r"Waiting for placement group of (?P<gpus>\d+) GPUs? \(elapsed (?P<elapsed>[\d.]+)s\): "
    r"(?P<registered>\d+) GPUs? registered with Ray, (?P<available>\d+) available"
)
_BUNDLE = re.compile(
    r"bundle\s+(?P<index>\d+), actual_bundle_index:\s+(?P<actual>\d+), node: (?P<node>\S+?), gpu: (?P<gpu>\d+)"
)
_ASKED = re.compile(
    r"(?:[Pp]lacement|[Bb]undle)[^\[{]{0,80}(?P<bundles>\[\{['\"](?:GPU|CPU)['\"]: )"
    r"|can(?:not|'t)? (?:be )?fulfill[^{]{0,120}(?P<one>\{['\"](?:GPU|CPU)['\"]: )"
)
MOST_BUNDLES = 4096
_RECOVERED = re.compile(r"Recovered (?P<count>\d+) dead rollout engines")
_OF_DRIVER: Mapping[str, object] = {"owner": "launcher"}
"""The driver places the job, whatever the file is called."""


def _create(line: Line) -> Mapping[str, object] | None:
    found = _CREATE.search(line.text)
    return {"gpus": int(found["gpus"]), **_OF_DRIVER} if found else None


def _bundles(line: Line) -> Mapping[str, object] | None:
    """A list of bundles that a program prints before it waits for them (open-instruct, OpenRLHF), or the one that
    Ray's autoscaler has no node for."""
    found = _ASKED.search(line.text)
    if found is None:
        return None
    try:
        value = literal.parse(line.text[max(found.start("bundles"), found.start("one")) :])
    except literal.Unreadable:
        return None
    listed = value if isinstance(value, list) else [value]
    bundles = [
        {str(name): float(amount) for name, amount in one.items() if isinstance(amount, int | float)}
        for one in listed[:MOST_BUNDLES]
        if isinstance(one, dict)
    ]
    if not any(bundles):
        return None
    return {"gpus": int(sum(one.get("GPU", 0.0) for one in bundles)), "bundles": tuple(bundles), **_OF_DRIVER}


def _wait(line: Line) -> Mapping[str, object] | None:
    found = _WAIT.search(line.text)
    if found is None:
        return None
    return {
        "gpus": int(found["gpus"]),
        "elapsed_s": number(found["elapsed"]),
        "registered": int(found["registered"]),
        "available": int(found["available"]),
        **_OF_DRIVER,
    }


def _bundle(line: Line) -> Mapping[str, object] | None:
    found = _BUNDLE.search(line.text)
    if found is None:
        return None
    return {"index": int(found["index"]), "node": found["node"], "gpu": int(found["gpu"]), **_OF_DRIVER}


def _recovered(line: Line) -> Mapping[str, object] | None:
    found = _RECOVERED.search(line.text)
    return {"count": int(found["count"])} if found else None


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("placement_create", ("Creating placement group",), _create),
    Recogniser("placement_create", ("'GPU': ", '"GPU": '), _bundles),
    Recogniser("placement_wait", ("Waiting for placement group",), _wait),
    Recogniser("placement_bundle", ("actual_bundle_index",), _bundle),
    Recogniser("recovered", ("dead rollout engines",), _recovered),
)
