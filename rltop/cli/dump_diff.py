"""`rltop dump diff`: the same prompts in two dumps, or under two weight versions."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rltop.cli.dump_open import Dump, chosen_dumps, opened
from rltop.cli.output import clean, note, number, print_json, table
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_sample import DumpSample

MOST_OPEN = 4
MOST_SHOWN = 48


def diff(
    first: str, second: str | None, *, versions: str | None, chosen: str, limit: int, evaluation: bool, as_json: bool
) -> int:
    """The command. versions: `X,Y`, weight versions of the two sides."""
    from rltop.evidence.dump_diff import DumpDiff

    wanted = _versions(versions, alone=second is None)
    a = _Side(chosen_dumps(first, evaluation=evaluation), wanted[0], chosen)
    b = a if second is None else _Side(chosen_dumps(second, evaluation=evaluation), wanted[1], chosen)
    if second is None:
        b = _Side(a.refs, wanted[1], chosen)
    with a:
        found = DumpDiff(a.again)
        for at, sample in a.samples():
            found.add_a(at, sample)
        for at, sample in b.samples():
            found.add_b(at, sample)
    summary, rows = found.summary(), found.rows()
    if not summary["prompts"]:
        raise RltopError(
            "nothing to compare",
            where=f"{first} and {second or first}",
            why=f"no prompt is in both: {summary['only_a']} only in the first, {summary['only_b']} only in the second"
            + (f" ({a.count} and {b.count} samples of versions {versions})" if versions else ""),
            do="give dumps of the same prompts: rollouts of one data order, or an eval of two rollouts (--eval)",
        )
    if as_json:
        sides = [[str(ref.path) for ref in side.refs] for side in (a, b)]
        print_json({"a": sides[0], "b": sides[1], "summary": summary, "prompts": rows})
    else:
        print("\n".join([*_summary(summary), "", *_table(rows[:limit])]))
        if len(rows) > limit:
            note(f"{limit} of {len(rows)} prompts, those that part first: --limit {len(rows)} for all")
    return 0


def _versions(text: str | None, *, alone: bool) -> tuple[str | None, str | None]:
    if text is None:
        if alone:
            raise RltopError(
                "one dump and nothing to compare it with",
                where="dump diff",
                do="rltop dump diff A B, or rltop dump diff A --versions 3,4",
            )
        return None, None
    parts = [one.strip() for one in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise RltopError(f"not two weight versions: {text!r}", where="--versions", do="--versions 3,4")
    return parts[0], parts[1]


class _Side:
    """The samples of one side, numbered over its dumps; a few dumps stay open to read a sample again."""

    def __init__(self, refs: Sequence[DumpRef], version: str | None, chosen: str) -> None:
        self.refs = refs
        self.count = 0
        self._version, self._chosen = version, chosen
        self._begins: list[int] = []
        self._open: OrderedDict[int, tuple[ExitStack, Dump]] = OrderedDict()

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_error: object) -> None:
        for stack, _ in self._open.values():
            stack.close()

    def samples(self) -> Iterator[tuple[int, DumpSample]]:
        """(number, sample) of those of the version and filter."""
        from rltop.evidence.dump_rows import Filter, line_of

        choose = Filter(self._chosen) if self._chosen else None
        begin = 0
        for ref in self.refs:
            self._begins.append(begin)
            with opened(ref) as dump:
                for sample in dump.samples():
                    begin += 1
                    if self._version is not None and self._version not in _last(sample):
                        continue
                    if choose is None or choose.takes(line_of(sample, sample.log_probs), sample):
                        self.count += 1
                        yield begin - 1, sample

    def again(self, at: int) -> DumpSample:
        """The sample of a number."""
        which = bisect_right(self._begins, at) - 1
        held = self._open.get(which)
        if held is None:
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1][0].close()
            stack = ExitStack()
            held = self._open[which] = (stack, Dump(self.refs[which], stack))
        self._open.move_to_end(which)
        return held[1].file.sample(at - self._begins[which])


def _last(sample: DumpSample) -> tuple[str, ...]:
    """The weight version that a sample ended with."""
    return (sample.weight_versions or ())[-1:]


def _summary(told: dict[str, Any]) -> list[str]:
    first, reward = told["first_diverging_token"], told["reward"]
    lines = [
        f"{told['prompts']} prompts in both, {told['only_a']} only in A, {told['only_b']} only in B",
        f"{told['pairs']} pairs of responses: {told['same']} the same, {told['pairs'] - told['same']} part",
    ]
    if first["min"] is not None:
        lines.append(f"first diverging token: {first['min']} at the earliest, {number(first['median'])} in the median")
    if None not in reward:
        lines.append(f"reward: {number(reward[0])} in A, {number(reward[1])} in B ({told['reward_diff']:+.6g})")
    if told["log_prob_abs_diff"] is not None:
        mean, worst = number(told["log_prob_abs_diff"]), number(told["log_prob_abs_diff_max"])
        lines.append(f"log-probs of the tokens before they part: |B - A| {mean} in the mean, {worst} at most")
    if any(told["unpaired"]):
        lines.append(f"without a partner: {told['unpaired'][0]} samples of A, {told['unpaired'][1]} of B")
    if told["other_prompt_tokens"]:
        lines.append(
            f"{told['other_prompt_tokens']} prompts are the same text but other tokens: another model's tokenizer or "
            "chat template?"
        )
    return lines


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ("parts at", "A has", "B has", "reward A", "reward B", "|log-prob|", "same", "prompt")
    return table(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    first = row["first"]
    where, has = "-", ["", ""]
    if first:
        where = f"{first['unit']} {first['at']}"
        ids = [f"{one} " if one is not None else "" for one in first["tokens"]]
        has = [f"{i}{clean(t)[:20]!r}" if t or i else "(ended)" for i, t in zip(ids, first["texts"], strict=True)]
    prompt = clean(row["prompt"])[:MOST_SHOWN]
    same = f"{row['same']}/{row['pairs']}"
    return (where, *has, *row["reward"], row["log_prob_abs_diff"], same, prompt)
