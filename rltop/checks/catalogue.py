"""Every check of rltop, in the order of the catalogue: areas run from cause to symptom.

Ids never change. `explains` says which verdicts a firing check takes over when they fire on the same run, engine, rank
or rollout at or after its own first evidence. References: D slime's debug guide, W a walkthrough of it, R Relax's guide
(RW its workflows), F slime's FAQ, B public reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from rltop.checks.verdict import Status


@dataclass(frozen=True, slots=True)
class Explains:
    """One consequence. `target` is an id, or `area.*`."""

    target: str
    only_fail: bool = False
    """Only a fail of the explaining check counts, not its warn."""
    first_step: bool = False
    """Only a consequence at the first step of the run."""
    pattern: str = ""
    """Only a consequence with this `value.pattern`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One check."""

    id: str
    title: str
    statuses: frozenset[Status]
    """What the check may say; `skip` is always possible."""
    explains: tuple[Explains, ...]
    refs: tuple[str, ...]


_LETTERS: dict[str, Status] = {"p": "pass", "i": "info", "w": "warn", "f": "fail"}


def _entry(id: str, title: str, statuses: str, refs: str, explains: str | tuple[Explains, ...] = "") -> Entry:  # noqa: A002
    if isinstance(explains, str):
        explains = tuple(Explains(target) for target in explains.split())
    allowed: frozenset[Status] = frozenset(_LETTERS[letter] for letter in statuses) | {"skip"}
    return Entry(id, title, allowed, explains, tuple(refs.split()))


CATALOGUE: tuple[Entry, ...] = (
    _entry("input.parse", "the evidence can be read", "piw", "RW"),
    _entry(
        "args.batch",
        "batch sizes are consistent in the framework's own units",
        "pwf",
        "F6 B58 B59 B60",
        (Explains("train.nan", first_step=True), Explains("host.unexplained")),
    ),
    _entry("args.token-budget", "what max_tokens_per_gpu and packing really do", "piwf", "F3 F7 B24 B25"),
    _entry(
        "args.kernels",
        "kernel flags that break the step-1 checks",
        "piwf",
        "D1.2 D1.3 R2 R3 B80 B81",
        "kl.on-policy logprob.ref-equal host.unexplained",
    ),
    _entry("args.debug-flags", "split debugging is set up as meant", "piwf", "D3 W RW B71"),
    _entry("args.effective", "the effective args are what the operator thinks", "piw", "F3 B25"),
    _entry("args.entrypoint", "the job starts what it should", "pf", "B57", "host.unexplained"),
    _entry("host.inductor-cache", "compile cache race or corruption", "pf", "F12 B52 B53 B54", "host.unexplained"),
    _entry(
        "host.hf-cache-race", "processes trip over one model-code cache", "pf", "F4 B55 B56 B57", "host.unexplained"
    ),
    _entry("host.proxy", "a proxy answers for the engine", "pif", "F8 B47", "engine.not-ready cluster.stall"),
    _entry("host.unexplained", "an error that no rule owns", "pwf", "RW B23 B54 B76"),
    _entry("cluster.placement", "Ray can place the job", "piwf", "F2 B33 B34 B36", "cluster.stall"),
    _entry("cluster.gpu-mapping", "engines run on the GPUs they were given", "pf", "B35", "engine.oom train.oom"),
    _entry("cluster.stall", "one side stopped moving", "pwf", "F10 B62"),
    _entry("cluster.restarts", "the framework restarted itself", "pwf", "RW"),
    _entry(
        "ckpt.loaded",
        "Megatron confirmed the load",
        "pwf",
        "D1.1 F1",
        (
            Explains("weights.sync-garble", only_fail=True),
            Explains("rollout.text", only_fail=True),
            Explains("logprob.magnitude", only_fail=True),
        ),
    ),
    _entry("ckpt.resume", "which checkpoint, which rollout", "pif", "F1 F5 B37 B41", "ckpt.loaded"),
    _entry(
        "ckpt.shards",
        "index and shard files agree",
        "pwf",
        "D4.3 B38 B40",
        "ckpt.layers weights.sync-garble rollout.text",
    ),
    _entry(
        "ckpt.layers",
        "the tensors cover the whole model",
        "pf",
        "D4.3 B39",
        "weights.sync-garble weights.compare rollout.text",
    ),
    _entry(
        "quant.map",
        "trainer and engine quantise the same tensors",
        "pwf",
        "D4.1 D4.2 B42 B44 B73",
        "weights.compare weights.update-failed weights.sync-garble rollout.text",
    ),
    _entry("quant.bad-scale", "scales are usable numbers", "pf", "B45", "rollout.text"),
    _entry(
        "weights.sync-garble",
        "the weights the trainer pushes spoil the text",
        "pf",
        "D1.1 D4.4 W R1 F1 B01 B02 B03 B04 B06",
        "rollout.text rollout.truncated rollout.reward-flat logprob.* train.collapse",
    ),
    _entry(
        "weights.compare",
        "parameters on both sides are equal",
        "pf",
        "D1.1 D4.4 W B06 B42",
        "weights.sync-garble rollout.text logprob.train-rollout rollout.truncated rollout.reward-flat",
    ),
    _entry(
        "weights.update-failed",
        "an engine refused an update",
        "pif",
        "D1.1 B08 B44",
        "weights.sync-garble logprob.drift weights.mixed-version",
    ),
    _entry(
        "weights.frozen",
        "updates succeed but nothing changes",
        "pwf",
        "D4.4 B43",
        "logprob.drift logprob.train-rollout",
    ),
    _entry("weights.mixed-version", "one rollout, several policies", "pwf", "B64"),
    _entry(
        "weights.resume-stale",
        "first rollout after a resume used other weights",
        "pwf",
        "F5 B11",
        "logprob.train-rollout train.collapse",
    ),
    _entry("engine.port", "an engine could not bind", "pwf", "F8 B46", "engine.died engine.not-ready host.unexplained"),
    _entry("engine.not-ready", "requests came before the engines", "pwf", "B48", "host.unexplained"),
    _entry("engine.died", "an engine that worked is gone", "piwf", "B65", "host.unexplained cluster.stall"),
    _entry("engine.health-timeout", "slow, not dead", "piw", "B63", "engine.died host.unexplained"),
    _entry("engine.oom", "an engine ran out of GPU memory", "pwf", "F11 B23 B30 B32 B35", "engine.ima engine.died"),
    _entry(
        "engine.resume-order",
        "wake-up steps in order",
        "pf",
        "D1.1 D2.1 B06 B26",
        "train.colocate-swap engine.ima engine.died rollout.text rollout.truncated rollout.reward-flat "
        "weights.sync-garble logprob.train-rollout logprob.outliers",
    ),
    _entry("engine.stale-kv", "prefix cache of the old policy", "pw", "B05", "logprob.drift logprob.train-rollout"),
    _entry(
        "engine.ima",
        "illegal memory access in an engine",
        "pf",
        "D5 W F11 B26 B27 B28 B29 B30 B31 B32",
        "engine.died host.unexplained train.collective",
    ),
    _entry(
        "engine.bisect", "what the toggles prove", "iw", "D5.2 D5.3 F11 B28 B29 B30 B31 B32", "engine.ima engine.oom"
    ),
    _entry(
        "train.nan",
        "NaN or Inf in loss or gradients",
        "pf",
        "F13 B19 B21 B60",
        (
            Explains("rollout.text", pattern="repeated"),
            Explains("rollout.truncated"),
            Explains("rollout.reward-flat"),
            Explains("train.collapse"),
            Explains("host.unexplained"),
        ),
    ),
    _entry("train.skipped-steps", "the optimizer did not step", "piw", "F13 B20 B78"),
    _entry(
        "train.grad-scale", "the norm is huge but everything else is healthy", "pf", "D1.3 B17 B18", "train.grad-high"
    ),
    _entry("train.grad-high", "gradient norm too high", "pwf", "D1.3 R3 F9"),
    _entry("train.grad-zero", "no gradient although there is something to learn", "pf", "B82"),
    _entry("train.replay", "the same dump gives the same steps", "pif", "D3 W"),
    _entry("train.oom", "the trainer ran out of GPU memory", "pf", "F3 B23 B24 B25", "host.unexplained engine.died"),
    _entry(
        "train.colocate-swap",
        "colocate survives the second step",
        "pf",
        "D2.1 W B22 B23 B26 B72",
        "train.oom host.unexplained rollout.text rollout.truncated rollout.reward-flat weights.sync-garble logprob.* "
        "train.grad-zero",
    ),
    _entry(
        "train.ima",
        "illegal memory access in the trainer",
        "pf",
        "D3 D5 B27",
        "host.unexplained train.collective engine.died",
    ),
    _entry("train.collective", "a collective hangs, one rank is behind", "pf", "B66", "cluster.stall host.unexplained"),
    _entry(
        "train.collapse", "training itself went wrong", "pf", "R1 B21", "rollout.text rollout.truncated logprob.drift"
    ),
    _entry("kl.on-policy", "no drift before the first update", "pwf", "D1.3 R3 B80"),
    _entry("logprob.ref-equal", "actor equals reference at the start", "piwf", "D1.2 R2 B16 B74 B75"),
    _entry(
        "logprob.magnitude",
        "text is likely under the model",
        "piwf",
        "D1.2 W R2 B79",
        # A model that does not see its template finds neither its end nor a reward.
        "train.grad-high logprob.train-rollout rollout.truncated rollout.reward-flat",
    ),
    _entry(
        "logprob.train-rollout",
        "trainer and engine agree",
        "piwf",
        "W B14 B15 B16",
        (
            Explains("rollout.text", only_fail=True, pattern="salad"),
            Explains("rollout.text", only_fail=True, pattern="repeated"),
        ),
    ),
    _entry("logprob.drift", "the gap grows", "pw", "B10 B13"),
    _entry("logprob.outliers", "few sequences, huge error", "piwf", "B12 B13"),
    _entry(
        "rollout.text",
        "responses are human language",
        "piwf",
        "D1.1 D4.4 R1 F1 B01 B02 B07 B21 B45",
        "rollout.truncated rollout.reward-flat",
    ),
    _entry("rollout.truncated", "responses end by themselves", "piwf", "F10 B50 B71"),
    _entry("rollout.stop-set", "the turn terminator stops generation", "pwf", "F10 B49 B51", "rollout.truncated"),
    _entry("rollout.len-over-cap", "no response is longer than allowed", "pf", "B61", "rollout.truncated train.oom"),
    _entry("rollout.reward-flat", "rewards carry no signal", "piwf", "R1 B09 B71"),
    _entry("dump.join", "train and rollout dumps fit", "piw", "D3 RW B68"),
    _entry("dump.foreign-class", "a file wants code", "pf", "B67 B77", "host.unexplained"),
    _entry("dump.routing-field", "routing replay has its data", "pf", "B69", "host.unexplained"),
    _entry("dump.size", "what the bytes are", "pi", "B70"),
)
"""All checks."""

STEP1: tuple[str, ...] = (
    "rollout.text",
    "logprob.ref-equal",
    "logprob.magnitude",
    "logprob.train-rollout",
    "kl.on-policy",
    "train.grad-high",
    "train.grad-zero",
    "train.nan",
)
"""The named set `step1`: what must hold at the first step of every run, in the order of slime's guide."""

STEP2: tuple[str, ...] = ("train.colocate-swap", "engine.resume-order", "weights.sync-garble", "train.oom")
"""The named set `step2`: what only the second step of a run can show, because then the sides swap for the first time
and the first trained weights are served."""

LAUNCH: tuple[str, ...] = (
    "args.batch",
    "args.token-budget",
    "args.kernels",
    "args.debug-flags",
    "args.effective",
    "host.proxy",
    "cluster.placement",
    "cluster.gpu-mapping",
    "ckpt.resume",
    "ckpt.shards",
    "ckpt.layers",
    "quant.map",
    "quant.bad-scale",
    "engine.port",
    "rollout.stop-set",
)
"""The named set `launch`: what can be judged before anything runs (`rltop doctor`)."""


def entry_of(id: str) -> Entry:  # noqa: A002
    """Entry of an id. Raises KeyError for one that is not in the catalogue."""
    for entry in CATALOGUE:
        if entry.id == id:
            return entry
    raise KeyError(id)
