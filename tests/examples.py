"""How many examples a property is tried on: few in CI, `RLTOP_EXAMPLES` where somebody has the time (the soak)."""

from __future__ import annotations

import os

from hypothesis import settings

WANTED = int(os.environ.get("RLTOP_EXAMPLES", "0"))


def examples(ci: int, *, steps: int = 50) -> settings:
    """Settings for a property or a state machine. ci: examples in CI. steps: longest sequence of a state machine."""
    return settings(max_examples=max(ci, WANTED), stateful_step_count=steps)
