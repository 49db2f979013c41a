"""Dumps to slime and back with slime's own code: `RLTOP_SLIME=DIR[:DIR…] make soak`, each a checkout of slime."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.soak.slime_checkout import BASE, PYTHON, everywhere, explained, needs

pytestmark = pytest.mark.soak

SCRIPT = Path(__file__).parents[2] / "examples" / "slime_roundtrip.py"


@everywhere
def test_every_line_holds(checkout: str) -> None:
    needs(*BASE, "safetensors")
    argv = [PYTHON, str(SCRIPT), "--slime", checkout]
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert ended.returncode == 0, ended.stdout + explained(ended.stderr)
    assert " comparisons, 0 differ" in ended.stdout
