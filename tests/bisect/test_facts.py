"""Which facts move which toggles."""

from __future__ import annotations

import pytest

from rltop.bisect.belief import believe
from rltop.bisect.facts import CrashFacts, family_of, weigh, why_not
from rltop.bisect.space import space
from rltop.evidence.priors import load

TABLES = load()

TOGGLES = ("cuda_graph", "cuda_graph_padding", "speculative", "overlap_schedule", "deepep", "attention_backend")


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, float*)", "DeepEP"),
        ("_ZN7deep_ep12internode_ll7combineILb1E", "DeepEP"),
        ("fused_moe_kernel", "mixture of experts"),
        ("void MarlinDefault::Marlin<…, 256>", "matrix multiplication"),
        ("build_tree_efficient", "speculative decoding"),
        ("void flash::flash_fwd_splitkv_kernel<…>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>", "all-reduce"),
        ("write_req_to_token_pool_triton", "KV pool"),
        ("triton_poi_fused_add_mul_3", "compiled by inductor"),
        ("void at::native::vectorized_gather_kernel<16, long>", "indexing"),
    ],
)
def test_a_kernel_belongs_to_a_family(kernel: str, family: str) -> None:
    found = family_of(kernel, TABLES.families)
    assert found is not None
    if "Marlin" in kernel:
        assert found.name == "mixture of experts", "Marlin is the runner of quantised experts"
    else:
        assert found.name == family


def test_an_unknown_kernel_moves_nothing_and_says_so() -> None:
    factors, moved = weigh(CrashFacts(kernel="test_oob_kern"), TOGGLES, TABLES)
    assert factors == {}
    assert [one.text() for one in moved] == ["kernel test_oob_kern (no known family)"]


def test_facts_multiply_and_each_is_told() -> None:
    facts = CrashFacts(kernel="build_tree_efficient", phase="decode-graph", padded=True)
    factors, moved = weigh(facts, TOGGLES, TABLES)
    assert factors["speculative"] == 15.0
    assert factors["cuda_graph"] == pytest.approx(3.0 * 2.0)
    assert factors["cuda_graph_padding"] == pytest.approx(2.0 * 6.0)
    assert [one.fact.split()[0] for one in moved] == ["kernel", "it", "its"]


def test_the_kernel_of_a_toggle_that_can_not_be_turned_off_speaks_for_none_of_the_others() -> None:
    facts = CrashFacts(kernel="void deep_ep::intranode::dispatch<…>")
    without = tuple(name for name in TOGGLES if name != "deepep")
    factors, _ = weigh(facts, without, TABLES)
    assert factors == {"none": 20.0}
    told = believe(space(without, TABLES.priors, factors=factors), []).of(0)
    assert told > 3 * believe(space(without, TABLES.priors), []).of(0)


def test_what_speaks_for_a_part_speaks_for_the_whole_where_the_part_is_not_tried() -> None:
    padded = CrashFacts(padded=True)
    assert weigh(padded, TOGGLES, TABLES)[0] == {"cuda_graph": 2.0, "cuda_graph_padding": 6.0}
    without = tuple(name for name in TOGGLES if name != "cuda_graph_padding")
    assert weigh(padded, without, TABLES)[0] == {"cuda_graph": 6.0}
    assert weigh(padded, ("speculative",), TABLES)[0] == {"none": 6.0}, "and of neither for none of these"
    assert "cuda_graph" not in weigh(CrashFacts(padded=False), without, TABLES)[0], "what speaks against it does not"


def test_a_kernel_makes_its_toggle_the_likeliest() -> None:
    factors, _ = weigh(CrashFacts(kernel="void deep_ep::intranode::dispatch<…>"), TOGGLES, TABLES)
    involved = believe(space(TOGGLES, TABLES.priors, factors=factors), []).involved()
    assert max(involved, key=involved.__getitem__) == "deepep"


def test_a_trainer_or_broken_hardware_starts_no_bisection() -> None:
    assert "--load-debug-rollout-data" in why_not(CrashFacts(owner="trainer"))
    assert "hardware" in why_not(CrashFacts(xids=(31, 79)))
    assert why_not(CrashFacts(xids=(31, 13), kernel="x")) == ""
