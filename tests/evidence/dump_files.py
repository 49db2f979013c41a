"""Dumps as torch.save writes them, made without torch: a zip with a pickle in it."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save(path: Path, value: Any) -> Path:
    """`value` (plain containers) in the layout of `torch.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr(f"{path.stem}/byteorder", "little")
        archive.writestr(f"{path.stem}/version", "3\n")
    return path


def sample(at: int, *, group_size: int = 4, **more: Any) -> dict[str, Any]:
    """A sample of slime: one token per character, rewards 0 and 1 in turn, every eighth one truncated."""
    response = more.pop("response", f"answer {at} is {at * at}")
    ids = [ord(char) for char in response]
    return {
        "group_index": at // group_size,
        "index": at,
        "prompt": f"What is {at // group_size} squared?",
        "tokens": [1, 2, 3, *ids],
        "response": response,
        "response_length": len(ids),
        "label": str(at),
        "reward": float(at % 2),
        "loss_mask": None,
        "weight_versions": ["7"],
        "rollout_log_probs": [-0.01 * (place % 7) for place in range(len(ids))],
        "status": "truncated" if at % 8 == 7 else "completed",
        "metadata": {"engine": "0", "difficulty": at % 3},
    } | more


def rollout(path: Path, count: int = 16, *, rollout_id: int = 3, **more: Any) -> Path:
    """A rollout dump of `count` samples."""
    return save(path, {"rollout_id": rollout_id, "samples": [sample(at, **more) for at in range(count)]})


def train(path: Path, samples: Sequence[dict[str, Any]], *, rollout_id: int = 3, off: float = 0.125) -> Path:
    """A train dump (v2) of these samples, its log-probs `off` below those of the rollout."""
    entries = [
        {
            "data_parallel_rank": 0,
            "sample_index": one["index"],
            "rollout_position": at,
            "tokens": one["tokens"],
            "response_lengths": one["response_length"],
            "log_probs": [value - off for value in one["rollout_log_probs"]],
            "advantages": [1.0 if one["reward"] else -1.0] * one["response_length"],
        }
        for at, one in enumerate(samples)
    ]
    return save(path, {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": entries, "dp_shards": []})
