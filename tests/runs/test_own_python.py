"""What rltop starts does not import what lies in the current directory."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

import rltop
from rltop.runs.own_python import own_python
from tests.hostile import hostile

SOURCES = sorted(Path(rltop.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("module", ["rltop", "rltop.daemon"])
def test_a_module_starts_in_a_folder_with_everybody_elses_names(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*own_python(module), "--help"], cwd=hostile(tmp_path), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def _unsafe(words: list[ast.expr]) -> bool:
    """A command `PYTHON … -m` or `-c` whose options say nothing of the path of imports."""
    texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
    starts = [at for at, text in enumerate(texts) if text in ("-m", "-c")]
    if not starts or starts[0] == 0 or texts[0] is not None:
        return False  # no command, or one that is shown to people
    return not {"-P", "-I"} & {text for text in texts[: starts[0]] if isinstance(text, str)}


def test_no_other_command_runs_a_module_here() -> None:
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.List | ast.Tuple) and _unsafe(node.elts)
    ]
    # SGLang's -P depends on its interpreter, and whether it has SGLang is asked with the options that SGLang gets; the
    # question for versions goes to any Python, and clears the path itself.
    allowed = ("sglang.launch_server", "_ASK", "_VERSIONS")
    assert [line for line in found if not any(word in line for word in allowed)] == []
