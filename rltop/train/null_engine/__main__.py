"""Process of the null engine: `python -m rltop.train.null_engine`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rltop.train.cpu_engine.entry import exit_at_once, run_engine
from rltop.train.null_engine import MARKER
from rltop.train.null_engine.build import build

TOLD = (
    "it computes nothing, its HTTP API, arguments and log lines are those of SGLang {version}; its tokens, CUDA "
    "graphs, speculative decoding and weights are only imitated"
)


def main(argv: Sequence[str]) -> int:
    """Run the engine until a signal. Returns the exit status."""
    return run_engine(argv, marker=MARKER, told=TOLD, build=lambda: build)


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
