"""`args.effective`: the effective arguments are what the operator thinks.

A note may claim that a feature is on or off. Only claims in plain words are read ("CP is on", "without CUDA graphs");
what a note merely mentions is no claim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rltop.checks.facts import context_parallel
from rltop.checks.found import Document
from rltop.checks.observe import Args, Observations, Where
from rltop.checks.phrase import missing, of_flags, of_place
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ID = "args.effective"


@dataclass(frozen=True, slots=True)
class _Feature:
    """Something that a note may call on or off."""

    name: str
    said: re.Pattern[str]
    state: Callable[[Observations], bool | int | None]
    """On or off, or a size; None where the evidence does not say."""
    flags: tuple[str, ...]
    on: str
    """What switches it on."""
    off: str


def _server(obs: Observations, *names: str) -> object | None:
    """A setting as the running server reports it."""
    for document in obs.documents:
        if document.kind == "server_info":
            for name in names:
                if name in document.fields:
                    return document.fields[name]
    return None


def _colocate(obs: Observations) -> bool | None:
    return obs.args.on("colocate") and not obs.args.on("debug_rollout_only") if obs.args.flags else None


def _graphs(obs: Observations) -> bool | None:
    told = _server(obs, "disable_cuda_graph")
    if isinstance(told, bool):
        return not told
    backend = _server(obs, "cuda_graph_backend_decode") or obs.args.text("sglang_cuda_graph_backend_decode")
    if backend:
        return str(backend) != "disabled"
    if not obs.args.flags:
        return None
    return not any(obs.args.on(f"sglang_{name}") for name in ("disable_cuda_graph", "disable_decode_cuda_graph"))


def _speculative(obs: Observations) -> bool | None:
    for document in obs.documents:
        if document.kind == "server_info" and "speculative_algorithm" in document.fields:
            return bool(document.fields["speculative_algorithm"])
    return obs.args.given("sglang_speculative_algorithm") if obs.args.flags else None


def _deepep(obs: Observations) -> bool | None:
    told = _server(obs, "moe_a2a_backend")
    engine = str(told or obs.args.text("sglang_moe_a2a_backend")).startswith("deepep")
    flags = engine or obs.args.on("moe_enable_deepep") or obs.args.on("sglang_enable_deepep_moe")
    return flags if obs.args.flags or told is not None else None


def _flag(name: str, *others: str) -> Callable[[Observations], bool | None]:
    def state(obs: Observations) -> bool | None:
        return any(obs.args.on(one) for one in (name, *others)) if obs.args.flags else None

    return state


FEATURES: tuple[_Feature, ...] = (
    _Feature(
        "context parallelism",
        re.compile(r"[Cc]ontext[- ][Pp]arallel(?:ism| size)?|\bCP\b"),
        lambda obs: context_parallel(obs) if obs.args.flags else None,
        ("context_parallel_size",),
        "--context-parallel-size <n>",
        "--context-parallel-size 1",
    ),
    _Feature(
        "colocation",
        re.compile(r"co-?locat\w*", re.I),
        _colocate,
        ("colocate", "debug_rollout_only"),
        "--colocate",
        "remove --colocate",
    ),
    _Feature(
        "the CUDA graph",
        re.compile(r"cuda[- _]?graphs?", re.I),
        _graphs,
        ("sglang_disable_cuda_graph", "sglang_cuda_graph_backend_decode", "sglang_disable_decode_cuda_graph"),
        "remove --sglang-disable-cuda-graph",
        "--sglang-disable-cuda-graph",
    ),
    _Feature(
        "speculative decoding",
        re.compile(r"[Ss]peculat\w*(?: decoding)?|\bEAGLE3?\b|\bMTP\b|\bspec decod\w*"),
        _speculative,
        ("sglang_speculative_algorithm",),
        "--sglang-speculative-algorithm EAGLE",
        "remove every --sglang-speculative-* flag",
    ),
    _Feature(
        "DeepEP",
        re.compile(r"deep-?ep", re.I),
        _deepep,
        ("moe_enable_deepep", "sglang_moe_a2a_backend", "sglang_enable_deepep_moe"),
        "--moe-enable-deepep (trainer), --sglang-moe-a2a-backend deepep (engine)",
        "remove --moe-enable-deepep and --sglang-moe-a2a-backend",
    ),
    _Feature(
        "the dynamic batch size",
        re.compile(r"dynamic[- ]batch\w*(?:[- ]size)?", re.I),
        _flag("use_dynamic_batch_size"),
        ("use_dynamic_batch_size",),
        "--use-dynamic-batch-size",
        "remove --use-dynamic-batch-size",
    ),
    _Feature(
        "routing replay",
        re.compile(r"rout(?:ing|er)[- ]replay|\bR3\b", re.I),
        _flag("use_rollout_routing_replay", "use_routing_replay"),
        ("use_rollout_routing_replay", "use_routing_replay"),
        "--use-rollout-routing-replay",
        "remove --use-rollout-routing-replay",
    ),
)
_OFF = re.compile(
    r"\b(?:off|disabled?|without|no|not|never|isn'?t|aren'?t|turned off|switched off|removed?|unset|drop(?:ped)?)\b",
    re.I,
)
_ON = re.compile(
    r"\b(?:on|enabled?|with|using|uses?|used|we run|runs?|running|set|active|activated|turned on|switched on|added|"
    r"have|has)\b|[=: ]\s*\d+",
    re.I,
)
_SIZE = re.compile(r"^\W*(?:is|=|:|of|size|to|set)?(?:\W+(?:is|=|of|size|to|set))*\W*(?P<size>\d+)\b", re.I)
_UNSURE = re.compile(r"\?|\b(?:maybe|perhaps|should we|try|tried|could|would|might|want|plan|if)\b", re.I)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per claim that the arguments contradict and per flag that was given twice."""
    notes = [document for document in obs.documents if document.kind == "note"]
    if not obs.args.flags and not notes:
        return [Verdict(ID, "skip", cause=missing(obs, "the arguments"))]
    found = [verdict for note in notes for verdict in _claims(obs, note)]
    found += [_repeated(obs.args, name, values) for name, values in sorted(obs.args.repeats.items())]
    if found:
        return found
    if not obs.args.flags:
        return [Verdict(ID, "skip", cause=missing(obs, "the arguments that the notes speak of"))]
    said = "and the notes claim nothing else" if notes else "and no note says otherwise"
    return [Verdict(ID, "pass", cause=f"No flag is given twice with different values {said}.")]


def _repeated(args: Args, name: str, values: Sequence[object]) -> Verdict:
    flag = name if "." in name else "--" + name.replace("_", "-")
    given = ", ".join(str(value) for value in values)
    cause = f"{flag} is given {len(values)} times ({given}); the last one, {args.flags.get(name)}, is in effect."
    return Verdict(
        ID,
        "info",
        value={"flag": flag, "given": [str(value) for value in values], "effective": args.flags.get(name)},
        evidence=of_flags(args, name),
        cause=cause,
        advice=(f"give {flag} once",),
    )


def _claims(obs: Observations, note: Document) -> list[Verdict]:
    found = []
    for line, text in enumerate(note.text.splitlines(), 1):
        for sentence in re.split(r"[.;,!]\s|\bbut\b|\band\b", text):
            if _UNSURE.search(sentence):
                continue
            for feature in FEATURES:
                claim = _claim(sentence, feature)
                state = feature.state(obs)
                if claim is None or state is None or _agree(claim, state):
                    continue
                found.append(_contradicted(obs, feature, claim, state, Where(note.source, line, text.strip())))
    return found


def _claim(sentence: str, feature: _Feature) -> bool | int | None:
    """What the sentence says about the feature: on, off, a size, or nothing."""
    named = list(feature.said.finditer(sentence))
    if not named:
        return None
    said = named[-1]  # "context parallel (CP=8)": the size stands after the last name
    size = _SIZE.match(sentence[said.end() :])
    if size and feature.name == "context parallelism":
        return int(size["size"])
    rest = sentence[: said.start()] + " " + sentence[said.end() :]
    if _OFF.search(rest):
        return False
    return True if _ON.search(rest) else None


def _agree(claim: bool | int, state: bool | int) -> bool:
    if isinstance(claim, bool):
        return claim == (state if isinstance(state, bool) else state > 1)
    return claim == state


def _contradicted(obs: Observations, feature: _Feature, claim: bool | int, state: bool | int, where: Where) -> Verdict:
    claimed = ("on" if claim else "off") if isinstance(claim, bool) else str(claim)
    effective = ("on" if state else "off") if isinstance(state, bool) else str(state)
    flag = "--" + feature.flags[0].replace("_", "-")
    cause = f"A note claims that {feature.name} is {claimed}; the effective setting ({flag}) is {effective}."
    wanted = claim if isinstance(claim, bool) else claim > 1
    return Verdict(
        ID,
        "warn",
        value={"claim": f"{feature.name} {claimed}", "flag": flag, "effective": state},
        threshold=claim,
        evidence=(of_place(where), *of_flags(obs.args, *feature.flags)),
        cause=cause,
        advice=(feature.on if wanted else feature.off,),
    )
