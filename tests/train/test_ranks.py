"""Tensor, pipeline and data parallel ranks compute what one rank computes, and the same bits every time."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltop.engines.weights import digest_tensors
from rltop.train.layout import Layout, Place
from rltop.train.log_probs import token_log_probs
from rltop.train.loss import LossConfig
from rltop.train.megatron.backend import BackendConfig, MegatronBackend
from rltop.train.megatron.batching import TokenSample, TrainSample
from rltop.train.megatron.ranks import Ranks
from rltop.train.megatron.vocab_parallel import sharded_log_probs
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from tests.train.spawn import run_ranks

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

TP2, PP2, DP2 = Layout(tensor=2), Layout(pipeline=2), Layout(data=2)
STEPS = 10
CONFIG = BackendConfig(lr=1e-3, max_tokens_per_micro_batch=256, global_batch_size=12, deterministic=True)


@dataclass
class Seen:
    """What one run of the scenario showed on one rank."""

    log_probs: torch.Tensor
    equal_passes: bool
    steps: list[dict[str, float]]
    digests: dict[str, str]
    """Of all weights at the end; empty on ranks that gather none."""
    stages: list[set[str]]
    initial: dict[str, str]
    odd: tuple[torch.Tensor, ...] = ()
    """Of `odd_vocabulary`, where there are two shards."""


def samples_of(seed: int) -> list[TokenSample]:
    """24 samples, two steps. Lengths differ much, so that replicas and micro-batches get different shapes."""
    draw = random.Random(seed)
    samples = []
    for _ in range(24):
        prompt, response = draw.randint(3, 40), draw.randint(1, 12)
        samples.append(TokenSample([draw.randrange(259) for _ in range(prompt + response)], response))
    return samples


def scenario(place: Place, store: Any, checkpoint: Path, per_token: bool) -> Seen:
    """Log-probs, then ten steps with KL, entropy and ratio in the loss."""
    backend = MegatronBackend(checkpoint, config=CONFIG, place=place, store=store)
    initial = digest_tensors(backend.hf_tensors())
    backend.snapshot_ref()
    loss = LossConfig(kl_loss_coef=0.1, entropy_coef=0.01, calculate_per_token_loss=per_token)
    first: torch.Tensor | None = None
    steps: list[dict[str, float]] = []
    equal = False
    for rollout in range(STEPS // 2):
        samples = samples_of(rollout)
        actor, ref = backend.log_probs(samples, which="actor"), backend.log_probs(samples, which="ref")
        if first is None:
            first, equal = torch.cat(actor), torch.equal(torch.cat(actor), torch.cat(ref))
        batch = [
            TrainSample(s.tokens, s.response_length, (-1.0) ** at * (1 + at / 10), actor[at], ref[at], actor[at] + 0.25)
            for at, s in enumerate(samples)
        ]
        steps += [backend.train_step(batch[:12], loss), backend.train_step(batch[12:], loss)]
    stages = backend.hf_stages() or []
    digests = digest_tensors(item for stage in stages for item in stage.items())
    assert first is not None
    odd = odd_vocabulary(backend.ranks) if place.layout.tensor == 2 else ()
    return Seen(first, equal, steps, digests, [set(stage) for stage in stages], initial, odd)


def twice(place: Place, store: Any, checkpoint: Path, per_token: bool) -> tuple[Seen, Seen]:
    return scenario(place, store, checkpoint, per_token), scenario(place, store, checkpoint, per_token)


def odd_vocabulary(ranks: Ranks) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy and the gradient of this rank's columns for a vocabulary of 5 in two shards of 3."""
    logits, targets = odd_logits()
    whole = torch.nn.functional.pad(logits, (0, 1), value=9.0).chunk(2, dim=1)[ranks.place.tensor].clone()
    whole.requires_grad_()
    log_probs, entropy = sharded_log_probs(whole, targets, 0.7, ranks=ranks, vocab_size=5)
    (log_probs.sum() * 2 + entropy.square().sum()).backward()  # type: ignore[no-untyped-call]  # torch's
    assert whole.grad is not None
    return log_probs.detach(), entropy.detach(), whole.grad


def odd_logits() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)) * 4
    return logits, torch.tensor([0, 1, 2, 3, 4, 2, 3])


Runs = Callable[[Layout, bool], list[tuple[Seen, Seen]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers: a stage of two has a local layer 1 whose global number differs."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TinyModelConfig(num_layers=4))


@pytest.fixture(scope="module")
def runs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    @functools.cache
    def run(layout: Layout, per_token: bool) -> list[tuple[Seen, Seen]]:
        if layout.world == 1:
            return [twice(layout.place(0), None, checkpoint, per_token)]
        return run_ranks(layout, tmp_path_factory.mktemp("ranks"), twice, checkpoint, per_token)

    return run


SMALL = [pytest.param(TP2, False, id="TP2"), pytest.param(PP2, False, id="PP2"), pytest.param(DP2, False, id="DP2")]
LARGE = [
    pytest.param(Layout(tensor=2, pipeline=2), False, id="TP2xPP2", marks=pytest.mark.soak),
    pytest.param(Layout(tensor=2, data=2), True, id="TP2xDP2 per token", marks=pytest.mark.soak),
    pytest.param(Layout(pipeline=2, data=2), True, id="PP2xDP2 per token", marks=pytest.mark.soak),
    pytest.param(Layout(pipeline=4), False, id="PP4", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("layout", "per_token"), SMALL + LARGE)
def test_a_layout_computes_what_one_rank_computes(runs: Runs, layout: Layout, per_token: bool) -> None:
    ((one, _),) = runs(Layout(), per_token)
    ranks = [seen for seen, _ in runs(layout, per_token)]
    seen = ranks[0]
    assert (seen.log_probs - one.log_probs).abs().max() < 1e-4
    assert seen.equal_passes
    if layout == PP2:
        assert torch.equal(seen.log_probs, one.log_probs)
    assert len(seen.steps) == STEPS
    for mine, theirs in zip(seen.steps, one.steps, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-3)
    assert seen.steps[0]["ppo_kl"] == seen.steps[0]["kl_loss"] == 0.0
    # A gradient that lacks a part (a shard's share of a norm, a stage's embedding) moves at once; rounding does not.
    assert seen.steps[0]["grad_norm"] == pytest.approx(one.steps[0]["grad_norm"], rel=1e-5)
    for rank in ranks[1:]:
        assert torch.equal(rank.log_probs, seen.log_probs)
        assert rank.steps == seen.steps


def test_padding_of_the_vocabulary_has_probability_0(runs: Runs) -> None:
    first, second = (seen.odd for seen, _ in runs(TP2, False))
    logits, targets = odd_logits()
    logits.requires_grad_()
    log_probs, entropy = token_log_probs(logits, targets, 0.7)
    (log_probs.sum() * 2 + entropy.square().sum()).backward()  # type: ignore[no-untyped-call]  # torch's
    assert logits.grad is not None
    for mine in (first, second):
        torch.testing.assert_close(mine[0], log_probs.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine[1], entropy.detach(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([first[2], second[2]], dim=1)
    torch.testing.assert_close(gradient, torch.nn.functional.pad(logits.grad, (0, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "per_token"), SMALL + LARGE)
def test_the_same_layout_twice_is_bitwise_equal(runs: Runs, layout: Layout, per_token: bool) -> None:
    for first, second in runs(layout, per_token):
        assert torch.equal(first.log_probs, second.log_probs)
        assert first.steps == second.steps
        assert first.digests == second.digests


@pytest.mark.parametrize(("layout", "per_token"), SMALL + LARGE)
def test_one_rank_gathers_every_weight_under_its_global_name(runs: Runs, layout: Layout, per_token: bool) -> None:
    ((one, _),) = runs(Layout(), per_token)
    first, *others = [seen for seen, _ in runs(layout, per_token)]
    assert first.initial == one.initial
    assert set(first.digests) == set(one.digests)
    assert [name for name in one.digests if first.digests[name] == first.initial[name]] == []
    assert all(rank.digests == rank.initial == {} for rank in others)
    assert len(first.stages) == layout.pipeline
    layers = [{int(name.split(".")[2]) for name in stage if ".layers." in name} for stage in first.stages]
    width = 4 // layout.pipeline
    assert layers == [set(range(at * width, (at + 1) * width)) for at in range(layout.pipeline)]


@pytest.mark.soak
def test_an_untied_model_with_an_odd_vocabulary_splits_both_ways(checkpoint: Path, tmp_path: Path) -> None:
    """The output layer is a parameter of its own, and 261 rows do not divide by 2."""
    untied = Path(shutil.copytree(checkpoint, tmp_path / "untied"))
    weights = load_file(untied / "model.safetensors")
    rows = torch.nn.functional.pad(weights["model.embed_tokens.weight"], (0, 0, 0, 1), value=0.01)
    weights |= {"model.embed_tokens.weight": rows, "lm_head.weight": rows.flip(0).contiguous()}
    save_file(weights, untied / "model.safetensors")
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"vocab_size": 261, "tie_word_embeddings": False}))
    one = scenario(Layout().place(0), None, untied, False)
    seen = run_ranks(Layout(tensor=2, pipeline=2), tmp_path, scenario, untied, False)[0]
    assert seen.initial == one.initial
    assert (seen.log_probs - one.log_probs).abs().max() < 1e-4
    for mine, theirs in zip(seen.steps, one.steps, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-3)
