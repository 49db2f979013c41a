"""What is asked of an engine, in which order, and what counts as yes: SGLang's HTTP API without a socket.

A flow is a generator that yields `Call`s and is sent the `Reply`s; `client.py` runs it, blocking or not. An engine's
HTTP status is not enough: SGLang may answer 200 with `success: false`, so both are looked at.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rltop.engines.bounded import LIMIT_BYTES
from rltop.errors import RltopError

CONTROL_TIMEOUT_S = 60.0
"""For everything but generation. A first checksum took SGLang 4.6 s; weights of a large model take longer to load."""

SAMPLES_BYTES = 1 << 30
"""Log-probs of a long sample have 100 bytes a token, and a request may ask for many samples."""
CHECKSUMS_BYTES = 256 << 20
"""A checksum per tensor and rank: a mixture of experts has tens of thousands of tensors."""

NORMAL_ROUTES = ("/generate", "/model_info", "/server_info", "/v1/loads", "/ready", "/metrics", "/health")
"""Routes that `--api-key` alone opens; every other one that is asked here is one of control."""

CheckerAction = Literal["snapshot", "reset_tensors", "compare", "checksum"]
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a flow."""

    method: Literal["GET", "POST"]
    path: str
    body: Mapping[str, Any] | None = None
    timeout_s: float = CONTROL_TIMEOUT_S
    """For the whole answer."""
    limit_bytes: int = LIMIT_BYTES
    """Of the answer's body."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    @property
    def ok(self) -> bool:
        """A 2xx status."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Keys:
    """What an SGLang server wants in `Authorization`; empty: it was started without."""

    api: str = field(default="", repr=False)
    """Its `--api-key`."""
    admin: str = field(default="", repr=False)
    """Its `--admin-api-key`: routes that control it then refuse the other one (`srt/utils/auth.py`)."""

    def headers(self, path: str) -> dict[str, str]:
        """For one route."""
        key = self.api if path in NORMAL_ROUTES else self.admin or self.api
        return {"authorization": f"Bearer {key}"} if key else {}


T = TypeVar("T")
Flow = Generator[Call, Reply, T]


class EngineUnreachable(RltopError):
    """Nobody answered: refused, timed out, or the connection broke. The engine may be starting, hung or dead."""

    def __init__(self, url: str, call: Call, why: str) -> None:
        super().__init__(
            "the engine does not answer", where=f"{url}{call.path}", why=why, do="look at its log", exit_code=1
        )
        self.arguments = (url, call, why)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.arguments)


class EngineRefused(RltopError):
    """The engine answered, and said no. `status` is HTTP's, `message` the engine's own words."""

    def __init__(self, url: str, call: Call, status: int, message: str) -> None:
        why = f"status {status}: {_in_short(message)}"
        super().__init__("the engine refused", where=f"{url}{call.path}", why=why, exit_code=1)
        self.status = status
        self.message = message
        self.arguments: tuple[object, ...] = (url, call, status, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.arguments)


class EngineUnreadable(EngineRefused):
    """It answered, but with nothing that can be read: too long, compressed, nested beyond measure, not JSON."""

    def __init__(self, url: str, call: Call, message: str) -> None:
        super().__init__(url, call, HTTPStatus.OK, message)
        self.arguments = (url, call, message)


class WrongWeightVersion(RltopError):
    """The engine serves, or served in the middle of a sample, another weight version than the required one.

    No sample is handed out with it: training on tokens of other weights is the silent failure this client exists to
    prevent.
    """

    def __init__(self, url: str, required: str, found: str, when: str) -> None:
        super().__init__(
            "wrong weight version",
            where=url,
            why=f"version {required!r} is required, {when} it was {found!r}",
            do="sync the weights to this engine, then generate again",
            exit_code=1,
        )
        self.required = required
        self.found = found
        self.arguments = (url, required, found, when)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.arguments)


def generate_flow(
    url: str, payload: Mapping[str, Any], require_version: str | None, timeout_s: float
) -> Flow[list[Any]]:
    """Samples, all of the required version: it is asked before, because a reply's label is that of its last token."""
    if require_version is not None:
        info = yield from json_flow(url, Call("GET", "/model_info"))
        _require(url, require_version, str(info.get("weight_version")), "before the request")
    answers = yield from json_flow(url, Call("POST", "/generate", payload, timeout_s, SAMPLES_BYTES))
    samples: list[Any] = answers if isinstance(answers, list) else [answers]
    if require_version is not None:
        for sample in samples:
            meta = sample["meta_info"]
            for span in meta.get("weight_versions") or ():
                _require(url, require_version, str(span["version"]), f"for tokens {span['start']} to {span['end']}")
            _require(url, require_version, str(meta.get("weight_version")), "in the answer")
    return samples


def json_flow(url: str, call: Call) -> Flow[Any]:
    """One request whose answer is JSON, and not `success: false`."""
    reply = yield call
    return _accepted(url, call, reply)


def text_flow(url: str, call: Call) -> Flow[str]:
    """One request whose answer is text, possibly empty."""
    reply = yield call
    if not reply.ok:
        raise EngineRefused(url, call, reply.status, reply.text)
    return reply.text


def update_flow(url: str, update: Call) -> Flow[None]:
    """Weights, by value or over a group. SGLang since 0.5.23 wants them between begin and end; before, those paths do
    not exist."""
    begin = Call("POST", "/begin_weight_update", {})
    reply = yield begin
    sessions = reply.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
    if sessions:
        _accepted(url, begin, reply)
    reply = yield update
    if sessions:
        # Also after a failure: an open session would make the next begin fail and hide the real cause.
        end = Call("POST", "/end_weight_update", {})
        ended = yield end
        _accepted(url, update, reply)
        _accepted(url, end, ended)
    else:
        _accepted(url, update, reply)


def tensor_call(serialized: str, version: str, flush: bool) -> Call:
    """Weights in the body, for one tensor parallel rank."""
    body = {"serialized_named_tensors": [serialized], "flush_cache": flush, "weight_version": version}
    return Call("POST", "/update_weights_from_tensor", body)


def distributed_call(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], group: str, version: str | None, timeout_s: float
) -> Call:
    """Weights that are broadcast in a group meanwhile: names, dtypes ("bfloat16") and shapes, in their order.

    version: None in all but the last call of a push, so that a half-filled engine does not bear the new name. The cache
    is emptied with the last, too.
    """
    every = list(tensors)
    body: dict[str, Any] = {
        "names": [name for name, _, _ in every],
        "dtypes": [dtype for _, dtype, _ in every],
        "shapes": [list(shape) for _, _, shape in every],
        "group_name": group,
        "flush_cache": version is not None,
    }
    if version is not None:
        body["weight_version"] = version
    return Call("POST", "/update_weights_from_distributed", body, timeout_s)


def init_group_call(address: str, port: int, world: int, name: str, backend: str, timeout_s: float) -> Call:
    """Join a group whose rank 0 waits at this address; the engine's ranks are 1 and up."""
    where = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world}
    body = where | {"group_name": name, "backend": backend}
    return Call("POST", "/init_weights_update_group", body, timeout_s)


def destroy_group_call(name: str) -> Call:
    """Leave a group."""
    return Call("POST", "/destroy_weights_update_group", {"group_name": name})


def health_flow() -> Flow[bool]:
    """SGLang's `/health` runs a token: never ask a paused (503 after 20 s) or a released engine (it dies)."""
    reply = yield Call("GET", "/health")
    return reply.status == HTTPStatus.OK


def _accepted(url: str, call: Call, reply: Reply) -> Any:
    """The decoded body of a reply that says yes. Raises `EngineRefused`."""
    if not reply.ok:
        raise EngineRefused(url, call, reply.status, reply.text)
    try:
        value = msgspec.json.decode(reply.content)
    except Exception as error:  # DecodeError, RecursionError: whatever a parser says of foreign bytes
        why = f"not JSON ({type(error).__name__}: {error}): {_in_short(reply.content[:200].decode(errors='replace'))}"
        raise EngineUnreadable(url, call, why) from error
    if isinstance(value, dict) and value.get("success") is False:
        raise EngineRefused(url, call, reply.status, str(value.get("message")))
    return value


def _in_short(message: str) -> str:
    """A foreign server's words. A page for browsers says nothing that a status does not."""
    head = message.lstrip()[:200].lower()
    return "an HTML page" if head.startswith(("<!doctype", "<html", "<?xml")) else message[:500]


def _require(url: str, required: str, found: str, when: str) -> None:
    if found != required:
        raise WrongWeightVersion(url, required, found, when)


def profile_call(steps: int) -> Call:
    """Profile the next `steps` forward passes into the directory that the engine's environment names."""
    return Call("POST", "/start_profile", {"num_steps": steps})


def disk_call(path: Path | str, version: str, flush: bool) -> Call:
    """Load a checkpoint directory."""
    body = {"model_path": str(path), "weight_version": version, "flush_cache": flush}
    return Call("POST", "/update_weights_from_disk", body)


def checker_call(action: CheckerAction) -> Call:
    """What `/weights_checker` does."""
    return Call("POST", "/weights_checker", {"action": action}, limit_bytes=CHECKSUMS_BYTES)


def by_name_call(name: str, rows: int) -> Call:
    """The first rows of a parameter, by the checkpoint's name; most of SGLang's models do not know how."""
    return Call("POST", "/get_weights_by_name", {"name": name, "truncate_size": rows})


def label_call(version: str) -> Call:
    """Call the weights served now by another name; nothing else changes."""
    return Call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})


def memory_call(verb: Literal["release", "resume"], tags: Iterable[str] | None) -> Call:
    """Release or resume memory; None: all of it."""
    return Call("POST", f"/{verb}_memory_occupation", {} if tags is None else {"tags": list(tags)})


def abort_call(rid: str) -> Call:
    """End one request, or all for an empty id."""
    return Call("POST", "/abort_request", {"rid": rid} if rid else {"abort_all": True})
