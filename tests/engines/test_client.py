"""The engine client's flows: what is asked, what counts as yes, and what is never handed out."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from rltop.engines.calls import Call, Keys
from rltop.engines.client import (
    AsyncEngineClient,
    EngineClient,
    EngineRefused,
    EngineUnreachable,
    WrongWeightVersion,
)
from rltop.engines.weights import deserialize

Answer = tuple[int, Any]
TENSORS = [("model.norm.weight", torch.ones(3))]


class Server:
    """Answers from a table of path -> answers in order (the last one stays), and remembers what was asked."""

    def __init__(self, table: dict[str, list[Answer]]) -> None:
        self.table = table
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        answers = self.table.get(request.url.path, [(404, {"detail": "Not Found"})])
        status, content = answers.pop(0) if len(answers) > 1 else answers[0]
        return (
            httpx.Response(status, text=content) if isinstance(content, str) else httpx.Response(status, json=content)
        )

    @property
    def paths(self) -> list[str]:
        """What was asked, in order."""
        return [path for path, _ in self.asked]


def _client(server: Callable[[httpx.Request], httpx.Response]) -> EngineClient:
    return EngineClient("http://engine", transport=httpx.MockTransport(server))


def _sample(version: str, spans: list[tuple[str, int, int]] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"weight_version": version}
    if spans is not None:
        meta["weight_versions"] = [{"version": name, "start": start, "end": end} for name, start, end in spans]
    return {"text": "", "output_ids": [1], "meta_info": meta}


def _serving(version: str, *samples: dict[str, Any]) -> Server:
    return Server({"/model_info": [(200, {"weight_version": version})], "/generate": [(200, list(samples))]})


# ---------------------------------------------------------------------- weight versions


def test_a_sample_of_the_required_version_is_handed_out() -> None:
    sample = _sample("3", [("3", 0, 1)])
    assert _client(_serving("3", sample)).generate({}, require_version="3") == [sample]


def test_an_engine_with_another_version_is_not_even_asked_to_generate() -> None:
    server = _serving("2", _sample("3"))
    with pytest.raises(WrongWeightVersion, match="before the request it was '2'"):
        _client(server).generate({}, require_version="3")
    assert server.paths == ["/model_info"]


@pytest.mark.parametrize(
    "bad",
    [
        _sample("4"),
        _sample("3", [("2", 0, 5), ("3", 5, 9)]),
        _sample("3", [("3", 0, 5), ("4", 5, 9)]),
    ],
    ids=["label", "older tokens first", "newer tokens last"],
)
def test_one_sample_with_tokens_of_other_weights_spoils_the_request(bad: dict[str, Any]) -> None:
    with pytest.raises(WrongWeightVersion) as wrong:
        _client(_serving("3", _sample("3"), bad)).generate({}, require_version="3")
    assert wrong.value.required == "3"
    assert wrong.value.found in {"2", "4"}


def test_without_a_requirement_nothing_is_checked() -> None:
    server = _serving("2", _sample("7"))
    assert len(_client(server).generate({})) == 1
    assert server.paths == ["/generate"]


def test_a_single_answer_comes_as_a_list() -> None:
    server = Server({"/generate": [(200, _sample("1"))]})
    assert _client(server).generate({"text": "x"}) == [_sample("1")]


# ---------------------------------------------------------------------- weight updates


YES = (200, {"success": True, "message": "Success"})
NO = (400, {"success": False, "message": "bad tensors"})


def test_tensors_go_between_begin_and_end() -> None:
    server = Server({"/begin_weight_update": [YES], "/update_weights_from_tensor": [YES], "/end_weight_update": [YES]})
    _client(server).update_weights_from_tensor(TENSORS, "5")
    assert server.paths == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    body = server.asked[1][1]
    assert (body["weight_version"], body["flush_cache"]) == ("5", True)
    ((name, tensor),) = deserialize(body["serialized_named_tensors"][0])
    assert name == "model.norm.weight"
    assert torch.equal(tensor, TENSORS[0][1])


def test_an_engine_without_sessions_gets_the_tensors_alone() -> None:
    server = Server({"/update_weights_from_tensor": [YES]})
    _client(server).update_weights_from_tensor(TENSORS, "5")
    assert server.paths == ["/begin_weight_update", "/update_weights_from_tensor"]


def test_a_failed_update_ends_its_session_and_says_why() -> None:
    server = Server({"/begin_weight_update": [YES], "/update_weights_from_tensor": [NO], "/end_weight_update": [YES]})
    with pytest.raises(EngineRefused, match="bad tensors"):
        _client(server).update_weights_from_tensor(TENSORS, "5")
    assert server.paths[-1] == "/end_weight_update"


def test_an_open_session_of_somebody_else_is_reported() -> None:
    server = Server({"/begin_weight_update": [(400, {"success": False, "message": "already open"})]})
    with pytest.raises(EngineRefused, match="already open"):
        _client(server).update_weights_from_tensor(TENSORS, "5")


def test_status_200_with_success_false_is_a_refusal() -> None:
    server = Server({"/update_weights_from_disk": [(200, {"success": False, "message": "no such path"})]})
    with pytest.raises(EngineRefused, match="no such path") as refused:
        _client(server).update_weights_from_disk("/x", "1")
    assert refused.value.status == 200


# ---------------------------------------------------------------------- the rest


def test_an_answer_that_is_not_json_is_a_refusal() -> None:
    with pytest.raises(EngineRefused, match="not JSON"):
        _client(Server({"/model_info": [(200, "<html>")]})).model_info()


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("closed")],
    ids=lambda error: type(error).__name__,
)
def test_no_answer_is_unreachable_whatever_the_reason(error: Exception) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(EngineUnreachable, match=type(error).__name__):
        _client(fail).loads()


def test_health_is_the_status_alone() -> None:
    client = _client(Server({"/health": [(200, ""), (503, "")]}))
    assert [client.health(), client.health()] == [True, False]


def test_control_calls_send_sglangs_bodies() -> None:
    ok = (200, {"status": "ok"})
    paths = ("/pause_generation", "/continue_generation", "/flush_cache", "/abort_request", "/weights_checker")
    memory = ("/release_memory_occupation", "/resume_memory_occupation")
    server = Server({path: [ok] for path in (*paths, *memory)})
    with _client(server) as client:
        client.pause("retract")
        client.resume_generation()
        client.flush_cache()
        client.abort()
        client.abort("rid-1")
        client.weights_checker("checksum")
        client.release_memory(["weights"])
        client.resume_memory()
    assert server.asked == [
        ("/pause_generation", {"mode": "retract"}),
        ("/continue_generation", {}),
        ("/flush_cache", None),
        ("/abort_request", {"abort_all": True}),
        ("/abort_request", {"rid": "rid-1"}),
        ("/weights_checker", {"action": "checksum"}),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {}),
    ]


async def test_the_async_client_runs_the_same_flows() -> None:
    server = _serving("2", _sample("2"))
    async with AsyncEngineClient("http://engine", transport=httpx.MockTransport(server)) as client:
        assert await client.generate({}, require_version="2") == [_sample("2")]
        with pytest.raises(WrongWeightVersion):
            await client.generate({}, require_version="3")
        with pytest.raises(EngineRefused, match="status 404"):
            await client.server_info()


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    # Only the daemon scrapes, and the daemon never blocks. Only the trainer hands out tensors where they lie, or
    # broadcasts them.
    trainers = {
        "update_weights_from_shared",
        "init_weights_update_group",
        "update_weights_from_distributed",
        "destroy_weights_update_group",
    }
    assert public(EngineClient) - trainers == public(AsyncEngineClient) - {"scrape"}


def test_a_page_for_browsers_is_not_repeated() -> None:
    page = "<!DOCTYPE html><html><body>" + "nothing here " * 50
    for status in (404, 200):
        with pytest.raises(EngineRefused) as refused:
            _client(Server({"/model_info": [(status, page)]})).model_info()
        assert "an HTML page" in refused.value.why
        assert "nothing here" not in str(refused.value)


def test_each_route_gets_the_key_that_it_asks_for() -> None:
    seen: dict[str, str | None] = {}

    def serve(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = request.headers.get("authorization")
        return httpx.Response(200, json={"model_path": "m"})

    for keys, info, checker in (
        (Keys(), None, None),
        (Keys(api="a"), "Bearer a", "Bearer a"),
        (Keys(admin="b"), None, "Bearer b"),
        (Keys(api="a", admin="b"), "Bearer a", "Bearer b"),
    ):
        client = EngineClient("http://engine", transport=httpx.MockTransport(serve), keys=keys)
        client.model_info()
        client.weights_checker("checksum")
        assert (seen["/model_info"], seen["/weights_checker"]) == (info, checker)
        assert not {"'a'", "'b'"} & set(repr(keys).replace(",", " ").split())


def test_patience_is_asked_for_each_answer_and_told_in_the_reason() -> None:
    asked: list[str] = []

    @contextmanager
    def patience(call: Call) -> Iterator[float]:
        asked.append(call.path)
        yield 3.0

    def hang(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"]["read"] == 3.0
        raise httpx.ReadTimeout("slow")

    client = EngineClient("http://engine", transport=httpx.MockTransport(hang), patience=patience)
    with pytest.raises(EngineUnreachable, match="no answer within 3 s"):
        client.model_info()
    assert asked == ["/model_info"]


def test_errors_survive_a_trip_between_processes() -> None:
    # Ray pickles them.
    with pytest.raises(WrongWeightVersion) as wrong:
        _client(_serving("2")).generate({}, require_version="3")
    with pytest.raises(EngineRefused) as refused:
        _client(Server({})).loads()
    for error in (wrong.value, refused.value):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.__dict__ == error.__dict__
