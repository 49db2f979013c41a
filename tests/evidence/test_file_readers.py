"""Readers of checkpoints, samples, captures, probes and ray status."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from rltop.evidence import http, samples
from rltop.evidence.ray_status import parse
from rltop.evidence.sink import Sink
from tests.evidence.files import bf16, document, f32, lines, read, safetensors


def problems(sink: Sink) -> list[str]:
    return [f"{p.where.source}:{p.where.line} {p.why}" for p in sink.problems]


# -- Hugging Face directories


def test_a_model_directory_is_read_by_its_headers(tmp_path: Path) -> None:
    document(tmp_path / "m/config.json", {"num_hidden_layers": 1})
    document(tmp_path / "m/model.safetensors.index.json", {"weight_map": {"a.weight": "x.safetensors"}})
    safetensors(tmp_path / "m/x.safetensors", {"a.weight": bf16(2, 3), "a.weight_scale_inv": f32([1.0])})
    (one,) = read(tmp_path).checkpoints
    assert (one.path, one.files, one.index_lines) == ("m", ("x.safetensors",), {"x.safetensors": 3})
    assert next((t.name, t.dtype, t.shape) for t in one.tensors) == ("a.weight", "BF16", (2, 3))
    assert (one.scales_read, one.bad_scales, one.broken) == (1, (), {})


@pytest.mark.parametrize(
    ("dtype", "good", "nan", "inf", "negative"),
    [
        ("F32", "0000803f", "0000c07f", "0000807f", "000080bf"),
        ("BF16", "803f", "c07f", "807f", "80bf"),
        ("F16", "003c", "007e", "007c", "00bc"),
        ("F64", "000000000000f03f", "000000000000f87f", "000000000000f07f", "000000000000f0bf"),
    ],
)
def test_bad_scales_are_counted_by_kind(
    tmp_path: Path, dtype: str, good: str, nan: str, inf: str, negative: str
) -> None:
    parts = [bytes.fromhex(one) for one in (good, nan, inf, negative)]
    raw = b"".join([*parts, bytes(len(parts[0])), parts[0]])
    safetensors(tmp_path / "model.safetensors", {"w_scale": (dtype, (6,), raw), "b_scale": (dtype, (1,), parts[0])})
    (one,) = read(tmp_path).checkpoints
    (bad,) = one.bad_scales
    assert (bad.name, bad.entries, bad.nan, bad.inf, bad.zero, bad.negative) == ("w_scale", 6, 1, 1, 1, 1)
    assert one.scales_read == 2


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "too short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "cut off"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 5) + b"{nope", "no JSON"),
        (struct.pack("<Q", 9) + b'{"a": 1}\n', "does not describe"),
    ],
)
def test_a_damaged_header_is_told_and_the_rest_is_read(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "bad.safetensors").write_bytes(raw)
    safetensors(tmp_path / "good.safetensors", {"a.weight": bf16(2, 2)})
    sink = read(tmp_path)
    (one,) = sink.checkpoints
    assert why in one.broken["bad.safetensors"]
    assert [t.name for t in one.tensors] == ["a.weight"]
    assert "bad.safetensors" in problems(sink)[0]


def test_a_file_that_is_shorter_than_its_header_says_is_broken(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", {"a.weight": bf16(8, 8)})
    path.write_bytes(path.read_bytes()[:-10])
    (one,) = read(tmp_path).checkpoints
    assert "cut off" in one.broken["m.safetensors"]


def test_nothing_outside_the_directory_is_opened(tmp_path: Path) -> None:
    secret = safetensors(tmp_path / "secret/x.safetensors", {"secret.weight": bf16(1, 1)})
    inside = tmp_path / "m"
    document(
        inside / "model.safetensors.index.json", {"weight_map": {"a": "../secret/x.safetensors", "b": "y.safetensors"}}
    )
    os.symlink(secret, inside / "y.safetensors")
    (one,) = (found for found in read(tmp_path).checkpoints if found.path == "m")
    assert one.index_outside == ("../secret/x.safetensors",)
    assert one.tensors == ()
    assert "outside" in one.broken["y.safetensors"]


def test_links_into_the_blobs_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blob = safetensors(tmp_path / "models--a/blobs/0123", {"a.weight": bf16(1, 1)})
    snapshot = tmp_path / "models--a/snapshots/rev"
    snapshot.mkdir(parents=True)
    os.symlink(blob, snapshot / "model.safetensors")
    (one,) = read(tmp_path).checkpoints
    assert [tensor.name for tensor in one.tensors] == ["a.weight"]


# -- Megatron directories


def test_a_megatron_directory_is_listed_and_not_opened(tmp_path: Path) -> None:
    save = tmp_path / "save"
    for name in ("iter_0000010/.metadata", "iter_0000010/__0_0.distcp", "iter_0000020/__0_0.distcp", "rollout/x"):
        (save / name).parent.mkdir(parents=True, exist_ok=True)
        (save / name).write_text("payload that is no pickle")
    (save / "latest_checkpointed_iteration.txt").write_text("10\n")
    (save / "rollout/global_dataset_state_dict_9.pt").write_text("")
    (one,) = read(tmp_path).megatron
    assert (one.path, one.tracker, one.rollout_states, one.is_iteration) == ("save", "10", (9,), False)
    assert [(it.number, it.has_metadata) for it in one.iterations] == [(10, True), (20, False)]


# -- lines of JSON


def test_samples_under_several_spellings_become_samples(tmp_path: Path) -> None:
    rows = [
        {"rollout_id": 3, "response": "One.", "tokens": [1, 2, 3, 4], "response_length": 2, "reward": {"score": 0.5}},
        {"rollout_id": 3, "output": "Two.", "length": 7, "weight_versions": ["4", "5"], "last_token_id": 11},
    ]
    sink = read(lines(tmp_path / "samples.jsonl", rows).parent)
    first, second = sink.samples
    assert (first.text.counted_ids, first.reward, first.last_token) == (2, 0.5, 4)
    assert (second.response_length, second.weight_version, second.versions) == (7, "5", ("4", "5"))
    assert second.where is not None
    assert (second.where.line, second.last_token) == (2, 11)
    assert sink.dumps[0].fields["output"] == 1


def test_a_special_token_with_text_behind_it_is_seen(tmp_path: Path) -> None:
    rows = [
        {"response": "Eighty.<|im_end|>\n<|im_start|>user\nmore"},
        {"response": "Eighty.<|im_end|>\n"},
        {"response": "if a < b and c > d: <p>text</p>"},
    ]
    found = [s.ran_past for s in read(lines(tmp_path / "samples.jsonl", rows).parent).samples]
    assert found == [("<|im_end|>", "<|im_start|>"), (), ()]


def test_a_broken_line_is_named_and_a_cut_last_line_is_fine(tmp_path: Path) -> None:
    path = lines(tmp_path / "http.jsonl", [{"path": "/generate", "status": 200}])
    with path.open("a") as out:
        out.write('{nope}\n{"path": "/flush_cache", "status": 400, "response": "busy"}\n{"path": "/gen')
    sink = read(tmp_path)
    assert [call.path for call in sink.http] == ["/generate", "/flush_cache"]
    assert sink.http[1].answer == {"text": "busy"}
    assert [(p.where.line, p.cut_end) for p in sink.problems] == [(2, False), (4, True)]


def test_keys_of_servers_are_masked(tmp_path: Path) -> None:
    info = {"api_key": "sk-1", "nested": {"admin_api_key": "sk-2"}, "port": 30000, "eos_token": "</s>"}
    document(tmp_path / "server_info.json", info)
    (one,) = read(tmp_path).documents
    text = json.dumps(dict(one.fields))
    assert "sk-1" not in text
    assert "sk-2" not in text
    assert one.fields["port"] == 30000


def test_a_checker_answers_bare_wrapped_or_per_engine(tmp_path: Path) -> None:
    for name, value in (
        ("a", {"success": True, "message": "equal"}),
        ("b", {"status": 400, "response": {"success": False, "message": "x.weight differs"}}),
        ("c", {"0": {"success": True}, "1": {"success": False}}),
    ):
        document(tmp_path / name / "weights_checker.json", value)
    found = [(call.engine, call.status, call.answer["success"]) for call in read(tmp_path).http]
    assert found == [(None, None, True), (None, 400, False), (0, None, True), (1, None, False)]


# -- ray status


STATUS = """======== Autoscaler status: 2026-01-01 ========
Node status
---------------------------------------------------------------
Active:
 1 node_a
 1 node_b
Pending:
 (no pending nodes)
Resources
---------------------------------------------------------------
Usage:
 8.0/64.0 CPU
 4.0/16.0 GPU
 0B/1.00GiB memory
Demands:
 {'GPU': 1.0, 'CPU': 1.0} * 8 (PACK): 2+ pending placement groups
 {'special': 1.0}: 3+ pending tasks/actors
"""


def test_ray_status_is_read(tmp_path: Path) -> None:
    (tmp_path / "ray_status_180s.txt").write_text(STATUS)
    (one,) = read(tmp_path).ray
    assert (one.at_s, one.nodes, one.pending_nodes) == (180.0, 2, 0)
    assert one.usage["GPU"] == (4.0, 16.0)
    assert one.usage["memory"] == (0.0, 1024.0**3)
    assert one.demands[0] == ({"GPU": 1.0, "CPU": 1.0}, 8, "PACK")
    assert one.demands[1] == ({"special": 1.0}, 3, "")


def test_the_nodes_of_a_verbose_status_do_not_replace_the_sum(tmp_path: Path) -> None:
    text = (
        STATUS + "\nNode: a\n Usage:\n  4.0/8.0 GPU\n Activity:\n  (no activity)\n\nNode: b\n Usage:\n  0.0/8.0 GPU\n"
    )
    (tmp_path / "ray_status.txt").write_text(text)
    (one,) = read(tmp_path).ray
    assert one.usage["GPU"] == (4.0, 16.0)
    assert one.node_totals == ({"GPU": 8.0}, {"GPU": 8.0})


def test_a_text_that_is_no_status_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "ray_status.txt").write_text("Ray is not running.\n")
    assert read(tmp_path).problems[0].whole


def test_amounts_that_no_cluster_has_are_no_amounts() -> None:
    text = "Demands:\n {'GPU': 1e999}: 1+ pending\n {'GPU': 1, 'CPU': -3} * 99999999999999999999 (PACK): 9+ pending\n"
    found = parse(text, "ray_status.txt")
    assert found.demands == (({"GPU": 1.0, "CPU": 0.0}, 1_000_000_000, "PACK"),)


# -- bounds


def test_more_samples_than_are_kept_leave_whole_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_SAMPLES", 200)
    rows = [{"rollout_id": n // 8, "index": n, "response": f"Answer {n}."} for n in range(1600)]
    sink = read(lines(tmp_path / "samples.jsonl", rows).parent)
    kept = Counter(one.rollout_id for one in sink.samples)
    assert len(sink.samples) <= 200
    assert set(kept.values()) == {8}
    assert {0, 199} <= set(kept)
    assert (sink.dumps[0].samples, len(sink.dumps[0].indices)) == (1600, 1600)  # what was in the file is known


def test_one_rollout_of_any_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_SAMPLES", 200)
    rows = [{"rollout_id": 0, "index": n, "response": f"Answer {n}."} for n in range(1000)]
    assert 90 <= len(read(lines(tmp_path / "samples.jsonl", rows).parent).samples) <= 200


def test_a_sample_of_any_length_costs_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_LINE", 1 << 20)
    with (tmp_path / "samples.jsonl").open("w") as out:
        out.write('{"response": "Fine."}\n{"response": "' + "x" * (40 << 20) + '"}\n{"response": "Fine too."}\n')
    tracemalloc.start()
    sink = read(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.where.line for one in sink.samples if one.where] == [1, 3]
    assert problems(sink) == ["samples.jsonl:2 the line is longer than 1 MiB"]
    assert peak < 16 << 20


def test_recorded_requests_cost_a_bounded_memory(tmp_path: Path) -> None:
    names = [{"name": f"layer.{n}.weight", "shape": [n] * 50} for n in range(200)]
    row = {"path": "/update_weights_from_tensor", "status": 200, "body": {"names": [names] * 4}, "response": {"ok": 1}}
    with (tmp_path / "http.jsonl").open("w") as out:
        for number in range(6):
            out.write(json.dumps(row | {"step": number}) + "\n")
    tracemalloc.start()
    sink = read(tmp_path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert [call.step for call in sink.http] == list(range(6))
    assert held / len(sink.http) < 256 << 10


def test_of_very_many_requests_the_first_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MOST_CALLS", (3, 3))
    monkeypatch.setattr(http, "MOST_CHARS", 0)
    rows = [{"path": "/generate", "status": 200, "body": {"text": "x" * 9000}, "step": n} for n in range(20)]
    sink = read(lines(tmp_path / "http.jsonl", rows).parent)
    assert [(call.step, call.order) for call in sink.http] == [(n, n) for n in (0, 1, 2, 17, 18, 19)]
    assert all(len(json.dumps(dict(call.body))) < 600 for call in sink.http)


@pytest.mark.parametrize("text", ["[\n", '[{"response": "Fine."},\n{"response":\n'])
def test_a_list_that_can_not_be_read_says_how_it_should_look(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.jsonl").write_text(text)
    sink = read(tmp_path)
    assert sink.samples == []
    assert "give one map per line" in sink.problems[-1].why


def test_a_list_of_samples_over_several_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps([{"response": "One."}, {"response": "Two."}], indent=1))
    assert len(read(tmp_path).samples) == 2
