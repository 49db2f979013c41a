"""What can be seen to fail before anything heavy starts, above all an unreadable checkpoint. Needs no torch.

Reads the JSON files and the headers of the safetensors shards: a missing, cut or broken file is named, in
milliseconds, instead of failing in a worker a minute later.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.dump_preflight import check_dumps
from rltop.train.engine_preflight import check_context, check_interpreter, check_machine
from rltop.train.fault_checks import check_faults_of_start
from rltop.train.layout import Divisible, check_layout
from rltop.train.resume import REFERENCE, TRACKER, find_checkpoint
from rltop.train.tiny_shape import TinyModelConfig

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


def preflight(config: TrainConfig, environ: Mapping[str, str] | None = None, *, touch: bool = True) -> None:
    """Raise RltopError (exit code 2) for the first thing in `config` that cannot work here.

    environ: of the run, this process's without one. touch: make the directories that are written to; else only look.
    """
    if config.hf_checkpoint is not None:
        require_checkpoint(config.hf_checkpoint, flag="--hf-checkpoint", chat_template=config.apply_chat_template)
    _check_split(config)
    if config.ref_load is not None:
        require_checkpoint(config.ref_load, flag="--ref-load", chat_template=False)
    check_machine(config)
    _check_resume(config)
    rollouts, training = config.rollout_dumps, config.train_dumps
    if config.dump_details is not None:
        rollouts = training = None
    for flag, directory in (
        ("--save-dir", config.save_dir),
        ("--save", config.save),
        ("--dump-details", config.dump_details),
        ("--save-debug-rollout-data", None if rollouts is None else Path(rollouts.format(rollout_id=0)).parent),
        ("--save-debug-train-data", None if training is None else Path(training.format(rollout_id=0, rank=0)).parent),
    ):
        if directory is not None:
            _require_writable(directory, flag, touch=touch)
    check_dumps(config)
    if config.engine_count:
        check_context(config, _model_config(config))
    check_interpreter(config, os.environ if environ is None else environ)  # the slowest, so the last


def _check_resume(config: TrainConfig) -> None:
    """A checkpoint to resume from must be usable, and one that is not resumed from must not be mixed with ours."""
    if config.save is not None and (config.save / TRACKER).exists() and not _same(config.load, config.save):
        raise RltopError(
            "another run's checkpoints are there",
            where=f"--save {config.save}",
            why=f"it has a {TRACKER} that this run does not go on from: two runs in one directory cannot be told apart",
            do=f"--load {config.save} to go on, or another directory",
        )
    found = find_checkpoint(config.load) if config.load is not None else None
    check_faults_of_start(config, None if found is None else found.iteration + 1, _layers(config))
    if found is None:
        return
    if found.iteration + 1 >= config.num_rollout:
        raise RltopError(
            "nothing is left to train",
            where="--num-rollout",
            why=f"it is {config.num_rollout}, and --load {found.root} was saved after rollout {found.iteration}",
            do=f"--num-rollout {found.iteration + 2} or more",
        )
    if config.keeps_reference:
        reference = found.root / REFERENCE
        if not reference.is_dir():
            raise RltopError(
                "the checkpoint has no reference model",
                where=f"--load {found.root}",
                why=f"there is no {reference}: it was saved without --use-kl-loss, or with a --ref-load of its own",
                do="--ref-load CHECKPOINT",
            )
        require_checkpoint(reference, flag="--load", chat_template=False)


def _layers(config: TrainConfig) -> int:
    """Of the model; 0 where its configuration does not say."""
    if config.hf_checkpoint is None or not config.plants("swap-layers"):
        return 0
    found = _read_json(config.hf_checkpoint / "config.json", "--hf-checkpoint").get("num_hidden_layers")
    return found if isinstance(found, int) else 0


def _same(one: Path | None, other: Path) -> bool:
    return one is not None and one.exists() and one.samefile(other)


def _model_config(config: TrainConfig) -> dict[str, Any] | None:
    """`config.json` of the checkpoint; None: rltop's tiny model."""
    if config.hf_checkpoint is None:
        return None
    return _read_json(config.hf_checkpoint / "config.json", "--hf-checkpoint")


def _require_writable(directory: Path, flag: str, *, touch: bool) -> None:
    if not touch:
        there = next((one for one in (directory, *directory.absolute().parents) if one.exists()), Path("/"))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = f"{there} is {'not writable' if there.is_dir() else 'a file'}"
            raise RltopError("cannot write there", where=f"{flag} {directory}", why=why, do="another directory")
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RltopError(
            "cannot write there", where=f"{flag} {directory}", why=error.strerror or str(error), do="another directory"
        ) from error


def _check_split(config: TrainConfig) -> None:
    """Raise RltopError if the model does not divide among the trainer's ranks. Sizes that are missing are not judged:
    whoever builds the model says so."""
    layout = config.layout
    if layout.tensor * layout.pipeline == 1:
        return
    if config.hf_checkpoint is None:
        tiny = TinyModelConfig()
        sizes = {
            "num_hidden_layers": tiny.num_layers,
            "num_attention_heads": tiny.num_heads,
            "num_key_value_heads": tiny.num_kv_heads,
            "intermediate_size": tiny.intermediate_size,
        }
        where = "rltop's tiny model"
    else:
        sizes = _read_json(config.hf_checkpoint / "config.json", "--hf-checkpoint")
        where = str(config.hf_checkpoint / "config.json")
    numbers = {key: sizes.get(key) for key in ("num_hidden_layers", "num_attention_heads", "intermediate_size")}
    numbers["num_key_value_heads"] = sizes.get("num_key_value_heads", numbers["num_attention_heads"])
    known = {key: value if isinstance(value, int) else 0 for key, value in numbers.items()}
    check_layout(
        layout,
        Divisible(
            num_layers=known["num_hidden_layers"],
            num_heads=known["num_attention_heads"],
            num_kv_heads=known["num_key_value_heads"],
            intermediate_size=known["intermediate_size"],
        ),
        where=where,
    )


def require_checkpoint(directory: Path, *, flag: str, chat_template: bool) -> None:
    """Raise RltopError naming the file that is missing or broken.

    flag: the command-line flag that named `directory`. chat_template: the tokenizer must have one.
    """
    if not directory.is_dir():
        why = "it is a file" if directory.exists() else "no such directory"
        raise RltopError(
            "checkpoint not found", where=f"{flag} {directory}", why=why, do="give the directory that holds config.json"
        )
    _read_json(directory / "config.json", flag)
    for shard in _shards(directory, flag):
        _check_shard(shard, flag)
    if not (directory / "tokenizer.json").is_file() and not (directory / "tokenizer_config.json").is_file():
        raise _unreadable(directory / "tokenizer.json", flag, "the checkpoint has no tokenizer")
    if chat_template and not _has_chat_template(directory, flag):
        raise RltopError(
            "no chat template",
            where=str(directory / "tokenizer_config.json"),
            why="--apply-chat-template needs the key chat_template, or a file chat_template.jinja",
            do="add the template of the model's instruct variant, or leave out --apply-chat-template",
        )


def _shards(directory: Path, flag: str) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index, flag).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise _unreadable(index, flag, "it has no weight_map")
        return [directory / name for name in sorted({str(name) for name in names.values()})]
    return [directory / "model.safetensors"]


def _check_shard(path: Path, flag: str) -> None:
    """The header must be there and say as many bytes as the file has."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _unreadable(path, flag, f"{size} bytes are no safetensors file: the header is cut short")
            header = json.loads(file.read(length))
        ends = [spec["data_offsets"][1] for name, spec in header.items() if name != "__metadata__"]
    except OSError as error:
        raise _unreadable(path, flag, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _unreadable(path, flag, "its safetensors header is broken") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _unreadable(path, flag, f"{size} bytes, but its header says {expected}: the copy is incomplete")


def _has_chat_template(directory: Path, flag: str) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config, flag).get("chat_template"))


def _read_json(path: Path, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise _unreadable(path, flag, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, flag, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _unreadable(path, flag, "not a JSON object")
    return value


def _unreadable(path: Path, flag: str, why: str) -> RltopError:
    return RltopError("checkpoint unreadable", where=str(path), why=why, do=f"check the directory given as {flag}")
