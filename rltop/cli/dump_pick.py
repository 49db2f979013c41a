"""Which dumps and samples a command that works through them means: PATTERN, --eval, --filter, --limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rltop.cli.output import note
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_sample import DumpSample


MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Pick:
    """What was asked for."""

    pattern: str
    chosen: str = ""
    """A filter, as in `rltop dump show`."""
    limit: int | None = None
    evaluation: bool = False

    def refs(self) -> Sequence[DumpRef]:
        """The rollout dumps, by rollout id. Raises RltopError where there is none; says on stderr what is left out."""
        from rltop.evidence.dump_find import find_dumps, holes

        found = find_dumps(self.pattern)
        for ref in found:
            if ref.problem:
                note(f"{ref.path}: {ref.problem}")
        whole = [ref for ref in found if not ref.problem]
        rollouts = [ref for ref in whole if not (ref.kind or "").startswith("train")]
        if not rollouts:
            raise RltopError(
                "a train dump has no prompts and responses as text",
                where=str(whole[0].path),
                why="slime keeps them in the rollout dump of the same rollout",
                do="give the path of --save-debug-rollout-data",
            )
        refs = [ref for ref in rollouts if ref.is_eval is self.evaluation]
        if not refs:
            kind, do = ("eval_", "leave out --eval") if self.evaluation else ("training", "--eval")
            raise RltopError(f"no {kind} dump", where=self.pattern, why=f"{len(rollouts)} of the other kind", do=do)
        if len(refs) < len(rollouts):
            note(f"{len(rollouts) - len(refs)} {'training' if self.evaluation else 'eval_'} dumps are left out")
        if missing := holes(refs):
            named = ", ".join(map(str, missing[:MOST_NAMED])) + ("…" if len(missing) > MOST_NAMED else "")
            note(f"there is no dump of rollout {named} between the others")
        return refs

    def samples(self, refs: Sequence[DumpRef], broken: list[str]) -> Iterator[tuple[DumpRef, DumpSample]]:
        """One after the other, a dump open at a time; tensors of a sample can be read until the next one is taken.

        A dump that can be read no further is named in `broken`, and what came before stands.
        """
        from rltop.evidence.dump_file import DumpFile

        takes, left = self._filter(), self.limit
        for ref in refs:
            at = 0
            try:
                with DumpFile.open(ref.path) as dump:
                    for one in dump:
                        if left == 0:
                            return
                        at = one.at + 1
                        if takes(one):
                            left = None if left is None else left - 1
                            yield ref, one
            except RltopError as error:
                broken.append(f"{ref.path}, from sample {at} on: {error.why or error.what}")

    def nothing(self) -> RltopError:
        """The error for no sample at all."""
        where = f"--filter {self.chosen}" if self.chosen else self.pattern
        return RltopError("no sample fits", where=where)

    def _filter(self) -> Callable[[DumpSample], bool]:
        if not self.chosen:
            return lambda one: True
        from rltop.evidence.dump_rows import Filter, line_of

        chosen = Filter(self.chosen)
        return lambda one: chosen.takes(line_of(one, None), one)
