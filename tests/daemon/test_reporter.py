"""The reporter: inert without an address, never raises, never blocks, counts what it drops."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from rltop import reporter_link
from rltop.protocol.codec import decode
from rltop.protocol.messages import Record
from rltop.reporter import _MAX_ARRAY, MAX_VALUES, Reporter
from rltop.reporter_link import QUEUE, SNDHWM, choose
from tests.daemon.util import PATIENCE_S


class Listener:
    """The daemon's end of the ingest socket."""

    def __init__(self, address: str, *, rcvhwm: int = 10_000) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = rcvhwm
        self._socket.bind(address)

    def take(self, count: int = 1) -> list[Record]:
        found: list[Record] = []
        for _ in range(count):
            assert self._socket.poll(int(PATIENCE_S * 1000)), f"only {len(found)} of {count} records came"
            body = decode(self._socket.recv_multipart()).body
            assert isinstance(body, Record)
            found.append(body)
        return found

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    path = tmp_path / "i.sock"
    return f"ipc://{path}" if len(str(path)) < 100 else f"ipc:///tmp/rltop-test-{os.getpid()}-{abs(hash(path))}.sock"


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    found = Listener(address)
    yield found
    found.close()
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is what arrives, not how fast this machine is just now."""
    monkeypatch.setattr(reporter_link, "CLOSE_S", PATIENCE_S)


class Scalar:
    """Like a 0-d tensor."""

    def __float__(self) -> float:
        return 2.5


class Evil:
    """Everything about it raises."""

    def __float__(self) -> float:
        raise RuntimeError("no float today")

    def __str__(self) -> str:
        raise RuntimeError("no text either")

    def tolist(self) -> Any:
        raise RuntimeError("nor a list")


def test_without_an_address_nothing_happens_and_zmq_is_not_imported() -> None:
    code = (
        "import sys; from rltop import Reporter\n"
        "with Reporter() as r:\n"
        "    r.metrics({'a': 1}, step=1); r.log('info', 'x'); r.bye('done')\n"
        "assert not r.active\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('zmq', 'msgspec', 'numpy', 'torch', 'textual')])"
    )
    env = {key: value for key, value in os.environ.items() if key != "RLTOP_INGEST"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"


def test_an_axis_that_is_not_given_is_left_to_the_names(address: str, listener: Listener) -> None:
    with Reporter(address=address) as reporter:
        reporter.metrics({"train/loss": 0.5}, step=7)
    (record,) = listener.take(1)
    assert record.payload == {"values": {"train/loss": 0.5}, "step": 7}


def test_every_kind_arrives_in_the_shape_of_the_specification(address: str, listener: Listener) -> None:
    with Reporter(address=address, run="r-1", role="trainer", rank=3) as reporter:
        reporter.run(framework="mine", args={"lr": 1e-6, "path": Path("/x")})
        reporter.metrics({"train/loss": Scalar(), "n": 3}, step=7, axis="train", rollout_id=2, step_in_rollout=0)
        reporter.samples(2, [{"index": 0, "response": "é"}], total=64)
        with reporter.phase("rollout", rollout_id=2):
            pass
        reporter.weights(version="5", rollout_id=3, ok=True)
        reporter.engine(id="0", url="http://h:1", kind="cpu")
        reporter.log("warn", "hm")
        reporter.bye("done")
    records = listener.take(9)
    assert [record.kind for record in records] == [
        "run", "metrics", "samples", "phase", "phase", "weights", "engine", "log", "bye",
    ]  # fmt: skip
    assert [record.seq for record in records] == list(range(1, 10))
    assert records[0].payload["args"] == {"lr": 1e-6, "path": "/x"}
    assert records[1].payload == {
        "values": {"train/loss": 2.5, "n": 3.0}, "step": 7, "axis": "train", "rollout_id": 2, "step_in_rollout": 0,
    }  # fmt: skip
    assert records[4].payload["edge"] == "leave"
    assert records[4].payload["elapsed_s"] >= 0
    assert {record.source.name for record in records} == {"trainer/3"}
    assert {record.run for record in records} == {"r-1"}
    assert reporter.errors == 0


def test_nan_and_inf_travel_as_they_are(address: str, listener: Listener) -> None:
    with Reporter(address=address) as reporter:
        reporter.metrics({"a": float("nan"), "b": float("-inf")}, step=1)
    values = listener.take()[0].payload["values"]
    assert values["a"] != values["a"]
    assert values["b"] == float("-inf")


def test_what_is_no_number_is_left_out_and_named_once(address: str, listener: Listener) -> None:
    with Reporter(address=address) as reporter:
        for step in range(3):
            reporter.metrics({"good": 1, "bad": Evil(), "text": "abc"}, step=step)
    records = listener.take(5)
    assert [record.kind for record in records].count("log") == 2
    assert all(list(record.payload["values"]) == ["good"] for record in records if record.kind == "metrics")
    assert "bad" in records[0].payload["text"]


def test_nothing_that_a_caller_passes_makes_it_raise(address: str) -> None:
    with Reporter(address=address) as reporter:
        anything: Any = Evil()
        reporter.metrics(anything, step=1)
        reporter.metrics({anything: 1}, step=anything)
        reporter.samples(1, [{"index": Evil()}])
        reporter.run(framework="x", args={"deep": Evil()})
        reporter.log("info", "\ud800")
    assert reporter.errors >= 4
    assert reporter.last_error


@pytest.mark.parametrize("address", ["", "nonsense", "ipc://", "tcp://", "ipc:///no/such/folder/x.sock"])
def test_an_address_that_cannot_work_costs_nothing(address: str) -> None:
    with Reporter(address=address) as reporter:
        for step in range(10):
            reporter.metrics({"a": 1}, step=step)
    reporter.metrics({"a": 1}, step=11)


def test_a_daemon_that_comes_later_gets_what_was_kept(address: str) -> None:
    with Reporter(address=address) as reporter:
        for step in range(50):
            reporter.metrics({"a": step}, step=step)
        late = Listener(address)
        records = late.take(50)
        late.close()
    assert [record.payload["step"] for record in records] == list(range(50))


def test_with_nobody_listening_the_oldest_are_dropped_and_counted(address: str) -> None:
    with Reporter(address=address) as reporter:
        for step in range(SNDHWM + QUEUE + 300):
            reporter.metrics({"a": 1}, step=step)
        assert reporter.dropped == 300
        late = Listener(address)
        seen = late.take(SNDHWM)
        reporter.log("info", "news")
        seen += late.take(QUEUE + 1)
        late.close()
    assert (seen[-1].kind, seen[-1].dropped) == ("log", 300)
    assert [later.seq - earlier.seq for earlier, later in pairwise(seen)].count(1) == len(seen) - 2
    assert seen[SNDHWM].seq - seen[SNDHWM - 1].seq == 301


def test_a_record_over_the_message_limit_is_refused_here(address: str, listener: Listener) -> None:
    with Reporter(address=address) as reporter:
        reporter.log("info", "x" * (17 * 1024 * 1024))
        reporter.log("info", "small")
    (record,) = listener.take()
    assert (record.payload["text"], record.dropped, record.seq) == ("small", 1, 2)


def test_threads_share_one_sequence(address: str, listener: Listener) -> None:
    with Reporter(address=address) as reporter:

        def report() -> None:
            for step in range(100):
                reporter.metrics({"a": 1}, step=step)

        threads = [threading.Thread(target=report) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(record.seq for record in listener.take(400)) == list(range(1, 401))


def test_a_forked_child_has_its_own_socket_and_sequence(address: str, listener: Listener) -> None:
    code = (
        "import os, sys\n"
        "from rltop.reporter import Reporter\n"
        "with Reporter(address=sys.argv[1]) as r:\n"
        "    r.log('info', 'parent')\n"
        "    child = os.fork()\n"
        "    r.log('info', 'child' if child == 0 else 'parent')\n"
        "    if child == 0: r.close(); sys.exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    r.log('info', 'parent')\n"
        "assert r.errors == 0, r.last_error\n"
    )
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    seqs: dict[str, list[int]] = {}
    pids: dict[str, set[int]] = {}
    for record in listener.take(4):
        seqs.setdefault(record.payload["text"], []).append(record.seq)
        pids.setdefault(record.payload["text"], set()).add(record.source.pid)
    assert seqs == {"parent": [1, 2, 3], "child": [1]}
    assert not pids["parent"] & pids["child"]


def test_it_speaks_plain_messagepack(address: str) -> None:
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.bind(address)
    with Reporter(address=address) as reporter:
        reporter.log("info", "x")
        magic, header, body = pull.recv_multipart()
    assert magic == b"RL1"
    assert msgpack.unpackb(header) == {"v": 1, "t": "rec", "seq": 1}
    assert msgpack.unpackb(body)["kind"] == "log"
    pull.close()
    context.term()


class Tensor:
    """Like a tensor of any size."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def numel(self) -> int:
        number = 1
        for size in self.shape:
            number *= size
        return number

    def tolist(self) -> Any:
        assert self.numel() <= _MAX_ARRAY, "a list that no machine has room for"
        return [0.5] * self.numel()


def test_values_that_messagepack_does_not_take_are_replaced_and_the_record_arrives(
    address: str, listener: Listener
) -> None:
    cycle: dict[Any, Any] = {"seed": 2**70, 1: "one"}
    cycle["self"] = cycle
    args = {
        "cycle": cycle,
        "text": "\ud800",
        "evil": Evil(),
        "raw": b"\xff",
        "big": Tensor(10**6, 10**6),
        "few": Tensor(3),
    }
    with Reporter(address=address) as reporter:
        reporter.run(framework="x", args=args)
    got = listener.take()[0].payload["args"]
    assert got["cycle"]["seed"] == float(2**70)
    assert got["cycle"]["1"] == "one"
    assert got["cycle"]["self"]["self"]["seed"] == float(2**70)
    assert (got["text"], got["evil"], got["raw"]) == ("?", "<Evil>", b"\xff")
    assert (got["big"], got["few"]) == ("<Tensor (1000000, 1000000)>", [0.5, 0.5, 0.5])
    assert reporter.dropped == 0


def test_a_huge_dictionary_is_cut_counted_and_named_once(address: str, listener: Listener) -> None:
    values = {f"m{i}": i for i in range(MAX_VALUES + 7)}
    with Reporter(address=address) as reporter:
        reporter.metrics(values, step=1)
        reporter.metrics(values, step=2)
    log, *metrics = listener.take(3)
    assert "7 were left out" in log.payload["text"]
    assert [len(record.payload["values"]) for record in metrics] == [MAX_VALUES, MAX_VALUES]
    assert reporter.left_out == 14


def test_a_stopped_daemon_holds_nobody_up_and_gets_what_was_kept(address: str) -> None:
    code = (
        "import sys, zmq\n"
        "pull = zmq.Context().socket(zmq.PULL); pull.rcvhwm = 1; pull.bind(sys.argv[1]); print('up', flush=True)\n"
        "while True: print(len(pull.recv_multipart()), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            assert daemon.stdout.readline() == "up\n"
            with closing(Reporter(address=address)) as reporter:
                reporter.log("info", "first")
                assert daemon.stdout.readline() == "3\n"
                daemon.send_signal(signal.SIGSTOP)
                for step in range(SNDHWM + QUEUE + 5000):
                    reporter.metrics({"a": step}, step=step)
                assert 4500 < reporter.dropped <= 5100
                daemon.send_signal(signal.SIGCONT)
                reporter.log("info", "last")
                assert daemon.stdout.readline() == "3\n"
        finally:
            daemon.kill()


def test_what_a_hanging_daemon_never_took_is_said_at_the_end(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_link, "CLOSE_S", 0.5)
    with zmq.Context() as context, context.socket(zmq.PULL) as deaf:
        deaf.rcvhwm = 1
        deaf.bind(address)
        reporter = Reporter(address=address)
        for step in range(SNDHWM + QUEUE + 5000):
            reporter.metrics({"a": step}, step=step)
        dropped = reporter.dropped
        reporter.close()
        deaf.linger = 0
    assert reporter.dropped >= dropped > 4000
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rltop.reporter"]
    many = SNDHWM + QUEUE + 5000
    lost = f"rltop: {reporter.dropped} of {many} records are lost"
    assert line.startswith(f"{lost}: the daemon did not take them in time; of the ")
    assert line.endswith(f"; of the {SNDHWM} before them some may be lost too")


def test_what_a_daemon_that_is_behind_has_not_read_yet_comes_though_its_producer_closes(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Listener(address, rcvhwm=16)) as behind:
        reporter = Reporter(address=address)
        for step in range(600):
            reporter.metrics({"a": step}, step=step)
        ends = threading.Thread(target=reporter.close)
        ends.start()
        ends.join(0.3)
        assert ends.is_alive(), "it hung up: ZeroMQ throws away what the socket of a connection at its mark still holds"
        taken = [record.seq for record in behind.take(600)]
        ends.join()
    assert taken == list(range(1, 601))
    assert (reporter.dropped, caplog.messages) == (0, [])


def test_what_a_hanging_daemon_has_not_read_may_be_lost_and_that_is_said(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_link, "CLOSE_S", 0.5)
    with closing(Listener(address, rcvhwm=1)), Reporter(address=address) as reporter:
        for step in range(600):
            reporter.metrics({"a": step}, step=step)
    line = "rltop: the daemon was slow (over 0.5 s): of the last 600 records some may be lost"
    assert (reporter.dropped, caplog.messages) == (0, [line])


def test_what_no_daemon_was_there_to_take_is_counted_and_said_at_the_end(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(address=address)
    for step in range(5):
        reporter.metrics({"a": step}, step=step)
    reporter.close()
    assert reporter.dropped == 5
    assert caplog.messages == ["rltop: 5 of 5 records are lost: no daemon was there to take them"]


def test_what_a_daemon_that_went_did_not_take_is_counted(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_link, "LOOK_S", 0.0)
    daemon = Listener(address)
    reporter = Reporter(address=address)
    for step in range(3):
        reporter.metrics({"a": step}, step=step)
    daemon.take(3)
    daemon.close()
    (link,) = reporter._links.values()
    until = time.monotonic() + PATIENCE_S
    while not link._reached and time.monotonic() < until:  # nothing is sent meanwhile
        assert reporter.status == ""
    for step in range(17):
        reporter.metrics({"a": step}, step=step)
    reporter.close()
    assert reporter.dropped == 17
    line = "rltop: 17 of 20 records are lost: no daemon was there to take them"
    assert caplog.messages == [f"{line}; of the 3 before them some may be lost too"]


def test_records_that_all_arrived_need_no_last_line(
    address: str, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with Reporter(address=address) as reporter:
        for step in range(50):
            reporter.metrics({"a": step}, step=step)
        listener.take(50)
    assert (reporter.dropped, caplog.messages) == (0, [])


def _report_from_child(reporter: Reporter) -> None:
    reporter.log("info", "child")
    reporter.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_of_multiprocessing_may_use_its_parents_reporter(method: str, address: str, listener: Listener) -> None:
    with Reporter(address=address, role="r", rank=2) as reporter:
        reporter.log("info", "parent")
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=_report_from_child, args=(reporter,))
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        reporter.log("info", "parent")
    records = listener.take(3)
    assert {record.source.name for record in records} == {"r/2"}
    assert sorted((r.payload["text"], r.seq) for r in records) == [("child", 1), ("parent", 1), ("parent", 2)]
    assert reporter.errors == 0


def test_a_pickled_reporter_is_a_new_one_of_the_same_source(address: str, listener: Listener) -> None:
    with closing(Reporter(address=address, role="r", rank=1, run="x")) as reporter:
        reporter.log("info", "a")
        with closing(pickle.loads(pickle.dumps(reporter))) as again:
            again.log("info", "b")
    records = listener.take(2)
    assert {(r.run, r.source.name, r.seq) for r in records} == {("x", "r/1", 1)}


@pytest.mark.parametrize("how", ["", "sys.exit(3)", "raise RuntimeError"])
def test_the_end_of_the_interpreter_delivers_what_nobody_closed(how: str, address: str, listener: Listener) -> None:
    code = (
        "import sys\nfrom rltop import Reporter, reporter_link\nreporter_link.CLOSE_S = 20.0\n"
        f"r = Reporter(address=sys.argv[1])\nr.log('info', 'x')\n{how}"
    )
    subprocess.run([sys.executable, "-c", code, address], capture_output=True, check=False, timeout=PATIENCE_S)
    assert listener.take()[0].payload["text"] == "x"


def test_a_reporter_that_is_forgotten_closes_its_socket(address: str, listener: Listener) -> None:
    for _ in range(3):
        Reporter(address=address).log("info", "x")
        gc.collect()  # an unclosed socket would warn, and warnings are errors here
    assert len(listener.take(3)) == 3


def test_of_several_addresses_the_unix_socket_of_this_machine_is_taken(tmp_path: Path) -> None:
    here, far = f"ipc://{tmp_path}/i.sock", "curve://…@h:1/k"
    assert choose(f"{here} {far}") == far
    (tmp_path / "i.sock").touch()
    assert choose(f"{here} {far}") == here
    assert choose(here) == here
    assert choose("") == ""


def test_the_status_says_how_it_stands(tmp_path: Path) -> None:
    with Reporter(address="") as reporter:
        assert reporter.status == ""
    with Reporter(address="tcp://127.0.0.1:1") as reporter:
        assert reporter.status == "nothing was reported yet"
        reporter.log("info", "x")
        assert reporter.status.startswith("nothing is sent: over TCP a producer needs keys")
