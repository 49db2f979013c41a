"""The loss's view of a micro-batch: per-sample values laid out flat over its response tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rltop.errors import RltopError
from rltop.train.loss import TokenTerms
from rltop.train.megatron.batching import LogProbs, TrainSample


def token_terms(samples: Sequence[TrainSample], weights: Sequence[Sequence[float]], device: torch.device) -> TokenTerms:
    """What the loss needs of these samples, in their order. weights: one list per sample (`token_weights`).

    Raises `RltopError` for log-probs that only some samples have, or that do not match a response.
    """
    lengths = [sample.response_length for sample in samples]
    old, ref, rollout = zip(
        *((sample.old_log_probs, sample.ref_log_probs, sample.rollout_log_probs) for sample in samples), strict=True
    )
    return TokenTerms(
        advantages=flat([[sample.advantage] * sample.response_length for sample in samples], device),
        old_log_probs=_joined(old, lengths, "old_log_probs", device),
        ref_log_probs=_joined(ref, lengths, "ref_log_probs", device),
        rollout_log_probs=_joined(rollout, lengths, "rollout_log_probs", device),
        weights=flat(weights, device),
    )


def flat(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """The rows one after the other, fp32."""
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=device)


def _joined(parts: Sequence[LogProbs | None], lengths: Sequence[int], name: str, device: torch.device) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if [len(part) for part in present] != lengths:
        missing = len(parts) - len(present)
        raise RltopError(
            f"{name} does not match the responses",
            where="train_step",
            why=f"{missing} of {len(parts)} samples have none" if missing else "not one value per response token",
        )
    return torch.cat([torch.as_tensor(part, dtype=torch.float32) for part in present]).to(device)
