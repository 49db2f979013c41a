"""Are the weights the same? Asked of real SGLang 0.5.23 on this CPU: every planted fault is named, in both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltop.cli.weights import _log_probs
from rltop.engines.client import EngineClient
from rltop.engines.launch import EngineProcess, launch_engine
from rltop.engines.weight_diff import Comparison, Ways, diff
from rltop.train.arguments import TrainConfig
from rltop.train.ports import BASE_VERSION, EngineFacts, EngineReply
from rltop.train.proof import RESET
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from rltop.train.trainer_actor import TrainActor
from tests.soak.sglang_cpu import sglang_cpu_environment

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
LAST = "model.layers.1."
FAULTS = {
    "zero-norm": (LAST + "input_layernorm.weight", "zero"),
    "nan-block": (LAST + "mlp.down_proj.weight", "nan"),
    "stale-tensor": (LAST + "self_attn.k_proj.weight", "stale"),
    "swap-layers": (LAST + "self_attn.o_proj.weight", "wrong-layer"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("weights") / "model", TinyModelConfig(seed=1))


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """When this file appears, the server's rotary table is zeroed, in place, at its next forward pass."""
    return tmp_path_factory.mktemp("lost") / "rotary"


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every trainer's connections, at the end of a test that may have failed."""
    made: list[TrainActor] = []
    init = TrainActor.__init__

    def noted(self: TrainActor, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(TrainActor, "__init__", noted)
    yield
    for actor in made:
        actor.disconnect()


@pytest.fixture(scope="module")
def sglang(model: Path, lost: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    environment = sglang_cpu_environment(ROOT)
    spec = environment.spec(model, tmp_path_factory.mktemp("sglang"), run="soak", engine_id="0")
    engine = launch_engine(replace(spec, env={**spec.env, "RLTOP_SOAK_LOSE_ROTARY": str(lost)}))
    yield engine
    engine.stop(timeout_s=60)


def facts(sglang: EngineProcess, model: Path) -> EngineFacts:
    return EngineFacts(
        id="0",
        url=sglang.url,
        kind="sglang",
        pid=sglang.pid,
        host="h",
        version="0.5.23",
        weight_version=BASE_VERSION,
        model_path=str(model),
        log="",
    )


def trainer(model: Path, directory: Path, *inject: str, transport: str = "disk") -> TrainActor:
    config = TrainConfig(
        check_weight_update_equal=True,
        hf_checkpoint=model,
        engine="sglang",
        inject=inject,
        weight_transport="tensor" if transport == "tensor" else "disk",
    )
    actor = TrainActor(config, str(directory))
    actor.load()
    actor.freeze_base(str(directory / "initial"))
    return actor


def step(actor: TrainActor) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in actor._backend._model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def compare(sglang: EngineProcess, checkpoint: Path, previous: Path | None = None) -> Comparison:
    with EngineClient(sglang.url) as client:
        return diff(client, checkpoint, Ways(previous, reference=_log_probs))


def named(reply: EngineReply) -> list[tuple[str, str, str]]:
    return [(one.name, one.kind, one.engine) for one in reply.findings]


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_reset_server_holds_what_was_pushed(
    sglang: EngineProcess, model: Path, tmp_path: Path, transport: str
) -> None:
    actor = trainer(model, tmp_path, transport=transport)
    engine = facts(sglang, model)
    report = actor.prove(BASE_VERSION, -1, [engine])
    reply = report.engines["0"]
    assert (reply.ok, reply.same, reply.version, report.source) == (True, True, BASE_VERSION, ()), reply.message
    # What SGLang's own comparison says on a CPU: the digests of both sides do without it.
    assert "Torch not compiled with CUDA enabled" in reply.message
    step(actor)
    after = actor.publish("1", 0, [engine]).engines["0"]
    assert (after.same, after.version) == (True, "1"), after.message
    actor.save(str(tmp_path / "now"))
    found = compare(sglang, tmp_path / "now")
    assert (found.verdict, found.hash, found.sglang) == ("equal", "cpu", "0.5.23")
    assert compare(sglang, model).verdict == "different"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_the_sync_and_by_diff(
    sglang: EngineProcess, model: Path, tmp_path: Path, fault: str
) -> None:
    name, kind = FAULTS[fault]
    actor = trainer(model, tmp_path, f"{fault}@0", transport="tensor")
    engine = facts(sglang, model)
    proven = actor.prove(BASE_VERSION, -1, [engine]).engines["0"]
    assert proven.same is True, proven.message
    step(actor)
    reply = actor.publish("1", 0, [engine]).engines["0"]
    assert (reply.ok, reply.same) == (True, False)
    assert (name, kind, "0") in named(reply)
    actor.save(str(tmp_path / "now"))
    found = compare(sglang, tmp_path / "now", previous=tmp_path / "initial")
    assert (name, kind, sglang.url) in [(one.name, one.kind, one.engine) for one in found.findings]
    if fault != "swap-layers":
        assert len(reply.findings) == len(found.findings) == 1


def test_half_precision_and_a_checkpoint_in_another_type(sglang: EngineProcess, model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "half", TinyModelConfig(seed=1))
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(half, tmp_path / "half" / "model.safetensors")
    with EngineClient(sglang.url) as client:
        client.update_weights_from_disk(tmp_path / "half", "half")
        found = diff(client, tmp_path / "half", Ways())
    assert (found.verdict, found.dtype) == ("equal", "F32")  # the server was started with --dtype float32


def test_a_lost_rotary_table_is_named_in_both_ways(
    sglang: EngineProcess, model: Path, lost: Path, tmp_path: Path
) -> None:
    """Nothing brings the table back."""
    actor = trainer(model, tmp_path)
    engine = facts(sglang, model)
    assert actor.prove(BASE_VERSION, -1, [engine]).engines["0"].same is True
    lost.touch()
    step(actor)
    reply = actor.publish("1", 0, [engine]).engines["0"]
    assert named(reply) == [("rotary_emb.cos_sin_cache", "buffer-lost", "0")]
    actor.save(str(tmp_path / "now"))
    found = compare(sglang, tmp_path / "now")
    assert [(one.name, one.kind) for one in found.findings] == [("rotary_emb.cos_sin_cache", "buffer-lost")]


def test_a_wrong_shape_is_named_although_it_ends_the_server(sglang: EngineProcess, model: Path, tmp_path: Path) -> None:
    """The last one: 0.5.23 does not survive it."""
    weights = load_file(model / "model.safetensors")
    name = LAST + "self_attn.o_proj.weight"
    make_tiny_model(tmp_path / "bent", TinyModelConfig(seed=1))
    save_file(weights | {name: weights[name][:-1].clone()}, tmp_path / "bent" / "model.safetensors")
    assert (name, "wrong-shape") in [(one.name, one.kind) for one in compare(sglang, tmp_path / "bent").findings]
    actor = trainer(model, tmp_path, "wrong-shape@start")
    reply = actor.prove(BASE_VERSION, -1, [facts(sglang, model)]).engines["0"]
    assert not reply.ok
    assert reply.version in ("", RESET)
    assert named(reply) == [(name, "wrong-shape", "0")]
