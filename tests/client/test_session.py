"""The session: what the operator sees while connections come, go and misbehave. Virtual time, no sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from rltop.client import Client, ConnectionLost
from rltop.errors import RltopError
from rltop.protocol.codec import WireError, decode, encode
from rltop.protocol.messages import Accepted, Ack, Bye, Err, Hello, Ping, Role
from tests.client.model import ModelDaemon
from tests.client.virtual import run_virtual
from tests.client.waiting import until


class FakeTransport:
    """Carries frames to a model daemon and back; can be cut, or fall silent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.inbox: asyncio.Queue[list[bytes] | Exception] = asyncio.Queue()
        self.closed = False

    async def send(self, frames: Sequence[bytes]) -> None:
        if self.closed:
            raise ConnectionLost("cut")
        message = decode(frames)
        self._world.heard.append((asyncio.get_running_loop().time(), message.header.t))
        match message.body:
            case Hello() as hello:
                self._world.hellos.append(hello)
            case Ack(seq=seq):
                self._world.acks.append(seq)
            case _:
                pass
        if self._world.deaf:
            return
        for answer in self._world.answers(list(frames)):
            self.inbox.put_nowait(answer)

    async def receive(self) -> list[bytes]:
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        self.closed = True


class World:
    """A daemon, the connections to it, and everything that it heard."""

    def __init__(self) -> None:
        self.daemon = ModelDaemon()
        self.daemon.set("run", {"state": "running"})
        self.daemon.event("started")
        self.transports: list[FakeTransport] = []
        self.hellos: list[Hello] = []
        self.acks: list[int] = []
        self.heard: list[tuple[float, str]] = []
        self.dials: list[float] = []
        self.refuse: ConnectionLost | None = None
        self.deaf = False
        self.answers: Callable[[list[bytes]], list[list[bytes]]] = lambda frames: self.daemon.answer(decode(frames))

    async def dial(self) -> FakeTransport:
        self.dials.append(asyncio.get_running_loop().time())
        if self.refuse is not None:
            raise self.refuse
        self.transports.append(FakeTransport(self))
        return self.transports[-1]

    def push(self, item: list[bytes] | Exception) -> None:
        self.transports[-1].inbox.put_nowait(item)


@contextlib.asynccontextmanager
async def running(world: World, *, role: Role = "view") -> AsyncIterator[Client]:
    client = Client(world.dial, role=role, clock=asyncio.get_running_loop().time)
    task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ticking(world: World, *, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.push(world.daemon.tick())
        await asyncio.sleep(1)


def test_snapshot_then_deltas_each_acknowledged() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            assert client.status == "connecting"
            await client.wait_live(1)
            assert client.mirror.state == {"run": {"state": "running"}}
            world.daemon.set("phase", {"name": "train"})
            world.push(world.daemon.delta())
            await until(client, lambda: "phase" in client.mirror.state)
        assert world.acks == [1, 2]
        assert world.transports[-1].closed

    run_virtual(main)


def test_a_silent_client_pings_within_two_seconds_and_stays() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            await ticking(world, seconds=20)
            assert client.status == "live"
        spoke = [when for when, _ in world.heard]
        assert max(b - a for a, b in itertools.pairwise(spoke)) <= 2.001
        assert len(world.dials) == 1

    run_virtual(main)


def test_silence_for_five_seconds_is_lost_with_age_and_the_picture_stays() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            await ticking(world, seconds=3)
            world.deaf = True
            await until(client, lambda: client.status == "lost")
            assert client.problem == "no sign of life from the daemon for 5 s"
            assert client.mirror.state == {"run": {"state": "running"}}
            first_age = loop.time() - client.since
            assert first_age == pytest.approx(5.0)
            await asyncio.sleep(30)
            assert loop.time() - client.since == pytest.approx(first_age + 30)
            world.deaf = False
            await client.wait_live(15)
            assert client.problem == ""

    run_virtual(main)


def test_retries_back_off_from_100_ms_to_5_s_and_start_again_after_success() -> None:
    async def main() -> None:
        world = World()
        world.refuse = ConnectionLost("the daemon is not running")
        async with running(world) as client:
            await asyncio.sleep(30)
            waits = [b - a for a, b in itertools.pairwise(world.dials)]
            assert waits[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], rel=1e-3)
            assert client.status == "connecting"
            assert client.problem == "the daemon is not running"
            world.refuse = None
            await client.wait_live(6)
            before = asyncio.get_running_loop().time()
            world.push(ConnectionLost("cut"))
            await until(client, lambda: client.status == "lost")
            await client.wait_live(1)
            assert asyncio.get_running_loop().time() - before == pytest.approx(0.1, rel=1e-3)

    run_virtual(main)


def test_the_same_daemon_is_resumed_from_the_last_version() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            world.daemon.set("phase", {"name": "train"})
            world.daemon.event("while away")
            world.push(ConnectionLost("cut"))
            await until(client, lambda: client.status == "lost")
            await client.wait_live(1)
            resumed = world.hellos[1]
            assert (resumed.epoch, resumed.ver, resumed.eseq) == (world.daemon.epoch, 1, 1)
            assert client.mirror.state == world.daemon.truth()
            assert [event["text"] for event in client.mirror.events] == ["started", "while away"]

    run_virtual(main)


def test_another_daemon_replaces_everything() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            world.daemon = ModelDaemon()
            world.daemon.set("phase", {"name": "start"})
            world.push(world.daemon.tick())
            world.push(encode("err", Err("hello-first", "who are you")))
            await until(client, lambda: "phase" in client.mirror.state)
            assert client.mirror.state == {"phase": {"name": "start"}}
            assert not client.mirror.events
            assert len(world.dials) == 1, "hello again goes over the same connection"

    run_virtual(main)


def test_a_lost_frame_is_asked_for_again_and_nothing_behind_it_is_shown() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            world.daemon.set("phase", {"name": "rollout"})
            world.daemon.delta()
            world.daemon.set("metric/a", 1)
            world.push(world.daemon.delta())
            await until(client, lambda: client.status == "lost")
            assert "metric/a" not in client.mirror.state
            assert "a frame was lost" in client.problem
            await client.wait_live(1)
            assert client.mirror.state == world.daemon.truth()

    run_virtual(main)


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        (encode("err", Err("proto", "the daemon speaks 7 to 9")), "protocol mismatch: the daemon speaks 7 to 9"),
        (encode("err", Err("not-control", "this socket only shows")), "this socket only shows"),
        (encode("bye", Bye("shutdown")), "the daemon said goodbye: shutdown"),
        ([b"HTTP/1.1 400"], "protocol mismatch"),
    ],
)
def test_what_the_daemon_refuses_is_one_sentence(frames: list[bytes], problem: str) -> None:
    async def main() -> None:
        world = World()
        world.answers = lambda _: [frames]
        async with running(world) as client:
            await until(client, lambda: client.problem != "")
            assert problem in client.problem
            assert "\n" not in client.problem

    run_virtual(main)


def test_a_newer_protocol_names_both_ranges_and_fails_at_once() -> None:
    async def main() -> None:
        world = World()
        world.answers = lambda _: [encode("err", Err("proto", "the daemon speaks 7 to 9"))]
        async with running(world) as client:
            with pytest.raises(RltopError, match=r"7 to 9.*speaks 1 to 1") as raised:
                await client.wait_live(1000)
            assert raised.value.exit_code == 1
            assert asyncio.get_running_loop().time() < 1

    run_virtual(main)


def test_an_unknown_message_is_answered_unsupported_and_the_session_goes_on() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            magic, header, body = encode("ping", Ping(), id="x7")
            world.push([magic, header.replace(b"ping", b"huh!"), body])
            world.push(world.daemon.tick())
            await until(client, lambda: client.mirror.tick is not None)
            assert client.status == "live"
        assert "err" in [tag for _, tag in world.heard]

    run_virtual(main)


def test_questions_survive_a_reconnect() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            world.deaf = True
            asking = asyncio.ensure_future(client.series(["rollout/raw_reward", "no/such"]))
            await asyncio.sleep(0.5)
            world.push(ConnectionLost("cut"))
            world.deaf = False
            series = await asking
            assert list(series) == ["rollout/raw_reward"]
            assert series["rollout/raw_reward"].hi[0] == 0.5
            page = await client.events(text="start", limit=5)
            assert [event["text"] for event in page.events] == ["started"]

    run_virtual(main)


def test_a_question_without_an_answer_ends_with_the_reason() -> None:
    async def main() -> None:
        world = World()
        world.refuse = ConnectionLost("the daemon is not running")
        async with running(world) as client:
            with pytest.raises(RltopError, match="no answer to 'series\\?' in 10 s") as raised:
                await client.series(["x"])
            assert raised.value.why == "the daemon is not running"

    run_virtual(main)


def test_a_command_sent_twice_by_a_reconnect_runs_once() -> None:
    async def main() -> None:
        world = World()
        async with running(world, role="control") as client:
            await client.wait_live(1)
            normal = world.answers

            def drop_the_answer(frames: list[bytes]) -> list[list[bytes]]:
                answers = normal(frames)
                if decode(frames).header.t != "cmd":
                    return answers
                world.answers = normal
                world.push(ConnectionLost("cut"))
                return []

            world.answers = drop_the_answer
            assert await client.command("note", args={"text": "hi"}) == Accepted("op-1")
            assert len(world.daemon.commands) == 1

    run_virtual(main)


def test_a_viewer_can_not_command() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            await client.wait_live(1)
            with pytest.raises(RltopError, match="read-only"):
                await client.command("stop-run")
        assert "cmd" not in [tag for _, tag in world.heard]

    run_virtual(main)


def test_close_says_goodbye_and_ends_run() -> None:
    async def main() -> None:
        world = World()
        client = Client(world.dial, clock=asyncio.get_running_loop().time)
        first = asyncio.ensure_future(client.run())
        second = asyncio.ensure_future(client.run())
        await client.wait_live(1)
        await client.close()
        await asyncio.gather(first, second)
        assert world.heard[-1][1] == "bye"
        assert len(world.dials) == 1

    run_virtual(main)


def test_garbage_from_the_other_side_never_leaves_run() -> None:
    async def main() -> None:
        world = World()
        async with running(world) as client:
            for item in ([b"RL1", b"\xc1", b""], WireError("malformed", "length"), OSError(24, "Too many open files")):
                await client.wait_live(10)
                world.push(item)
                await until(client, lambda: client.status == "lost")
                assert client.problem
            await client.wait_live(10)

    run_virtual(main)
