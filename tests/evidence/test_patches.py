"""The patch is one that `patch` takes, and touches nothing but the list."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rltop.evidence.patches import diff, with_list

CONFIG = """{
 "model_type": "x",
 "note": "\\"ignore\\": []",
 "quantization_config": {
  "ignore": [
   "lm_head",
   "re:.*\\\\.a"
  ]
 }
}"""


def test_only_the_list_changes_and_keeps_the_indentation() -> None:
    new = with_list(CONFIG, ["lm_head", r"re:.*\.a"], ["lm_head", r"re:.*\.a", "model.embed"])
    assert new is not None
    assert json.loads(new)["quantization_config"]["ignore"][-1] == "model.embed"
    assert diff(CONFIG, new, "c.json").count("\n+") == 3  # the header, the line that gets a comma, the new rule


def test_another_list_is_not_replaced() -> None:
    assert with_list(CONFIG, ["something"], ["else"]) is None


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_program_patch_takes_it(tmp_path: Path, end: str) -> None:
    text = CONFIG + end
    (tmp_path / "c.json").write_text(text)
    new = with_list(text, ["lm_head", r"re:.*\.a"], ["one"])
    assert new is not None
    subprocess.run(["patch", "-p0"], input=diff(text, new, "c.json"), cwd=tmp_path, text=True, check=True)
    assert (tmp_path / "c.json").read_text() == new
