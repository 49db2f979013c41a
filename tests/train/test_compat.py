"""The corrections for machines without CUDA: complete on a CPU, absent with CUDA, and never in torch itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
import torch

from rltop.errors import RltopError
from rltop.train.megatron.compat import CpuRandomTracker, clip_by_total_norm, load_megatron

pytestmark = pytest.mark.train


def test_megatron_sees_a_torch_whose_cuda_is_the_cpu_and_nobody_else_does() -> None:
    replaced = [torch.zeros, torch.tensor, torch.arange, torch.cuda, torch.cuda.current_device, torch.cuda.Stream]
    load_megatron()
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    assert schedules.torch is not torch
    assert schedules.torch.Tensor is torch.Tensor
    assert schedules.torch.zeros(1, device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    now = [torch.zeros, torch.tensor, torch.arange, torch.cuda, torch.cuda.current_device, torch.cuda.Stream]
    assert all(after is before for after, before in zip(now, replaced, strict=True))


def test_loading_twice_changes_nothing_more() -> None:
    load_megatron()
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    namespace = schedules.torch
    load_megatron()
    assert schedules.torch is namespace


def test_no_function_of_megatrons_is_compiled_and_no_compiler_imported() -> None:
    load_megatron()
    fused = importlib.import_module("megatron.core.fusions.fused_bias_geglu")
    assert fused.bias_geglu.__module__ == fused.__name__
    assert not hasattr(fused.bias_geglu, "_torchdynamo_orig_callable")


def test_with_cuda_nothing_is_corrected() -> None:
    """In a process of its own: this one's Megatron is corrected already."""
    program = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from rltop.train.megatron.compat import load_megatron; megatron = load_megatron()\n"
        "import sys; from megatron.core.optimizer import optimizer; from megatron.core.tensor_parallel import random\n"
        "seen = [getattr(m, 'torch', None) for name, m in sys.modules.items() if name.startswith('megatron')]\n"
        "print(megatron.on_cpu, [torch for torch in seen if type(torch).__name__ == '_Namespace'])\n"
        "print(optimizer.clip_grad_by_total_norm_fp32.__module__, random._CUDA_RNG_STATE_TRACKER)\n"
        "from megatron.core.fusions.fused_bias_geglu import bias_geglu\n"
        "print(hasattr(bias_geglu, '_torchdynamo_orig_callable'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    told = ["False []", "megatron.core.optimizer.clip_grads None", "True"]
    assert done.stdout.splitlines()[-3:] == told


def test_importing_the_backend_package_is_light() -> None:
    program = "import sys, rltop.train.megatron; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["0.15.0", "0.20.0", "1.0.0"])
def test_an_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    with pytest.raises(RltopError, match=f"megatron-core {version} is unknown"):
        load_megatron()


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(RltopError, match="not installed") as caught:
        load_megatron()
    assert 'pip install "rltop[train]"' in caught.value.do


def test_random_streams_are_independent_of_each_other_and_of_torchs_own() -> None:
    tracker = CpuRandomTracker()
    tracker.add("a", 1)
    tracker.add("b", 1)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    with tracker.fork("a"):
        a = torch.rand(2)
    with tracker.fork("b"):
        b = torch.rand(2)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    assert torch.equal(a, b)
    with tracker.fork("a"):
        assert not torch.equal(torch.rand(2), a)


def test_clipping_scales_to_the_norm_and_leaves_small_gradients_alone() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    for gradient, expected in (([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])):
        parameter.grad = torch.tensor(gradient)
        clip_by_total_norm([parameter], 1.0, parameter.grad.norm().item())
        assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-5)
