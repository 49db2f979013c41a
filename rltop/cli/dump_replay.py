"""`rltop dump replay-reward FUNCTION PATTERN`: scores saved samples again, and shows what changed.

Failure policy: a function that raises for a sample is counted and named with the sample, which keeps its old reward in
what is written. Exit code 1 when any sample could not be scored. A file of --write appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltop.cli.dump_open import Pick
from rltop.cli.output import note, number, print_json, table
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.cli.dump_reward import Outcome, RewardFunction
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_sample import DumpSample
    from rltop.evidence.rescore import Change, Rescore, Row

WHERE = "dump replay-reward"
MOST_BATCH = 64
"""Samples in one call of a function that takes lists, where no group says how many belong together."""
MOST_KINDS = 8
ASYNC_CONCURRENCY = 16
SNIPPET = 60


def replay_reward(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="pkg.mod.fn, pkg.mod:fn or file.py:fn.")],
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A dump, a directory, a glob, or a path with {rollout_id}.")
    ],
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Score only the first so many.")] = None,
    chosen: Annotated[
        str, typer.Option("--filter", metavar="EXPR", help="Only samples that fit, as in dump show.")
    ] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Calls at a time. Default: 16 for an async function, 1 for another (it gets threads)."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="For one call of an async function.")
    ] = 600.0,
    batch: Annotated[
        bool | None,
        typer.Option("--batch/--one-by-one", help="It takes a list. Default: by its parameter's name and type."),
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", metavar="NAME=VALUE", help="An attribute of `args`; may be repeated.")
    ] = None,
    reward_key: Annotated[
        str, typer.Option("--reward-key", metavar="KEY", help="Which of several rewards counts, by name.")
    ] = "",
    evaluation: Annotated[bool, typer.Option("--eval", help="The eval_ dumps instead of the training ones.")] = False,
    write: Annotated[
        str,
        typer.Option("--write", metavar="OUT.pt", help="Save the dump with the new rewards; {rollout_id} for several."),
    ] = "",
    largest: Annotated[int, typer.Option(min=0, help="How many of the largest changes are shown.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md).")] = False,
) -> int:
    """Score saved samples again with a reward function, and show what changed.

    The function is called as slime calls --custom-rm-path: `async def fn(args, sample, **kwargs)`; `fn(sample)`, plain
    functions and functions that take a list work too. What it raises is counted and shown with the sample.
    """
    pick = Pick(pattern, chosen, limit, evaluation)
    ask = _Ask(function, pick, concurrency, timeout_s, batch, arg or [], reward_key, write, largest)
    return run(ask, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Ask:
    function: str
    pick: Pick
    concurrency: int | None
    timeout_s: float
    batch: bool | None
    arg: Sequence[str]
    reward_key: str
    write: str
    largest: int


@dataclass(slots=True)
class _Seen:
    """What went by besides the rewards."""

    dumps: int = 0
    rollouts: set[int] = field(default_factory=set)
    unscored: int = 0
    failures: dict[tuple[str, str, str], list[tuple[int | None, int]]] = field(default_factory=dict)
    """(kind, why, place) -> (rollout id, position) of the samples."""
    rewards: dict[Path, dict[int, Any]] = field(default_factory=dict)
    """New rewards, where they are to be written."""
    broken: dict[Path, str] = field(default_factory=dict)
    """Dumps that end too early, or are damaged otherwise."""
    refused: Counter[str] = field(default_factory=Counter)
    """Parts of samples that the function did not get: they wanted to import something."""


def run(ask: _Ask, *, as_json: bool) -> int:
    """See `replay_reward`."""
    import asyncio

    from rltop.cli.dump_reward import find_function
    from rltop.evidence.rescore import Rescore

    refs = ask.pick.refs()
    if ask.write:
        _check_out(ask.write, refs)
    function = find_function(ask.function, batched=ask.batch, args=_args(ask))
    result, seen = Rescore(largest=ask.largest), _Seen()
    with contextlib.redirect_stdout(sys.stderr):
        asyncio.run(_score_all(ask, function, refs, result, seen))
    if not result.total.samples and not seen.unscored and not seen.broken:
        raise ask.pick.nothing()
    written, unwritten = _written(ask, refs, seen) if ask.write else ([], [])
    if as_json:
        print_json(_object(ask, result, seen, written, unwritten))
    else:
        print("\n".join(_lines(ask, result, seen, written)))
    for error in unwritten[1:]:
        note(str(error))
    if unwritten:
        raise unwritten[0]
    return 1 if seen.unscored or seen.broken else 0


def _args(ask: _Ask) -> dict[str, Any]:
    found: dict[str, Any] = {"reward_key": ask.reward_key or None}
    for text in ask.arg:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise RltopError("not an attribute", where=f"--arg {text}", do="--arg NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


async def _score_all(
    ask: _Ask, function: RewardFunction, refs: Sequence[DumpRef], result: Rescore, seen: _Seen
) -> None:
    from rltop.cli.dump_reward import Failed, score

    concurrency = ask.concurrency or (ASYNC_CONCURRENCY if function.is_async else 1)
    meant: dict[int, list[tuple[DumpRef, DumpSample]]] = {}

    def batches() -> Iterator[list[Any]]:
        for number_of, (ref, group) in enumerate(_batches(ask, function.batched, refs, seen)):
            meant[number_of] = [(ref, one) for one, _ in group]
            yield [given for _, given in group]

    async for number_of, outcomes in score(function, batches(), concurrency=concurrency, timeout_s=ask.timeout_s):
        for (ref, one), outcome in zip(meant.pop(number_of), outcomes, strict=True):
            rollout = ref.rollout_id
            outcome = _judged(outcome, ask)
            if isinstance(outcome, Failed):
                seen.unscored += 1
                seen.failures.setdefault((outcome.kind, outcome.why, outcome.where), []).append((rollout, one.at))
                continue
            if ask.write:
                seen.rewards.setdefault(ref.path, {})[one.at] = outcome
            result.add(_change(rollout, one, _reward_number(one.reward, ask), _reward_number(outcome, ask)))


def _batches(
    ask: _Ask, batched: bool, refs: Sequence[DumpRef], seen: _Seen
) -> Iterator[tuple[DumpRef, list[tuple[DumpSample, Any]]]]:
    """(dump, [(sample, what the function gets)]): single samples, or those of one group for a function of lists."""
    from rltop.cli.dump_reward import reward_sample

    source: DumpRef | None = None
    group: list[tuple[DumpSample, Any]] = []
    for ref, one in ask.pick.samples(refs, seen.broken):
        if group and not (batched and ref is source and _together(group, one)):
            assert source is not None
            yield source, group
            group = []
        if ref is not source:
            source = ref
            seen.dumps += 1
            if ref.rollout_id is not None:
                seen.rollouts.add(ref.rollout_id)
        seen.refused.update(one.refused)
        group.append((one, reward_sample(one)))
    if group:
        assert source is not None
        yield source, group


def _together(group: Sequence[tuple[DumpSample, Any]], one: DumpSample) -> bool:
    last = group[-1][0].group_index
    return last == one.group_index and (last is not None or len(group) < MOST_BATCH)


def _reward_number(value: Any, ask: _Ask) -> float | None:
    """The number that counts of a reward."""
    from rltop.evidence.samples import reward_of

    if isinstance(value, Mapping) and ask.reward_key:
        value = value.get(ask.reward_key)
    return reward_of(value)


def _judged(outcome: Outcome, ask: _Ask) -> Outcome:
    """What is no reward that counts: no number, NaN, Inf, a map in which none is named."""
    from rltop.cli.dump_reward import Failed

    if isinstance(outcome, Failed):
        return outcome
    value = _reward_number(outcome, ask)
    if value is not None and math.isfinite(value):
        return outcome
    if isinstance(outcome, Mapping):
        told = f"a map whose reward is {number(value)}"
        if value is None:
            names = ", ".join(str(key)[:40] for key in list(outcome)[:8])
            told = f"a map of {names or 'nothing'}: which of them counts? --reward-key KEY"
    else:
        told = f"{number(value) if value is not None else 'None'}, not a number"
    return Failed("result", f"it returned {told}")


def _change(rollout: int | None, one: DumpSample, before: float | None, after: float | None) -> Change:
    from rltop.evidence.rescore import Change

    return Change(
        rollout,
        one.at,
        one.index,
        one.group_index,
        one.status or "",
        before,
        after,
        _end(one.prompt or ""),
        _end(one.response or ""),
    )


def _end(text: str) -> str:
    """The end of a text on one line: there are the question and the answer."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SNIPPET else "…" + flat[-SNIPPET + 1 :]


def _check_out(write: str, refs: Sequence[DumpRef]) -> None:
    from rltop.evidence.dump_find import fields_of

    if not write.endswith(".pt"):
        raise RltopError(
            "not a dump's name", where=f"--write {write}", why="only .pt is written", do=f"--write {write}.pt"
        )
    if len(refs) > 1 and "rollout_id" not in fields_of(write):
        raise RltopError(
            "one file for several dumps",
            where=f"--write {write}",
            why=f"{len(refs)} dumps are scored",
            do="--write 'DIR/{rollout_id}.pt'",
        )
    try:
        outs = [_out(write, ref) for ref in refs]
    except (ValueError, KeyError, IndexError) as error:
        raise RltopError(
            "not a path for dumps", where=f"--write {write}", why=str(error), do="--write 'DIR/{rollout_id}.pt'"
        ) from error
    for ref, out in zip(refs, outs, strict=True):
        if out.absolute() == ref.path.absolute():
            raise RltopError("that is the dump itself", where=f"--write {write}", do="give another name")
        if ref.path.suffix not in (".pt", ".pkl", ".pickle"):
            raise RltopError("only a .pt can be written again", where=str(ref.path), why="it is JSON lines")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RltopError(
            "writing a dump needs torch",
            where=f"--write {write}",
            why="it is not installed here",
            do=f'{sys.executable} -m pip install "rltop[train]"',
        )


def _out(write: str, ref: DumpRef) -> Path:
    from rltop.evidence.dump_find import fields_of, filled

    if not fields_of(write):
        return Path(write)
    if ref.rollout_id is None:
        return Path(write.format(rollout_id=ref.path.stem))
    return filled(write, ref.rollout_id, evaluation=ref.is_eval)


def _written(ask: _Ask, refs: Sequence[DumpRef], seen: _Seen) -> tuple[list[Path], list[RltopError]]:
    """(files that were written, why others were not): the scores are told in any case."""
    written, unwritten = [], []
    for ref in refs:
        try:
            if why := seen.broken.get(ref.path):
                raise RltopError(
                    "not written again",
                    where=str(ref.path),
                    why=f"not all of it can be read: {why}",
                    do="copy it again, or leave out --write",
                )
            written.append(_write(ask.write, ref, seen.rewards.get(ref.path, {})))
        except RltopError as error:
            unwritten.append(error)
    return written, unwritten


def _write(write: str, ref: DumpRef, rewards: dict[int, Any]) -> Path:
    """The dump again, with new rewards where there are any."""
    import pickle

    import torch

    try:
        content = torch.load(ref.path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError) as error:
        raise RltopError(
            "it can not be written again", where=str(ref.path), why=str(error).splitlines()[0][:200]
        ) from error
    rows = content["samples"] if isinstance(content, dict) else content
    if isinstance(rows, dict):
        rows = [row for part in rows.values() for row in part]
    for at, reward in rewards.items():
        rows[at]["reward"] = reward
    path = _out(write, ref)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise RltopError(
            "can not write", where=str(path), why=str(error).splitlines()[0], do="is the disk full?", exit_code=1
        ) from error
    return path


def _lines(ask: _Ask, result: Rescore, seen: _Seen, written: Sequence[Path]) -> list[str]:
    total = result.total
    ids = sorted(seen.rollouts)
    where = f"rollout {ids[0]}" if len(ids) == 1 else f"rollouts {ids[0]} to {ids[-1]}" if ids else ask.pick.pattern
    lines = [f"{ask.function}: {total.samples} samples of {where} scored, {seen.unscored} not"]
    share = f" ({100 * total.changed / total.samples:.1f} %)" if total.samples else ""
    lines += [
        f"changed      {total.changed}{share}: {total.up} up, {total.down} down",
        f"mean reward  {number(total.before.mean)} before, {number(total.after.mean)} now",
    ]
    if total.before.odd or total.after.odd:
        lines.append(f"NaN or Inf   {total.before.odd} before, {total.after.odd} now (not in the means)")
    rows = [
        (status, row.samples, row.changed, row.up, row.down, row.before.mean, row.after.mean)
        for status, row in sorted(result.by_status.items())
    ]
    lines += ["", *table(("status", "samples", "changed", "up", "down", "before", "now"), rows)]
    groups = result.groups()
    if not total.samples:
        lines = lines[:1]
    elif groups.count:
        lines += [
            "",
            f"groups       {groups.count}: rewards differed in {groups.spread_before}, now in {groups.spread_after}",
            f"             {groups.lost} lost their spread (nothing to learn from), {groups.gained} gained one",
        ]
        if groups.examples:
            lines.append(
                "             " + ", ".join(f"{what}: rollout {number(r)} group {g}" for what, r, g in groups.examples)
            )
    else:
        lines += ["", "groups       the dump does not say which samples belong together"]
    if result.largest:
        moved = [
            (one.rollout_id, one.at, one.group_index, one.status, one.before, one.after, one.response)
            for one in result.largest
        ]
        lines += ["", *table(("rollout", "at", "group", "status", "before", "now", "response ends with"), moved)]
    lines += _failure_lines(seen)
    lines += [f"not made     {name}, in {count} samples" for name, count in seen.refused.most_common(MOST_KINDS)]
    lines += [f"BROKEN       {told}" for told in seen.broken.values()]
    return lines + [f"written      {path}" for path in written]


def _failure_lines(seen: _Seen) -> list[str]:
    if not seen.failures:
        return []
    kinds = sorted(seen.failures.items(), key=lambda item: -len(item[1]))
    rows = []
    for (_, why, place), samples in kinds[:MOST_KINDS]:
        first, at = samples[0]
        rows.append((len(samples), f"rollout {number(first)} at {at}", place, why))
    more = len(kinds) - MOST_KINDS
    found = ["", "could not be scored", *table(("samples", "first", "where", "why"), rows)]
    return [*found, f"and {more} other kinds"] if more > 0 else found


def _object(
    ask: _Ask, result: Rescore, seen: _Seen, written: Sequence[Path], unwritten: Sequence[RltopError]
) -> dict[str, Any]:
    groups = result.groups()
    return {
        "function": ask.function,
        "dumps": seen.dumps,
        "rollouts": sorted(seen.rollouts),
        "scored": result.total.samples,
        "unscored": seen.unscored,
        "total": _row(result.total),
        "by_status": {status: _row(row) for status, row in sorted(result.by_status.items())},
        "groups": {
            "count": groups.count,
            "spread_before": groups.spread_before,
            "spread_after": groups.spread_after,
            "lost": groups.lost,
            "gained": groups.gained,
            "examples": [
                {"change": what, "rollout_id": rollout, "group_index": group}
                for what, rollout, group in groups.examples
            ],
        },
        "largest": [asdict(one) for one in result.largest],
        "failures": [
            {
                "kind": kind,
                "why": why,
                "where": place,
                "samples": len(samples),
                "first": [{"rollout_id": rollout, "at": at} for rollout, at in samples[:20]],
            }
            for (kind, why, place), samples in sorted(seen.failures.items(), key=lambda item: -len(item[1]))
        ],
        "not_made": dict(seen.refused),
        "broken": list(seen.broken.values()),
        "not_written": [str(error) for error in unwritten],
        "written": [str(path) for path in written],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "samples": row.samples,
        "changed": row.changed,
        "up": row.up,
        "down": row.down,
        "mean_before": row.before.mean,
        "mean_after": row.after.mean,
        "not_finite_before": row.before.odd,
        "not_finite_after": row.after.odd,
    }
