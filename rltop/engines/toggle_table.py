"""Logical toggles of an SGLang engine: what operators switch, whatever the flags of a release are called.

A toggle is read from fields of ServerArgs (a parsed command line, the fields that SGLang resolved, `/server_info`) and
from the environment. `rltop.engines.toggles` writes it. Values are strings, as operators type and see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltop.engines.flags import Parsed
from rltop.engines.options import nearest

ON_OFF = ("on", "off")

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")
"""Speculative algorithms of every release with a list."""

ALGORITHMS_LATER = ("DSPARK", "UNO")
"""From 0.5.23 on."""

DEEPEP_MODES = ("auto", "normal", "low_latency")

LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"

CORE_DUMP = "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"

CORE_DUMP_FILE = "CUDA_COREDUMP_FILE"

CORE_DUMP_ENVIRONMENT = {
    CORE_DUMP: "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    # No skip_abort: an illegal access was reported to go unnoticed with it.
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
    "skip_local_memory,skip_constbank_memory",
}
"""As SGLang's `--crash-dump-folder`: 3 MB instead of the whole GPU memory, and the log names the kernel."""


@dataclass(frozen=True, slots=True)
class Toggle:
    """One of them."""

    name: str
    fields: tuple[str, ...]
    """Fields of ServerArgs whose options are stripped when it changes."""
    choices: tuple[str, ...]
    """What it can be set to; empty: any `value`."""
    value: str = ""
    """Placeholder of a free value, "" where there is none."""
    verify: str = ""
    """How the effective value is seen after a start."""


GRAPH_DECODE = ("cuda_graph_backend_decode", "disable_decode_cuda_graph")
GRAPH_PREFILL = ("cuda_graph_backend_prefill", "disable_prefill_cuda_graph")
GRAPH_BOTH = ("cuda_graph_config", "disable_cuda_graph")

_SPECULATIVE = (
    "enable_multi_layer_eagle",
    "uno_lora_path",
)
"""Besides every `speculative_*`."""

DECODE_SIZES = "cuda_graph_bs_decode"

TOGGLES: Mapping[str, Toggle] = {
    toggle.name: toggle
    for toggle in (
        Toggle(
            "cuda_graph",
            (*GRAPH_BOTH, *GRAPH_DECODE, "debug_cuda_graph"),
            ON_OFF,
            verify="cuda_graph_config of /server_info, cuda_graph_passes_total of /metrics, capture lines of the log",
        ),
        Toggle(
            "cuda_graph_padding",
            ("disable_cuda_graph_padding",),
            ON_OFF,
            verify="disable_cuda_graph_padding and cuda_graph_bs_decode of /server_info, sizes in the capture lines",
        ),
        Toggle(
            "prefill_graph",
            (*GRAPH_BOTH, *GRAPH_PREFILL),
            ON_OFF,
            verify="cuda_graph_config of /server_info, cuda_graph_passes_total of /metrics, capture lines of the log",
        ),
        Toggle(
            "speculative",
            _SPECULATIVE,
            ("off", *ALGORITHMS, *ALGORITHMS_LATER),
            "ALGORITHM[:DRAFT_MODEL_PATH]",
            "speculative_algorithm of /server_info, spec_verify_calls_total of /metrics",
        ),
        Toggle(
            "deepep",
            ("moe_a2a_backend", "deepep_mode"),
            ("off", *DEEPEP_MODES),
            verify="moe_a2a_backend and deepep_mode of /server_info",
        ),
        Toggle("launch_blocking", (), ON_OFF, verify="CUDA_LAUNCH_BLOCKING of /proc/PID/environ"),
        Toggle("overlap_schedule", ("disable_overlap_schedule",), ON_OFF, verify="/server_info"),
        Toggle("radix_cache", ("disable_radix_cache",), ON_OFF, verify="/server_info"),
        Toggle("custom_all_reduce", ("disable_custom_all_reduce",), ON_OFF, verify="/server_info"),
        Toggle(
            "dp_attention",
            ("enable_dp_attention", "attn_dp_size", "dp_size", "enable_dp_lm_head"),
            ON_OFF,
            verify="/server_info",
        ),
        Toggle("hicache", ("enable_hierarchical_cache",), ON_OFF, verify="/server_info"),
        Toggle("chunked_prefill", ("chunked_prefill_size",), ("off",), "TOKENS", "/server_info"),
        Toggle(
            "attention_backend",
            ("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
            (),
            "NAME",
            "/server_info",
        ),
        Toggle("mem_fraction_static", ("mem_fraction_static",), (), "FRACTION", "/server_info"),
        Toggle("core_dump", (), ON_OFF, verify="CUDA_ENABLE_COREDUMP_ON_EXCEPTION of /proc/PID/environ"),
    )
}
"""In the order in which people read them."""


def is_on(value: str | None) -> bool:
    """How CUDA and SGLang read a switch of the environment."""
    return (value or "").strip().lower() in ("1", "true", "yes", "y", "on")


def with_core_dump_file(env: Mapping[str, str], directory: str) -> dict[str, str]:
    """env, and where a core dump is to be written, if one is on and nobody said where.

    directory: of the generation on the engine's host; `coredump/` in it must exist.
    """
    result = dict(env)
    if is_on(env.get(CORE_DUMP)):
        result.setdefault(CORE_DUMP_FILE, f"{directory}/coredump/cuda_coredump_%h.%p.%t")
    return result


def graph_asked(parsed: Parsed, version: str) -> dict[str, dict[str, Any]]:
    """The graph settings after SGLang's precedence: JSON, a phase's backend, a phase's switch, both phases' switch.

    Source: `_parse_cuda_graph_config` (0.5.14 server_args.py:2915, 0.5.23 arg_groups/cuda_graph_hook.py).
    """
    values = parsed.values
    backends = {"decode": "full", "prefill": default_prefill(version)}
    for phase in backends:
        if values["disable_cuda_graph"] or values[f"disable_{phase}_cuda_graph"]:
            backends[phase] = "disabled"
        backends[phase] = values[f"cuda_graph_backend_{phase}"] or backends[phase]
    config: dict[str, dict[str, Any]] = {phase: {"backend": backend} for phase, backend in backends.items()}
    for phase, settings in config.items():
        for key in ("max_bs", "bs"):
            if (value := values[f"cuda_graph_{key}_{phase}"]) is not None:
                settings[key] = value
        settings |= (values["cuda_graph_config"] or {}).get(phase, {})
    return config


def default_prefill(version: str) -> str:
    """The prefill graph's backend on CUDA when nothing is said."""
    return "tc_piecewise" if nearest(version)[0] == "0.5.14" else "breakable"


def read_fields(fields: Mapping[str, Any], env: Mapping[str, str] | None) -> dict[str, str | None]:
    """The toggles in fields of ServerArgs, `cuda_graph_config` being resolved. None: not known from these.

    env: None where the engine's environment cannot be seen.
    """
    return {name: _read(name, fields, env) for name in TOGGLES}


def _read(name: str, fields: Mapping[str, Any], env: Mapping[str, str] | None) -> str | None:
    match name:
        case "cuda_graph" | "prefill_graph":
            phase = (fields.get("cuda_graph_config") or {}).get("decode" if name == "cuda_graph" else "prefill")
            backend = (phase or {}).get("backend")
            if backend is not None and fields.get("device") == "cpu" and not fields.get("enable_torch_compile"):
                return "off"  # SGLang keeps the words and captures nothing
            return None if backend is None else _on(backend != "disabled")
        case "cuda_graph_padding" | "overlap_schedule" | "radix_cache" | "custom_all_reduce":
            disabled = fields.get(f"disable_{name}")
            if name == "cuda_graph_padding" and every_size(fields.get(DECODE_SIZES)):
                return "off"  # whatever the flag says: no batch is between two sizes
            return None if disabled is None else _on(not disabled)
        case "speculative":
            if "speculative_algorithm" not in fields:
                return None
            return str(fields["speculative_algorithm"] or "off")
        case "deepep":
            backend = fields.get("moe_a2a_backend", "")
            if backend == "":
                return None
            if backend in ("deepep", "deepep_v2"):
                return str(fields.get("deepep_mode") or "auto")
            return "off"
        case "dp_attention":
            size, old = fields.get("attn_dp_size"), fields.get("enable_dp_attention")
            return None if size is None and old is None else _on(bool(old) or (size or 1) > 1)
        case "hicache":
            enabled = fields.get("enable_hierarchical_cache")
            return None if enabled is None else _on(bool(enabled))
        case "chunked_prefill":
            chunk = fields.get("chunked_prefill_size")
            return None if chunk is None else "off" if chunk <= 0 else str(chunk)
        case "attention_backend":
            both = fields.get("prefill_attention_backend"), fields.get("decode_attention_backend")
            value = both[0] if both[0] is not None and both[0] == both[1] else fields.get(name)
            return None if value is None else str(value)
        case "mem_fraction_static":
            value = fields.get(name)
            return None if value is None else str(value)
        case "launch_blocking":
            return None if env is None else _on(is_on(env.get(LAUNCH_BLOCKING)))
        case "core_dump":
            return None if env is None else _on(core_dump_on(env, fields))
    raise KeyError(name)


def every_size(sizes: object) -> bool:
    """A list of decode batch sizes without a gap: no batch up to the largest is ever padded."""
    return isinstance(sizes, list | tuple) and len(sizes) > 2 and sorted(sizes) == list(range(1, len(sizes) + 1))


def core_dump_on(env: Mapping[str, str], fields: Mapping[str, Any]) -> bool:
    """SGLang turns core dumps on too, where nothing else is said: with a crash folder, or by its own variable."""
    own = env.get(CORE_DUMP)
    if own is not None:
        return is_on(own)
    return bool(fields.get("crash_dump_folder")) or is_on(env.get("SGLANG_CUDA_COREDUMP"))


def _on(value: bool) -> str:
    return "on" if value else "off"
