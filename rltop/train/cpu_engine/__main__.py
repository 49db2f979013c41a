"""Process of the CPU engine: `python -m rltop.train.cpu_engine`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rltop.train.cpu_engine import MARKER
from rltop.train.cpu_engine.entry import Build, exit_at_once, run_engine

TOLD = (
    "its forward pass runs on the CPU, its HTTP API, arguments and log lines are those of SGLang {version}; "
    "CUDA graphs, speculative decoding and all-to-all backends are only imitated"
)


def main(argv: Sequence[str]) -> int:
    """Run the engine until a signal. Returns the exit status."""
    return run_engine(argv, marker=MARKER, told=TOLD, build=_build)


def _build() -> Build:
    # Imported only now: a refused argument must not wait for torch.
    import torch

    from rltop.train.cpu_engine.start import build

    torch.set_num_threads(1)
    return build


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
