"""`rollout.stop-set`: the token that closes an assistant turn stops generation.

Never from truncation or length alone: broken weights, a metric's defect or retries give the same picture. The set and
the template decide; samples that run past the terminator, or a high truncation, make it a fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rltop.checks.found import Document, HfCheckpoint
from rltop.checks.names import some, text_config
from rltop.checks.observe import Observations, Sample
from rltop.checks.phrase import missing, of_flags, of_samples
from rltop.checks.rules.rollout_length import RATIO, first_series
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "rollout.stop-set"
_CLOSES = re.compile(r"end|eot|eom|eos|return|call|</s>|stop", re.IGNORECASE)
_OPENS = re.compile(r"start|begin|bos|header", re.IGNORECASE)
_HEADER = re.compile(r"header|think|tool|image|vision|audio|video|fim|repo|file|channel|escape|/inst", re.IGNORECASE)
_MIRRORED = re.compile(r"<(?P<name>[\w-]{1,40})\|>")
"""Closes what `<|name>` opens."""
_SERVER_KEYS = ("eos_token_id", "eos_token_ids", "hf_eos_token_id", "stop_token_ids", "stop_token_id")


@dataclass(frozen=True, slots=True)
class Terminator:
    """A special token that closes an assistant message."""

    token: str
    id: int


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per checkpoint with a chat template."""
    found = [verdict for one in obs.checkpoints if (verdict := _judge(obs, one, t))]
    what = "a chat template, its special tokens and the end-of-text ids of a checkpoint"
    return found or [Verdict(ID, "skip", cause=missing(obs, what))]


def _judge(obs: Observations, one: HfCheckpoint, t: Thresholds) -> Verdict | None:
    closing = terminators(one)
    files = _file_set(one)
    server = _server_set(obs)
    if files is None or not (closing or server is not None):
        return None
    asked = _asked(obs, one)
    effective = (server if server is not None else files) | asked
    past = [s for s in obs.samples if any(c.token in s.ran_past and c.id not in effective for c in closing)]
    ratio = max((point.value for point in first_series(obs, RATIO)), default=None)
    cut = ratio is not None and ratio >= t.truncated_warn
    first = closing[0] if closing else None
    own = _inside(one, "generation_config.json" if one.generation_config else "config.json")
    evidence: tuple[Evidence, ...] = (
        Evidence(own, None, f"eos_token_id: {sorted(files)}"),
        *(
            Evidence(d.source, d.lines.get("eos_token_id"), f"server: {sorted(server or ())}")
            for d in _servers(obs)
            if server
        ),
        *of_flags(obs.args, "rollout_stop_token_ids", "rollout_stop"),
    )
    value: dict[str, object] = {
        "token": first.token if first else None,
        "token_id": first.id if first else None,
        "set": sorted(effective),
        "ran_past": len(past),
        "truncated": ratio,
    }
    names = some([f"{c.token} (id {c.id})" for c in closing], 3)
    if closing and not any(c.id in effective for c in closing):
        return _absent(obs, one, closing, effective, past, cut, evidence, value, server is not None)
    if server is not None and (lost := files - server - asked):
        return Verdict(
            ID,
            "fail" if cut else "warn",
            value=value | {"lost": sorted(lost)},
            threshold={"set": sorted(files)},
            evidence=evidence,
            cause=f"The server stops at {sorted(server)} only, the files of {one.path or 'the checkpoint'} say "
            f"{sorted(files)}: an override replaced the list and dropped {sorted(lost)}.",
            advice=(f"--rollout-stop-token-ids {' '.join(map(str, sorted(files)))}",),
        )
    cause = f"The turn terminator {names} is in the stop set {sorted(effective)}."
    if not closing:
        cause = f"The server stops at {sorted(effective)}, as the files say; no chat template names a terminator."
    return Verdict(ID, "pass", value=value, evidence=evidence, cause=cause)


def _absent(
    obs: Observations,
    one: HfCheckpoint,
    closing: list[Terminator],
    effective: set[int],
    past: list[Sample],
    cut: bool,
    evidence: tuple[Evidence, ...],
    value: dict[str, object],
    by_server: bool,
) -> Verdict:
    names = some([f"{c.token} (id {c.id})" for c in closing], 3)
    eos = (one.tokenizer_config or {}).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not past and not cut and not by_server and any(c.token == eos for c in closing):
        cause = f"The turn terminator {names} is not in {sorted(effective)}, but it is the tokenizer's end of text, "
        return Verdict(ID, "pass", value=value, evidence=evidence, cause=cause + "at which SGLang stops as well.")
    seen = f" {len(past)} of {len(obs.samples)} responses run past it." if past else ""
    seen = seen or (" A large share of the responses is truncated." if cut else "")
    return Verdict(
        ID,
        "fail" if past or cut else "warn",
        value=value,
        threshold={"set": [c.id for c in closing]},
        evidence=(*evidence, *of_samples(past)),
        cause=f"The turn terminator {names} of the chat template is not in the stop set {sorted(effective)}: a "
        f"response goes on after its end until the cap.{seen}",
        advice=(
            f"--rollout-stop-token-ids {closing[0].id}",
            f"or add {closing[0].id} to eos_token_id in {_inside(one, 'generation_config.json')}",
        ),
    )


def terminators(one: HfCheckpoint) -> list[Terminator]:
    """Special tokens that close an assistant message in the chat template, the likeliest first.

    Of the special tokens in the template these are the ones whose name says that something ends, or that mirror the one
    that opens a turn (`<|turn>` and `<turn|>`); a template that writes the `eos_token` variable closes with the
    tokenizer's own. Where no name tells, it is what the template writes right behind a message's content.
    """
    config = one.tokenizer_config or {}
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next(
            (entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"),
            None,
        )
    if not isinstance(template, str):
        return []
    found: dict[str, int] = {}
    for token, number in one.tokenizer_tokens.items():
        if token not in template or _HEADER.search(token):
            continue
        mirrored = _MIRRORED.fullmatch(token)
        opener = f"<|{mirrored['name']}>" if mirrored else ""
        if (_CLOSES.search(token) and not _OPENS.search(token)) or (opener and opener in one.tokenizer_tokens):
            found[token] = number
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if re.search(r"\beos_token\b", template) and isinstance(eos, str) and eos in one.tokenizer_tokens:
        found.setdefault(eos, one.tokenizer_tokens[eos])
    if not found:
        found = {token: number for token, number in one.tokenizer_tokens.items() if _behind_content(template, token)}
    return [
        Terminator(token, number) for token, number in sorted(found.items(), key=lambda item: template.rfind(item[0]))
    ]


def _behind_content(template: str, token: str) -> bool:
    """The template writes the token right behind a message's content, in no other branch, and never before one."""
    if _HEADER.search(token) or _OPENS.search(token):
        return False
    mark = re.escape(token)
    behind = re.search(rf"\bcontent\b[^{{%]{{0,60}}{mark}", template)
    before = re.search(rf"{mark}[^%]{{0,60}}\b(?:role|content)\b", template)
    return bool(behind and not before)


def _ids(value: object) -> set[int]:
    if isinstance(value, bool):
        return set()
    if isinstance(value, int):
        return {value}
    if isinstance(value, str):
        return {int(word) for word in re.findall(r"\d+", value)[:100]}
    if isinstance(value, list | tuple):
        return {one for item in value[:100] for one in _ids(item)}
    return set()


def _file_set(one: HfCheckpoint) -> set[int] | None:
    """End-of-text ids of the files; None where no file says any."""
    found = _ids((one.generation_config or {}).get("eos_token_id")) | _ids(text_config(one.config).get("eos_token_id"))
    return found or None


def _asked(obs: Observations, one: HfCheckpoint) -> set[int]:
    found = _ids(obs.args.flags.get("rollout_stop_token_ids"))
    words = obs.args.flags.get("rollout_stop")
    for word in words if isinstance(words, list | tuple) else [words]:
        if isinstance(word, str) and word in one.tokenizer_tokens:
            found.add(one.tokenizer_tokens[word])
    return found


def _servers(obs: Observations) -> list[Document]:
    return [one for one in obs.documents if one.kind == "server_info"]


def _server_set(obs: Observations) -> set[int] | None:
    """What the server says that it stops at; an override wins over the rest. None where it says nothing."""
    found: list[tuple[str, set[int]]] = []
    for one in _servers(obs):
        _search(one.fields, "", found)
    overrides = [ids for path, ids in found if "override" in path or "effective" in path]
    chosen = overrides or [ids for _, ids in found]
    return set().union(*chosen) if chosen else None


def _search(value: object, path: str, found: list[tuple[str, set[int]]]) -> None:
    if path.count("/") > 5 or len(found) > 100:
        return
    if isinstance(value, Mapping):
        for key, inner in list(value.items())[:500]:
            if key in _SERVER_KEYS and inner is not None:
                found.append((f"{path}/{key}", _ids(inner)))
            else:
                _search(inner, f"{path}/{key}", found)
    elif isinstance(value, list):
        for inner in value[:50]:
            _search(inner, f"{path}/", found)


def _inside(one: HfCheckpoint, name: str) -> str:
    return f"{one.path}/{name}" if one.path not in ("", ".") else name
