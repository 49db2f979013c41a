"""SGLang's rules about experts (all-to-all backends) and speculative decoding, as steps in SGLang's order.

Sources: 0.5.14 srt/server_args.py and srt/arg_groups/speculative_hook.py, 0.5.23 srt/arg_groups/moe_hook.py and
speculative_hook.py. Every step may raise `Refused`.
"""

from __future__ import annotations

from rltop.engines.resolution import Refused, Resolution, require

OWN_DRAFT = (
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "BailingMoeV2_5ForCausalLM",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "HYV3ForCausalLM",
    "HYV4ForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)
"""Architectures whose checkpoint holds the draft's layers: EAGLE needs no draft model."""

SPANNING = ("megamoe", "deepep", "deepep_v2", "mooncake", "nixl", "ascend_fuseep", "flashinfer", "mori", "pplx")
"""All-to-all backends that force ep_size = tp_size."""

FLASHINFER_RUNNERS = {
    True: ("flashinfer_cutlass", "flashinfer_cutedsl"),
    False: (
        "flashinfer_cutlass",
        "flashinfer_cutedsl",
        "flashinfer_trtllm",
        "flashinfer_trtllm_routed",
        "deep_gemm",
    ),
}
"""MoE runners that the flashinfer all-to-all works with, by `older`."""


def experts(r: Resolution) -> None:
    """`_handle_a2a_moe`, `handle_a2a_moe`."""
    if r["enable_deepep_waterfill"] or r["enable_waterfill"]:
        kept = () if r.older else ("megamoe",)
        if r["moe_a2a_backend"] not in ("deepep", *kept):
            r.set("moe_a2a_backend", "deepep", "waterfill needs it")
    backend, mode, runner = r["moe_a2a_backend"], r["deepep_mode"], r["moe_runner_backend"]
    if backend in SPANNING and not (backend == "ascend_fuseep" and r.cuda):
        r.set("ep_size", r["tp_size"], f"--moe-a2a-backend {backend} spreads experts over all ranks")
    match backend:
        case "deepep":
            if runner == "flashinfer_cutedsl" and not r.older:
                require(mode != "normal", "flashinfer_cutedsl FP4 MoE only supports DeepEP low_latency dispatch")
                r.set("deepep_mode", "low_latency", "flashinfer_cutedsl has no normal dispatch")
            if mode == "normal":
                r.no_graph("deepep_mode=normal turns CUDA graphs off, even if they are asked for")
        case "deepep_v2":
            require(runner in ("auto", "deep_gemm"), "DeepEP v2 MoE supports only --moe-runner-backend deep_gemm.")
            overlap = r["enable_two_batch_overlap"] or r["enable_single_batch_overlap"]
            require(not overlap, "DeepEP v2 MoE has not implemented the TBO/SBO overlap hooks yet.")
            r.no_graph("DeepEP v2 reads counts on the host in prefill", "prefill")
        case "flashinfer":
            words = (
                "--attn-dp-size equal to --tp-size" if not r.older else "dp_size == tp_size and --enable-dp-attention"
            )
            require(r.dp > 1 and r.dp == r["tp_size"], f"Flashinfer MoE A2A is only supported with {words}")
            require(
                runner in FLASHINFER_RUNNERS[r.older],
                f"Flashinfer MoE A2A needs a runner of {FLASHINFER_RUNNERS[r.older]}",
            )
        case "mori":
            if mode == "auto":
                r.set("deepep_mode", "normal", "MoRI's only mode")
            limit = int(r.env.get("SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "4096"))
            require(
                r["chunked_prefill_size"] <= limit or r["disaggregation_mode"] == "decode",
                f"SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK ({limit}) must be at least chunked_prefill_size",
            )
        case "pplx":
            require(mode != "normal", "moe_a2a_backend='pplx' only supports low-latency mode")
            if mode == "auto":
                r.set("deepep_mode", "low_latency", "pplx's only mode")
            require(r["attn_dp_size"] >= 2, "moe_a2a_backend='pplx' requires attention DP with at least 2 groups")
            require(runner in ("auto", "deep_gemm"), "moe_a2a_backend='pplx' needs --moe-runner-backend deep_gemm")


def speculative(r: Resolution) -> None:
    """`handle_speculative_decoding`."""
    algorithm = r["speculative_algorithm"]
    if algorithm is None:
        return
    algorithm = algorithm.upper()
    if algorithm == "NEXTN":
        algorithm = "EAGLE"
    r.fields["speculative_algorithm"] = algorithm
    known = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", *(() if r.older else ("DSPARK", "UNO")))
    require(algorithm in (*known, "FROZEN_KV_MTP", "NONE"), f"Unknown speculative algorithm name: {algorithm}")
    match algorithm:
        case "NGRAM":
            _ngram(r)
        case "DFLASH" | "DSPARK":
            _block(r, algorithm)
        case "UNO":
            _uno(r)
        case _:
            _eagle(r, algorithm)


def _common(r: Resolution) -> None:
    if r["max_running_requests"] is None:
        r.fields["max_running_requests"] = 48
        r.notes.append("speculative decoding sets --max-running-requests to 48, as nothing else is said")
    if not r.cuda and not r.older:
        r.set("disable_overlap_schedule", True, "speculative decoding on a CPU has no overlap schedule")


def _eagle(r: Resolution, algorithm: str) -> None:
    if algorithm == "STANDALONE" and r.dp > 1:
        raise Refused("Currently standalone speculative decoding does not support dp attention.")
    _common(r)
    if r.architecture in OWN_DRAFT and r["speculative_draft_model_path"] is None:
        r.fields["speculative_draft_model_path"] = r["model_path"] or "the model itself"
    if r["enable_mixed_chunk"] and (r.older or algorithm == "STANDALONE"):
        r.set("enable_mixed_chunk", False, f"{algorithm} speculative decoding does not support it")
    if r["speculative_num_steps"] is None and not r["speculative_adaptive"]:
        alone = r.topk is None and r["speculative_num_draft_tokens"] is None
        require(alone, "--speculative-eagle-topk and --speculative-num-draft-tokens need --speculative-num-steps")
        wide = algorithm != "STANDALONE" and r.architecture in ("LlamaForCausalLM", "Grok1ForCausalLM")
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        r.fields |= dict(zip(names, (5, 4, 8) if wide else (3, 1, 4), strict=True))
    every = (r["attention_backend"], r["decode_attention_backend"], r["prefill_attention_backend"])
    if r.topk is None:
        raise Refused("--speculative-num-steps needs --speculative-eagle-topk and --speculative-num-draft-tokens")
    if "trtllm_mha" in every and r.topk > 1:
        raise Refused("trtllm_mha backend only supports topk = 1 for speculative decoding.")
    steps = int(r["speculative_num_steps"])
    if r.topk == 1 and r["speculative_num_draft_tokens"] != steps + 1:
        r.set("speculative_num_draft_tokens", steps + 1, "one branch of that many steps, and the token before")
    if r.topk > 1 and r["page_size"] > 1 and r["attention_backend"] not in ("flashinfer", "fa3", "triton"):
        raise Refused("speculative_eagle_topk > 1 with page_size > 1 is only supported on flashinfer, fa3 and triton")


def _ngram(r: Resolution) -> None:
    if r.older and not r.cuda:
        raise Refused("Ngram speculative decoding only supports CUDA device.")
    _common(r)
    if r["enable_mixed_chunk"]:
        r.set("enable_mixed_chunk", False, "NGRAM speculative decoding does not support it")
    r.fields["speculative_eagle_topk"] = r["speculative_ngram_max_bfs_breadth"]
    if r["speculative_num_draft_tokens"] is None:
        r.fields["speculative_num_draft_tokens"] = 12
    if r["speculative_num_steps"] is None:
        r.fields["speculative_num_steps"] = r["speculative_num_draft_tokens"] // r["speculative_eagle_topk"]
    if r["speculative_eagle_topk"] > 1 and r["page_size"] > 1 and r["attention_backend"] != "flashinfer":
        raise Refused(
            f"NGRAM with page_size {r['page_size']} > 1 is only supported with the attention backend flashinfer, "
            f"not {r['attention_backend']}"
        )
    if r.dp > 1:
        raise Refused("Currently ngram speculative decoding does not support dp attention.")


def _block(r: Resolution, algorithm: str) -> None:
    name = {"DFLASH": "DFLASH", "DSPARK": "DSpark"}[algorithm]
    if not r.older and not r.cuda:
        raise Refused(f"{name} speculative decoding is not supported on device {r['device']!r}.")
    if r.dp > 1:
        require(not r.older, "Currently DFLASH speculative decoding does not support dp attention.")
        require(r["enable_dp_lm_head"], f"{name} with dp attention requires --enable-dp-lm-head.")
        if algorithm == "DSPARK":
            usable = r["moe_a2a_backend"] in ("none", "megamoe", "mori")
            require(usable, "DSpark with dp attention supports moe_a2a_backend none, megamoe or mori")
    require(r["pp_size"] == 1, f"Currently {name} speculative decoding only supports pp_size == 1.")
    if r["speculative_draft_model_path"] is None:
        raise Refused(f"{name} speculative decoding requires setting --speculative-draft-model-path.")
    for field in ("speculative_num_steps", "speculative_eagle_topk"):
        if r[field] is None:
            r.fields[field] = 1
        else:
            r.set(field, 1, f"{name} has no other")
    size = r["speculative_dflash_block_size" if algorithm == "DFLASH" else "speculative_dspark_block_size"]
    window = None if size is None else size + (algorithm == "DSPARK")
    tokens = r["speculative_num_draft_tokens"]
    if window is not None:
        require(size > 0 and tokens in (None, window), f"{name}'s block size and --speculative-num-draft-tokens differ")
        r.fields["speculative_num_draft_tokens"] = window
    elif tokens is None:
        # What the draft's own config.json says comes first.
        r.fields["speculative_num_draft_tokens"] = 16 if algorithm == "DFLASH" else 8
    _common(r)
    if r["enable_mixed_chunk"] and r.older:
        r.set("enable_mixed_chunk", False, f"{name} speculative decoding does not support it")


def _uno(r: Resolution) -> None:
    require(r.cuda, "UNO only supports CUDA.")
    require(r["speculative_draft_model_path"] is None, "UNO does not accept --speculative-draft-model-path.")
    require(r["uno_lora_path"] is not None, "UNO requires --uno-lora-path.")
    require(not r["enable_deterministic_inference"], "UNO does not support --enable-deterministic-inference")
    require((r["speculative_num_draft_tokens"] or 0) >= 1, "UNO requires --speculative-num-draft-tokens")
    require((r["tp_size"], r["pp_size"]) == (1, 1), "UNO requires TP=PP=1.")
    require(r.dp == 1, "UNO does not support DP attention")
    if (r.topk or 1) == 1:
        r.fields |= {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
    else:
        require((r["speculative_num_steps"] or 0) >= 1, "UNO tree mode requires --speculative-num-steps")
    prefill = r["prefill_attention_backend"] or r["attention_backend"]
    decode = r["decode_attention_backend"] or r["attention_backend"]
    require((prefill, decode) == ("fa3", "fa3"), "UNO requires FA3 for both prefill and decode attention")
