"""What the loop needs of a trainer and of the rollout side. Ray actors implement it in a run, plain fakes in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rltop.engines.weight_findings import Finding
from rltop.train.dump import Dumped
from rltop.train.sample import Sample

BASE_VERSION = "default"
"""Weight version that SGLang reports for the checkpoint it was started with."""
MOST_FINDINGS = 50
"""Tensors that one reply names; more are counted."""


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What the trainer knows once its model is built."""

    backend: str
    """One line of versions and settings, for people."""
    vocab_size: int
    checkpoint: str
    """Hugging Face directory that the model came from; its tokenizer is the run's."""
    loaded_iteration: int | None = None
    """Rollout after which the state was saved that this run goes on from; None: a fresh start."""


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The weights at the start of the run, after any cold start."""

    checkpoint: str
    """Hugging Face directory that the engines start from."""
    digest: str
    """Digest over its weights, as the trainer holds them."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One sample as an optimizer step needs it. Per-token lists have one entry per response token."""

    tokens: tuple[int, ...]
    """Prompt and response."""
    response_length: int
    advantage: float
    rollout_log_probs: tuple[float, ...] | None
    """As the engine reported them; None: not known."""
    log_probs: tuple[float, ...] | None
    """The actor's own, from the separate pass; None: the step uses its own forward, so its ratio is exactly 1."""
    ref_log_probs: tuple[float, ...] | None
    loss_mask: tuple[int, ...] | None = None
    """One bit per response token, 0 = not trained on; None: all are."""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What one engine said about one weight update, and what it holds since."""

    ok: bool
    version: str
    message: str = ""
    digest: str = ""
    """Digest over the engine's weights: the trainer's if they are the same, empty when the engine cannot tell."""
    same: bool | None = None
    """Whether the engine holds what the trainer holds; None when it cannot be compared."""
    gone: bool = False
    """It did not answer: no word about the weights, and no fault of the sync."""
    findings: tuple[Finding, ...] = ()
    """The tensors that differ, and why: zero ones first, at most `MOST_FINDINGS`."""
    differing: int = 0
    """How many tensors differ."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One weight sync, over all engines."""

    version: str
    digest: str
    """Digest over the trainer's weights."""
    transport: str
    engines: Mapping[str, EngineReply]
    planted: bool = False
    """A fault was planted in this very push, so a difference is no news."""
    layers: tuple[tuple[int, ...], ...] = ()
    """The layer ids that were pushed, one tuple per pipeline stage of the trainer; nothing was pushed if empty."""
    checked: bool = False
    """The engines' weights were random numbers before (`Trainer.prove`)."""
    source: tuple[Finding, ...] = ()
    """Tensors in which the trainer is not the checkpoint that it was loaded from."""

    @property
    def ok(self) -> bool:
        """Every engine that answered took the update and none is known to hold something else."""
        return all(reply.gone or (reply.ok and reply.same is not False) for reply in self.engines.values())


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine process."""

    id: str
    url: str
    kind: Literal["cpu", "sglang"]
    pid: int
    host: str
    version: str
    weight_version: str
    model_path: str
    log: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All samples of one rollout, in order of their index, with their rewards."""

    rollout_id: int
    samples: tuple[Sample, ...]
    seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the generation, by their full name."""
    dumped: Dumped | None = None
    """What became of the dump of these samples; None: there was to be none."""
    dataset: str = ""
    """Of an evaluation: whose prompts."""
    source: str = ""
    """Of samples that were loaded: the file."""


@dataclass(frozen=True, slots=True)
class MemoryLook:
    """A rank's device memory before and after it slept or woke up, under slime's names."""

    rank: int
    before: Mapping[str, float | str]
    after: Mapping[str, float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a released engine holds on a device. GiB."""

    engine: str
    pid: int
    """Of its process that let go of least."""
    device: str
    """`cpu` or `gpu`."""
    before_gb: float
    """Before its release."""
    now_gb: float
    said_gb: float
    """Weights and KV pool of a rank, in its own words."""
    held: bool
    """It did not let go."""


Example = tuple[tuple[int, ...], int]
"""Tokens of prompt and response, and the length of the response."""


class Trainer(Protocol):
    """One training backend. All methods block; what goes wrong is an RltopError."""

    def load(self) -> TrainerFacts:
        """Build the model and read its checkpoint; with `--load`, the state of the run to go on from."""
        ...

    def cold_start(self, examples: Sequence[Example]) -> list[float]:
        """Supervised steps on worked examples; the loss of each."""
        ...

    def freeze_base(self, directory: str) -> BaseFacts:
        """Write the weights as they are now to `directory` for the engines (empty: there are none), and take the
        reference model."""
        ...

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        """Per response token of each sample: natural log-probabilities at the sampling temperature."""
        ...

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One per reward, normalised over its group."""
        ...

    def train_step(self, samples: Sequence[StepSample], rollout_id: int) -> dict[str, float]:
        """One optimizer step. Metrics without prefix: loss, pg_loss, grad_norm, ..."""
        ...

    def save_train_data(self, rollout_id: int, samples: Sequence[Sample]) -> Dumped:
        """Save what the samples of a rollout were trained with, since its first step (`--save-debug-train-data`)."""
        ...

    def grad_norm_file(self, rollout_id: int, step_id: int, grad_norm: float) -> Dumped | None:
        """Save the grad_norm of a step (`--ci-save-grad-norm`), or compare it with the saved one
        (`--ci-load-grad-norm`): RltopError where they differ by more than 1 % and 0.01, or there is none."""
        ...

    def verify(self, engines: Sequence[EngineFacts]) -> SyncReport:
        """Whether every engine holds the trainer's weights under `BASE_VERSION`."""
        ...

    def prove(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        """`publish` to engines whose weights are made random first, and every tensor compared (`train.proof`).

        Only before the first rollout: what an engine answers in between is noise.
        """
        ...

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        """Bring the weights after `rollout_id` to these engines as `version`, then ask each what it holds.

        May be called again for the same version with other engines. One that does not answer is in the report.
        """
        ...

    def save_checkpoint(self, rollout_id: int) -> None:
        """Keep the state after the steps of `rollout_id` under `--save`; the previous one stays usable throughout."""
        ...

    def save(self, directory: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...

    def sleep(self, *, weights: bool) -> Sequence[MemoryLook]:
        """Give device memory back: gradients, optimizer state and the reference, and the weights too if they are to.

        May be called again; what is asleep stays so. Only `wake_up` may follow, and what the awake part allows.
        """
        ...

    def wake_up(self, *, weights_only: bool = False) -> Sequence[MemoryLook]:
        """Take it again: every bit is where it was."""
        ...


Resync = Callable[[Sequence[EngineFacts]], None]
"""Bring the current weights to these engines and tell `Rollouts.took` what they did with them."""


class Rollouts(Protocol):
    """Prompts, engines and rewards."""

    @property
    def supervised(self) -> bool:
        """Whether somebody brings back an engine that fails. If nobody does, its failure is the run's."""
        ...

    def load(self, checkpoint: str) -> None:
        """Read the tokenizer."""
        ...

    def demonstrations(self) -> list[Example]:
        """Worked examples of the task for the cold start."""
        ...

    def checkpoint(self) -> str:
        """Where no trainer says it: the Hugging Face directory that the engines serve, rltop's tiny model if none is
        given."""
        ...

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        """Start the engines from the base checkpoint; returns when they answer."""
        ...

    def loaded(self) -> Sequence[EngineFacts]:
        """The engines that weights are to be pushed to now."""
        ...

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        """What `engines` did with a push that took so long. Who did not take it is not asked for samples."""
        ...

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        """One rollout, every sample from weights of exactly `version`.

        resync: called meanwhile, in this thread, for engines that came back without these weights.
        """
        ...

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        """As `generate`, on the task's evaluation prompts. Nothing trains on these samples."""
        ...

    def offload(self, *, late: bool = False) -> None:
        """Have every engine release its memory; until `onload` nobody asks one for a token. late: a planted fault."""
        ...

    def holdings(self) -> Sequence[Holding]:
        """What released engines still hold, where it can be measured, after a moment to let go."""
        ...

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        """Have the released engines take this memory again: weights before an update, the rest after it.

        no_update: a planted fault, one of them loses its weights once more.
        """
        ...
