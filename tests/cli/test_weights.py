"""`rltop weights diff` as people call it: exit codes, both outputs, bad input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rltop.cli.main import main
from rltop.engines.client import EngineClient
from rltop.engines.launch import EngineProcess, EngineSpec, launch_engine
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from tests.cli.conftest import rltop

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("weights") / "model", TinyModelConfig(seed=1))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    spec = EngineSpec(
        kind="cpu",
        model_path=model,
        directory=model.parent / "engine",
        run="test",
        engine_id="0",
        python=Path(sys.executable),
        env={"OMP_NUM_THREADS": "1"},
    )
    process = launch_engine(spec)
    yield process
    process.stop()


def test_equal_then_different_then_json(
    engine: EngineProcess, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "diff", engine.url, str(model)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("equal: the engine holds this checkpoint\n")
    assert "a stand-in for SGLang" in said
    assert "no rotary table was lost" in said
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"].zero_()
    with EngineClient(engine.url) as client:
        client.update_weights_from_tensor(weights.items(), "broken")
    assert main(["weights", "diff", engine.url, str(model)]) == 1
    said = capsys.readouterr().out
    assert any(line.split()[:2] == ["zero", "model.layers.1.input_layernorm.weight"] for line in said.splitlines())
    assert said.endswith("different: 1 tensor\n")
    assert main(["weights", "diff", engine.url, str(model), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verdict"], found["engine"]["weight_version"]) == (1, "different", "broken")
    assert [(one["name"], one["kind"]) for one in found["findings"]] == [
        ("model.layers.1.input_layernorm.weight", "zero")
    ]
    # A checkpoint of which a part is quantised: nothing that was compared differs, and that is not "equal".
    part = tmp_path / "part"
    make_tiny_model(part, TinyModelConfig(seed=1))
    packed = {**weights, "model.layers.0.mlp.up_proj.weight_scale_inv": weights["model.norm.weight"][:1].clone()}
    save_file(packed, part / "model.safetensors")
    assert main(["weights", "diff", engine.url, str(part)]) == 2
    assert "quantised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["127.0.0.1:1", "MODEL"], "not an engine's address"),
        (["http://127.0.0.1:1", "/nowhere"], "no such directory"),
        (["http://127.0.0.1:1", "MODEL", "--previous", "/nowhere"], "the engine does not answer"),
    ],
)
def test_bad_input_is_one_clear_error(
    model: Path, argv: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["weights", "diff", *(str(model) if word == "MODEL" else word for word in argv)])
    said = capsys.readouterr()
    assert what in said.err
    assert (code, said.out) == (1 if "answer" in what else 2, "")


def test_help_is_instant_and_loads_no_torch() -> None:
    said = rltop("weights", "diff", "--help")
    assert said.returncode == 0
    assert "Exit code 0: equal" in " ".join(said.stdout.split())


def test_a_comparison_needs_no_torch(engine: EngineProcess, model: Path, tmp_path: Path) -> None:
    """Where torch cannot be imported, everything but the rotary tables is compared all the same."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    with EngineClient(engine.url) as client:
        client.update_weights_from_disk(model, "whole")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = rltop("weights", "diff", engine.url, str(model), env={"PYTHONPATH": path})
    assert (said.returncode, said.stdout.splitlines()[-1]) == (0, "equal: the engine holds this checkpoint")
    assert "rotary tables and other buffers were not compared: torch is missing" in said.stdout
