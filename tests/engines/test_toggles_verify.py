"""Whether a toggle took effect, from what real engines showed of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.toggles import read_argv
from rltop.engines.verify import Effective, read_server_info, scrub, verify
from tests.soak.sglang_arguments.cases import RECORDED
from tests.soak.sglang_arguments.recording import read

DATA = Path(__file__).parents[1] / "data"
H200: dict[str, Any] = json.loads((DATA / "sglang" / "server_info_0.5.14.json").read_text())
NGRAM: dict[str, Any] = json.loads((DATA / "sglang" / "server_info_0.5.14_ngram.json").read_text())
CPU: dict[str, Any] = json.loads((DATA / "sglang" / "answers_0.5.23_cpu.json").read_text())["/server_info"]["content"]


def log(name: str) -> list[str]:
    return (DATA / "logs" / f"{name}.log").read_text(errors="replace").splitlines()


def prom(name: str) -> str:
    return (DATA / "sglang" / f"metrics_{name}.prom").read_text()


def found(wanted: dict[str, str], info: dict[str, Any], **seen: Any) -> dict[str, Effective]:
    given: dict[str, Any] = {"metrics": "", "log_lines": [], "environ": None} | seen
    return verify(wanted, server_info=info, version="0.5.14", **given)


def test_graphs_are_proved_by_passes_then_by_captures_then_by_arguments() -> None:
    wanted = {"cuda_graph": "on", "prefill_graph": "on"}
    passes = found(wanted, H200, metrics=prom("0.5.14"), log_lines=log("sglang_healthy"))
    assert passes["cuda_graph"] == Effective("on", True, "/metrics: 26 decode passes through a CUDA graph")
    assert "4 prefill passes" in passes["prefill_graph"].source
    captures = found(wanted, H200, log_lines=log("sglang_healthy"))
    assert captures["cuda_graph"].holds is captures["prefill_graph"].holds is True
    assert captures["cuda_graph"].source.startswith("log: Capture target decode CUDA graph begin")
    assert found(wanted, H200)["cuda_graph"] == Effective("on", True, "/server_info")


def test_a_graph_that_was_never_captured_is_off_whatever_the_arguments_say() -> None:
    start = [line for line in log("sglang_healthy") if "Capture target decode" not in line]
    seen = found({"cuda_graph": "on"}, H200, log_lines=start)["cuda_graph"]
    assert (seen.value, seen.holds) == ("off", False)
    assert "no capture of a decode graph" in seen.source
    # A log without the end of the start proves nothing.
    assert found({"cuda_graph": "on"}, H200, log_lines=start[:3])["cuda_graph"].holds is True


def test_a_real_start_without_graphs() -> None:
    off = H200 | {"cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}}}
    off["internal_states"] = []
    seen = found({"cuda_graph": "off", "prefill_graph": "off"}, off, log_lines=log("whole_ima_async_no_graphs"))
    assert [one.holds for one in seen.values()] == [True, True]
    assert "Disable prefill CUDA graph" in seen["prefill_graph"].source


def test_padding_means_nothing_without_a_graph() -> None:
    sizes = found({"cuda_graph_padding": "on"}, H200, log_lines=log("whole_ima_async_graphs"))["cuda_graph_padding"]
    assert (sizes.value, sizes.holds) == ("on", True)
    every = (
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 3, 4, 5], avail mem=9 GB"
    )
    off = found({"cuda_graph_padding": "off"}, H200 | {"disable_cuda_graph_padding": True}, log_lines=[every])
    assert off["cuda_graph_padding"].holds is True
    cpu = found({"cuda_graph_padding": "off"}, CPU, log_lines=log("sglang_cpu_0_5_23"))["cuda_graph_padding"]
    assert (cpu.value, cpu.holds) == (None, False)
    assert "no decode graph" in cpu.source


def test_real_sglang_on_a_cpu_has_no_graphs() -> None:
    wanted = {"cuda_graph": "off", "prefill_graph": "off", "radix_cache": "on"}
    seen = found(wanted, CPU, metrics=prom("0.5.23_cpu"), log_lines=log("sglang_cpu_0_5_23"))
    assert {name: one.value for name, one in seen.items()} == wanted
    assert all(one.holds for one in seen.values())


def test_speculation_is_proved_by_verify_calls() -> None:
    seen = found({"speculative": "NGRAM"}, NGRAM, metrics=prom("0.5.14_ngram"))["speculative"]
    assert (seen.value, seen.holds) == ("NGRAM", True)
    assert "73 verify calls" in seen.source
    ignored = found({"speculative": "EAGLE:/draft"}, H200)["speculative"]
    assert (ignored.value, ignored.holds) == ("off", False)
    odd = found({"speculative": "off"}, H200, metrics=prom("0.5.14_ngram"))["speculative"]
    assert (odd.value, odd.holds) == (None, None)
    # Verification calls its capture after its phase.
    graph = found({"cuda_graph": "on"}, NGRAM, log_lines=log("whole_ngram_stall_then_update_from_disk"))["cuda_graph"]
    assert "target verify" in graph.source


def test_the_environment_is_looked_up_in_the_process_or_not_at_all() -> None:
    wanted = {"launch_blocking": "on", "core_dump": "on"}
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"}
    here = found(wanted, H200, environ=environ)
    assert [one.holds for one in here.values()] == [True, True]
    assert here["launch_blocking"].source == "/proc/PID/environ: CUDA_LAUNCH_BLOCKING=1"
    assert found(wanted, H200, environ={})["launch_blocking"].holds is False
    far = found(wanted, H200)["launch_blocking"]
    assert (far.value, far.holds) == (None, None)


def test_a_field_that_is_not_shown_is_not_known() -> None:
    seen = found({"hicache": "on", "deepep": "auto"}, {"version": "0.5.14"})
    assert {(one.value, one.holds, one.source) for one in seen.values()} == {
        (None, None, "/server_info does not show it")
    }


def test_what_the_scheduler_says_goes_before_the_servers_arguments() -> None:
    info = H200 | {"internal_states": [{"disable_overlap_schedule": True, "last_gen_throughput": 1.0}]}
    assert read_server_info(info, None, version="0.5.14")["overlap_schedule"] == "off"


def test_keys_are_taken_out_wherever_they_are() -> None:
    info = {
        "api_key": "sk-1",
        "admin_api_key": None,
        "internal_states": [{"api_key": "sk-1", "tp_size": 1}],
        "launch_command": "serve --api-key sk-1 --admin-api-key='sk 2' --tp 1",
    }
    clean = scrub(info)
    assert "sk" not in json.dumps(clean)
    assert clean["internal_states"][0]["tp_size"] == 1
    assert clean["launch_command"].endswith("--tp 1")


@pytest.mark.parametrize(("place", "info"), [(0, H200), (1, NGRAM)])
def test_a_resolution_without_a_gpu_is_that_of_a_real_h200(place: int, info: dict[str, Any]) -> None:
    """The recordings are made on a stand-in of the GPU: these two are what a real one resolved."""
    _, cases = read("0.5.14")
    case = cases[place]
    assert tuple(case["argv"][: len(RECORDED)]) == RECORDED
    for name, value in case["fields"].items():
        shown = info[name]
        if name == "cuda_graph_config":
            shown = {phase: settings["backend"] for phase, settings in shown.items()}
        assert shown == value, name


def test_a_healthy_engine_holds_all_that_its_arguments_ask_for() -> None:
    wanted = read_argv(RECORDED, {}, version="0.5.14")
    seen = found(wanted, H200, metrics=prom("0.5.14"), log_lines=log("sglang_healthy"), environ={})
    assert {name: one for name, one in seen.items() if not one.holds} == {}
