"""A checkpoint that cannot be read is refused before anything starts, and the file is named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import parse_args
from rltop.train.preflight import preflight, require_checkpoint
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", TinyModelConfig(num_layers=1))


def test_a_complete_checkpoint_passes(good: Path) -> None:
    require_checkpoint(good, flag="--hf-checkpoint", chat_template=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x10" + bytes(7) + b"{not json at all" + bytes(20))


def no_template(path: Path) -> None:
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def missing_shard(path: Path) -> None:
    path.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("config.json", Path.unlink, ["config.json", "No such file"]),
        ("config.json", lambda path: path.write_text("{"), ["config.json", "not JSON"]),
        ("model.safetensors", Path.unlink, ["model.safetensors", "No such file"]),
        ("model.safetensors", lambda path: path.write_bytes(b"abc"), ["3 bytes", "cut short"]),
        ("model.safetensors", cut, ["copy is incomplete", "its header says"]),
        ("model.safetensors", garbage, ["header is broken"]),
        ("model.safetensors.index.json", missing_shard, ["model-00001-of-00002.safetensors"]),
        ("model.safetensors.index.json", lambda path: path.write_text("{}"), ["no weight_map"]),
        ("tokenizer_config.json", no_template, ["no chat template", "tokenizer_config.json"]),
    ],
)
def test_the_broken_file_is_named(
    good: Path, tmp_path: Path, file: str, harm: Callable[[Path], object], words: list[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    harm(copy / file)
    with pytest.raises(RltopError) as caught:
        require_checkpoint(copy, flag="--hf-checkpoint", chat_template=True)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_a_missing_directory_and_a_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, why in (("nothing", "no such directory"), ("file", "it is a file")):
        with pytest.raises(RltopError, match=why):
            require_checkpoint(tmp_path / name, flag="--ref-load", chat_template=False)


def test_a_model_that_does_not_divide_is_refused_before_anything_starts(good: Path) -> None:
    two = ["--actor-num-gpus-per-node", "2"]
    with pytest.raises(RltopError, match="layers do not divide") as caught:
        preflight(parse_args([*two, "--pipeline-model-parallel-size", "2", "--hf-checkpoint", str(good)]))
    assert f"1 layers ({good}/config.json)" in caught.value.why
    preflight(parse_args([*two, "--tensor-model-parallel-size", "2", "--hf-checkpoint", str(good)]))
    four = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "4"]
    with pytest.raises(RltopError, match="key/value heads do not divide") as caught:
        preflight(parse_args(four))
    assert "rltop's tiny model" in caught.value.why


def test_an_interpreter_is_a_path_or_a_name(good: Path, tmp_path: Path) -> None:
    args = ["--hf-checkpoint", str(good), "--engine", "sglang", "--engine-python"]
    for known in (sys.executable, "sh"):
        preflight(parse_args([*args, known]))
    (tmp_path / "text").write_text("not a program")
    for unknown in ("/no/python", "no-such-python", str(tmp_path / "text")):
        with pytest.raises(RltopError, match="no such interpreter") as caught:
            preflight(parse_args([*args, unknown]))
        assert caught.value.where == f"--engine-python {unknown}"
