"""What SGLang makes of a command line: refused and why, or the fields that it will run with.

`judge` is SGLang's own argument resolution for the fields that toggles touch, as rules: which combinations it rejects,
and what it changes by itself. Sources are named at each rule; the answers of the real thing, on a CPU, are recorded in
`tests/data/sglang_arguments/` and compared there. Defaults that SGLang takes from the GPU (capture sizes, memory
fraction, attention backend) are left as None unless they were given.

Failure policy: a wrong command line is a `Judgement` with errors, never an exception. A version without a list is
judged by the nearest one, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.engines.flags import parse
from rltop.engines.options import table
from rltop.engines.toggle_table import graph_asked


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A field that SGLang changes by itself."""

    field: str
    """Name in ServerArgs; the graph's phases are `decode_graph` and `prefill_graph`."""
    asked: Any
    got: Any
    why: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """SGLang's answer to a command line."""

    errors: tuple[str, ...]
    """Empty: accepted. Otherwise SGLang ends before it loads the model; the first is its message."""
    fields: Mapping[str, Any]
    """Fields of ServerArgs after resolution; of a refused command line as far as it was read."""
    rewrites: tuple[Rewrite, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether SGLang would go on to load the model."""
        return not self.errors


class _Refused(Exception):
    """SGLang raises here."""


def judge(
    argv: Sequence[str], env: Mapping[str, str], *, version: str, model: Mapping[str, Any] | None = None
) -> Judgement:
    """SGLang's answer to these arguments (`--model-path` and the port may be left out).

    model: contents of the checkpoint's `config.json`; without it a dense model without MLA is assumed.
    """
    spec = table(version)
    parsed = parse(argv, version=version)
    warnings = (*parsed.warnings, *([spec.note] if spec.note else []))
    fields = dict(parsed.values)
    fields["cuda_graph_config"] = graph_asked(parsed, version)
    if parsed.errors:
        return Judgement(parsed.errors, fields, (), warnings)
    return Judgement((), fields, (), warnings)
