"""A checkpoint that cannot be read is refused before anything starts, and the file is named."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.chat import Chat
from rltop.train.engine_preflight import _tiny_prompt
from rltop.train.preflight import preflight, require_checkpoint
from rltop.train.task import SortDigits
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


@pytest.fixture
def sglang(tmp_path: Path) -> str:
    """`PYTHONPATH` of a package that is called so."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    for name in ("__init__.py", "launch_server.py"):
        (package / name).write_text("raise SystemExit('imported')\n")
    return str(package.parent)


def test_an_interpreter_is_a_path_or_a_name(good: Path, tmp_path: Path, sglang: str) -> None:
    args = ["--hf-checkpoint", str(good), "--engine", "sglang", "--engine-env", f"PYTHONPATH={sglang}"]
    python = Path(sys.executable)
    preflight(parse_args([*args, "--engine-python", str(python)]))
    preflight(parse_args([*args, "--engine-python", python.name]), {**os.environ, "PATH": str(python.parent)})
    (tmp_path / "text").write_text("not a program")
    for unknown in ("/no/python", "no-such-python", str(tmp_path / "text")):
        with pytest.raises(RltopError, match="no such interpreter") as caught:
            preflight(parse_args([*args, "--engine-python", unknown]))
        assert caught.value.where == f"--engine-python {unknown}"
    with pytest.raises(RltopError, match="no Python that starts") as caught:
        preflight(parse_args([*args, "--engine-python", "true"]))
    assert caught.value.where == "--engine-python true"


def test_an_interpreter_without_sglang_is_refused_where_engines_run_here(
    good: Path, tmp_path: Path, sglang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    args = ["--hf-checkpoint", str(good), "--engine", "sglang", "--engine-env", "PYTHONPATH="]
    with pytest.raises(RltopError, match="no module sglang") as caught:
        preflight(parse_args(args))
    assert caught.value.where == "--engine sglang"
    assert sys.executable in caught.value.why
    assert "--engine-python" in caught.value.do
    with pytest.raises(RltopError, match="no module sglang"):
        preflight(parse_args(args[:-2]), {"PATH": os.environ["PATH"]})
    preflight(parse_args(args[:-2]), {**os.environ, "PYTHONPATH": sglang})
    preflight(parse_args([*args, "--ray-address", "10.0.0.1:6379"]))


@pytest.mark.parametrize(
    ("args", "flag", "words"),
    [
        (
            "--rollout-max-response-len 1000000000",
            "--rollout-max-response-len",
            ["1024 positions", "1012"],
        ),
        ("--rollout-max-response-len 1013", "--rollout-max-response-len", ["12 tokens of the prompt", "1012 or less"]),
        ("--apply-chat-template --rollout-max-response-len 1000", "--rollout-max-response-len", ["31 tokens", "993"]),
        ("--sglang-context-length=30", "--rollout-max-response-len", ["30 positions (--sglang-context-length)", "18"]),
        ("--sglang-context-length 9 --eval-interval 1", "--rollout-max-response-len", ["of more than 12"]),
        ("--sglang-context-length 2048", "--sglang-context-length", ["the model has 1024"]),
        (
            "--hf-checkpoint {} --rollout-max-response-len 1024",
            "--rollout-max-response-len",
            ["{}/config", "1023"],
        ),
    ],
)
def test_a_response_that_does_not_fit_into_the_context_is_refused(
    good: Path, args: str, flag: str, words: list[str]
) -> None:
    with pytest.raises(RltopError) as caught:
        preflight(parse_args(args.format(good).split()))
    assert (caught.value.where, caught.value.exit_code) == (flag, 2)
    for word in words:
        assert word.format(good) in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        "--rollout-max-response-len 1012",
        "--apply-chat-template --rollout-max-response-len 993",
        "--hf-checkpoint {} --rollout-max-response-len 1023",
    ],
)
def test_a_response_that_fits_passes(good: Path, args: str) -> None:
    preflight(parse_args(args.format(good).split()))


def test_the_length_of_the_tiny_models_prompts_is_that_of_its_tokenizer(good: Path) -> None:
    (prompt,) = SortDigits(3).prompts(0, 1)
    for template in (False, True):
        config = TrainConfig(apply_chat_template=template)
        assert _tiny_prompt(config) == len(Chat(good, use_template=template).prompt(prompt.messages)[1])


def test_stretched_positions_of_a_model_that_only_sglang_serves_are_not_judged(
    good: Path, tmp_path: Path, sglang: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    model = json.loads((copy / "config.json").read_text())
    args = ["--engine", "sglang", "--engine-env", f"PYTHONPATH={sglang}", "--rollout-max-response-len", "2000"]
    args += ["--hf-checkpoint", str(copy)]
    with pytest.raises(RltopError, match="do not fit"):
        preflight(parse_args([*args, "--debug-rollout-only"]))
    (copy / "config.json").write_text(json.dumps(model | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}))
    preflight(parse_args([*args, "--debug-rollout-only"]))
    with pytest.raises(RltopError, match="do not fit"):
        preflight(parse_args(args))


def test_more_ranks_than_the_machine_can_hold_say_what_it_has() -> None:
    many = ["--rollout-batch-size", "1000000", "--n-samples-per-prompt", "2", "--actor-num-gpus-per-node", "1000000"]
    with pytest.raises(RltopError, match="more ranks than this machine can hold") as caught:
        preflight(parse_args(many))
    assert caught.value.where == "--actor-num-gpus-per-node"
    assert "GiB of memory" in caught.value.why
    preflight(parse_args([*many, "--ray-address", "10.0.0.1:6379"]))


def test_only_to_look_makes_no_directory(tmp_path: Path) -> None:
    config = parse_args(["--save-dir", str(tmp_path / "new" / "one")])
    preflight(config, touch=False)
    assert not (tmp_path / "new").exists()
    preflight(config)
    assert (tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RltopError, match="cannot write there"):
        preflight(parse_args(["--save-dir", str(tmp_path / "file" / "one")]), touch=False)
