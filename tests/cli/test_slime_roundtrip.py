"""`examples/slime_roundtrip.py` where there is no slime: its comparisons see differences, and it says what it lacks.

With slime itself it runs in the soak (`tests/soak/test_slime_roundtrip.py`).
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rltop.evidence.dump_sample import make_sample
from tests.evidence.dump_files import sample

SCRIPT = Path(__file__).parents[2] / "examples" / "slime_roundtrip.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; what it does to imports is taken back."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    spec = importlib.util.spec_from_file_location("slime_roundtrip", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "slime_roundtrip", module)
    spec.loader.exec_module(module)
    return module


def test_a_directory_without_slime(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--slime", str(tmp_path)]) == 2
    assert "slime can not be imported: No module named 'slime'" in capsys.readouterr().err


def test_packages_that_slime_only_imports_are_stood_in_for(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("")
    (tmp_path / "slime" / "part.py").write_text(
        "from nosuchpackage.deep.inside import CONSTANT, Class\nimport othermissing\nclass Mine(Class):\n    pass\n"
    )
    slime = script.Slime(tmp_path)
    sys.path.insert(0, str(tmp_path))
    sys.meta_path.append(slime.stand_ins)
    try:
        assert slime.module("slime.part").Mine
        assert slime.stand_ins.roots == {"nosuchpackage", "othermissing"}
    finally:
        for name in [one for one in sys.modules if one.partition(".")[0] in ("slime", *slime.stand_ins.roots)]:
            del sys.modules[name]


def _pair(**theirs: Any) -> tuple[Any, Any]:
    row = sample(3)
    told = row | theirs
    return make_sample(3, row), SimpleNamespace(to_dict=lambda: dict(told))


def test_the_same_sample_on_both_sides(script: ModuleType) -> None:
    assert script.samples_agree(*[[one] for one in _pair()]).startswith("1 samples")


@pytest.mark.parametrize(
    "theirs",
    [
        {"reward": 0.5},
        {"tokens": [1]},
        {"status": "aborted"},
        {"prompt": "another"},
        {"weight_versions": ["8"]},
        {"metadata": {}},
        {"later": 1},
    ],
    ids=lambda theirs: next(iter(theirs)),
)
def test_a_difference_is_seen(script: ModuleType, theirs: dict[str, Any]) -> None:
    mine, his = _pair(**theirs)
    with pytest.raises(script.Differs, match=next(iter(theirs))):
        script.samples_agree([mine], [his])


def test_a_field_that_was_lost_is_seen(script: ModuleType) -> None:
    mine, his = _pair()
    with pytest.raises(script.Differs, match="label"):
        script.samples_agree([replace(mine, label=None)], [his])


def test_numbers(script: ModuleType) -> None:
    script.close("x", [1.0], [1.0 + 1e-7])
    for mine in (None, [1.1], [math.nan]):
        with pytest.raises(script.Differs):
            script.close("x", mine, [1.0])
    script.same("x", math.nan, math.nan)


def test_a_row_that_differs_fails_the_run(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    table = script.Table()
    table.hold("a -> b", "fine", lambda: "seen")
    table.hold("a -> b", "broken", lambda: script.same("x", 1, 2) or "")
    table.hold("a -> b", "raises", lambda: str(int("words")))
    assert [row[2] for row in table.rows] == [True, False, False]
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("DIFFERS")
    assert "ValueError" in told[2]
