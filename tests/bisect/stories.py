"""Bisections for the tests: the cell `bisect` as a daemon shows it (docs/protocol.md)."""

from __future__ import annotations

from typing import Any

NOW = 1_760_000_000.0
TOGGLES = ["cuda_graph", "speculative", "deepep", "overlap_schedule"]
CULPRIT = ["cuda_graph", "speculative"]


def trial(n: int, off: list[str], outcome: str, minutes: float, **more: Any) -> dict[str, Any]:
    """One trial; keywords replace its fields."""
    argv = {"cuda_graph": "+ --disable-cuda-graph", "speculative": "- --speculative-algorithm NGRAM"}
    base: dict[str, Any] = {
        "n": n,
        "engine": str(n % 2),
        "generation": 2 + n // 2,
        "on": [name for name in TOGGLES if name not in off],
        "off": off,
        "outcome": outcome,
        "minutes": minutes,
        "planned": 12.0,
        "started": NOW - 3600 + 400 * n,
        "ended": None if outcome == "running" else NOW - 3300 + 400 * n,
        "ready": True,
        "why": f"try without {', '.join(off)}: 61% of the belief says that it can crash there",
        "counts": True,
        "fingerprint": "ima/decode-graph/656fb6" if outcome == "crashed" else None,
        "kernel": None,
        "log": f"engines/{n % 2}/{2 + n // 2}/stdout.log",
        "note": "",
        "requests": 40 * n,
        "argv": [argv.get(name, f"+ --disable-{name.replace('_', '-')}") for name in off],
    }
    return base | more


def running(**more: Any) -> dict[str, Any]:
    """In the middle: two trials run, four are over; keywords replace fields of the cell."""
    base: dict[str, Any] = {
        "id": "3",
        "state": "running",
        "mode": "in-fleet",
        "engines": ["0", "1"],
        "dropped": {},
        "toggles": list(TOGGLES),
        "fixed": [],
        "aliases": {},
        "started": NOW - 3600,
        "ended": None,
        "minutes": 58.4,
        "budget_min": 1440.0,
        "time_scale": 1.0,
        "left_min": [20.0, 90.0],
        "error": None,
        "crash": {
            "engine": "2",
            "generation": 1,
            "fingerprint": "ima/decode-graph/656fb6",
            "cause": "Illegal memory access on the GPU in decode with CUDA graphs",
            "kernel": "build_tree_efficient",
            "phase": "decode-graph",
            "weight_version": "42",
            "injected": None,
        },
        "facts": [
            {
                "text": "kernel build_tree_efficient (speculative decoding)",
                "source": "core dump",
                "moves": [[["speculative"], 15.0]],
            },
            {
                "text": "it died in phase decode-graph",
                "source": "crash.json",
                "moves": [[["cuda_graph"], 3.0], [["deepep"], 0.8]],
            },
        ],
        "traffic": {"source": "captured from engine 2, generation 1", "requests": 57, "concurrency": 13},
        "posterior": [
            {"culprit": CULPRIT, "words": "cuda_graph x speculative", "p": 0.71},
            {"culprit": ["speculative"], "words": "speculative", "p": 0.16},
            {"culprit": ["speculative", "overlap_schedule"], "words": "speculative x overlap_schedule", "p": 0.06},
            {"culprit": [], "words": "something else", "p": 0.03},
            {"culprit": [], "words": "none of these", "p": 0.004},
        ],
        "involved": {"cuda_graph": 0.76, "speculative": 0.95, "deepep": 0.02, "overlap_schedule": 0.09},
        "trials": [
            trial(1, ["cuda_graph", "deepep"], "quiet", 21.0),
            trial(2, ["deepep"], "crashed", 9.5),
            trial(3, ["deepep", "overlap_schedule"], "crashed", 3.2),
            trial(4, ["cuda_graph", "deepep", "overlap_schedule"], "lost", 0.0, counts=False, note="no port was free"),
            trial(5, ["deepep", "overlap_schedule"], "running", 4.1),
            trial(6, ["speculative"], "running", 0.0, ready=False),
        ],
        "next": [
            {
                "engine": "1",
                "on": ["cuda_graph", "speculative"],
                "off": ["deepep", "overlap_schedule"],
                "minutes": 12.0,
                "crash": 0.44,
                "bits": 0.61,
                "why": "try only cuda_graph, speculative: 97% of the belief says that it can crash there",
            }
        ],
        "verdict": None,
        "kernel": {"name": "build_tree_efficient", "block": [12, 0, 0], "source": "core dump", "weaker": False},
        "restored": {},
        "notes": [],
        "reason": "ticket 7",
        "who": "ana (unverified)",
    }
    return base | more


def ended(state: str, text: str, **more: Any) -> dict[str, Any]:
    """Over: its engines are back."""
    trials = [
        trial(1, ["cuda_graph"], "quiet", 30.0),
        trial(2, ["speculative"], "quiet", 28.0),
        trial(3, ["deepep", "overlap_schedule"], "crashed", 3.2),
    ]
    verdict: dict[str, Any] = {"state": state, "culprit": None, "words": "", "p": 0.0, "text": text, "left": []}
    given = {"trials": trials, "restored": {"0": "original", "1": "original"}} | more
    given["verdict"] = verdict | more.get("verdict", {})
    return running(state=state, ended=NOW - 60, left_min=None, next=[], **given)


def found(**more: Any) -> dict[str, Any]:
    """A culprit of two."""
    text = (
        "cuda_graph x speculative: crashes with nothing else on, quiet with any of it off (30 min without cuda_graph)"
    )
    verdict = {"culprit": CULPRIT, "words": "cuda_graph x speculative", "p": 0.97}
    return ended("found", text, verdict=verdict, **more)
