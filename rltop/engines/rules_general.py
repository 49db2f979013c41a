"""SGLang's rules about graphs, attention, parallelism and the cache, as steps in SGLang's order.

0.5.14 resolves in `ServerArgs.__post_init__` (srt/server_args.py), 0.5.23 in `run_resolution_pipeline`
(srt/arg_groups/pipeline.py); `older` says which one is meant. Only what a toggle can set, and what can refuse or move a
toggle, is here. Every step may raise `Refused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rltop.engines.resolution import Refused, Resolution, require
from rltop.engines.toggle_table import is_on


def dp_spelling(r: Resolution) -> None:
    """0.5.23 parallel_hook.py `handle_deprecated_dp_attention`: the old pair becomes `attn_dp_size`."""
    if r.older or not r["enable_dp_attention"]:
        return
    if r["attn_dp_size"] == 1:
        r.fields |= {"attn_dp_size": r["dp_size"], "dp_size": 1}
    r.fields["enable_dp_attention"] = False


_LEGAL: Mapping[bool, Mapping[str, Sequence[str]]] = {
    True: {
        "decode": ("full", "breakable", "tc_piecewise", "disabled"),
        "prefill": ("breakable", "tc_piecewise", "disabled"),
    },
    False: dict.fromkeys(("decode", "prefill"), ("full", "breakable", "disabled")),
}


def graphs(r: Resolution) -> None:
    """`_handle_cuda_graph_config`, `handle_cuda_graph_config`: a prefill backend that was given skips the cascade."""
    locked = (
        r["disable_cuda_graph"]
        or r["disable_prefill_cuda_graph"]
        or r["cuda_graph_backend_prefill"] is not None
        or "backend" in (r.parsed.values["cuda_graph_config"] or {}).get("prefill", {})
    )
    if not r.older and not r.cuda and not locked:
        r.no_graph("breakable prefill graphs are for CUDA", "prefill")
    if not locked:
        for why, holds in _prefill_conflicts(r):
            if holds:
                r.no_graph(why, "prefill")
                break
    for phase in ("decode", "prefill"):
        legal = _LEGAL[r.older][phase]
        if r.graph(phase) not in legal:
            raise Refused(f"--cuda-graph-config[{phase}].backend={r.graph(phase)!r} not allowed; allowed: {legal}")


def _prefill_conflicts(r: Resolution) -> Sequence[tuple[str, object]]:
    """What turns a prefill graph off that nobody asked for."""
    a2a = r["moe_a2a_backend"]
    if not r.older:
        context = max(r["attn_cp_size"], r["dcp_size"]) > 1
        usable = a2a in ("none", "deepep", "megamoe", "flashinfer")
        return (
            ("prefill graphs are opt-in with pipeline parallelism", r["pp_size"] > 1),
            ("no breakable prefill graph with context parallelism", context),
            ("no breakable prefill graph with two-batch overlap", r["enable_two_batch_overlap"]),
            (f"no breakable prefill graph with --moe-a2a-backend {a2a}", not usable),
        )
    if r.graph("prefill") == "breakable":
        return (("no breakable prefill graph with MLA", r.mla),)
    recorder = r["enable_eplb"] or r["expert_distribution_recorder_mode"] is not None
    return (
        ("no piecewise prefill graph with DP attention", r["enable_dp_attention"]),
        ("no piecewise prefill graph with --enable-torch-compile", r["enable_torch_compile"]),
        ("no piecewise prefill graph with pipeline parallelism", r["pp_size"] > 1),
        (f"no piecewise prefill graph with --moe-a2a-backend {a2a}", a2a != "none"),
        ("no piecewise prefill graph with LoRA", r["lora_paths"] or r["enable_lora"]),
        ("no piecewise prefill graph with GGUF", r["load_format"] == "gguf" or r["quantization"] == "gguf"),
        ("no piecewise prefill graph with a diffusion model", r["dllm_algorithm"] is not None),
        ("no piecewise prefill graph with CPU offload", r["cpu_offload_gb"] > 0),
        ("no piecewise prefill graph with HiCache", r["enable_hierarchical_cache"]),
        ("no piecewise prefill graph with deterministic inference", r["enable_deterministic_inference"]),
        ("no piecewise prefill graph with PD disaggregation", r["disaggregation_mode"] != "null"),
        ("no piecewise prefill graph with symmetric memory", r["enable_symm_mem"]),
        ("no piecewise prefill graph with the expert recorder", recorder),
        ("no piecewise prefill graph with context parallelism", r["attn_cp_size"] > 1),
        ("no piecewise prefill graph with --debug-cuda-graph", r["debug_cuda_graph"]),
        ("no piecewise prefill graph with DSA context parallelism", r["enable_dsa_prefill_context_parallel"]),
    )


def machine(r: Resolution) -> None:
    """`_handle_cpu_backends`, `_handle_gpu_memory_settings`."""
    if not r.cuda and r["attention_backend"] is None:
        r.fields["attention_backend"] = "intel_amx"
    if r["chunked_prefill_size"] is None:
        r.fields["chunked_prefill_size"] = r.host.chunked_prefill


DETERMINISTIC = {
    True: ("flashinfer", "fa3", "triton", "ascend"),
    False: ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton"),
}
"""Attention backends that `--enable-deterministic-inference` takes."""


def deterministic(r: Resolution) -> None:
    """`_handle_deterministic_inference`, attention_hook.py."""
    if not r["enable_deterministic_inference"] and r["rl_on_policy_target"] is None:
        return
    backend = r["attention_backend"]
    if backend is None:
        r.fields["attention_backend"] = "fa3" if r.host.sm < 100 else "triton" if r.mla else "flashinfer"
        return
    if backend not in DETERMINISTIC[r.older]:
        raise Refused(
            f"Currently only {list(DETERMINISTIC[r.older])} attention backends are supported for deterministic "
            f"inference, but you explicitly specified '{backend}'."
        )


_RENAMED: Mapping[bool, Mapping[str, str]] = {
    True: {"compressed": "dsv4"},
    False: {"compressed": "dsv4", "tokenspeed_mla": "cutedsl_mla"},
}
"""Attention backends by an old name."""


def attention(r: Resolution) -> None:
    """`_handle_attention_backend_compatibility`, attention_hook.py."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        renamed = _RENAMED[r.older].get(r[name])
        if renamed is not None:
            r.set(name, renamed, "its new name")
    prefill, decode = r["prefill_attention_backend"], r["decode_attention_backend"]
    if prefill is not None and prefill == decode:
        r.set("attention_backend", prefill, "both phases name it")
    if r["attention_backend"] is None:
        r.fields["attention_backend"] = _default_attention(r)
    backend = r["attention_backend"]
    if backend == "torch_native":
        r.no_graph("no graph with the attention backend torch_native")
    if backend == "flex_attention":
        r.no_graph("no graph with the attention backend flex_attention")
        if r["speculative_algorithm"] is not None:
            raise Refused("Speculative decoding is currently not supported with Flex Attention backend")
    _attention_needs(r, {backend, decode}, {backend, decode, prefill})
    if backend == "fa3" and r["kv_cache_dtype"] == "fp8_e5m2":
        r.set("attention_backend", "triton", "fa3 has no fp8_e5m2")
    if backend == "intel_amx" and not r.cuda:
        r.fields["attention_backend"] = "torch_native"
    if backend == "dual_chunk_flash_attn" and r.older:
        r.set("enable_mixed_chunk", False, "not with dual-chunk flash attention")
        r.set("disable_radix_cache", True, "not with dual-chunk flash attention")
    if r["page_size"] is None:
        r.fields["page_size"] = 1


def _default_attention(r: Resolution) -> str:
    one_branch = r.topk is None or (r.topk == 1 and r["page_size"] in (None, 1))
    if r.mla:
        return "fa3" if r.host.sm == 90 else "flashinfer" if r.host.sm in (100, 103) else "triton"
    if r.host.sm == 90 and one_branch:
        return "fa3"
    if r.host.sm in (100, 103) and one_branch and (r["speculative_algorithm"] is None or r.topk is not None):
        return "trtllm_mha"
    return "flashinfer" if r.host.flashinfer else "triton"


def _attention_needs(r: Resolution, decode: set[Any], every: set[Any]) -> None:
    """GPUs and page sizes of single backends."""
    blackwell, page = r.host.sm >= 100, r["page_size"]
    if "flashmla" in decode:
        page = 64
    if "cutlass_mla" in decode:
        page = 128
    if "trtllm_mla" in decode:
        require(blackwell, "TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x).")
        page = page if page in (32, 64) else 64
    if "tokenspeed_mla" in decode and r.older:
        require(blackwell, "tokenspeed_mla backend is only supported on Blackwell GPUs (SM100/SM12x).")
        page = page if page in (32, 64) else 64
    if "cutedsl_mla" in every:
        require(r["prefill_attention_backend"] != "cutedsl_mla", "CuteDSL MLA only supports decoding for now")
        require(r.host.sm in (100, 103), "CuteDSL MLA backend is only supported on Blackwell GPUs (SM100).")
        page = page if page in (32, 64) else 64
    if "trtllm_mha" in every:
        first = r["prefill_attention_backend"] or r["attention_backend"]
        if first == "trtllm_mha":
            usable = r.host.sm in (100, 103) or (not r.older and r.host.sm >= 90)
            require(usable, f"TRTLLM MHA backend for prefill is not supported on SM{r.host.sm}.")
        require(r.host.sm >= 90, f"TRTLLM MHA backend for decode is not supported on SM{r.host.sm}.")
        sizes = (16, 32, 64) if r.older else (16, 32, 64, 128)
        page = page if page in sizes else 64
    if "hpc_ops" in every and not r.older:
        page = 64
    page = _intel_page(r, page)
    if page != r["page_size"]:
        r.set("page_size", page, "the attention backend has no other")


def _intel_page(r: Resolution, page: int | None) -> int | None:
    backend = r["attention_backend"]
    prefill = r["prefill_attention_backend"] or backend
    decode = r["decode_attention_backend"] or backend
    if r.older:
        usable = prefill != "intel_xpu" or not r.mla
        require(usable, "intel_xpu backend is only supported on decode for MLA models")
    if "intel_xpu" in ((decode,) if r.older else (prefill, decode)):
        sizes = (16, 32, 64, 128) if r.mla else (64, 128)
        return page if page in sizes else 128
    return page


def data_parallel(r: Resolution) -> None:
    """`_handle_data_parallelism`, parallel_hook.py."""
    if r.older:
        if r["dp_size"] == 1:
            r.set("enable_dp_attention", False, "--dp-size is 1")
            r.fields["enable_dp_lm_head"] = False
    else:
        require(r["attn_dp_size"] >= 1, f"--attn-dp-size must be positive (got {r['attn_dp_size']}).")
        require(
            r["attn_dp_size"] == 1 or r["dp_size"] == 1,
            f"--dp-size {r['dp_size']} with --attn-dp-size {r['attn_dp_size']}: data-parallel replicas combined with "
            "attention data parallelism are not supported.",
        )
        if max(r["attn_dp_size"], r["dp_size"]) == 1:
            r.fields["enable_dp_lm_head"] = False
    if r.dp > 1:
        require(
            r["tp_size"] % r.dp == 0, f"--tp-size {r['tp_size']} must be divisible by {r.dp} groups of DP attention"
        )
        r.set("chunked_prefill_size", r["chunked_prefill_size"] // r.dp, "DP attention divides it among its groups")
    if r["enable_dp_lm_head"]:
        require(r.dp > 1, "Please enable dp attention when setting enable_dp_lm_head.")


def cache(r: Resolution) -> None:
    """`_handle_cache_compatibility`, kv_cache_hook.py."""
    if r["enable_hierarchical_cache"] and r["disable_radix_cache"]:
        raise Refused("The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive")


def pipeline(r: Resolution) -> None:
    """`_handle_pipeline_parallelism`."""
    if r["pp_size"] > 1:
        r.set("disable_overlap_schedule", True, "pipeline parallelism is incompatible with it")


def checks(r: Resolution) -> None:
    """`check_server_args`."""
    if r["disable_cuda_graph_padding"] and r["enable_torch_compile"]:
        raise Refused("--disable-cuda-graph-padding is incompatible with --enable-torch-compile.")
    if r["pp_size"] > 1 and r["speculative_algorithm"] is not None:
        _pipeline_speculative(r)
    require(r["tp_size"] * r["pp_size"] % r["nnodes"] == 0, "tp_size must be divisible by number of nodes")
    if r["speculative_algorithm"] is not None and r.older:
        require(not r["enable_mixed_chunk"], "enable_mixed_chunk is not supported with speculative decoding")
    if r["chunked_prefill_size"] > 0 and r["disaggregation_mode"] != "decode":
        whole = r["chunked_prefill_size"] % r["page_size"] == 0
        require(whole, "chunked_prefill_size must be divisible by page_size")
    if r["enable_two_batch_overlap"] and r["moe_a2a_backend"] == "none" and (r.older or r.dp == 1):
        without = "" if r.older else " without attention DP (--attn-dp-size)"
        raise Refused(f"When enabling two batch overlap{without}, moe_a2a_backend cannot be 'none'.")


def _pipeline_speculative(r: Resolution) -> None:
    if r.older:
        raise Refused("Pipeline parallelism is not compatible with overlap schedule, speculative decoding")
    eagle = r["speculative_algorithm"] == "EAGLE" and not r["enable_multi_layer_eagle"]
    require(eagle, "Pipeline parallelism currently only supports EAGLE (non-multi-layer) speculative decoding")
    if is_on(r.env.get("SGLANG_ENABLE_PP_SPEC")):
        require(
            r["disaggregation_mode"] == "null", "SGLANG_ENABLE_PP_SPEC is not compatible with --disaggregation-mode"
        )
        require(not r["speculative_adaptive"], "SGLANG_ENABLE_PP_SPEC is not compatible with --speculative-adaptive")
        require(r.dp == 1, "SGLANG_ENABLE_PP_SPEC is not compatible with attention DP (--attn-dp-size)")
    else:
        prefill = r["disaggregation_mode"] == "prefill"
        require(prefill, "PP + speculative decoding (MTP) is only supported on prefill nodes")


def shown(r: Resolution) -> None:
    """0.5.23 `resolved_dict`: the old name of DP attention goes on saying whether it is on."""
    if not r.older:
        r.fields["enable_dp_attention"] = r.dp > 1
