"""What is wrong with a tensor that differs: zero, NaN, another layer's, left from before, and so on. Pure.

Most of it follows from digests alone. An engine tells a digest per parameter; whoever knows what should be there knows
the digests of everything that a typical fault would have put there instead: zeros, another layer's tensor, the version
before, the random numbers of `reset_tensors`. Of fused parameters each part is tried. What no digest explains is
`different`; values, where somebody has them, then say how much.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltop.engines.engine_layout import Get, Parameter, chunks, layer_of
from rltop.engines.raw_tensors import HASHES, HashKind, Raw, is_zero, max_abs_gap, not_finite, zeros
from rltop.errors import RltopError

FindingKind = Literal[
    "zero", "nan", "wrong-shape", "wrong-layer", "stale", "missing", "extra", "buffer-lost", "different"
]
ORDER: tuple[FindingKind, ...] = (
    "zero",
    "nan",
    "wrong-shape",
    "wrong-layer",
    "stale",
    "missing",
    "extra",
    "buffer-lost",
    "different",
)
"""In which findings are told: zero tensors first."""

MOST_TAKEN_APART = 16
"""Fused parameters whose parts are tried one by one: each costs a digest per part, layer and suspicion."""

ROTARY = "rotary_emb.cos_sin_cache"
"""SGLang's name of the rotary table, which its checker leaves out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One tensor that is not what it should be."""

    name: str
    """The checkpoint's name where it is known, else the engine's."""
    kind: FindingKind
    engine: str = ""
    detail: str = ""
    max_abs_err: float | None = None
    parameter: str = ""
    """The engine's name, where it is another one: `qkv_proj` holds `k_proj`."""

    def as_dict(self) -> dict[str, Any]:
        """For records and JSON; what is not known is left out."""
        found: dict[str, Any] = {"name": self.name, "kind": self.kind}
        for key in ("engine", "detail", "parameter"):
            if value := getattr(self, key):
                found[key] = value
        if self.max_abs_err is not None:
            found["max_abs_err"] = self.max_abs_err
        return found

    def __str__(self) -> str:
        where = f" (in {self.parameter})" if self.parameter else ""
        gap = f", max_abs_err {self.max_abs_err:.4g}" if self.max_abs_err is not None else ""
        return f"{self.name}{where}: {self.kind}" + (f", {self.detail}" if self.detail else "") + gap


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Zero tensors first, then by kind, each in the order of names with layers as numbers."""
    return sorted(findings, key=lambda one: (ORDER.index(one.kind), *_natural(one.name), one.engine))


def _natural(name: str) -> tuple[str, int]:
    return layer_of(name)


def told(findings: Sequence[Finding], most: int = 4) -> str:
    """In one line: `2 tensors differ: NAME: zero; NAME: stale`."""
    shown = "; ".join(map(str, findings[:most])) + ("; …" if len(findings) > most else "")
    return f"{len(findings)} {'tensor differs' if len(findings) == 1 else 'tensors differ'}: {shown}"


# ---------------------------------------------------------------------- what should be there


@dataclass(slots=True)
class Expected:
    """What an engine rank should hold: recipes, the tensors, and the digests that follow. Digests are kept."""

    recipes: Mapping[str, Parameter]
    get: Get
    hash: HashKind = "cpu"
    dtype: str = ""
    """What the engine casts to; empty: as stored."""
    also: tuple[str, ...] = ()
    """What it may cast single parameters to instead: some stay in fp32."""
    _digests: dict[str, str] = field(default_factory=dict)

    def digest(self, name: str) -> str:
        """Of one of the engine's parameters."""
        if name not in self._digests:
            self._digests[name] = self.digest_with(name, self.get)
        return self._digests[name]

    def digest_with(self, name: str, get: Get) -> str:
        """The same from other tensors."""
        return HASHES[self.hash](chunks(self.recipes[name], get, self.dtype))

    def explains(self, name: str, found: str) -> bool:
        """Whether the engine's digest of a parameter is right."""
        return self.digest(name) == found or any(
            HASHES[self.hash](chunks(self.recipes[name], self.get, dtype)) == found
            for dtype in self.also
            if self._castable(name, dtype)
        )

    def _castable(self, name: str, dtype: str) -> bool:
        """It is another type than the usual one gives."""
        now = {self.get(source).dtype for source in self.recipes[name].sources}
        return now <= {"F32", "F16", "BF16"} and ({dtype} if dtype else now) != ({self.dtype} if self.dtype else now)

    def digests(self) -> dict[str, str]:
        """Of all."""
        return {name: self.digest(name) for name in self.recipes}

    def zero_digest(self, name: str) -> str:
        """Of a parameter of this size that is all zero."""
        size = sum(len(chunk) for chunk in chunks(self.recipes[name], self.get, self.dtype))
        return HASHES[self.hash](zeros(size))

    def owner_of(self, source: str, raw: Raw) -> str:
        """The tensor of another layer, of the same kind, that has these bytes; empty: none has."""
        family, layer = layer_of(source)
        for recipe in self.recipes.values():
            for name in recipe.sources:
                if name != source and layer_of(name)[0] == family and layer_of(name)[1] != layer:
                    other = self.get(name)
                    if (other.dtype, other.shape) == (raw.dtype, raw.shape) and other.data == raw.data:
                        return name
        return ""

    def recognise(self, held: Mapping[str, str], *, dtypes: Sequence[str] = ("",), most: int = 16) -> None:
        """Find out how the engine hashes and what it casts to: whichever explains most of its small parameters.

        Ties go to the first: as on the CPU and as stored. Combinations that cannot be computed here are left out.
        """
        known = [name for name in self.recipes if name in held]
        sample = sorted(known, key=lambda name: sum(len(self.get(s).data) for s in self.recipes[name].sources))[:most]
        best, chosen = 0, (self.hash, self.dtype)
        for dtype in dtypes:
            for kind in HASHES:
                trial = Expected(self.recipes, self.get, kind, dtype)
                try:
                    right = sum(trial.digest(name) == held[name] for name in sample)
                except RltopError:
                    continue
                if right > best:
                    best, chosen = right, (kind, dtype)
        if chosen != (self.hash, self.dtype):
            self.hash, self.dtype = chosen
            self._digests.clear()


@dataclass(frozen=True, slots=True)
class Before:
    """What an engine may still hold: an older version."""

    label: str
    """In words: `version 3`."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Engine's name -> digest."""
    get: Get | None = None
    """The tensors themselves, to look into fused parameters."""
    kind: FindingKind = "stale"
    detail: str = "holds {label}"


# ---------------------------------------------------------------------- from digests


def classify(
    expected: Expected, held: Mapping[str, str], *, before: Sequence[Before] = (), engine: str = ""
) -> list[Finding]:
    """Every parameter whose digest is not the expected one, and why, in the order of `in_order`.

    held: the engine's digests. A tied output layer may be missing on either side.
    """
    findings: list[Finding] = []
    both = expected.recipes.keys() & held.keys()
    optional = {"lm_head.weight"} - both
    for name in sorted(expected.recipes.keys() - held.keys() - optional):
        detail = "the engine has no parameter of this name"
        findings += [Finding(source, "missing", engine, detail) for source in expected.recipes[name].sources]
    for name in sorted(held.keys() - expected.recipes.keys() - optional):
        findings.append(Finding(name, "extra", engine, "only the engine has a parameter of this name"))
    wrong = [name for name in sorted(both) if not expected.explains(name, held[name])]
    owners = _owners(expected) if wrong else {}
    for at, name in enumerate(wrong):
        whole = _whole(expected, name, held[name], owners, before)
        if whole is None and at < MOST_TAKEN_APART and len(expected.recipes[name].sources) > 1:
            whole = _apart(expected, name, held[name], before)
        findings += whole or [_finding(expected, name, "different", "")]
    return in_order(replace(one, engine=engine) for one in findings)


def _owners(expected: Expected) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for name, digest in expected.digests().items():
        owners.setdefault(digest, []).append(name)
    return owners


def _finding(expected: Expected, name: str, kind: FindingKind, detail: str) -> Finding:
    """Of a whole parameter: one tensor of the checkpoint gives it its name, several leave it the engine's."""
    sources = expected.recipes[name].sources
    only = sources[0] if len(sources) == 1 else name
    return Finding(only, kind, detail=detail, parameter="" if only == name else name)


def _whole(
    expected: Expected, name: str, found: str, owners: Mapping[str, list[str]], before: Sequence[Before]
) -> list[Finding] | None:
    if found == expected.zero_digest(name):
        return [_finding(expected, name, "zero", "")]
    for old in before:
        if old.digests.get(name) == found:
            return _as_before(expected, name, old)
    others = owners.get(found, [])
    if others:
        family = layer_of(name)[0]
        other = next((one for one in others if layer_of(one)[0] == family), others[0])
        return [_finding(expected, name, "wrong-layer", f"holds what belongs to {other}")]
    return None


def _as_before(expected: Expected, name: str, old: Before) -> list[Finding]:
    """A parameter that is what it was before: tensor by tensor, and what is wrong with each, where that is at hand."""
    plain = _finding(expected, name, old.kind, old.detail.format(label=old.label))
    sources = expected.recipes[name].sources
    found: list[Finding] = []
    for source in sources if old.get is not None else ():
        try:
            raw = old.get(source) if old.get is not None else None
            one = classify_values(source, expected.get(source), raw, belongs=expected.owner_of)
        except (KeyError, RltopError):  # it has no such tensor, or numpy is missing
            return [plain]
        if one is None:
            continue
        if one.kind == "different":
            one = replace(one, kind=old.kind, detail=plain.detail)
        elif one.detail:
            one = replace(one, detail=f"{one.detail}; {plain.detail}")
        else:
            one = replace(one, detail=plain.detail)
        found.append(replace(one, parameter=name if len(sources) > 1 else ""))
    return found or [plain]


def _apart(expected: Expected, name: str, found: str, before: Sequence[Before]) -> list[Finding] | None:
    """One part of a fused parameter is wrong: which, and what stands there instead."""
    for source in expected.recipes[name].sources:
        for kind, detail, raw in _suspects(expected, source, before):

            def swapped(wanted: str, source: str = source, raw: Raw = raw) -> Raw:
                return raw if wanted == source else expected.get(wanted)

            if expected.digest_with(name, swapped) == found:
                return [Finding(source, kind, detail=detail, parameter=name)]
    return None


def _suspects(expected: Expected, source: str, before: Sequence[Before]) -> Iterator[tuple[FindingKind, str, Raw]]:
    raw = expected.get(source)
    yield "zero", "", Raw(raw.dtype, raw.shape, memoryview(bytes(len(raw.data))))
    for old in before:
        if old.get is not None:
            try:
                other = old.get(source)
            except KeyError:
                continue
            if other.shape == raw.shape:
                yield old.kind, old.detail.format(label=old.label), other
    family, layer = layer_of(source)
    for name in sorted({one for recipe in expected.recipes.values() for one in recipe.sources}):
        if layer_of(name)[0] == family and layer_of(name)[1] != layer:
            other = expected.get(name)
            if other.shape == raw.shape:
                yield "wrong-layer", f"holds what belongs to {name}", other


# ---------------------------------------------------------------------- from values


def classify_values(
    name: str, should: Raw, found: Raw | None, *, belongs: Callable[[str, Raw], str] | None = None, old: bool = False
) -> Finding | None:
    """One tensor of which both values are known; None: they are equal, bit for bit.

    belongs: whose tensor the found one is, by name; empty: nobody's. old: it is known to be the version before.
    """
    if found is None:
        return Finding(name, "missing", detail="it was not pushed")
    if found.shape != should.shape:
        return Finding(name, "wrong-shape", detail=f"{list(found.shape)}, it should be {list(should.shape)}")
    if found.dtype == should.dtype and found.data == should.data:
        return None
    if is_zero(found):
        return Finding(name, "zero")
    if bad := not_finite(found):
        count = math.prod(found.shape)
        return Finding(name, "nan", detail=f"{bad} of {count} values are NaN or infinite", max_abs_err=math.nan)
    gap = max_abs_gap(should, found)
    if owner := belongs(name, found) if belongs else "":
        return Finding(name, "wrong-layer", detail=f"holds what belongs to {owner}", max_abs_err=gap)
    if old:
        return Finding(name, "stale", detail="holds the version before", max_abs_err=gap)
    return Finding(name, "different", max_abs_err=gap) if gap or math.isnan(gap) else None


# ---------------------------------------------------------------------- from the checker's words


@dataclass(frozen=True, slots=True)
class Told:
    """What `compare` said of one parameter."""

    max_abs_err: float
    zero: bool
    """All values on the engine are 0, as 0.5.14's minimum and maximum say."""


_LINE = re.compile(r"^name=(?P<name>\S+) max_abs_err=(?P<gap>\S+)(?P<rest>.*)$", re.MULTILINE)
_ACTUAL = re.compile(r"actual\S*?=.*?min=(?P<low>\S+) max=(?P<high>\S+)")
UNEQUAL = "check tensor equality failed"
"""How the checker's message of a difference begins. Any other message says that it could not compare."""


def compared(message: str) -> dict[str, Told]:
    """Parameter -> what the message of a refused `compare` says of it."""
    found: dict[str, Told] = {}
    for line in _LINE.finditer(words_of(message)):
        actual = _ACTUAL.search(line["rest"])
        zero = actual is not None and _number(actual["low"]) == _number(actual["high"]) == 0.0
        found[line["name"]] = Told(_number(line["gap"]), zero)
    return found


def words_of(message: str) -> str:
    """The checker's own words, where a client hands on the whole body of its answer."""
    try:
        body = json.loads(message)
    except ValueError:
        return message
    return str(body["message"]) if isinstance(body, dict) and "message" in body else message


def _number(text: str) -> float:
    try:
        return float(text.strip("()',"))
    except ValueError:
        return math.nan


def with_told(findings: Iterable[Finding], said: Mapping[str, Told]) -> list[Finding]:
    """`different` becomes `nan` or `zero` where the checker's numbers say so, and every finding gets its number."""
    better = []
    for one in findings:
        word = said.get(one.parameter or one.name)
        if word is not None:
            gap = one.max_abs_err if one.max_abs_err is not None else word.max_abs_err
            kind: FindingKind = one.kind
            if kind == "different":
                kind = "zero" if word.zero else "nan" if not math.isfinite(word.max_abs_err) else kind
            one = replace(one, kind=kind, max_abs_err=gap)
        better.append(one)
    return in_order(better)
