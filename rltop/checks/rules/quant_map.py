"""`quant.map` and `quant.bad-scale`: do trainer and engine quantise the same tensors, and are the scales numbers?

Two readings of one ignore list. slime's trainer applies it to tensor names (`model.layers.1.mlp.gate.weight`), plain
rules as prefixes; engines and converters apply it to module names (`model.layers.1.mlp.gate`), plain rules by equality.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rltop.checks.found import HfCheckpoint
from rltop.checks.names import is_embedding, is_flat, is_router, some, text_config
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "quant.map"
SCALE = "quant.bad-scale"
MOST_LISTED = 50
MOST_PATTERN = 400
_NESTED = re.compile(r"\([^()]*[*+{][^()]*\)[*+{]")
"""A repeated group with a repetition inside may take exponential time; such a rule is not run."""
_CAST = re.compile(r"(?:^|\.)(?:self_attn|self_attention|mlp|experts|shared_experts?|block_sparse_moe)\.")
"""Modules that every trainer version casts to FP8 (slime's `quantizer_fp8.py`)."""
_DTYPE = re.compile(r"downcast|dtype|float8", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RuleList:
    """One ignore list."""

    name: str
    rules: tuple[str, ...]
    source: str
    line: int | None = None


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per ignore list, and one per FP8 checkpoint."""
    names = _names(obs)
    found: list[Verdict] = []
    quantised = False
    for one in obs.checkpoints:
        config = quantisation(one)
        method = str(config.get("quant_method", "")) if config else ""
        quantised = quantised or bool(config)
        if config and "ignore" in config and method == "compressed-tensors":
            tensors = tensors_of(one) or names
            lists = RuleList("ignore", _strings(config["ignore"]), _inside(one, "config.json"))
            found += [_judge(lists, tensors)] if tensors else []
        elif method == "fp8" and (verdict := _fp8(obs, one)):
            found.append(verdict)
    lists_of_files = _lists(obs)
    if names:
        found += [_judge(one, names) for one in lists_of_files]
    if found:
        return found
    if quantised or lists_of_files:
        return [Verdict(ID, "skip", cause=missing(obs, "the list of tensor names that the rules apply to"))]
    return [Verdict(ID, "skip", cause=missing(obs, "a quantised checkpoint or an ignore list"))]


def quantisation(one: HfCheckpoint) -> Mapping[str, object] | None:
    """The quantisation part of a checkpoint's config."""
    for config in (one.config or {}, text_config(one.config)):
        for key in ("quantization_config", "compression_config"):
            inner = config.get(key)
            if isinstance(inner, dict):
                return inner
    return None


def _strings(value: object) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def tensors_of(one: HfCheckpoint) -> dict[str, int | None]:
    """Tensor -> dimensions (None: unknown)."""
    found: dict[str, int | None] = dict.fromkeys(one.index or {})
    found.update({tensor.name: len(tensor.shape) for tensor in one.tensors})
    return found


def _names(obs: Observations) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for document in obs.documents:
        if document.kind == "tensor_names":
            for value in (document.fields, *document.fields.values()):
                found |= _named(value)
    for one in obs.checkpoints:
        found |= tensors_of(one)
    return found


def _named(value: object) -> dict[str, int | None]:
    if isinstance(value, list):
        found: dict[str, int | None] = {one: None for one in value if isinstance(one, str)}
        for one in value:
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                shape = one.get("shape")
                found[one["name"]] = len(shape) if isinstance(shape, list) else None
        return found
    if isinstance(value, Mapping):
        shapes = {key: one.get("shape") if isinstance(one, dict) else one for key, one in value.items()}
        return {
            key: len(shape)
            for key, shape in shapes.items()
            if isinstance(shape, list) and all(isinstance(size, int) for size in shape) and "." in key
        }
    return {}


def _lists(obs: Observations) -> list[RuleList]:
    found = []
    for document in obs.documents:
        if document.kind != "ignore_rules":
            continue
        for key, value in document.fields.items():
            named = {key: value}
            if isinstance(value, dict):
                inner = value.get("ignore", value.get("rules"))
                named = {key: inner} if inner is not None else value
            for name, listed in named.items():
                if rules := _strings(listed):
                    found.append(RuleList(name, rules, document.source, document.lines.get(name)))
    return found


# -- compressed-tensors


def matches(rule: str, name: str) -> bool:
    """`re:P` fits from the start of the name on. A rule that is no pattern, or a dangerous one, fits nothing."""
    pattern = rule[3:]
    if len(pattern) > MOST_PATTERN or _NESTED.search(pattern):
        return False
    try:
        return re.match(pattern, name[:400]) is not None
    except (re.error, RecursionError):
        return False


def trainer_skips(rules: Sequence[str], name: str) -> bool:
    """The trainer leaves this two-dimensional `.weight` alone (slime's `quantizer_compressed_tensors.py`)."""
    return any(matches(rule, name) if rule.startswith("re:") else name.startswith(rule) for rule in rules)


def engine_skips(rules: Sequence[str], name: str) -> bool:
    """An engine or converter leaves the module of this `.weight` alone."""
    module = name.removesuffix(".weight")
    return any(matches(rule, module) if rule.startswith("re:") else module == rule for rule in rules)


def _judge(rules: RuleList, names: Mapping[str, int | None]) -> Verdict:
    weights = [
        name
        for name, dimensions in names.items()
        if name.endswith(".weight") and (dimensions is None or dimensions >= 2) and not is_flat(name)
    ]
    special = [name for name in weights if is_router(name) or is_embedding(name)]
    packed = sorted(name for name in special if not trainer_skips(rules.rules, name))
    split = sorted(
        name
        for name in weights
        if name not in packed and trainer_skips(rules.rules, name) != engine_skips(rules.rules, name)
    )
    evidence = (Evidence(rules.source, rules.line, f"{rules.name}: {list(rules.rules)}"[:200]),)
    value = {"list": rules.name, "packed": packed[:MOST_LISTED], "differ": split[:MOST_LISTED], "weights": len(weights)}
    if packed:
        return Verdict(
            ID,
            "fail",
            value=value,
            threshold={"packed": 0},
            evidence=evidence,
            cause=f"The list {rules.name!r} of {rules.source} lets the trainer pack {', '.join(packed[:MOST_LISTED])}, "
            "which is two-dimensional but no Linear of the engine: it has no packed name there, is skipped without a "
            "word, and stays zero.",
            advice=_missing_rules(packed),
        )
    if split:
        return Verdict(
            ID,
            "warn",
            value=value,
            threshold={"differ": 0},
            evidence=evidence,
            cause=f"The list {rules.name!r} of {rules.source} is read differently by trainer (tensor names, plain "
            f"rules as prefixes) and engine (module names, plain rules by equality) for {some(split, 8)}.",
            advice=_both_forms(rules.rules, split),
        )
    return Verdict(
        ID,
        "pass",
        value=value,
        evidence=evidence,
        cause=f"The list {rules.name!r} of {rules.source} says the same to trainer and engine for {len(weights)} "
        "weights.",
    )


def _missing_rules(packed: Sequence[str]) -> tuple[str, ...]:
    advice: list[str] = []
    for name in packed:
        module = name.removesuffix(".weight")
        if is_embedding(name):
            advice.append(f"add to ignore: {module}")
            continue
        tail = re.escape(".".join(module.split(".")[-2:]))
        advice.append(f"add to ignore: re:.*{tail}\\..*")
        advice.append(f"add to ignore, for the engine's module name: re:.*{tail}$")
    return (*dict.fromkeys(advice), "convert the checkpoint again with the new list")


def _both_forms(rules: Sequence[str], split: Sequence[str]) -> tuple[str, ...]:
    advice: list[str] = []
    for name in split:
        module = name.removesuffix(".weight")
        if trainer_skips(rules, name):
            fits = next((rule for rule in rules if not rule.startswith("re:") and name.startswith(rule)), "")
            if fits and fits != module:
                advice.append(f"write {fits!r} as a pattern that does not swallow {module}")
            else:
                tail = re.escape(".".join(module.split(".")[-2:]))
                advice.append(f"add to ignore, for the engine's module name: re:.*{tail}$")
        else:
            advice.append(f"let the rule for {module} fit the tensor name too: end it with (\\.weight)?$")
    return tuple(dict.fromkeys(advice))[:8]


# -- FP8


def _fp8(obs: Observations, one: HfCheckpoint) -> Verdict | None:
    names = tensors_of(one)
    scaled = [name for name in names if name.endswith((".weight_scale_inv", ".weight_scale"))]
    if not scaled:
        return None
    source = one.index_source or _inside(one, one.files[0] if one.files else "config.json")
    outside = sorted(re.sub(r"_scale(?:_inv)?$", "", name) for name in scaled if not _CAST.search(name))
    evidence = (Evidence(source, None, f"{len(scaled)} weights with a scale"),)
    if not outside:
        cause = f"All {len(scaled)} FP8 weights of {source} are of modules that the trainer casts."
        return Verdict(ID, "pass", value={"weights": len(scaled)}, evidence=evidence, cause=cause, confidence="medium")
    refused = [event for event in obs.events if event.kind == "update_refused" and _DTYPE.search(event.text)]
    named = [event for event in refused if any(_module(name) in event.text for name in outside)]
    modules = sorted({_module(name) for name in outside})
    cause = f"The checkpoint holds {some(modules)} in FP8 ({some(outside, 4)}), which not every trainer version casts: "
    cause += "it may push them in BF16, and the engine then refuses the update half-way."
    if refused:
        cause += " The engine's log shows a refusal for a data type."
    return Verdict(
        ID,
        "fail" if named else "warn",
        threshold={"tensors": 0},
        value={"modules": modules, "tensors": outside[:MOST_LISTED]},
        evidence=(*(of_event(event) for event in refused[:2]), *evidence),
        cause=cause,
        advice=(
            "a trainer version that casts these modules to FP8",
            f"or convert the checkpoint with {', '.join(modules[:4])} in BF16 (modules_to_not_convert)",
        ),
        confidence="medium",
    )


def _module(name: str) -> str:
    """`linear_attn` of `model.layers.0.linear_attn.in_proj_qkv.weight`; the module itself outside of the layers."""
    inside = re.match(r".*?layers\.\d+\.(?P<module>\w+)\.", name)
    return inside["module"] if inside else name.removesuffix(".weight")


def _inside(one: HfCheckpoint, name: str) -> str:
    return f"{one.path}/{name}" if one.path not in ("", ".") else name


# -- quant.bad-scale


def check_scales(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all checkpoints."""
    bad = [(one, scale) for one in obs.checkpoints for scale in one.bad_scales]
    read = sum(one.scales_read for one in obs.checkpoints)
    if not bad:
        if not read:
            return [Verdict(SCALE, "skip", cause=missing(obs, "a scale tensor with its values"))]
        return [Verdict(SCALE, "pass", value={"scales": read}, cause=f"{read} scale tensors are positive and finite.")]
    worst = [
        {
            "tensor": s.name,
            "bad": s.nan + s.inf + s.zero + s.negative,
            "entries": s.entries,
            "nan": s.nan,
            "inf": s.inf,
            "zero": s.zero,
            "negative": s.negative,
        }
        for _, s in bad[:MOST_LISTED]
    ]
    parts = [f"{s.name} has {_counts(s.nan, s.inf, s.zero, s.negative)} among {s.entries}" for _, s in bad]
    return [
        Verdict(
            SCALE,
            "fail",
            threshold={"bad": 0},
            value={"tensors": worst, "bad": len(bad), "scales": read},
            evidence=tuple(Evidence(_inside(one, s.file), None, parts[i]) for i, (one, s) in enumerate(bad[:6])),
            cause=f"{some(parts, 3)}: a block of zeros was divided by its own largest value, and every product with it "
            "is lost.",
            advice=("convert again with the largest value of a block clamped away from 0",),
        )
    ]


def _counts(nan: int, inf: int, zero: int, negative: int) -> str:
    named = (("NaN", nan), ("Inf", inf), ("zero", zero), ("negative", negative))
    return ", ".join(f"{count} {name}" for name, count in named if count)
