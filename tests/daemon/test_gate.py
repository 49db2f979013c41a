"""Records over TCP: from another host with a key; without one refused, and both sides say why."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from rltop import keys, reporter_link
from rltop.daemon import auth, spawn
from rltop.daemon import gate as gates
from rltop.daemon.gate import Gate
from rltop.errors import RltopError
from rltop.protocol.codec import decode, encode
from rltop.protocol.messages import Command, Hello
from rltop.reporter import Reporter
from rltop.runs import RunInfo
from tests.daemon.fakes import FakeCore
from tests.daemon.netns import Hosts, run_there, two_hosts
from tests.daemon.util import PATIENCE_S, Viewer, real_daemon, wait_for

PRODUCER = """
import sys, time
from rltop.reporter import Reporter
with Reporter(role=sys.argv[1]) as reporter:
    for step in range(100):
        reporter.metrics({sys.argv[1]: step}, step=step)
    end = time.monotonic() + 20
    while time.monotonic() < end and not reporter.status.startswith(("connected", "refused", "nothing")):
        time.sleep(0.01)
    print(reporter.status)
"""
PLAIN = """
import sys, time, zmq
with zmq.Context() as context, context.socket(zmq.PUSH) as push, push.get_monitor_socket() as monitor:
    push.linger = 0
    push.connect(sys.argv[1])
    push.send(b"x", zmq.NOBLOCK)
    while monitor.poll(20_000) and int.from_bytes(monitor.recv_multipart()[0][:2], "little") != zmq.Event.DISCONNECTED:
        pass
    push.disable_monitor()
"""
BROWSER = """
import socket, sys
host, _, port = sys.argv[1].removeprefix("tcp://").rpartition(":")
with socket.create_connection((host, int(port))) as one:
    one.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" + b"a" * 100)
    try:
        while one.recv(1000):
            pass
    except ConnectionResetError:
        pass
"""


class Run:
    """A daemon that listens on TCP, the other host, and its keys."""

    def __init__(self, run: RunInfo, hosts: Hosts, tmp: Path) -> None:
        self.info, self.hosts, self.keys = run, hosts, run.path / "keys"
        self.endpoint, self.server = keys.read_listen(self.keys) or ("", b"")
        self.foreign = tmp / "foreign"
        self.foreign_server = keys.server_pair(self.foreign).public

    def url(self, name: str = keys.FIRST_CLIENT, *, server: bytes = b"", file: Path | None = None) -> str:
        return keys.Ingest(self.endpoint, server or self.server, file or keys.client_file(self.keys, name)).url()

    def there(self, code: str, *args: str, ingest: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "RLTOP_INGEST": ingest, "RLTOP_RUN": self.info.name}
        return run_there(self.hosts, [sys.executable, "-c", code, *args], env)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    tmp = tmp_path_factory.mktemp("gate")
    with two_hosts() as hosts, real_daemon(tmp, ingest_tcp=f"{hosts.listen}:0") as info:
        print(f"the producers come from: {hosts.what}")
        yield Run(info, hosts, tmp)


def refused(viewer: Viewer, reason: str, peer: str) -> dict[str, Any]:
    """The event that says so."""
    event = viewer.until_event(kind="refused", reason=reason)
    assert (event["level"], event["source"]) == ("warn", "ingest")
    # Only ZAP always knows the address; of a connection that failed before, it may be gone on a busy machine.
    assert event["peer"] == peer or (event["peer"] == auth.UNKNOWN_PEER and reason != auth.UNKNOWN_KEY)
    assert event["text"].startswith(f"refused {event['peer']}: {reason}")
    return event


def test_a_producer_on_another_host_streams_with_its_key(run: Run, record_property: Any) -> None:
    record_property("hosts", run.hosts.what)
    done = run.there(PRODUCER, "far", ingest=run.url())
    with Viewer(run.info) as viewer:
        viewer.hello()
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "connected", "")
        viewer.until_state(lambda s: s["metric/far"]["step"] == 99 and s["source/far/0"]["records"] == 100)
        source = viewer.state["source/far/0"]
        assert (source["key"], source["lost"], source["dropped"], source["malformed"]) == ("trainer", 0, 0, 0)
        assert viewer.until_event(text=f"a producer with the key 'trainer' came in from {run.hosts.other}")
        viewer.until_state(lambda s: s["ingest"]["accepted"] >= 1 and s["ingest"]["connections"] == 0)


def test_a_key_of_another_run_is_refused_and_both_sides_say_why(run: Run) -> None:
    done = run.there(PRODUCER, "mallory", ingest=run.url(file=keys.add_client(run.foreign, "mallory")))
    with Viewer(run.info) as viewer:
        viewer.hello()
        assert done.returncode == 0
        assert "does not know this key" in done.stdout
        assert done.stderr.count("does not know this key") == 1, "said once"
        refused(viewer, auth.UNKNOWN_KEY, run.hosts.other)
        assert "metric/mallory" not in viewer.state


def test_another_servers_public_key_is_refused_and_both_sides_say_why(run: Run) -> None:
    done = run.there(PRODUCER, "stale", ingest=run.url(server=run.foreign_server))
    with Viewer(run.info) as viewer:
        viewer.hello()
        assert done.returncode == 0
        assert "another server's public key" in done.stdout
        refused(viewer, auth.WRONG_SERVER_KEY, run.hosts.other)
        assert "metric/stale" not in viewer.state


def test_without_a_key_the_reporter_does_not_even_connect(run: Run) -> None:
    done = run.there(PRODUCER, "keyless", ingest=run.endpoint)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "nothing is sent")
    assert "needs keys" in done.stderr
    missing = run.there(PRODUCER, "keyless", ingest=run.url(file=Path("/no/such.key")))
    assert "cannot read the key file" in missing.stdout


def test_a_plain_client_is_refused(run: Run) -> None:
    assert run.there(PLAIN, run.endpoint).returncode == 0
    with Viewer(run.info) as viewer:
        viewer.hello()

        def said() -> bool:
            # Who notices first that the two do not match is a race inside ZeroMQ: either is told.
            return any(e.get("reason") in (auth.PLAIN, auth.LEFT) and e["peer"] for e in viewer.events)

        if not said():
            viewer.until(lambda message: said())


def test_what_speaks_no_zeromq_is_refused(run: Run) -> None:
    assert run.there(BROWSER, run.endpoint).returncode == 0
    with Viewer(run.info) as viewer:
        viewer.hello()
        viewer.until_event(kind="refused", reason=auth.NOT_ZEROMQ)


@contextmanager
def push(run: Run, name: str = keys.FIRST_CLIENT) -> Iterator[zmq.Socket[bytes]]:
    """A raw socket with a good key, let in."""
    pair = keys.read_pair(keys.client_file(run.keys, name))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, run.server
        socket.linger = 2000
        socket.connect(run.endpoint)
        yield socket


def test_it_takes_records_and_nothing_else(run: Run) -> None:
    before: dict[str, int] = {}
    with Viewer(run.info) as viewer, push(run) as socket:
        viewer.hello()
        viewer.until_state(lambda s: s["daemon"])
        before.update(viewer.state["daemon"])
        socket.send_multipart(encode("cmd", Command("shutdown"), id="evil"))
        socket.send_multipart(encode("hello", Hello((1, 1), "evil", "control")))
        socket.send_multipart([b"junk"])
        viewer.until_state(lambda s: s["daemon"]["malformed"] == before["malformed"] + 3)
        assert viewer.until_event(text="ingest: refused: from key trainer: 'cmd' is not for the ingest socket")
        assert "op" not in {key.split("/")[0] for key in viewer.state}


def test_a_new_key_needs_no_restart_and_a_revoked_one_is_refused_though_connected(run: Run) -> None:
    path = keys.add_client(run.keys, "late")
    with Viewer(run.info) as viewer, Reporter(role="late", run=run.info.name, address=run.url(file=path)) as reporter:
        viewer.hello()
        reporter.metrics({"late": 1.0}, step=1)
        wait_for(lambda: reporter.status == "connected", reporter.status)
        reporter.metrics({"late": 2.0}, step=2)
        # The socket may take records a moment after it said that it is connected; the next report hands them over.
        wait_for(lambda: reporter.status and not reporter._links[os.getpid()].waiting)
        viewer.until_state(lambda s: s["source/late/0"]["key"] == "late" and s["metric/late"]["step"] == 2)
        # The list is shown, and read again, once a second: without it the next wait would be for nothing.
        viewer.until_state(lambda s: "late" in s["ingest"]["keys"])
        keys.revoke_client(run.keys, "late")
        viewer.until_state(lambda s: "late" not in s["ingest"]["keys"])
        reporter.metrics({"late": 3.0}, step=3)
        viewer.until_event(kind="refused", peer="key late", reason=auth.REVOKED)
        assert viewer.state["metric/late"]["step"] == 2


def test_key_files_are_for_the_owner_only(run: Run) -> None:
    for path in run.keys.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(run.keys.stat().st_mode) == 0o700


def test_a_daemon_that_starts_again_keeps_its_key_and_its_producers_come_back(tmp_path: Path) -> None:
    with real_daemon(tmp_path, ingest_tcp="127.0.0.1:0") as first:
        endpoint, server = keys.read_listen(first.path / "keys") or ("", b"")
        url = keys.Ingest(endpoint, server, keys.client_file(first.path / "keys", "trainer")).url()
        with Reporter(role="r", run=first.name, address=url) as reporter:
            reporter.log("info", "one")
            wait_for(lambda: reporter.status == "connected", reporter.status)
            spawn.stop_daemon(first)
            again = spawn.start_daemon(first.name, ingest_tcp=endpoint.removeprefix("tcp://"))
            with Viewer(again) as viewer:
                viewer.hello()
                wait_for(lambda: reporter.status == "connected", reporter.status)
                reporter.log("info", "two")
                wait_for(lambda: reporter.status and not reporter._links[os.getpid()].waiting)
                viewer.until_event(text="two")


def test_the_trainer_that_up_starts_finds_its_way_in(tmp_path: Path) -> None:
    code = "import os; print('INGEST', os.environ['RLTOP_INGEST'])"
    with real_daemon(tmp_path, trainer=[sys.executable, "-c", code], ingest_tcp="127.0.0.1:0") as run:
        log = run.path / "trainer.log"
        said = wait_for(lambda: log.exists() and log.read_text().strip())
        local, far = said.removeprefix("INGEST ").split()
        assert local == run.sockets["ingest"]
        assert keys.parse_ingest(far).key_file == keys.client_file(run.path / "keys", "trainer")


def test_an_address_that_cannot_be_bound_is_one_clear_error(tmp_path: Path) -> None:
    said = pytest.raises(RltopError, match=r"192\.0\.2\.1:7411: cannot listen for records")
    with said, real_daemon(tmp_path, ingest_tcp="192.0.2.1:7411"):
        pass


async def test_messages_without_an_end_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "TICK_S", 0.1)
    monkeypatch.setattr(gates, "REOPEN_S", 0.2)
    core, taken, stop = FakeCore(), [], threading.Event()
    gate = Gate("127.0.0.1:0", tmp_path, core, take=lambda frames, key: taken.append(frames), max_growth=64 * 2**20)
    gate.open()
    url = keys.parse_ingest(gate.url())
    pair = keys.read_pair(url.key_file)

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
                pair.public,
                pair.secret,
                url.server,
            )
            socket.linger, socket.sndtimeo = 0, 100
            socket.connect(url.endpoint)
            while not stop.is_set():
                with suppress(zmq.Again):
                    socket.send(bytes(2**20), zmq.SNDMORE)

    thread = threading.Thread(target=flood)
    serving = asyncio.create_task(gate.run())
    try:
        thread.start()
        await asyncio.to_thread(wait_for, lambda: core.events("refused"))
        stop.set()
        await asyncio.to_thread(thread.join)
        assert "closed for a moment" in core.texts("refused")[0]
        with closing(Reporter(address=gate.url())) as reporter:

            def arrived() -> bool:
                reporter.log("info", "still here")
                return bool(taken)

            await asyncio.to_thread(wait_for, arrived)
    finally:
        stop.set()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        gate.close()


async def test_what_a_daemon_has_no_time_for_comes_whole_though_its_producer_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_link, "CLOSE_S", PATIENCE_S)
    records = 3 * gates.RCVHWM
    taken: list[int] = []
    gate = Gate("127.0.0.1:0", tmp_path, FakeCore(), take=lambda frames, key: taken.append(decode(frames).header.seq))
    gate.open()
    reporter = Reporter(address=gate.url())
    for step in range(records):
        reporter.metrics({"a": step}, step=step)
    (link,) = reporter._links.values()
    for end in (gate._pull, link._socket):
        # At its mark a connection is not read: with heartbeats ZeroMQ would hang up, and lose what is on its way.
        assert end is not None
        asked = [end.getsockopt(option) for option in (zmq.HEARTBEAT_IVL, zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE)]
        assert asked == [0, 1, 15]
    await asyncio.to_thread(reporter.close)
    serving = asyncio.create_task(gate.run())
    try:
        await asyncio.to_thread(wait_for, lambda: len(taken) >= records, "some never came")
        assert taken == list(range(1, records + 1))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        gate.close()


def test_a_reporter_that_was_silent_for_long_while_nobody_listened_is_not_held_up(tmp_path: Path) -> None:
    # Every attempt to connect is two events of its monitor: many more than ZeroMQ keeps by default.
    server = keys.server_pair(tmp_path).public
    url = keys.Ingest("tcp://127.0.0.1:1", server, keys.add_client(tmp_path, "x")).url()
    with Reporter(address=url) as reporter:
        reporter.log("info", "one")
        (link,) = reporter._links.values()
        socket = link._socket
        assert socket is not None
        for _ in range(1500):
            socket.disconnect("tcp://127.0.0.1:1")
            socket.connect("tcp://127.0.0.1:1")
        reporter.log("info", "two")
        wait_for(lambda: "nobody listens" in reporter.status, reporter.status)
        assert reporter.dropped == 0
    assert reporter.dropped == 2
