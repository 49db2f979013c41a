"""What one process of a slime run tells the daemon: metrics with their step, phases, samples, weights, engines.

slime's `log(args, metrics, step_key)` sees every metric; what it does not see is the rollout and the step inside it
that they belong to (`train/step` repeats where rollouts have unequal numbers of steps), so the functions around it
note them here (`slime_patches`).

Who tells what: the RolloutManager is `rollout/0` and the run's owner (its `run` record, its `bye`); the rank on which
slime logs is `trainer/0`, whatever its global rank; other trainer ranks are `trainer/RANK` and tell only what they
measured token by token; a critic is `critic/…`; an engine's actor is `engine/RANK`.

Failure policy: no method raises or waits, whatever it is given; what goes wrong is counted in `errors`. Each one is
behind `guarded`.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from rltop.integrations import slime_samples, slime_tokens
from rltop.integrations.outbox import Outbox

_PHASES: Mapping[str, str | None] = {
    "actor_train": "train",
    "save_model": "save",
    "train": None,  # encloses log_probs and actor_train
    "train_wait": None,  # everything else
}
"""slime's timers that are called otherwise here; None: not told."""
_TRAINER_NAMES = ("multi_turn/", "passrate/", "rollout/raw_reward", "rollout/rewards", "perf/step_time", "perf/train_")
P = ParamSpec("P")


def guarded(method: Callable[P, None]) -> Callable[P, None]:
    """A method of `Attachment` that counts what it raises."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            attachment: Any = args[0]
            attachment.errors += 1
            attachment.last_error = f"{method.__name__}: {type(error).__name__}: {error}"[:500]

    return call


class Attachment:
    """One process. `outbox`: (role, rank) -> what takes the reports."""

    FRAMEWORK = "slime"
    CP_UTILS = "slime.backends.megatron_utils.cp_utils"
    """The trainer's module for context parallelism."""

    def __init__(self, outbox: Callable[[str, int], Outbox] = Outbox, environ: Mapping[str, str] = os.environ) -> None:
        self.active = bool(environ.get("RLTOP_INGEST"))
        """Whether anything is reported at all."""
        self.role = ""
        """`rollout`, `trainer`, `critic`, `engine`; empty until something of slime's was called."""
        self.rollout_id: int | None = None
        """The rollout that this process works on, as far as it is known."""
        self.errors = 0
        self.last_error = ""
        self._make = outbox
        self._environ = environ
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._scope: int | None = None
        self._train_at: tuple[int, int] | None = None
        self._last_step: dict[str, tuple[int, tuple[int, int] | None]] = {}
        self._start: int | None = None
        self._first_seen: int | None = None
        self._run_told = False
        self._done: dict[str, int] = {}
        """What was told of which rollout last: a flag and the launch hook may both be there."""
        self._said: set[str] = set()
        self._main: bool | None = None

    @property
    def dropped(self) -> int:
        """Reports dropped so far in this process."""
        return sum(one.dropped for one in self._outboxes.values())

    # ---------------------------------------------------------------- metrics

    @guarded
    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """slime logs `metrics`; `step_key` names the one that is the step."""
        if not self.active:
            return
        step = _whole(metrics.get(step_key))
        axis = "train" if step_key == "train/step" else "rollout"
        role = self._logs_as(metrics, step_key)
        where: dict[str, Any] = {}
        if axis == "train":
            if self._train_at is not None:
                where = {"rollout_id": self._train_at[0], "step_in_rollout": self._train_at[1]}
            step = self._forward(role, step)
        elif self._scope is not None:
            # With --wandb-always-use-train-step slime's number counts optimizer steps, here it is the rollout.
            where = {"rollout_id": self._scope}
            step = self._scope
        if step is None:
            self._say_once(role, f"no step {step_key}", "warn", f"metrics without {step_key}: left out")
            return
        values = {self._named(role, str(name)): _number(value) for name, value in metrics.items() if name != step_key}
        self.send(role, 0, "metrics", values, step=step, axis=axis, **where)

    def _logs_as(self, metrics: Mapping[str, Any], step_key: str) -> str:
        """The role that these metrics are told under."""
        role = self.role if self.role in ("rollout", "trainer", "critic") else _role_of(metrics, step_key)
        train = role == "trainer" and step_key == "train/step"
        return "critic" if train and any(name.startswith("train/critic-") for name in metrics) else role

    def _named(self, role: str, name: str) -> str:
        """What a metric of a role is called here."""
        return name

    def _forward(self, role: str, step: int | None) -> int | None:
        """The optimizer step on the axis: slime's, but never one that was there already."""
        if step is None:
            return None
        last, at = self._last_step.get(role, (-1, None))
        if step <= last and (self._train_at is None or self._train_at != at):
            text = (
                f"train/step goes from {last} to {step}: rollouts have unequal numbers of optimizer steps. Shown as "
                "a count that grows; rollout_id and the step inside it are exact"
            )
            self._say_once(role, "train/step", "info", text)
            step = last + 1
        self._last_step[role] = (step, self._train_at)
        return step

    def enter_scope(self, rollout_id: Any) -> int | None:
        """What is logged from now on belongs to this rollout. Returns what held before, for `leave_scope`."""
        before, self._scope = self._scope, _whole(rollout_id)
        if self._scope is None:
            self._scope = before
        else:
            self._note_rollout(self._scope)
        return before

    def leave_scope(self, before: int | None) -> None:
        """The end of what `enter_scope` began."""
        self._scope = before

    @guarded
    def train_step(self, rollout_id: Any, step_id: Any) -> None:
        """An optimizer step begins."""
        self._trains()
        rollout, step = _whole(rollout_id), _whole(step_id)
        if rollout is not None and step is not None:
            self._train_at = (rollout, step)
            self._note_rollout(rollout)

    def _trains(self) -> None:
        """Only a trainer's process does what was just done, whoever told nothing of it."""
        if self.role not in ("trainer", "critic"):
            self.role = "trainer"

    def _note_rollout(self, rollout: int) -> None:
        self.rollout_id = rollout
        if self._first_seen is None:
            self._first_seen = rollout

    # ---------------------------------------------------------------- the run

    @guarded
    def begin(self, args: Any, rollout_id: Any) -> None:
        """The RolloutManager begins a rollout or an evaluation; the first one is where the run starts."""
        self.role = "rollout"
        rollout = _whole(rollout_id)
        if rollout is None:
            return
        self._note_rollout(rollout)
        if self.active and not self._run_told and args is not None:
            self._run_told = True
            facts = slime_samples.facts(args, start_rollout_id=rollout)
            facts["backend"] = f"{self.FRAMEWORK} on Megatron (attached)"
            self.send("rollout", 0, "run", framework=self.FRAMEWORK, **facts)

    @guarded
    def end(self, reason: str = "done") -> None:
        """The RolloutManager says goodbye (slime ends)."""
        if self._run_told:
            self.send("rollout", 0, "bye", reason)
        self.settle()  # Ray ends this process as soon as the driver is gone

    def settle(self) -> None:
        """Hand over what is queued, for a second at most. Nothing is reported after it."""
        for outbox in self._outboxes.values():
            outbox.close()

    @guarded
    def trainer_up(self, role: Any, start_rollout_id: Any) -> None:
        """A trainer rank has loaded its model."""
        self.role = "critic" if role == "critic" else "trainer"
        self._start = _whole(start_rollout_id)

    @guarded
    def say(self, level: str, text: str) -> None:
        """One line for people."""
        self.send(self.role or "rollout", self._rank(), "log", level, text)

    # ---------------------------------------------------------------- phases and weights

    @guarded
    def timer(self, name: str, edge: str, elapsed_s: float | None = None) -> None:
        """One of the framework's timers starts or ends. Of many ranks only the one that logs tells it."""
        phase = self.phase_of(name)
        if self.active and phase is not None and self.is_main():
            self.phase(self.role or "trainer", phase, edge, elapsed_s)

    def phase_of(self, name: str) -> str | None:
        """The phase that is told for a timer of the framework's; None: none is."""
        return _PHASES.get(name, name)

    def phase(self, role: str, name: str, edge: str, elapsed_s: float | None = None) -> None:
        """An edge of a phase."""
        self.send(role, 0, "phase_edge", name[:64], edge, rollout_id=self.rollout_id, elapsed_s=elapsed_s)

    @guarded
    def weights(self, version: Any, *, ok: bool, args: Any, elapsed_s: float) -> None:
        """A weight sync of the actor ended. Of many ranks only the one that logs tells it."""
        if not self.active or not self.is_main():
            return
        # The first rollout that is sampled with them: the one after the newest that was trained on.
        first = self._start if self.rollout_id is None else self.rollout_id + 1
        transport = str(getattr(args, "update_weight_transport", "") or "")
        if getattr(args, "colocate", False) and transport != "disk":
            transport = "tensor"
        kept = {"ok": ok, "transport": transport, "elapsed_s": elapsed_s}
        self.send("trainer", 0, "weights", version=str(version), rollout_id=first, **kept)

    # ---------------------------------------------------------------- samples and tokens

    @guarded
    def samples(self, rollout_id: Any, args: Any, samples: Any) -> None:
        """A rollout is complete. A few of its samples are told, once."""
        rollout, most = _whole(rollout_id), self._most_samples()
        if not self.active or rollout is None or not most or not self._first_time("samples", rollout):
            return
        chosen, total = slime_samples.few(samples, args, most)
        self.send("rollout", 0, "samples", rollout, chosen, total)

    @guarded
    def rollout_data(self, rollout_id: Any, args: Any, data: Any) -> None:
        """A trainer rank is about to train on `data`: its log-probs are compared token by token, once per rollout."""
        rollout = _whole(rollout_id)
        if not self.active or rollout is None or not isinstance(data, Mapping) or not data:
            return
        self._trains()
        if not self._first_time("tokens", rollout) or not self._holds_tokens():
            return
        self._note_rollout(rollout)
        found, absent = slime_tokens.gaps(data, slice_mask=_slicer(self.CP_UTILS))
        role, rank = self.role, self._rank()
        shown = [gap for gap in found if gap.pair != "ref_engine" or rollout == self._first_seen]
        values = {name: value for gap in shown for name, value in gap.metrics().items()}
        if values:
            self.send(role, rank, "metrics", values, step=rollout, axis="rollout", rollout_id=rollout)
        for gap in shown:
            self._complain(role, rank, rollout, gap, args)
        if rank == 0 and "log_probs" not in data and "ref_log_probs" in data:
            text = (
                f"log_probs of the actor were not computed apart ({self.FRAMEWORK} reuses those of the training "
                "forward): the "
                "comparison with the reference, token by token, is not measured; kl_loss is what there is"
            )
            self._say_once(role, "reuse", "info", text)
        elif rank == 0 and (why := absent.get("actor_engine")) and "log_probs" in data:
            self._say_once(role, "engine", "info", f"actor against engine, token by token, is not measured: {why}")

    def _complain(self, role: str, rank: int, rollout: int, gap: slime_tokens.Gap, args: Any) -> None:
        left, right = slime_tokens.PAIRS[gap.pair]
        place = gap.first
        at = "" if place is None else f"; the first at sample {place.sample}, token {place.token} of this rank: "
        at += "" if place is None else f"{left} {place.left:.9g}, {right} {place.right:.9g}"
        who = f"rank {self._environ.get('RANK', rank)}"
        if gap.bad:
            text = f"{who}, rollout {rollout}: {gap.bad} of {gap.bad + gap.tokens} tokens have a {left} or {right} "
            self.send(role, rank, "log", "error", f"{text}that is no number{at}")
        fresh = rollout == 0 and bool(getattr(args, "finetune", True))
        if gap.pair == "actor_ref" and fresh and gap.largest > slime_tokens.TOLERANCE:
            text = f"{who}, rollout {rollout}: {left} and {right} differ by up to {gap.largest:.3g} nat before the "
            self.send(role, rank, "log", "warn", f"{text}first update (mean {gap.mean:.3g}){at}")

    # ---------------------------------------------------------------- engines

    @guarded
    def engine(self, engine: Any, state: str) -> None:
        """An actor of slime's that holds an SGLang server changed its state. Told by the head node's actor only."""
        self.role = "engine"
        rank = _whole(getattr(engine, "rank", None))
        if not self.active or rank is None or getattr(engine, "node_rank", 0) != 0:
            return
        if state == "STOPPED" and getattr(getattr(engine, "args", None), "rollout_external", False):
            return  # slime leaves engines alone that it did not start
        host, port = getattr(engine, "server_host", ""), getattr(engine, "server_port", "")
        facts = {
            "id": str(rank),
            "url": f"http://{host}:{port}" if host and port else "",
            "kind": "sglang",
            "state": state,
            "pid": _whole(getattr(getattr(engine, "process", None), "pid", None)) or 0,
            "host": socket.gethostname(),
            "version": str(getattr(sys.modules.get("sglang"), "__version__", "")),
            "model_path": str(getattr(getattr(engine, "args", None), "hf_checkpoint", "") or ""),
        }
        self.send("engine", rank, "engine", **facts)

    # ---------------------------------------------------------------- who and where

    def is_main(self) -> bool:
        """Whether this is the trainer rank that logs: the first of data and tensor parallel, of the last stage."""
        if self._main is None:
            mpu = _mpu()
            if mpu is None:
                return self._environ.get("RANK", "0") == "0"
            last = mpu.get_pipeline_model_parallel_world_size() - 1
            self._main = (
                mpu.get_data_parallel_rank(with_context_parallel=True) == 0
                and mpu.get_tensor_model_parallel_rank() == 0
                and mpu.get_pipeline_model_parallel_rank() == last
            )
        return self._main

    def _holds_tokens(self) -> bool:
        """Tensor-parallel ranks hold the same log-probs: the first of them speaks."""
        mpu = _mpu()
        return mpu is None or mpu.get_tensor_model_parallel_rank() == 0

    def _rank(self) -> int:
        if self.role == "rollout" or self.is_main():
            return 0
        word = self._environ.get("RANK", "0")
        return int(word) if word.isdecimal() else 0

    def _most_samples(self) -> int:
        word = self._environ.get("RLTOP_SAMPLES", "")
        return min(64, int(word)) if word.isdecimal() else slime_samples.MOST

    def _first_time(self, what: str, rollout: int) -> bool:
        if self._done.get(what) == rollout:
            return False
        self._done[what] = rollout
        return True

    # ---------------------------------------------------------------- sending

    def send(self, role: str, rank: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Queue one call of the reporter of `role/rank`."""
        if not self.active:
            return
        outbox = self._outboxes.get((role, rank))
        if outbox is None:
            outbox = self._outboxes.setdefault((role, rank), self._make(role, rank))  # two threads get the same one
        outbox.put(method, *args, **kwargs)

    def _say_once(self, role: str, about: str, level: str, text: str) -> None:
        if about not in self._said and len(self._said) < 100:
            self._said.add(about)
            self.send(role, 0, "log", level, text)


class Clock:
    """How long something took, for the wrappers."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began


def _role_of(metrics: Mapping[str, Any], step_key: str) -> str:
    """Who logs these metrics, where no function around told it (older layouts of slime)."""
    if step_key == "train/step":
        return "trainer"
    return "trainer" if any(str(name).startswith(_TRAINER_NAMES) for name in metrics) else "rollout"


def _mpu() -> Any:
    """Megatron's parallel state where there is one and it is set up; nothing is imported for it."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    ready = getattr(mpu, "model_parallel_is_initialized", None)
    return mpu if ready is not None and ready() else None


def _slicer(name: str) -> Callable[[Any, int, int], Any] | None:
    """The trainer's own function for the part of a response that is this rank's."""
    module = sys.modules.get(name)
    found: Callable[[Any, int, int], Any] | None = getattr(module, "slice_log_prob_with_cp", None)
    return found


def _number(value: Any) -> Any:
    """The float now: a tensor may lie in memory that is lent away before the thread looks at it."""
    if type(value) is float or type(value) is int:
        return value
    try:
        return float(value)
    except Exception:  # the reporter counts it and names it once
        return f"{type(value).__name__}"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except Exception:
        return None
    return int(number) if number == number and abs(number) < 2**53 and number == int(number) else None
