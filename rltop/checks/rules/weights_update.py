"""`weights.update-failed` and `weights.compare`: did every engine take the weights, and are they the trainer's?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rltop.checks.facts import emptied, owned
from rltop.checks.found import Document, HttpCall, LogEvent
from rltop.checks.names import layers_of, ranges, some
from rltop.checks.observe import EngineSync, Observations, SyncEvent, TensorFinding, Where
from rltop.checks.phrase import brief, count, jnum, mismatches, missing, num, of_place, of_sync, unlogged
from rltop.checks.syncs import Update, message, ordered, success, updates
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

FAILED = "weights.update-failed"
COMPARE = "weights.compare"
MOST_LISTED = 50
MOST_TENSOR_LINES = 5
KINDS = {
    "zero": "all zero",
    "nan": "NaN or infinite",
    "wrong-shape": "of another shape",
    "wrong-layer": "another tensor's values",
    "stale": "an older version's values",
    "missing": "not brought",
    "extra": "not expected",
    "buffer-lost": "lost with its memory, and no weight update brings it back",
    "different": "different",
}
"""Kind of a finding -> words, zero tensors first."""
MOST_ENGINES = 32
_TENSOR = re.compile(r"\b[A-Za-z_]\w*(?:\.\w+)*\.(?:weight|bias|A_log|dt_bias|e_score_correction_bias)\w*\b")
_ZERO = re.compile(r"all[- ]?zero|all zeros|is zero|zeroed", re.IGNORECASE)
_ERROR = re.compile(r"max_abs_(?:err|diff|error)\s*[=:]\s*(?P<value>[\d.eE+-]+)")
_LISTS = ("tensors", "mismatched", "mismatches", "failed", "different", "errors", "details")
_PUSHED = ("pushed", "sent", "trainer", "megatron", "converted", "source")
_SERVING = frozenset({"HEALTHY", "SUSPECT"})
_EXPECTED = ("expected", "engine", "checkpoint", "hf", "target", "received")


# -- weights.update-failed


def check_failed(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per engine that refused."""
    known = updates(obs)
    if not known:
        return [Verdict(FAILED, "skip", cause=missing(obs, "the answer of an engine to a weight update"))]
    refusals: dict[int | str | None, list[Update]] = {}
    for update in known:
        if not update.ok:
            refusals.setdefault(update.engine, []).append(update)
    if not refusals:
        engines = len({update.engine for update in known})
        cause = f"Every weight update was taken, by {engines} {'engine' if engines == 1 else 'engines'}."
        return [Verdict(FAILED, "pass", value={"engines": engines}, cause=cause)]
    return [_refused(obs, engine, all_of) for engine, all_of in list(refusals.items())[:MOST_ENGINES]]


def _taken_since(obs: Observations, engine: int | str | None, refused: list[Update]) -> str:
    """The version that the engine holds as a whole since its last refusal; empty where nothing shows one.

    Either rltop, whose engine it is, asked it and it holds the newest version; or a later push was taken that was no
    delta (a delta is not sent again, so one that is taken repairs nothing).
    """
    pushes = ordered(obs.syncs)
    mine = [fact for fact in obs.engines if fact.owned and (engine is None or fact.id == str(engine))]
    newest = pushes[-1].version if pushes else ""
    if newest and mine and all(fact.state in _SERVING and fact.weight_version == newest for fact in mine):
        return newest
    last = max((update.time for update in refused if update.time is not None), default=None)
    held = ""
    for sync in pushes:
        spoiled = {one.engine for one in mismatches(sync)}
        for answer in sync.engines:
            if engine is None or answer.engine != str(engine):
                continue
            late = last is None or sync.time is None or sync.time >= last
            whole = answer.ok and answer.engine not in spoiled and "delta" not in sync.transport
            if not answer.ok:
                held = ""
            elif whole and late:
                held = sync.version
    return held


def _refused(obs: Observations, engine: int | str | None, refused: list[Update]) -> Verdict:
    first = next((update for update in refused if update.version), refused[0])  # a record says more than a line
    partial = any("partial" in update.message.lower() for update in refused)
    who = "The engine" if engine is None else f"Engine {engine}"
    state = "holds the old weights in part and the new ones in part" if partial else "still holds the old weights"
    at = f" {first.endpoint}" if first.endpoint else ""
    told = f": {brief(first.message)}" if first.message else ""
    syncs = [of_sync(s) for s in ordered(obs.syncs) if first.where is None and s.version == first.version][:1]
    places = [of_place(update.where) for update in refused if update.where][:3]
    value: dict[str, object] = {
        "endpoint": first.endpoint or None,
        "message": unlogged(first.message)[:400],
        "version": first.version or None,
        "partial": partial,
    }
    evidence = tuple(places or syncs) or (Evidence("weights", None, first.message or "refused"),)
    if held := _taken_since(obs, engine, refused):
        which = f" to version {first.version}" if first.version else ""
        return Verdict(
            FAILED,
            "info",
            rollout=first.rollout,
            step=first.step,
            engine=engine,
            value=value | {"holds": held},
            threshold={"success": True},
            evidence=evidence,
            cause=f"{who} refused the update{which}{at}{told}. It holds version {held} since.",
        )
    mine = owned(obs, engine) if engine is not None else ()
    return Verdict(
        FAILED,
        "fail",
        rollout=first.rollout,
        step=first.step,
        engine=engine,
        value=value,
        threshold={"success": True},
        evidence=evidence,
        cause=f"{who} refused the update{at}{told}. It {state} until a full push or a restart, also if "
        "the run goes on; a delta is not sent again.",
        advice=(f"rltop engine restart --engine {mine[0]}, if rltop does not bring it back by itself",)
        if mine
        else (
            f"drop the rollouts of {who.lower()} since then",
            "restart the engine with a full load, then push once more"
            if partial
            else f"a full push to {who.lower()}, or its restart",
        ),
    )


# -- weights.compare


def check_compare(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per engine that compared, and one per document with both name lists."""
    found = [verdict for call in obs.http if _is_compare(call) and (verdict := _answer(call))]
    found += _logged(obs)
    found += _live(obs)
    found += [verdict for one in obs.documents if one.kind == "tensor_names" and (verdict := _name_lists(one))]
    found = found or _told_equal(obs)
    what = "an answer of /weights_checker, of --check-weight-update-equal, or both lists of names"
    return found or [Verdict(COMPARE, "skip", cause=missing(obs, what))]


def _logged(obs: Observations) -> list[Verdict]:
    """What the checker wrote into the logs: many lines of one engine are one answer."""
    told: dict[object, list[LogEvent]] = {}
    for event in obs.events:
        if event.kind == "weights_check" and isinstance(event.data.get("ok"), bool):
            subject = event.engine if event.engine is not None else (event.pid or event.where.source)
            told.setdefault(subject, []).append(event)
    found = []
    for events in list(told.values())[:MOST_ENGINES]:
        wrong = [event for event in events if event.data["ok"] is False]
        text = "\n".join(str(event.data.get("message") or event.text) for event in (wrong or events)[:MOST_LISTED])
        found.append(_compared(not wrong, text, [], events[0].engine, (wrong or events)[0].where))
    return found


def _told_equal(obs: Observations) -> list[Verdict]:
    """What rltop's trainer logged of its comparison, where nothing else tells of one."""
    told = next((event for event in reversed(obs.events) if event.kind == "weights_equal"), None)
    if told is None:
        return []
    engines = told.data.get("engines")
    cause = f"The trainer filled {count(engines if isinstance(engines, int) else 1, 'engine')} with random numbers, "
    cause += f"pushed weights version {told.data.get('version')} and found every tensor equal "
    cause += "(--check-weight-update-equal)."
    return [Verdict(COMPARE, "pass", evidence=(of_place(told.where),), cause=cause + _until_emptied(obs))]


def _until_emptied(obs: Observations) -> str:
    if (later := emptied(obs)) is None:
        return ""
    who = "an engine" if later.engine is None else f"engine {later.engine}"
    return (
        f" That was true when they were compared: {who} released its memory and took it back after that ({later.id}), "
        "and for what it served then this does not speak."
    )


def _live(obs: Observations) -> list[Verdict]:
    """What the trainer itself found when it compared what it pushed with what the engines hold."""
    found: list[Verdict] = []
    compared = False
    told: set[str] = set()
    for sync in ordered(obs.syncs):
        compared = compared or any(e.same is not None or bool(e.digest and sync.digest) for e in sync.engines)
        bent = (engine for engine in sync.engines if not engine.ok and engine.findings)
        for engine in (*mismatches(sync), *bent):
            if engine.engine in told or len(told) >= MOST_ENGINES:
                continue
            told.add(engine.engine)
            found.append(_differs(sync, engine))
        if sync.findings and not any(verdict.engine == "trainer" for verdict in found):
            found.append(_trainer(sync))
    if found or not compared:
        return found
    cause = "The engines hold the parameters that the trainer pushed: their digests are equal."
    if any(sync.checked for sync in obs.syncs):
        cause += " Before the first sync their weights were filled with random numbers, so all of it was brought; the "
        cause += "log-probs of one prompt, where they could be compared, speak for buffers (rotary tables) too."
    else:
        cause += " Buffers (rotary tables, caches) are not covered: no digest holds them, a lost one shows in "
        cause += "logprob.train-rollout, and --check-weight-update-equal looks for it."
    return [Verdict(COMPARE, "pass", cause=cause + _until_emptied(obs))]


def _differs(sync: SyncEvent, engine: EngineSync) -> Verdict:
    """An engine that took a version and holds something else: which tensors, and what stands there instead."""
    total = max(engine.differing, len(engine.findings))
    cause = f"Engine {engine.engine} took weights version {sync.version} and does not hold what the trainer pushed: "
    if not engine.ok:
        cause = f"Engine {engine.engine} could not take weights version {sync.version} as it was pushed: "
    cause += _tensors(engine.findings, total) if engine.findings else "their digests differ"
    value: dict[str, object] = {"version": sync.version, "pushed": sync.digest, "held": engine.digest}
    return Verdict(
        COMPARE,
        "fail",
        rollout=sync.rollout_id,
        engine=int(engine.engine) if engine.engine.isdigit() else engine.engine,
        value=value | ({"differing": total, "tensors": _listed(engine.findings)} if engine.findings else {}),
        threshold={"different": 0},
        evidence=(of_sync(sync), *_of_tensors(sync, engine.findings)),
        cause=cause + ".",
        advice=_advice(engine.findings),
    )


def _trainer(sync: SyncEvent) -> Verdict:
    """The trainer's own tensors, as it would push them, against the checkpoint that it was loaded from."""
    return Verdict(
        COMPARE,
        "fail",
        rollout=sync.rollout_id,
        engine="trainer",
        value={"version": sync.version, "differing": len(sync.findings), "tensors": _listed(sync.findings)},
        threshold={"different": 0},
        evidence=_of_tensors(sync, sync.findings),
        cause="What the trainer would push is not the checkpoint that it was loaded from: "
        f"{_tensors(sync.findings, len(sync.findings))}.",
        advice=("check the conversion's name map in both directions", "check how the checkpoint was loaded"),
    )


def _tensors(findings: tuple[TensorFinding, ...], total: int) -> str:
    """`2 tensors differ: zero on the engine: A; another layer's: B (holds what belongs to C)`."""
    parts = []
    for kind, word in KINDS.items():
        mine = [one for one in findings if one.kind == kind]
        if mine:
            detail = f" ({mine[0].detail})" if mine[0].detail else ""
            if not detail and mine[0].max_abs_err is not None and kind == "different":
                detail = f" (max_abs_err {num(mine[0].max_abs_err)})"
            parts.append(f"{word}: {some([one.name for one in mine], 4)}{detail}")
    more = f"; {total - len(findings)} more" if total > len(findings) else ""
    return f"{count(total, 'tensor')} {'differs' if total == 1 else 'differ'}: {'; '.join(parts)}{more}"


def _listed(findings: Iterable[TensorFinding]) -> list[dict[str, object]]:
    found = []
    for one in findings:
        entry: dict[str, object] = {"name": one.name, "kind": one.kind}
        entry |= {"detail": one.detail} if one.detail else {}
        entry |= {"parameter": one.parameter} if one.parameter else {}
        entry |= {"max_abs_err": jnum(one.max_abs_err)} if one.max_abs_err is not None else {}
        found.append(entry)
    return found[:MOST_LISTED]


def _of_tensors(sync: SyncEvent, findings: tuple[TensorFinding, ...]) -> tuple[Evidence, ...]:
    """Evidence for the first tensors: one line each."""
    lines = []
    for one in findings[:MOST_TENSOR_LINES]:
        gap = f", max_abs_err {num(one.max_abs_err)}" if one.max_abs_err is not None else ""
        lines.append(f"{one.name}: {one.kind}{': ' if one.detail else ''}{one.detail}{gap}")
    return tuple(Evidence(f"weights@{sync.version}", None, line) for line in lines)


def _advice(findings: tuple[TensorFinding, ...]) -> tuple[str, ...]:
    kinds = {one.kind for one in findings}
    return (
        *(("check the quantisation ignore list and the name map for the zero tensors",) if "zero" in kinds else ()),
        *(
            ("look for the first step with a grad_norm that is no number: NaN in weights stays",)
            if "nan" in kinds
            else ()
        ),
        *(
            ("restart the engine: no weight update brings buffers back", "keep buffers when memory is released")
            if "buffer-lost" in kinds
            else ("check the conversion's name map for this pipeline layout", "push the weights once more")
        ),
    )


def _is_compare(call: HttpCall) -> bool:
    return "weights_checker" in call.path and call.body.get("action") in (None, "compare")


def _answer(call: HttpCall) -> Verdict | None:
    if not call.answer and call.status is None:
        return None
    tensors: list[tuple[str, str]] = []
    for key in _LISTS:
        value = call.answer.get(key)
        for one in value if isinstance(value, list) else ():
            if isinstance(one, Mapping):
                tensors.append((str(one.get("name") or one.get("tensor") or one), str(dict(one))))
            else:
                tensors.append((str(one), str(one)))
        if isinstance(value, Mapping):
            tensors += [(str(name), f"{name}: {detail}") for name, detail in value.items()]
    ok = success(call) and not tensors if "success" not in call.answer else success(call)
    return _compared(ok, message(call), tensors, call.engine, call.where)


def _compared(
    ok: bool, text: str, tensors: list[tuple[str, str]], engine: int | str | None, where: Where | None
) -> Verdict:
    evidence = (of_place(where),) if where else ()
    who = "" if engine is None else f" of engine {engine}"
    if ok:
        cause = f"The weights checker{who} found all parameters equal. It does not look at buffers (rotary tables, "
        cause += "caches), and it speaks for the moment of the call only."
        return Verdict(COMPARE, "pass", engine=engine, evidence=evidence, cause=cause)
    listed = tensors or [(found[0], _around(text, found)) for found in _TENSOR.finditer(text)]
    zero = list(dict.fromkeys(name for name, detail in listed if _ZERO.search(detail)))
    others = [name for name in dict.fromkeys(name for name, _ in listed) if name not in zero]
    errors = [found["value"] for found in _ERROR.finditer(text)]
    cause = f"The weights checker{who} found that the engine's parameters are not the trainer's"
    if zero:
        cause += f"; all zero on the engine (packed by mistake, or not in the checkpoint): {some(zero)}"
    if others:
        cause += f"; different: {some(others)}"
    if not listed:
        cause += f": {text[:200] or 'it gave no reason'}"
    return Verdict(
        COMPARE,
        "fail",
        engine=engine,
        value={"zero": zero[:MOST_LISTED], "different": others[:MOST_LISTED], "max_abs_err": errors[:MOST_LISTED]},
        threshold={"different": 0},
        evidence=evidence or (Evidence("weights_checker", None, text[:200]),),
        cause=cause + ".",
        advice=(
            *(("check the quantisation ignore list for the zero tensors",) if zero else ()),
            "check the conversion's name map for this pipeline and expert layout",
            "dump the tensor in the model's load_weights and compare it with the checkpoint",
        ),
    )


def _around(text: str, found: re.Match[str]) -> str:
    """The part of a message that speaks of one tensor: up to the next one."""
    after = _TENSOR.search(text, found.end())
    return text[found.start() : after.start() if after else len(text)]


def _name_lists(one: Document) -> Verdict | None:
    pushed = _list(one, _PUSHED)
    expected = _list(one, _EXPECTED)
    if pushed is None or expected is None:
        return None
    twice = sorted({name for name in pushed if pushed.count(name) > 1}) if len(pushed) < 20_000 else []
    lost = sorted(set(expected) - set(pushed))
    extra = sorted(set(pushed) - set(expected))
    want, have = layers_of(expected), layers_of(pushed)
    value = {"missing": lost[:MOST_LISTED], "extra": extra[:MOST_LISTED], "twice": twice[:MOST_LISTED]}
    if not (lost or extra or twice):
        cause = f"The {len(pushed)} names that are pushed are the {len(expected)} that the engine expects."
        return Verdict(COMPARE, "pass", value=value, evidence=(Evidence(one.source, None, ""),), cause=cause)
    parts = []
    if gone := sorted(set(want) - set(have)):
        again = " and others come twice: a later pipeline stage counts its layers from 0 again" if twice else ""
        parts.append(f"layers {ranges(gone)} are never pushed{again}")
    elif twice:
        parts.append(f"{some(twice, 4)} is pushed twice: a later pipeline stage counts its layers from 0 again")
    if lost:
        parts.append(f"{len(lost)} expected parameters have no partner ({some(lost, 4)})")
    if extra:
        parts.append(f"{len(extra)} pushed ones are not expected ({some(extra, 4)})")
    return Verdict(
        COMPARE,
        "fail",
        threshold={"missing": 0, "extra": 0, "twice": 0},
        value=value | {"layers_expected": ranges(want), "layers_pushed": ranges(have)},
        evidence=(Evidence(one.source, None, f"pushed {len(pushed)}, expected {len(expected)}"),),
        cause=f"{one.source}: {'; '.join(parts)}.",
        advice=("check the conversion's name map for this pipeline layout",),
    )


def _list(one: Document, keys: Iterable[str]) -> list[str] | None:
    for key, value in one.fields.items():
        if not any(word in key.lower() for word in keys):
            continue
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return list(value)
        if isinstance(value, Mapping):
            inner = [item for item in value.values() if isinstance(item, list)]
            if inner and len(inner) == len(value):  # one list per stage
                return [str(name) for part in inner for name in part]
            return [str(name) for name in value]
    return None
