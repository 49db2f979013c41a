"""vllm's compiled operators that SGLang calls on a CPU without its own kernels, in plain torch.

Signatures and in-place behaviour are vllm's; the arithmetic is the textbook one, in the input's dtype unless noted.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

LOSE_ROTARY = os.environ.get("RLTOP_SOAK_LOSE_ROTARY", "")
"""A file: once it is there, SGLang's own rotary table is zeroed in place, as if its memory had been lost."""


def _lose(module: Any, _: Any) -> None:
    if hasattr(module, "cos_sin_cache") and os.path.exists(LOSE_ROTARY):
        module.cos_sin_cache.zero_()


if LOSE_ROTARY:
    register_module_forward_pre_hook(_lose)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Turn query and key in place. cos_sin_cache: `[positions, rotary_dim]`, cosines then sines."""
    rotary = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    for heads in (query, key):
        if heads is None:
            continue
        view = heads.view(positions.numel(), -1, head_size)
        turned = view[..., :rotary]
        c, s = cos[:, None].to(view.dtype), sin[:, None].to(view.dtype)
        if is_neox:
            first, second = turned.chunk(2, dim=-1)
            turned.copy_(torch.cat([first * c - second * s, second * c + first * s], dim=-1))
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
            turned.copy_(torch.stack([first * c - second * s, second * c + first * s], dim=-1).flatten(-2))


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:  # noqa: A002 - vllm's name
    """RMS norm into `out`, computed in float32."""
    wide = input.float()
    out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(input.dtype) * weight)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:  # noqa: A002
    """`residual += input`, then the norm of that into `input`."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)
