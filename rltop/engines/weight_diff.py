"""What an engine really holds, against a checkpoint directory, tensor by tensor. Reads only; the engine serves on.

How, in this order:

1. `/weights_checker` `checksum`: a digest per parameter and rank, against digests of the checkpoint's tensors as this
   engine lays them out, rounds and hashes them (`engine_layout`, `raw_tensors`). What differs is named from digests
   alone: zeros, another layer's tensor, an older version (`previous`, the version before in the same directory, what
   the engine says that it was loaded from).
2. Of what is merely different: a few values by `/get_weights_by_name`, where SGLang's model class has it (Llama, not
   Qwen3), else `snapshot` and `compare` one after the other. Nothing equals NaN, so a tensor with NaN differs from its
   own snapshot. It changes no weight; it costs a copy of the weights in host memory and replaces an earlier snapshot.
3. Where all parameters are equal: log-probs of a prompt against a forward pass over the checkpoint (`reference`), which
   finds rotary tables that were lost: the checker leaves them out.

Quantised weights are not compared: SGLang hashes what it dequantises on the GPU, with its own rounding.

Failure policy: an engine that does not answer or cannot tell is an `EngineUnreachable` or `EngineRefused`; what single
tensors cannot be compared is in the report, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rltop.engines.calls import EngineRefused, EngineUnreachable
from rltop.engines.client import EngineClient
from rltop.engines.engine_layout import Parameter, Shapes, Shard, is_fused, layer_of, parameters
from rltop.engines.probe import lost_buffer, probe_ids, read_probe
from rltop.engines.raw_tensors import FLOATS, Checkpoint, Raw, max_abs_gap, not_finite
from rltop.engines.weight_findings import (
    UNEQUAL,
    Before,
    Expected,
    Finding,
    FindingKind,
    classify,
    compared,
    in_order,
    with_told,
    words_of,
)
from rltop.engines.weight_moment import moment, number_of, versions_in
from rltop.errors import RltopError

Verdict = Literal["equal", "different", "cannot"]
Reference = Callable[[Path, Sequence[int]], Sequence[float]]
"""Log-probs that the checkpoint's model gives these tokens, from the second one on. Raises RltopError if it cannot."""

ENGINE_TYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
"""SGLang's `--dtype` -> safetensors' name."""
SAMPLE_ROWS = 8
"""Rows that `/get_weights_by_name` is asked for."""
MOST_SAMPLED = 16
"""Tensors whose values are asked for."""
EXACT_GAP, ROUNDED_GAP = 1e-2, 0.5
"""Largest gap of a log-prob, nats, between the engine and a forward pass in fp32: for an engine in fp32 (1e-5 was
seen), and for one in bf16 (0.1 was seen on an H200)."""
SCALED = ("_scale_inv", "_scale", "_packed", "_zero_point", "_g_idx", "_shape", ".qweight", ".qzeros", ".scales")
"""Ends of names of quantised tensors and of what belongs to them."""
_ASIDE = ("rotary_emb.", ".masked_bias", ".attn.bias")
"""Parts of names of tensors in old checkpoints that no engine loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was found."""

    url: str
    stand_in: bool
    """It is rltop's CPU engine."""
    sglang: str
    """Its version."""
    weight_version: str
    model_path: str
    """What the engine says that it was loaded from last."""
    ranks: int
    dtype: str
    """What the engine rounds to; empty: as the checkpoint has it."""
    hash: str
    """`cpu` or `gpu`: where its tensors lie, by the hash of its answer."""
    checkpoint: str
    checkpoint_version: int | None
    """Of a published `weight_vNNNNNN`."""
    headline: tuple[str, ...]
    """What explains more than any tensor does, a sentence each: another version, another checkpoint as a whole."""
    tensors: int
    compared: int
    """Parameters of the engine that were compared, over all ranks."""
    equal: int
    findings: tuple[Finding, ...]
    not_compared: tuple[tuple[str, str], ...]
    """Name and reason."""
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """`cannot`: nothing differs, but not everything could be compared."""
        if self.findings:
            return "different"
        return "cannot" if self.not_compared or not self.compared else "equal"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        engine = {name: getattr(self, name) for name in ("url", "stand_in", "sglang", "weight_version", "model_path")}
        return {
            "verdict": self.verdict,
            "engine": engine | {"ranks": self.ranks, "dtype": self.dtype, "hash": self.hash},
            "checkpoint": {"path": self.checkpoint, "version": self.checkpoint_version, "tensors": self.tensors},
            "headline": list(self.headline),
            "compared": self.compared,
            "equal": self.equal,
            "findings": [one.as_dict() for one in self.findings],
            "not_compared": [{"name": name, "why": why} for name, why in self.not_compared],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Ways:
    """What may be asked of the engine beside its checksums."""

    previous: Path | None = None
    """A checkpoint that it may still hold."""
    snapshot: bool = True
    reference: Reference | None = None


def diff(client: EngineClient, path: Path, ways: Ways) -> Comparison:
    """Compare with a checkpoint, or with the version that the engine holds of those published in a directory.

    Raises `EngineUnreachable`, `EngineRefused`, and `RltopError` where nothing can be compared.
    """
    now = moment(client, path)
    number = number_of(now.checkpoint.directory.resolve())
    look = _Look(client, now.checkpoint, now.server, stand_in=now.stand_in, model_path=now.model_path, ways=ways)
    if number is not None and now.version.isascii() and now.version.isdigit() and int(now.version) != number:
        look.headline.append(f"the engine is at version {int(now.version)}, this is {number}")
    look.checksums(now.ranks)
    look.closer(now.version)
    return Comparison(
        url=client.url,
        stand_in=now.stand_in,
        sglang=str(now.server.get("version", "")),
        weight_version=now.version,
        model_path=now.model_path,
        ranks=look.ranks,
        dtype=look.dtype,
        hash=look.hash,
        checkpoint=str(now.checkpoint.path),
        checkpoint_version=number,
        headline=tuple(look.headline),
        tensors=len(now.checkpoint.names()),
        compared=look.compared,
        equal=look.compared - look.unequal,
        findings=tuple(in_order(look.findings)),
        not_compared=tuple(look.not_compared),
        notes=tuple(look.notes),
    )


@dataclass(slots=True)
class _Look:
    """One comparison while it goes on."""

    client: EngineClient
    checkpoint: Checkpoint
    server: Mapping[str, Any]
    stand_in: bool
    model_path: str
    ways: Ways
    ranks: int = 0
    dtype: str = ""
    hash: str = ""
    compared: int = 0
    unequal: int = 0
    findings: list[Finding] = field(default_factory=list)
    not_compared: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    headline: list[str] = field(default_factory=list)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The engine's name -> the checkpoint's tensors in it."""
    bad: set[str] = field(default_factory=set)
    """The checkpoint's tensors that are known to hold NaN."""

    # ------------------------------------------------------------------ digests

    def checksums(self, found: Sequence[tuple[Shard, Mapping[str, str]]]) -> None:
        """Every parameter by its digest."""
        self.ranks = len(found)
        older = list(self._older())
        every = self._shapes()
        left_out = {name for name, _ in self.not_compared}
        shapes = {name: shape for name, shape in every.items() if name not in left_out}
        heads = int(self.checkpoint.config.get("num_key_value_heads") or 1)
        told: dict[Finding, None] = {}
        wholes: list[set[Path]] = []
        for shard, held in found:
            fused = is_fused(held)
            recipes, held = self._left(parameters(every, fused=fused, shard=replace(shard, kv_heads=heads)), held)
            self.sources |= {name: recipe.sources for name, recipe in recipes.items()}
            expected = Expected(recipes, self.checkpoint.get)
            expected.recognise(held, dtypes=self._dtypes())
            expected.also = tuple(one for one in ("", "F32", "BF16") if one != expected.dtype)
            self.dtype, self.hash = expected.dtype, expected.hash
            with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
                list(pool.map(expected.digest, sorted(recipes.keys() & held.keys())))
            was = {old: self._expected_of(old, fused, replace(shard, kv_heads=heads), expected) for old in older}
            before = [self._before(old, was[old], expected, held) for old in older]
            wrong = self._comparable(classify(expected, held, before=before, engine=self.client.url), expected)
            wholes.append({old.path for old in older if wrong and _holds_all(was[old], held)})
            told |= dict.fromkeys(wrong)
            self.compared += len(recipes.keys() & held.keys())
            self.unequal += len({one.parameter or one.name for one in wrong} & recipes.keys() & held.keys())
        self.headline += [self._whole(old) for old in older if all(old.path in whole for whole in wholes)]
        gone = {one.name for one in told if one.kind == "missing"}
        bent = {one.name: one for one in self._bent(shapes) if one.name not in gone}
        self.findings = [*bent.values(), *(self._beyond(one) for one in told if one.name not in bent)]
        self._checkpoint_s_own()
        self.findings += [
            Finding(name, "missing", self.client.url, "the index lists it and no file has it")
            for name in self.checkpoint.absent
        ]

    def _left(
        self, recipes: Mapping[str, Parameter], held: Mapping[str, str]
    ) -> tuple[dict[str, Parameter], dict[str, str]]:
        """The parameters that are compared, of both sides: without modules with a tensor that is not."""
        names = {name for name, _ in self.not_compared}
        gone = {name.rpartition(".")[0] for name, one in recipes.items() if names.intersection(one.sources)}
        return (
            {name: one for name, one in recipes.items() if name.rpartition(".")[0] not in gone},
            {name: digest for name, digest in held.items() if name.rpartition(".")[0] not in gone},
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that the engine should have. Those that cannot be compared are noted."""
        quantised = self._quantised()
        tied = bool(self.checkpoint.config.get("tie_word_embeddings"))
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.checkpoint.names():
            if any(part in name for part in _ASIDE) or (tied and name == "lm_head.weight"):
                continue
            if name in quantised:
                self.not_compared.append((name, "quantised: SGLang hashes what it dequantises with its own rounding"))
            shapes[name] = self.checkpoint.shape(name)
        return shapes

    def _quantised(self) -> set[str]:
        """Tensors of the checkpoint that are quantised, or that the engine quantises when it loads them."""
        names = self.checkpoint.names()
        found = {name for name in names if name.endswith(SCALED) or self.checkpoint.dtype(name).startswith("F8")}
        bases = {name.removesuffix(end) for name in found for end in SCALED if name.endswith(end)}
        found |= bases & set(names)
        online = str(self.server.get("quantization") or "")
        if online and not self.stand_in:
            self.notes.append(f"the engine runs with --quantization {online}: its linear layers are not compared")
            found |= {name for name in names if len(self.checkpoint.shape(name)) == 2 and "_proj." in name}
        return found

    def _dtypes(self) -> tuple[str, ...]:
        """What the engine may round to, the likeliest first."""
        if self.stand_in:
            return ("F32",)  # it computes in fp32 whatever it is told
        told = str(self.server.get("dtype") or "auto")
        own = str(self.checkpoint.config.get("dtype") or self.checkpoint.config.get("torch_dtype") or "")
        likely = ENGINE_TYPES.get(told) or ("F16" if own == "float32" else ENGINE_TYPES.get(own, ""))
        return tuple(dict.fromkeys((likely, "", *FLOATS)))

    def _expected_of(self, old: Checkpoint, fused: bool, shard: Shard, like: Expected) -> Expected:
        shapes = {name: old.shape(name) for name in old.names()}
        return Expected(parameters(shapes, fused=fused, shard=shard), old.get, like.hash, like.dtype)

    def _before(self, old: Checkpoint, was: Expected, like: Expected, held: Mapping[str, str]) -> Before:
        """Another checkpoint that the engine may hold. Its tensors are `stale` only where it is older than this one."""
        if old.path == Path(self.model_path) and old.path != self.ways.previous:
            stale = self._is_older(old.path) or self._mixed(like, was, held)
            detail = "holds what it was loaded from last, {label}"
        else:
            stale, detail = True, "holds {label}"
        kind: FindingKind = "stale" if stale else "different"
        return Before(str(old.path), _Lazy(was), get=_getter(old), kind=kind, detail=detail)

    def _is_older(self, loaded: Path) -> bool:
        """A published version is younger than every lower one, and than what the run was started from."""
        mine, its = number_of(self.checkpoint.directory.resolve()), number_of(loaded.resolve())
        return mine is not None and (its is None or its < mine)

    def _whole(self, old: Checkpoint) -> str:
        loaded = ", which it was loaded from last" * (old.path == Path(self.model_path))
        return f"the engine holds all of {old.path}{loaded}: no tensor by itself is wrong"

    def _beyond(self, one: Finding) -> Finding:
        """A tensor of a layer that the checkpoint's own config does not have says so."""
        layers, layer = self.checkpoint.config.get("num_hidden_layers"), layer_of(one.name)[1]
        if one.kind != "missing" or not isinstance(layers, int) or layer < layers:
            return one
        return replace(one, detail=f"{one.detail}; config.json has {layers} layers, this is number {layer}")

    def _checkpoint_s_own(self) -> None:
        """NaN in the checkpoint itself is not the engine's fault: it is said of each tensor that differs, and first."""
        bad: list[str] = []
        for at, one in enumerate(self.findings):
            sources = self.sources.get(one.parameter or one.name, ()) if one.kind != "missing" else ()
            sources = (one.name,) if one.name in sources else sources
            try:
                counts = {name: count for name in sources if (count := not_finite(self.checkpoint.get(name)))}
            except RltopError:  # numpy is missing
                return
            if not counts:
                continue
            bad += counts
            of = ", ".join(f"{count} of {math.prod(self.checkpoint.shape(name))}" for name, count in counts.items())
            detail = f"the checkpoint itself holds NaN or infinite values here: {of}"
            self.findings[at] = replace(one, detail=f"{detail}; {one.detail}" if one.detail else detail)
        self._say_bad(bad)

    def _say_bad(self, bad: Sequence[str]) -> None:
        """bad: tensors of the checkpoint that hold NaN."""
        names = list(dict.fromkeys(bad))
        self.bad.update(names)
        if names:
            text = ", ".join(names[:3]) + ", …" * (len(names) > 3)
            self.headline.append(f"the checkpoint itself holds NaN or infinite values: {text}")

    def _mixed(self, now: Expected, was: Expected, held: Mapping[str, str]) -> bool:
        """Whether it holds some of the checkpoint that is compared, and not just what it was loaded from.

        Judged by small parameters: those of large models take long to hash.
        """
        both = [name for name in now.recipes if name in was.recipes and name in held]
        both.sort(key=lambda name: sum(len(now.get(source).data) for source in now.recipes[name].sources))
        return any(now.digest(name) == held[name] != was.digest(name) for name in both[:32])

    def _older(self) -> Iterator[Checkpoint]:
        """`--previous`, the published version before this one, and what the engine was loaded from last. Open."""
        here = self.checkpoint.directory.resolve()
        paths = [self.ways.previous] if self.ways.previous is not None else []
        if (number := number_of(here)) is not None:
            paths += [path for its, path in versions_in(here.parent).items() if its < number][-1:]
        loaded = Path(self.model_path)
        if self.model_path and loaded.is_dir() and any(loaded.glob("*.safetensors")):
            paths.append(loaded)
        seen = {here}
        for path in paths:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                yield Checkpoint(path)
            except RltopError as error:
                if path == self.ways.previous:
                    raise
                self.notes.append(f"{path} cannot be read ({error.why}): what stems from it is merely different")

    def _comparable(self, wrong: list[Finding], expected: Expected) -> list[Finding]:
        """Without what only a layout explains that is not modelled: all experts of an engine differ, and nothing else
        is wrong with any."""
        repacked = [name for name, recipe in expected.recipes.items() if recipe.repacked]
        odd = {one.parameter or one.name for one in wrong if one.kind == "different"}
        if len(repacked) < 2 or not odd.issuperset(repacked):
            return wrong
        backend = self.server.get("moe_runner_backend", "?")
        why = f"every one differs: the engine stores experts in an order of its own (--moe-runner-backend {backend})"
        self.not_compared += [(name, why) for name in repacked]
        self.compared -= len(repacked)
        return [one for one in wrong if (one.parameter or one.name) not in repacked]

    def _bent(self, shapes: Shapes) -> list[Finding]:
        """Tensors of the checkpoint whose shape is not what its own config, or the engine's checkpoint, says."""
        wanted = dict(expected_shapes(self.checkpoint.config, shapes))
        loaded = Path(self.model_path)
        if self.model_path and loaded.is_dir() and loaded.resolve() != self.checkpoint.directory.resolve():
            try:
                with Checkpoint(loaded) as old:
                    wanted |= {name: old.shape(name) for name in shapes if name in old and name not in wanted}
            except RltopError:
                pass
        return [
            Finding(name, "wrong-shape", self.client.url, f"{list(shape)}, the model has {list(wanted[name])}")
            for name, shape in shapes.items()
            if name in wanted and wanted[name] != shape
        ]

    # ------------------------------------------------------------------ values

    def closer(self, version: str) -> None:
        """What checksums do not tell, as long as the engine holds what they were taken of."""
        findings, notes, headline = list(self.findings), list(self.notes), list(self.headline)
        why = ""
        try:
            self.values()
            self.buffers()
            if (now := self.client.weight_version()) != version:
                why = f"its weights changed to version {now!r} meanwhile"
        except EngineUnreachable as error:
            why = f"it does not answer any more: {error.why}"
        if why:
            self.findings, self.notes, self.headline = findings, notes, headline
            self.notes.append(f"beside the checksums nothing was looked at: {_plain(why)}")

    def values(self) -> None:
        """A closer look at what is merely different."""
        vague = [one for one in self.findings if one.kind == "different"]
        if not vague:
            return
        for at, one in enumerate(self.findings):
            if one.kind == "different" and one in vague[:MOST_SAMPLED]:
                better = self._sampled(one)
                if better is None:
                    break  # the model has no such method: it has it for no tensor
                self.findings[at] = better
        if not any(one.kind == "different" for one in self.findings):
            return
        if not self.ways.snapshot:
            self.notes.append("without a snapshot nobody can say whether a tensor that differs holds NaN")
            return
        try:
            self.client.weights_checker("snapshot")
            self.client.weights_checker("compare")
        except EngineRefused as error:
            if UNEQUAL in error.message:
                said = compared(error.message).items()
                self.findings = with_told(self.findings, {n: w for n, w in said if not math.isfinite(w.max_abs_err)})
            else:
                self.notes.append(f"the engine cannot compare with its own snapshot: {_plain(words_of(error.message))}")
                self._nan_by_text()

    def _sampled(self, one: Finding) -> Finding | None:
        """With the values of its first rows; None where the engine does not give any."""
        if one.parameter or one.name not in self.checkpoint:
            return one
        try:
            rows = self.client.weights_by_name(one.name, SAMPLE_ROWS)
        except (EngineRefused, EngineUnreachable):
            return None
        found = _flat(rows)
        should = self.checkpoint.get(one.name)
        if should.dtype not in FLOATS or not found:
            return one
        judged = _judged(one, should, found)
        return one if one.name in self.bad and judged.kind != "nan" else judged

    def _nan_by_text(self) -> None:
        """An engine that gives no number for a prompt has NaN somewhere: in the tensor that differs, if it is one."""
        vague = [at for at, one in enumerate(self.findings) if one.kind == "different"]
        try:
            probe = read_probe(self.client, self._vocab())
        except (EngineRefused, EngineUnreachable, RltopError):
            return
        if all(math.isfinite(value) for value in probe):
            return
        why = "the engine's log-probs are no numbers"
        if len(vague) == 1:
            self.findings[vague[0]] = replace(self.findings[vague[0]], kind="nan", detail=why)
        else:
            self.notes.append(f"{why}: at least one tensor that differs holds NaN")

    # ------------------------------------------------------------------ buffers

    def buffers(self) -> None:
        """What no checksum covers, once all of them are equal."""
        if self.findings:
            return
        reference = self.ways.reference
        if not self.checkpoint.alone:
            self.notes.append("rotary tables were not compared: the directory holds other weights beside this file")
            return
        if reference is None:
            self.notes.append("rotary tables and other buffers were not compared: the weights checker leaves them out")
            return
        try:
            ids = probe_ids(self._vocab())
            should = reference(self.checkpoint.directory, ids)
            found = read_probe(self.client, self._vocab())
        except (EngineRefused, EngineUnreachable, RltopError) as error:
            why = error.why or error.what
            self.notes.append(f"rotary tables and other buffers were not compared: {_plain(why)}")
            return
        if not all(map(math.isfinite, should)):
            names = self.checkpoint.names()
            self._say_bad([name for name in names if not_finite(self.checkpoint.get(name))])
            self.notes.append("rotary tables were not compared: the checkpoint's own log-probs are no numbers")
            return
        exact = self.stand_in or self.dtype == "F32"
        if lost := lost_buffer(should, found, limit=EXACT_GAP if exact else ROUNDED_GAP):
            self.findings = [replace(lost, engine=self.client.url)]
        else:
            self.notes.append(f"log-probs of {len(ids)} tokens are the checkpoint's: no rotary table was lost")

    def _vocab(self) -> int:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in self.checkpoint:
                return self.checkpoint.shape(name)[0]
        raise RltopError("the checkpoint has no embedding", where=str(self.checkpoint.directory))


class _Lazy(Mapping[str, str]):
    """Digests that are worked out when somebody looks: only of parameters that differ."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected

    def __getitem__(self, name: str) -> str:
        if name not in self._expected.recipes:
            raise KeyError(name)
        return self._expected.digest(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected.recipes)

    def __len__(self) -> int:
        return len(self._expected.recipes)


def _holds_all(was: Expected, held: Mapping[str, str]) -> bool:
    """Every parameter of the engine is what this checkpoint gives. Stops at the first that is not."""
    known = held.keys() & was.recipes.keys()
    return bool(known) and all(was.digest(name) == held[name] for name in sorted(known))


def _getter(checkpoint: Checkpoint) -> Callable[[str], Raw]:
    def get(name: str) -> Raw:
        if name not in checkpoint:
            raise KeyError(name)
        return checkpoint.get(name)

    return get


def _judged(one: Finding, should: Raw, found: Sequence[float]) -> Finding:
    """A finding with what the first values say."""
    from array import array

    values = Raw("F32", (len(found),), memoryview(array("f", found)).cast("B"))
    first = should.cast("F32")
    first = Raw("F32", (len(found),), first.data[: len(values.data)])
    if len(first.data) != len(values.data):
        return one
    if bad := not_finite(values):
        return replace(one, kind="nan", detail=f"{bad} of the first {len(found)} values are NaN or infinite")
    gap = max_abs_gap(first, values)
    return replace(one, detail=f"of the first {len(found)} values", max_abs_err=gap)


def _flat(rows: Any) -> list[float]:
    if isinstance(rows, list):
        return [value for row in rows for value in _flat(row)]
    return [float(rows)] if isinstance(rows, int | float) else [math.nan] if rows is None else []


def _plain(text: str) -> str:
    return " ".join(text.split())[:200]


def expected_shapes(config: Mapping[str, Any], names: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of the tensors of a Llama-like decoder, by its `config.json`; nothing where that does not say."""
    try:
        hidden, ffn = int(config["hidden_size"]), int(config["intermediate_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        dim = int(config.get("head_dim") or hidden // heads)
        vocab = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return
    expert = int(config.get("moe_intermediate_size") or ffn)
    ends = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "q_proj.weight": (heads * dim, hidden),
        "k_proj.weight": (kv_heads * dim, hidden),
        "v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "q_norm.weight": (dim,),
        "k_norm.weight": (dim,),
        "layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if "Qwen3" not in str(config.get("architectures")) and "Llama" not in str(config.get("architectures")):
        return
    for name in names:
        for end, shape in ends.items():
            if ".experts." in name and end.startswith("mlp."):
                continue
            if name.endswith(end):
                yield name, shape
                break
        else:
            if ".experts." in name and name.endswith(("gate_proj.weight", "up_proj.weight")):
                yield name, (expert, hidden)
            elif ".experts." in name and name.endswith("down_proj.weight"):
                yield name, (hidden, expert)
