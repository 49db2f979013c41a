"""`ckpt.shards` and `ckpt.layers`: is a Hugging Face checkpoint whole?

The index and the headers are two witnesses. What the headers on disk hold decides; an index that is consistent in
itself excuses no hole, and a stale one does not make a whole checkpoint broken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rltop.checks.found import HfCheckpoint
from rltop.checks.names import expert_of, integer, layer_of, layers_of, parameter, ranges, some, text_config
from rltop.checks.observe import Observations, Where
from rltop.checks.phrase import count, missing, of_place
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

SHARDS = "ckpt.shards"
LAYERS = "ckpt.layers"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<end>\.[a-z.]+)$")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
MOST_LISTED = 50


def check_shards(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per checkpoint that has an index or weight files."""
    found = [verdict for one in obs.checkpoints if (verdict := _shards(one))]
    return found or [Verdict(SHARDS, "skip", cause=missing(obs, "a Hugging Face directory with weights or an index"))]


def _shards(one: HfCheckpoint) -> Verdict | None:
    if not one.files and one.index is None:
        return None
    name = one.path or "the checkpoint"
    if not one.files:
        cause = f"{name} has an index and not a single shard: it was copied without its weights."
        return Verdict(SHARDS, "skip", cause=cause)
    index = one.index or {}
    named = set(index.values())
    absent = sorted(named - set(one.files))
    readable = {tensor.name for tensor in one.tensors if tensor.file not in one.broken}
    whole = all(file.endswith(".safetensors") for file in one.files)
    lost = [
        key for key, file in index.items() if key not in readable and (file in absent or file in one.broken or whole)
    ]
    if lost or (one.broken and not index):
        return _lost(one, name, lost, absent)
    gaps = _gaps(one.files)
    if gaps and not index:
        return _lost(one, name, [], gaps)
    if absent or gaps:
        return _stale(one, name, absent, gaps)
    cause = f"Every tensor of the index is in the {count(len(one.files), 'weight file')} of {name}."
    if not index:
        files = count(len(one.files), "weight file")
        cause = f"The headers of the {files} of {name} read; there is no index to compare with."
    return Verdict(SHARDS, "pass", value={"files": len(one.files), "tensors": len(readable)}, cause=cause)


def _gaps(files: tuple[str, ...]) -> list[str]:
    """Files that the numbers in the names promise and that are not there."""
    promised: set[str] = set()
    for file in files:
        if found := _NUMBERED.match(file):
            width, count = len(found["count"]), min(int(found["count"]), 100_000)
            promised |= {
                f"{found['stem']}-{i:0{width}d}-of-{found['count']}{found['end']}" for i in range(1, count + 1)
            }
    return sorted(promised - set(files))


def _lost(one: HfCheckpoint, name: str, lost: list[str], absent: list[str]) -> Verdict:
    files = sorted({(one.index or {})[key] for key in lost} | set(one.broken) | (set(absent) if not lost else set()))
    layers = layers_of(lost)
    outside = [file for file in files if file in one.index_outside]
    why = []
    if gone := [file for file in files if file in absent and file not in outside]:
        why.append(f"{some(gone)} {'is' if len(gone) == 1 else 'are'} not there")
    if outside:
        why.append(f"{some(outside)} lies outside the directory and was not opened")
    why += [f"{file} can not be read ({reason})" for file, reason in list(one.broken.items())[:3]]
    why = why or [f"the headers of {some(files)} lack them"]
    what = f"{len(lost)} tensors are nowhere on disk" if lost else "tensors are missing"
    if layers:
        what += f", those of layers {ranges(layers)} among them"
    return Verdict(
        SHARDS,
        "fail",
        threshold={"missing": 0},
        value={"files": files[:MOST_LISTED], "layers": list(layers)[:MOST_LISTED], "tensors": len(lost)},
        evidence=_at(one, files),
        cause=f"{name}: {'; '.join(why)}, so {what}: an engine would start with uninitialised weights.",
        advice=(f"download or convert again: {some(files, 3)}",),
    )


def _stale(one: HfCheckpoint, name: str, absent: list[str], gaps: list[str]) -> Verdict:
    what = f"the index names {some(absent, 3)}" if absent else f"the names of the files promise {some(gaps, 3)}"
    return Verdict(
        SHARDS,
        "warn",
        threshold={"absent": 0},
        value={"absent": (absent or gaps)[:MOST_LISTED], "tensors": len(one.index or {})},
        evidence=_at(one, absent),
        cause=f"{name} has a stale index: {what}, which the folder lacks, but all "
        f"{len(one.index or {})} indexed tensors are on disk ({count(len(one.files), 'file')}), so the tensors are "
        "complete.",
        advice=("regenerate model.safetensors.index.json from the headers of the files",),
    )


def _at(one: HfCheckpoint, files: Iterable[str]) -> tuple[Evidence, ...]:
    listed = [
        of_place(Where(one.index_source, one.index_lines.get(file), f"the index names {file}"))
        for file in files
        if file in one.index_lines
    ]
    listed += [Evidence(_inside(one, file), None, one.broken[file]) for file in files if file in one.broken]
    return tuple(listed[:6]) or (Evidence(one.index_source or one.path or ".", None, ", ".join(files)[:200]),)


def _inside(one: HfCheckpoint, name: str) -> str:
    return f"{one.path}/{name}" if one.path not in ("", ".") else name


# -- ckpt.layers


def check_layers(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per checkpoint whose config says how many layers there should be."""
    found = [verdict for one in obs.checkpoints if (verdict := _layers(one))]
    what = "a checkpoint with num_hidden_layers and tensor names"
    return found or [Verdict(LAYERS, "skip", cause=missing(obs, what))]


def _layers(one: HfCheckpoint) -> Verdict | None:
    names = [tensor.name for tensor in one.tensors if tensor.file not in one.broken] or list(one.index or {})
    config = text_config(one.config)
    count = integer(config, "num_hidden_layers", "n_layer", "num_layers")
    if not names or not count or count > 100_000:
        return None
    by_layer, prefix = _by_layer(names)
    if not by_layer:
        return None
    holes = _missing_layers(by_layer, count)
    holes += _missing_experts(by_layer, config, count)
    holes += _missing_keys(by_layer, config, count)
    holes += _missing_ends(names, config, prefix)
    where = one.path or "the checkpoint"
    source = _inside(one, one.files[0]) if one.files else one.index_source
    if not holes:
        layers = [layer for layer in by_layer if layer < count]
        cause = f"{where} has all {count} layers ({ranges(layers)}), and layers of one kind have the same tensors."
        return Verdict(LAYERS, "pass", value={"layers": count, "tensors": len(names)}, cause=cause)
    return Verdict(
        LAYERS,
        "fail",
        threshold={"missing": 0},
        value={
            "layers": count,
            "found": ranges(by_layer),
            "missing": holes[:MOST_LISTED],
            "missing_layers": [layer for layer in range(count) if layer not in by_layer][:MOST_LISTED],
        },
        evidence=(
            Evidence(_inside(one, "config.json"), None, f"num_hidden_layers: {count}"),
            Evidence(source, None, f"{len(names)} tensors, layers {ranges(by_layer)}"),
        ),
        cause=f"{where} does not cover its model of {count} layers: {some(holes, 4)}.",
        advice=("convert the checkpoint again", "compare the number of tensors of the first MoE layer on both sides"),
    )


def _by_layer(names: list[str]) -> tuple[dict[int, set[str]], str]:
    """Layer -> names inside it, of the prefix that most layer tensors have."""
    found = [one for name in names if (one := layer_of(name))]
    if not found:
        return {}, ""
    prefix = Counter(one.prefix for one in found).most_common(1)[0][0]
    layers: dict[int, set[str]] = {}
    for one in found:
        if one.prefix == prefix:
            layers.setdefault(one.layer, set()).add(parameter(one.rest))
    return layers, prefix


def _missing_layers(by_layer: dict[int, set[str]], count: int) -> list[str]:
    gone = sorted(set(range(count)) - set(by_layer))
    return [f"layers {ranges(gone)} have no tensor at all"] if gone else []


def _missing_experts(by_layer: dict[int, set[str]], config: Mapping[str, object], count: int) -> list[str]:
    have: dict[int, set[int]] = {}
    for layer, rests in by_layer.items():
        numbers = {found[0] for rest in rests if (found := expert_of(rest))}
        if numbers and layer < count:
            have[layer] = numbers
    if not have:
        return []
    expected = integer(config, *_EXPERTS) or 1 + max(max(numbers) for numbers in have.values())
    holes = []
    for layer, numbers in sorted(have.items()):
        if gone := sorted(set(range(min(expected, 100_000))) - numbers):
            holes.append(f"layer {layer} lacks experts {ranges(gone)}")
    return holes


def _missing_keys(by_layer: dict[int, set[str]], config: Mapping[str, object], count: int) -> list[str]:
    """Names that most layers of a kind have and a layer of that kind lacks."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    shapes: dict[int, set[str]] = {}
    holes: list[str] = []
    for layer, rests in by_layer.items():
        if layer >= count:  # multi-token prediction
            continue
        shapes[layer] = {found[1] if (found := expert_of(rest)) else rest for rest in rests}
        kinds.setdefault(_kind(layer, shapes[layer], config), []).append(layer)
        holes += _uneven_experts(layer, rests)
    for members in kinds.values():
        seen = Counter(key for layer in members for key in shapes[layer])
        usual = {key for key, times in seen.items() if 2 * times > len(members) or len(members) == 2}
        for layer in sorted(members):
            if gone := sorted(usual - shapes[layer]):
                holes.append(f"layer {layer} lacks {some(gone, 3)}")
    return holes


def _uneven_experts(layer: int, rests: set[str]) -> list[str]:
    parts: dict[str, set[int]] = {}
    for rest in rests:
        if found := expert_of(rest):
            parts.setdefault(found[1], set()).add(found[0])
    everyone = set().union(*parts.values()) if parts else set()
    return [
        f"layer {layer} lacks {name.replace('.*.', '.N.', 1)} of experts {ranges(everyone - numbers)}"
        for name, numbers in sorted(parts.items())
        if everyone - numbers
    ]


def _kind(layer: int, names: set[str], config: Mapping[str, object]) -> tuple[object, ...]:
    """What makes two layers comparable: attention type and whether it is MoE, by the config, else by what is seen."""
    types = config.get("layer_types")
    attention: object = types[layer] if isinstance(types, list) and layer < len(types) else None
    mixers = ("linear_attn", "mamba", "mixer", "ssm", "cross_attn", "conv", "self_attn", "attention", "attn")
    if attention is None:
        attention = tuple(word for word in mixers if any(name.startswith(f"{word}.") for name in names))
    dense = integer(config, "first_k_dense_replace", "moe_layer_start_index")
    if dense is not None:
        return attention, layer >= dense and layer % (integer(config, "moe_layer_freq") or 1) == 0
    return attention, any(".experts." in f".{name}" or "router" in name for name in names)


def _missing_ends(names: list[str], config: Mapping[str, object], prefix: str) -> list[str]:
    outside = [name for name in names if layer_of(name) is None]
    holes = []
    if not any(re.search(r"embed|wte", name) for name in outside):
        holes.append(f"no token embedding ({prefix}embed_tokens.weight or its like)")
    if not any(re.search(r"norm|ln_f", name) for name in outside):
        holes.append(f"no final norm ({prefix}norm.weight or its like)")
    architectures = config.get("architectures")
    causal = not isinstance(architectures, list) or any(
        re.search(r"CausalLM|ConditionalGeneration|LMHead", str(one)) for one in architectures
    )
    untied = config.get("tie_word_embeddings") is False
    if untied and causal and not any(re.search(r"lm_head|(?:^|\.)output\.|embed_out", name) for name in outside):
        holes.append("no output head (lm_head.weight), though tie_word_embeddings is false")
    return holes
