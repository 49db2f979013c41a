"""Planted faults: named, timed, and each breaks exactly what it says."""

from __future__ import annotations

import math

import pytest
import torch

from rltop.errors import RltopError
from rltop.train.inject import CATALOGUE, Fault, active, local_layer_ids, parse_fault, perturb, poison, swap_layers
from rltop.train.tiny_model import TinyModelConfig, initial_weights

pytestmark = pytest.mark.train


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_fault_can_be_named_with_and_without_a_rollout(name: str) -> None:
    assert parse_fault(name) == Fault(CATALOGUE[name], CATALOGUE[name].default_rollout)
    assert parse_fault(f"{name}@0").rollout == 0
    assert str(parse_fault(f"{name}@0")) == f"{name}@0"


def test_only_the_reference_fault_cannot_wait() -> None:
    assert parse_fault("loss-sum@12").rollout == 12
    with pytest.raises(RltopError, match="ref-perturb cannot wait for rollout 3"):
        parse_fault("ref-perturb@3")


@pytest.mark.parametrize("text", ["nan", "nan-grad@", "nan-grad@-1", "nan-grad@1.5", "", "nan-grad@1@2"])
def test_an_unknown_fault_is_answered_with_the_catalogue(text: str) -> None:
    with pytest.raises(RltopError, match="unknown fault") as caught:
        parse_fault(text)
    assert all(name in caught.value.why for name in CATALOGUE)


def test_one_time_faults_act_in_their_rollout_and_lasting_ones_from_it_on() -> None:
    once, lasting = parse_fault("nan-grad@2"), parse_fault("loss-sum@2")
    assert [once.active(rollout) for rollout in range(5)] == [False, False, True, False, False]
    assert [lasting.active(rollout) for rollout in range(5)] == [False, False, True, True, True]
    assert active([once, lasting], "nan-grad", 2)
    assert not active([lasting], "nan-grad", 2)
    with pytest.raises(KeyError):
        active([once], "misspelt", 2)


def test_the_noise_has_the_stated_size_and_follows_from_the_seed() -> None:
    tensors = [torch.zeros(200, 200) for _ in range(3)]
    for tensor, seed in zip(tensors, (1, 1, 2), strict=True):
        perturb([tensor], seed=seed)
    assert tensors[0].std().item() == pytest.approx(1e-2, rel=0.02)
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])


def test_one_element_becomes_nan() -> None:
    gradients = [torch.ones(2, 3), torch.ones(4)]
    poison(gradients)
    assert math.isnan(gradients[0][0, 0].item())
    assert sum(int(gradient.isnan().sum()) for gradient in gradients) == 1


def test_first_and_last_layer_change_places_and_nothing_else_does() -> None:
    weights = initial_weights(TinyModelConfig(num_layers=3))
    swapped = list(swap_layers(weights.items()))
    assert [name for name, _ in swapped] == list(weights)
    other = {"0": "2", "1": "1", "2": "0"}
    for name, tensor in swapped:
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = other[parts[2]]
        assert torch.equal(tensor, weights[".".join(parts)]), name


def test_a_model_without_layers_cannot_be_swapped() -> None:
    with pytest.raises(RltopError, match="no layers"):
        list(swap_layers([("model.norm.weight", torch.ones(2))]))


def test_the_second_stage_counts_its_layers_from_0_and_nothing_else_changes() -> None:
    weights = initial_weights(TinyModelConfig(num_layers=6))
    stages = [
        {name: tensor for name, tensor in weights.items() if name.split(".")[2] in layers or extra in name}
        for layers, extra in (("01", "embed"), ("23", "nothing"), ("45", "model.norm"))
    ]
    assert sum(map(len, stages)) == len(weights)
    wrong = local_layer_ids(stages)
    assert wrong[0] == stages[0]
    assert wrong[2] == stages[2]
    assert list(wrong[1]) == [name.replace("s.2.", "s.0.").replace("s.3.", "s.1.") for name in stages[1]]
    assert all(mine is theirs for mine, theirs in zip(wrong[1].values(), stages[1].values(), strict=True))
    with pytest.raises(RltopError, match="no second pipeline stage"):
        local_layer_ids(stages[:1])
