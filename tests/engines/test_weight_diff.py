"""`rltop weights diff`: every planted fault is named with tensor, engine and kind, on either kind of engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rltop.engines.client import EngineClient
from rltop.engines.weight_diff import Comparison, Ways, diff
from rltop.errors import RltopError
from rltop.train.cpu_engine.checkpoint import read_config, read_weights
from rltop.train.cpu_engine.model import score
from rltop.train.cpu_engine.server import make_app
from rltop.train.tiny_model import TinyModelConfig, initial_weights, make_tiny_model
from tests.engines.conftest import Blocking, running
from tests.engines.fused_engine import FusedEngine

MODEL = TinyModelConfig(num_layers=3)
URL = "http://engine"
Tensors = dict[str, Tensor]
Break = Callable[[Tensors, Tensors], None]
"""Bends what the engine gets; the second argument is the version before."""


def weights(seed: int = 1) -> Tensors:
    """No two tensors alike, norms included."""
    torch.manual_seed(seed)
    return {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in initial_weights(MODEL).items()}


def written(directory: Path, tensors: Tensors, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A checkpoint of the tiny model with these weights."""
    make_tiny_model(directory, MODEL)
    cast = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")} | config))
    return directory


def _zero(held: Tensors, before: Tensors) -> None:
    held["model.layers.1.input_layernorm.weight"] = torch.zeros_like(held["model.layers.1.input_layernorm.weight"])


def _zero_part(held: Tensors, before: Tensors) -> None:
    held["model.layers.1.self_attn.v_proj.weight"] = torch.zeros_like(held["model.layers.1.self_attn.v_proj.weight"])


def _nan(held: Tensors, before: Tensors) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    held[name] = held[name].clone()
    held[name][:4, :4] = float("nan")


def _layer(held: Tensors, before: Tensors) -> None:
    held["model.layers.0.self_attn.o_proj.weight"] = held["model.layers.2.self_attn.o_proj.weight"]


def _layer_part(held: Tensors, before: Tensors) -> None:
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.2.mlp.up_proj.weight"]


def _stale(held: Tensors, before: Tensors) -> None:
    held["model.norm.weight"] = before["model.norm.weight"]


def _stale_part(held: Tensors, before: Tensors) -> None:
    held["model.layers.1.self_attn.k_proj.weight"] = before["model.layers.1.self_attn.k_proj.weight"]


def _other(held: Tensors, before: Tensors) -> None:
    held["model.layers.1.mlp.down_proj.weight"] = held["model.layers.1.mlp.down_proj.weight"] * 1.25


FAULTS: dict[str, tuple[Break, str, str]] = {
    "zeroed norm": (_zero, "model.layers.1.input_layernorm.weight", "zero"),
    "zeroed part": (_zero_part, "model.layers.1.self_attn.v_proj.weight", "zero"),
    "NaN block": (_nan, "model.layers.2.mlp.down_proj.weight", "nan"),
    "wrong layer": (_layer, "model.layers.0.self_attn.o_proj.weight", "wrong-layer"),
    "wrong layer of a part": (_layer_part, "model.layers.0.mlp.up_proj.weight", "wrong-layer"),
    "stale tensor": (_stale, "model.norm.weight", "stale"),
    "stale part": (_stale_part, "model.layers.1.self_attn.k_proj.weight", "stale"),
    "merely different": (_other, "model.layers.1.mlp.down_proj.weight", "different"),
}


@contextmanager
def cpu_engine(model: Path) -> Iterator[EngineClient]:
    with running(model) as engine:
        yield EngineClient(URL, transport=Blocking(make_app(engine)))


def compare(client: EngineClient, checkpoint: Path, ways: Ways = Ways()) -> Comparison:  # noqa: B008 - frozen
    return diff(client, checkpoint, ways)


def fused(engine: FusedEngine, checkpoint: Path, ways: Ways = Ways()) -> Comparison:  # noqa: B008 - frozen
    return compare(EngineClient(URL, transport=engine), checkpoint, ways)


def the_finding(found: Comparison) -> tuple[str, str, str]:
    (one,) = found.findings
    return one.name, one.kind, one.engine


# ---------------------------------------------------------------------- planted faults


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cpu_engine_s_fault_is_named(tmp_path: Path, fault: str) -> None:
    break_it, name, kind = FAULTS[fault]
    now, before = weights(1), weights(2)
    checkpoint, previous = written(tmp_path / "now", now), written(tmp_path / "before", before)
    with cpu_engine(previous) as client:
        held = dict(now)
        break_it(held, before)
        client.update_weights_from_tensor(held.items(), "1")
        found = compare(client, checkpoint)
        assert the_finding(found) == (name, kind, URL)
        assert (found.verdict, found.compared - found.equal, found.stand_in) == ("different", 1, True)
        client.update_weights_from_tensor(now.items(), "2")
        assert compare(client, checkpoint).verdict == "equal"


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fused_engine_s_fault_is_named_on_every_tensor_parallel_size(tmp_path: Path, fault: str, tp: int) -> None:
    break_it, name, kind = FAULTS[fault]
    now, before = weights(1), weights(2)
    checkpoint = written(tmp_path / "now", now, torch.bfloat16)
    previous = written(tmp_path / "before", before, torch.bfloat16)
    held = dict(now)
    break_it(held, before)
    found = fused(FusedEngine(held, tp=tp), checkpoint, Ways(previous))
    if kind == "nan" and tp > 1:  # only the ranks that hold the block
        assert {one.name for one in found.findings} == {name}
        assert found.findings[0].kind == "nan"
        return
    assert {(one.name, one.kind, one.engine) for one in found.findings} == {(name, kind, URL)}
    assert (found.dtype, found.hash, found.ranks) == ("BF16", "gpu", tp)


def test_a_wrong_shape_in_the_checkpoint_is_named_with_both(tmp_path: Path) -> None:
    bent = weights()
    bent["model.layers.1.self_attn.o_proj.weight"] = bent["model.layers.1.self_attn.o_proj.weight"][:-1]
    found = fused(FusedEngine(weights(2)), written(tmp_path / "bent", bent))
    shapes = [one for one in found.findings if one.kind == "wrong-shape"]
    assert [(one.name, one.detail) for one in shapes] == [
        ("model.layers.1.self_attn.o_proj.weight", "[63, 64], the model has [64, 64]")
    ]


def test_a_lost_rotary_table_is_named_where_a_forward_pass_can_be_made(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "model", weights())

    def reference(directory: Path, ids: Any) -> list[float]:
        config = read_config(directory)
        return score(config, read_weights(directory, config), ids)

    ways = Ways(reference=reference)
    with cpu_engine(checkpoint) as client:
        assert compare(client, checkpoint, ways).verdict == "equal"
        client.inject("rotary-lost:count=1")
        client.update_weights_from_disk(checkpoint, "1")
        found = compare(client, checkpoint, ways)
        assert the_finding(found) == ("rotary_emb.cos_sin_cache", "buffer-lost", URL)
        without = compare(client, checkpoint)
        assert without.verdict == "equal"
        assert any("not compared" in note for note in without.notes)


def test_a_zeroed_router_of_a_mixture_of_experts_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(100, 8), "model.norm.weight": torch.randn(8)}
    for layer in range(2):
        head = f"model.layers.{layer}.mlp."
        tensors[head + "gate.weight"] = torch.randn(4, 8)
        for expert in range(4):
            for part, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6))):
                tensors[f"{head}experts.{expert}.{part}_proj.weight"] = torch.randn(shape)
    (tmp_path / "moe").mkdir()
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(cast, tmp_path / "moe" / "model.safetensors")
    (tmp_path / "moe" / "config.json").write_text('{"dtype": "bfloat16"}')
    for tp in (1, 2):
        assert fused(FusedEngine(dict(tensors), tp=tp), tmp_path / "moe").verdict == "equal"
    held = tensors | {"model.layers.1.mlp.gate.weight": torch.zeros(4, 8)}
    found = fused(FusedEngine(held), tmp_path / "moe")
    assert the_finding(found) == ("model.layers.1.mlp.gate.weight", "zero", URL)
    swapped = tensors | {
        "model.layers.0.mlp.experts.2.up_proj.weight": tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    }
    found = fused(FusedEngine(swapped), tmp_path / "moe")
    assert the_finding(found) == ("model.layers.0.mlp.experts.2.up_proj.weight", "wrong-layer", URL)
    shuffled = FusedEngine({name: t.flip(0) if ".experts." in name else t for name, t in tensors.items()})
    found = fused(shuffled, tmp_path / "moe")
    assert found.verdict == "cannot"
    assert all("moe-runner-backend" in why for _, why in found.not_compared)


# ---------------------------------------------------------------------- types, layouts, names


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_hash_and_type_are_recognised(tmp_path: Path, stored: torch.dtype, served: torch.dtype, where: Any) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in weights().items()}
    checkpoint = written(tmp_path / "model", tensors, stored)
    found = fused(FusedEngine(tensors, dtype=served, hash=where), checkpoint)
    assert (found.verdict, found.hash, found.findings) == ("equal", where, ())


def test_a_vocabulary_that_is_padded_and_an_output_layer_of_its_own(tmp_path: Path) -> None:
    tensors = weights() | {"lm_head.weight": torch.randn(260, 64)}
    checkpoint = written(tmp_path / "model", tensors, tie_word_embeddings=False)
    for tp in (1, 2, 4):
        assert fused(FusedEngine(tensors, tp=tp, hash="cpu", dtype=torch.float32), checkpoint).verdict == "equal"
    tied = written(tmp_path / "tied", tensors, tie_word_embeddings=True)
    assert fused(FusedEngine(weights(), hash="cpu", dtype=torch.float32), tied).verdict == "equal"


def test_tensors_of_one_side_only(tmp_path: Path) -> None:
    tensors = weights()
    checkpoint = written(tmp_path / "model", tensors)
    more = FusedEngine(tensors | {"model.layers.1.extra.weight": torch.ones(3)}, hash="cpu", dtype=torch.float32)
    assert the_finding(fused(more, checkpoint)) == ("model.layers.1.extra.weight", "extra", URL)
    less = FusedEngine({n: t for n, t in tensors.items() if n != "model.norm.weight"}, hash="cpu", dtype=torch.float32)
    assert the_finding(fused(less, checkpoint)) == ("model.norm.weight", "missing", URL)


def test_an_older_published_version_beside_it_is_found_by_itself(tmp_path: Path) -> None:
    now, before = weights(1), weights(2)
    written(tmp_path / "weight_v000003", before)
    checkpoint = written(tmp_path / "weight_v000004", now)
    held = dict(now)
    _stale_part(held, before)
    found = fused(FusedEngine(held, hash="cpu", dtype=torch.float32), checkpoint)
    (one,) = found.findings
    assert (one.name, one.kind) == ("model.layers.1.self_attn.k_proj.weight", "stale")
    assert "weight_v000003" in one.detail
    assert one.parameter == "model.layers.1.self_attn.qkv_proj.weight"


def test_what_the_run_was_started_from_is_stale_against_what_it_published(tmp_path: Path) -> None:
    """No update has come: older than every published version. Against a checkpoint of no run nobody can say."""
    now, base = weights(1), weights(2)
    loaded = written(tmp_path / "base", base)
    engine = FusedEngine(base, hash="cpu", dtype=torch.float32, model_path=str(loaded))
    found = fused(engine, written(tmp_path / "weight_v000007", now))
    assert {one.kind for one in found.findings} == {"stale"}
    assert any(f"the engine holds all of {loaded}" in one for one in found.headline)
    # A tensor that was left behind by an update is stale against any checkpoint.
    mixed = now | {"model.norm.weight": base["model.norm.weight"]}
    engine = FusedEngine(mixed, hash="cpu", dtype=torch.float32, model_path=str(loaded))
    found = fused(engine, written(tmp_path / "final", now))
    assert (the_finding(found), found.headline) == (("model.norm.weight", "stale", URL), ())


def test_an_engine_that_was_loaded_from_something_else_holds_that(tmp_path: Path) -> None:
    now, other = weights(1), weights(2)
    loaded = written(tmp_path / "loaded", other)
    engine = FusedEngine(other, hash="cpu", dtype=torch.float32, model_path=str(loaded))
    found = fused(engine, written(tmp_path / "now", now))
    assert {one.kind for one in found.findings} == {"different"}
    assert all("holds what it was loaded from" in one.detail for one in found.findings)
    assert len(found.findings) == len(now)
    assert found.headline == (
        f"the engine holds all of {loaded}, which it was loaded from last: no tensor by itself is wrong",
    )


def test_nan_in_the_checkpoint_is_the_checkpoint_s(tmp_path: Path) -> None:
    now = weights()
    bent = dict(now)
    _nan(bent, {})
    name = "model.layers.2.mlp.down_proj.weight"
    for samples in (False, True):
        found = fused(FusedEngine(now, samples=samples), written(tmp_path / f"{samples}", bent, torch.bfloat16))
        (one,) = found.findings
        assert (one.name, one.kind) == (name, "different")
        assert "the checkpoint itself holds NaN or infinite values here: 16 of" in one.detail
        assert found.headline == (f"the checkpoint itself holds NaN or infinite values: {name}",)
    # In both: the parameters are equal, and no buffer is to blame for log-probs that are no numbers.
    both = fused(
        FusedEngine(bent, log_probs=[float("nan")] * 47),
        written(tmp_path / "both", bent, torch.bfloat16),
        Ways(reference=lambda *_: [float("nan")] * 47),
    )
    assert (both.verdict, both.findings) == ("equal", ())
    assert both.headline == (f"the checkpoint itself holds NaN or infinite values: {name}",)


def test_a_layer_that_only_the_checkpoint_has_is_missing(tmp_path: Path) -> None:
    now = weights()
    more = {
        "model.layers.3.mlp.down_proj.weight": torch.ones(3, 5),
        "model.layers.3.self_attn.q_proj.weight": torch.ones(7),
    }
    found = fused(FusedEngine(now), written(tmp_path / "more", now | more, torch.bfloat16))
    assert {(one.name, one.kind) for one in found.findings} == {(name, "missing") for name in more}
    assert all("config.json has 3 layers, this is number 3" in one.detail for one in found.findings)


def test_the_only_file_of_a_checkpoint_is_one(tmp_path: Path) -> None:
    now = weights()
    checkpoint = written(tmp_path / "model", now, torch.bfloat16)
    file = checkpoint / "model.safetensors"
    found = fused(FusedEngine(now), file)
    assert (found.verdict, found.checkpoint) == ("equal", str(file))
    with pytest.raises(RltopError, match="neither a directory nor"):
        fused(FusedEngine(now), checkpoint / "config.json")
    shutil.copy(file, checkpoint / "other.safetensors")
    listed = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(listed))
    with pytest.raises(RltopError, match="one of the 2 files"):
        fused(FusedEngine(now), file)


# ---------------------------------------------------------------------- values


def test_values_are_asked_for_where_the_model_gives_them(tmp_path: Path) -> None:
    now = weights()
    held = dict(now)
    _other(held, {})
    engine = FusedEngine(held, samples=True)
    (one,) = fused(engine, written(tmp_path / "model", now, torch.bfloat16)).findings
    assert one.kind == "different"
    assert one.max_abs_err == pytest.approx(0.25 * float(now[one.name][:8].abs().max()), rel=0.05)


def test_nan_without_a_checker_that_compares_is_seen_in_the_log_probs(tmp_path: Path) -> None:
    now = weights()
    held = dict(now)
    _nan(held, {})
    engine = FusedEngine(held, compares=False, log_probs=[float("nan")] * 47)
    (one,) = fused(engine, written(tmp_path / "model", now, torch.bfloat16)).findings
    assert (one.kind, one.detail) == ("nan", "the engine's log-probs are no numbers")


def test_nothing_is_asked_that_changes_a_weight(tmp_path: Path) -> None:
    now = weights()
    held = dict(now)
    _other(held, {})
    engine = FusedEngine(held)
    checkpoint = written(tmp_path / "model", now, torch.bfloat16)
    fused(engine, checkpoint)
    actions = [body.get("action") for path, body in engine.asked if path == "/weights_checker"]
    assert actions == ["checksum", "snapshot", "compare"]
    engine.asked.clear()
    fused(engine, checkpoint, Ways(snapshot=False))
    assert [body.get("action") for path, body in engine.asked if path == "/weights_checker"] == ["checksum"]


# ---------------------------------------------------------------------- what cannot be compared


def test_quantised_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    now = weights()
    checkpoint = written(tmp_path / "model", now, torch.bfloat16)
    name = "model.layers.1.self_attn.o_proj.weight"
    stored: dict[str, Tensor] = {key: tensor.to(torch.bfloat16) for key, tensor in now.items() if key != name}
    stored |= {name: now[name].to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(1, 1)}
    save_file(stored, checkpoint / "model.safetensors")
    found = fused(FusedEngine(now), checkpoint)  # its checksum has the dequantised weight
    assert (found.verdict, found.findings) == ("cannot", ())
    assert sorted(left for left, _ in found.not_compared) == [name, name + "_scale_inv"]
    online = fused(FusedEngine(now, server={"quantization": "fp8"}), written(tmp_path / "plain", now, torch.bfloat16))
    assert any("--quantization fp8" in note for note in online.notes)
    assert {"q_proj", "down_proj"} <= {left.split(".")[-2] for left, _ in online.not_compared}


# ---------------------------------------------------------------------- an engine that is updated meanwhile


class Moving(FusedEngine):
    """An engine that is updated while its checksum is taken: at each of the first `moves` ones."""

    moves = 1

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = super()._answer(path, body)
        if body.get("action") == "checksum" and self.moves:
            self.moves -= 1
            self.version = str(int(self.version) + 1)
            self.updated()
        return answer

    def updated(self) -> None:
        """What the run does besides."""


def test_a_checksum_across_an_update_is_taken_again(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "model", weights(), torch.bfloat16)
    engine = Moving(weights())
    assert (fused(engine, checkpoint).verdict, engine.version) == ("equal", "8")
    engine.moves = 1000
    with pytest.raises(RltopError, match="changed in every try") as error:
        fused(engine, checkpoint)
    assert "engine http pause" in error.value.do


def test_the_engine_s_version_is_taken_of_a_run_s_published_ones(tmp_path: Path) -> None:
    """Also where the run has deleted that version by the time the checksum is there, and published another."""
    root = tmp_path / "weights"
    now, later = weights(1), weights(2)
    written(root / "weight_v000007", now, torch.bfloat16)
    found = fused(FusedEngine(now), tmp_path)
    assert (found.verdict, found.checkpoint, found.headline) == ("equal", str(root / "weight_v000007"), ())

    class Publishing(Moving):
        def updated(self) -> None:
            written(root / "weight_v000008", later, torch.bfloat16)
            shutil.rmtree(root / "weight_v000007")
            self.tensors = later

    found = fused(Publishing(now), root)
    assert (found.verdict, found.weight_version, found.checkpoint_version) == ("equal", "8", 8)
    with pytest.raises(RltopError, match="version '7', which is not here") as error:
        fused(FusedEngine(now), root)
    assert error.value.why == "published versions here: 8"


def test_files_that_the_run_deletes_meanwhile_are_compared_all_the_same(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "weight_v000007", weights(), torch.bfloat16)

    class Deleting(Moving):
        def updated(self) -> None:
            self.version = "7"
            shutil.rmtree(checkpoint)

    assert fused(Deleting(weights()), checkpoint).verdict == "equal"
    written(tmp_path / "weight_v000008", weights(), torch.bfloat16)
    with pytest.raises(RltopError, match="no such directory") as error:
        fused(FusedEngine(weights()), checkpoint)
    assert str(tmp_path) in error.value.do


def test_another_version_is_said_first(tmp_path: Path) -> None:
    now, before = weights(1), weights(2)
    loaded = written(tmp_path / "weights" / "weight_v000010", now)
    copied = written(tmp_path / "copies" / "weight_v000009", before)
    engine = FusedEngine(now, hash="cpu", dtype=torch.float32, model_path=str(loaded), version="10")
    found = fused(engine, copied)
    assert found.headline[0] == "the engine is at version 10, this is 9"
    assert found.headline[1].startswith(f"the engine holds all of {loaded}, which it was loaded from last")
    assert {one.kind for one in found.findings} == {"different"}  # what is younger is not stale
    assert fused(engine, loaded).headline == ()


def test_a_closer_look_across_an_update_is_left_out(tmp_path: Path) -> None:
    now = weights()
    held = dict(now)
    _nan(held, {})
    checkpoint = written(tmp_path / "model", now, torch.bfloat16)

    class Late(FusedEngine):
        def _compare(self) -> tuple[int, Any]:
            self.version = "8"
            return super()._compare()

    found = fused(Late(held), checkpoint)
    assert (the_finding(found)[1], found.weight_version) == ("different", "7")
    assert any("changed to version '8' meanwhile" in note for note in found.notes)


def test_a_checkpoint_without_its_index_entries_is_incomplete(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "model", weights())
    shutil.move(checkpoint / "model.safetensors", checkpoint / "one.safetensors")
    listed = dict.fromkeys([*weights(), "model.layers.9.gone.weight"], "one.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    found = fused(FusedEngine(weights(), hash="cpu", dtype=torch.float32), checkpoint)
    assert the_finding(found) == ("model.layers.9.gone.weight", "missing", URL)


def test_the_report_is_plain_data(tmp_path: Path) -> None:
    found = fused(FusedEngine(weights()), written(tmp_path / "model", weights(), torch.bfloat16))
    assert json.loads(json.dumps(found.as_dict()))["verdict"] == "equal"
    assert replace(found, not_compared=(("a", "why"),)).verdict == "cannot"
