"""Dumps to slime and back, with slime's real code: which line of the format still fits, and which does not.

    git clone https://github.com/THUDM/slime /tmp/slime
    python examples/slime_roundtrip.py --slime /tmp/slime

Needs `rltop[train]` and what slime's own modules import (httpx, pyyaml, requests). A package that slime's files import
and that is not installed (sglang and wandb, as a rule) is replaced by an empty stand-in, since nothing of it is called
here; the output names it. Both layouts of slime are known: `slime/observability` (since 2026-08-21) and
`slime/utils` with train dumps of one file per rank (before 2026-08-12). Nothing of slime is part of rltop.

Prints one line per comparison. Exit codes: 0 all hold, 1 a difference, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLLOUT = 3
"""Rollout id of what slime writes here."""
GROUPS, EACH = 4, 4
LOG_PROB_TOLERANCE = 1e-3
"""With which slime's own end-to-end test compares the log-probs of a train dump with those of the rollout dump."""


# ---- slime, wherever it lies ---------------------------------------------------------------------------------------


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of packages that are imported and not installed. Asked after every real finder."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in self.roots else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Empty(spec.name)
        module.__path__ = []  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@dataclass
class Slime:
    """What of a checkout is used, under one name for both layouts."""

    root: Path
    layout: str = ""
    stand_ins: StandIns = field(default_factory=StandIns)

    def open(self) -> None:
        """Import it. Raises ImportError."""
        sys.path.insert(0, str(self.root))
        sys.meta_path.append(self.stand_ins)
        self.sample = self.module("slime.utils.types").Sample
        self.layout = "observability" if (self.root / "slime" / "observability").is_dir() else "utils"
        self.trace = self.module(f"slime.{self.layout}.trace_utils")
        self.rollout = self.module("slime.ray.rollout")
        self.forge = self.module("slime.rollout.forge_load")

    def module(self, name: str) -> Any:
        """A module of slime; what it lacks is stood in for."""
        while True:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                root = (error.name or "").partition(".")[0]
                if root in ("", "slime") or root in self.stand_ins.roots:
                    raise
                self.stand_ins.roots.add(root)

    def defining(self, function: str) -> str:
        """The name of the module that defines a function; it moved more than once."""
        for file in sorted((self.root / "slime").rglob("*.py")):
            if f"\ndef {function}(" in file.read_text():
                return ".".join(file.relative_to(self.root).with_suffix("").parts)
        raise RuntimeError(f"this slime has no {function}")

    @property
    def commit(self) -> str:
        """Of the checkout, where git knows it."""
        told = subprocess.run(
            ["git", "-C", str(self.root), "log", "-1", "--format=%h %as"], capture_output=True, text=True, check=False
        )
        own = (self.root / ".git").exists() and told.returncode == 0
        return told.stdout.strip() if own else "commit unknown"

    def manager(self, **args: Any) -> Any:
        """A rollout manager without engines: the class below Ray's, with nothing but arguments."""
        actor = self.rollout.RolloutManager
        found = object.__new__(actor.__ray_metadata__.modified_class)
        names = ("save_debug_rollout_data", "load_debug_rollout_data", "load_debug_rollout_data_subsample")
        found.args = types.SimpleNamespace(**(dict.fromkeys(names) | args))
        found.custom_reward_post_process_func = found.custom_convert_samples_to_train_data_func = None
        return found

    def save(self, pattern: str, data: Any, *, evaluation: bool = False) -> None:
        """Write a rollout dump."""
        if self.layout == "observability":
            writer = self.module("slime.observability.rollout_data_utils").save_debug_rollout_data
            writer(pattern, data, rollout_id=ROLLOUT, evaluation=evaluation)
        else:
            self.manager(save_debug_rollout_data=pattern)._save_debug_rollout_data(data, ROLLOUT, evaluation)

    def load(self, pattern: str, rollout_id: int, ratio: float | None = None) -> list[Any]:
        """What `--load-debug-rollout-data` gives the trainer."""
        manager = self.manager(load_debug_rollout_data=pattern, load_debug_rollout_data_subsample=ratio)
        samples, _ = manager._get_rollout_data(rollout_id)
        return list(samples)

    def metrics(self, samples: Sequence[Any], seconds: float, gpus: int) -> dict[str, float]:
        """What it logs as `rollout/*` and `perf/*` of the samples of one rollout."""
        name = "slime.observability.rollout_metrics" if self.layout == "observability" else "slime.ray.rollout"
        module = self.module(name)
        args = types.SimpleNamespace(
            advantage_estimator="grpo",
            reward_key=None,
            log_reward_category=None,
            rollout_num_gpus=gpus,
            sglang_speculative_algorithm="NGRAM" if any(one.spec_info.spec_verify_ct for one in samples) else None,
        )
        found = {f"rollout/{key}": value for key, value in module.compute_metrics_from_samples(args, samples).items()}
        perf = module.compute_perf_metrics_from_samples(args, samples, seconds)
        return found | {f"perf/{key}": value for key, value in perf.items()}

    def shards(self, samples: Sequence[Any], each: int, ranks: int) -> list[dict[str, Any]]:
        """The training data of each data parallel rank, as slime makes it of samples. each: samples of a group."""
        manager = self.manager(
            advantage_estimator="grpo",
            rewards_normalization=True,
            grpo_std_normalization=True,
            reward_key=None,
            n_samples_per_prompt=each,
            rollout_batch_size=len(samples) // each,
            global_batch_size=len(samples),
            micro_batch_size=1,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=24,
            balance_data=False,
            balance_by_flops=False,
        )
        manager.train_parallel_config = {
            "dp_size": ranks,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        data = manager._convert_samples_to_train_data(samples)
        self.rollout.ray = types.SimpleNamespace(
            put=lambda value: value
        )  # no cluster: the value instead of its address
        return [box.inner for box in manager._split_train_data_by_dp(data)]


# ---- dumps that slime writes ---------------------------------------------------------------------------------------


def specimens(slime: Slime, *, odd: bool) -> list[Any]:
    """Samples as a rollout leaves them. odd: with everything that slime allows; else all of them can be trained on."""
    import torch

    statuses = list(slime.sample.Status)
    samples = []
    for at in range(GROUPS * EACH):
        answer = [300 + at, *range(40, 40 + at % 5 + 1), 2]
        one = slime.sample(
            group_index=at // EACH,
            index=at,
            prompt=f"question {at // EACH} \u4f60",
            tokens=[1, 10, 11, 12 + at // EACH],
            label=str(at // EACH),
            metadata={"source_name": "math", "nested": {"level": [1, 2.5, None]}},
            session_id=f"s{at}",
        )
        with slime.trace.trace_span(one, "sglang_generate", attrs={"max_new_tokens": 24}):
            one.append_response_tokens(
                types.SimpleNamespace(num_layers=2, moe_router_topk=2, sglang_speculative_algorithm="NGRAM"),
                tokens=answer,
                log_probs=[-0.125 * (n + 1) - at / 64 for n in range(len(answer))],
                text=f"answer {at}",
                meta_info={
                    "finish_reason": {"type": "length" if at % 3 == 0 else "stop"},
                    "weight_version": str(ROLLOUT + 1),
                    "cached_tokens": 2,
                    "prompt_tokens": 4,
                    "spec_accept_token_num": 3,
                    "spec_draft_token_num": 5,
                    "spec_verify_ct": 2,
                    "completion_tokens": len(answer),
                },
            )
        one.reward = float(at % 2)
        if odd:
            _make_odd(one, at, statuses, torch)
        samples.append(one)
    return samples


def _make_odd(one: Any, at: int, statuses: Sequence[Any], torch: Any) -> None:
    one.status = statuses[at % len(statuses)]
    one.later_field = {"slime": "will add it", "at": at}  # what this slime does not know, and a later one may
    one.rollout_routed_experts = torch.arange((len(one.tokens) - 1) * 4, dtype=torch.int32).reshape(-1, 2, 2)
    match at % 5:
        case 0:
            one.reward = {"score": at / 7, "format": 1.0}
        case 1:
            one.reward = None
        case 2:
            one.prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {at}"}]
        case 3:  # a tool answered in the middle
            one.append_response_tokens(tokens=[77, 78], trainable=False, text=" tool")
            one.weight_versions.append(str(ROLLOUT + 2))
        case 4:
            one.tokens, one.response, one.response_length = one.tokens[:4], "", 0
            one.loss_mask, one.rollout_log_probs = None, None


def write_train_dumps(slime: Slime, shards: Sequence[dict[str, Any]], pattern: str, work: Path) -> None:
    """slime's writer of train dumps, in one process per data parallel rank, over Megatron's own groups.

    The passes of the trainer are not run: each shard gets the log-probs of the engine plus a known gap.
    """
    import torch

    for shard in shards:
        engine = shard["rollout_log_probs"]
        shard["log_probs"] = [row + 0.0078125 for row in engine]
        shard["ref_log_probs"] = [row - 0.015625 for row in engine]
        shard["advantages"] = [
            torch.full_like(row, reward) for row, reward in zip(engine, shard["rewards"], strict=True)
        ]
        own = shard["partition"]
        shard["total_lengths"] = [shard["total_lengths"][at] for at in own]
    torch.save([dict(shard) for shard in shards], work / "shards.pt")
    (work / "meeting").unlink(missing_ok=True)
    own = [sys.executable, __file__, "--slime", str(slime.root), "--work", str(work), "--pattern", pattern]
    ranks = [
        subprocess.Popen(
            [*own, "--rank", f"{rank}/{len(shards)}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(shards))
    ]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    for rank, words in zip(ranks, told, strict=True):
        if rank.returncode:
            raise RuntimeError(f"slime's writer of train dumps failed: {words.strip().splitlines()[-1:]}")


def one_rank(slime: Slime, rank: int, world: int, pattern: str, work: Path) -> None:
    """One process of `write_train_dumps`."""
    import torch
    from megatron.core import parallel_state

    meeting = torch.distributed.FileStore(str(work / "meeting"), world)
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    shard = torch.load(work / "shards.pt", weights_only=False)[rank]
    writer = slime.module(slime.defining("save_debug_train_data")).save_debug_train_data
    writer(types.SimpleNamespace(save_debug_train_data=pattern), rollout_id=ROLLOUT, rollout_data=shard)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- the comparisons -----------------------------------------------------------------------------------------------


class Differs(Exception):
    """The two sides do not say the same."""


class Table:
    """One line per comparison."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, bool, str]] = []

    def hold(self, way: str, what: str, compare: Callable[[], str]) -> None:
        """Run one comparison, which returns what it saw, or raises whatever it likes."""
        try:
            row = (way, what, True, compare())
        except Exception as error:
            kind = "" if isinstance(error, Differs) else f"{type(error).__name__}: "
            row = (way, what, False, (kind + str(error)).splitlines()[0][:300])
        self.rows.append(row)
        print(f"{'ok     ' if row[2] else 'DIFFERS'}  {way:14}  {what:58}  {row[3]}", flush=True)


def same(what: str, left: Any, right: Any) -> None:
    """Raise Differs where two plain values, tensors or lists of them are not equal."""
    left, right = _flat(left), _flat(right)
    if left != right and not (left != left and right != right):
        raise Differs(f"{what}: {str(left)[:80]} here, {str(right)[:80]} there")


def _flat(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_flat(one) for one in value]
    if isinstance(value, dict):
        return {key: _flat(one) for key, one in value.items()}
    return value


SHARED = (
    *("index", "group_index", "response", "response_length", "label", "reward", "weight_versions"),
    *("rollout_log_probs", "loss_mask", "metadata", "tokens"),
)
"""Fields that rltop's `DumpSample` has under slime's names."""


def samples_agree(ours: Sequence[Any], theirs: Sequence[Any], *, written_by_us: bool = False) -> str:
    """rltop's samples (`DumpSample`) against slime's own objects, field by field.

    written_by_us: slime fills in the fields that our file does not have.
    """
    same("number of samples", len(ours), len(theirs))
    passed: set[str] = set()
    for at, (mine, his) in enumerate(zip(ours, theirs, strict=True)):
        told = his.to_dict()
        for name in SHARED:
            same(f"sample {at} {name}", getattr(mine, name), told[name])
        same(f"sample {at} status", mine.status, told["status"])
        pieces = [told["prompt"]] if isinstance(told["prompt"], str) else [turn["content"] for turn in told["prompt"]]
        for piece in pieces:
            if piece not in mine.prompt:
                raise Differs(f"sample {at} prompt: {mine.prompt[:80]!r} here, {piece!r} there")
        names = mine.extra.keys() if written_by_us else told.keys() - {*SHARED, "status", "prompt"}
        for name in names:
            if name not in mine.extra:
                raise Differs(f"sample {at}: {name!r} was not kept")
            kept = mine.extra[name]
            if hasattr(kept, "shape"):  # a tensor, read when somebody asks
                same(f"sample {at} shape of {name}", list(kept.shape), list(told[name].shape))
                kept, told[name] = list(map(int, kept.values())), told[name].flatten()
            same(f"sample {at} {name}", kept, told[name])
        passed |= set(names)
    return f"{len(ours)} samples, {len(SHARED) + 2} fields and {len(passed)} passed through"


def rltop_says(*words: str) -> dict[str, Any]:
    """The JSON of one `rltop` command."""
    done = subprocess.run([sys.executable, "-m", "rltop", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Differs(f"rltop {words[0]} {words[1]} exits with {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def written_by_slime(slime: Slime, table: Table, work: Path) -> None:
    """slime's writers, rltop's readers."""
    from rltop.evidence.dump_file import DumpFile
    from rltop.evidence.dump_find import find_dumps

    folder = work / "slime" / "rollout_data"
    odd, even = specimens(slime, odd=True), specimens(slime, odd=False)
    slime.save(str(folder / "odd_{rollout_id}.pt"), odd)
    slime.save(str(folder / "{rollout_id}.pt"), even)
    data = {"math": {"samples": even[:3]}, "code": {"samples": even[3:5]}}
    slime.save(str(folder / "{rollout_id}.pt"), data, evaluation=True)

    def read(name: str, theirs: Sequence[Any], *, evaluation: bool = False) -> str:
        with DumpFile.open(folder / name) as dump:
            same("rollout id", dump.rollout_id, ROLLOUT)
            same("an evaluation", dump.is_eval, evaluation)
            same("classes that were refused", dump.foreign, ())
            return samples_agree(list(dump), theirs)

    table.hold("slime -> rltop", "rollout dump, every kind of sample: DumpFile", lambda: read(f"odd_{ROLLOUT}.pt", odd))
    table.hold("slime -> rltop", "rollout dump, samples to train on: DumpFile", lambda: read(f"{ROLLOUT}.pt", even))
    table.hold(
        "slime -> rltop",
        "eval_ dump of two data sets: DumpFile",
        lambda: read(f"eval_{ROLLOUT}.pt", even[:5], evaluation=True),
    )
    table.hold("slime -> rltop", "rltop dump stats", lambda: _stats(slime, folder / f"{ROLLOUT}.pt", even))
    table.hold("slime -> rltop", "rltop dump show", lambda: _shown(folder / f"{ROLLOUT}.pt", even))
    table.hold("slime -> rltop", "rltop check", lambda: _checked(folder / f"{ROLLOUT}.pt", even))
    table.hold("slime -> rltop", "rltop train --load-debug-rollout-data", lambda: _trained_on(folder, even))

    train = work / "slime" / "train_data"
    loaded = slime.load(str(folder / "{rollout_id}.pt"), ROLLOUT)
    write_train_dumps(slime, slime.shards(loaded, EACH, ranks=2), str(train / "{rollout_id}_{rank}.pt"), work)
    files = sorted(train.glob("*.pt"))

    def read_train() -> str:
        found: dict[int, Any] = {}
        kinds = set()
        for path in files:
            with DumpFile.open(path) as dump:
                kinds.add(dump.kind)
                same(f"rollout id of {path.name}", dump.rollout_id, ROLLOUT)
                for sample in dump:
                    found[place_of(sample)] = sample
        same("rollout positions", sorted(found), list(range(len(even))))
        for at, his in enumerate(even):
            mine = found[at]
            same(f"sample {at} tokens", mine.tokens, his.tokens)
            same(f"sample {at} index", mine.index, his.index)
            same(f"sample {at} response length", mine.response_length, his.response_length)
            close(f"sample {at} rollout_log_probs", mine.rollout_log_probs, his.rollout_log_probs)
            close(f"sample {at} log_probs", mine.log_probs, [one + 0.0078125 for one in his.rollout_log_probs])
            close(f"sample {at} ref_log_probs", mine.ref_log_probs, [one - 0.015625 for one in his.rollout_log_probs])
        return f"{', '.join(sorted(map(str, kinds)))}: {len(files)} file(s), {len(found)} samples of 2 ranks"

    table.hold("slime -> rltop", f"train dump, {_names(files)}: DumpFile", read_train)

    def joined() -> str:
        one = next(ref for ref in find_dumps(str(work / "slime")) if ref.path == folder / f"{ROLLOUT}.pt")
        same("train dumps beside it", sorted(path.name for path in one.train), [path.name for path in files])
        return f"{one.path.name} with {_names(one.train)}"

    table.hold("slime -> rltop", "train dump put beside its rollout dump: find_dumps", joined)


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


def place_of(sample: Any) -> int:
    """Which sample of the rollout dump this one of a train dump is."""
    return int(sample.extra.get("rollout_position", sample.extra.get("partition", -1)))


def close(what: str, mine: Any, his: Sequence[float], tolerance: float = 1e-6) -> None:
    """Raise Differs unless all numbers are within `tolerance` (slime's trainer keeps float32)."""
    if mine is None:
        raise Differs(f"{what} is missing")
    gap = max((abs(a - b) for a, b in zip(mine, his, strict=True)), default=0.0)
    if not gap <= tolerance:
        raise Differs(f"{what}: {gap:g} apart")


def _stats(slime: Slime, path: Path, theirs: Sequence[Any]) -> str:
    """rltop's numbers of a dump beside those that slime's own code works out of the same samples."""
    seconds, gpus = 12.5, 2
    told = rltop_says(
        "dump", "stats", str(path), "--json", "--rollout-time", str(seconds), "--rollout-num-gpus", str(gpus)
    )
    ours = told["dumps"][0]["metrics"]
    theirs_too = slime.metrics(theirs, seconds, gpus)
    for name, value in theirs_too.items():
        if name not in ours:
            raise Differs(f"{name} is missing: slime says {value}")
        close(name, [ours[name]], [value])
    return f"{len(theirs_too)} metrics of slime, all equal; {len(ours) - len(theirs_too)} more"


def _shown(path: Path, theirs: Sequence[Any]) -> str:
    rows = rltop_says("dump", "show", str(path), "--json", "-n", str(len(theirs)))["samples"]
    same("number of samples", len(rows), len(theirs))
    for at, (row, his) in enumerate(zip(rows, theirs, strict=True)):
        told = his.to_dict()
        for name in (*SHARED, "prompt", "status", "trace", "spec_info"):
            same(f"sample {at} {name}", row[name], told[name])
    return f"{len(rows)} samples"


def _checked(path: Path, theirs: Sequence[Any]) -> str:
    from rltop.evidence.collect import collect

    found = collect([path])
    same("problems", [str(one) for one in found.problems], [])
    same("samples", len(found.samples), len(theirs))
    same("rewards", [one.reward for one in found.samples], [one.reward for one in theirs])
    return f"{len(found.samples)} samples, no problem"


def _trained_on(folder: Path, theirs: Sequence[Any]) -> str:
    from rltop.train.load_dump import Expected, load_rollout

    pattern = str(folder / "{rollout_id}.pt")
    found = load_rollout(pattern, ROLLOUT, Expected(group_size=EACH, step_size=len(theirs)))
    same("number of samples", len(found), len(theirs))
    for at, (mine, his) in enumerate(zip(found, theirs, strict=True)):
        same(f"sample {at} prompt", mine.prompt, his.prompt)
        same(f"sample {at} tokens", mine.tokens, his.tokens)
        same(f"sample {at} response", (mine.response, len(mine.response_ids)), (his.response, his.response_length))
        same(f"sample {at} rollout_log_probs", mine.rollout_log_probs, his.rollout_log_probs)
        same(f"sample {at} reward", mine.reward, his.reward)
        same(f"sample {at} status", mine.status, his.status.value)
    half = load_rollout(pattern, ROLLOUT, Expected(group_size=EACH, step_size=None, share=0.5))
    return f"{len(found)} samples, with subsample 0.5 {len(half)}"


def written_by_rltop(slime: Slime, table: Table, work: Path) -> None:
    """rltop's trainer on its CPU engine (a stand-in for SGLang), slime's readers."""
    folder = work / "rltop"
    rollouts, groups, each, ranks = 2, 4, 4, 2
    _train(folder, rollouts, groups, each, ranks)
    pattern = str(folder / "rollout_data" / "{rollout_id}.pt")
    for name in sorted(path.stem for path in (folder / "rollout_data").glob("*.pt")):
        table.hold(
            "rltop -> slime",
            f"rollout_data/{name}.pt: Sample.from_dict",
            lambda name=name: _lossless(slime, folder, name),
        )
        table.hold(
            "rltop -> slime",
            f"rollout_data/{name}.pt: trace timeline viewer",
            lambda name=name: _viewed(slime, folder, name),
        )

    def loads(rollout_id: int) -> str:
        from rltop.evidence.dump_file import DumpFile

        with DumpFile.open(Path(pattern.format(rollout_id=rollout_id))) as dump:
            told = samples_agree(list(dump), slime.load(pattern, rollout_id), written_by_us=True)
        same("half of the samples", len(slime.load(pattern, rollout_id, 0.5)), groups * each // 2)
        return told

    def forged() -> str:
        args = types.SimpleNamespace(load_forge_rollout_data=pattern, eval_reward_key=None, reward_key=None)
        got = slime.forge.generate_rollout(args, 0, None).samples
        evaluated = slime.forge.generate_rollout(args, 0, None, evaluation=True).data["forge_eval"]["samples"]
        same("number of samples", len(got), groups * each)
        return f"{len(got)} samples, {len(evaluated)} of an evaluation"

    def scheduled() -> str:
        samples = slime.load(pattern, 1)
        shards = slime.shards(samples, each, ranks)
        own = [at for shard in shards for at in shard["partition"]]
        same("every sample on one rank", sorted(own), list(range(len(samples))))
        for shard in shards:
            for row, at in zip(shard["tokens"], shard["partition"], strict=True):
                same(f"tokens of sample {at}", row, samples[at].tokens)
            for row, at in zip(shard["rollout_log_probs"], shard["partition"], strict=True):
                close(f"log-probs of sample {at}", row.tolist(), samples[at].rollout_log_probs)
        micro = sum(len(step) for shard in shards for step in shard["micro_batch_indices"])
        return f"{len(samples)} samples on {ranks} ranks, {micro} micro-batches"

    table.hold(
        "both",
        "rltop dump stats of our dump",
        lambda: _stats(slime, Path(pattern.format(rollout_id=1)), slime.load(pattern, 1)),
    )
    for rollout_id in range(rollouts):
        table.hold(
            "rltop -> slime", f"--load-debug-rollout-data, rollout {rollout_id}", lambda at=rollout_id: loads(at)
        )
    table.hold("rltop -> slime", "--load-forge-rollout-data, training and eval_", forged)
    table.hold("rltop -> slime", "conversion to training data and its schedule", scheduled)
    for rollout_id in range(rollouts):
        table.hold(
            "rltop -> slime",
            f"train dump of rollout {rollout_id} against slime's own",
            lambda at=rollout_id: _train_dump(folder, work, at),
        )


def _train(folder: Path, rollouts: int, groups: int, each: int, ranks: int) -> None:
    words = ["train", "--num-rollout", rollouts, "--rollout-batch-size", groups, "--n-samples-per-prompt", each]
    words += ["--actor-num-gpus-per-node", ranks, "--global-batch-size", groups * each, "--eval-interval", 1]
    words += ["--use-kl-loss", "--log-probs-pass", "always", "--dump-details", folder]
    done = subprocess.run(
        [sys.executable, "-m", "rltop", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"rltop train ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _lossless(slime: Slime, folder: Path, name: str) -> str:
    """Into slime's objects and out again, nothing lost and nothing made up."""
    import torch

    path = folder / "rollout_data" / f"{name}.pt"
    rows = torch.load(path, weights_only=True)["samples"]
    known = set(slime.sample.__dataclass_fields__)
    for at, row in enumerate(rows):
        back = slime.sample.from_dict(row).to_dict()
        for key, value in row.items():
            same(f"sample {at} {key}", back[key], value)
        same(f"sample {at}: fields that slime does not know", sorted(row.keys() - known - {"trace"}), [])
        slime.sample.from_dict(row)._validate_response_metadata_lengths()
    return f"{len(rows)} samples, {len(rows[0])} fields, weights_only"


def _viewed(slime: Slime, folder: Path, name: str) -> str:
    """slime's viewer makes a row of every sample that has a trace."""
    import torch

    path = folder / "rollout_data" / f"{name}.pt"
    samples = len(torch.load(path, weights_only=True)["samples"])
    viewer = slime.root / "tools" / "trace_timeline_viewer.py"
    done = subprocess.run(
        [sys.executable, str(viewer), str(path), "--no-serve", "--rebuild"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Differs(f"the viewer ends with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    cache = json.loads(path.with_name(f"{name}.trace_timeline_cache.json").read_text())
    same("rows", cache["sample_count"], samples)
    spans = [item for row in cache["rows"] for item in row["items"]]
    states = {item["state"] for item in spans}
    same("states of the spans", states, {"closed_span"})
    return f"{cache['sample_count']} rows, {len(spans)} spans, {cache['global_end'] - cache['global_start']:.2f} s"


def _train_dump(folder: Path, work: Path, rollout_id: int) -> str:
    """rltop's train dump beside its rollout dump, as slime's own test joins them, and its shape beside slime's."""
    import torch

    rollout = torch.load(folder / "rollout_data" / f"{rollout_id}.pt", weights_only=True)["samples"]
    mine = torch.load(folder / "train_data" / f"{rollout_id}.pt", weights_only=True)
    positions = [sample["rollout_position"] for sample in mine["samples"]]
    same("rollout positions", positions, list(range(len(rollout))))
    for at, (sample, row) in enumerate(zip(mine["samples"], rollout, strict=True)):
        same(f"sample {at} tokens", sample["tokens"], row["tokens"])
        same(f"sample {at} index", sample["sample_index"], row["index"])
        close(f"sample {at} log-probs", sample["rollout_log_probs"], row["rollout_log_probs"], LOG_PROB_TOLERANCE)
        close(f"sample {at} actor against engine", sample["log_probs"], row["rollout_log_probs"], LOG_PROB_TOLERANCE)
    listed = sorted(at for shard in mine["dp_shards"] for at in shard["partition"])
    same("what the shards hold", listed, positions)
    theirs = next(iter(sorted((work / "slime" / "train_data").glob("*.pt"))))
    his = torch.load(theirs, weights_only=True)
    if his.get("format_version") != 2:
        return f"{len(positions)} samples join; this slime writes the old layout, so shapes are not compared"
    same("format version", mine["format_version"], 2)
    same("keys of the file", sorted(mine), sorted(his))
    same("keys of a shard", sorted(mine["dp_shards"][0]), sorted(his["dp_shards"][0]))
    both = mine["samples"][0].keys() & his["samples"][0].keys()
    for key in both:
        same(f"type of {key}", _shape(mine["samples"][0][key]), _shape(his["samples"][0][key]))
    lack = sorted(his["samples"][0].keys() - both - {"source_names"})  # of a mix of data sets; rltop has one task
    same("fields of slime's samples that ours lack", lack, [])
    return f"{len(positions)} samples join, {len(both)} fields of the same types"


def _shape(value: Any) -> str:
    return f"{value.dtype} x{value.dim()}" if hasattr(value, "dtype") else type(value).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slime", type=Path, required=True, metavar="DIR", help="a checkout of slime")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the dumps here")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--pattern", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    slime = Slime(args.slime.resolve())
    try:
        slime.open()
    except ImportError as error:
        print(f"{args.slime}: slime can not be imported: {error}", file=sys.stderr)
        return 2
    if args.rank:
        rank, world = map(int, args.rank.split("/"))
        one_rank(slime, rank, world, args.pattern, args.work)
        return 0
    try:
        import rltop  # noqa: F401
    except ImportError as error:
        print(f"rltop can not be imported by {sys.executable}: {error}", file=sys.stderr)
        return 2
    stood = ", ".join(sorted(slime.stand_ins.roots)) or "nothing"
    print(f"slime: {slime.root} ({slime.commit}), layout slime/{slime.layout}; stood in for: {stood}")
    table = Table()
    with tempfile.TemporaryDirectory() as made:
        work = (args.work or Path(made)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        written_by_slime(slime, table, work)
        written_by_rltop(slime, table, work)
    bad = sum(not row[2] for row in table.rows)
    print(f"{len(table.rows)} comparisons, {bad} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
