"""How a new daemon takes over what an earlier one left in a slot: by marker and birth, never by a bare pid.

The process is found through its generation's folder. Whatever it was called before, the machine meets it as one that
has just been started: it proves that it is ready and which weights it holds. What was under way is carried on, because
the slot's file says where it should lead.

Failure policy: a launcher that does not answer is asked again; until then nothing of this slot is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltop.engines.launcher import Launched, Launcher, Look, LostNode
from rltop.engines.states import LIVE, Adopted, NodeLost, State, Stop
from rltop.engines.watch import SKIP_ABOVE
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.engines.supervisor import Engine

_ENDING = (State.STOPPING, State.DRAINING, State.RECLAIMING)


async def adopt(engine: Engine, launcher: Launcher) -> bool:
    """Find the slot's newest process, dead or alive. True, and `engine.adopted`, once it is known how things are."""
    record = engine.record
    generation, state = record.generation, record.state
    if generation == 0 or (state is State.STOPPED and record.process is None):
        engine.adopted = True
        return True
    engine.spec = engine.spec_of(generation)
    try:
        process = await launcher.adopt(engine.spec.directory, engine.spec.marker)
        look = await launcher.look(process) if process is not None else None
    except LostNode as error:
        if record.process is not None:
            engine.adopted, engine.process = True, record.process
            _as_live(engine, generation)
            engine.fire(NodeLost(record.process.node or error.where))
        return engine.adopted
    except (RltopError, TimeoutError) as error:
        engine.waits = f"an answer of its launcher ({str(error).partition(chr(10))[0]})"
        return False
    engine.adopted, engine.waits = True, ""
    nothing = record.process is None and state not in (State.LAUNCHING, *LIVE)
    if process is not None and look is not None and (look.alive or not nothing):
        _take(engine, process, look, state)
    return True


def _take(engine: Engine, process: Launched, look: Look, state: State) -> None:
    engine.process, engine.watch.look = process, look
    engine.watch.skip_middle = look.log_size > SKIP_ABOVE
    _as_live(engine, engine.record.generation)
    engine.write(engine.record.changed(process=process))
    if state in _ENDING and not (look.alive and state is State.DRAINING):
        # Its end was asked for: whatever its log says, it is no crash.
        engine.fire(Stop(engine.record.cause, drain=False))


def _as_live(engine: Engine, generation: int) -> None:
    if engine.slot.state is not State.STOPPED:  # a quarantine or backoff whose process turned out to live
        engine.fire(Stop("found again", drain=False))
    engine.fire(Adopted(generation))
