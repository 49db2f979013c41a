"""The Megatron backend against `transformers`, against itself, and against bad input."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltop.errors import RltopError
from rltop.train.loss import LossConfig
from rltop.train.megatron.backend import BackendConfig, MegatronBackend
from rltop.train.megatron.batching import HasTokens, TokenSample, TrainSample
from rltop.train.tiny_model import make_tiny_model

pytestmark = pytest.mark.train

CONFIG = BackendConfig(lr=1e-3, max_tokens_per_micro_batch=256)
"""Small micro-batches, so that every test works with several, of different lengths."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def new_backend(checkpoint: Path) -> Callable[..., MegatronBackend]:
    def make(**changes: Any) -> MegatronBackend:
        return MegatronBackend(checkpoint, config=dataclasses.replace(CONFIG, **changes))

    return make


@pytest.fixture(scope="module")
def backend(new_backend: Callable[..., MegatronBackend]) -> MegatronBackend:
    """Shared by the tests that do not train. Its reference is its own initial weights."""
    shared = new_backend()
    shared.snapshot_ref()
    return shared


def some_samples(count: int = 24, seed: int = 0) -> list[TokenSample]:
    """Random tokens except the last, `<|pad|>`, whose embedding gets no gradient in transformers; prompts of 3 to 40
    tokens, responses of 1 to 12."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt, response = draw.randint(3, 40), draw.randint(1, 12)
        samples.append(TokenSample([draw.randrange(259) for _ in range(prompt + response)], response))
    return samples


def some_train_samples(backend: MegatronBackend, samples: Sequence[TokenSample]) -> list[TrainSample]:
    """With the passes' real log-probs and advantages that differ between samples."""
    actor, ref = backend.log_probs(samples, which="actor"), backend.log_probs(samples, which="ref")
    return [
        TrainSample(
            sample.tokens,
            sample.response_length,
            advantage=(-1.0) ** index * (1 + index / 10),
            old_log_probs=actor[index],
            ref_log_probs=ref[index],
            rollout_log_probs=actor[index] + 0.25,
        )
        for index, sample in enumerate(samples)
    ]


def hf_log_probs(model: Any, sample: HasTokens, temperature: float = 1.0) -> torch.Tensor:
    """The response's log-probs from transformers' own forward, one unpadded sequence at a time."""
    logits = model(torch.tensor([sample.tokens])).logits[0, :-1] / temperature
    every = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
    result: torch.Tensor = every[-sample.response_length :]
    return result


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")


def test_log_probs_agree_with_transformers(backend: MegatronBackend, hf_model: Any) -> None:
    samples = some_samples()
    ours = backend.log_probs(samples, which="actor")
    with torch.no_grad():
        gaps = [(mine - hf_log_probs(hf_model, sample)).abs().max() for mine, sample in zip(ours, samples, strict=True)]
    assert [len(mine) for mine in ours] == [sample.response_length for sample in samples]
    assert max(gaps) < 1e-5


def test_log_probs_are_those_of_the_rollout_temperature(
    new_backend: Callable[..., MegatronBackend], hf_model: Any
) -> None:
    sample = some_samples(1)[0]
    (ours,) = new_backend(temperature=0.5).log_probs([sample], which="actor")
    with torch.no_grad():
        assert (ours - hf_log_probs(hf_model, sample, temperature=0.5)).abs().max() < 1e-5


def test_the_gradient_agrees_with_transformers(new_backend: Callable[..., MegatronBackend], hf_model: Any) -> None:
    backend, samples = new_backend(), some_samples()
    backend.snapshot_ref()
    metrics = backend.train_step(some_train_samples(backend, samples), LossConfig())
    hf_model.zero_grad()
    # At the first step the ratio is 1 and the surrogate's gradient is that of advantage * log-prob.
    losses = [-((-1.0) ** i) * (1 + i / 10) * hf_log_probs(hf_model, sample).mean() for i, sample in enumerate(samples)]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    norm = torch.stack([p.grad.square().sum() for p in hf_model.parameters() if p.grad is not None]).sum().sqrt()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("per_token", [False, True])
def test_gradient_and_metrics_do_not_depend_on_the_micro_batching(
    new_backend: Callable[..., MegatronBackend], per_token: bool
) -> None:
    steps = []
    for max_tokens in (64, 100_000):
        backend = new_backend(max_tokens_per_micro_batch=max_tokens)
        backend.snapshot_ref()
        samples = some_train_samples(backend, some_samples())
        steps.append(backend.train_step(samples, LossConfig(calculate_per_token_loss=per_token, entropy_coef=0.01)))
    many, one = steps
    assert many == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_actor_and_reference_are_bitwise_equal_before_an_update(backend: MegatronBackend) -> None:
    samples = some_samples()
    actor, ref = backend.log_probs(samples, which="actor"), backend.log_probs(samples, which="ref")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actor, ref, strict=True))


def test_the_first_step_measures_exactly_zero_drift(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend()
    backend.snapshot_ref()
    metrics = backend.train_step(some_train_samples(backend, some_samples()), LossConfig(kl_loss_coef=0.1))
    assert metrics["ppo_kl"] == 0.0
    assert metrics["kl_loss"] == 0.0
    assert metrics["pg_clipfrac"] == 0.0
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(0.25)
    assert metrics["step_skipped"] == 0.0
    assert set(metrics) >= {"loss", "pg_loss", "entropy_loss", "grad_norm", "lr"}


def test_the_first_of_several_steps_per_rollout_measures_exactly_zero_drift(
    new_backend: Callable[..., MegatronBackend],
) -> None:
    backend = new_backend(global_batch_size=8)
    backend.snapshot_ref()
    samples = some_train_samples(backend, some_samples(24))
    first = backend.train_step(samples[:8], LossConfig())
    second = backend.train_step(samples[8:16], LossConfig())
    assert first["ppo_kl"] == 0.0
    assert second["ppo_kl"] != 0.0


def test_a_later_step_measures_drift_from_the_reference(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend()
    backend.snapshot_ref()
    backend.train_step(some_train_samples(backend, some_samples()), LossConfig())
    metrics = backend.train_step(some_train_samples(backend, some_samples(seed=1)), LossConfig())
    assert metrics["ppo_kl"] == 0.0
    assert metrics["kl_loss"] > 0.0


def test_without_the_actor_pass_the_steps_own_log_probs_stand_in(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend()
    backend.snapshot_ref()
    with_pass = some_train_samples(backend, some_samples())
    without = [dataclasses.replace(sample, old_log_probs=None, ref_log_probs=None) for sample in with_pass]
    other = new_backend().train_step(without, LossConfig())
    metrics = backend.train_step(with_pass, LossConfig())
    assert "kl_loss" not in other
    assert {name: metrics[name] for name in other} == other


def test_a_step_changes_every_weight_and_not_the_reference(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend()
    backend.snapshot_ref()
    samples = some_samples()
    before = {name: tensor.clone() for name, tensor in backend.hf_tensors()}
    reference = backend.log_probs(samples, which="ref")
    backend.train_step(some_train_samples(backend, samples), LossConfig())
    unchanged = [name for name, tensor in backend.hf_tensors() if torch.equal(before[name], tensor)]
    assert unchanged == []
    after = backend.log_probs(samples, which="ref")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(reference, after, strict=True))


def test_two_equal_runs_are_bitwise_equal(new_backend: Callable[..., MegatronBackend]) -> None:
    def run() -> tuple[list[object], dict[str, torch.Tensor]]:
        backend = new_backend()
        record: list[object] = [*backend.cold_start(some_samples(40), 3, lr=3e-3, batch_size=16)]
        backend.snapshot_ref()
        for seed in range(2):
            record.append(backend.train_step(some_train_samples(backend, some_samples(seed=seed)), LossConfig()))
        return record, {name: tensor.clone() for name, tensor in backend.hf_tensors()}

    (record, weights), (record_again, weights_again) = run(), run()
    assert record == record_again
    assert all(torch.equal(tensor, weights_again[name]) for name, tensor in weights.items())


def test_the_cold_start_lowers_the_loss_and_calls_continue_each_other(
    new_backend: Callable[..., MegatronBackend],
) -> None:
    examples = [TokenSample([*b"abcabc", 97 + index % 3], 1) for index in range(30)]
    at_once, in_parts = new_backend(), new_backend()
    losses = at_once.cold_start(examples, 6, lr=3e-3, batch_size=8)
    parts = in_parts.cold_start(examples, 2, 3e-3, batch_size=8) + in_parts.cold_start(examples, 4, 3e-3, batch_size=8)
    assert losses == parts
    assert losses[-1] < losses[0]


def test_masked_tokens_are_not_trained_on(new_backend: Callable[..., MegatronBackend]) -> None:
    sample = TokenSample(list(b"prompt: right wrong"), 11, loss_mask=[1] * 5 + [0] * 6)
    short = TokenSample(list(b"prompt: right"), 5)
    masked = new_backend().cold_start([sample], 1, lr=1e-3)
    assert masked == pytest.approx(new_backend().cold_start([short], 1, lr=1e-3), rel=1e-5)


def test_the_learning_rate_warms_up(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend(lr=1e-3, lr_warmup_steps=3)
    backend.snapshot_ref()
    samples = some_train_samples(backend, some_samples(4))
    rates = [backend.train_step(samples, LossConfig())["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_a_saved_checkpoint_is_complete_and_holds_the_same_bits(
    new_backend: Callable[..., MegatronBackend], checkpoint: Path, tmp_path: Path
) -> None:
    backend = new_backend()
    backend.cold_start(some_samples(4), 1, lr=1e-2)
    saved = tmp_path / "saved"
    for _ in range(2):  # the second replaces the first
        backend.save_hf(saved)
    assert {path.name for path in saved.iterdir()} == {path.name for path in checkpoint.iterdir()}
    assert set(load_file(saved / "model.safetensors")) == set(load_file(checkpoint / "model.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    again = MegatronBackend(saved, config=CONFIG)
    assert all(torch.equal(tensor, dict(again.hf_tensors())[name]) for name, tensor in backend.hf_tensors())


def test_the_pushed_tensors_have_exactly_the_checkpoints_names_and_bits(
    new_backend: Callable[..., MegatronBackend], checkpoint: Path
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    pushed = dict(new_backend().hf_tensors())
    assert set(pushed) == set(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in pushed.items())


def test_a_reference_can_come_from_another_checkpoint(
    new_backend: Callable[..., MegatronBackend], tmp_path: Path
) -> None:
    trained, samples = new_backend(), some_samples(4)
    trained.cold_start(samples, 1, lr=1e-2)
    trained.save_hf(tmp_path / "trained")
    backend = new_backend()
    backend.load_ref(tmp_path / "trained")
    expected = trained.log_probs(samples, which="actor")
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(backend.log_probs(samples, which="ref"), expected, strict=True)
    )


def test_the_description_says_what_trains_and_that_it_pads(backend: MegatronBackend) -> None:
    assert backend.description.startswith("megatron-core 0.")
    assert backend.description.endswith("local spec, cpu/gloo, fp32, padded micro-batches")


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (TokenSample([1, 2, 3], 3), "both prompt and response"),
        (TokenSample([1, 2, 3], 0), "both prompt and response"),
        (TokenSample([1, 260, 3], 1), "vocabulary has 260"),
        (TokenSample([1] * 1025, 1), "1024 positions"),
        (TokenSample([1, 2, 3], 2, loss_mask=[1]), "loss mask of 1"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(backend: MegatronBackend, sample: TokenSample, why: str) -> None:
    with pytest.raises(RltopError) as caught:
        backend.log_probs([TokenSample([1, 2], 1), sample], which="actor")
    assert caught.value.where == "sample 1"
    assert why in caught.value.why


def test_no_samples_and_no_reference_are_named(new_backend: Callable[..., MegatronBackend]) -> None:
    backend = new_backend()
    with pytest.raises(RltopError, match="no samples"):
        backend.log_probs([], which="actor")
    with pytest.raises(RltopError, match="no reference model"):
        backend.log_probs(some_samples(1), which="ref")


@pytest.mark.parametrize(
    ("second", "why"), [(None, "1 of 2 samples have none"), ([-1.0, -2.0], "not one value per response token")]
)
def test_log_probs_that_do_not_match_the_responses_are_refused(
    new_backend: Callable[..., MegatronBackend], second: list[float] | None, why: str
) -> None:
    samples = [TrainSample([1, 2, 3], 1, 1.0, ref_log_probs=ref) for ref in ([-1.0], second)]
    with pytest.raises(RltopError, match="ref_log_probs does not match the responses") as caught:
        new_backend().train_step(samples, LossConfig())
    assert caught.value.why == why


def _edited_config(checkpoint: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported"),
        ({"hidden_size": None}, "incomplete checkpoint configuration"),
        ({"intermediate_size": 96}, "wrong shape"),
        ({"num_hidden_layers": 1}, "tensors that the model lacks"),
        ({"num_hidden_layers": 3}, "lacks a tensor"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RltopError, match=message):
        MegatronBackend(_edited_config(checkpoint, tmp_path / "edited", **changes), config=CONFIG)


def test_a_missing_or_broken_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="unreadable checkpoint") as caught:
        MegatronBackend(tmp_path / "nowhere", config=CONFIG)
    assert caught.value.where == str(tmp_path / "nowhere" / "config.json")
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(RltopError, match="unreadable weights"):
        MegatronBackend(broken, config=CONFIG)


def test_sharded_checkpoints_are_read(
    checkpoint: Path, tmp_path: Path, new_backend: Callable[..., MegatronBackend]
) -> None:
    sharded = shutil.copytree(checkpoint, tmp_path / "sharded")
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, sharded / file)
    where = {name: file for file, members in shards.items() for name in members}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    pushed = dict(MegatronBackend(sharded, config=CONFIG).hf_tensors())
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in weights.items())
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RltopError, match="unreadable weights") as caught:
        MegatronBackend(sharded, config=CONFIG)
    assert caught.value.where.endswith("model-00002-of-00002.safetensors")


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(RltopError, match="lr must be positive"):
        BackendConfig(lr=0.0)
    with pytest.raises(RltopError, match="temperature must be positive"):
        BackendConfig(temperature=-1.0)
