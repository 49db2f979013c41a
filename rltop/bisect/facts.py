"""What one crash says before any restart: its kernel, its phase, what was just done.

Each fact moves the priors by likelihood factors: how much likelier this fact is if the toggle is part of the culprit
than if it is not. A kernel's name moves most: a dispatch kernel of DeepEP that reads out of bounds is hardly the fault
of the overlap schedule. No fact rules anything out, for a kernel may be handed a wrong index by somebody else. The
factors are estimates from the threads that the priors come from; they are data (`FAMILIES`, `PHASES`), and a person may
replace them. Every fact that moved something says so, in words, so that it can be doubted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels whose names are alike, and what a fault in one of them says."""

    name: str
    pattern: str
    factors: Mapping[str, float]
    """Toggle -> factor; the key `none` is for none of the toggles."""


FAMILIES = (
    Family(
        "DeepEP",
        r"deep_?ep|(?:low_latency|intranode|internode).*(?:dispatch|combine)|(?:dispatch|combine).*(?:low_latency|rdma|nvl)",
        {"deepep": 20.0},
    ),
    Family(
        "mixture of experts",
        r"moe|grouped_?gemm|marlin|topk_?(?:softmax|gating)|silu_and_mul_masked|ep_(?:gather|scatter)",
        {"moe_runner_backend": 15.0, "deepep": 3.0, "two_batch_overlap": 2.0, "none": 1.5},
    ),
    Family(
        "speculative decoding",
        r"eagle|draft|verify|build_tree|tree_|ngram|top_k_renorm|top_p_renorm|accept|spec_",
        {"speculative": 15.0},
    ),
    Family(
        "attention",
        r"flash|fmha|mha|mla|paged|attention|batch(?:prefill|decode)|_fwd_(?:kernel|grouped|split)|_decode_att|mqa_logits",
        {"attention_backend": 12.0, "speculative": 2.0, "dp_attention": 2.0, "cuda_graph_padding": 1.5},
    ),
    Family(
        "all-reduce",
        r"all_?reduce|cross_device|one_?shot|two_?shot|multimem|nvls|mscclpp",
        {"custom_all_reduce": 15.0, "symm_mem": 5.0},
    ),
    Family(
        "KV pool",
        r"req_to_token|kv_indices|alloc_(?:extend|decode)|(?:set|store|write|move|copy)_(?:kv|cache)|kv_(?:cache|copy)|cache_move",
        {"memory_saver": 4.0, "radix_cache": 3.0, "hicache": 3.0, "overlap_schedule": 3.0, "speculative": 2.0},
    ),
    Family("hierarchical cache", r"transfer_kv|hicache|load_back|write_back", {"hicache": 15.0}),
    Family(
        "indexing",
        r"index(?:ing|_select|Select)?|gather|scatter|embedding|vectorized_elementwise",
        {"overlap_schedule": 3.0, "speculative": 3.0, "cuda_graph_padding": 3.0},
    ),
    Family("compiled by inductor", r"triton_(?:poi|red|per|tem)_", {"prefill_graph": 6.0, "torch_compile": 10.0}),
    Family("matrix multiplication", r"gemm|cutlass|cublas|nvjet|deep_gemm", {"none": 2.0, "memory": 1.5}),
)
"""The first that fits is taken: the more telling come first."""

PHASES: Mapping[str, Mapping[str, float]] = {
    "capture": {"cuda_graph": 6.0, "prefill_graph": 6.0},
    "warm-up": {"prefill_graph": 3.0, "attention_backend": 2.0, "none": 2.0},
    "decode-graph": {"cuda_graph": 3.0, "cuda_graph_padding": 2.0, "prefill_graph": 0.3},
    "prefill-graph": {"prefill_graph": 6.0, "cuda_graph": 0.4},
    "prefill": {"prefill_graph": 0.5, "cuda_graph": 0.3, "cuda_graph_padding": 0.3, "speculative": 0.6},
    "verify": {"speculative": 6.0, "cuda_graph": 1.5},
    "draft": {"speculative": 8.0, "cuda_graph": 1.5},
    "wake": {"memory_saver": 8.0},
    "update": {"memory_saver": 3.0},
}
"""Phase of the crash (the middle of a crash's fingerprint) -> factors."""

PADDED = {"cuda_graph_padding": 6.0, "cuda_graph": 2.0}
AFTER_RESUME = {"memory_saver": 8.0, "cuda_graph": 1.5}
AFTER_SYNC = {"memory_saver": 2.0, "radix_cache": 1.5}
HARDWARE = {"none": 20.0}
_HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95})
"""ECC, row remapping, NVLink, "fallen off the bus": no toggle causes these. 13 and 31 are software's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashFacts:
    """What is known of the captured crash. Unknown is empty or None."""

    owner: str = "engine"
    """`engine` or `trainer`: whose fault came first."""
    kernel: str = ""
    phase: str = ""
    padded: bool | None = None
    """The batch was smaller than the graph that was replayed."""
    after_resume: bool = False
    """Within the first requests after its memory was resumed."""
    after_sync: bool = False
    xids: tuple[int, ...] = ()
    """The driver's error numbers at that time."""
    rank: int | None = None
    """That faulted first."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One fact and what it moved."""

    fact: str
    factors: Mapping[str, float]

    def text(self) -> str:
        """For people: `kernel … (attention): attention_backend x12, speculative x2`."""
        parts = ", ".join(f"{name} x{factor:g}" for name, factor in self.factors.items())
        return f"{self.fact}: {parts}" if parts else self.fact


def weigh(facts: CrashFacts, toggles: Sequence[str]) -> tuple[dict[str, float], list[Moved]]:
    """Factors for `space(..., factors=…)` over these toggles, and the reasons.

    A fact that speaks of toggles that are not in the bisection speaks for `none` of it, by the same factor: a fault in
    DeepEP's kernel, where DeepEP can not be turned off, is not made the graph's.
    """
    moved = [_concerning(one, toggles) for one in _all(facts)]
    names = {name for one in moved for name in one.factors}
    return {name: prod(one.factors.get(name, 1.0) for one in moved) for name in sorted(names)}, moved


def why_not(facts: CrashFacts) -> str:
    """Why no bisection of engine toggles should start; empty if it should."""
    if facts.owner == "trainer":
        return (
            "the trainer faulted first: replay its data with --load-debug-rollout-data and CUDA_LAUNCH_BLOCKING=1 "
            "instead; restarting engines would tell nothing"
        )
    if broken := sorted(_HARDWARE_XIDS.intersection(facts.xids)):
        return f"the driver reported Xid {', '.join(map(str, broken))}: that is hardware, no toggle causes it"
    return ""


def family_of(kernel: str) -> Family | None:
    """The family that a kernel's name belongs to."""
    return next((one for one in FAMILIES if re.search(one.pattern, kernel, re.IGNORECASE)), None)


def _all(facts: CrashFacts) -> list[Moved]:
    found = []
    if facts.kernel and (family := family_of(facts.kernel)) is not None:
        found.append(Moved(f"kernel {facts.kernel[:80]} ({family.name})", family.factors))
    elif facts.kernel:
        found.append(Moved(f"kernel {facts.kernel[:80]} (no known family)", {}))
    if facts.phase in PHASES:
        found.append(Moved(f"it died in phase {facts.phase}", PHASES[facts.phase]))
    if facts.padded is not None:
        factors = PADDED if facts.padded else {"cuda_graph_padding": 0.2}
        found.append(Moved("its batch was padded" if facts.padded else "its batch was not padded", factors))
    if facts.after_resume:
        found.append(Moved("just after its memory was resumed", AFTER_RESUME))
    if facts.after_sync:
        found.append(Moved("just after a weight update", AFTER_SYNC))
    if _HARDWARE_XIDS.intersection(facts.xids):
        found.append(Moved(f"Xid {', '.join(map(str, facts.xids))}", HARDWARE))
    return found


def _concerning(one: Moved, toggles: Sequence[str]) -> Moved:
    here = {name: factor for name, factor in one.factors.items() if name in toggles or name == "none"}
    away = max((factor for name, factor in one.factors.items() if name not in here and factor > 1.0), default=0.0)
    if away > max(here.values(), default=1.0):
        here["none"] = max(here.get("none", 1.0), away)
    return Moved(one.fact, here)
