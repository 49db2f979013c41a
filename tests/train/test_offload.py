"""The trainer's memory goes and comes back, and no bit of the training changes."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rltop.errors import RltopError
from rltop.train.loss import LossConfig
from rltop.train.megatron.backend import BackendConfig, MegatronBackend
from rltop.train.megatron.batching import TrainSample
from rltop.train.megatron.model import Build
from rltop.train.offload import Offload, Part, memory_now
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

pytestmark = pytest.mark.train
CPU = torch.device("cpu")
MIB = 1 << 20


def resident(*tensors: Tensor) -> int:
    """Bytes of the tensors' whole pages that are in memory: what else the process has does not disturb it."""
    page, found = os.sysconf("SC_PAGESIZE"), 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for tensor in tensors:
            first, last = -(-tensor.data_ptr() // page), (tensor.data_ptr() + tensor.nbytes) // page
            pagemap.seek(8 * first)
            (entries := array("Q")).frombytes(pagemap.read(8 * (last - first)))
            found += page * sum(entry >> 63 for entry in entries)
    return found


def test_resident_memory_falls_and_grows_and_every_view_finds_its_bits(tmp_path: Path) -> None:
    weight, moment, gradient = (torch.rand(8 * MIB) for _ in range(3))  # 32 MiB each
    view, as_numpy = weight[5:100].view(5, 19), weight.numpy()
    kept, kept_moment = weight.clone(), moment.clone()
    parts: Mapping[Part, Iterable[Tensor]] = {"weights": [weight, view], "gradients": [gradient], "rest": [moment]}
    offload = Offload(lambda: parts, CPU, tmp_path / "away")
    assert resident(weight, moment, gradient) > 95 * MIB
    offload.sleep(["gradients", "rest"])
    assert resident(moment, gradient) < MIB < 31 * MIB < resident(weight)
    assert torch.equal(weight, kept)
    offload.sleep(["gradients", "rest", "weights"])
    assert resident(weight, moment, gradient) < MIB
    assert all(offload.asleep(part) for part in ("weights", "gradients", "rest"))
    offload.wake_up(["weights"])
    assert torch.equal(weight, kept)
    assert torch.equal(view, kept[5:100].view(5, 19))
    assert as_numpy[7] == kept[7]
    offload.wake_up()
    assert torch.equal(moment, kept_moment)
    assert not gradient.any()
    assert resident(weight, moment, gradient) > 95 * MIB
    assert list((tmp_path / "away").iterdir()) == []


def test_what_cannot_be_kept_is_not_given_away(tmp_path: Path) -> None:
    weight = torch.rand(MIB)
    kept = weight.clone()
    (tmp_path / "file").write_text("no directory")
    offload = Offload(lambda: {"weights": [weight]}, CPU, tmp_path / "file" / "away")
    with pytest.raises(RltopError) as caught:
        offload.sleep(["weights"])
    assert "--no-offload-train" in caught.value.do
    assert torch.equal(weight, kept)
    assert not offload.asleep("weights")


def test_training_with_naps_is_training_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = make_tiny_model(tmp_path / "tiny", TinyModelConfig(seed=3))
    samples = [
        TrainSample(tokens=(1, 5, 9, 4, 7), response_length=3, advantage=advantage, ref_log_probs=(-5.0, -5.0, -5.0))
        for advantage in (0.5, -0.5, 1.0, -1.0)
    ]
    loss = LossConfig(kl_loss_coef=0.01)

    def run(*, naps: bool) -> tuple[list[dict[str, float]], list[Tensor], dict[str, Tensor]]:
        backend = MegatronBackend(checkpoint, config=BackendConfig(lr=1e-2))
        backend.snapshot_ref()
        offload = backend.offload(tmp_path / "away")
        metrics = []
        for _ in range(3):
            metrics.append(backend.train_step(samples, loss))
            if naps:
                offload.sleep(["gradients", "rest"])
                held = {name: tensor.clone() for name, tensor in backend.hf_tensors()}
                offload.sleep(["weights"])
                large = [tensor for _, tensor in backend.hf_tensors() if tensor.nbytes > 1 << 14]
                assert all((tensor == 0).float().mean() > 0.5 for tensor in large)
                offload.wake_up(["weights"])
                assert all(torch.equal(tensor, held[name]) for name, tensor in backend.hf_tensors())
                offload.sleep(["weights"])
                offload.wake_up()
        references = backend.log_probs(samples, which="ref")
        return metrics, references, {name: tensor.clone() for name, tensor in backend.hf_tensors()}

    plain, napped = run(naps=False), run(naps=True)
    assert plain[0] == napped[0]
    assert plain[0][0]["grad_norm"] > 0
    assert all(torch.equal(one, other) for one, other in zip(plain[1], napped[1], strict=True))
    assert all(torch.equal(tensor, napped[2][name]) for name, tensor in plain[2].items())


def test_memory_is_told_under_slimes_names() -> None:
    told = memory_now(CPU)
    names = "gpu total_GB free_GB used_GB allocated_GB reserved_GB host_total_GB host_available_GB host_used_GB"
    assert list(told) == [*names.split(), "host_free_GB"]
    assert told["gpu"] == "cpu"


def test_in_bf16_the_first_step_goes_on_from_the_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's optimizer has fp32 weights of its own, made before the cold start: on an H200 the first step put the
    initial weights back, and a reward of 0.92 became 0. Megatron refuses CPU tensors by the name of their type only."""
    plain = torch.Tensor.type

    def as_cuda(tensor: Tensor, *args: object, **kw: object) -> object:
        found = plain(tensor, *args, **kw)  # type: ignore[call-overload]  # passed on as it came
        return found if args or kw else found.replace("torch.", "torch.cuda.")

    monkeypatch.setattr("rltop.train.megatron.backend.refuse_on_cpu", lambda build: None)
    monkeypatch.setattr(torch.Tensor, "type", as_cuda)
    checkpoint = make_tiny_model(tmp_path / "tiny", TinyModelConfig(seed=3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bf16 has no fused kernels on a CPU
        backend = MegatronBackend(checkpoint, config=BackendConfig(lr=1e-9, build=Build(bf16=True)))
        assert "bf16" in backend.description
        assert {tensor.dtype for _, tensor in backend.hf_tensors()} == {torch.bfloat16}
        initial = {name: tensor.clone() for name, tensor in backend.hf_tensors()}
        samples = [TrainSample(tokens=(1, 5, 9, 4, 7), response_length=3, advantage=a) for a in (0.5, -0.5)]
        backend.cold_start(samples, 3, 3e-2, batch_size=2)
        learnt = {name: tensor.clone() for name, tensor in backend.hf_tensors()}
        assert any(not torch.equal(tensor, initial[name]) for name, tensor in learnt.items())
        backend.train_step(samples, LossConfig())
        assert all(torch.equal(tensor, learnt[name]) for name, tensor in backend.hf_tensors())


@pytest.mark.parametrize(
    ("build", "flag"), [(Build(bf16=True), "--bf16"), (Build("transformer_engine"), "--transformer-impl")]
)
def test_what_only_a_gpu_has_is_refused_on_a_cpu(tmp_path: Path, build: Build, flag: str) -> None:
    checkpoint = make_tiny_model(tmp_path / "tiny", TinyModelConfig(seed=3))
    with pytest.raises(RltopError) as caught:
        MegatronBackend(checkpoint, config=BackendConfig(build=build))
    assert flag in str(caught.value.where)
    assert caught.value.exit_code == 2
