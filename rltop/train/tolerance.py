"""How far loss and grad_norm of a replay may be from those of another layout. Pure arithmetic.

The same samples on the same weights give the same bits as long as every sum is taken in the same order. Tensor, data
and pipeline parallel sizes (and micro-batches) take some sums in another one. Where the bound comes from:

1. One sum. n fp32 terms in another order differ by about sqrt(n) * u of the sum of their sizes, u = 2**-24 (Higham and
   Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4).
   Errors of different sums are independent: their squares add. CONFIDENCE standard deviations are allowed.
2. The forward. Per layer two sums are split: attention's output over its `hidden` inputs and the MLP's over
   `intermediate`; at the end the softmax over `vocab`. terms = layers * (hidden + intermediate) + vocab.
3. The loss of the first step. Log-probs are of the size of ln(vocab), and the loss is a mean of them weighted by
   normalised advantages (mean size at most 1): absolute error CONFIDENCE * u * sqrt(terms) * ln(vocab).
4. grad_norm of the first step. The backward takes the forward's sums once for activations and once for weights, on top
   of the forward's own error, and sums over the tokens of the step:
   relative error epsilon = CONFIDENCE * u * sqrt(3 * terms + tokens).
5. Later steps. Adam divides by the root of the second moment, so a weight whose gradient is below the error gets a step
   of any sign. With gradients spread about evenly around 0, the root mean square of the difference of two updates is
   rho = sqrt(3.2 * epsilon) of an update (integrate min(2, epsilon / |g|)**2 over a standard normal g), independently
   from update to update. An update is of size lr per weight, and these differences have no direction of their own:
   after s updates the loss may differ by sqrt(s) * rho * lr * grad_norm more, and grad_norm, which one update moves by
   at most about its own size, by sqrt(s) * rho of itself.

Chaos is not in the bound: after many steps two layouts are two runs. slime's own test of parallel sizes allows 1 % of
grad_norm (`--ci-load-grad-norm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNIT_ROUNDOFF = 2.0**-24
CONFIDENCE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What of a model the bound depends on."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def terms(self) -> int:
        """Of all sums of the forward that are split; see the module, 2."""
        return self.layers * (self.hidden + self.intermediate) + self.vocab


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Of one step."""

    loss: float
    """Absolute; for a loss above 1, of the loss."""
    grad_norm: float
    """Of the grad_norm."""


def tolerance(sizes: ModelSizes, *, tokens: int, updates: int, lr: float, grad_norm: float) -> Tolerance:
    """What another layout may change.

    tokens: response tokens of the step; updates: optimizer steps since the common weights; lr, grad_norm: of the step.
    """
    unit = CONFIDENCE * UNIT_ROUNDOFF
    epsilon = unit * math.sqrt(3 * sizes.terms + tokens)
    drift = math.sqrt(updates * 3.2 * epsilon)
    return Tolerance(unit * math.sqrt(sizes.terms) * math.log(sizes.vocab) + drift * lr * grad_norm, epsilon + drift)
