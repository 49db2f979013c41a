"""From logical toggles to the arguments and the environment of an engine's next generation.

A toggle strips every spelling of its options, then adds: SGLang silently ignores a flag that a stronger one overrides.
What a toggle moves besides itself is pinned to the baseline's values, so that two generations differ in one thing; what
cannot be pinned is named as an alias. Combinations that SGLang rejects, or in which the toggle would have no effect,
are refused before anything is stopped.

Failure policy: nothing raises. A change with refusals must not be carried out; its `argv` and `env` are the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.engines import toggle_table as t
from rltop.engines.flags import Parsed, parse, strip
from rltop.engines.options import table
from rltop.engines.pins import pins
from rltop.engines.rules import Judgement, judge
from rltop.engines.toggle_draft import Draft, Refusal, late, set_graphs, set_toggle
from rltop.engines.toggle_table import TOGGLES

__all__ = ["TOGGLES", "Alias", "Change", "Refusal", "change", "choices", "read_argv"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A toggle that moves although nobody asked for it."""

    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """The next generation's command line, and how it differs from this one's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    removed: tuple[str, ...] = ()
    """Tokens taken away, each option with its values as one string."""
    added: tuple[str, ...] = ()
    env_set: Mapping[str, str] = field(default_factory=dict)
    env_unset: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    """Options added only to keep everything else as it is; they are in `added` too."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        """Nothing speaks against it."""
        return not self.refusals


def change(
    argv: Sequence[str],
    env: Mapping[str, str],
    changes: Mapping[str, str],
    *,
    version: str,
    baseline: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> Change:
    """Arguments and environment in which `changes` hold and nothing else moves.

    argv, env: of the generation that runs, without `--model-path`, host and port. baseline: `/server_info` of the
    generation to compare with, usually the first; without it less can be pinned. model: contents of config.json.
    """
    parsed = parse(argv, version=version)
    before = judge(argv, env, version=version, model=model)
    draft = Draft(parsed, table(version), before, baseline or {}, dict(env))
    if parsed.errors:
        draft.refuse("", parsed.errors[0], "correct the engine's arguments: SGLang would not start with them")
        return _refused(argv, env, draft)
    now = t.read_fields(before.fields, env)
    asked = read_argv(argv, env, version=version, model=model)
    wanted, held = {}, {}
    for name, value in changes.items():
        text = _checked(name, value, draft)
        if text is not None and asked.get(name) == now.get(name) == _short(name, text, parsed):
            held[name] = text
        elif text is not None:
            wanted[name] = text
    if draft.refusals:
        return _refused(argv, env, draft)
    for name, value in wanted.items():
        if name not in ("cuda_graph", "prefill_graph"):
            set_toggle(name, value, draft)
    set_graphs(wanted, draft)
    if draft.refusals:
        return _refused(argv, env, draft)
    if wanted:
        _pin(wanted, draft, model=model)
    return _finish(argv, env, wanted, held, draft, model=model)


def _short(name: str, value: str, parsed: Parsed) -> str:
    """The value without a draft model that is named already."""
    algorithm, _, path = value.partition(":")
    known = name == "speculative" and path == parsed.values["speculative_draft_model_path"]
    return resolved_name(name, algorithm) if known or (name == "speculative" and not path) else value


def _refused(argv: Sequence[str], env: Mapping[str, str], draft: Draft) -> Change:
    return Change(tuple(argv), dict(env), refusals=tuple(draft.refusals), warnings=tuple(draft.warnings))


def _checked(name: str, value: str, draft: Draft) -> str | None:
    """The value in its usual spelling, or None after a refusal."""
    toggle = t.TOGGLES.get(name)
    if toggle is None:
        draft.refuse(name, f"there is no toggle {name!r}", f"use one of: {', '.join(t.TOGGLES)}")
        return None
    text = value.strip()
    match name:
        case "speculative":
            algorithm, _, path = text.partition(":")
            known = {choice.lower(): choice for choice in toggle.choices}
            if algorithm.lower() in known:
                return known[algorithm.lower()] + (f":{path}" if path else "")
        case "chunked_prefill" if text.isdecimal() and int(text) > 0:
            return text
        case "mem_fraction_static":
            try:
                if 0 < float(text) < 1:
                    return str(float(text))
            except ValueError:
                pass
        case "attention_backend":
            options = draft.spec.named("attention_backend")[0].choices or ()
            if text in options:
                return text
            draft.refuse(
                name, f"SGLang {draft.spec.version} has no {text!r}", f"use one of: {', '.join(map(str, options))}"
            )
            return None
    if name != "speculative" and text.lower() in toggle.choices:
        return text.lower()
    usable = ", ".join((*toggle.choices, *([toggle.value] if toggle.value else [])))
    draft.refuse(name, f"it cannot be {value!r}", f"use one of: {usable}")
    return None


def _pin(wanted: Mapping[str, str], draft: Draft, *, model: Mapping[str, Any] | None) -> None:
    """Options that keep the rest as it was."""
    mine = {option[0] for option in draft.add}
    draft.pins += [one for one in pins(wanted, draft.parsed, draft.spec, draft.baseline) if one[0] not in mine]
    if not wanted.keys() & {"deepep", "dp_attention", "hicache"} or "prefill_graph" in wanted or "cuda_graph" in wanted:
        return
    if draft.parsed.is_given(*t.GRAPH_BOTH, *t.GRAPH_PREFILL):
        return
    # The prefill graph comes and goes by itself with these. What SGLang takes away cannot be kept, but what it would
    # give can be declined.
    after = judge(draft.argv(), draft.env, version=draft.spec.version, model=model)
    base = (draft.baseline.get("cuda_graph_config") or {}).get("prefill") or {}
    before = base.get("backend") or draft.before.fields["cuda_graph_config"]["prefill"]["backend"]
    now = after.fields["cuda_graph_config"]["prefill"]["backend"]
    if after.accepted and before == "disabled" and now != "disabled":
        draft.pins.append(["--cuda-graph-backend-prefill", "disabled"])


def _finish(
    argv: Sequence[str],
    env: Mapping[str, str],
    wanted: Mapping[str, str],
    held: Mapping[str, str],
    draft: Draft,
    *,
    model: Mapping[str, Any] | None,
) -> Change:
    """held: toggles that were asked for and are so already; the others must not move them away."""
    _, removed = strip(draft.parsed, draft.strip)
    new = draft.argv()
    after = judge(new, draft.env, version=draft.spec.version, model=model)
    got, before = t.read_fields(after.fields, draft.env), t.read_fields(draft.before.fields, env)
    if after.accepted:
        _effective({**wanted, **held}, got, after, draft)
        late(wanted, got, after, draft, model)
    elif wanted:
        first = next(iter(wanted))
        draft.refuse(first, f"SGLang {draft.spec.version} rejects it: {after.errors[0]}", "change what it names first")
    if draft.refusals:
        return _refused(argv, env, draft)
    pinned = {option[0].removeprefix("--").replace("-", "_") for option in draft.pins}
    aliases = {
        name: Alias(value, _reason(name, after))
        for name, value in got.items()
        if name not in wanted and name not in pinned and value is not None and value != before[name]
    }
    if draft.spec.note:
        draft.warnings.append(draft.spec.note)
    draft.warnings += [note for note in after.warnings if note not in draft.before.warnings]
    added = [*draft.add, *draft.pins]
    return Change(
        tuple(new),
        draft.env,
        removed=tuple(removed),
        added=tuple(" ".join(option) for option in added),
        env_set={name: value for name, value in draft.env.items() if env.get(name) != value},
        env_unset=tuple(name for name in env if name not in draft.env),
        pins=tuple(" ".join(option) for option in draft.pins),
        aliases=aliases,
        warnings=tuple(draft.warnings),
    )


def _effective(wanted: Mapping[str, str], got: Mapping[str, str | None], after: Judgement, draft: Draft) -> None:
    """A toggle that SGLang would accept and not carry out is refused."""
    for name, value in wanted.items():
        target = resolved_name(name, value.partition(":")[0])
        if name == "chunked_prefill" and value != "off":
            continue  # DP attention divides it among its groups: that is what was asked for
        if got[name] is not None and got[name] != target and _reason(name, after) != "its new name":
            why = f"SGLang {draft.spec.version} would make it {got[name]}: {_reason(name, after)}"
            draft.refuse(name, why, "change what causes that, in the same step or first")


def resolved_name(toggle: str, value: str) -> str:
    """What SGLang calls this value once it has resolved it."""
    if toggle == "speculative" and value != "off":
        return {"NEXTN": "EAGLE"}.get(value.upper(), value.upper())
    return value


def _reason(toggle: str, after: Judgement) -> str:
    names = {"cuda_graph": "decode_graph", "speculative": "speculative_algorithm"}
    fields = {names.get(toggle, toggle), *t.TOGGLES[toggle].fields}
    if toggle == "prefill_graph":
        fields = {"prefill_graph"}
    if toggle in ("cuda_graph", "prefill_graph") and after.fields.get("device") == "cpu":
        return "SGLang captures no graphs on a CPU"
    return "; ".join(one.why for one in after.rewrites if one.field in fields) or "it goes with the change"


def read_argv(
    argv: Sequence[str], env: Mapping[str, str], *, version: str, model: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The toggles that a command line asks for; those that it does not name are as SGLang resolves them.

    What SGLang takes from the GPU (chunk, attention backend, memory fraction) is left out unless it is named. An option
    that SGLang refuses counts as not given: `judge` says so.
    """
    parsed = parse(argv, version=version)
    resolved = t.read_fields(judge(argv, env, version=version, model=model).fields, env)
    asked = t.read_fields(dict(parsed.values) | {"cuda_graph_config": t.graph_asked(parsed, version)}, env)
    result = {}
    for name, toggle in TOGGLES.items():
        given = _named(name, toggle, parsed)
        if not given and name in ("chunked_prefill", "attention_backend", "mem_fraction_static"):
            continue
        # A free value may be renamed or divided by SGLang; a switch that is named is meant as it is written.
        value = asked[name] if given and toggle.choices[:2] == t.ON_OFF else resolved[name]
        if value is not None:
            result[name] = value
    return result


def _named(name: str, toggle: t.Toggle, parsed: Parsed) -> bool:
    """Whether the command line says what this toggle should be."""
    if name in ("cuda_graph", "prefill_graph"):
        phase = "decode" if name == "cuda_graph" else "prefill"
        own = t.GRAPH_DECODE if name == "cuda_graph" else t.GRAPH_PREFILL
        return parsed.is_given("disable_cuda_graph", *own) or "backend" in (
            parsed.values["cuda_graph_config"] or {}
        ).get(phase, {})
    return parsed.is_given(*toggle.fields)


def choices(
    argv: Sequence[str], env: Mapping[str, str], *, version: str, model: Mapping[str, Any] | None = None
) -> dict[str, dict[str, str]]:
    """Toggle -> choice -> "", or the reason why it is refused now. Free values (`Toggle.value`) are not listed."""
    result: dict[str, dict[str, str]] = {}
    for name, toggle in t.TOGGLES.items():
        listed: Sequence[str] = toggle.choices
        if name == "attention_backend":
            listed = [str(choice) for choice in table(version).named(name)[0].choices or ()]
        result[name] = {}
        for choice in listed:
            made = change(argv, env, {name: choice}, version=version, model=model)
            result[name][choice] = made.refusals[0].why if made.refusals else ""
    return result
