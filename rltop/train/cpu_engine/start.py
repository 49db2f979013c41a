"""The start of the CPU engine: from its arguments to a loaded engine, with SGLang's log lines on the way.

Bad input (checkpoint, tokenizer, context) raises `RltopError`. Faults that strike in a start do so here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import psutil

from rltop.engines.launcher import MARKER
from rltop.engines.toggle_table import read_fields
from rltop.errors import RltopError
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.checkpoint import ModelConfig, read_config, read_weights
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.faults import INJECTED
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.imitation import PREFILL_OFF
from rltop.train.cpu_engine.injection import Injection, SchedulerDied, signature
from rltop.train.cpu_engine.live_weights import LiveWeights
from rltop.train.cpu_engine.model import Qwen3
from rltop.train.cpu_engine.process import Tree
from rltop.train.cpu_engine.request import Endings
from rltop.train.cpu_engine.scheduler import Limits, Scheduler
from rltop.train.cpu_engine.stats import Stats
from rltop.train.cpu_engine.text import Text

LOGGER = logging.getLogger("rltop.cpu_engine")


def build(args: EngineArgs, environ: Mapping[str, str] | None = None, tree: Tree | None = None) -> Engine:
    """Load the checkpoint and put the parts together. Raises `RltopError`.

    environ: the process's, for toggles that are environment variables. tree: what faults of the start end; without one
    they raise.
    """
    began = time.perf_counter()
    injection = Injection(
        args.faults,
        toggles=read_fields(args.sglang, environ or {}),
        seed=f"{args.random_seed}/{(environ or {}).get(MARKER, '')}",
        environ=environ,
        watchdog_s=args.sglang["watchdog_timeout"],
    )
    if tree is not None:
        injection.scheduler_pid = tree.scheduler_pid
        _let_orphans_go(injection, tree)
    config = read_config(args.model_path)
    text = Text(args.tokenizer_path)
    context_length = args.context_length or config.max_positions
    if context_length > config.max_positions:
        raise RltopError(
            "context too long for the model",
            where="--context-length",
            why=f"{context_length} positions, the model has {config.max_positions}",
        )
    LOGGER.info("Load weight begin. avail mem=%.2f GB", _available_gb())
    _faults_of("load", injection, tree)
    tensors = read_weights(args.model_path, config)
    LOGGER.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.perf_counter() - began,
        config.architecture,
        _available_gb(),
        sum(tensor.nbytes for tensor in tensors.values()) / 2**30,
    )
    per_side = args.max_total_tokens * config.num_layers * config.num_kv_heads * config.head_dim * 4 / 2**30
    LOGGER.info(
        "KV Cache is allocated. dtype: torch.float32, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        args.max_total_tokens,
        per_side,
        per_side,
    )
    LOGGER.info("Memory pool end. avail mem=%.2f GB", _available_gb())
    _capture(args, injection, tree)
    LOGGER.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d, available_%s_mem=%.2f GB",
        args.max_total_tokens,
        args.sglang["chunked_prefill_size"],
        args.sglang["max_prefill_tokens"],
        args.max_running_requests,
        context_length,
        "cpu" if args.sglang["device"] == "cpu" else "gpu",
        _available_gb(),
    )
    stats = Stats(args.max_total_tokens, args.max_running_requests, context_length)
    if args.effects.draft_tokens:
        stats.speculative = (args.sglang["speculative_num_steps"], args.effects.draft_tokens)
    own_eos = frozenset() if text.eos_token_id is None else frozenset({text.eos_token_id})
    limits = Limits(
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        decode_log_interval=args.decode_log_interval,
        prompt_cache=not args.disable_radix_cache,
        effects=args.effects,
    )
    live = LiveWeights(config, tensors, args.weight_version)
    endings = Endings(text, config.eos_token_ids | own_eos, args.modern)
    scheduler = Scheduler(Qwen3(config, context_length), live, endings, limits, stats, injection=injection)
    reader = RequestReader(text, context_length=context_length, vocab_size=config.vocab_size, seed=args.random_seed)
    startup_s = time.perf_counter() - began
    engine = Engine(args, scheduler, reader, _model_info(args, config), startup_s, model_path=str(args.model_path))
    if slow := injection.strike("slow-start", during="warm-up"):
        engine.warm_up_s = slow.number("seconds", 5)
    return engine


def with_port(args: EngineArgs, port: int) -> EngineArgs:
    """The arguments with the port that was bound."""
    return replace(args, port=port, sglang=dict(args.sglang) | {"port": port})


def _let_orphans_go(injection: Injection, tree: Tree) -> None:
    def check(_: object = None) -> None:
        if orphan := injection.strike("orphan"):
            tree.orphan(orphan)

    check()
    injection.on_armed = lambda fault: check() if fault.kind.name == "orphan" else None


def _faults_of(stage: Literal["load", "capture"], injection: Injection, tree: Tree | None) -> None:
    """Let the faults strike that belong to this stage of the start."""
    if slow := injection.strike("slow-start", during=stage):
        time.sleep(slow.number("seconds", 5))
    killed = stage == "load" and injection.strike("start-dies") is not None
    if not killed and injection.strike("oom", during=stage) is None:
        return
    if tree is None:
        raise RltopError("the start ends", where=stage, why=INJECTED, exit_code=1)
    if killed:
        tree.kill_child()
    else:
        died = SchedulerDied(signature(f"oom_{stage}"))
        LOGGER.error("Scheduler hit an exception: %s\n", died.traceback)
        tree.scheduler_died(died)
    tree.wait_for_the_end()


def _capture(args: EngineArgs, injection: Injection, tree: Tree | None) -> None:
    """SGLang's log lines of CUDA graph capture, which takes the stand-in no time: there is nothing to capture."""
    effects = args.effects
    if effects.prefill.on:
        with _captured("prefill", f"backend={effects.prefill.backend}, num_tokens={list(effects.prefill.sizes)}"):
            pass
    else:
        LOGGER.info("%s", PREFILL_OFF)
    if not effects.decode.on:
        return
    tokens = max(1, effects.draft_tokens)
    sizes = [size for size in effects.decode.sizes if size <= args.max_running_requests]
    name = "verify" if effects.draft_tokens else "decode"
    begin, listed = f"backend={effects.decode.backend}, ", f"bs={sizes}"
    begin += f"num_tokens_per_req={tokens}" if args.modern else f"num_tokens_per_bs={tokens}, {listed}"
    with _captured(name, begin, f"{listed}, " if args.modern else ""):
        _faults_of("capture", injection, tree)


@contextmanager
def _captured(name: str, begin: str, end: str = "") -> Iterator[None]:
    began = time.perf_counter()
    LOGGER.info("Capture target %s CUDA graph begin. %s, avail mem=%.2f GB", name, begin, _available_gb())
    yield
    LOGGER.info(
        "Capture target %s CUDA graph end. %selapsed=%.2f s, mem usage=0.00 GB, avail mem=%.2f GB.",
        name,
        end,
        time.perf_counter() - began,
        _available_gb(),
    )


def _model_info(args: EngineArgs, config: ModelConfig) -> dict[str, object]:
    return {
        "model_path": "",
        "served_model_name": args.served_model_name,
        "tokenizer_path": str(args.tokenizer_path),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "",
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": [config.architecture],
    }


def _available_gb() -> float:
    return float(psutil.virtual_memory().available) / 2**30
