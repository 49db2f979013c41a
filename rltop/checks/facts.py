"""What the arguments say about the run, where several rules ask."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rltop.checks.observe import Args, Observations, Where
from rltop.checks.verdict import FIRING, Verdict

_BASE_MODEL = re.compile(r"(?:^|[-_/.])(?:base|pretrain(?:ed)?|pt)(?:[-_/.]|$)", re.IGNORECASE)
_LOW_PRECISION = re.compile(r"fp8|int4|w4a16|awq|gptq|nvfp4|mxfp4|e4m3", re.IGNORECASE)
_QUANTISED_ROLLOUT = ("sglang_quantization", "rollout_quantization", "sglang_kv_cache_dtype", "hf_checkpoint")


def pretrained(obs: Observations) -> bool:
    """The model's path names a base model, which follows no chat template."""
    return any(_BASE_MODEL.search(obs.args.text(name)) for name in ("hf_checkpoint", "ref_load"))


def quantised_rollout(obs: Observations) -> bool:
    """The engines run FP8 or INT4 weights or cache while the trainer does not."""
    flag = any(obs.args.on(name) for name in ("fp8_rollout", "rollout_fp8", "int4_rollout"))
    return flag or any(_LOW_PRECISION.search(obs.args.text(name)) for name in _QUANTISED_ROLLOUT)


def model_config(obs: Observations) -> Mapping[str, object]:
    """The model's `config.json`, with the text part of a multimodal one on top; empty where it is not in the
    evidence."""
    configs = [document.fields for document in obs.documents if document.kind == "config"]
    configs += [checkpoint.config for checkpoint in obs.checkpoints if checkpoint.config]
    for config in configs:
        if any(name in config for name in ("model_type", "architectures", "num_hidden_layers", "vocab_size")):
            text = config.get("text_config")
            return {**config, **text} if isinstance(text, Mapping) else config
    return configs[0] if configs else {}


def config_number(obs: Observations, *names: str) -> float | None:
    """The first of these fields of `config.json` that is a number."""
    config = model_config(obs)
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def mixture_of_experts(obs: Observations) -> bool:
    """More than one expert, by the arguments or the model's configuration."""
    if any((obs.args.number(name) or 0) > 1 for name in ("num_experts", "num_moe_experts")):
        return True
    return (config_number(obs, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") or 0) > 1


def latent_attention(obs: Observations) -> bool:
    """Multi-head latent attention: query and key heads (nope + rope) are larger than value heads."""
    if obs.args.on("multi_latent_attention"):
        return True
    # Megatron prints these sizes for every model; where it says that there is no latent attention they mean nothing.
    printed = not obs.args.given("multi_latent_attention")
    nope = (obs.args.number("qk_head_dim") if printed else None) or config_number(obs, "qk_nope_head_dim")
    rope = (obs.args.number("qk_pos_emb_head_dim") if printed else None) or config_number(obs, "qk_rope_head_dim")
    value = (obs.args.number("v_head_dim") if printed else None) or config_number(obs, "v_head_dim")
    return bool(nope and value and nope + (rope or 0) != value)


def flash_attention_3(obs: Observations) -> bool | None:
    """FlashAttention 3 is installed; None where the evidence lists no versions of it."""
    told: bool | None = None
    for document in obs.documents:
        if document.kind not in ("versions", "env"):
            continue
        for name, value in document.fields.items():
            key = name.lower().replace("-", "_")
            if key in ("flash_attn_3", "flash_attention_3", "fa3", "flashattn_hopper", "flash_attn_hopper"):
                told = str(value).strip().lower() not in ("", "0", "none", "false", "no", "null", "not installed")
            elif key in ("flash_attn", "flash_attention") and str(value).startswith("3"):
                told = True
    return told


def routing_replay(obs: Observations) -> bool:
    """The actor replays recorded expert routes; the reference routes by itself."""
    return any(obs.args.on(name) for name in ("use_routing_replay", "use_rollout_routing_replay"))


def context_parallel(obs: Observations) -> int:
    """Context parallel size, at least 1."""
    return max(1, int(obs.args.number("context_parallel_size") or 1))


def low_rank(obs: Observations) -> bool:
    """LoRA or another adapter: actor and reference are different models by design."""
    return any(obs.args.on(name) for name in ("lora_rank", "use_lora", "lora_r"))


def exp_estimator(obs: Observations) -> bool:
    """The KL loss exponentiates the log-ratio, so one outlier can overflow it."""
    return obs.args.text("kl_loss_type") in ("low_var_kl", "k3")


def skips_bad_steps(obs: Observations) -> bool:
    """A step whose gradient is not finite leaves the weights alone (slime and Relax with the check switched off; plain
    Megatron only stops looking)."""
    flags = obs.args.flags
    off = obs.args.on("no_check_for_nan_in_loss_and_grad") or flags.get("check_for_nan_in_loss_and_grad") is False
    return off and obs.args.framework in ("", "slime", "relax", "miles")


def may_skip_bad_steps(obs: Observations) -> bool:
    """The framework skips bad steps by itself (verl): then numbers that come back show it, because an update with NaN
    never gives a number again. Of any other run that says nothing of a skip none is assumed."""
    return of_verl(obs) or any(of_verl(obs, row.where) for row in obs.metrics)


def of_verl(obs: Observations, where: Where | None = None) -> bool:
    """The run is verl's: by its arguments, or by the names on this line of its log."""
    return obs.args.framework == "verl" or (where is not None and "actor/" in where.text)


def relax_bridge(obs: Observations) -> bool:
    """Relax with Megatron-Bridge, which loads Hugging Face weights itself: its way unless the mode is `raw`."""
    return obs.args.framework == "relax" and obs.args.text("megatron_to_hf_mode") in ("", "bridge")


def relax_gpus(args: Args) -> Mapping[str, int]:
    """GPUs of each role by Relax's `--resource '{"actor": [1, 8], …}'`; empty without it."""
    try:
        given = json.loads(args.text("resource") or "{}")
    except ValueError:
        return {}
    roles = given.items() if isinstance(given, dict) else ()
    return {
        str(role): share[1]
        for role, share in roles
        if isinstance(share, list) and len(share) == 2 and isinstance(share[1], int) and not isinstance(share[1], bool)
    }


def vocabulary(obs: Observations) -> int | None:
    """Entries of the vocabulary: padded as the trainer pads it where that is told, else the model's."""
    told = obs.args.number("padded_vocab_size") or config_number(obs, "vocab_size") or obs.vocab_size
    told = told or obs.args.number("vocab_size")
    return int(told) if told and told > 1 else None


def sglang_version(obs: Observations) -> str:
    """Version of SGLang: as the server or `versions.json` tells it, else as a log line does; empty where unknown."""
    for document in obs.documents:
        value = document.fields.get("version") if document.kind == "server_info" else document.fields.get("sglang")
        if document.kind in ("server_info", "versions") and value:
            return str(value)
    for event in obs.events:
        if event.kind == "update_summary" and event.data.get("sglang"):
            return str(event.data["sglang"])
    return ""


def engine_has(obs: Observations, *names: str) -> bool | None:
    """One of these settings of SGLang is on, by the server's report or slime's flags; None where neither is there."""
    told = [d.fields for d in obs.documents if d.kind == "server_info"]
    told += [switches for event in obs.events if isinstance(switches := event.data.get("switches"), dict)]
    told = told or [{key[7:]: value for key, value in obs.args.flags.items() if key.startswith("sglang_")}]
    told = [fields for fields in told if fields]
    if not told:
        return None
    return any(Args(fields).on(name) for fields in told for name in names)


def fires(obs: Observations, *ids: str) -> tuple[Verdict, ...]:
    """Warn and fail verdicts of these checks, or areas (`weights.*`), among those of the stages before."""
    return tuple(
        verdict
        for verdict in obs.verdicts
        if verdict.status in FIRING
        and any(verdict.id == id or (id.endswith(".*") and verdict.id.startswith(id[:-1])) for id in ids)  # noqa: A001
    )


def emptied(obs: Observations, rollout: int | None = None) -> Verdict | None:
    """The verdict that an engine served after its weights were released and resumed and not pushed again, in this
    rollout if that is known of both: what was compared before that does not speak for what it served."""
    for verdict in fires(obs, "engine.resume-order", "train.colocate-swap"):
        value = verdict.value if isinstance(verdict.value, dict) else {}
        here = rollout is None or verdict.rollout in (None, rollout)
        if here and (value.get("kind") in ("no-update", "missing-tag") or value.get("pattern") == "no-weights"):
            return verdict
    return None


def owned(obs: Observations, engine: object = None) -> tuple[str, ...]:
    """Ids of the engines that rltop started itself; with `engine`, that one if it is among them.

    Advice for these names rltop's own tools: flags of the trainer do nothing to them.
    """
    ids = tuple(fact.id for fact in obs.engines if fact.owned)
    if engine is None:
        return ids
    return (str(engine),) if str(engine) in ids else ()


NO_TRAINER = "rollout-only mode has no trainer"
"""Cause of a skip."""
NO_ENGINE = "train-only mode starts no engine"
"""Cause of a skip."""
