"""Which command lines are asked of SGLang: every toggle in every value, and random combinations of what they touch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rltop.engines.options import table
from rltop.engines.toggles import TOGGLES, change

MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 512,
        "intermediate_size": 512,
        "max_position_embeddings": 4096,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 4096,
    },
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 4096,
    },
}
"""config.json of each: plain attention, experts, and MLA with experts and a draft layer of its own (DeepSeek-V3)."""

BASES: Sequence[Sequence[str]] = (
    (),
    ("--tp-size", "8"),
    ("--tp-size", "8", "--moe-a2a-backend", "deepep"),
    ("--tp-size", "8", "--moe-a2a-backend=deepep", "--deepep-mode=normal", "--enable-two-batch-overlap"),
    ("--disable-cuda-graph",),
    ("--cuda-graph-backend-decode=full", "--cuda-graph-config", '{"decode": {"backend": "full", "max_bs": 16}}'),
    ("--disable-radix-cache", "--page-size", "16"),
    ("--speculative-algorithm", "NGRAM"),
    ("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"),
    ("--device", "cpu", "--attention-backend", "torch_native"),
)
"""What the toggles are changed on."""

RECORDED = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--enable-metrics", "--mem-fraction-static", "0.3", "--random-seed", "1"),
)
"""Of the servers on a real H200 whose answers are in `tests/data/sglang/`."""

FREE = {"chunked_prefill": ("2048", "1000"), "mem_fraction_static": ("0.8",)}

POOL: Sequence[Sequence[str]] = (
    ("--disable-cuda-graph",),
    ("--disable-decode-cuda-graph",),
    ("--disable-prefill-cuda-graph",),
    *(("--cuda-graph-backend-decode", x) for x in ("full", "breakable", "disabled", "tc_piecewise")),
    *(("--cuda-graph-backend-prefill", x) for x in ("full", "breakable", "disabled", "tc_piecewise")),
    ("--cuda-graph-config", '{"decode": {"backend": "disabled"}}'),
    ("--cuda-graph-config", '{"decode": {"max_bs": 8}, "prefill": {"backend": "breakable"}}'),
    ("--cuda-graph-config", '{"decode": {"tc_compiler": "eager"}}'),
    ("--cuda-graph-config", '{"encode": {}}'),
    ("--cuda-graph-max-bs", "8"),
    ("--cuda-graph-bs", "1", "2", "4"),
    ("--cuda-graph-bs-decode", "1", "2", "4"),
    ("--disable-piecewise-cuda-graph",),
    ("--enable-breakable-cuda-graph",),
    ("--enforce-piecewise-cuda-graph",),
    ("--disable-cuda-graph-padding",),
    ("--disable-cuda-graph-padding",),
    ("--debug-cuda-graph",),
    ("--enable-torch-compile",),
    *(("--speculative-algorithm", x) for x in ("NGRAM", "ngram", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")),
    ("--speculative-algorithm", "MTP"),
    ("--speculative-draft-model-path", "@dense"),
    ("--speculative-draft-model-path", "@dense"),
    ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ("--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"),
    ("--speculative-num-draft-tokens", "8"),
    ("--speculative-eagle-topk", "2"),
    *(("--moe-a2a-backend", x) for x in ("none", "deepep", "deepep", "mooncake", "flashinfer", "mori", "pplx")),
    *(("--deepep-mode", x) for x in ("auto", "normal", "low_latency", "fast")),
    ("--enable-deepep-moe",),
    ("--enable-two-batch-overlap",),
    ("--enable-single-batch-overlap",),
    ("--ep-size", "2"),
    ("--tp-size", "2"),
    ("--tp", "8"),
    ("--dp-size", "2"),
    ("--enable-dp-attention",),
    ("--enable-dp-attention", "--dp-size", "2"),
    ("--attn-dp-size", "2"),
    ("--enable-dp-lm-head",),
    ("--pp-size", "2"),
    ("--disable-overlap-schedule",),
    ("--disable-radix-cache",),
    ("--disable-custom-all-reduce",),
    ("--enable-hierarchical-cache",),
    *(("--chunked-prefill-size", x) for x in ("-1", "0", "2048", "1000")),
    *(("--page-size", x) for x in ("1", "16", "64")),
    *(("--attention-backend", x) for x in ("fa3", "flashinfer", "triton", "torch_native", "flex_attention")),
    ("--attention-backend", "trtllm_mha"),
    ("--attention-backend", "flashmla"),
    ("--decode-attention-backend", "triton"),
    ("--prefill-attention-backend", "fa3"),
    ("--mem-fraction-static", "0.8"),
    ("--mem-fraction-static", "much"),
    ("--enable-mixed-chunk",),
    ("--max-running-requests", "64"),
    ("--enable-memory-saver",),
    ("--enable-deterministic-inference",),
    ("--enable-symm-mem",),
    ("--cpu-offload-gb", "4"),
    ("--crash-dump-folder", "/tmp/rltop-crash"),
    ("--device", "cpu"),
)
"""Pieces of random command lines. Some are wrong in one of the releases, or in both."""

ENVIRONMENTS: Sequence[Mapping[str, str]] = (
    {},
    {},
    {},
    {"CUDA_LAUNCH_BLOCKING": "1"},
    {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"},
    {"SGLANG_ENABLE_PP_SPEC": "1"},
)


def cases(version: str, *, seed: int = 20261130, random_cases: int = 300) -> Iterator[dict[str, Any]]:
    """`{"model", "argv", "env", "files"}` of each.

    `@NAME` in a word is the directory of a model, `%NAME` that of a file of the case.
    """
    yield {"model": "dense", "argv": list(RECORDED), "env": {}}
    ngram = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    yield {"model": "dense", "argv": [*RECORDED, *ngram], "env": {}}
    yield from _toggles(version)
    yield from _combinations(random.Random(seed), random_cases)


def _toggles(version: str) -> Iterator[dict[str, Any]]:
    seen = set()
    for model in MODELS:
        for base in BASES if model == "dense" else BASES[:4]:
            for name, toggle in TOGGLES.items():
                values = (*toggle.choices, *FREE.get(name, ()))
                if name == "attention_backend":
                    values = tuple(map(str, table(version).named(name)[0].choices or ()))
                    if base:
                        values = ("triton", "torch_native")
                for value in values:
                    draft = ":@dense" if name == "speculative" and value not in ("off", "NGRAM") else ""
                    made = change(base, {}, {name: value + draft}, version=version)
                    key = (model, made.argv, tuple(made.env.items()))
                    if (made.argv != tuple(base) or made.env) and key not in seen:
                        seen.add(key)
                        yield {"model": model, "argv": list(made.argv), "env": dict(made.env)}


def _combinations(chance: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        pieces = chance.sample(POOL, chance.choice((1, 2, 2, 3, 3, 4, 5, 6)))
        argv = [word for piece in pieces for word in _spelled(piece, chance)]
        case: dict[str, Any] = {"model": chance.choice(list(MODELS)), "argv": argv}
        case["env"] = dict(chance.choice(ENVIRONMENTS))
        if chance.random() < 0.08:
            flag, *values = chance.choice(POOL)
            content: Any = True if not values else values[0] if len(values) == 1 else None
            if content is not None:
                case["files"] = {"config.yaml": f"{flag.removeprefix('--')}: {json.dumps(content)}\n"}
                argv += ["--config", "%config.yaml"]
        yield case


def _spelled(piece: Sequence[str], chance: random.Random) -> list[str]:
    """The same as people write it."""
    words = list(piece)
    style = chance.random()
    if style < 0.2 and len(words) == 2:
        return [f"{words[0]}={words[1]}"]
    if style < 0.28:
        words[0] = words[0][: -chance.randint(0, 5)] or words[0]
    elif style < 0.34:
        return words + words
    return words
