"""The stages of a start as its log and its faults have them: load, capture, ready. No torch: stand-ins share them."""

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
from rltop.train.cpu_engine.faults import INJECTED
from rltop.train.cpu_engine.imitation import PREFILL_OFF
from rltop.train.cpu_engine.injection import Injection, SchedulerDied, signature
from rltop.train.cpu_engine.process import Tree
from rltop.train.cpu_engine.stats import Stats

LOGGER = logging.getLogger("rltop.cpu_engine")


def injection_of(args: EngineArgs, environ: Mapping[str, str], tree: Tree | None) -> Injection:
    """The armed faults of an engine with these arguments; orphans are let go at once."""
    injection = Injection(
        args.faults,
        toggles=read_fields(args.sglang, environ),
        seed=f"{args.random_seed}/{environ.get(MARKER, '')}",
        environ=environ,
        watchdog_s=args.sglang["watchdog_timeout"],
    )
    if tree is not None:
        injection.scheduler_pid = tree.scheduler_pid
        let_orphans_go(injection, tree)
    return injection


def tell_limits(args: EngineArgs, context_length: int) -> None:
    """SGLang's line at the end of a load."""
    LOGGER.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d, available_%s_mem=%.2f GB",
        args.max_total_tokens,
        args.sglang["chunked_prefill_size"],
        args.sglang["max_prefill_tokens"],
        args.max_running_requests,
        context_length,
        "cpu" if args.sglang["device"] == "cpu" else "gpu",
        available_gb(),
    )


def engine_stats(args: EngineArgs, context_length: int) -> Stats:
    """Its counters, all at zero."""
    stats = Stats(args.max_total_tokens, args.max_running_requests, context_length)
    if args.effects.draft_tokens:
        stats.speculative = (args.sglang["speculative_num_steps"], args.effects.draft_tokens)
    return stats


def with_port(args: EngineArgs, port: int) -> EngineArgs:
    """The arguments with the port that was bound."""
    return replace(args, port=port, sglang=dict(args.sglang) | {"port": port})


def let_orphans_go(injection: Injection, tree: Tree) -> None:
    def check(_: object = None) -> None:
        if orphan := injection.strike("orphan"):
            tree.orphan(orphan)

    check()
    injection.on_armed = lambda fault: check() if fault.kind.name == "orphan" else None


def faults_of(stage: Literal["load", "capture"], injection: Injection, tree: Tree | None) -> None:
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


def capture(args: EngineArgs, injection: Injection, tree: Tree | None) -> None:
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
        faults_of("capture", injection, tree)


@contextmanager
def _captured(name: str, begin: str, end: str = "") -> Iterator[None]:
    began = time.perf_counter()
    LOGGER.info("Capture target %s CUDA graph begin. %s, avail mem=%.2f GB", name, begin, available_gb())
    yield
    LOGGER.info(
        "Capture target %s CUDA graph end. %selapsed=%.2f s, mem usage=0.00 GB, avail mem=%.2f GB.",
        name,
        end,
        time.perf_counter() - began,
        available_gb(),
    )


def model_info(args: EngineArgs, model_type: str, architecture: str) -> dict[str, object]:
    """`/model_info`, without what changes while it serves."""
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
        "model_type": model_type,
        "architectures": [architecture],
    }


def available_gb() -> float:
    """Free memory of this machine, GiB."""
    return float(psutil.virtual_memory().available) / 2**30
