"""What a toggle moves besides itself, and the options that keep it where it was.

SGLang derives the KV pool, the request limit, backends and capture lists from its other arguments: an engine with a
toggle changed is another engine in more than that one thing. `pins` writes the baseline's values out. Sources:
0.5.14 srt/server_args.py 3122-3362, 0.5.23 arg_groups/memory_hook.py, cuda_graph_hook.py, speculative_hook.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rltop.engines.flags import Parsed
from rltop.engines.options import Table

POOL = ("mem_fraction_static", "max_total_tokens")

MOVES: Mapping[str, Sequence[str]] = {
    "cuda_graph": POOL,
    "cuda_graph_padding": ("max_total_tokens",),
    "prefill_graph": POOL,
    "speculative": (
        *POOL,
        "max_running_requests",
        "attention_backend",
        "decode_attention_backend",
        "prefill_attention_backend",
        "cuda_graph_bs_decode",
    ),
    "deepep": (*POOL, "ep_size", "moe_runner_backend"),
    "dp_attention": ("mem_fraction_static", "max_running_requests"),
    "hicache": ("max_total_tokens",),
    "chunked_prefill": POOL,
    "attention_backend": ("max_total_tokens", "kv_cache_dtype"),
}
"""Toggle -> fields whose default depends on it. The others move nothing."""


PINNED = tuple(dict.fromkeys([name for names in MOVES.values() for name in names] + ["random_seed"]))
"""Every field that `pins` may write out."""


def pins(wanted: Mapping[str, str], parsed: Parsed, spec: Table, baseline: Mapping[str, Any]) -> list[list[str]]:
    """Options with the baseline's values for what `wanted` would move and nobody set.

    baseline: `/server_info`. The random seed is pinned with the rest: without one SGLang draws it at every start.
    """
    moved = dict.fromkeys(name for toggle in wanted for name in MOVES.get(toggle, ()))
    if not moved or not baseline:
        return []
    if "mem_fraction_static" in wanted:
        moved.pop("max_total_tokens", None)
    options = []
    for name in (*moved, "random_seed"):
        if name in wanted or parsed.is_given(name):
            continue
        value = baseline_value(name, baseline)
        option = next(iter(spec.named(name)), None)
        if option is None or value in (None, "", "auto", [], option.default):
            continue
        if option.choices is not None and value not in option.choices:
            continue
        flag = max(option.spellings, key=len)
        options.append([flag, *(map(str, value) if isinstance(value, list) else [str(value)])])
    if wanted.get("deepep", "off") != "off":
        # A mode forces it to the tensor-parallel size whatever is said.
        options = [option for option in options if option[0] != "--expert-parallel-size"]
    return options


def shared(options: Sequence[str], toggles: Collection[str]) -> list[str]:
    """Pinned options (`--attention-backend fa3`) without those that one of these toggles sets itself."""
    fields = {"memory": "mem_fraction_static"}
    tried = {f"--{fields.get(name, name).replace('_', '-')}" for name in toggles}
    return [option for option in options if option.partition(" ")[0] not in tried]


def baseline_value(name: str, baseline: Mapping[str, Any]) -> Any:
    """What the engine of this `/server_info` has in a field of its arguments, resolved: None where it does not say.

    max_running_requests is that of the whole engine, of which a data-parallel rank has a share.
    """
    states: Sequence[Any] = baseline.get("internal_states") or ({},)
    inner = states[0] if isinstance(states[0], Mapping) else {}
    match name:
        case "max_total_tokens":
            return baseline.get("max_total_num_tokens")
        case "max_running_requests":
            own = baseline.get(name)
            each = inner.get("effective_max_running_requests_per_dp")
            groups = max(baseline.get("attn_dp_size") or 1, baseline.get("dp_size") or 1)
            return own if own is not None or each is None else each * groups
        case "cuda_graph_bs_decode":
            decode = (baseline.get("cuda_graph_config") or {}).get("decode") or {}
            return decode.get("bs") if decode.get("backend") not in (None, "disabled") else None
    return baseline.get(name)
