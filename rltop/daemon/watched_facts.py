"""What the logs of a watched run say, as the rules see it: put together as `rltop check` does it from files."""

from __future__ import annotations

from dataclasses import replace

from rltop.checks.observe import Args, Observations
from rltop.evidence.collect import observations
from rltop.evidence.sink import Sink


def with_logs(seen: Observations, facts: Sink | None) -> Observations:
    """What was streamed, and what only the logs say. Where both tell the same, what was streamed counts: it is exact.
    It goes through everything: call it in a thread."""
    if facts is None:
        return seen
    told = observations(_copy(facts))
    return replace(
        seen,
        metrics=seen.metrics or told.metrics,
        samples=seen.samples or told.samples,
        phases=seen.phases or told.phases,
        syncs=seen.syncs or told.syncs,
        starts=seen.starts or told.starts,
        lines=(*seen.lines, *told.lines),
        events=told.events,
        logs=told.logs,
        documents=told.documents,
        ray=told.ray,
        problems=told.problems,
        files=told.files,
        args=seen.args if seen.args.flags else replace(told.args, framework=told.args.framework or seen.args.framework),
        mode=told.mode if seen.args == Args() else seen.mode,
        vocab_size=seen.vocab_size or told.vocab_size,
    )


def _copy(facts: Sink) -> Sink:
    """`observations` sorts its sink out in place, and the facts may be judged again."""
    return replace(
        facts,
        metrics=list(facts.metrics),
        samples=list(facts.samples),
        args=list(facts.args),
        lines=list(facts.lines),
        events=list(facts.events),
    )
