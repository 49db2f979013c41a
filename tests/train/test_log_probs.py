"""Log-probs and entropies out of logits, and their gradient, against torch's own functions."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from rltop.train import log_probs
from rltop.train.layout import Layout
from rltop.train.log_probs import Entropy, Rows, token_log_probs
from rltop.train.megatron.batching import TokenSample, collate
from rltop.train.megatron.ranks import Ranks
from rltop.train.megatron.vocab_parallel import rows_of, scores

pytestmark = pytest.mark.train

WIDTH = 11


def of_torch(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits.float() / temperature, dim=-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def some_logits(rows: int = 9) -> Tensor:
    return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)) * 3).requires_grad_()


def gradient(found: tuple[Tensor, Tensor], logits: Tensor, *, entropy: bool) -> Tensor:
    weight = torch.linspace(-1, 2, len(found[0]))
    total = (found[0] * weight).sum()
    if entropy:
        total = total + (found[1] * weight.flip(0)).sum()
    (result,) = torch.autograd.grad(total, logits)
    return result


def test_log_probs_and_entropy_worked_out_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    chosen, entropy = token_log_probs(logits, torch.tensor([0, 1]), temperature=1.0)
    assert chosen.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    assert entropy.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2)])


def test_the_temperature_divides_the_logits() -> None:
    logits, target = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    hot, _ = token_log_probs(logits, target, temperature=2.0)
    halved, _ = token_log_probs(logits / 2, target, temperature=1.0)
    assert torch.equal(hot, halved)


@pytest.mark.parametrize("block", [log_probs.BLOCK, 2 * WIDTH, 1], ids=["one block", "pairs", "rows"])
@pytest.mark.parametrize("rows", [slice(2, 7), torch.tensor([6, 0, 3, 8, 4])], ids=["neighbours", "index"])
@pytest.mark.parametrize("entropy", get_args(Entropy))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradient_are_those_of_autograd(
    temperature: float, entropy: Entropy, rows: Rows, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "BLOCK", block)
    logits, targets = some_logits(), torch.tensor([0, 3, 10, 2, 2])
    found = token_log_probs(logits, targets, temperature, rows=rows, entropy=entropy)
    wanted = of_torch(logits[rows], targets, temperature)
    torch.testing.assert_close(found[0], wanted[0])
    if entropy == "none":
        assert found[1].numel() == 0
    else:
        torch.testing.assert_close(found[1], wanted[1])
    assert found[1].requires_grad == (entropy == "trained")
    trained = entropy == "trained"
    mine, theirs = gradient(found, logits, entropy=trained), gradient(wanted, logits, entropy=trained)
    torch.testing.assert_close(mine, theirs)
    unnamed = sorted({*range(len(logits))} - {*torch.arange(len(logits))[rows].tolist()})
    assert not mine[unnamed].any()


def test_each_of_the_two_may_stay_out_of_the_loss() -> None:
    logits, targets = some_logits(5), torch.tensor([0, 3, 10, 2, 2])
    for at in (0, 1):
        (mine,) = torch.autograd.grad(token_log_probs(logits, targets, 1.0)[at].sum(), logits)
        (theirs,) = torch.autograd.grad(of_torch(logits, targets, 1.0)[at].sum(), logits)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rows", [slice(0, 5), torch.tensor([4, 0, 3, 1, 2])], ids=["neighbours", "index"])
@pytest.mark.parametrize("entropy", get_args(Entropy))
def test_log_probs_of_bf16_are_fp32_and_the_gradient_is_rounded_once(entropy: Entropy, rows: Rows) -> None:
    logits, targets = some_logits(5).detach().bfloat16().requires_grad_(), torch.tensor([0, 3, 10, 2, 2])
    trained = entropy == "trained"
    found = token_log_probs(logits, targets, 1.0, rows=rows, entropy=entropy)
    assert found[0].dtype == torch.float32
    mine = gradient(found, logits, entropy=trained)
    exact = logits.detach().double().requires_grad_()
    every = torch.log_softmax(exact[rows], dim=-1)
    wanted = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    theirs = gradient(wanted, exact, entropy=trained)
    assert mine.dtype == torch.bfloat16
    # bf16 has 8 bits: one rounding is off by 1/256 of the value at most.
    torch.testing.assert_close(mine.double(), theirs, rtol=1 / 255, atol=1e-7)


def test_what_is_measured_without_a_graph_has_the_same_bits() -> None:
    logits, targets = some_logits(5), torch.tensor([0, 3, 10, 2, 2])
    chosen, entropy = token_log_probs(logits, targets, 0.7)
    for kind, graph in itertools.product(get_args(Entropy), (True, False)):
        with torch.set_grad_enabled(graph):
            again, measured = token_log_probs(logits, targets, 0.7, entropy=kind)
        assert torch.equal(again, chosen)
        assert kind == "none" or torch.equal(measured, entropy)


@pytest.mark.parametrize("entropy", get_args(Entropy))
@pytest.mark.parametrize("prompt", [2, 40], ids=["all rows between", "the rows that are wanted"])
def test_the_scores_of_a_micro_batch_are_in_the_order_of_its_samples(prompt: int, entropy: Entropy) -> None:
    """Samples of other lengths around, so that wanted rows and others mix; with a long prompt few are wanted."""
    samples = [TokenSample([*range(prompt), 3, 4, 5], 3), TokenSample([1, 2, 6], 1), TokenSample([1, 2, 7, 8], 2)]
    micro = collate(samples, (0, 2, 1), torch.device("cpu"))
    length = micro.tokens.shape[1]
    logits = torch.randn(length, 3, 60, generator=torch.Generator().manual_seed(2), requires_grad=True)
    ranks = Ranks(Layout().place(0), torch.device("cpu"), None, None, None)
    found = scores(logits, micro, 0.7, ranks=ranks, vocab_size=60, entropy=entropy)
    flat = logits.transpose(0, 1).reshape(-1, 60)
    rows = [prompt - 1, prompt, prompt + 1, length + 1, length + 2, 2 * length + 1]
    wanted = torch.stack(of_torch(flat[rows], torch.tensor([3, 4, 5, 7, 8, 6]), 0.7))[: len(found)]
    assert len(found) == (1 if entropy == "none" else 2)
    torch.testing.assert_close(found, wanted)
    mine, theirs = (torch.autograd.grad((one[0] * torch.arange(6.0)).sum(), logits)[0] for one in (found, wanted))
    torch.testing.assert_close(mine, theirs)


def test_rows_that_come_once_have_the_gradient_of_an_index() -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    index, weight = torch.tensor([4, 0, 3]), torch.arange(12.0).view(3, 4)
    (wanted,) = torch.autograd.grad((whole[index] * weight).sum(), whole)
    (found,) = torch.autograd.grad((rows_of(whole, index) * weight).sum(), whole)
    assert torch.equal(found, wanted)
