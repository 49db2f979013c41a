"""What SGLang makes of a command line: refused and why, or the fields that it will run with.

`judge` is SGLang's own argument resolution for the fields that toggles touch, as rules: which combinations it rejects,
and what it changes by itself. The answers of the real thing, without a GPU, are recorded in
`tests/data/sglang_arguments/` and compared there; `make soak` asks it again.

Failure policy: a wrong command line is a `Judgement` with errors, never an exception. A version without a list is
judged by the nearest one, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.engines import rules_general as general
from rltop.engines import rules_models as models
from rltop.engines.flags import parse
from rltop.engines.options import table
from rltop.engines.resolution import CPU, Host, Refused, Resolution, Rewrite
from rltop.engines.toggle_table import graph_asked

__all__ = ["CPU", "Host", "Judgement", "Rewrite", "judge"]

STEPS: Sequence[Callable[[Resolution], None]] = (
    general.dp_spelling,
    general.graphs,
    general.machine,
    general.deterministic,
    general.attention,
    general.data_parallel,
    models.experts,
    general.pipeline,
    models.speculative,
    general.cache,
    general.checks,
    general.shown,
)
"""In SGLang's order, which is the same in both releases."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """SGLang's answer to a command line."""

    errors: tuple[str, ...]
    """Empty: accepted. Otherwise SGLang ends before it loads the model; the first is its reason."""
    fields: Mapping[str, Any]
    """Fields of ServerArgs after resolution; of a refused command line as far as SGLang came."""
    rewrites: tuple[Rewrite, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether SGLang would go on to load the model."""
        return not self.errors


def judge(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    version: str,
    model: Mapping[str, Any] | None = None,
    host: Host | None = None,
    read: Callable[[str], str] | None = None,
) -> Judgement:
    """SGLang's answer to these arguments (`--model-path` and the port may be left out).

    model: contents of the checkpoint's `config.json`; without it a dense model without MLA is assumed. host: what
    SGLang takes from the machine, by default that of an H100 or H200 (`--device cpu`: a CPU). read: gives the text of
    a `--config` file.
    """
    spec = table(version)
    parsed = parse(argv, version=version, read=read)
    warnings = [*parsed.warnings, *([spec.note] if spec.note else [])]
    fields = dict(parsed.values) | {"cuda_graph_config": graph_asked(parsed, version)}
    if parsed.errors:
        return Judgement(parsed.errors, fields, (), tuple(warnings))
    host = host or (CPU if parsed.values["device"] == "cpu" else Host())
    state = Resolution(parsed, spec.version, env, model or {}, host, fields)
    try:
        for step in STEPS:
            step(state)
    except Refused as refused:
        return Judgement((str(refused),), state.fields, tuple(state.rewrites), tuple(warnings))
    return Judgement((), state.fields, tuple(state.rewrites), (*warnings, *state.notes))
