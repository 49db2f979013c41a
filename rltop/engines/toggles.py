"""From logical toggles to the arguments and the environment of an engine's next generation.

A toggle strips every spelling of its options, then adds: SGLang silently ignores a flag that a stronger one overrides.
What a toggle moves besides itself is pinned to the baseline's values, so that two generations differ in one thing; what
cannot be pinned is named as an alias. Combinations that SGLang rejects, or in which the toggle would have no effect,
are refused before anything is stopped.

Failure policy: nothing raises. A change with refusals must not be carried out; its `argv` and `env` are the old ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.engines import toggle_table as t
from rltop.engines.flags import Parsed, parse, strip
from rltop.engines.options import Table, table
from rltop.engines.rules import Judgement, judge
from rltop.engines.toggle_table import TOGGLES, read_argv

__all__ = ["TOGGLES", "Alias", "Change", "Refusal", "change", "choices", "read_argv"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change is not made."""

    toggle: str
    """"" when the arguments as they stand are at fault."""
    why: str
    do: str


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


@dataclass(slots=True)
class _Draft:
    """A change while it is made."""

    parsed: Parsed
    spec: Table
    before: Judgement
    baseline: Mapping[str, Any]
    env: dict[str, str]
    strip: set[str] = field(default_factory=set)
    add: list[list[str]] = field(default_factory=list)
    pins: list[list[str]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def refuse(self, toggle: str, why: str, do: str) -> None:
        self.refusals.append(Refusal(toggle, why, do))


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
    draft = _Draft(parsed, table(version), before, baseline or {}, dict(env))
    if parsed.errors:
        draft.refuse("", parsed.errors[0], "correct the engine's arguments: SGLang would not start with them")
        return _refused(argv, env, draft)
    now = t.read_fields(before.fields, env)
    asked = t.read_argv(argv, env, version=version)
    wanted = {}
    for name, value in changes.items():
        text = _checked(name, value, draft)
        if text is not None and not (asked.get(name) == now.get(name) == text):
            wanted[name] = text
    if draft.refusals:
        return _refused(argv, env, draft)
    for name, value in wanted.items():
        if name not in ("cuda_graph", "prefill_graph"):
            _set(name, value, draft)
    _set_graphs(wanted, draft)
    if draft.refusals:
        return _refused(argv, env, draft)
    if wanted:
        _pin(wanted, draft, version=version, model=model)
    return _finish(argv, env, wanted, draft, version=version, model=model)


def _refused(argv: Sequence[str], env: Mapping[str, str], draft: _Draft) -> Change:
    return Change(tuple(argv), dict(env), refusals=tuple(draft.refusals), warnings=tuple(draft.warnings))


def _checked(name: str, value: str, draft: _Draft) -> str | None:
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
                    return text
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


def _set(name: str, value: str, draft: _Draft) -> None:
    draft.strip |= set(t.TOGGLES[name].fields)
    match name:
        case "cuda_graph_padding" | "overlap_schedule" | "radix_cache" | "custom_all_reduce":
            if value == "off":
                draft.add.append([f"--disable-{name.replace('_', '-')}"])
        case "hicache":
            if value == "on":
                draft.add.append(["--enable-hierarchical-cache"])
        case "chunked_prefill":
            draft.add.append(["--chunked-prefill-size", "-1" if value == "off" else value])
        case "attention_backend" | "mem_fraction_static":
            draft.add.append([f"--{name.replace('_', '-')}", value])
        case "speculative":
            _set_speculative(value, draft)
        case "deepep":
            _set_deepep(value, draft)
        case "dp_attention":
            _set_dp_attention(value, draft)
        case "launch_blocking":
            # "0", not absent: what the launcher inherited must not show through.
            draft.env[t.LAUNCH_BLOCKING] = "1" if value == "on" else "0"
        case "core_dump":
            _set_core_dump(value, draft)


def _set_core_dump(value: str, draft: _Draft) -> None:
    if value == "off":
        # SGLang only sets it where it is not set: "0" holds against --crash-dump-folder as well.
        draft.env[t.CORE_DUMP] = "0"
        if "SGLANG_CUDA_COREDUMP" in draft.env:
            draft.env["SGLANG_CUDA_COREDUMP"] = "0"
        return
    for variable, default in t.CORE_DUMP_ENVIRONMENT.items():
        draft.env.setdefault(variable, default)
    draft.env[t.CORE_DUMP] = "1"


def _set_speculative(value: str, draft: _Draft) -> None:
    every = {option.dest for option in draft.spec.options if option.dest.startswith("speculative_")}
    draft.strip |= every
    algorithm, _, path = value.partition(":")
    if algorithm == "off":
        return
    values, base = draft.parsed.values, draft.baseline
    same = values if values["speculative_algorithm"] == algorithm else base
    known = same.get("speculative_algorithm") == algorithm
    path = path or str((same.get("speculative_draft_model_path") or "") if known else "")
    draft.add.append(["--speculative-algorithm", algorithm])
    if path:
        draft.add.append(["--speculative-draft-model-path", path])
    for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
        if known and same.get(name) is not None:
            draft.add.append([f"--{name.replace('_', '-')}", str(same[name])])


def _set_deepep(value: str, draft: _Draft) -> None:
    if value == "off":
        # Two- and single-batch overlap are rejected without an all-to-all backend, the rest means nothing then.
        draft.strip |= {option.dest for option in draft.spec.options if option.dest.startswith("deepep_")}
        draft.strip |= {"enable_two_batch_overlap", "enable_single_batch_overlap", "speculative_moe_a2a_backend"}
        return
    draft.add.append(["--moe-a2a-backend", "deepep"])
    draft.add.append(["--deepep-mode", value])


def _set_dp_attention(value: str, draft: _Draft) -> None:
    if value == "off":
        return
    values = draft.parsed.values
    size = next(
        (int(n) for n in (values.get("dp_size"), draft.baseline.get("dp_size")) if n and n > 1), values["tp_size"]
    )
    if values["dp_size"] > 1 and not values.get("enable_dp_attention"):
        draft.refuse("dp_attention", f"--dp-size {size} now means {size} replicas", "start with --dp-size 1")
    elif size < 2:
        draft.refuse("dp_attention", "the engine has one GPU (--tp-size 1)", "give it at least two")
    elif draft.spec.has("--attn-dp-size"):
        draft.add.append(["--attn-dp-size", str(size)])
    else:
        draft.add.append(["--enable-dp-attention"])
        draft.add.append(["--dp-size", str(size)])


def _set_graphs(wanted: Mapping[str, str], draft: _Draft) -> None:
    """Both phases are written out: a backend given for a phase wins over every switch but the JSON's."""
    if not wanted.keys() & {"cuda_graph", "prefill_graph"}:
        return
    config = t.graph_asked(draft.parsed, draft.spec.version)
    draft.strip |= {*t.GRAPH_BOTH, *t.GRAPH_DECODE, *t.GRAPH_PREFILL}
    decode, prefill = (config[phase]["backend"] for phase in ("decode", "prefill"))
    both_off = decode == prefill == "disabled"
    if (asked := wanted.get("cuda_graph")) is not None:
        if asked == "off":
            draft.strip.add("debug_cuda_graph")
        decode = "disabled" if asked == "off" else _usable(decode, "decode", "full", draft)
        # The graphs go and come together, as with --disable-cuda-graph, unless the prefill graph is set by itself.
        if asked == "off":
            prefill = "disabled"
        elif both_off:
            prefill = _usable("disabled", "prefill", "", draft)
    if (asked := wanted.get("prefill_graph")) is not None:
        prefill = (
            "disabled" if asked == "off" else _usable(prefill, "prefill", t.default_prefill(draft.spec.version), draft)
        )
    draft.add.append(["--cuda-graph-backend-decode", decode])
    if prefill:
        draft.add.append(["--cuda-graph-backend-prefill", prefill])
    rest = {
        phase: {key: value for key, value in settings.items() if key != "backend"}
        for phase, settings in (draft.parsed.values["cuda_graph_config"] or {}).items()
    }
    if any(rest.values()):
        draft.add.append(["--cuda-graph-config", json.dumps(rest)])


def _usable(backend: str, phase: str, default: str, draft: _Draft) -> str:
    """This backend, or the baseline's, or the default: whichever is one."""
    config = draft.baseline.get("cuda_graph_config") or {}
    for candidate in (backend, (config.get(phase) or {}).get("backend")):
        if candidate and candidate != "disabled":
            return str(candidate)
    return default


def _pin(wanted: Mapping[str, str], draft: _Draft, *, version: str, model: Mapping[str, Any] | None) -> None:
    """Options that keep the rest as it was."""


def _finish(
    argv: Sequence[str],
    env: Mapping[str, str],
    wanted: Mapping[str, str],
    draft: _Draft,
    *,
    version: str,
    model: Mapping[str, Any] | None,
) -> Change:
    kept, removed = strip(draft.parsed, draft.strip)
    added = [*draft.add, *draft.pins]
    new = [*kept, *(token for option in added for token in option)]
    after = judge(new, draft.env, version=version, model=model)
    if not after.accepted and wanted:
        why = after.errors[0]
        draft.refuse(next(iter(wanted)), f"SGLang {draft.spec.version} rejects it: {why}", "change what it names first")
    got = t.read_fields(after.fields, draft.env)
    before = t.read_fields(draft.before.fields, env)
    reasons = {rewrite.field: rewrite.why for rewrite in after.rewrites}
    for name, value in wanted.items():
        target = value.partition(":")[0]
        if after.accepted and got[name] is not None and got[name] != target:
            why = f"SGLang {draft.spec.version} would make it {got[name]!r}: {_reason(name, reasons)}"
            draft.refuse(name, why, "change what causes that first")
    if draft.refusals:
        return _refused(argv, env, draft)
    aliases = {
        name: Alias(value, _reason(name, reasons))
        for name, value in got.items()
        if name not in wanted and value is not None and value != before[name]
    }
    if draft.spec.note:
        draft.warnings.append(draft.spec.note)
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


def _reason(toggle: str, reasons: Mapping[str, str]) -> str:
    names = {"cuda_graph": "decode_graph"}
    fields = {names.get(toggle, toggle), *t.TOGGLES[toggle].fields}
    return "; ".join(why for name, why in reasons.items() if name in fields) or "it goes with the change"


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
