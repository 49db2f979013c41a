"""A bisection that was cut off, because its run went down, goes on: which one, and on which engines.

What it tried is in its record and stays evidence; its engines have to be there again with the arguments that they had.
"""

from __future__ import annotations

from collections.abc import Sequence

from rltop.bisect.story import Story
from rltop.checks.phrase import named
from rltop.daemon.bisect_crashes import Refused
from rltop.daemon.bisect_model import counts
from rltop.daemon.bisect_record import Record
from rltop.daemon.bisect_start import unfit
from rltop.engines.slots import differences
from rltop.engines.trials import Trials


def plan(bisection: str, records: Sequence[Record], trials: Trials) -> tuple[Record, list[str]]:
    """Its record, unchanged but for the engines that take part, and the steps for people. Raises Refused."""
    found = [one for one in records if one.cut_off and bisection in ("", "all", one.id)]
    if not found:
        which = f"bisection {bisection[:40]!r} was" if bisection not in ("", "all") else "none was"
        raise Refused(f"no bisection is running, and {which} cut off", "rltop bisect start begins one")
    record = found[-1]
    wrong = {name: why for name in record.engines if (why := _why_not(name, record, trials))}
    fit = [name for name in record.engines if name not in wrong]
    told = [f"engine {name}: {why}" for name, why in wrong.items()]
    if not fit:
        why = f"bisection {record.id} was cut off, and none of its engines can go on: {'; '.join(told)}"
        raise Refused(why, "start them as they were (rltop up with the same file), or begin anew: rltop bisect start")
    record.engines = tuple(fit)
    seen = Story(counted=counts(record.trials)).counts()
    steps = [
        f"go on with bisection {record.id} ({record.crash.fingerprint}), which was cut off when its run went down: "
        f"{seen}; their crashes and their minutes without one count on",
        f"reserve {named('engine', fit)}: out of the rotation until it ends, then back on "
        f"{'its' if len(fit) == 1 else 'their'} own flags",
        *(f"left out: {one}" for one in told),
    ]
    steps += [one for one in [trials.nobody_serves(fit)] if one]
    steps.append(f"at most {max(0.0, record.budget_min - record.minutes):.0f} minutes more")
    return record, steps


def reopen(record: Record) -> None:
    """Nothing of its end is left."""
    record.state, record.verdict, record.ended = "running", None, None
    record.cut_off, record.error, record.located = False, "", None
    record.dropped, record.restored = {}, {}
    record.notes.append("the run went down in the middle, and it was gone on with afterwards")


def _why_not(name: str, record: Record, trials: Trials) -> str:
    if name not in trials.ids():
        return "it is not there any more"
    subject = trials.subject(name)
    if why := unfit(subject, record.subject):
        return why
    changed = differences(record.subject.config, subject.config)
    return f"its arguments are others now ({', '.join(changed)})" if changed else ""
