"""`rltop watch --engine URL`: what is asked of engines that others run, what is shown of them, and what is refused."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.cli.watch import checked
from rltop.daemon.others import LOST_S, Others, facts_of, watched
from rltop.engines.calls import Call
from rltop.engines.client import EngineUnreadable
from rltop.errors import RltopError
from rltop.runs import find_run
from tests.daemon.fakes import FakeCore
from tests.daemon.util import Viewer

Capture = pytest.CaptureFixture[str]
INFO = {"model_path": "/m", "is_generation": True, "weight_version": "7"}
SERVER = {
    **INFO,
    "version": "0.5.23",
    "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "breakable"}},
    "speculative_algorithm": None,
    "api_key": "very secret",
    "startup_time": {"load": 1.5},
}


class Sglang:
    """An HTTP server that answers as SGLang does and remembers what it was asked."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                server.asked.append(f"{self.command} {path}")
                found = server.answers.get(path)
                status, body = found if isinstance(found, tuple) else (200 if found is not None else 404, found)
                text = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


METRICS = "sglang:num_running_reqs 3\nsglang:gen_throughput 120\n"


@pytest.fixture
def engine() -> Iterator[Sglang]:
    answers = {"/model_info": INFO, "/server_info": SERVER, "/metrics": METRICS, "/flush_cache": "ok"}
    server = Sglang({**answers, "/pause_generation": {"success": True}})
    yield server
    server.stop()


def test_an_engine_of_others_is_read_and_never_made_to_run(engine: Sglang, runs_dir: Path, capsys: Capture) -> None:
    assert main(["watch", "--engine", engine.url + "/", "--headless", "--name", "w-1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["engines"]) == ("w-1", [engine.url])
    try:
        with Viewer(find_run("w-1")) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: state["engine/0"]["state"] == "HEALTHY" and state["toggles/0"])
            cell = viewer.state["engine/0"]
            assert (cell["owner"], cell["version"], cell["weight_version"]) == ("other", "0.5.23", "7")
            assert (cell["running"], cell["tokens_per_s"], cell["model_path"]) == (3, 120.0, "/m")
            assert cell["toggles"]["cuda_graph"] == "off"
            assert cell["toggles"]["speculative"] == "off"
            shown = viewer.state["toggles/0"]["cuda_graph"]
            assert (shown["value"], shown["choices"]) == ("off", [])
            assert "very secret" not in json.dumps(viewer.state)
            assert viewer.state["run"]["state"] == "running"
        assert main(["engine", "list"]) == 0
        assert "HEALTHY (other's)" in capsys.readouterr().out
        assert main(["engine", "restart", "--engine", "0"]) == 2
        assert "rltop did not start it, so it can not restart it" in capsys.readouterr().err
        assert main(["engine", "http", "flush", "--engine", "0"]) == 0
        assert "the cache is empty" in capsys.readouterr().out
        assert main(["engine", "http", "pause", "--engine", "all", "--as", "ana"]) == 0
        capsys.readouterr()
        assert main(["engine", "list"]) == 0
        assert "paused by ana since" in capsys.readouterr().out
        assert main(["engine", "http", "profile", "--engine", "0"]) == 1
        assert "status 404" in capsys.readouterr().out
    finally:
        assert main(["down", "w-1"]) == 0
    assert {asked for asked in engine.asked if asked.startswith("POST")} == {
        "POST /flush_cache",
        "POST /pause_generation",
        "POST /start_profile",
    }
    assert not {"GET /health", "GET /health_generate", "POST /generate"} & set(engine.asked)
    assert b"very secret" not in b"".join(path.read_bytes() for path in runs_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "answers with status 404"),
        ((500, "oops"), "answers with status 500"),
        ("<html>", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ({"model": "x"}, "does not name a model as SGLang does"),
        ([1], "does not name a model as SGLang does"),
    ],
)
def test_what_is_no_sglang_is_one_error_and_nothing_starts(
    engine: Sglang, runs_dir: Path, capsys: Capture, answer: Any, why: str
) -> None:
    engine.answers = {"/model_info": answer} if answer is not None else {}
    assert main(["watch", "--engine", engine.url, "--headless"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "this is no SGLang server" in err
    assert why in err
    assert not (runs_dir / "runs").exists()


class Dripping:
    """A server that begins every answer, and then sends a byte each 50 ms without an end, or as much as it can."""

    def __init__(self, part: bytes, pause_s: float) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._part, self._pause_s = part, pause_s
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._drip, args=self._socket.accept()[:1], daemon=True).start()

    def _drip(self, to: socket.socket) -> None:
        with to, contextlib.suppress(OSError):
            to.recv(4096)
            to.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                to.sendall(self._part)
                time.sleep(self._pause_s)

    def stop(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    ("part", "pause_s", "why"),
    [(b" ", 0.05, "no whole answer within"), (b" " * 65536, 0.0, "its answer is longer than 8 MiB")],
)
def test_an_answer_without_an_end_is_one_error(
    part: bytes, pause_s: float, why: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltop.cli.watch.ASK_S", 1.0 if pause_s else 30.0)
    server = Dripping(part, pause_s)
    begun = time.monotonic()
    try:
        assert main(["watch", "--engine", server.url, "--headless"]) == 1
    finally:
        server.stop()
    assert why in capsys.readouterr().err
    assert time.monotonic() - begun < 20.0


def test_a_key_that_we_do_not_have(engine: Sglang, capsys: Capture) -> None:
    engine.answers = {"/model_info": (401, "no")}
    assert main(["watch", "--engine", engine.url, "--headless"]) == 2
    assert "the engine wants a key" in capsys.readouterr().err


def test_what_does_not_answer_is_exit_code_1(capsys: Capture) -> None:
    assert main(["watch", "--engine", "http://127.0.0.1:9", "--headless"]) == 1
    assert "the engine does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["foo", "ftp://h:1", "http://", "http://h:99999", "http://h:x", "http://[::1"])
def test_what_is_no_url(typed: str, capsys: Capture) -> None:
    assert main(["watch", "--engine", typed, "--headless"]) == 2
    assert "is no URL of an engine" in capsys.readouterr().err


def test_no_url_at_all(capsys: Capture) -> None:
    assert main(["watch"]) == 2
    assert "say what to watch" in capsys.readouterr().err


def test_urls_are_brought_into_one_form_and_asked_once() -> None:
    asked = []

    def ask(address: str) -> tuple[int, bytes]:
        asked.append(address)
        old = address.endswith("/model_info") and not address.endswith("/get_model_info")
        return (404, b"") if old else (200, json.dumps(INFO).encode())

    assert checked(["h:30000", "http://h:30000/"], ask) == ["http://h:30000"]
    assert asked == ["http://h:30000/model_info", "http://h:30000/get_model_info"], "an older release's name too"


# ---------------------------------------------------------------- the daemon's side


class Watch:
    """Watched engines over a fake core; `seen` is what the scraper would write."""

    def __init__(self, *urls: str) -> None:
        self.core = FakeCore()
        self.info: dict[str, Any] = dict(SERVER)
        self.asked = 0
        self.broken: Exception | None = None
        self.others = Others(self.core, urls, ask=self._ask)
        self.others.begin()

    async def _ask(self, url: str) -> Mapping[str, Any]:
        self.asked += 1
        if self.broken is not None:
            raise self.broken
        if not self.info:
            raise RltopError("no answer")
        return self.info

    async def scraped(self, error: str | None = None, *, after: float = 2.0, **more: Any) -> dict[str, Any]:
        self.core.time += after
        # An older release has no /v1/loads: an error, and an answer all the same.
        seen = {} if error else {"seen": self.core.time}
        self.core.update("engine/0", error=error or "/v1/loads: status 404", **seen, **more)
        await self.others.once()
        return dict(self.core.table.get("engine/0"))


async def test_states_of_an_engine_from_outside() -> None:
    watch = Watch("http://h:1")
    await watch.others.once()
    fresh = watch.core.table.get("engine/0")
    assert (fresh["state"], fresh["cause"]) == ("SUSPECT", "not asked yet")
    assert (await watch.scraped())["state"] == "HEALTHY"
    assert (await watch.scraped("ConnectError"))["state"] == "HEALTHY", "one that failed is no silence"
    doubtful = await watch.scraped("ConnectError", after=10.0)
    assert (doubtful["state"], doubtful["signals"]["probe"]["ok"]) == ("SUSPECT", False)
    assert (await watch.scraped("ConnectError", after=LOST_S))["state"] == "LOST"
    assert (await watch.scraped())["state"] == "HEALTHY"
    moved = [(event["from"], event["to"]) for event in watch.core.events("engine")]
    assert moved == [("SUSPECT", "HEALTHY"), ("HEALTHY", "SUSPECT"), ("SUSPECT", "LOST"), ("LOST", "HEALTHY")]


async def test_an_engine_is_asked_once_and_again_when_it_may_be_another() -> None:
    watch = Watch("http://h:1")
    watch.info = {}
    for _ in range(3):
        await watch.scraped()
    assert watch.asked == 1, "an engine that does not tell is left alone for a while"
    watch.info = dict(SERVER)
    for _ in range(3):
        found = await watch.scraped(after=20.0)
    assert watch.asked == 2
    assert (found["version"], found["generation"]) == ("0.5.23", 1)
    watch.info = {**SERVER, "startup_time": {"load": 9.0}, "cuda_graph_config": {"decode": {"backend": "full"}}}
    await watch.scraped("ConnectError", after=10.0)
    found = await watch.scraped()
    assert (watch.asked, found["generation"], found["toggles"]["cuda_graph"]) == (3, 2, "on")
    assert "engine 0 (others run it): it was restarted" in watch.core.texts("engine")


@pytest.mark.parametrize(
    ("broken", "info", "why"),
    [
        (
            EngineUnreadable("http://h:1", Call("GET", "/server_info"), "not JSON (RecursionError)"),
            SERVER,
            "RecursionError",
        ),
        (MemoryError("what"), SERVER, "MemoryError: what"),
        (None, {**SERVER, "cuda_graph_config": {"decode": 7}, "version": [1]}, "/server_info: "),
    ],
)
async def test_an_engine_that_tells_what_cannot_be_read_is_suspect_until_it_can(
    broken: Exception | None, info: dict[str, Any], why: str
) -> None:
    watch = Watch("http://h:1")
    watch.broken, watch.info = broken, info
    await watch.scraped()
    found = await watch.scraped()
    assert found["state"] == "SUSPECT"
    assert found["cause"].startswith("its answer cannot be read: /server_info: ")
    assert why in found["cause"]
    assert not found["signals"]["probe"]["ok"]
    watch.broken, watch.info = None, dict(SERVER)
    await watch.scraped(after=20.0)
    assert (await watch.scraped())["state"] == "HEALTHY"
    assert (await watch.scraped(unreadable="/metrics: its answer is longer than 8 MiB"))["state"] == "SUSPECT"
    assert "longer than 8 MiB" in watch.core.texts("engine")[-1]
    assert (await watch.scraped(unreadable=None))["state"] == "HEALTHY"


async def test_what_a_foreign_engine_says_is_not_kept_without_end() -> None:
    found = facts_of({**SERVER, "version": "v" * 10_000, "model_path": "p" * 10_000, "weight_version": "w" * 10_000})
    assert [len(found[name]) for name in ("version", "model_path", "weight_version")] == [256, 4096, 4096]


async def test_an_engine_that_a_trainer_told_of_is_discovered_too_but_not_judged() -> None:
    watch = Watch()
    cell = {"id": "a", "url": "http://h:2", "state": "HEALTHY", "generation": 4, "owner": "other", "seen": None}
    watch.core.set("engine/a", cell)
    watch.core.set("engine/b", {**cell, "id": "b", "state": "OFFLOADED"})
    watch.core.set("engine/c", {**cell, "id": "c", "owner": "rltop"})
    await watch.others.once()
    assert watch.asked == 1
    assert watch.core.table.get("engine/a")["toggles"]["cuda_graph"] == "off"
    assert watch.core.table.get("engine/a")["state"] == "HEALTHY"
    assert "toggles/b" not in watch.core.table, "its memory is released: it is left alone"


def test_nothing_secret_is_taken_from_what_an_engine_tells() -> None:
    assert "very secret" not in json.dumps(facts_of(SERVER))
    assert watched({"watch": {"engines": ["http://h:1"]}}) == ("http://h:1",)
    assert watched({}) == ()
