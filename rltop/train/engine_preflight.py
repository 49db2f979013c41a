"""What of the engines, and of the machine, can be seen to fail before anything starts. Needs no torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from rltop.engines.interpreter import unfit
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.task import SortDigits
from rltop.train.tiny_shape import IM_END, IM_START, TinyModelConfig

RANK_BYTES = 256 << 20
"""Less than any trainer process takes: torch and Megatron alone are more."""


def check_interpreter(config: TrainConfig, environ: Mapping[str, str]) -> None:
    """The engines' Python must be there and, where they run on this machine, have SGLang. environ: of the run."""
    variables = {name: value for name, _, value in (text.partition("=") for text in config.engine_env)}
    env = {**environ, **variables}
    given = config.engine_python
    where = "--engine sglang" if given is None else f"--engine-python {given}"
    if given is not None and shutil.which(given, path=env.get("PATH")) is None:
        raise RltopError(
            "no such interpreter",
            where=where,
            why="no program of this name can be started, here or from PATH",
            do="give the path of the Python that has SGLang",
        )
    if config.engine != "sglang" or not config.engine_count or config.ray_address is not None:
        return
    python = str(given or sys.executable)
    found = unfit("sglang", python, env)
    if found is None:
        return
    path = shutil.which(python, path=env.get("PATH")) or python
    raise RltopError(
        found.what,
        where=where,
        why=f"{path}: {found.why}",
        do=f"--engine-python PATH of the Python that has SGLang, or {path} -m pip install sglang, or where it lies in "
        "a folder of its own --engine-env PYTHONPATH=FOLDER"
        if found.module
        else "--engine-python PATH of the Python that has SGLang",
    )


def check_context(config: TrainConfig, model: Mapping[str, Any] | None) -> None:
    """Prompt and response must fit into the model. model: its `config.json`; None: rltop's tiny model.

    The prompts of a checkpoint's tokenizer are not known here: of these only that they are not empty.
    """
    tiny = model is None
    asked = _context_length(config.sglang_args)
    positions = TinyModelConfig().max_positions if model is None else _positions(model, config, asked)
    of_model = "rltop's tiny model" if tiny else f"{config.hf_checkpoint}/config.json"
    if positions is not None and asked is not None and asked > positions and config.engine == "cpu":
        raise RltopError(
            "context too long for the model",
            where="--sglang-context-length",
            why=f"{asked} positions, the model has {positions} ({of_model})",
            do=f"--sglang-context-length {positions}, or leave it out",
        )
    limits = [(size, said) for size, said in ((asked, "--sglang-context-length"), (positions, of_model)) if size]
    if not limits:
        return
    limit, said = min(limits)
    prompt = _tiny_prompt(config) if tiny else 1
    longest, response = limit - prompt, config.rollout_max_response_len
    if response <= longest:
        return
    asks = f"{prompt} tokens of the prompt" if tiny else "at least 1 token of the prompt"
    larger = ", or a larger --sglang-context-length" if said != of_model and positions != asked else ""
    raise RltopError(
        "prompt and response do not fit into the model's context",
        where="--rollout-max-response-len",
        why=f"{asks} and {response} of the response are more than {limit} positions ({said})",
        do=f"--rollout-max-response-len {longest}{' or less' if tiny else ' or less: the prompt needs its own'}{larger}"
        if longest > 0
        else f"--sglang-context-length of more than {prompt}",
    )


def check_machine(config: TrainConfig) -> None:
    """The ranks of a private Ray run on this machine: they must fit into its memory, at the very least."""
    ranks, memory = config.trainer_ranks, psutil.virtual_memory().total
    if config.ray_address is not None or ranks * RANK_BYTES <= memory:
        return
    model = config.layout.tensor * config.layout.pipeline
    most = max(memory // RANK_BYTES // model, 1) * model
    raise RltopError(
        "more ranks than this machine can hold",
        where="--actor-num-gpus-per-node",
        why=f"{ranks} ranks are {ranks} processes, of {RANK_BYTES >> 20} MiB at the very least; this machine has "
        f"{memory / 2**30:.1f} GiB of memory and {psutil.cpu_count() or 1} cores",
        do=f"--actor-num-gpus-per-node {most} at most, or --ray-address of a cluster",
    )


def _positions(model: Mapping[str, Any], config: TrainConfig, asked: int | None) -> int | None:
    """Of a checkpoint; None: it does not say, or SGLang alone serves it, which may stretch them."""
    found = model.get("max_position_embeddings")
    if config.engine == "sglang" and not config.trainer_ranks and (asked or _stretched(model)):
        return None
    return found if isinstance(found, int) else None


def _stretched(model: Mapping[str, Any]) -> bool:
    """Whether the rotary embedding reaches further than the positions say."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default"


def _context_length(args: tuple[str, ...]) -> int | None:
    """The value of the last --sglang-context-length; None: there is none, or it is no number."""
    flag, found = "--context-length", None
    for at, token in enumerate(args):
        name, equals, value = token.partition("=")
        if name == flag:
            found = value if equals else next(iter(args[at + 1 : at + 2]), None)
    return int(found) if found is not None and found.isdecimal() and int(found) > 0 else None


def _tiny_prompt(config: TrainConfig) -> int:
    """Tokens of a prompt: bytes, and the template's special tokens. All prompts of the task are of one length."""
    ((_, content),) = SortDigits(config.seed).prompts(0, 1)[0].messages
    if not config.apply_chat_template:
        return len(content.encode())
    turns = f"{IM_START}user\n{content}{IM_END}\n{IM_START}assistant\n"
    return len(turns.replace(IM_START, "\0").replace(IM_END, "\0").encode())
