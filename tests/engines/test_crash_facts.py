"""What a crash's evidence says: only what is written there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltop.bisect.facts import CrashFacts, weigh
from rltop.engines.crash_facts import crash_facts
from rltop.evidence.priors import load

NOWHERE = Path("/nonexistent")
LOGS = Path(__file__).parent.parent / "data" / "logs"
CAPTURE = (
    "[2026-11-29 16:56:24] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 4, 8]"
)
PREFILL = (
    "[2026-11-29 16:57:27] Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 13.91"
)
RESUME = '[2026-11-29 16:57:20] INFO:     127.0.0.1:4 - "POST /resume_memory_occupation HTTP/1.1" 200 OK'
UPDATE = '[2026-11-29 16:57:20] INFO:     127.0.0.1:4 - "POST /update_weights_from_disk HTTP/1.1" 200 OK'
IMA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def decode(running: int, queued: int = 0) -> str:
    return (
        f"[2026-11-29 16:57:30] Decode batch, #running-req: {running}, #token: 30, token usage: 0.00, "
        "cuda graph: True, gen throughput (token/s): 10.0, "
        f"#queue-req: {queued}"
    )


def told(*lines: str, phase: str = "decode-graph", **more: Any) -> CrashFacts:
    return crash_facts({"crash": {"phase": phase}}, lines, NOWHERE, **more).facts


def test_padding_by_the_newest_decode_line_and_better_by_what_was_in_flight() -> None:
    assert told(CAPTURE, decode(3), IMA).padded is True
    assert told(CAPTURE, decode(4), IMA).padded is False
    assert told(CAPTURE, decode(3), IMA, in_flight=4).padded is False
    assert told(CAPTURE, decode(3, queued=1), IMA, in_flight=4).padded is True, "one of the four waited"
    assert told(CAPTURE, decode(3), PREFILL.replace("#queue-req: 0", "#queue-req: 2"), IMA, in_flight=4).padded is None
    assert told(CAPTURE, decode(9), IMA).padded is None, "larger than any graph: it ran without one"
    assert told(decode(3), IMA).padded is None, "nothing says which sizes were captured"
    assert told(CAPTURE, decode(3), PREFILL, IMA).padded is None, "the newest line is no decode batch"
    assert told(CAPTURE, decode(3), IMA, phase="prefill").padded is None
    seen = {"crash": {"phase": "decode-graph"}, "server_info": {"cuda_graph_bs": [1, 2, 4]}}
    assert crash_facts(seen, [decode(3), IMA], NOWHERE).facts.padded is True


def test_just_after_a_resume_or_an_update() -> None:
    assert told(RESUME, UPDATE, PREFILL, IMA).after_resume
    assert not told(RESUME, UPDATE, PREFILL, IMA).after_sync, "the sleep is the rarer fact"
    assert told(UPDATE, *[PREFILL] * 3, IMA).after_sync
    assert not told(UPDATE, *[PREFILL] * 30, IMA).after_sync
    assert told(phase="wake").after_resume
    assert not told(IMA, RESUME).after_resume, "what came after the fault is no cause of it"


def test_a_recorded_crash_and_where_each_fact_is_written(tmp_path: Path) -> None:
    (tmp_path / "cuda_coredump_vm.1.2").write_bytes(b"x")
    lines = (LOGS / "whole_ima_coredump_graphs.log").read_text(errors="replace").splitlines()
    story = {"crash": {"phase": "decode-graph", "kernel": "test_oob_gather_kernel", "rank": 1}}
    found = crash_facts(story, lines, tmp_path, in_flight=3, xids=[31])
    assert (found.facts.kernel, found.facts.rank, found.facts.xids) == ("test_oob_gather_kernel", 1, (31,))
    assert found.facts.padded is True
    assert found.core == tmp_path / "cuda_coredump_vm.1.2"
    assert set(found.sources) == {"kernel", "phase", "padded", "xids"}


def test_each_fact_moves_the_prior_and_says_which_it_is() -> None:
    toggles = ("cuda_graph", "cuda_graph_padding", "memory_saver", "resume_order", "attention_backend")
    facts = CrashFacts(
        kernel="paged_attention_kernel", phase="decode-graph", padded=True, after_resume=True, after_sync=True
    )
    _, moved = weigh(facts, toggles, load())
    assert [one.sign for one in moved] == ["kernel", "phase", "padded", "after_resume", "after_sync"]
    assert all(one.factors for one in moved)


def test_odd_evidence_has_no_facts() -> None:
    assert crash_facts({}, [], NOWHERE).facts == CrashFacts()
    assert crash_facts({"crash": "?"}, ["\x00", "Capture cuda graph bs [x]"], NOWHERE).facts == CrashFacts()
