"""Command line of the CPU engine: SGLang's argument names where they exist, a few of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """One engine's settings. Names and defaults are SGLang's unless the field says otherwise."""

    model_path: Path
    tokenizer_path: Path
    host: str
    port: int
    """0: the engine takes a free port and reports it (`port_file`, the uvicorn line)."""
    served_model_name: str
    context_length: int | None
    """None: config.json's max_position_embeddings."""
    max_total_tokens: int
    max_running_requests: int
    random_seed: int
    weight_version: str
    decode_log_interval: int
    log_level: str
    disable_radix_cache: bool
    enable_metrics: bool
    enable_memory_saver: bool
    enable_deterministic_inference: bool
    """Accepted for SGLang's sake; this engine is always deterministic given a seed per request."""
    skip_server_warmup: bool
    device: str
    dtype: str
    port_file: Path | None
    """Own: written, atomically, with the port number once the engine listens."""
    parent_pid: int | None
    """Own: the engine stops when this process is gone."""

    def log_form(self) -> str:
        """`server_args=ServerArgs(…)`, the line that SGLang logs first and log readers look for."""
        listed = ", ".join(f"{name}={value!r}" for name, value in self.as_json().items())
        return f"server_args=ServerArgs({listed})"

    def as_json(self) -> dict[str, str | int | bool | None]:
        """The settings as `/server_info` shows them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def parse_args(argv: Sequence[str]) -> EngineArgs:
    """Parse or exit with status 2 and argparse's message, as SGLang does."""
    parser = argparse.ArgumentParser(
        prog="rltop.train.cpu_engine",
        description="rltop CPU engine, a stand-in for SGLang: its HTTP API over a small Qwen3 checkpoint on the CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", "--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--tokenizer-path", type=Path, help="directory of tokenizer.json; default: --model-path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0: a free one, reported through --port-file")
    parser.add_argument("--served-model-name", help="default: --model-path")
    parser.add_argument("--context-length", type=_positive, help="default: the model's")
    parser.add_argument("--max-total-tokens", type=_positive, default=131072, help="KV positions reserved at once")
    parser.add_argument("--max-running-requests", type=_positive, default=1024)
    parser.add_argument("--random-seed", type=int, default=0, help="for requests without a sampling_seed")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--decode-log-interval", type=_positive, default=40)
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--disable-radix-cache", action="store_true", help="no prompt cache")
    parser.add_argument("--enable-metrics", action="store_true", help="serve /metrics")
    parser.add_argument(
        "--enable-memory-saver", action="store_true", help="release_memory_occupation loses the weights"
    )
    parser.add_argument("--enable-deterministic-inference", action="store_true", help="always on here")
    parser.add_argument("--skip-server-warmup", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32"), help="it computes in float32")
    parser.add_argument("--port-file", type=Path, help="file to write the bound port to")
    parser.add_argument("--parent-pid", type=_positive, help="stop when this process is gone")
    namespace = vars(parser.parse_args(argv))
    namespace["tokenizer_path"] = namespace["tokenizer_path"] or namespace["model_path"]
    namespace["served_model_name"] = namespace["served_model_name"] or str(namespace["model_path"])
    return EngineArgs(**namespace)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
