"""Tensors as bytes: SGLang's hashes, casts as torch rounds, and safetensors without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rltop.engines.raw_tensors import (
    Checkpoint,
    gpu_digest,
    is_zero,
    max_abs_gap,
    not_finite,
    raw_of,
    sha_digest,
)
from rltop.errors import RltopError

DATA = Path(__file__).parents[1] / "data" / "sglang"


def pattern(size: int) -> bytes:
    """Bytes that do not repeat with any power of two."""
    at = np.arange(size, dtype=np.uint64)
    return ((at * at * 31 + at * 7) % 251).astype(np.uint8).tobytes()


# ---------------------------------------------------------------------- digests


GPU_DIGESTS = {
    1: "3d93a6540b54ef2a",
    2: "6e0ac8b53a1f26a7",
    3: "83ecbba8b65be5c4",
    4: "5733f11e314b0bb4",
    5: "f04dcfbee8264010",
    8: "e12936f03d196ced",
    16: "a811dad9dedfde63",
    1000: "2981f436e8d83ed9",
    32768: "b07809ef6d9a0ce7",
    32769: "1ea5777181128f56",
    100_000: "591203fed5b3ca1d",
    5_000_003: "90c4d6c4aa0e62e6",
    40_000_000: "3e459d929020465e",
}
"""Bytes of `pattern` -> `gpu_tensor_hash` of SGLang 0.5.14 (Triton 3.6.0) on an H200: parts of a word, one tile,
several, and more than one step of its reduction."""


LARGE = pytest.param(40_000_000, marks=pytest.mark.soak)  # seconds, most of them for the pattern


@pytest.mark.parametrize("size", [*(size for size in GPU_DIGESTS if size < 10_000_000), LARGE])
def test_a_gpu_s_digest_is_sglang_s_own(size: int) -> None:
    assert gpu_digest([pattern(size)]) == GPU_DIGESTS[size]


@given(st.binary(max_size=4000), st.integers(1, 999))
def test_a_digest_does_not_depend_on_how_the_bytes_come(data: bytes, size: int) -> None:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert sha_digest(pieces) == sha_digest([data])
    assert gpu_digest(pieces) == gpu_digest([data])


@pytest.mark.parametrize("digest", [sha_digest, gpu_digest])
@pytest.mark.parametrize("at", [0, 3, 32767, 32768, 99_999])
def test_every_bit_counts(digest: Any, at: int) -> None:
    data = bytearray(pattern(100_000))
    before = digest([bytes(data)])
    data[at] ^= 1
    assert digest([bytes(data)]) != before


def test_a_large_tensor_is_hashed_in_steps_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pattern(5 * 32768 + 4)
    whole = gpu_digest([data])
    monkeypatch.setattr("rltop.engines.raw_tensors._BLOCK_TILES", 2)
    assert gpu_digest([data]) == whole


# ---------------------------------------------------------------------- casts


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "target"), [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_a_cast_rounds_as_torch_does(source: torch.dtype, name: str, target: torch.dtype) -> None:
    torch.manual_seed(3)
    values = torch.randn(4000) * torch.logspace(-45, 39, 4000)
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    tensor = values.to(source)
    assert bytes(raw_of(tensor).cast(name).data) == bytes(raw_of(tensor.to(target)).data)


def test_nan_stays_nan_and_integers_are_not_cast() -> None:
    cast = raw_of(torch.tensor([float("nan"), 1.0])).cast("BF16")
    assert not_finite(cast) == 1
    with pytest.raises(RltopError, match="I64 cannot be cast"):
        raw_of(torch.tensor([1])).cast("F32")


def test_values_are_looked_at_in_every_float_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one, other = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
        other[1, 2] = -0.5
        assert max_abs_gap(raw_of(one), raw_of(other)) == 0.5
        assert is_zero(raw_of(one))
        assert not is_zero(raw_of(other))
        other[0, 0] = float("nan")
        assert not_finite(raw_of(other)) == 1
        assert np.isnan(max_abs_gap(raw_of(one), raw_of(other)))


# ---------------------------------------------------------------------- files


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16)}
    save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"], "unlisted": torch.ones(1)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "gone": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray": torch.ones(1)}, tmp_path / "three.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "b", "unlisted"]
        assert checkpoint.absent == ("gone",)
        for name, tensor in tensors.items():
            raw = checkpoint.get(name)
            assert (raw.shape, raw.dtype) == (tuple(tensor.shape), raw_of(tensor).dtype)
            assert bytes(raw.data) == bytes(raw_of(tensor).data)
        assert [bytes(row) for row in checkpoint.get("a").columns(1, 3)] == [
            bytes(raw_of(row).data) for row in tensors["a"][:, 1:3]
        ]


def _cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _lie(directory: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def _index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda directory: (directory / "model.safetensors").unlink(), "no *.safetensors file"),
        (_cut, "cut off"),
        (_lie, "8 bytes for shape"),
        (_index, "no file beside it"),
        (lambda directory: (directory / "config.json").write_text("{"), "no JSON"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"nonsense"), "header"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path, damage: Any, why: str) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    damage(tmp_path)
    with pytest.raises(RltopError, match="cannot read the checkpoint") as refused:
        Checkpoint(tmp_path)
    assert why in refused.value.why
    assert refused.value.exit_code == 2
