"""SGLang 0.5.14 and 0.5.23 themselves: their command lines, and what they make of every toggle and of random ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rltop.engines.options import VERSIONS
from tests.soak.sglang_arguments import Sglang, releases
from tests.soak.sglang_arguments.record import ask
from tests.soak.sglang_arguments.recording import differences

pytestmark = pytest.mark.soak

TABLES = Path(__file__).parents[2] / "rltop" / "engines" / "arguments"


@pytest.fixture(scope="module")
def sglang() -> dict[str, Sglang]:
    """Installed once per cache."""
    return {one.version: one for one in releases()}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_shipped_table_is_sglangs_command_line(version: str, sglang: dict[str, Sglang]) -> None:
    assert json.loads(sglang[version].table()) == json.loads((TABLES / f"{version}.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_sglang_answers_as_the_rules_do(version: str, sglang: dict[str, Sglang], tmp_path: Path) -> None:
    bases, answered = ask(sglang[version], tmp_path)
    found = list(differences(version, bases, answered))
    accepted = sum("fields" in case for case in answered)
    print(f"SGLang {version}: {len(answered)} command lines, {accepted} accepted, {len(found)} answers differ")
    assert found == []
