"""Reader of rollout dumps: slime's `.pt` (and rltop's, and Relax's lines of JSON) -> the samples that are trained on.

The same rules judge a dump twice: before anything heavy starts, over rltop's reader that needs no torch
(`rltop.train.preflight`), and here, over `torch.load(weights_only=True)`, which runs no code that a file brings along
(slime loads with `weights_only=False`).

Failure policy: RltopError (exit code 2) with the file, the sample and the field, the reason and what to do. Fields that
this trainer does not know are left alone: the file stays as it is, and whoever reads it next finds them. A field that
would change what is trained (images, several training samples of one trajectory) is refused, not left out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_sample import DumpKind, DumpSample, make_sample
from rltop.train.arguments import TrainConfig
from rltop.train.sample import Sample, Status

FLAG = "--load-debug-rollout-data"
SHARE = "--load-debug-rollout-data-subsample"
LOADABLE: tuple[DumpKind, ...] = ("rollout", "samples")
"""Kinds of dumps that hold samples to train on."""
_WRONG_MODEL = "was it sampled from another model? --hf-checkpoint must be the one that the dump's engines served"
_PLAIN_ONLY = "save plain lists and tensors in its samples; `rltop dump show` reads the rest without running anything"
_UNUSABLE = ("multimodal_inputs", "multimodal_train_inputs")
_TEXTS_TO_TRY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the run needs of a dump."""

    group_size: int
    """Responses per prompt (`--n-samples-per-prompt`)."""
    step_size: int | None
    """Samples per optimizer step; None: a rollout is one step, whatever it holds."""
    share: float | None = None
    """`--load-debug-rollout-data-subsample`."""
    reward_key: str | None = None
    vocab_size: int | None = None
    """None: not known yet."""
    max_positions: int | None = None
    replicas: int = 1
    """Data parallel ranks, among which the samples of a step must divide."""


def expected_of(config: TrainConfig, checkpoint: Path | None) -> Expected:
    """What a run needs. checkpoint: with the model's config.json; None: rltop's tiny model, which says nothing yet."""
    sizes: dict[str, Any] = {}
    if checkpoint is not None:
        with contextlib.suppress(OSError, ValueError):  # whoever builds the model says what is wrong with it
            sizes = json.loads((checkpoint / "config.json").read_text())
    vocab, positions = sizes.get("vocab_size"), sizes.get("max_position_embeddings")
    return Expected(
        group_size=config.n_samples_per_prompt,
        step_size=config.step_size if config.fixed_step_size else None,
        share=config.load_debug_rollout_data_subsample,
        reward_key=config.reward_key,
        vocab_size=vocab if isinstance(vocab, int) else None,
        max_positions=positions if isinstance(positions, int) else None,
        replicas=config.layout.data,
    )


def dump_path(pattern: str, rollout_id: int) -> Path:
    """The file of a rollout."""
    return Path(pattern.format(rollout_id=rollout_id))


def load_rollout(pattern: str, rollout_id: int, expected: Expected) -> tuple[Sample, ...]:
    """The samples that a rollout trains on. Raises RltopError (exit code 2)."""
    path = dump_path(pattern, rollout_id)
    if path.suffix == ".jsonl":
        with DumpFile.open(path) as dump:
            return usable(path, dump.kind, dump, expected)
    content = _loaded(path)
    entries = content.get("samples") if isinstance(content, Mapping) else None
    kind = _kind(content)
    if kind != "rollout" or not isinstance(entries, list):
        raise not_rollouts(path, kind)
    rows = (
        {str(key): _plain(value) for key, value in entry.items()} for entry in entries if isinstance(entry, Mapping)
    )
    return usable(path, kind, (make_sample(at, row) for at, row in enumerate(rows)), expected)


def usable(path: Path, kind: DumpKind, entries: Iterable[DumpSample], expected: Expected) -> tuple[Sample, ...]:
    """The samples of a dump that are kept, each one fit to be trained on. Raises RltopError for the first that is not.

    entries: of the whole file, in its order.
    """
    found = list(_checked(path, kind, entries, expected))
    first, last = _check_counts(path, [sample.group_index for sample in found], expected)
    kept = [*found[:first], *found[len(found) - last :]]
    groups = {group: at for at, group in enumerate(dict.fromkeys(sample.group_index for sample in kept))}
    return tuple(replace(sample, index=at, group_index=groups[sample.group_index]) for at, sample in enumerate(kept))


def examine(
    path: Path, kind: DumpKind, entries: Iterable[DumpSample], expected: Expected, *, most: int | None = None
) -> list[Sample]:
    """As `usable`, but of a large dump nothing is kept: returns the first few samples, to look at their text.

    most: samples that are looked at; with it, and more samples, their number is not judged.
    """
    first: list[Sample] = []
    groups: list[int] = []
    for sample in _checked(path, kind, entries, expected):
        groups.append(sample.group_index)
        if len(first) < _TEXTS_TO_TRY:
            first.append(sample)
        if most is not None and len(groups) >= most:
            return first
    _check_counts(path, groups, expected)
    return first


def _checked(path: Path, kind: DumpKind, entries: Iterable[DumpSample], expected: Expected) -> Iterator[Sample]:
    if kind not in LOADABLE:
        raise not_rollouts(path, kind)
    trajectories: set[object] = set()
    for entry in entries:
        yield _sample(path, entry, expected)
        trajectory = entry.extra.get("rollout_id") if kind == "rollout" else None
        if trajectory is not None and trajectory in trajectories:
            where = f"{path}: samples[{entry.at}].rollout_id"
            why = f"{trajectory}, as another sample: slime counts them as one, this trainer would as two"
            raise RltopError("several samples of one trajectory", where=where, why=why)
        trajectories.add(trajectory)


def not_rollouts(path: Path, kind: str) -> RltopError:
    """The file is something else than a rollout."""
    why = {
        "train-v1": "it is a dump of training data",
        "train-v2": "it is a dump of training data",
        "state": "it is the state of slime's data source",
    }.get(kind, "it has no list `samples` of slime's samples")
    return _wrong(path, why, "the file that --save-debug-rollout-data wrote")


def check_text(path: Path, samples: Sequence[Sample], read: Callable[[Sequence[int]], str]) -> None:
    """Raise RltopError if the tokens do not read as the text beside them: the dump is of another tokenizer.

    read: text of token ids, without special tokens. Of several samples one that agrees is enough: what a tokenizer
    writes for bytes that are no text varies between its versions.
    """
    tried = [sample for sample in samples if sample.response.strip()][:_TEXTS_TO_TRY]
    first: tuple[Sample, str] | None = None
    for sample in tried:
        text = read(sample.response_ids)
        if _squeezed(text) in _squeezed(sample.response) or _squeezed(sample.response) in _squeezed(text):
            return
        first = first or (sample, text)
    if first is not None:
        sample, text = first
        raise RltopError(
            "the dump is of another tokenizer",
            where=f"{path}: samples[{sample.index}].tokens",
            why=f"they read {text[:60]!r} here, but the response beside them is {sample.response[:60]!r}",
            do=_WRONG_MODEL,
        )


def _loaded(path: Path) -> Any:
    import torch  # heavy, and wanted only where samples are loaded

    try:
        with warnings.catch_warnings(action="ignore"):  # torch's doubts about files of other writers
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RltopError("no such dump", where=f"{FLAG} {path}", why="there is no file") from error
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        raise RltopError(
            "cannot read this dump",
            where=f"{FLAG} {path}",
            why=lines[0] if lines else type(error).__name__,
            do="was it copied whole?",
        ) from error


def _refused(path: Path, told: str) -> RltopError:
    """A pickle that torch does not take: what in it, as far as rltop's own reader sees it. Nothing is run."""
    try:
        with DumpFile.open(path) as dump:
            for entry in dump:
                if entry.refused:
                    return refused_part(path, entry)
            if (error := foreign(path, dump.foreign)) is not None:
                return error
    except RltopError as error:
        return error
    name = re.search(r"GLOBAL ([\w.]+)", told)
    wanted = name[1] if name else "something that is neither plain values nor tensors"
    return _more_than_data(path, wanted)


def refused_part(path: Path, entry: DumpSample) -> RltopError:
    """The error of a sample with a part that wants to import something."""
    name, _, wanted = entry.refused[0].partition(": ")
    return RltopError(
        "a sample holds more than data",
        where=f"{path}: samples[{entry.at}].{name}",
        why=f"it wants {wanted}: loading that would run code of whoever wrote the file",
        do=_PLAIN_ONLY,
    )


def foreign(path: Path, names: Sequence[str]) -> RltopError | None:
    """The error of a dump that holds more than plain values and tensors; None where it does not."""
    return _more_than_data(path, ", ".join(names[:3])) if names else None


def _more_than_data(path: Path, wanted: str) -> RltopError:
    return RltopError(
        "the dump holds more than data",
        where=f"{FLAG} {path}",
        why=f"it wants {wanted}: loading that would run code of whoever wrote the file",
        do=_PLAIN_ONLY,
    )


def _kind(content: Any) -> DumpKind:
    if not isinstance(content, Mapping):
        return "other"
    if "dp_shards" in content or content.get("format_version") == 2:
        return "train-v2"
    if "rollout_data" in content or ("samples" in content and "rank" in content):
        return "train-v1"
    return "rollout" if "samples" in content else "other"


def _plain(value: Any) -> Any:
    """Tensors as lists of numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _sample(path: Path, entry: DumpSample, expected: Expected) -> Sample:
    """One sample, judged field by field."""

    def wrong(name: str, why: str, do: str = "") -> RltopError:
        return RltopError("a sample cannot be trained on", where=f"{path}: samples[{entry.at}].{name}", why=why, do=do)

    if entry.refused:
        raise refused_part(path, entry)
    for name in _UNUSABLE:
        if entry.extra.get(name):
            raise wrong(name, "this trainer takes text only")
    tokens, length = entry.tokens, entry.response_length
    if tokens is None:
        raise wrong("tokens", "missing, or no list of token ids")
    if length is None:
        raise wrong("response_length", "missing, or no number")
    if not 1 <= length < len(tokens):
        why = f"it is {length} of {len(tokens)} tokens: both prompt and response need one"
        raise wrong("response_length", why, f"leave such samples out, or see what {entry.status or 'the'} sample it is")
    low, high = min(tokens), max(tokens)
    if low < 0 or (expected.vocab_size is not None and high >= expected.vocab_size):
        why = f"token ids {low}..{high}, the model's vocabulary has {expected.vocab_size}"
        raise wrong("tokens", why, _WRONG_MODEL)
    if expected.max_positions is not None and len(tokens) > expected.max_positions:
        raise wrong("tokens", f"{len(tokens)} tokens, the model has {expected.max_positions} positions", _WRONG_MODEL)
    for name, values in (("rollout_log_probs", entry.rollout_log_probs), ("loss_mask", entry.loss_mask)):
        if values is not None and len(values) != length:
            raise wrong(name, f"{len(values)} values for {length} response tokens")
    status = entry.status or "completed"
    mask = tuple(int(bit) for bit in entry.loss_mask) if entry.loss_mask is not None else None
    split = len(tokens) - length
    return Sample(
        index=entry.at,
        group_index=-1 if entry.group_index is None else entry.group_index,
        prompt=entry.prompt or "",
        prompt_ids=tuple(int(one) for one in tokens[:split]),
        response=entry.response or "",
        response_ids=tuple(int(one) for one in tokens[split:]),
        rollout_log_probs=tuple(map(float, entry.rollout_log_probs or ())),
        reward=_reward(entry, expected.reward_key, wrong),
        label="" if entry.label is None else str(entry.label),
        status=cast(Status, status if status in get_args(Status) else "failed"),
        finish_reason="",
        weight_version=(entry.weight_versions or ("",))[-1],
        engine=str((entry.metadata or {}).get("engine", "")),
        # slime removes a sample from the loss, not from its group.
        loss_mask=(0,) * length if entry.extra.get("remove_sample") is True else mask,
        source_index=entry.index,
    )


def _reward(entry: DumpSample, key: str | None, wrong: Callable[..., RltopError]) -> float:
    reward = entry.reward
    if isinstance(reward, Mapping):
        names = ", ".join(map(str, list(reward)[:6]))
        if key is None:
            raise wrong("reward", f"it has several values: {names}", "--reward-key NAME says which one counts")
        if not isinstance(reward.get(key), int | float):
            raise wrong("reward", f"--reward-key {key} is none of its numbers: {names}")
        return float(reward[key])
    if reward is None:
        raise wrong("reward", "missing, or no number", "GRPO needs one per sample")
    return float(reward)


def _check_counts(path: Path, groups: Sequence[int], expected: Expected) -> tuple[int, int]:
    """How many samples are kept from the start and from the end. groups: of all samples, in their order."""
    if not groups:
        raise _wrong(path, "there are no samples in it", "a dump of a rollout")
    _check_groups(path, groups, expected.group_size)
    first, last = len(groups), 0
    if expected.share is not None:
        first, last = _subsample(path, len(groups), expected.share, expected.group_size)
    _check_steps(path, first + last, expected)
    return first, last


def _check_groups(path: Path, groups: Sequence[int], size: int) -> None:
    """Groups are whole and neighbours, as the advantages take them."""
    if len(groups) % size:
        raise _wrong(
            path,
            f"{len(groups)} samples are no whole groups of --n-samples-per-prompt {size}",
            "the number of responses per prompt of the run that wrote it",
        )
    runs = [(group, sum(1 for _ in members)) for group, members in itertools.groupby(groups)]
    if runs == [(-1, len(groups))]:
        return  # no group is named: neighbours it is, as in slime
    odd = next((run for run in runs if run[1] != size), None)
    if odd is not None or len({group for group, _ in runs}) != len(runs):
        group, count = odd or runs[0]
        raise _wrong(
            path,
            f"group {group} has {count} samples in a row, --n-samples-per-prompt is {size}",
            f"--n-samples-per-prompt {count}" if len({n for _, n in runs}) == 1 else "a dump of whole groups",
        )


def _subsample(path: Path, total: int, share: float, size: int) -> tuple[int, int]:
    """slime's choice: int(n * share) samples, of which the smaller half from the start, the rest from the end."""
    count = int(total * share)
    first, last = count // 2, count - count // 2
    if count == 0 or first % size or last % size:
        # Half a sample more, so that int() finds the number whatever the decimals.
        good = [(2 * groups * size + 0.5) / total for groups in range(1, (total - 1) // (2 * size) + 1)]
        near = min(good, key=lambda one: abs(one - share), default=1.0)
        why = (
            f"int({total} x {share}) = 0 samples (slime would keep all)"
            if count == 0
            else f"int({total} x {share}) = {count}: the first {first} and the last {last} cut a group of {size}"
        )
        raise RltopError(
            "the share keeps no whole groups",
            where=f"{SHARE} {share}",
            why=f"{path}: {why}",
            do=f"{SHARE} {near:.6g}" if near < 1 else f"leave out {SHARE}",
        )
    return first, last


def _check_steps(path: Path, count: int, expected: Expected) -> None:
    step = expected.step_size or count
    if count % step:
        raise _wrong(
            path,
            f"{count} samples / --global-batch-size {step} "
            + (f"leaves {count % step} over" if count > step else "is not one step"),
            f"--global-batch-size {count} (one step), or one that divides {count}",
        )
    if step % expected.replicas:
        raise _wrong(
            path,
            f"{step} samples per step / {expected.replicas} data parallel ranks leaves {step % expected.replicas} over",
            f"a --global-batch-size that is a multiple of {expected.replicas}",
        )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _wrong(path: Path, why: str, do: str) -> RltopError:
    return RltopError("the dump does not fit this run", where=f"{FLAG} {path}", why=why, do=do)
