"""Rules over checkpoints, quantisation, dumps, placement, bisections: each fires, stays quiet, says what lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import (
    BadScale,
    Document,
    Dump,
    HfCheckpoint,
    Iteration,
    LogEvent,
    LogSource,
    MegatronCheckpoint,
    RaySnapshot,
    Row,
    Tensor,
)
from rltop.checks.names import is_embedding, is_router, layer_of, ranges
from rltop.checks.observe import Observations, Where
from rltop.checks.rules.ckpt_load import same_path
from rltop.checks.rules.engine_bisect import needed_runs
from rltop.checks.rules.quant_map import engine_skips, matches, trainer_skips
from rltop.checks.thresholds import DEFAULTS
from tests.checks.build import at, obs, rollout, train, verdict

SILENT = (
    "ckpt.shards",
    "ckpt.layers",
    "ckpt.loaded",
    "ckpt.resume",
    "quant.map",
    "quant.bad-scale",
    "cluster.placement",
    "cluster.gpu-mapping",
    "engine.bisect",
    "dump.join",
    "dump.foreign-class",
    "dump.routing-field",
    "dump.size",
    "weights.compare",
    "weights.update-failed",
    "weights.frozen",
    "weights.mixed-version",
    "weights.resume-stale",
    "weights.sync-garble",
    "engine.resume-order",
    "engine.stale-kv",
    "logprob.outliers",
    "rollout.truncated",
    "rollout.stop-set",
    "rollout.len-over-cap",
    "rollout.reward-flat",
)


@pytest.mark.parametrize("check", SILENT)
def test_without_evidence_a_rule_says_what_lacks(check: str) -> None:
    (found,) = (v for v in evaluate(Observations()).verdicts if v.id == check)
    assert found.status == "skip"
    assert found.cause


def event(kind: str, text: str = "", line: int = 1, **more: Any) -> LogEvent:
    fields = {key: more.pop(key) for key in ("pid", "engine", "order", "owner") if key in more}
    return LogEvent(kind, text or kind, at(line), data=more, **{"order": line, **fields})


# -- checkpoints


def layer(number: int, *, experts: int = 0, parts: Sequence[str] = ("q_proj", "k_proj")) -> list[str]:
    names = [f"model.layers.{number}.self_attn.{part}.weight" for part in parts]
    names.append(f"model.layers.{number}.input_layernorm.weight")
    if not experts:
        return [*names, f"model.layers.{number}.mlp.down_proj.weight"]
    return [*names, *(f"model.layers.{number}.mlp.experts.{e}.down_proj.weight" for e in range(experts))]


def model(names: Sequence[str], *, layers: int, file: str = "model.safetensors", **more: Any) -> HfCheckpoint:
    ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    tensors = tuple(Tensor(name, "BF16", (2, 2), file) for name in (*names, *ends))
    config = {"num_hidden_layers": layers, "architectures": ["XForCausalLM"], **more.pop("config", {})}
    return HfCheckpoint("m", config, tensors=tensors, files=(file,), **more)


def test_a_whole_model_passes_and_draft_layers_are_allowed() -> None:
    names = [*layer(0), *layer(1), *layer(2), "model.layers.3.eh_proj.weight", "mtp.layers.0.x.weight"]
    assert verdict("ckpt.layers", obs(checkpoints=(model(names, layers=3),))).status == "pass"


@pytest.mark.parametrize(
    ("names", "layers", "config", "word"),
    [
        ([*layer(0), *layer(2)], 3, {}, "layers 1 have no tensor"),
        ([*layer(0), *layer(1), *layer(2, parts=("q_proj",))], 3, {}, "layer 2 lacks self_attn.k_proj.weight"),
        ([*layer(0, experts=4), *layer(1, experts=3)], 2, {"num_experts": 4}, "layer 1 lacks experts 3"),
    ],
)
def test_a_hole_is_a_fail(names: list[str], layers: int, config: dict[str, Any], word: str) -> None:
    found = verdict("ckpt.layers", obs(checkpoints=(model(names, layers=layers, config=config),)))
    assert found.status == "fail"
    assert word in found.cause


def test_dense_and_moe_layers_are_not_compared_with_each_other() -> None:
    names = [*layer(0), *layer(1, experts=2), *layer(2, experts=2)]
    config = {"first_k_dense_replace": 1, "n_routed_experts": 2}
    assert verdict("ckpt.layers", obs(checkpoints=(model(names, layers=3, config=config),))).status == "pass"


def test_an_untied_head_must_be_there() -> None:
    whole = model(layer(0), layers=1, config={"tie_word_embeddings": False})
    bare = HfCheckpoint("m", whole.config, tensors=whole.tensors[:-1], files=whole.files)
    assert verdict("ckpt.layers", obs(checkpoints=(whole,))).status == "pass"
    assert "output head" in verdict("ckpt.layers", obs(checkpoints=(bare,))).cause


def shards(named: dict[str, str], files: dict[str, list[str]], **more: Any) -> HfCheckpoint:
    tensors = tuple(Tensor(name, "BF16", (1,), file) for file, names in files.items() for name in names)
    return HfCheckpoint("m", index=named, index_source="m/i.json", files=tuple(files), tensors=tensors, **more)


def test_a_shard_that_is_gone_takes_its_layers_with_it() -> None:
    named = {"model.layers.0.a.weight": "x-1.safetensors", "model.layers.7.a.weight": "x-2.safetensors"}
    found = verdict("ckpt.shards", obs(checkpoints=(shards(named, {"x-1.safetensors": ["model.layers.0.a.weight"]}),)))
    assert (found.status, found.value["files"], found.value["layers"]) == ("fail", ["x-2.safetensors"], [7])


def test_a_stale_index_over_whole_tensors_is_a_warning() -> None:
    named = {"a.weight": "x-00001-of-00002.safetensors", "b.weight": "x-00002-of-00002.safetensors"}
    whole = shards(named, {"x-00001-of-00001.safetensors": ["a.weight", "b.weight"]})
    assert verdict("ckpt.shards", obs(checkpoints=(whole,))).status == "warn"
    alone = HfCheckpoint("m", index=named, index_source="m/i.json")
    assert verdict("ckpt.shards", obs(checkpoints=(alone,))).status == "skip"


def test_a_number_missing_in_the_names_without_an_index_is_a_fail() -> None:
    tensors = (Tensor("a.weight", "BF16", (1,), "x-00001-of-00002.safetensors"),)
    one = HfCheckpoint("m", files=("x-00001-of-00002.safetensors",), tensors=tensors)
    found = verdict("ckpt.shards", obs(checkpoints=(one,)))
    assert found.status == "fail"
    assert "x-00002-of-00002.safetensors" in found.cause


def test_layer_names() -> None:
    assert layer_of("model.language_model.layers.12.mlp.up.weight") is not None
    assert layer_of("visual.blocks.3.attn.weight") is None
    assert layer_of("lm_head.weight") is None
    assert is_router("model.layers.1.block_sparse_moe.gate.weight")
    assert is_router("model.layers.1.mlp.shared_expert_gate.weight")
    assert is_router("model.layers.1.feed_forward.router.weight")
    assert not is_router("model.layers.1.mlp.gate_proj.weight")
    assert is_embedding("transformer.wte.weight")
    assert ranges([3, 1, 2, 7]) == "1-3, 7"


# -- quantisation

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.weight",
)


def lists(**rules: list[str]) -> Observations:
    return obs(
        documents=(
            Document("tensor_names", "tensor_names.json", {"names": list(NAMES)}),
            Document("ignore_rules", "rules.json", rules),
        )
    )


def test_every_ignore_list_is_judged() -> None:
    good = ["lm_head", "model.embed_tokens", r"re:.*mlp\.gate(\.weight)?$"]
    seen = lists(
        good=good,
        no_router=["lm_head", "model.embed_tokens"],
        tensor_only=["lm_head", "model.embed_tokens", r"re:.*mlp\.gate\..*"],
        prefix=["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
    )
    found = {v.value["list"]: v for v in evaluate(seen).verdicts if v.id == "quant.map"}
    assert {name: v.status for name, v in found.items()} == {
        "good": "pass",
        "no_router": "fail",
        "tensor_only": "warn",
        "prefix": "warn",
    }
    assert found["no_router"].value["packed"] == ["model.layers.0.mlp.gate.weight"]
    assert found["tensor_only"].value["differ"] == ["model.layers.0.mlp.gate.weight"]
    assert found["prefix"].value["differ"] == ["model.layers.0.mlp.gate_proj.weight"]


def test_the_two_readings_of_a_rule() -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    assert trainer_skips(["model.layers.1.mlp.gate"], name)
    assert not engine_skips(["model.layers.1.mlp.gate"], name)
    assert engine_skips([r"re:.*gate_proj$"], name)
    assert not trainer_skips([r"re:.*gate_proj$"], name)


def test_a_rule_that_is_broken_or_explodes_fits_nothing() -> None:
    assert not matches("re:(", "x")
    assert not matches("re:(a+)+$", "a" * 60 + "b")


def fp8(*modules: str, **more: Any) -> Observations:
    index = {f"model.layers.0.{m}.weight{end}": "x" for m in modules for end in ("", "_scale_inv")}
    config = {"quantization_config": {"quant_method": "fp8"}}
    return obs(checkpoints=(HfCheckpoint("m", config, index=index, index_source="m/i.json"),), **more)


def test_fp8_modules_that_not_every_trainer_casts() -> None:
    assert verdict("quant.map", fp8("self_attn.q_proj", "mlp.experts.0.up_proj")).status == "pass"
    assert verdict("quant.map", fp8("mamba.in_proj")).status == "warn"
    refused = event("update_refused", "Downcasting not allowed for mamba.in_proj: torch.float8_e4m3fn")
    assert verdict("quant.map", fp8("mamba.in_proj", events=(refused,))).status == "fail"


def test_bad_scales() -> None:
    bad = BadScale("a.weight_scale", "x.safetensors", 64, zero=3)
    found = verdict("quant.bad-scale", obs(checkpoints=(HfCheckpoint("m", bad_scales=(bad,), scales_read=9),)))
    assert found.status == "fail"
    assert "3 zero" in found.cause
    assert verdict("quant.bad-scale", obs(checkpoints=(HfCheckpoint("m", scales_read=9),))).status == "pass"


# -- load and resume


def test_paths_are_compared_by_their_end() -> None:
    assert same_path("/data/run/save", "save")
    assert same_path("./save/", "save")
    assert not same_path("/data/run/mysave", "save")
    assert not same_path("", "save")


def loaded(directory: str, iteration: int = 0, line: int = 1) -> LogEvent:
    return event("ckpt_loaded", line=line, directory=directory, iteration=iteration)


@pytest.mark.parametrize(
    ("flags", "directory", "status"),
    [
        ({"load": "/d/save"}, "/d/save", "pass"),
        ({"load": "/d/save", "ref_load": "/d/base"}, "/d/base", "pass"),
        ({"load": "/d/save", "ref_load": "/d/base"}, "/d/third", "warn"),
        ({}, "/d/base", "pass"),
    ],
)
def test_a_confirmed_load(flags: dict[str, str], directory: str, status: str) -> None:
    assert verdict("ckpt.loaded", obs(flags=flags, events=(loaded(directory),))).status == status


def test_a_log_from_the_start_without_a_load_is_a_fail_and_an_excerpt_is_not() -> None:
    step = train(0, loss=1.0)
    step = type(step)(step.axis, step.step, step.values, where=Where("train.log", 90, "step 0"))
    start = event("startup", "> initialized tensor model parallel with size 4")
    logs = (LogSource("train.log", from_start=True),)
    whole = obs(step, flags={"load": "x"}, logs=logs, events=(start,))
    assert verdict("ckpt.loaded", whole).status == "fail"
    cut = obs(step, flags={"load": "x"}, logs=(LogSource("train.log"),))
    assert verdict("ckpt.loaded", cut).status == "skip"
    other_ranks = obs(step, flags={"load": "x"}, logs=logs, events=(event("startup", "Creating placement group"),))
    assert "rank 0" in verdict("ckpt.loaded", other_ranks).cause
    assert verdict("ckpt.loaded", other_ranks).status == "skip"
    verl = Observations(metrics=whole.metrics, logs=whole.logs, args=type(whole.args)({}, "verl"))
    assert verdict("ckpt.loaded", verl).status == "skip"


def saved(*numbers: int, tracker: str | None, **more: Any) -> MegatronCheckpoint:
    return MegatronCheckpoint("save", tracker, tuple(Iteration(f"iter_{n:07d}", n, 3, True) for n in numbers), **more)


@pytest.mark.parametrize(
    ("one", "flags", "status"),
    [
        (saved(10, 20, tracker="20"), {}, "pass"),
        (saved(10, 20, tracker="10"), {}, "info"),
        (saved(10, 20, tracker=None), {}, "fail"),
        (saved(tracker=None), {}, "info"),
        (saved(10, tracker="30"), {}, "fail"),
        (saved(10, tracker="latest"), {}, "fail"),
        (saved(10, tracker="10"), {"ckpt_step": 5}, "fail"),
        (saved(10, tracker="10"), {"ckpt_step": 10}, "pass"),
    ],
)
def test_the_tracker_decides_what_is_resumed(one: MegatronCheckpoint, flags: dict[str, Any], status: str) -> None:
    found = verdict("ckpt.resume", obs(flags={"load": "/x/save", **flags}, megatron=(one,)))
    assert found.status == status


def test_the_directory_of_one_iteration_is_no_load_directory() -> None:
    found = verdict("ckpt.resume", obs(flags={"load": "/x/save/iter_0000010"}, megatron=(saved(10, tracker="10"),)))
    assert found.status == "fail"
    assert "--ref-load" in found.cause


def test_the_rollout_after_a_load_is_the_next_one() -> None:
    def seen(first: int) -> Observations:
        row = rollout(first, raw_reward=0.5)
        row = type(row)(row.axis, row.step, row.values, row.rollout_id, where=Where("train.log", 9, "perf"))
        return obs(row, flags={"load": "save"}, events=(loaded("save", 39, line=2),))

    assert verdict("ckpt.resume", seen(40)).status == "skip"
    assert verdict("ckpt.resume", seen(0)).status == "fail"


# -- dumps


def dump(kind: Any, *indices: int, source: str = "d.pt", **more: Any) -> Dump:
    return Dump(source, kind, more.pop("rollout_id", 3), samples=len(indices), indices=indices, **more)


def test_dumps_are_joined_by_index_over_all_shards() -> None:
    made = dump("rollout", 4, 5, 6, 7)
    parts = (dump("train-v1", 7, 4, source="3_0.pt"), dump("train-v1", 5, source="3_1.pt"))
    found = verdict("dump.join", obs(dumps=(made, *parts)))
    assert (found.status, found.value["coverage"], found.value["missing"]) == ("warn", 0.75, [6])
    assert verdict("dump.join", obs(dumps=(made, *parts), live=True)).status == "info"
    whole = dump("train-v2", 7, 6, 5, 4)
    assert verdict("dump.join", obs(dumps=(made, whole))).status == "pass"
    other = dump("train-v2", 4, 5, 6, 7, rollout_id=4)
    assert verdict("dump.join", obs(dumps=(made, other))).status == "skip"


@pytest.mark.parametrize(
    "name",
    [
        "posix.system",
        "os.popen",
        "nt.system",
        "subprocess.Popen",
        "builtins.eval",
        "__builtin__.exec",
        "importlib.import_module",
        "torch.hub.load",
        "cloudpickle.cloudpickle._make_function",
        "shutil.rmtree",
        "pty.spawn",
        "operator.attrgetter",
    ],
)
def test_nobody_is_advised_to_allow_what_runs_code(name: str) -> None:
    found = verdict("dump.foreign-class", obs(dumps=(dump("state", foreign=("my.Thing", name)),)))
    assert f"calls {name} when it is loaded" in found.cause
    assert found.advice[0].startswith("do not load ")
    assert "add_safe_globals" not in " ".join(found.advice)
    assert found.value["calls"] == [name]


@pytest.mark.parametrize("name", ["pathlib.PosixPath", "argparse.Namespace", "builtins.getattr", "my.os.Thing"])
def test_a_harmless_class_may_be_allowed_by_its_whole_name(name: str) -> None:
    found = verdict("dump.foreign-class", obs(dumps=(dump("state", foreign=(name,)),)))
    assert f"add_safe_globals([{name}])" in found.advice[1]
    assert "when it is loaded" not in found.cause


def test_a_class_in_a_file_or_in_the_log_is_named() -> None:
    one = dump("state", foreign=("my.module.Thing",))
    refused = LogEvent("pickle_refused", "Weights only load failed", at(4), data={"class": "my.module.Thing"})
    found = verdict("dump.foreign-class", obs(dumps=(one,), events=(refused,)))
    assert found.status == "fail"
    assert "my.module.Thing" in found.cause
    assert "weights_only" not in " ".join(found.advice)
    assert verdict("dump.foreign-class", obs(events=(refused,))).status == "fail"
    assert verdict("dump.foreign-class", obs(dumps=(dump("state"),))).status == "pass"


def test_routing_replay_needs_its_field() -> None:
    flags = {"use_rollout_routing_replay": True}
    bare = dump("rollout", 1, 2, fields={"tokens": 2})
    full = dump("rollout", 1, 2, fields={"tokens": 2, "rollout_routed_experts": 2})
    excerpt = dump("samples", 1, 2, fields={"response": 2})
    assert verdict("dump.routing-field", obs(flags=flags, dumps=(bare,))).status == "fail"
    assert verdict("dump.routing-field", obs(flags=flags, dumps=(full,))).status == "pass"
    assert verdict("dump.routing-field", obs(flags=flags, dumps=(excerpt,))).status == "skip"
    missed = {"exception": "ValueError", "message": "rollout_routed_experts is required in rollout_data"}
    stop = LogEvent("traceback", "ValueError: rollout_routed_experts is required", at(3), owner="trainer", data=missed)
    assert verdict("dump.routing-field", obs(flags=flags, events=(stop,))).status == "fail"
    assert verdict("dump.routing-field", obs(dumps=(bare,))).status == "skip"


def test_a_dominant_field_is_told() -> None:
    sizes = {"trace": 900, "response": 50}
    found = verdict("dump.size", obs(dumps=(dump("rollout", 1, field_bytes=sizes),)))
    assert (found.status, found.value["field"]) == ("info", "trace")
    even = {"response": 900, "trace": 50}
    assert verdict("dump.size", obs(dumps=(dump("samples", 1, field_bytes=even),))).status == "pass"


# -- placement

JOB = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 6}


def ray(gpus: float, used: float = 0.0, cpus: float = 64.0, **more: Any) -> RaySnapshot:
    fields: dict[str, Any] = {"demands": (({"GPU": 1.0, "CPU": 1.0}, 10, "PACK"),), "nodes": 1} | more
    return RaySnapshot("ray_status.txt", usage={"GPU": (used, gpus), "CPU": (0.0, cpus)}, **fields)


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        (JOB, 10),
        (JOB | {"colocate": True}, 6),
        (JOB | {"debug_train_only": True}, 4),
        (JOB | {"debug_rollout_only": True}, 6),
    ],
)
def test_the_mode_says_how_many_gpus_a_job_needs(flags: dict[str, Any], needs: int) -> None:
    few = verdict("cluster.placement", obs(flags=flags, ray=(ray(needs - 1, demands=()),)))
    assert (few.status, few.value["required"], few.value["registered"]) == ("fail", needs, needs - 1)
    assert verdict("cluster.placement", obs(flags=flags, ray=(ray(needs, demands=()),))).status == "pass"


def test_cpus_and_custom_resources_count() -> None:
    found = verdict("cluster.placement", obs(flags=JOB, ray=(ray(16, cpus=8),)))
    assert (found.status, found.value["resource"]) == ("fail", "CPU")
    custom = ray(16, demands=(({"GPU": 1.0, "fast": 1.0}, 1, ""),))
    assert verdict("cluster.placement", obs(flags=JOB, ray=(custom,))).value["resource"] == "fast"
    wide = ray(16, nodes=2, demands=(({"GPU": 12.0}, 1, "STRICT_PACK"),))
    assert verdict("cluster.placement", obs(flags=JOB, ray=(wide,))).value["resource"] == "GPU"


def test_colocate_is_advised_only_where_it_would_help() -> None:
    advice = " ".join(verdict("cluster.placement", obs(flags=JOB, ray=(ray(8, demands=()),))).advice)
    assert "--colocate" in advice
    advice = " ".join(verdict("cluster.placement", obs(flags=JOB, ray=(ray(5, demands=()),))).advice)
    assert "--colocate" not in advice


def wait(elapsed: float, available: int) -> LogEvent:
    return event("placement_wait", gpus=10, elapsed_s=elapsed, registered=16, available=available)


def test_gpus_that_somebody_holds_are_a_warning_after_two_minutes() -> None:
    assert verdict("cluster.placement", obs(flags=JOB, events=(wait(150, 4),))).status == "warn"
    assert verdict("cluster.placement", obs(flags=JOB, events=(wait(90, 4),))).status == "pass"
    placed = event("placement_bundle", index=0, node="a", gpu=0)
    assert verdict("cluster.placement", obs(flags=JOB, events=(wait(150, 4), placed))).status == "pass"


def gpus(processes: dict[str, list[dict[str, Any]]], *events: LogEvent) -> Observations:
    bundles = tuple(event("placement_bundle", index=i, node="a", gpu=gpu) for i, gpu in enumerate((2, 3)))
    engine = event("engine_stage", pid=70)
    return obs(documents=(Document("gpu_procs", "gpu_procs.json", processes),), events=(*bundles, engine, *events))


def test_own_processes_outside_and_foreign_ones_inside_the_group() -> None:
    own = {"pid": 70, "gb": 9.0, "user": "me"}
    guest = {"pid": 71, "gb": 30.0, "user": "bob"}
    assert verdict("cluster.gpu-mapping", gpus({"2": [own], "3": []})).status == "pass"
    outside = verdict("cluster.gpu-mapping", gpus({"0": [own]}))
    assert (outside.status, outside.value["used"]) == ("fail", ["0"])
    beside = verdict("cluster.gpu-mapping", gpus({"2": [own, guest]}))
    assert (beside.status, beside.value["foreign"][0]["pid"]) == ("fail", 71)
    assert "mem-fraction" not in " ".join(beside.advice)
    small = guest | {"gb": 0.5}
    assert verdict("cluster.gpu-mapping", gpus({"2": [own, small]})).status == "pass"
    elsewhere = verdict("cluster.gpu-mapping", gpus({"2": [own], "7": [guest]}))
    assert elsewhere.status == "pass"


# -- bisection


def runs(*rows: dict[str, Any]) -> Observations:
    return obs(rows=tuple(Row("bisect", row, at(i + 1, "bisect_runs.jsonl"), i) for i, row in enumerate(rows)))


def many(count: int, **row: Any) -> list[dict[str, Any]]:
    return [row] * count


def test_how_many_clean_runs_are_needed() -> None:
    assert [needed_runs(p, DEFAULTS) for p in (1.0, 0.5, 0.2, 0.1)] == [1, 5, 14, 29]


def test_a_toggle_with_enough_clean_runs_is_implicated() -> None:
    failing = many(3, graph=True, spec=False, outcome="ima", t_s=100) + many(
        3, graph=True, spec=False, outcome="ok", t_s=300
    )
    clean = many(5, graph=False, spec=False, outcome="ok", t_s=300)
    found = verdict("engine.bisect", runs(*failing, *clean))
    assert (found.status, found.value["toggle"], found.value["needed"], found.confidence) == (
        "warn",
        "graph",
        5,
        "high",
    )
    few = verdict("engine.bisect", runs(*failing, *clean[:3]))
    assert (few.status, few.value["missing"]) == ("info", {"graph": 2})


def test_short_and_launch_blocking_runs_are_not_clean() -> None:
    failing = many(2, graph=True, outcome="ima", t_s=100)
    for clean in ({"t_s": 120}, {"t_s": 900, "launch_blocking": True}):
        found = verdict("engine.bisect", runs(*failing, {"graph": False, "outcome": "ok", **clean}))
        assert (found.status, found.value["missing"]) == ("info", {"graph": 1})


def test_a_fault_at_both_values_clears_a_toggle_and_two_changes_prove_nothing() -> None:
    failing = [{"a": 1, "b": 1, "outcome": "ima"}, {"a": 2, "b": 1, "outcome": "ima"}]
    found = verdict("engine.bisect", runs(*failing, {"a": 1, "b": 2, "outcome": "ok"}))
    assert (found.value["toggle"], found.value["cleared"]) == ("b", ["a"])
    both = verdict("engine.bisect", runs({"a": 1, "b": 1, "outcome": "ima"}, {"a": 2, "b": 2, "outcome": "ok"}))
    assert both.status == "info"
    assert verdict("engine.bisect", runs(*many(3, a=1, outcome="ok"))).status == "info"


def test_several_implicated_toggles_are_an_interaction() -> None:
    base = {"a": 1, "b": 1}
    found = verdict(
        "engine.bisect",
        runs(base | {"outcome": "ima"}, base | {"a": 0, "outcome": "ok"}, base | {"b": 0, "outcome": "ok"}),
    )
    assert [one["toggle"] for one in found.value["interaction"]] == ["a", "b"]


def test_what_ray_is_asked_for_counts_where_no_argument_says_it() -> None:
    wide = ray(16, nodes=2, cpus=128, demands=(({"GPU": 8.0, "CPU": 80.0}, 2, "STRICT_SPREAD"),))
    found = verdict("cluster.placement", obs(ray=(wide,)))
    assert (found.status, found.value["resource"], found.confidence) == ("fail", "CPU", "medium")
    typed = ray(16, demands=(({"GPU": 8.0, "accelerator_type:H100": 0.001}, 1, ""),))
    assert verdict("cluster.placement", obs(ray=(typed,))).status == "pass"
    many_gpus = ray(16, demands=(({"GPU": 8.0}, 3, ""),))
    assert verdict("cluster.placement", obs(ray=(many_gpus,))).value["required"] == 24
