"""Rollouts on disk in slime's format, for debugging and as a proof of what every sample was drawn from.

A dump is `torch.save` of `{"rollout_id": int, "samples": [slime's Sample.to_dict(), ...]}`, plain values only, so that
`torch.load(weights_only=True)` and slime's `--load-debug-rollout-data` read it. A file appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.train.sample import Sample


def save_rollout(pattern: str, rollout_id: int, samples: Sequence[Sample]) -> Path:
    """Write all samples of a rollout to `pattern`, in which `{rollout_id}` is filled in.

    Raises RltopError (exit code 1) when it cannot be written.
    """
    import torch  # heavy, and wanted only by runs that save

    path = Path(pattern.format(rollout_id=rollout_id))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    # slime counts samples and groups over the whole run.
    groups, count = 1 + max(sample.group_index for sample in samples), len(samples)
    entries = [slime_sample(one, first=rollout_id * count, first_group=rollout_id * groups) for one in samples]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": rollout_id, "samples": entries}, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):  # the first error is the one to tell
            part.unlink(missing_ok=True)
        raise RltopError(
            "cannot save the rollout",
            where=f"--save-debug-rollout-data {path}",
            why=str(error).splitlines()[0],
            do="is the disk full? without the flag nothing is saved",
            exit_code=1,
        ) from error
    return path


def slime_sample(sample: Sample, *, first: int, first_group: int) -> dict[str, Any]:
    """A sample under the names of slime's `Sample` (`slime/utils/types.py`), statuses by their value.

    first, first_group: index of the rollout's first sample and group. Which engine drew it, in which generation, is in
    the metadata. `rollout_id` is slime's id of a trajectory that became several samples; ours are whole, so it is None.
    """
    return {
        "group_index": first_group + sample.group_index,
        "index": first + sample.index,
        "rollout_id": None,
        "prompt": sample.prompt,
        "tokens": list(sample.tokens),
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": sample.response,
        "response_length": len(sample.response_ids),
        "label": sample.label,
        "reward": sample.reward,
        "loss_mask": None,
        "weight_versions": [sample.weight_version],
        "rollout_log_probs": list(sample.rollout_log_probs),
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": sample.status,
        "metadata": {"engine": sample.engine, "engine_generation": sample.engine_generation},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        },
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }
