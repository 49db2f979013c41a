"""Weights on their way to an engine: by value, by directory, and their digests."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rltop.engines import raw_tensors
from rltop.engines.weights import (
    buckets,
    checksum_differences,
    deserialize,
    digest_tensors,
    overall_digest,
    publish,
    published,
    serialize,
    sglang_digests,
)
from rltop.errors import RltopError
from tests.engines.contract import other_weights

DATA = Path(__file__).parents[1] / "data" / "sglang"


def _packed(content: Any, protocol: int = 4) -> str:
    return base64.b64encode(pickle.dumps(content, protocol=protocol)).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_arrive_as_they_left(dtype: torch.dtype) -> None:
    named = [("a", torch.randn(3, 4).to(dtype)), ("b", torch.randn(4, 6).to(dtype).t()), ("c", torch.tensor(2.0))]
    arrived = deserialize(serialize(named))
    assert [name for name, _ in arrived] == ["a", "b", "c"]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(named, arrived, strict=True))


def test_parameters_lose_their_gradient_on_the_way() -> None:
    ((_, arrived),) = deserialize(serialize([("w", torch.nn.Parameter(torch.ones(2)))]))
    assert not arrived.requires_grad


class _Evil:
    """Runs a command when it is unpickled without restriction."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/should-not-exist",))


class _EvilStorage:
    """The same, one level down, where torch's own function would unpickle freely."""

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.storage import _load_from_bytes

        return (_load_from_bytes, (pickle.dumps(_Evil()),))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ([("w", _Evil())], "it wants posix.system"),
        ([("w", _EvilStorage())], "Unpickl"),
        ([("w", Path("/x"))], "it wants pathlib"),
        ({"flattened_tensor": torch.ones(2)}, "expected a list"),
        ([("w", 3)], "expected (name, tensor)"),
        (["w"], "expected (name, tensor)"),
    ],
)
def test_anything_but_tensors_is_refused_by_name(content: Any, wanted: str) -> None:
    with pytest.raises(RltopError) as refused:
        deserialize(_packed(content))
    assert wanted in refused.value.why


def test_shared_memory_tensors_are_refused_by_name() -> None:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # registers the reductions of ForkingPickler

    payload = base64.b64encode(bytes(ForkingPickler.dumps([("w", torch.ones(2))]))).decode()
    with pytest.raises(RltopError, match="refused") as refused:
        deserialize(payload)
    assert "torch.multiprocessing.reductions" in refused.value.why


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    with contextlib.suppress(RltopError):
        deserialize(base64.b64encode(data).decode())


def test_what_is_not_base64_is_refused() -> None:
    with pytest.raises(RltopError) as refused:
        deserialize("%%%")
    assert "not base64" in refused.value.why


# ---------------------------------------------------------------------- directories


def test_a_published_version_is_a_whole_checkpoint(tmp_path: Path, model_path: Path) -> None:
    new = other_weights()
    target = publish(tmp_path / "out", 7, new.items(), checkpoint=model_path)
    assert target.name == "weight_v000007"
    written = load_file(target / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in new.items())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (model_path / name).read_bytes()


def test_a_version_that_fails_half_way_leaves_no_trace(tmp_path: Path, model_path: Path) -> None:
    def tensors() -> Any:
        yield "a", torch.ones(2)
        raise RuntimeError("lost the trainer")

    with pytest.raises(RuntimeError, match="lost the trainer"):
        publish(tmp_path, 1, tensors(), checkpoint=model_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_versions_are_kept_and_one_can_be_written_again(tmp_path: Path, model_path: Path) -> None:
    for version in (1, 2, 3, 3):
        publish(tmp_path, version, [("a", torch.full((2,), float(version)))], checkpoint=model_path, keep=2)
    assert [path.name for path in published(tmp_path)] == ["weight_v000002", "weight_v000003"]
    publish(tmp_path, 4, [("a", torch.ones(2))], checkpoint=model_path, keep=0)
    assert len(published(tmp_path)) == 3


# ---------------------------------------------------------------------- digests


def test_a_digest_is_sglangs_for_a_tensor_on_the_cpu() -> None:
    recorded = json.loads((DATA / "answers_0.5.23_cpu.json").read_text())["control: checksum"]["content"]
    theirs = recorded["ranks"][0]["checksums"]
    vectors = {name: tensor for name, tensor in other_weights().items() if tensor.dim() == 1}
    assert digest_tensors(vectors.items()) == {name: theirs[name] for name in vectors}
    assert overall_digest(theirs) == recorded["ranks"][0]["per_gpu_checksum"]


def test_one_changed_bit_changes_the_digests() -> None:
    weights = other_weights()
    before = digest_tensors(weights.items())
    weights["model.norm.weight"].view(torch.int32)[5] ^= 1
    after = digest_tensors(weights.items())
    assert {name for name in before if before[name] != after[name]} == {"model.norm.weight"}
    assert overall_digest(before) != overall_digest(after)


def test_the_overall_digest_does_not_depend_on_order() -> None:
    digests = digest_tensors(other_weights().items())
    assert overall_digest(digests) == overall_digest(dict(reversed(digests.items())))


def test_fused_digests_do_not_depend_on_the_order_of_parts() -> None:
    named = list(other_weights().items())
    assert sglang_digests(named) == sglang_digests(reversed(named))


def test_a_checksum_answer_of_either_engine_is_compared_under_its_own_names() -> None:
    weights = other_weights()
    for digests in (digest_tensors(weights.items()), sglang_digests(weights.items())):
        answer = {"ranks": [{"checksums": digests}]}
        assert checksum_differences(weights.items(), answer) == []
        assert checksum_differences({**weights, "lm_head.weight": torch.ones(2, 2)}.items(), answer) == []
    broken = weights | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64)}
    fused = {"ranks": [{"checksums": sglang_digests(weights.items())}]}
    assert checksum_differences(broken.items(), fused) == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_tensors_are_sent_in_buckets_and_the_last_one_is_known() -> None:
    named = [(f"t{at}", torch.zeros(size)) for at, size in enumerate((10, 20, 30, 100, 5))]
    pieces = [([name for name, _ in piece], last) for piece, last in buckets(named, limit=240)]
    assert pieces == [(["t0", "t1", "t2"], False), (["t3"], False), (["t4"], True)]
    assert list(buckets([])) == []


@pytest.mark.parametrize("size", [1, 4, 8192 * 4, 8192 * 4 * 3 + 10, (1 << 20) + 6])
def test_a_gpu_s_hash_is_the_same_in_torch_and_numpy(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert raw_tensors._digest_on_gpu(torch, bytearray(data), "cpu") == raw_tensors.gpu_digest_here([data])
