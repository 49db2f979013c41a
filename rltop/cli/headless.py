"""`rltop demo --headless`: follow a run over the wire until it ends, and judge it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.checks.catalogue import STEP1
from rltop.cli.connect import LOCAL_S, running
from rltop.cli.once import group
from rltop.cli.output import clean, note, number, print_json
from rltop.client import Client, Mirror, local_client
from rltop.errors import RltopError
from rltop.runs import RunInfo

ENDED = ("done", "failed", "interrupted", "lost")
SETTLE_S = 2.0
"""From the end of the run to the last verdicts, on the daemon's clock; it publishes at least once a second."""
TRAINER_END_S = 30.0
"""How long the trainer process may take to end by itself after the run did."""
AWAY_S = 20.0
"""The daemon is on this machine: if it stays away for so long it is gone."""
LOG_LINES = 15
REWARD = "rollout/raw_reward"
FINAL_ROLLOUTS = 10
"""`final_reward` is the mean over this many rollouts, as in the trainer's own summary."""
FIRST = {
    "ppo_kl": "train/ppo_kl",
    "kl_loss": "train/kl_loss",
    "log_probs": "rollout/log_probs",
    "ref_log_probs": "rollout/ref_log_probs",
    "train_rollout_logprob_abs_diff": "train/train_rollout_logprob_abs_diff",
    "grad_norm": "train/grad_norm",
}
"""Key in the answer -> metric, of which the first value is meant."""
SHOWN = ("train/kl_loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


@dataclass(slots=True)
class Progress:
    """What was told so far, so that nothing is told twice."""

    began: float
    rollout: int = -1
    phase: str = ""
    eseq: int = 0

    def lines(self, mirror: Mirror, now: float) -> list[str]:
        """News since the last call, for stderr. Pure but for its own memory."""
        news: list[str] = []
        for event in mirror.events:
            if event.get("eseq", 0) <= self.eseq:
                continue
            self.eseq = event["eseq"]
            if event.get("kind") in ("verdict", "run", "loss") or event.get("level") == "error":
                news.append(clean(f"  {event.get('level', ''):5} {event.get('text', '')}"))
        reward = mirror.state.get(f"metric/{REWARD}") or {}
        if reward.get("step") is not None and reward["step"] != self.rollout:
            self.rollout = int(reward["step"])
            news.append(self._rollout(mirror.state, now))
        phase = (mirror.state.get("phase") or {}).get("name") or ""
        if self.rollout < 0 and phase and phase != self.phase:
            self.phase = phase
            news.append(clean(f"{now - self.began:5.0f} s  {phase.replace('_', ' ')}"))
        return news

    def _rollout(self, state: Mapping[str, Any], now: float) -> str:
        total = (state.get("run") or {}).get("num_rollout")
        values = [f"reward {number(state[f'metric/{REWARD}']['value'])}"]
        values += [
            f"{name.rpartition('/')[2]} {number(state[f'metric/{name}']['value'])}"
            for name in SHOWN
            if f"metric/{name}" in state
        ]
        return (
            f"{now - self.began:5.0f} s  rollout {self.rollout}"
            + (f" of {total}" if total else "")
            + "  "
            + "  ".join(values)
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    run: str
    state: str
    text: str
    seconds: float
    rewards: list[float]
    checks: dict[str, dict[str, Any]]
    root_causes: list[str]
    first_rollout: dict[str, float | None]
    injected_faults: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """The run is done and no check failed."""
        return self.state == "done" and not self.failed

    @property
    def final_reward(self) -> float | None:
        """Mean of the last ten rollouts: one rollout of few prompts is noise."""
        last = self.rewards[-FINAL_ROLLOUTS:]
        return sum(last) / len(last) if last else None

    @property
    def failed(self) -> list[str]:
        """Ids of failed checks."""
        return [name for name, check in self.checks.items() if check["status"] == "fail"]

    def to_json(self) -> dict[str, Any]:
        """The answer of `--json`."""
        return {
            "run": self.run,
            "state": self.state,
            "text": self.text,
            "seconds": round(self.seconds, 3),
            "rewards": self.rewards,
            "final_reward": self.final_reward,
            "checks": self.checks,
            "root_causes": self.root_causes,
            "first_rollout": self.first_rollout,
            "injected_faults": self.injected_faults,
            "stand_ins": self.stand_ins,
        }


def follow(run: RunInfo, *, began: float, as_json: bool) -> int:
    """Tell the run's progress on stderr until it ends; returns 0 when it is done and no check failed, else 1.

    began: monotonic time from which seconds count. Raises RltopError when the daemon goes away for good.
    """
    outcome = asyncio.run(_follow(run, began))
    if as_json:
        print_json(outcome.to_json())
    else:
        for name, check in outcome.checks.items():
            if check["status"] != "skip" or name in STEP1:
                print(clean(f"{check['status']:5} {name}  {check['cause'] or ''}"))
    reward = f", final reward {number(outcome.final_reward)}" if outcome.final_reward is not None else ""
    failed = f", failed checks: {', '.join(outcome.failed)}" if outcome.failed else ""
    note(f"run {outcome.run} is {outcome.state} after {outcome.seconds:.0f} s{reward}{failed}")
    if outcome.state != "done":
        note("\n".join(_log_tail(run.path / "trainer.log")))
    return 0 if outcome.ok else 1


async def _follow(run: RunInfo, began: float) -> Outcome:
    progress = Progress(began)
    async with running(local_client(run)) as client:
        await client.wait_live(LOCAL_S)
        seconds = await _until_end(client, progress)
        points = 100_000
        history = await client.series([REWARD], buckets=points)
        first = await client.series(list(FIRST.values()), buckets=points)
        state, name = client.mirror.state, client.mirror.run
    facts = state.get("run") or {}
    return Outcome(
        run=name,
        state=facts.get("state", ""),
        text=facts.get("text") or "",
        seconds=seconds,
        rewards=list(history[REWARD].last) if REWARD in history else [],
        checks={key: _verdict(check) for key, check in group(state, "check/").items()},
        root_causes=list((state.get("checks") or {}).get("root_causes") or []),
        first_rollout={key: first[metric].last[0] if metric in first else None for key, metric in FIRST.items()},
        injected_faults=list(facts.get("injected_faults") or []),
        stand_ins=list(facts.get("stand_ins") or []),
    )


async def _until_end(client: Client, progress: Progress) -> float:
    """Follow until the run ended, its last verdicts are there and its trainer is gone; seconds until the run ended."""
    seconds: float | None = None
    while True:
        for line in progress.lines(client.mirror, time.monotonic()):
            note(line)
        mirror = client.mirror
        facts = mirror.state.get("run") or {}
        if facts.get("state") in ENDED:
            seconds = time.monotonic() - progress.began if seconds is None else seconds
            waited = mirror.server_time - (facts.get("ended") or math.inf)
            running_still = (mirror.state.get("trainer") or {}).get("state") == "running"
            if waited >= (TRAINER_END_S if running_still else SETTLE_S):
                return seconds
        if client.status == "lost" and time.monotonic() - client.since > AWAY_S:
            raise RltopError("the daemon of the demo went away", why=client.problem, exit_code=1)
        await client.wait_change()


def _verdict(check: Mapping[str, Any]) -> dict[str, Any]:
    return {key: check.get(key) for key in ("status", "cause", "value", "threshold")}


def _log_tail(log: Path) -> list[str]:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"no log of the trainer: {error}"]
    return [f"the end of {log}:", *(f"  {clean(line)}" for line in lines[-LOG_LINES:])]
