"""Writers of slime's dumps: rollouts, evaluations, and what every sample was trained with.

A dump is `torch.save` of plain values and tensors, so that `torch.load(weights_only=True)` reads it, and slime's
`--load-debug-rollout-data` does. A file appears complete or not at all.

Failure policy: training never ends because a dump could not be written. What went wrong is in `Dumped.problem`, for
whoever called to say and to count.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.evidence.dump_find import filled
from rltop.train.sample import Asked, Sample

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "tokenizer.model"),
)
"""What of a Hugging Face checkpoint its tokenizer needs."""
TRACE_VERSION = 1
"""Of slime's trace carrier (`slime/observability/trace_utils.py`)."""


@dataclass(frozen=True, slots=True)
class Dumped:
    """What became of one file."""

    path: str
    problem: str = ""
    """Why it is not there, one line; empty: it is there, whole."""


def write_dump(path: Path, content: Mapping[str, Any] | float) -> Dumped:
    """`torch.save` of `content`. Never raises for what a disk can do."""

    def save(part: Path) -> None:
        import torch  # heavy, and wanted only by runs that save

        with part.open("wb") as file:  # a path would hide from torch's error why nothing could be written
            torch.save(content, file)

    return _whole(path, save)


def write_json(path: Path, content: Mapping[str, Any]) -> Dumped:
    """As `write_dump`, as one JSON object."""
    return _whole(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))


def save_rollout(pattern: str, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False) -> Dumped:
    """All samples of a rollout to `pattern`, in which `{rollout_id}` is filled in; of an evaluation `eval_<id>`."""
    path = filled(pattern, rollout_id, evaluation=evaluation)
    # slime counts samples and groups over the whole run.
    groups, count = 1 + max((sample.group_index for sample in samples), default=0), len(samples)
    entries = [slime_sample(one, first=rollout_id * count, first_group=rollout_id * groups) for one in samples]
    return write_dump(path, {"rollout_id": rollout_id, "samples": entries})


def save_tokenizer(checkpoint: Path, directory: Path) -> Dumped:
    """The tokenizer of a checkpoint beside the dumps: who reads them elsewhere can decode their tokens."""
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, directory / name)
    except OSError as error:
        problem = error.strerror or str(error)
    return Dumped(str(directory), problem)


def _whole(path: Path, save: Callable[[Path], object]) -> Dumped:
    """`save` to a file beside `path`, then take its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError, while it closes the file
        with contextlib.suppress(OSError):  # the first error is the one to tell
            part.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):
            return Dumped(str(path), cause.strerror or str(cause))
        return Dumped(str(path), (str(error).splitlines() or [type(error).__name__])[0])
    return Dumped(str(path))


def slime_sample(sample: Sample, *, first: int, first_group: int) -> dict[str, Any]:
    """A sample under the names of slime's `Sample` (`slime/utils/types.py`), statuses by their value.

    first, first_group: index of the rollout's first sample and group. Which engine drew it, in which generation and
    with which sampling parameters, is in the metadata; when, in `trace`, as slime's timeline viewer reads it.
    `rollout_id` is slime's id of a trajectory that became several samples; ours are whole, so it is None.
    """
    told: Mapping[str, Any] = {} if sample.asked is None else sample.asked.told
    drawn = {} if sample.asked is None else {"sampling_params": dict(sample.asked.params)}
    found = {
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
        "loss_mask": None if sample.loss_mask is None else list(sample.loss_mask),
        "weight_versions": [sample.weight_version],
        "rollout_log_probs": list(sample.rollout_log_probs),
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": sample.status,
        "metadata": {"engine": sample.engine, "engine_generation": sample.engine_generation, **drawn},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        # slime adds up speculation only where it is on; an engine without it has none of these.
        "spec_info": {
            "spec_accept_token_num": told.get("spec_accept_token_num", 0),
            "spec_draft_token_num": told.get("spec_draft_token_num", 0),
            "spec_verify_ct": told.get("spec_verify_ct", 0),
            "completion_token_num": told.get("completion_tokens", 0) if "spec_verify_ct" in told else 0,
        },
        "prefix_cache_info": {
            "cached_tokens": told.get("cached_tokens", 0),
            "total_prompt_tokens": told.get("prompt_tokens", 0),
        },
    }
    if sample.asked is not None:
        found["trace"] = _trace(
            sample.asked, first + sample.index, first_group + sample.group_index, sample.finish_reason
        )
    return found


def _trace(asked: Asked, index: int, group: int, finish_reason: str) -> dict[str, Any]:
    """slime's carrier of a trace (version 1) with its one span, the request to the engine."""
    names = {"trace_id": f"rltop-{index}", "sample_id": index, "group_id": group, "attempt": 0}
    span = {"name": "sglang_generate", **names, "span_id": f"rltop-{index}-0", "parent_span_id": None}
    begin = {"max_new_tokens": asked.params.get("max_new_tokens")}
    told = {"sglang_request_id" if name == "id" else name: value for name, value in asked.told.items()}
    end = {**told, "finish_reason": finish_reason}
    return {
        "version": TRACE_VERSION,
        **names,
        "events": [
            {"type": "span_start", "ts": asked.began, **span, "attrs": begin},
            {"type": "span_end", "ts": asked.ended, **span, "attrs": end},
        ],
    }
