"""Log-probs of a rank token by token: actor against reference and against the engine, reduced where they lie.

slime logs means over all ranks, in which differences cancel, and in its default configuration no `rollout/log_probs`
at all. `rollout_data` of every rank of the last pipeline stage holds them per token, right before the optimizer. Here
they become a few numbers: everything is computed on the tensors' own device and comes to the host in one copy.

Measured: `actor_ref` (log_probs, ref_log_probs), `actor_engine` (log_probs, rollout_log_probs) and, where slime skipped
the actor's pass because it reuses the log-probs of the training forward, `ref_engine` (before the first update the
reference is the actor). What the engine did not sample (loss mask 0: tool output, padding) is left out against it.

torch is not imported here: it is what the tensors bring along.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAIRS: Mapping[str, tuple[str, str]] = {
    "actor_ref": ("log_probs", "ref_log_probs"),
    "actor_engine": ("log_probs", "rollout_log_probs"),
    "ref_engine": ("ref_log_probs", "rollout_log_probs"),
}
TOLERANCE = 1e-6
"""Nats. Two passes over equal weights give equal bits, or differ by far more than this."""
CHUNK = 1 << 20
"""Tokens taken at once: what is allocated beside the tensors stays below 50 MB."""
_EDGES: tuple[float, ...] = tuple(10.0 ** (exponent / 8) for exponent in range(-64, 17))
"""Bounds of the histogram, 1e-8 to 100 nats, eight per decade: a quantile is given by the bound above it."""
_QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, slots=True)
class Place:
    """A token of this rank."""

    sample: int
    """Position among the rank's samples."""
    token: int
    """Position in its response; under context parallelism in this rank's slice of it."""
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class Gap:
    """|left - right| over the tokens of one rank, in nats."""

    pair: str
    tokens: int
    """Compared: both are numbers."""
    bad: int
    """NaN or infinite on either side."""
    mean: float
    largest: float
    quantiles: Mapping[str, float]
    first: Place | None
    """First token that is bad or differs by more than `TOLERANCE`."""

    def metrics(self) -> dict[str, float]:
        """As metrics of a rollout."""
        values = {"mean": self.mean, "max": self.largest, **self.quantiles}
        named = {f"rollout/token_gap/{self.pair}/{name}": value for name, value in values.items()}
        return named | {
            f"rollout/token_gap/{self.pair}/tokens": float(self.tokens),
            f"rollout/token_gap/{self.pair}/nan": float(self.bad),
        }


def gaps(
    data: Mapping[str, Any], *, slice_mask: Callable[[Any, int, int], Any] | None = None
) -> tuple[list[Gap], dict[str, str]]:
    """Gaps of one rank's `rollout_data`, and pair -> why it was not measured.

    slice_mask: (mask, total_length, response_length) -> the part that is this rank's, under context parallelism.
    Raises nothing of its own; what torch raises passes.
    """
    found: list[Gap] = []
    absent: dict[str, str] = {}
    names = [name for name in PAIRS if name != "ref_engine" or "log_probs" not in data]
    for pair in names:
        left, right = (_tensors(data.get(name)) for name in PAIRS[pair])
        if left is None or right is None:
            missing = " and ".join(name for name in PAIRS[pair] if _tensors(data.get(name)) is None)
            absent[pair] = f"no {missing} in rollout_data"
            continue
        if [one.numel() for one in left] != [one.numel() for one in right]:
            absent[pair] = "the two sides have other lengths"
            continue
        masks = None
        if pair.endswith("_engine"):
            masks = _masks(data, left, slice_mask)
            if isinstance(masks, str):
                absent[pair] = masks
                continue
        found.append(_gap(pair, left, right, masks))
    return found, absent


def _tensors(value: object) -> list[Any] | None:
    """The tensors of a field, flat; None when it holds none."""
    if not isinstance(value, list | tuple) or not value:
        return None
    return list(value) if all(hasattr(one, "numel") and hasattr(one, "device") for one in value) else None


def _masks(
    data: Mapping[str, Any], left: Sequence[Any], slice_mask: Callable[[Any, int, int], Any] | None
) -> list[Any] | str | None:
    """Masks that fit the tensors; None: there are none; words: why they do not fit."""
    masks = _tensors(data.get("loss_masks"))
    if masks is None:
        return None
    if [one.numel() for one in masks] == [one.numel() for one in left]:
        return masks
    if slice_mask is None:
        return "the loss masks are longer than this rank's part (context parallelism)"
    totals, responses = data.get("total_lengths") or (), data.get("response_lengths") or ()
    sliced = [slice_mask(*one) for one in zip(masks, map(int, totals), map(int, responses), strict=False)]
    if [one.numel() for one in sliced] != [one.numel() for one in left]:
        return "the loss masks do not fit this rank's part (context parallelism)"
    return sliced


def _gap(pair: str, left: Sequence[Any], right: Sequence[Any], masks: Sequence[Any] | None) -> Gap:
    torch = sys.modules["torch"]
    lengths = [one.numel() for one in left]
    rows, starts = [], []
    for begin, end in _chunks(lengths):
        a = torch.cat([one.reshape(-1) for one in left[begin:end]]).detach().float()
        b = torch.cat([one.reshape(-1) for one in right[begin:end]]).detach().to(a.device).float()
        keep = None
        if masks is not None:
            keep = torch.cat([one.reshape(-1) for one in masks[begin:end]]).to(a.device) != 0
        rows.append(_reduced(torch, a, b, keep))
        starts.append(begin)
    return _read(pair, torch.stack(rows).cpu().tolist(), starts, lengths)


def _chunks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of samples with at most `CHUNK` tokens each, at least one sample."""
    found, begin, tokens = [], 0, 0
    for at, length in enumerate(lengths):
        if tokens and tokens + length > CHUNK:
            found.append((begin, at))
            begin, tokens = at, 0
        tokens += length
    return [*found, (begin, len(lengths))]


def _reduced(torch: Any, a: Any, b: Any, keep: Any) -> Any:
    """One row of float64 on the device: counts, sum, maximum, the first offender with its values, the histogram."""
    gap = (a - b).abs()
    equal_bits = a == b  # two infinities of one sign are no number in the difference and no NaN of a kernel either
    bad = ~(torch.isfinite(a) & torch.isfinite(b))
    taken = torch.ones_like(bad) if keep is None else keep
    bad = bad & taken
    fine = taken & ~bad
    clean = torch.where(fine & ~equal_bits, gap, torch.zeros_like(gap))
    edges = torch.tensor(_EDGES, dtype=torch.float32, device=a.device)
    bins = torch.bucketize(clean, edges)
    ones = fine.to(torch.float64)
    histogram = torch.zeros(len(_EDGES) + 1, dtype=torch.float64, device=a.device).scatter_add_(0, bins, ones)
    offends = bad | (fine & (clean > TOLERANCE))
    where = torch.arange(a.numel(), device=a.device)
    none = torch.full_like(where, a.numel())
    if a.numel():
        first = torch.where(offends, where, none).min()
        at = first.clamp(max=a.numel() - 1)
        largest, left, right = clean.max(), a[at], b[at]
    else:
        first = torch.zeros((), dtype=torch.int64, device=a.device)
        largest = left = right = torch.zeros((), device=a.device)
    head = [ones.sum(), bad.sum(), clean.sum(dtype=torch.float64), largest, first, left, right]
    return torch.cat([torch.stack([one.to(torch.float64) for one in head]), histogram])


def _read(pair: str, rows: Sequence[Sequence[float]], starts: Sequence[int], lengths: Sequence[int]) -> Gap:
    tokens, bad, total, largest = 0, 0, 0.0, 0.0
    first: Place | None = None
    histogram = [0.0] * (len(_EDGES) + 1)
    for row, begin in zip(rows, starts, strict=True):
        tokens += int(row[0])
        bad += int(row[1])
        total += row[2]
        largest = max(largest, row[3])
        histogram = [a + b for a, b in zip(histogram, row[7:], strict=True)]
        if first is None and (place := _place(int(row[4]), begin, lengths)) is not None:
            first = Place(*place, row[5], row[6])
    mean = total / tokens if tokens else math.nan
    quantiles = {name: _quantile(histogram, share, largest) for name, share in _QUANTILES.items()}
    return Gap(pair, tokens, bad, mean, largest if tokens else math.nan, quantiles, first)


def _place(at: int, begin: int, lengths: Sequence[int]) -> tuple[int, int] | None:
    """Sample and token of a flat position behind sample `begin`; None behind the end of the chunk."""
    for end in [stop for start, stop in _chunks(lengths) if start == begin]:
        for sample in range(begin, end):
            if at < lengths[sample]:
                return sample, at
            at -= lengths[sample]
    return None


def _quantile(histogram: Sequence[float], share: float, largest: float) -> float:
    """The bound above the quantile, never above the largest; NaN without any token."""
    total = sum(histogram)
    if not total:
        return math.nan
    if histogram[0] >= share * total:
        return 0.0 if largest == 0.0 else min(_EDGES[0], largest)
    seen = 0.0
    for count, edge in zip(histogram, _EDGES, strict=False):
        seen += count
        if seen >= share * total:
            return min(edge, largest)
    return largest
