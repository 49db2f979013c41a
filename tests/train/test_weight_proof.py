"""`--check-weight-update-equal`: the real trainer and the real CPU engine; every planted fault is named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltop.daemon.live_checks import LiveChecks
from rltop.engines.client import EngineClient
from rltop.engines.probe import lost_buffer, read_probe
from rltop.errors import RltopError
from rltop.protocol.messages import Record, Source
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.cpu_engine.server import make_app
from rltop.train.inject import local_layer_ids
from rltop.train.ports import BASE_VERSION, EngineFacts, EngineReply, SyncReport
from rltop.train.proof import RESET, prepare
from rltop.train.sync import Suspects, Truth, compare, push
from rltop.train.sync import named as named_tensors
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from rltop.train.trainer_actor import TrainActor
from tests.engines.conftest import Blocking, running
from tests.train.fakes import ENGINE
from tests.train.local import run_locally

pytestmark = pytest.mark.train

CONFIG = TrainConfig(check_weight_update_equal=True, num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2)


@dataclass
class Pair:
    """A trainer and the engine that it pushes to."""

    trainer: TrainActor
    engine: EngineFacts
    client: EngineClient

    def prove(self) -> EngineReply:
        return self.trainer.prove(BASE_VERSION, -1, [self.engine]).engines["0"]

    def step(self) -> None:
        """Other weights, as an optimizer step leaves them."""
        with torch.no_grad():
            for parameter in self.trainer._backend._model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))

    def publish(self) -> EngineReply:
        return self.trainer.publish("1", 0, [self.engine]).engines["0"]


@contextlib.contextmanager
def pair(directory: Path, *inject: str, **changes: Any) -> Iterator[Pair]:
    config = replace(CONFIG, inject=inject, **changes)
    trainer = TrainActor(config, str(directory))
    trainer.load()
    base = trainer.freeze_base(str(directory / "initial"))
    with running(Path(base.checkpoint)) as engine:
        client = EngineClient(ENGINE.url, transport=Blocking(make_app(engine)))
        trainer._clients["0"] = client
        yield Pair(trainer, ENGINE, client)


def named(reply: EngineReply) -> list[tuple[str, str]]:
    assert all(one.engine == "0" for one in reply.findings)
    return [(one.name, one.kind) for one in reply.findings]


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_equal_weights_are_equal_after_a_reset_and_the_engine_serves_as_before(tmp_path: Path, transport: str) -> None:
    with pair(tmp_path, weight_transport=transport) as both:
        before = read_probe(both.client, 260)
        reply = both.prove()
        assert (reply.ok, reply.same, reply.version, reply.message) == (True, True, BASE_VERSION, "")
        assert read_probe(both.client, 260) == before
        both.step()
        after = both.publish()
        assert (after.same, after.version) == (True, "1")
        assert read_probe(both.client, 260) != before


LAST = "model.layers.1."
FAULTS = {
    "zero-norm": [(LAST + "input_layernorm.weight", "zero")],
    "nan-block": [(LAST + "mlp.down_proj.weight", "nan")],
    "lost-rotary": [("rotary_emb.cos_sin_cache", "buffer-lost")],
    "stale-tensor": [(LAST + "self_attn.k_proj.weight", "stale")],
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_of_a_later_sync_is_named_with_tensor_engine_and_kind(tmp_path: Path, fault: str) -> None:
    with pair(tmp_path, f"{fault}@0") as both:
        assert both.prove().same is True
        both.step()
        reply = both.publish()
    assert (reply.ok, reply.same) == (True, False)
    assert named(reply) == FAULTS[fault]
    assert all(name in reply.message and kind in reply.message for name, kind in FAULTS[fault])


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"stale-tensor"}))
def test_a_planted_fault_of_the_first_sync_is_named_too(tmp_path: Path, fault: str) -> None:
    with pair(tmp_path, f"{fault}@start") as both:
        reply = both.prove()
    assert reply.same is False
    assert named(reply) == FAULTS[fault]


def test_swapped_layers_are_named_with_whose_they_are(tmp_path: Path) -> None:
    with pair(tmp_path, "swap-layers@start") as both:
        reply = both.prove()
    assert {one.kind for one in reply.findings} == {"wrong-layer"}
    assert reply.differing == len(reply.findings) == 14  # the norms are ones in both layers
    one = next(one for one in reply.findings if one.name == LAST + "mlp.up_proj.weight")
    assert one.detail == "holds what belongs to model.layers.0.mlp.up_proj.weight"
    assert one.max_abs_err is not None
    assert one.max_abs_err > 0.01


@pytest.mark.parametrize("reset", [True, False])
def test_layers_of_a_later_stage_under_local_ids_are_named_on_both_sides(tmp_path: Path, reset: bool) -> None:
    """A stage that counts its layers from 0 overwrites the first stage's; its own are not brought."""
    with pair(tmp_path) as both:
        before = Truth([{}]).memory("")
        if not reset:  # a later sync: what is not brought is the version before
            assert both.prove().same is True
            before = both.trainer._now or before
        both.step()
        held = both.trainer._backend.hf_stages()
        assert held is not None
        whole = dict(named_tensors(held))
        stages = [
            {name: t for name, t in whole.items() if LAST not in name},
            {n: t for n, t in whole.items() if LAST in n},
        ]
        resets = {"0": prepare({"0": both.client}, 260)["0"].digests} if reset else {}
        report = push(
            local_layer_ids(stages),
            stages,
            version="1",
            transport="tensor",
            engines={"0": both.client},
            directory=None,
            planted=True,
            suspects=Suspects(memory=before, resets=resets),
        )
    reply = report.engines["0"]
    kinds = {one.name: one.kind for one in reply.findings}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "wrong-layer"
    assert kinds[LAST + "mlp.up_proj.weight"] == ("missing" if reset else "stale")
    assert report.layers == ((0,), (0,))


def test_a_wrong_shape_is_refused_by_the_engine_and_named_with_both_shapes(tmp_path: Path) -> None:
    with pair(tmp_path, "wrong-shape@start") as both:
        reply = both.prove()
    assert (reply.ok, reply.version) == (False, RESET)  # nobody takes its random weights for the base version
    assert named(reply) == [(LAST + "self_attn.o_proj.weight", "wrong-shape")]
    assert reply.findings[0].detail == "[63, 64], it should be [64, 64]"


def test_an_engine_that_took_nothing_still_holds_the_random_numbers(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        resets = prepare({"0": both.client}, 260)
        both.client.set_weight_version(BASE_VERSION)  # as if the update had been taken
        held = both.trainer._backend.hf_stages()
        assert held is not None
        suspects = Suspects(resets={"0": resets["0"].digests})
        report = compare(
            Truth(held), version=BASE_VERSION, transport="x", engines={"0": both.client}, suspects=suspects
        )
    reply = report.engines["0"]
    assert {one.kind for one in reply.findings} == {"missing"}
    assert reply.differing == sum(len(stage) for stage in held)


def test_the_trainer_is_compared_with_the_checkpoint_that_it_was_loaded_from(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", TinyModelConfig(seed=1))
    (tmp_path / "work").mkdir()
    with pair(tmp_path / "work", hf_checkpoint=source) as both:
        assert both.trainer.prove(BASE_VERSION, -1, [both.engine]).source == ()
        with torch.no_grad():  # a conversion that forgets one norm, in both directions
            for name, parameter in both.trainer._backend._model.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.zero_()
        report = both.trainer.prove(BASE_VERSION, -1, [both.engine])
    assert [(one.name, one.kind, one.engine) for one in report.source] == [("model.norm.weight", "zero", "trainer")]


def test_an_engine_at_work_is_not_touched(tmp_path: Path) -> None:
    class Busy:
        def loads(self) -> dict[str, Any]:
            return {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}

    with pytest.raises(RltopError, match="engine 0 is at work") as refused:
        prepare({"0": Busy()}, 260)  # type: ignore[dict-item]  # any other call would fail
    assert "3 requests" in refused.value.why


def test_the_probe_says_which_buffer() -> None:
    flat = [-1.0] * 5
    assert lost_buffer(flat, flat) is None
    table = lost_buffer(flat, [-1.0, -1.2, -1.0, -3.0, -1.0])
    assert table is not None
    assert (table.name, table.kind) == ("rotary_emb.cos_sin_cache", "buffer-lost")
    other = lost_buffer(flat, [-2.0, -1.2, -1.0, -3.0, -1.0])
    assert other is not None
    assert other.name != table.name
    assert lost_buffer(flat, [float("nan")] * 5) is not None


# ---------------------------------------------------------------------- the whole run


def test_a_checked_run_says_so_and_passes() -> None:
    checks = LiveChecks()
    replies = {"0": {"ok": True, "version": BASE_VERSION, "same": True, "digest": "a"}}
    payload = {"version": BASE_VERSION, "rollout_id": 0, "digest": "a", "checked": True, "engines": replies}
    checks.feed(Record("r", Source("trainer"), 1, 1.0, 1.0, "weights", payload))
    (verdict,) = [one for one in checks.report().verdicts if one.id == "weights.compare"]
    assert verdict.status == "pass"
    assert "random numbers" in verdict.cause


def test_a_difference_ends_the_run_and_is_named_in_log_record_and_verdict(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="not the weights that should be there") as ended:
        run_locally(replace(CONFIG, inject=("zero-norm@start",)), tmp_path)
    assert ended.value.exit_code == 1
    assert "engine 0: 1 tensor differs: model.layers.1.input_layernorm.weight: zero" in ended.value.why


def test_every_surface_names_the_tensors() -> None:
    findings = [
        {"name": "model.layers.1.mlp.gate.weight", "kind": "zero"},
        {"name": "model.layers.2.k", "kind": "stale", "detail": "holds version '3'", "parameter": "model.layers.2.qkv"},
        {"name": "model.layers.3.w", "kind": "different", "max_abs_err": 0.25},
    ]
    reply = {"ok": True, "version": "4", "same": False, "digest": "b", "differing": 9, "findings": findings}
    checks = LiveChecks()
    payload = {"version": "4", "rollout_id": 4, "ok": False, "digest": "a", "engines": {"0": reply}}
    checks.feed(Record("r", Source("trainer"), 1, 1.0, 1.0, "weights", payload))
    (verdict,) = [one for one in checks.report().verdicts if one.id == "weights.compare"]
    assert verdict.status == "fail"
    assert verdict.engine == 0
    assert "9 tensors differ: all zero: model.layers.1.mlp.gate.weight; an older version's values" in verdict.cause
    assert "max_abs_err 0.25" in verdict.cause
    assert "6 more" in verdict.cause
    lines = [one.text for one in verdict.evidence]
    assert any(line == "model.layers.2.k: stale: holds version '3'" for line in lines)


def test_a_tensor_that_an_engine_refused_is_named_by_the_verdict_too() -> None:
    bent = {"name": "model.layers.1.o", "kind": "wrong-shape", "detail": "[63, 64], it should be [64, 64]"}
    reply = {"ok": False, "version": RESET, "message": "status 400", "same": None, "differing": 1, "findings": [bent]}
    checks = LiveChecks()
    payload = {"version": "default", "rollout_id": 0, "ok": False, "digest": "a", "engines": {"0": reply}}
    checks.feed(Record("r", Source("trainer"), 1, 1.0, 1.0, "weights", payload))
    (verdict,) = [one for one in checks.report().verdicts if one.id == "weights.compare"]
    assert verdict.status == "fail"
    assert "could not take weights version default" in verdict.cause
    assert "of another shape: model.layers.1.o ([63, 64], it should be [64, 64])" in verdict.cause


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--check-weight-update-equal", "--debug-rollout-only"], "never pushed"),
        (["--check-weight-update-equal", "--load-debug-rollout-data", "x/{rollout_id}.pt"], "never pushed"),
        (["--inject", "zero-norm@start"], "a sync that does not happen"),
        (["--inject", "lost-rotary", "--engine", "sglang"], "only the CPU engine"),
        (["--inject", "stale-tensor@start", "--check-weight-update-equal"], "cannot act at the start"),
        (["--inject", "nan-grad@start", "--check-weight-update-equal"], "cannot act at the start"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(argv: list[str], what: str) -> None:
    with pytest.raises(RltopError, match=what) as refused:
        parse_args(argv)
    assert refused.value.exit_code == 2


def test_a_report_of_nothing_found_is_no_difference() -> None:
    reply = EngineReply(ok=True, version="1", same=True)
    assert SyncReport("1", "d", "disk", {"0": reply}, checked=True).ok
