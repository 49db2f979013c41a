"""A bisection as a page for a bug report, in Markdown (as data: `rltop.bisect.export_json`). Pure: text out.

Written for whoever maintains the engine and never heard of rltop: what crashes, which features it takes and how sure
that is, what to type to see it, what to turn off meanwhile. Nothing in it was not seen: the matrix has every trial,
also those that did not count, with its exposure. Names of people are left out; keys, hosts and paths are taken out
of what comes in (`rltop.runs.scrub`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rltop.bisect.recipe import recipe
from rltop.bisect.story import Story, TrialStory, minutes_text, percent, same_fault

LEAST_SHOWN = 0.005
"""Culprits believed less than this are left out of the page."""
_TITLES: Mapping[str, str] = {
    "ima": "Illegal memory access",
    "misaligned": "Misaligned address on the GPU",
    "launch-failure": "Launch failure on the GPU",
    "illegal-instruction": "Illegal instruction on the GPU",
    "oom": "Out of memory",
    "hang": "Hang",
}
_PHASES: Mapping[str, str] = {
    "launch": "at the start",
    "load": "while weights are loaded",
    "capture": "while CUDA graphs are captured",
    "prefill-graph": "in prefill (CUDA graph)",
    "decode-graph": "in decode (CUDA graph)",
    "update": "in a weight update",
    "wake": "in the first request after a resume",
    "released": "while memory is released",
    "serve": "while serving",
}
"""Phases of a crash that are no words of the engine's maintainers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of the engine and of the crash beside the bisection's cell. Empty: unknown."""

    kind: str = ""
    """`sglang`, or which stand-in it was."""
    versions: Mapping[str, str] = field(default_factory=dict)
    argv: Sequence[str] = ()
    """The launch with everything on, every value pinned that a toggle would move: what all trials stand on."""
    crashed: Sequence[str] = ()
    """The launch that crashed first, as it was."""
    smallest: Sequence[str] = ()
    """The launch of the trial that crashed with the fewest features on; empty: none crashed with any of them off."""
    smallest_on: Sequence[str] = ()
    """What was on in it."""
    crashes_min: Sequence[float | None] = ()
    """Crashes with everything on that were no trials, the hunted one first: minutes of service. None: unknown."""
    env: Mapping[str, str] = field(default_factory=dict)
    pins: Sequence[str] = ()
    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Feature -> its value where it is on, and where it is off."""
    log: Sequence[str] = ()
    """The lines around the first fault."""
    missing: Sequence[str] = ()
    """What could not be had, and why."""


def as_markdown(story: Story, evidence: Evidence) -> str:
    """The page."""
    story = nameless(story)
    lines = [f"# {title(story, evidence)}", ""]
    if story.rehearsal:
        lines += [f"> **A rehearsal, not a bug report:** {story.rehearsal}.", ""]
    lines += [*_summary(story), ""]
    lines += [*_combinations(story, evidence), *_workarounds(story), *_reproduce(story, evidence), *_confidence(story)]
    lines += [*_facts(story), *_matrix(story), *_environment(story, evidence), *_log(story, evidence)]
    return "\n".join(lines) + "\n"


def nameless(story: Story) -> Story:
    """Whoever stopped it, and why, is nobody's business."""
    if story.state != "stopped" or story.verdict is None or story.cut_off:
        return story
    return replace(story, verdict=replace(story.verdict, text="ended by its operator before it was clear"))


def title(story: Story, evidence: Evidence) -> str:
    """`Illegal memory access while serving with cuda_graph x speculative (SGLang 0.5.23)`."""
    kind, _, rest = story.crash.fingerprint.partition("/")
    words = _TITLES.get(kind, f"Crash ({kind})" if kind else "Crash")
    phase = story.crash.phase or rest.partition("/")[0]
    words += f" {_PHASES.get(phase, f'in {phase}')}" if phase else ""
    if story.state == "found" and story.verdict is not None:
        words += f" with {story.verdict.words}"
    version = evidence.versions.get("sglang", "")
    stand_in = "" if evidence.kind in ("", "sglang") else f", seen on rltop's {evidence.kind} engine, a stand-in"
    return words + (f" (SGLang {version}{stand_in})" if version else "")


def _summary(story: Story) -> Iterator[str]:
    told = story.explained()
    yield f"**{_line(story.headline())}**" + (f" {_line(told)}." if told and told != story.headline() else "")
    yield ""
    crash = story.crash
    yield f"- crash: `{_code(crash.fingerprint)}`" + (f": {_line(crash.cause)}" if crash.cause else "")
    if story.kernel is not None:
        kernel = story.kernel
        where = f", {kernel.where()}" if kernel.where() else ""
        weaker = ", which is weaker: it tells the launch, not the fault" if kernel.weaker else ""
        yield f"- kernel: `{_code(kernel.name)}`{_line(where)} (from {_line(kernel.source)}{weaker})"
    else:
        yield "- kernel: not known"
    exposed = sum(trial.minutes for trial in story.trials)
    engines = f"{len(story.engines)} engine{'s' * (len(story.engines) != 1)}"
    yield f"- {story.counts()}, on {engines}, {minutes_text(exposed)} under traffic"
    if uncounted := story.uncounted():
        yield f"- {_line(uncounted)}"
    for one in story.kernel_runs:
        yield f"- for the kernel, no trial: {_line(one.why)}: {one.outcome}" + (
            f" ({_line(one.note)})" if one.note else ""
        )
    yield f"- traffic in every trial: {_line(story.traffic_words() or 'not known')}"
    if version := story.crash.weight_version:
        own = version == "default"  # what SGLang calls those that no update has brought
        yield f"- weights in every trial: {'those of the checkpoint' if own else f'version {_line(version)}'}"
    if story.verdict is not None and story.verdict.culprit is None and story.verdict.left:
        left = ", ".join(f"{' x '.join(names) or 'none'} ({percent(p)})" for names, p in story.verdict.left)
        yield f"- not told apart: {_line(left)}"


# ---------------------------------------------------------------------- what was tried


def _combinations(story: Story, evidence: Evidence) -> Iterator[str]:
    """One line per set of features, the ones that crashed first: what a reader wants to see before single trials."""
    arms: dict[frozenset[str], list[TrialStory]] = {}
    for trial in story.trials:
        if trial.counts and trial.outcome in ("crashed", "quiet", "aborted"):
            arms.setdefault(frozenset(trial.on), []).append(trial)
    if not arms:
        return
    yield from ("## Which features it takes", "")
    yield f"| {' | '.join(map(_cell, story.toggles))} | crashed | of trials | time under traffic |"
    yield "|" + "---|" * (len(story.toggles) + 3)
    if evidence.crashes_min:
        count, known = len(evidence.crashes_min), [one for one in evidence.crashes_min if one is not None]
        served = minutes_text(sum(known)) if len(known) == count else "not known"
        yield f"| {' | '.join(['on'] * len(story.toggles))} | **{count}** | no trial: in service | {served} |"
    for on, trials in sorted(arms.items(), key=lambda item: (-_crashes(item[1]), len(item[0]), sorted(item[0]))):
        states = ["on" if name in on else "**off**" for name in story.toggles]
        exposed = sum(trial.minutes for trial in trials)
        crashes = _crashes(trials)
        shown = f"**{crashes}**" if crashes else "0"
        yield f"| {' | '.join(states)} | {shown} | {len(trials)} | {minutes_text(exposed)} |"
    yield ""
    odd = [(name, pair) for name, pair in evidence.values.items() if pair not in (("on", "off"), ("", ""))]
    if odd:
        words = [f"{name} on: {on}" + (f", off: {off}" if off != "off" else "") for name, (on, off) in odd]
        yield f"{_line('; '.join(words))}."
    if any("cuda_graph_padding" in one.off and "+ --cuda-graph-bs" in "\n".join(one.argv) for one in story.trials):
        yield "cuda_graph_padding off: a graph for every batch size, so that none is padded."
    yield "The engine's own start and the time until it was ready are not counted as time under traffic."
    yield ""


def _crashes(trials: Sequence[TrialStory]) -> int:
    return sum(trial.outcome == "crashed" for trial in trials)


@dataclass(frozen=True, slots=True)
class Around:
    """One member of the culprit, off alone, and never a crash."""

    name: str
    argv: tuple[str, ...]
    """How its arguments differ from those with everything on."""
    quiet_min: float
    trials: tuple[int, ...]
    along: tuple[str, ...] = ()
    """That went off with it."""


def around(story: Story) -> list[Around]:
    """Only what trials with everything else on have shown."""
    culprit = story.verdict.culprit if story.verdict is not None and story.state == "found" else None
    found = []
    for name in culprit or ():
        off = {name, *story.aliases.get(name, ())}
        mine = [trial for trial in story.trials if trial.counts and name in trial.off and off.issuperset(trial.off)]
        quiet = [trial for trial in mine if trial.minutes > 0 and not trial.runs]
        if quiet and not _crashes(mine):
            minutes = round(sum(trial.minutes for trial in quiet), 2)
            along = tuple(dict.fromkeys(one for trial in quiet for one in trial.off if one != name))
            found.append(Around(name, quiet[0].argv, minutes, tuple(trial.n for trial in quiet), along))
    return found


def _workarounds(story: Story) -> Iterator[str]:
    if found := around(story):
        yield from ("## Workaround", "")
        one = "One of these is enough. " if len(found) > 1 else ""
        yield f"{one}Everything else stayed on but for what is said to go off with it, and it did not crash:"
        if story.time_scale != 1.0:
            yield f"A rehearsal, so minutes are scaled: one second of clock is {story.time_scale:g} seconds here."
        for one_off in found:
            numbers = ", ".join(map(str, one_off.trials))
            told = f"trial{'s' * (len(one_off.trials) > 1)} {numbers}, {minutes_text(one_off.quiet_min)} under traffic"
            also = f"; {', '.join(one_off.along)} went off with it" if one_off.along else ""
            yield from ("", f"**{_line(one_off.name)} off** ({told}{_line(also)})", "")
            how = recipe(one_off.argv)
            for line in how.lines():
                label, _, text = line.partition(": ")
                yield f"- {label}: `{_code(text)}`"
            if not how.lines():
                yield "- nothing on its command line differs: it is in how the engine is used"
            for option in how.slime_sets:
                yield f"- slime sets `--{_code(option.removeprefix('--'))}` itself"
        yield ""


def _matrix(story: Story) -> Iterator[str]:
    if not story.trials:
        return
    yield from ("## Every trial", "")
    yield f"| # | {' | '.join(map(_cell, story.toggles))} | outcome | under traffic | remark |"
    yield "|" + "---|" * (len(story.toggles) + 4)
    for trial in story.trials:
        states = ["on" if name in trial.on else "**off**" for name in story.toggles]
        remark = [] if trial.counts else ["not counted"]
        remark += [trial.note] if trial.note else []
        other = trial.fingerprint and not same_fault(trial.fingerprint, story.crash.fingerprint)
        if other and trial.fingerprint not in trial.note:
            remark.append(f"`{_code(trial.fingerprint)}`")
        remark += [f"`{_code(trial.kernel)}`"] if trial.kernel else []
        told = f"**{trial.outcome}**" if trial.outcome == "crashed" else trial.outcome
        yield (
            f"| {trial.n} | {' | '.join(states)} | {told} | {minutes_text(trial.minutes)} "
            f"| {_cell('; '.join(remark))} |"
        )
    yield ""
    for name in story.fixed:
        yield f"{_line(name)} was never off: it cannot be turned off here."
    for name, others in story.aliases.items():
        yield f"{_line(name)} off takes {_line(', '.join(others))} with it."
    yield ""


def _confidence(story: Story) -> Iterator[str]:
    shown = [one for one in story.posterior if one.p >= LEAST_SHOWN]
    if not shown:
        return
    yield from ("## How sure that is", "")
    yield "| what it takes to crash | probability after all trials |"
    yield "|---|---|"
    for one in shown:
        yield f"| {_cell(one.words)} | {one.p:.1%} |"
    yield ""
    yield (
        "A set of features is a culprit when the crash needs all of them. A quiet trial speaks against those that were "
        "on in it, by how long it was quiet; how often it crashes is learnt from the crashes themselves."
    )
    yield ""


def _facts(story: Story) -> Iterator[str]:
    if story.facts:
        yield from ("## What the crash itself said, before any trial", "")
        for one in story.facts:
            moved = one.moved()
            yield f"- {_line(one.text)}" + (f" (likelier or less likely: {_line(moved)})" if moved else "")
        yield ""


# ---------------------------------------------------------------------- what to type


def _reproduce(story: Story, evidence: Evidence) -> Iterator[str]:
    """Only launches that were really made, each with what became of it."""
    if not (evidence.crashed or evidence.smallest):
        return
    yield from ("## To reproduce", "")
    if evidence.smallest:
        ran = [one for one in story.trials if one.counts and set(one.on) == set(evidence.smallest_on) and not one.runs]
        crashed = [one for one in ran if one.outcome == "crashed"]
        after = ", ".join(minutes_text(one.minutes) for one in crashed)
        on = ", ".join(evidence.smallest_on) or "none of them"
        yield (
            f"With the fewest features that crashed ({_line(on)}): {len(crashed)} of {len(ran)} "
            f"trial{'s' * (len(ran) != 1)} crashed, after {after} under the traffic above:"
        )
        yield from ("", *_fenced([_command(evidence.env, evidence.smallest)], "sh"), "")
    if evidence.crashed:
        first = evidence.crashes_min[0] if evidence.crashes_min else None
        after = f", after {minutes_text(first)} of service" if first is not None else ""
        yield f"As it crashed first{after}:"
        yield from ("", *_fenced([_command(evidence.env, evidence.crashed)], "sh"), "")
    if evidence.pins:
        yield "In every trial this was written out, because a feature would move it by itself:"
        yield ""
        for pin in evidence.pins:
            option = pin.partition(" ")[0]
            own = [str(one.n) for one in story.trials if any(line.split()[1:2] == [option] for line in one.argv)]
            but = (
                f" (but in trial{'s' * (len(own) > 1)} {', '.join(own)}: it is how a feature is off there)"
                if own
                else ""
            )
            yield f"- `{_code(pin)}`{but}"
        yield ""


def _command(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """One flag with its values per line."""
    parts: list[str] = []
    for word in argv:
        if parts and (word == "-m" or not word.startswith("-")):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    return " \\\n  ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), *parts])


WANTED = ("GPU", "driver", "CUDA", "torch")
"""Beside SGLang's version, what whoever reads a bug report asks for first."""


def _environment(story: Story, evidence: Evidence) -> Iterator[str]:
    yield from ("## Versions", "")
    for name, version in evidence.versions.items():
        yield f"- {_line(name)} {_line(version)}"
    unknown = [name for name in WANTED if not any(one in evidence.versions for one in (name, name.lower()))]
    if unknown:
        how = " (`python -m sglang.check_env` prints them)" if evidence.kind == "sglang" else ""
        yield f"- not known here, please add: {', '.join(unknown)}{how}"
    # How to look at this machine's core dump is of no use elsewhere.
    notes = [note.partition("; where there is one: ")[0] for note in story.notes]
    remarks = list(dict.fromkeys([*notes, *evidence.missing]))
    yield from ["", "## Remarks", "", *(f"- {_line(note)}" for note in remarks)] if remarks else []
    yield ""


def _log(story: Story, evidence: Evidence) -> Iterator[str]:
    if evidence.log:
        yield from (f"## Log of the crash (`{_code(story.crash.fingerprint)}`)", "", *_fenced(evidence.log, ""))


def _fenced(lines: Sequence[str], language: str) -> list[str]:
    """A code block; its fence is longer than any in it."""
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return [f"{fence}{language}", *lines, fence]


def _line(text: str) -> str:
    """Text of a run inside a Markdown line: nothing in it is markup."""
    safe = "".join(char if char.isprintable() else " " for char in text)
    for char in "\\`*[]<>|":
        safe = safe.replace(char, f"\\{char}")
    return safe


def _code(text: str) -> str:
    """Text of a run between backticks."""
    return "".join(char if char.isprintable() else " " for char in text).replace("`", "'").replace("|", "/")


def _cell(text: str) -> str:
    """Text inside a table; backticks stay."""
    return "".join(char if char.isprintable() else " " for char in text).replace("|", "\\|").replace("<", "&lt;")
