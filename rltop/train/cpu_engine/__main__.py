"""Process of the CPU engine: `python -m rltop.train.cpu_engine`.

Bad input (checkpoint, port, flag) is one message and exit status 2. SIGTERM ends it with 0, SIGINT with 130, after
running requests were answered as aborted. It also ends, with 0, when the process named by `--parent-pid` is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import psutil
import torch
import uvicorn
import uvicorn.logging

from rltop.engines.ports import bind
from rltop.errors import RltopError
from rltop.train.cpu_engine import MARKER
from rltop.train.cpu_engine.args import EngineArgs, parse_args
from rltop.train.cpu_engine.checkpoint import ModelConfig, read_config, read_weights
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.imitation import PREFILL_OFF
from rltop.train.cpu_engine.live_weights import LiveWeights
from rltop.train.cpu_engine.model import Qwen3
from rltop.train.cpu_engine.request import Endings
from rltop.train.cpu_engine.scheduler import Limits, Scheduler
from rltop.train.cpu_engine.server import make_app
from rltop.train.cpu_engine.stats import LOGGER, Stats
from rltop.train.cpu_engine.text import Text

GRACE_S = 3
"""How long connections may take to finish after SIGTERM; running requests are aborted, so only slow readers need it."""


def main(argv: Sequence[str]) -> int:
    """Run the engine until a signal. Returns the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    try:
        with closing(bind(args.host, args.port)) as listener, logging_to(sys.stdout, args.log_level):
            args = with_port(args, listener.getsockname()[1])
            LOGGER.info(
                "%s: its forward pass runs on the CPU, its HTTP API, arguments and log lines are those of SGLang %s; "
                "CUDA graphs, speculative decoding and all-to-all backends are only imitated",
                MARKER,
                args.sglang_version,
            )
            for remark in args.remarks:
                LOGGER.warning("%s", remark)
            LOGGER.info("%s", args.log_form())
            return serve(build(args), listener)
    except RltopError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def build(args: EngineArgs) -> Engine:
    """Load the checkpoint and put the parts together. Raises `RltopError`."""
    began = time.perf_counter()
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
    capture_lines(args)
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
    endings = Endings(text, config.eos_token_ids | own_eos)
    scheduler = Scheduler(Qwen3(config, context_length), live, endings, limits, stats)
    reader = RequestReader(text, context_length=context_length, vocab_size=config.vocab_size, seed=args.random_seed)
    startup_s = time.perf_counter() - began
    return Engine(args, scheduler, reader, _model_info(args, config), startup_s, model_path=str(args.model_path))


def with_port(args: EngineArgs, port: int) -> EngineArgs:
    """The arguments with the port that was bound."""
    return replace(args, port=port, sglang=dict(args.sglang) | {"port": port})


def capture_lines(args: EngineArgs) -> None:
    """SGLang's log lines of CUDA graph capture, which takes the stand-in no time: there is nothing to capture."""
    effects = args.effects
    if effects.prefill.on:
        _captured("prefill", f"backend={effects.prefill.backend}, num_tokens={list(effects.prefill.sizes)}")
    else:
        LOGGER.info("%s", PREFILL_OFF)
    if not effects.decode.on:
        return
    tokens = max(1, effects.draft_tokens)
    sizes = [size for size in effects.decode.sizes if size <= args.max_running_requests]
    name = "verify" if effects.draft_tokens else "decode"
    if args.modern:
        _captured(name, f"backend={effects.decode.backend}, num_tokens_per_req={tokens}", f"bs={sizes}, ")
    else:
        _captured(name, f"backend={effects.decode.backend}, num_tokens_per_bs={tokens}, bs={sizes}")


def _captured(name: str, begin: str, end: str = "") -> None:
    LOGGER.info("Capture target %s CUDA graph begin. %s, avail mem=%.2f GB", name, begin, _available_gb())
    LOGGER.info(
        "Capture target %s CUDA graph end. %selapsed=0.00 s, mem usage=0.00 GB, avail mem=%.2f GB.",
        name,
        end,
        _available_gb(),
    )


def serve(engine: Engine, listener: socket.socket) -> int:
    """Serve until a signal, the parent's death or a failure of the scheduler. Returns the exit status."""
    scheduler = engine.scheduler
    server = _Server(engine, engine.args.port)
    thread = threading.Thread(target=server.run_scheduler, name="scheduler", daemon=True)
    received: list[int] = []
    # uvicorn raises the signals that it caught again when it is done; these handlers then only take note.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: received.append(caught))
    thread.start()
    asyncio.run(server.serve_until_told(listener))
    scheduler.stop()
    thread.join(timeout=GRACE_S)
    if scheduler.fatal:
        return 1
    return 130 if signal.SIGINT in received else 0


class _Server(uvicorn.Server):
    """uvicorn with SGLang's start line, and an end for more reasons than signals."""

    def __init__(self, engine: Engine, port: int) -> None:
        config = uvicorn.Config(
            make_app(engine),
            host=engine.args.host,
            port=port,
            log_config=None,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self.engine = engine
        self.port = port

    async def serve_until_told(self, listener: socket.socket) -> None:
        """Serve on the bound socket."""
        watch = asyncio.ensure_future(self._watch_parent()) if self.engine.args.parent_pid else None
        await self.serve(sockets=[listener])
        if watch is not None:
            watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so: log lines, port file."""
        await super().startup(sockets)
        # Given a ready-made socket, uvicorn is silent about this, and log readers wait for the sentence.
        logging.getLogger("uvicorn.error").info(
            "Uvicorn running on http://%s:%d (Press CTRL+C to quit)", self.config.host, self.port
        )
        self.engine.ready = True
        if self.engine.args.port_file is not None:
            _write_port(self.engine.args.port_file, self.port)
        LOGGER.info("The server is fired up and ready to roll!")

    def handle_exit(self, sig: int, frame: object) -> None:
        """First signal: answer what is running as aborted, then end."""
        self.engine.scheduler.abort(everything=True)
        super().handle_exit(sig, frame)  # type: ignore[arg-type]  # a frame that nobody reads

    def run_scheduler(self) -> None:
        """The scheduler's thread; when its loop dies the server goes down with it."""
        self.engine.scheduler.run()
        self.should_exit = True

    async def _watch_parent(self) -> None:
        parent = self.engine.args.parent_pid
        assert parent is not None, "started only with a parent"
        await _gone(parent)
        LOGGER.info("Parent process %d is gone. Shutting down.", parent)
        self.engine.scheduler.abort(everything=True)
        self.should_exit = True


async def _gone(pid: int) -> None:
    """Return when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except AttributeError:  # not Linux
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - nothing to wait on but the clock
            await asyncio.sleep(1)
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@contextmanager
def logging_to(stream: TextIO, level: str) -> Iterator[None]:
    """SGLang's prefix on every line, uvicorn's included."""
    date = "%Y-%m-%d %H:%M:%S"
    access = '[%(asctime)s] %(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'
    formatters: dict[str, logging.Formatter] = {
        LOGGER.name: logging.Formatter("[%(asctime)s] %(message)s", date),
        "uvicorn.error": uvicorn.logging.DefaultFormatter(
            "[%(asctime)s] %(levelprefix)s %(message)s", date, "%", False
        ),
        "uvicorn.access": uvicorn.logging.AccessFormatter(access, date, "%", False),
    }
    handlers = []
    for name, formatter in formatters.items():
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
        handlers.append((logger, handler))
    try:
        yield
    finally:
        for logger, handler in handlers:
            logger.removeHandler(handler)
            logger.propagate = True


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


def _write_port(path: Path, port: int) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(f"{port}\n")
    os.replace(staging, path)


def _available_gb() -> float:
    return float(psutil.virtual_memory().available) / 2**30


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
