"""A real run under a real daemon that owns its engines, followed and operated over the control socket."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rltop.protocol.messages import Accepted, Ping
from rltop.runs import RunInfo
from tests.daemon.util import Viewer, real_daemon

SAMPLES = 16 * 4
FLAGS = [
    *("--num-rollout", "100000", "--rollout-batch-size", "16", "--n-samples-per-prompt", "4"),
    *("--apply-chat-template", "--cold-start-steps", "5", "--lr", "1e-4"),
]
PATIENCE_S = 120.0


class Operated:
    """What an operator sees and does."""

    def __init__(self, run: RunInfo, dumps: Path) -> None:
        self.run, self._dumps = run, dumps
        self.ops: list[str] = []
        """What operations said at their end."""
        self.viewer = self._attach()

    def _attach(self) -> Viewer:
        viewer = Viewer(self.run, "control", name="ada")
        viewer.hello()
        return viewer

    def attach_again(self, run: RunInfo) -> None:
        """To another daemon of the run."""
        self.viewer.close()
        self.run = run
        self.viewer = self._attach()

    def until(self, what: Callable[[dict[str, Any]], Any], why: str) -> None:
        """Follow the state until it is so; fails at once when the run has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not what(self.viewer.state):
            assert time.monotonic() < deadline, f"{why}; engines: {self.engines()}"
            self.viewer.receive(1.0)
            self.viewer.send("ping", Ping())  # who says nothing for ten seconds is forgotten
            ended = (self.viewer.state.get("run") or {}).get("state")
            assert ended not in ("done", "failed", "interrupted"), self.viewer.state["run"]

    @property
    def rollout(self) -> int:
        """The newest rollout with a reward; -1 before the first."""
        return int((self.viewer.state.get("metric/rollout/raw_reward") or {}).get("step", -1))

    def goes_on(self, rollouts: int = 3) -> None:
        """So many more rollouts come."""
        target = self.rollout + rollouts
        self.until(lambda state: self.rollout >= target, f"training stands still after rollout {self.rollout}")

    def engines(self) -> dict[str, tuple[str, int, str]]:
        """Engine id -> state, generation, cause."""
        cells = {key: cell for key, cell in self.viewer.state.items() if key.startswith("engine/")}
        return {cell["id"]: (cell["state"], cell["generation"], cell.get("cause", "")) for cell in cells.values()}

    def operate(self, name: str, target: str, **args: Any) -> dict[str, Any]:
        """Do it, and wait for its end, which must be good."""
        answer = self.viewer.command(name, target=target, args=args, reason="a test")
        assert isinstance(answer, Accepted), answer
        key = f"op/{answer.op}"
        self.until(lambda state: (state.get(key) or {}).get("state") in ("done", "failed"), f"{name} does not end")
        op: dict[str, Any] = self.viewer.state[key]
        self.ops.append(f"{name} {target} {args or ''}: {op['text']}")
        assert op["state"] == "done", op
        return op

    def saved(self) -> list[int]:
        """Rollouts whose samples are on disk."""
        return sorted(int(path.stem) for path in self._dumps.glob("*.pt"))

    def samples(self, rollout_id: int) -> list[dict[str, Any]]:
        """Of one rollout, from its dump."""
        found: list[dict[str, Any]] = torch.load(self._dumps / f"{rollout_id}.pt", weights_only=True)["samples"]
        return found

    def made_by(self, rollout_id: int) -> Counter[tuple[str, int]]:
        """Samples per engine and generation."""
        return Counter((s["metadata"]["engine"], s["metadata"]["engine_generation"]) for s in self.samples(rollout_id))

    def until_made_by(self, engine: str, generation: int) -> None:
        """A rollout has samples of this generation."""
        looked = set[int]()

        def found(state: dict[str, Any]) -> bool:
            new = [
                rollout_id for rollout_id in self.saved() if rollout_id > self.rollout - 2 and rollout_id not in looked
            ]
            looked.update(new)
            return any(self.made_by(rollout_id)[engine, generation] for rollout_id in new)

        self.until(found, f"generation {generation} of engine {engine} makes no samples")

    def assert_whole(self) -> None:
        """Every rollout so far has all of its samples, once, each from weights of exactly its version."""
        saved = self.saved()
        assert saved == list(range(len(saved)))
        for rollout_id in saved:
            samples = self.samples(rollout_id)
            assert [one["index"] - rollout_id * SAMPLES for one in samples] == list(range(SAMPLES))
            assert {tuple(one["weight_versions"]) for one in samples} == {(str(rollout_id or "default"),)}
            assert {one["status"] for one in samples} <= {"completed", "truncated"}

    def check(self, check_id: str) -> str:
        """The status of a check."""
        return str((self.viewer.state.get(f"check/{check_id}") or {}).get("status"))


@contextmanager
def operated(root: Path, *flags: str, engines: int = 2, env: dict[str, str] | None = None) -> Iterator[Operated]:
    """A run that trains, over `engines` engines of its daemon."""
    dumps = root / "dumps"
    argv = [sys.executable, "-m", "rltop", "train", *FLAGS, "--rollout-num-engines", str(engines), *flags]
    argv += ["--save-debug-rollout-data", f"{dumps}/{{rollout_id}}.pt"]
    with real_daemon(root, trainer=argv, env=env, config={"engines": {}}) as run:
        follower = Operated(run, dumps)
        try:
            follower.goes_on(2)
            yield follower
        finally:
            follower.viewer.close()
