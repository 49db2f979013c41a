"""How likely a change is the culprit, and why: flags and variables that are known to break runs, then versions, paths.

Each entry: a pattern over the name (whole match, `_` for `-`), a score, the reason, and the checks that it explains
(globs of check ids): when such a check failed in the later run, the change goes before everything else.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

EXPLAINS = 100
"""Added when the change explains a check that failed."""
PATH_SCORE = 20
NOISE_SCORE = 10


@dataclass(frozen=True, slots=True)
class Risk:
    """One kind of change."""

    pattern: str
    score: int
    why: str
    explains: tuple[str, ...] = ()


_ARGUMENTS = (
    Risk(r"inject", 99, "a fault is planted on purpose", ("*",)),
    Risk(
        r"(sglang_)?(attention_backend|prefill_attention_backend|decode_attention_backend|sampling_backend)"
        r"|transformer_impl|attention_backend|use_flash_attn|attention_softmax_in_fp32",
        90,
        "other attention kernels: trainer and engine no longer round alike",
        ("logprob.*", "kl.*", "engine.ima"),
    ),
    Risk(
        r"fp8\w*|fp4\w*|(sglang_)?quantization\w*|(sglang_)?kv_cache_dtype|(sglang_)?dtype|bf16|fp16|params_dtype"
        r"|\w*precision\w*|accumulate_allreduce_grads_in_fp32",
        88,
        "other number format: log-probs and gradients differ",
        ("logprob.*", "kl.*", "train.nan", "quant.*", "train.grad-*"),
    ),
    Risk(
        r"(sglang_)?(disable_cuda_graph\w*|cuda_graph\w*|enable_torch_compile|disable_overlap_schedule"
        r"|disable_radix_cache|chunked_prefill_size|disable_custom_all_reduce|enable_dp_attention|hicache\w*)",
        80,
        "an engine toggle that is known from crashes and stale results",
        ("engine.*", "weights.*", "logprob.train-rollout"),
    ),
    Risk(
        r"(sglang_)?speculative\w*",
        80,
        "speculative decoding: other kernels and another draft",
        ("engine.*", "logprob.*"),
    ),
    Risk(
        r"(sglang_)?(enable_)?deepep\w*|moe_\w+|(sglang_)?(enable_)?\w*ep_moe|expert_\w+|(sglang_)?ep_size",
        78,
        "expert parallelism: routing and kernels change",
        ("engine.*", "logprob.*", "train.ima"),
    ),
    Risk(
        r"update_weight\w*|check_weight_update_equal|megatron_to_hf\w*|custom_update_weight\w*",
        76,
        "the way of the weights to the engines",
        ("weights.*", "logprob.train-rollout"),
    ),
    Risk(
        r"(tensor|pipeline|context|sequence|expert)_\w*parallel\w*|(sglang_)?tp_size|(sglang_)?dp_size|num_layers\w*"
        r"|actor_num_\w+|rollout_num_gpus\w*",
        74,
        "another split of the model or the cluster",
        ("logprob.*", "ckpt.*", "cluster.*", "train.*"),
    ),
    Risk(
        r"lr\w*|min_lr|\w*weight_decay\w*|clip_grad|adam_\w+|optimizer\w*",
        72,
        "the optimiser's step",
        ("train.grad-*", "train.collapse", "train.nan", "kl.*"),
    ),
    Risk(
        r"kl_\w+|use_kl_loss|eps_clip\w*|advantage_estimator|normalize_advantages|use_tis|entropy_coef|gamma|lambd"
        r"|calculate_per_token_loss|grpo_\w+|loss_\w+",
        70,
        "the objective",
        ("kl.*", "train.*", "logprob.ref-equal"),
    ),
    Risk(
        r"rollout_(temperature|top_p|top_k|stop\w*|max_response_len|max_context_len|seed|shuffle)|apply_chat_template\w*"
        r"|(sglang_)?context_length",
        68,
        "how responses are sampled",
        ("rollout.*", "logprob.magnitude"),
    ),
    Risk(
        r"global_batch_size|micro_batch_size|rollout_batch_size|n_samples_per_prompt|num_steps_per_rollout"
        r"|use_dynamic_batch_size|max_tokens_per_gpu|balance_data|over_sampling\w*",
        66,
        "batch sizes",
        ("args.*", "train.oom", "train.grad-*"),
    ),
    Risk(
        r"colocate|offload\w*|(sglang_)?mem_fraction_static|recompute_\w+|\w*memory\w*",
        64,
        "memory: what is resident when",
        ("*.oom", "engine.*", "weights.resume*"),
    ),
    Risk(
        r"rm_type|custom_\w+_path|reward_\w+|\w+_function_path|prompt_data|eval_\w+",
        60,
        "data or reward",
        ("rollout.*",),
    ),
    Risk(
        r"rotary\w*|\w*norm_epsilon|untie_embeddings\w*|vocab_size|hidden_size|ffn_\w+|num_\w*heads\w*|qk_layernorm"
        r"|kv_channels|swiglu|add_qkv_bias|make_vocab_size_divisible_by",
        86,
        "the model's shape: it must be the checkpoint's",
        ("logprob.*", "ckpt.*", "kl.*"),
    ),
    Risk(
        r"load|ref_load|hf_checkpoint|pretrained_checkpoint|critic_load|finetune|no_load_\w+|model_path|start_rollout_id",
        40,
        "another checkpoint",
        ("ckpt.*", "logprob.*", "kl.*"),
    ),
    Risk(r"seed|rollout_seed", 30, "another seed: single steps cannot be compared"),
    Risk(
        r"save\w*|\w*_dir|\w*_path|\w*dump\w*|log_\w+|tensorboard\w*|wandb\w*|\w*_interval",
        PATH_SCORE,
        "a path or logging",
    ),
    Risk(r"num_rollout|num_epoch|port|\w*_port|host|\w*_host", NOISE_SCORE, "how long or where, rarely why"),
)
_ENVIRONMENT = (
    Risk(
        r"CUDA_LAUNCH_BLOCKING",
        79,
        "serialises kernels: hides races and IMAs, changes speed",
        ("engine.ima", "train.ima"),
    ),
    Risk(
        r"PYTORCH(_CUDA)?_ALLOC_CONF",
        77,
        "the allocator: fragmentation, and memory that offload cannot release",
        ("*.oom", "engine.*"),
    ),
    Risk(r"SGLANG_\w+|SGL_\w+|FLASHINFER_\w+", 75, "changes the engine's kernels or checks", ("engine.*", "logprob.*")),
    Risk(
        r"NVTE_\w+|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_\w+|TORCH_\w*|TRITON_\w+|TORCHINDUCTOR_\w+",
        73,
        "changes the trainer's kernels or their order",
        ("logprob.*", "train.*", "host.inductor-cache"),
    ),
    Risk(
        r"NCCL_\w+|GLOO_\w+|UCX_\w+|NVSHMEM_\w+|FI_\w+|IB_\w+|MASTER_\w+",
        71,
        "communication",
        ("train.collective", "cluster.*"),
    ),
    Risk(r"CUDA_VISIBLE_DEVICES|ROCR_\w+|RAY_\w+", 69, "which devices, and how Ray places", ("cluster.*",)),
    Risk(
        r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX", 62, "other code or libraries may be loaded"
    ),
    Risk(r"HF_\w+|TRANSFORMERS_\w+|\w*_PROXY|\w*_proxy", 45, "downloads and caches", ("host.*",)),
)
_VERSIONS = (
    Risk(
        r"torch|sglang|sgl-kernel|megatron-core|slime|transformer-engine|flash-attn|flashinfer-python",
        59,
        "its kernels and defaults move between versions",
        ("logprob.*", "engine.*", "train.*", "weights.*"),
    ),
    Risk(
        r"ray|transformers|triton|nvidia-\w+-cu\d+|driver|deep-ep|deep-gemm|vllm|tokenizers|mbridge",
        55,
        "a library below the run",
    ),
    Risk(r"rltop|python|numpy|safetensors|apex", 50, "rarely the cause, cheap to rule out"),
    Risk(r"os|executable", 25, "rarely the cause"),
)
_TABLES = {"argument": _ARGUMENTS, "environment": _ENVIRONMENT, "version": _VERSIONS}
_OTHER = {
    "argument": Risk("", 50, "a flag of the run"),
    "environment": Risk("", 15, "a variable that is not known to matter"),
    "version": Risk("", 45, "a library"),
    "git": Risk("", 58, "the code itself", ("*",)),
    "checkpoint": Risk("", 42, "what lies at the same path is not the same", ("ckpt.*", "logprob.*", "kl.*")),
    "command": Risk("", 57, "another program or script"),
    "host": Risk("", 12, "another machine"),
    "directory": Risk("", NOISE_SCORE, "another working directory"),
}


def risk_of(kind: str, name: str) -> Risk:
    """The first entry that fits; one of the kind in general when none does."""
    for risk in _TABLES.get(kind, ()):
        if re.fullmatch(risk.pattern, name):
            return risk
    return _OTHER[kind]


def explained(risk: Risk, failing: Iterable[str]) -> list[str]:
    """Of the failing checks those that a change of this kind explains. `*` alone explains, but says nothing special."""
    return [check for check in failing if any(fnmatch.fnmatch(check, glob) for glob in risk.explains if glob != "*")]
