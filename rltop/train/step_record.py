"""The optimizer steps that were made on a rollout, kept beside its dump: `0.pt` -> `0.steps.json`.

Whoever trains on a dump first leaves them there (the run that sampled it, else the first replay), and every later
replay is held against them: same dump, same weights, same arguments, so the same loss and grad_norm, or nearly
(`rltop.train.tolerance`). A replay writes over nothing but the steps of another dump that was there before.

Failure policy: a file that cannot be read or written costs the comparison, never the run; the caller says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.train.arguments import TrainConfig
from rltop.train.dump import Dumped, write_json
from rltop.train.ports import StepSample

VERSION = 1
NAMES = ("loss", "grad_norm")
"""What is compared."""
_SHAPING = (
    *("lr", "lr_warmup_iters", "clip_grad", "eps_clip", "eps_clip_high", "use_kl_loss", "kl_loss_coef"),
    *("kl_loss_type", "entropy_coef", "calculate_per_token_loss", "log_probs_pass", "global_batch_size"),
    *("n_samples_per_prompt", "rollout_temperature", "ref_load", "load", "inject", "reward_key"),
)
"""Arguments with which other numbers are to be expected."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the numbers of a run depend on beside the samples."""

    args: Mapping[str, Any]
    weights: str
    """Digest over the weights at the start of the run."""
    layout: str
    """Parallel sizes and micro-batches: another one rounds otherwise."""
    backend: str
    """Software and processor: another one rounds otherwise too."""
    exact: bool
    """Whether the same run twice gives the same bits: on CPUs, elsewhere only with --deterministic."""

    @classmethod
    def of(cls, config: TrainConfig, *, weights: str, backend: str) -> Facts:
        args = config.as_args()
        return cls(
            {name: args[name] for name in _SHAPING},
            weights,
            f"{config.layout}, {config.max_tokens_per_gpu} tokens per micro-batch",
            f"{backend}; {_torch()}; {_processor()}",
            config.deterministic or "cpu/" in backend,
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """The steps of one rollout, as they were made first."""

    path: Path
    rollout_id: int
    first_rollout: int
    """With which the run began: its weights at this rollout depend on all rollouts from there on."""
    samples: int
    content: str
    """Digest over the samples (`digest_of`)."""
    facts: Facts
    steps: Sequence[Mapping[str, float]]

    def differs(self, other: Reference) -> list[str]:
        """Why other numbers are to be expected of the other run, one sentence each; empty: the same ones."""
        mine, theirs, found = self.facts, other.facts, []
        if mine.weights != theirs.weights:
            found.append(f"other weights at the start ({mine.weights[:12]} -> {theirs.weights[:12]})")
        if self.first_rollout != other.first_rollout:
            found.append(f"it began at rollout {self.first_rollout}, this run at {other.first_rollout}")
        if self.samples != other.samples:
            found.append(f"it trained on {self.samples} samples, this run on {other.samples}")
        for name in _SHAPING:
            if mine.args.get(name) != theirs.args.get(name):
                flag = "--" + name.replace("_", "-")
                found.append(f"{flag} {mine.args.get(name)} -> {theirs.args.get(name)}")
        return found

    def bitwise(self, other: Reference) -> bool:
        """Whether the same bits are to be expected of the other run: the same layout on the same software."""
        mine, theirs = self.facts, other.facts
        return mine.layout == theirs.layout and mine.backend == theirs.backend and mine.exact and theirs.exact


def digest_of(samples: Sequence[StepSample]) -> str:
    """Over everything that training takes from samples but their log-probs."""
    total = hashlib.blake2b(digest_size=16)
    for one in samples:
        total.update(repr((one.tokens, one.response_length, one.advantage, one.loss_mask)).encode())
    return total.hexdigest()


def record_path(dump: Path, rollout_id: int, *, shared: bool) -> Path:
    """Where the steps lie. shared: the same dump is trained on by every rollout."""
    return dump.with_name(f"{dump.stem}.{rollout_id}.steps.json" if shared else f"{dump.stem}.steps.json")


def write_record(reference: Reference) -> Dumped:
    """Leave the steps for replays."""
    content = {
        "format": "rltop-steps",
        "version": VERSION,
        "rollout_id": reference.rollout_id,
        "first_rollout": reference.first_rollout,
        "samples": reference.samples,
        "content": reference.content,
        "weights": reference.facts.weights,
        "layout": reference.facts.layout,
        "backend": reference.facts.backend,
        "exact": reference.facts.exact,
        "args": dict(reference.facts.args),
        "steps": [{name: _spoken(value) for name, value in step.items()} for step in reference.steps],
    }
    return write_json(reference.path, content)


def read_record(path: Path) -> Reference | str | None:
    """The steps that were left there; None: none were; words: what is there cannot be read."""
    try:
        raw = json.loads(path.read_text())
        if raw.get("format") != "rltop-steps" or raw.get("version") != VERSION:
            return f"{path}: not the steps of a run, or of another version"
        weights, layout, backend = (str(raw[name]) for name in ("weights", "layout", "backend"))
        facts = Facts(dict(raw["args"]), weights, layout, backend, bool(raw["exact"]))
        steps = [{str(name): float(value) for name, value in step.items()} for step in raw["steps"]]
        rollout_id, first, samples = (int(raw[name]) for name in ("rollout_id", "first_rollout", "samples"))
        return Reference(path, rollout_id, first, samples, str(raw["content"]), facts, steps)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: it cannot be read ({type(error).__name__}: {error})"


def _torch() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"torch {importlib.metadata.version('torch')}"
    return "torch"


def _processor() -> str:
    """Model of this machine's processor: kernels are chosen by it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _spoken(value: float) -> float | str:
    """JSON has no NaN; `float` reads the word back."""
    return value if math.isfinite(value) else str(value)
