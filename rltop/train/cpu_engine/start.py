"""The start of the CPU engine: from its arguments to a loaded engine, with SGLang's log lines on the way.

Bad input (checkpoint, tokenizer, context) raises `RltopError`. Faults that strike in a start do so here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from rltop.errors import RltopError
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.checkpoint import ModelConfig, read_config, read_weights
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.live_weights import LiveWeights
from rltop.train.cpu_engine.memory import Arena
from rltop.train.cpu_engine.model import Qwen3
from rltop.train.cpu_engine.process import Tree
from rltop.train.cpu_engine.request import Endings
from rltop.train.cpu_engine.scheduler import Limits, Scheduler
from rltop.train.cpu_engine.stages import (
    available_gb,
    capture,
    engine_stats,
    faults_of,
    injection_of,
    model_info,
    tell_limits,
)
from rltop.train.cpu_engine.text import Text

LOGGER = logging.getLogger("rltop.cpu_engine")


def build(args: EngineArgs, environ: Mapping[str, str] | None = None, tree: Tree | None = None) -> Engine:
    """Load the checkpoint and put the parts together. Raises `RltopError`.

    environ: the process's, for toggles that are environment variables. tree: what faults of the start end; without one
    they raise.
    """
    began = time.perf_counter()
    injection = injection_of(args, environ or {}, tree)
    config = read_config(args.model_path)
    text = Text(args.tokenizer_path)
    context_length = args.context_length or config.max_positions
    if context_length > config.max_positions:
        raise RltopError(
            "context too long for the model",
            where="--context-length",
            why=f"{context_length} positions, the model has {config.max_positions}",
        )
    LOGGER.info("Load weight begin. avail mem=%.2f GB", available_gb())
    faults_of("load", injection, tree)
    tensors = read_weights(args.model_path, config)
    LOGGER.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.perf_counter() - began,
        config.architecture,
        available_gb(),
        sum(tensor.nbytes for tensor in tensors.values()) / 2**30,
    )
    per_side = kv_pool_bytes(args, config) / 2 / 2**30
    LOGGER.info(
        "KV Cache is allocated. dtype: torch.float32, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        args.max_total_tokens,
        per_side,
        per_side,
    )
    LOGGER.info("Memory pool end. avail mem=%.2f GB", available_gb())
    capture(args, injection, tree)
    tell_limits(args, context_length)
    stats = engine_stats(args, context_length)
    own_eos = frozenset() if text.eos_token_id is None else frozenset({text.eos_token_id})
    limits = Limits(
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        decode_log_interval=args.decode_log_interval,
        prompt_cache=not args.disable_radix_cache,
        effects=args.effects,
    )
    model = Qwen3(config, context_length)
    live = LiveWeights(
        config, tensors, args.weight_version, saver=args.enable_memory_saver, model=model, modern=args.modern
    )
    pool = Arena(kv_pool_bytes(args, config)) if args.enable_memory_saver else None
    endings = Endings(text, config.eos_token_ids | own_eos, args.modern)
    scheduler = Scheduler(model, live, endings, limits, stats, injection=injection, pool=pool)
    reader = RequestReader(text, context_length=context_length, vocab_size=config.vocab_size, seed=args.random_seed)
    startup_s = time.perf_counter() - began
    engine = Engine(
        args,
        scheduler,
        reader,
        model_info(args, config.model_type, config.architecture),
        startup_s,
        model_path=str(args.model_path),
    )
    if slow := injection.strike("slow-start", during="warm-up"):
        engine.warm_up_s = slow.number("seconds", 5)
    return engine


def kv_pool_bytes(args: EngineArgs, config: ModelConfig) -> int:
    """Keys and values of `--max-total-tokens` positions, fp32."""
    return 2 * args.max_total_tokens * config.num_layers * config.num_kv_heads * config.head_dim * 4
