"""Dumps to slime and back with slime's own code: `RLTOP_SLIME=DIR[:DIR…] make soak`, each a checkout of slime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

CHECKOUTS = [one for one in os.environ.get("RLTOP_SLIME", "").split(os.pathsep) if one]
SCRIPT = Path(__file__).parents[2] / "examples" / "slime_roundtrip.py"


@pytest.mark.skipif(not CHECKOUTS, reason="RLTOP_SLIME names no checkout of slime")
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_every_line_holds(checkout: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--slime", checkout], capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " comparisons, 0 differ" in ended.stdout
