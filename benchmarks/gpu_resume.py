"""Whether a run that was saved and loaded is the run that was never interrupted, in the numbers of its steps.

One run samples with an engine and keeps its samples. Two others train on the same samples without an engine: the first
one step, then it saves; the second loads and makes the next. With deterministic kernels every number is the same. Last
a run with an engine goes on from the checkpoint, which it must hold tensor by tensor after `reset_tensors`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.rollout_manager import RolloutManager
from rltop.train.sync import digest_of
from rltop.train.trainer_actor import TrainActor
from tests.train.local import LocalRollouts


def resume(config: TrainConfig, work: Path) -> dict[str, Any]:
    """The steps of all runs, and whether they are equal."""
    dump, kept = str(work / "dumps" / "{rollout_id}.pt"), work / "kept"
    whole = replace(config, num_rollout=2, deterministic=True, save_debug_rollout_data=dump)
    alone = replace(whole, save_debug_rollout_data=None, load_debug_rollout_data=dump, check_weight_update_equal=False)
    seconds: dict[str, float] = {}

    def timed(name: str, one: TrainConfig) -> tuple[History, str]:
        began = time.monotonic()
        done = _run(one, work / name)
        seconds[name] = time.monotonic() - began
        return done

    engine, _ = timed("whole", whole)
    saved, at_save = timed("saved", replace(alone, num_rollout=1, save=kept, save_interval=1))
    loaded, at_end = timed("loaded", replace(alone, load=kept))
    further, _ = timed("further", replace(whole, num_rollout=3, load=kept, save_debug_rollout_data=None))
    return {
        "equal": {
            "step 0, the engine's run and the one that saves": engine.steps[:1] == saved.steps,
            "step 1, the run that was never interrupted and the one that loaded": engine.steps[1:] == loaded.steps,
        },
        "steps": {"whole": engine.steps, "saved": saved.steps, "loaded": loaded.steps, "further": further.steps},
        "weights": {"saved": at_save, "after the next step": at_end},
        "mismatches": {"whole": engine.mismatches, "further": further.mismatches},
        "bytes": sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()),
        "seconds": seconds,
    }


def _run(config: TrainConfig, work: Path) -> tuple[History, str]:
    """What the run did, and the digest of the weights at its end."""
    work.mkdir(parents=True, exist_ok=True)
    trainer = TrainActor(config, str(work))
    rollouts = LocalRollouts(config, work, RolloutManager(config))
    with Reporter(role="trainer", rank=0) as reporter:
        loop = Loop(
            config=config,
            trainer=trainer,
            rollouts=rollouts,
            narrator=Narrator(reporter, time.monotonic),
            clock=time.monotonic,
            base_directory=work / "initial",
            history=History(),
        )
        try:
            loop.run()
            return loop.history, digest_of(trainer._backend.hf_tensors())
        finally:
            rollouts.stop()
            trainer.disconnect()
