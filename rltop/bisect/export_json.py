"""A bisection as data (schema 1, docs/cli.md): what the page for a bug report says. Pure."""

from __future__ import annotations

from typing import Any

from rltop.bisect.export import Around, Evidence, around, nameless, title
from rltop.bisect.recipe import recipe
from rltop.bisect.story import ExtraRun, Story, TrialStory

SCHEMA = 1


def as_json(story: Story, evidence: Evidence) -> dict[str, Any]:
    """Schema 1."""
    story = nameless(story)
    verdict, kernel, crash = story.verdict, story.kernel, story.crash
    return {
        "schema": SCHEMA,
        "title": title(story, evidence),
        "id": story.id,
        "state": story.state,
        "culprit": None if verdict is None or verdict.culprit is None else list(verdict.culprit),
        "probability": None if verdict is None else round(verdict.p, 4),
        "text": verdict.text if verdict is not None else story.headline(),
        "left": [{"culprit": list(names), "probability": round(p, 4)} for names, p in verdict.left] if verdict else [],
        "rehearsal": story.rehearsal or None,
        "crash": {
            "fingerprint": crash.fingerprint,
            "cause": crash.cause,
            "phase": crash.phase,
            "weight_version": crash.weight_version,
        },
        "kernel": None
        if kernel is None
        else {
            "name": kernel.name,
            "block": kernel.block or None,
            "place": kernel.place or None,
            "exception": kernel.exception or None,
            "source": kernel.source,
            "weaker": kernel.weaker,
        },
        "minutes": round(story.minutes, 2),
        "engines": len(story.engines),
        "toggles": list(story.toggles),
        "fixed": list(story.fixed),
        "posterior": [{"culprit": list(one.culprit), "words": one.words, "p": one.p} for one in story.posterior],
        "involved": dict(story.involved),
        "facts": [{"fact": one.text, "moves": [[list(names), x] for names, x in one.moves]} for one in story.facts],
        "traffic": {"source": story.traffic, "requests": story.requests, "concurrency": story.concurrency},
        "trials": [_trial_json(trial) for trial in story.trials],
        "kernel_runs": [_extra_json(one) for one in story.kernel_runs],
        "crashes_min": list(evidence.crashes_min),
        "workarounds": [_around_json(one) for one in around(story)],
        "kind": evidence.kind,
        "versions": dict(evidence.versions),
        "argv": list(evidence.argv),
        "crashed_argv": list(evidence.crashed),
        "smallest_argv": list(evidence.smallest),
        "smallest_on": list(evidence.smallest_on),
        "env": dict(evidence.env),
        "pins": list(evidence.pins),
        "values": {name: {"on": on, "off": off} for name, (on, off) in evidence.values.items()},
        "log": list(evidence.log),
        "notes": [*story.notes, *evidence.missing],
    }


def _trial_json(trial: TrialStory) -> dict[str, Any]:
    return {
        "n": trial.n,
        "on": list(trial.on),
        "off": list(trial.off),
        "outcome": trial.outcome,
        "counts": trial.counts,
        "minutes": round(trial.minutes, 3),
        "fingerprint": trial.fingerprint or None,
        "kernel": trial.kernel or None,
        "note": trial.note,
        "argv": list(trial.argv),
    }


def _extra_json(one: ExtraRun) -> dict[str, Any]:
    return {"why": one.why, "outcome": one.outcome, "minutes": round(one.minutes, 3), "note": one.note}


def _around_json(one: Around) -> dict[str, Any]:
    how = recipe(one.argv)
    return {
        "off": one.name,
        "argv": list(one.argv),
        "quiet_min": one.quiet_min,
        "trials": list(one.trials),
        "add": list(how.add),
        "leave_out": list(how.leave_out),
        "env": list(how.env),
        "unset": list(how.unset),
        "slime_add": how.slime or None,
        "slime_leave_out": how.slime_leaves_out or None,
    }
