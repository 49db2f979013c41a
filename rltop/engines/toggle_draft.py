"""A change of toggles while it is made: which options go, which come, and what SGLang's arguments do not tell.

Failure policy: what cannot be is added to `Draft.refusals`; nothing raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltop.engines import toggle_table as t
from rltop.engines.flags import Parsed, strip
from rltop.engines.options import Table
from rltop.engines.pins import baseline_value
from rltop.engines.rules import Judgement, judge
from rltop.engines.rules_models import OWN_DRAFT


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change is not made."""

    toggle: str
    """"" when the arguments as they stand are at fault."""
    why: str
    do: str


@dataclass(slots=True)
class Draft:
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

    def argv(self) -> list[str]:
        """The next arguments, as far as they are made."""
        kept, _ = strip(self.parsed, self.strip)
        return [*kept, *(token for option in (*self.add, *self.pins) for token in option)]

    def refuse(self, toggle: str, why: str, do: str) -> None:
        self.refusals.append(Refusal(toggle, why, do))


def set_toggle(name: str, value: str, draft: Draft) -> None:
    draft.strip |= set(t.TOGGLES[name].fields)
    match name:
        case "cuda_graph_padding":
            _set_padding(value, draft)
        case "overlap_schedule" | "radix_cache" | "custom_all_reduce":
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


def _set_padding(value: str, draft: Draft) -> None:
    """Off is every size captured, where SGLang's own flag would take the graphs away as well: 0.5.14 and 0.5.15 look a
    graph up under another key than they keep it under and replay none (their decode lines say `cuda graph: False`;
    sgl-project/sglang PR 31273), and later ones run a batch between two sizes of a given list without a graph."""
    given = draft.parsed.values.get(t.DECODE_SIZES) if draft.parsed.is_given(t.DECODE_SIZES) else None
    if value == "on":
        draft.strip |= {t.DECODE_SIZES} if t.every_size(given) else set()
        return
    broken, replays = draft.spec.version == "0.5.14", draft.before.fields["cuda_graph_config"]["decode"]["backend"]
    option = next(iter(draft.spec.named(t.DECODE_SIZES)), None)
    shown = baseline_value(t.DECODE_SIZES, draft.baseline)
    known = given or (shown if broken and not draft.parsed.is_given("cuda_graph_config") else None)
    if replays == "disabled" or option is None or not known:
        draft.add.append(["--disable-cuda-graph-padding"])
        if broken and replays != "disabled":
            draft.warnings.append("SGLang 0.5.14 and 0.5.15 replay no decode graph at all with this flag")
        return
    most, running = max(known), baseline_value("max_running_requests", draft.baseline)
    draft.strip.add(t.DECODE_SIZES)
    sizes = range(1, min(most, running or most) + 1)
    draft.add.append([max(option.spellings, key=len), *map(str, sizes)])


def _set_core_dump(value: str, draft: Draft) -> None:
    if value == "off":
        # SGLang only sets it where it is not set: "0" holds against --crash-dump-folder as well.
        draft.env[t.CORE_DUMP] = "0"
        if "SGLANG_CUDA_COREDUMP" in draft.env:
            draft.env["SGLANG_CUDA_COREDUMP"] = "0"
        return
    for variable, default in t.CORE_DUMP_ENVIRONMENT.items():
        draft.env.setdefault(variable, default)
    draft.env[t.CORE_DUMP] = "1"


def _set_speculative(value: str, draft: Draft) -> None:
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


def _set_deepep(value: str, draft: Draft) -> None:
    if value == "off":
        # Two- and single-batch overlap are rejected without an all-to-all backend, the rest means nothing then.
        draft.strip |= {option.dest for option in draft.spec.options if option.dest.startswith("deepep_")}
        draft.strip |= {"enable_two_batch_overlap", "enable_single_batch_overlap", "speculative_moe_a2a_backend"}
        return
    draft.add.append(["--moe-a2a-backend", "deepep"])
    draft.add.append(["--deepep-mode", value])


def _set_dp_attention(value: str, draft: Draft) -> None:
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


def set_graphs(wanted: Mapping[str, str], draft: Draft) -> None:
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


def _usable(backend: str, phase: str, default: str, draft: Draft) -> str:
    """This backend, or the baseline's, or the default: whichever is one."""
    config = draft.baseline.get("cuda_graph_config") or {}
    for candidate in (backend, (config.get(phase) or {}).get("backend")):
        if candidate and candidate != "disabled":
            return str(candidate)
    return default


def late(
    wanted: Mapping[str, str],
    got: Mapping[str, str | None],
    after: Judgement,
    draft: Draft,
    model: Mapping[str, Any] | None,
) -> None:
    """What SGLang's arguments allow and its start does not, and what people should know."""
    fields, warn = after.fields, draft.warnings.append
    graphs = fields["cuda_graph_config"]
    if "launch_blocking" in wanted and wanted["launch_blocking"] == "on" and got["cuda_graph"] == "on":
        warn("launch blocking localises a fault only with CUDA graphs off: a replayed graph is one launch")
    if wanted.get("launch_blocking") == "on":
        warn("launch blocking changes the timing: a crash that stays away with it is not fixed")
    if "speculative" in wanted:
        _late_speculative(fields, draft, model)
    if wanted.get("prefill_graph") == "on":
        _late_prefill(fields, draft, model)
    if wanted.get("deepep", "off") != "off" and model is not None and not _experts(model):
        warn("the model has no experts: DeepEP has nothing to dispatch")
    saver = fields.get("enable_memory_saver") and t.is_on(draft.env.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH"))
    if wanted.keys() & {"cuda_graph", "prefill_graph"} and saver:
        for phase, name in (("decode", "cuda_graph"), ("prefill", "prefill_graph")):
            if graphs[phase]["backend"] == "breakable":
                why = "breakable graphs cannot be captured with SGLANG_MEMORY_SAVER_CUDA_GRAPH and the memory saver"
                draft.refuse(name, why, "unset SGLANG_MEMORY_SAVER_CUDA_GRAPH, or leave this graph off")


def _late_prefill(fields: Mapping[str, Any], draft: Draft, model: Mapping[str, Any] | None) -> None:
    """A prefill graph that is asked for skips SGLang's own doubts about it."""
    mine = [option for option in (*draft.add, *draft.pins) if option[0] != "--cuda-graph-backend-prefill"]
    kept, _ = strip(draft.parsed, draft.strip)
    argv = [*kept, *(token for option in mine for token in option)]
    alone = judge(argv, draft.env, version=draft.spec.version, model=model)
    doubts = [one.why for one in alone.rewrites if one.field == "prefill_graph"]
    if doubts:
        draft.warnings.append(f"SGLang would leave the prefill graph off by itself ({doubts[0]}): it is forced")
    if draft.spec.version == "0.5.14" and str(fields["speculative_algorithm"]).startswith("EAGLE"):
        draft.warnings.append("0.5.14 skips the piecewise prefill graph of an EAGLE target when it runs")


def _late_speculative(fields: Mapping[str, Any], draft: Draft, model: Mapping[str, Any] | None) -> None:
    algorithm = fields["speculative_algorithm"]
    needs_draft = algorithm in ("EAGLE", "EAGLE3", "STANDALONE") and fields["speculative_draft_model_path"] is None
    architecture = str(((model or {}).get("architectures") or [""])[0])
    if needs_draft and (algorithm == "STANDALONE" or architecture not in OWN_DRAFT):
        why = f"{algorithm} needs a draft model, and {architecture or 'not every model'} has none of its own"
        do = f"name it: speculative={algorithm}:/path/to/the/draft"
        if model is not None:
            draft.refuse("speculative", why, do)
        else:
            draft.warnings.append(f"{why}; {do}")
    if algorithm == "NGRAM" and draft.spec.version == "0.5.14":
        draft.warnings.append("NGRAM in 0.5.14 dies on /update_weights_from_disk: push weights over the network")


def _experts(model: Mapping[str, Any]) -> bool:
    return any(model.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
