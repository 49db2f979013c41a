"""`dump.join`, `dump.foreign-class`, `dump.routing-field`, `dump.size`: what dumps hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rltop.checks.events import of_kind, who, whole_text
from rltop.checks.found import Dump, LogEvent
from rltop.checks.names import ranges, some
from rltop.checks.observe import Observations
from rltop.checks.phrase import count, missing, of_event, of_flags, percent
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

JOIN = "dump.join"
FOREIGN = "dump.foreign-class"
ROUTING = "dump.routing-field"
SIZE = "dump.size"
ROUTES = ("rollout_routed_experts", "routed_experts")
_WHOLE = ("tokens", "rollout_log_probs")
"""Fields that tell a full sample from an excerpt of one."""
_STOPPED = re.compile(
    r"KeyError\b.*routed_experts|routed_experts['\"`]? (?:is|are) (?:required|missing|None|not)", re.DOTALL
)
"""A trainer that misses the routes: slime's ValueError, or a bare KeyError."""
_CONTENT = ("response",)
"""What a file of samples is for; that it is most of the file is no finding."""
MOST_LISTED = 100


# -- dump.join


def check_join(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per rollout that has both dumps."""
    made: dict[int, list[Dump]] = {}
    trained: dict[int, list[Dump]] = {}
    for one in obs.dumps:
        if one.rollout_id is not None and not one.is_eval and (one.indices or one.keys):
            if one.kind == "rollout":
                made.setdefault(one.rollout_id, []).append(one)
            elif one.kind.startswith("train"):
                trained.setdefault(one.rollout_id, []).append(one)
    both = sorted(set(made) & set(trained))
    if not both:
        return [Verdict(JOIN, "skip", cause=missing(obs, "a rollout dump and a train dump of the same rollout"))]
    return [_join(obs, rollout, made[rollout], trained[rollout]) for rollout in both[:64]]


def _join(obs: Observations, rollout: int, made: list[Dump], trained: list[Dump]) -> Verdict:
    want, gone, extra, by = _missing(made, trained)
    if not want:
        cause = (
            "the train dumps are joined by the tokens of each sample, and the rollout dump has none of the same sort"
        )
        return Verdict(JOIN, "skip", rollout=rollout, cause=cause)
    coverage = 1 - len(gone) / len(want)
    kinds = sorted({one.kind for one in trained})
    version = "v2" if kinds == ["train-v2"] else "v1" if kinds == ["train-v1"] else "v1 and v2"
    status: Status = (
        "pass" if not gone else "info" if obs.live or obs.args.on("load_debug_rollout_data_subsample") else "warn"
    )
    cause = (
        f"The train dump of rollout {rollout} ({version}, {len(trained)} {'file' if len(trained) == 1 else 'files'}) "
    )
    cause += f"covers {len(want) - len(gone)} of {len(want)} samples of the rollout dump ({percent(coverage)})"
    if gone:
        cause += f"; missing: index {', '.join(map(str, gone[:20]))}{' and more' if len(gone) > 20 else ''}"
    cause += f"; {extra} trained samples are of no rollout" if extra else ""
    cause += f". Joined by {by}, never by position."
    promised = {index for one in trained for index in _promised(one)}
    advice: tuple[str, ...] = ()
    if gone and promised & set(gone):
        advice = ("wait for all shards: dp_shards names the missing samples",)
    elif gone:
        advice = ("wait until every rank has written its shard, or copy all of them", "compute only on the joined part")
    return Verdict(
        JOIN,
        status,
        rollout=rollout,
        value={
            "coverage": coverage,
            "joined": len(want) - len(gone),
            "samples": len(want),
            "missing": gone[:MOST_LISTED],
            "format": version,
        },
        threshold={"coverage": 1.0},
        evidence=tuple(Evidence(one.source, None, _of_dump(one)) for one in (*made, *trained)[:6]),
        cause=cause,
        advice=advice,
    )


def _missing(made: list[Dump], trained: list[Dump]) -> tuple[list[int], list[int], int, str]:
    """(samples of the rollout, those that no train dump has, how many of the train dumps are of no rollout, what joins
    them). The samples are named by their index, those of a rollout dump without one by their place."""
    if not any(one.keys and not one.indices for one in trained):
        want = sorted({index for one in made for index in one.indices})
        have = {index for one in trained for index in one.indices}
        return want, sorted(set(want) - have), len(have - set(want)), "sample_index = index"
    left = Counter(key for one in trained for key in one.keys)
    want, gone = [], []
    for one in made:
        named = one.indices if len(one.indices) == len(one.keys) else range(len(one.keys))
        for index, key in zip(named, one.keys, strict=True):
            want.append(index)
            if left[key] > 0:
                left[key] -= 1
            else:
                gone.append(index)
    return want, sorted(gone), sum(left.values()), "the tokens (each rank counts its own samples)"


def _of_dump(one: Dump) -> str:
    return f"{one.kind}, {one.samples} samples" + (f", index {ranges(one.indices)}"[:170] if one.indices else "")


def _promised(one: Dump) -> list[int]:
    listed = one.shards.get("indices")
    return [index for index in listed if isinstance(index, int)] if isinstance(listed, list) else []


# -- dump.foreign-class


def check_foreign(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per file that wants a class, and one for a refusal of a file that is not here."""
    refused = [event for event in obs.events if event.kind == "pickle_refused"]
    found = []
    told: set[str] = set()
    for one in obs.dumps:
        if one.foreign:
            names = [str(event.data.get("class") or "") for event in refused]
            lines = [event for event, name in zip(refused, names, strict=True) if name in one.foreign]
            told |= set(one.foreign)
            evidence = (Evidence(one.source, None, some(list(one.foreign))), *(of_event(event) for event in lines[:2]))
            found.append(_foreign(one.source, list(one.foreign), evidence, bool(lines)))
    for event in refused:
        name = str(event.data.get("class") or "a class")
        if name not in told:
            told.add(name)
            found.append(_foreign("a file that the run loads", [name], (of_event(event),), True))
    if found:
        return found[:64]
    files = [one for one in obs.dumps if one.kind != "samples"]
    if not files:
        return [Verdict(FOREIGN, "skip", cause=missing(obs, "a .pt or pickle file"))]
    cause = f"Containers, numbers, strings and tensors are all there is in {count(len(files), 'saved file')}."
    return [Verdict(FOREIGN, "pass", value={"files": len(files)}, cause=cause)]


def _foreign(source: str, names: list[str], evidence: tuple[Evidence, ...], refused: bool) -> Verdict:
    shown = "the weights-only load refused it, as the log shows" if refused else "torch from 2.6 on refuses it"
    value: dict[str, object] = {"file": source, "classes": names[:MOST_LISTED]}
    if calls := [name for name in names if runs_code(name)]:
        value["calls"] = calls[:MOST_LISTED]
        cause = f"{source} calls {some(calls)} when it is loaded: it runs commands or code of whoever wrote it"
        cause += f" ({shown}; nothing of it was executed here)."
        advice: tuple[str, ...] = (
            f"do not load {source}, on any machine, with any allow-list: no data needs {calls[0]}",
            "find out who wrote it, and which machines have loaded it already",
            "set it aside, with everything else of the same origin",
        )
    else:
        cause = f"{source} wants {some(names)}, which is outside the allow-list of a weights-only load ({shown}); "
        cause += "nothing of it was executed here, and it must not be loaded with full unpickling."
        listed = ", ".join(names[:4])
        advice = (
            "save the file again with plain types (dict, list, numbers)",
            f"torch.serialization.add_safe_globals([{listed}]) if the file's origin is known",
        )
    return Verdict(
        FOREIGN,
        "fail",
        threshold={"classes": 0},
        value=value,
        evidence=evidence,
        cause=cause,
        advice=advice,
    )


_RUNS_CODE = re.compile(
    r"(?:os|posix|nt|subprocess|popen2|sys|shutil|socket|pty|_?ctypes|importlib|imp|runpy|code|codeop|pdb|bdb|cProfile|"
    r"timeit|webbrowser|urllib|requests|http|httplib|aiohttp|ftplib|smtplib|telnetlib|asyncio|pip|pydoc|ensurepip|"
    r"distutils|setuptools|marshal|_?pickle|cPickle|_?dill|cloudpickle|paramiko|pexpect|zipimport|pkgutil)\..+|"
    r"(?:builtins|__builtin__)\."
    r"(?:eval|exec|execfile|compile|open|file|__import__|breakpoint|input|globals|delattr)|"
    r"_?operator\.(?:attrgetter|methodcaller)|types\.(?:Code|Function|Lambda)Type|"
    r"(?:torch(?:\.jit)?|numpy|joblib|yaml)\.load|pandas\.read_pickle|"
    r"(?:torch\.hub|torch\.utils\.cpp_extension|ray\.cloudpickle|numpy\.testing|numpy\.f2py)\..+"
)
"""Functions that start programs, open connections or files, or make code of data."""


def runs_code(name: str) -> bool:
    """A global (`module.name`) that data has no use for: it acts, or makes code of data, as soon as a load calls it.

    After the list of picklescan, without what honest checkpoints hold too (paths, enums by `getattr`, `partial`).
    """
    return _RUNS_CODE.fullmatch(name) is not None


# -- dump.routing-field


def check_routing(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per dump of rollouts."""
    stopped = [event for event in of_kind(obs, "traceback") if _STOPPED.search(whole_text(event))]
    if not obs.args.on("use_rollout_routing_replay") and not stopped:
        return [Verdict(ROUTING, "skip", cause="--use-rollout-routing-replay is not given")]
    found = []
    for one in obs.dumps:
        full = one.kind == "rollout" or (one.kind == "samples" and any(name in one.fields for name in _WHOLE))
        if full and one.samples and not one.is_eval:
            found.append(_routes(obs, one))
    metas = [(c, c.answer.get("meta_info")) for c in obs.http if c.path.endswith("/generate")]
    answers = [(c, meta) for c, meta in metas if isinstance(meta, dict)]
    bare = [c for c, meta in answers if not any(name in meta for name in ROUTES)]
    if bare and bare[0].where is not None:
        where = bare[0].where
        cause = f"{len(bare)} of {len(answers)} answers of /generate have no routed_experts in meta_info, and "
        cause += "--use-rollout-routing-replay needs them: training will stop at the first rollout."
        evidence = (Evidence(where.source, where.line, where.text[:200]),)
        value = {"without": len(bare), "answers": len(answers)}
        found.append(
            Verdict(ROUTING, "fail", value=value, threshold=0, evidence=evidence, cause=cause, advice=_ROUTING_ADVICE)
        )
    if stopped and not any(verdict.status == "fail" for verdict in found):
        found.append(_stopped(obs, stopped))
    return found or [Verdict(ROUTING, "skip", cause=missing(obs, "a rollout dump, or answers of /generate"))]


_ROUTING_ADVICE = (
    "an engine build that returns routed_experts in meta_info",
    "--sglang-enable-return-routed-experts (older launchers need it beside the trainer's flag)",
)


def _stopped(obs: Observations, stopped: Sequence[LogEvent]) -> Verdict:
    """The trainer itself said that the routes are missing."""
    flags = of_flags(obs.args, "use_rollout_routing_replay", "sglang_enable_return_routed_experts")
    return Verdict(
        ROUTING,
        "fail",
        value={"tracebacks": len(stopped)},
        threshold=0,
        evidence=(*(of_event(event) for event in stopped[:2]), *flags),
        cause=f"The rollout's samples hold no {ROUTES[0]}, and --use-rollout-routing-replay needs it: "
        f"{who(stopped[0])} stopped at the routing replay.",
        advice=_ROUTING_ADVICE,
    )


def _routes(obs: Observations, one: Dump) -> Verdict:
    have = max((one.fields.get(name, 0) for name in ROUTES), default=0)
    evidence = (Evidence(one.source, None, f"{one.samples} samples, fields {some(sorted(one.fields), 12)}"),)
    value = {"with": have, "samples": one.samples}
    if have >= one.samples:
        cause = f"All {one.samples} samples of {one.source} hold {ROUTES[0]}."
        return Verdict(ROUTING, "pass", rollout=one.rollout_id, value=value, evidence=evidence, cause=cause)
    return Verdict(
        ROUTING,
        "fail",
        rollout=one.rollout_id,
        value=value,
        threshold={"with": one.samples},
        evidence=(*evidence, *of_flags(obs.args, "use_rollout_routing_replay")),
        cause=f"{one.samples - have} of {one.samples} samples of {one.source} have no {ROUTES[0]}, and "
        "--use-rollout-routing-replay needs it: the trainer cannot replay the routes of the engine.",
        advice=_ROUTING_ADVICE,
    )


# -- dump.size


def check_size(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per file with a dominant field, else one on the largest."""
    files = [one for one in obs.dumps if one.field_bytes]
    if not files:
        return [Verdict(SIZE, "skip", cause=missing(obs, "a dump or a file of samples"))]
    found = []
    for one in files:
        total = sum(one.field_bytes.values())
        name, size = max(one.field_bytes.items(), key=lambda item: item[1])
        if total and size > t.dump_field_share * total and name not in _CONTENT:
            found.append(
                Verdict(
                    SIZE,
                    "info",
                    rollout=one.rollout_id,
                    value={"field": name, "bytes": size, "share": size / total, "fields": dict(one.field_bytes)},
                    threshold={"share": t.dump_field_share},
                    evidence=(Evidence(one.source, None, f"{name}: {size} of {total} bytes"),),
                    cause=f"The field {name} is {percent(size / total)} of {one.source}: stream it, and skip the "
                    "field.",
                    advice=(f"leave {name} out of the dump, or skip it when you read it",),
                )
            )
    if found:
        return found[:64]
    largest = max(files, key=lambda one: one.total_bytes)
    cause = f"No field dominates; the largest file is {largest.source} with {largest.total_bytes} bytes."
    return [Verdict(SIZE, "pass", value={"fields": dict(largest.field_bytes)}, cause=cause)]
