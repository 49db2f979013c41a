"""Injected faults of the CPU engine: how they are written, when they strike, and that they end it as SGLang ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rltop.engines.client import EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.launch import EngineProcess, EngineSpec, launch_engine
from rltop.engines.launcher import MARKER
from rltop.engines.toggle_table import read_fields
from rltop.errors import RltopError
from rltop.train.cpu_engine.args import parse_args
from rltop.train.cpu_engine.effects import Graph
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.faults import INJECTED, KINDS, VARIABLE, drawn, listing, parse_faults
from rltop.train.cpu_engine.injection import Injection, SchedulerDied
from rltop.train.cpu_engine.process import CRASH_VARIABLE
from rltop.train.cpu_engine.server import make_app
from rltop.train.cpu_engine.start import build
from tests.engines.conftest import connect, running
from tests.engines.contract import PROMPT, other_weights

SHORT = {"max_new_tokens": 3, "ignore_eos": True}
LONG = {"max_new_tokens": 600, "ignore_eos": True}


def _until(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


# ---------------------------------------------------------------------- how faults are written


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_fault_is_listed_and_reads_back(name: str) -> None:
    text = f"{name}:toggle=cuda_graph" if name == "flag-ignored" else name
    (fault,) = parse_faults(text)
    assert str(fault) == text
    assert f"{name}: {KINDS[name].does}" in " ".join(listing().split())


def test_the_documentation_lists_every_fault_with_its_settings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().split("## Rehearsing faults")[1]
    for kind in KINDS.values():
        (row,) = re.findall(rf"^\| `{kind.name}` \| (.*) \|$", page, re.MULTILINE)
        assert row.startswith(f"{kind.does} |")
        assert all(f"`{name}`: {meaning}" in row for name, meaning in kind.settings.items()), kind.name


def test_several_faults_with_conditions_and_settings() -> None:
    first, second = parse_faults(" ima:cuda_graph&!radix_cache&speculative=NGRAM:hazard=0.02,seed=7 ; hang:after=60;")
    assert [str(part) for part in first.condition] == ["cuda_graph", "!radix_cache", "speculative=NGRAM"]
    assert dict(first.settings) == {"hazard": "0.02", "seed": "7"}
    assert (second.kind.name, second.condition) == ("hang", ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("boom", "no fault is called 'boom'"),
        ("ima:cuda_grph", "'cuda_grph' is neither a toggle nor a setting"),
        ("ima:cuda_graph:loud=1", "'loud=1' is no setting of ima"),
        ("ima:hazard=2", "hazard is a number from 0 to 1"),
        ("ima:hazard=x", "hazard is a number from 0 to 1"),
        ("hang:after=-1", "after is a number, 0 or more"),
        ("ima:at=night", "at is one of prefill, decode"),
        ("slow-start:while=serving", "while is one of load, capture, warm-up"),
        ("flag-ignored", "flag-ignored needs a toggle"),
        ("flag-ignored:toggle=launch_blocking", "toggle is one of"),
    ],
)
def test_bad_faults_are_one_message(text: str, why: str) -> None:
    with pytest.raises(RltopError) as failed:
        parse_faults(text)
    assert why in str(failed.value)
    assert VARIABLE in failed.value.where


def test_bad_faults_end_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    from rltop.train.cpu_engine.__main__ import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "boom")
        assert main(["--model-path", "/nowhere"]) == 2
    assert "no fault is called 'boom'" in capfd.readouterr().err


# ---------------------------------------------------------------------- when they strike


def _struck(text: str, toggles: dict[str, str | None], batches: int, seed: str = "0") -> list[int]:
    """Batches at which a fault of the batch stage strikes, each time by a fresh injection."""
    found = []
    injection = Injection(parse_faults(text), toggles=toggles, seed=seed)
    for batch in range(1, batches + 1):
        try:
            injection.before_batch("decode", lambda: True)
        except SchedulerDied:
            found.append(batch)
            break
    return found


def test_a_hazard_is_a_rate_and_the_same_for_the_same_seed() -> None:
    (fault,) = parse_faults("ima:hazard=0.02")
    hits = [batch for batch in range(20_000) if drawn(fault, batch, seed="1")]
    assert 320 < len(hits) < 480, "0.02 of 20,000 is 400, and six standard deviations are 120"
    assert hits == [batch for batch in range(20_000) if drawn(fault, batch, seed="1")]
    assert hits != [batch for batch in range(20_000) if drawn(fault, batch, seed="2")]
    assert _struck("ima:hazard=0.02", {}, 5000, seed="1") == [next(hit for hit in hits if hit)]
    assert _struck("ima:hazard=0.02,seed=1", {}, 5000, seed="9") == _struck("ima:hazard=0.02", {}, 5000, seed="1")
    assert _struck("ima:hazard=0", {}, 5000) == []


@pytest.mark.parametrize(
    ("condition", "strikes"),
    [
        ("cuda_graph", True),
        ("!cuda_graph", False),
        ("cuda_graph&speculative", True),
        ("cuda_graph&speculative=EAGLE", False),
        ("speculative=NGRAM&!deepep", True),
        ("deepep", False),
    ],
)
def test_a_fault_strikes_only_where_its_conjunction_holds(condition: str, strikes: bool) -> None:
    args = parse_args(["--model-path", "/m", "--speculative-algorithm", "NGRAM"], {})
    toggles = read_fields(args.sglang, {})
    assert bool(_struck(f"ima:{condition}:batch=3", toggles, 10)) is strikes


def test_faults_count_batches_and_wait() -> None:
    assert _struck("ima:batch=7", {}, 10) == [7]
    assert _struck("ima:at=prefill", {}, 10) == []
    now = [0.0]
    injection = Injection(parse_faults("oom:after=5"), clock=lambda: now[0])
    injection.before_batch("decode", lambda: True)
    now[0] = 5.0
    with pytest.raises(SchedulerDied):
        injection.before_batch("decode", lambda: True)


def test_a_fault_of_the_padding_takes_a_batch_that_is_padded() -> None:
    toggles: dict[str, str | None] = {"cuda_graph": "on", "cuda_graph_padding": "on"}
    graph = Graph(backend="full", sizes=(1, 2, 4, 8))
    sizes = [4, 3, 2, 9, 5, 6, 7]
    assert [size for size in sizes if graph.pads(size)] == [3, 5, 6, 7], "9 has no graph at all"
    injection = Injection(parse_faults("ima:cuda_graph&cuda_graph_padding:batch=2"), toggles=toggles)
    struck = []
    for size in sizes:
        injection.before_batch("prefill", lambda: True)
        try:
            injection.before_batch("decode", lambda: True, padded=graph.pads(size))
        except SchedulerDied:
            struck.append(size)
    assert struck == [5], "the second that was padded"
    assert not Graph(backend="full", sizes=(1, 2, 4, 8), padding=False).pads(3)


# ---------------------------------------------------------------------- in a serving engine


@contextmanager
def _faulty(model_path: Path, faults: str, *args: str) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, faults)
        with running(model_path, *args) as engine:
            yield engine


def _http(engine: Engine) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://engine")


async def test_a_hang_stops_the_counters_and_not_the_health_route(model_path: Path) -> None:
    with running(model_path) as engine:
        client = connect(engine)
        before = (await client.generate({"text": PROMPT, "sampling_params": LONG | {"sampling_seed": 3}}))[0]
        async with _http(engine) as http:
            armed = (await http.post("/rltop/faults", json={"on": "hang:at=decode,batch=20"})).json()
            assert armed["faults"][0]["fault"] == "hang:at=decode,batch=20"
            answers: list[Any] = []
            asking = threading.Thread(target=_generate, args=(engine, answers, 3))
            asking.start()
            _until(lambda: engine.injection.standing == "hang")
            counters = engine.scheduler.stats.decode_tokens
            for path in ("/health", "/health_generate", "/v1/loads", "/model_info", "/metrics"):
                assert (await http.get(path)).status_code == 200, path
            assert engine.scheduler.stats.decode_tokens == counters
            assert engine.scheduler.stats.running == 1
            assert engine.open_requests == 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(http.get("/server_info"), 0.3)
            assert (await http.post("/rltop/faults", json={"off": "hang"})).json()["disarmed"] == 1
            asking.join(30)
        assert answers[0]["output_ids"] == before["output_ids"], "a hang changes no token"


def _generate(engine: Engine, answers: list[Any], seed: int) -> None:
    payload = {"text": PROMPT, "sampling_params": LONG | {"sampling_seed": seed}}
    answers += asyncio.run(connect(engine).generate(payload))


async def test_slow_prefill_is_slow_and_nothing_else(model_path: Path) -> None:
    with running(model_path) as engine:
        payload = {"text": PROMPT, "sampling_params": SHORT | {"sampling_seed": 3}}
        fast = (await connect(engine).generate(payload))[0]
    with _faulty(model_path, "slow-prefill:seconds=0.3") as engine:
        began = time.monotonic()
        slow = (await connect(engine).generate(payload))[0]
        assert time.monotonic() - began >= 0.3
    assert slow["output_ids"] == fast["output_ids"]


async def test_updates_are_refused_and_change_nothing_as_often_as_asked(model_path: Path) -> None:
    with _faulty(model_path, "update-refused:count=1") as engine:
        client = connect(engine)
        with pytest.raises(EngineRefused, match="update-refused"):
            await client.update_weights_from_tensor(other_weights().items(), "2")
        assert await client.weight_version() == "default"
        await client.update_weights_from_tensor(other_weights().items(), "2")
        assert await client.weight_version() == "2"


async def test_probes_fail_as_often_as_asked(model_path: Path) -> None:
    with _faulty(model_path, "probe-fails:count=2") as engine, running(model_path):
        client = connect(engine)
        assert [await client.health() for _ in range(3)] == [False, False, True]


async def test_tokens_are_0_after_a_resume_without_an_update(model_path: Path) -> None:
    with _faulty(model_path, "token-zero") as engine:
        client = connect(engine)
        payload = {"text": PROMPT, "sampling_params": SHORT | {"sampling_seed": 3}}
        before = (await client.generate(payload))[0]["output_ids"]
        await client.release_memory()
        await client.resume_memory()
        assert (await client.generate(payload))[0]["output_ids"] == [0, 0, 0]
        await client.update_weights_from_disk(model_path, "1")
        assert (await client.generate(payload))[0]["output_ids"] == before != [0, 0, 0]


@pytest.mark.parametrize(
    ("toggle", "flags"),
    [
        ("cuda_graph", ("--disable-cuda-graph",)),
        ("speculative", ("--speculative-algorithm", "NGRAM")),
        ("deepep", ("--moe-a2a-backend", "deepep")),
        ("radix_cache", ("--disable-radix-cache",)),
    ],
)
def test_an_ignored_flag_is_accepted_and_changes_nothing(toggle: str, flags: tuple[str, ...]) -> None:
    plain = read_fields(parse_args(["--model-path", "/m"], {}).sglang, {})
    ignoring = parse_args(["--model-path", "/m", *flags], {VARIABLE: f"flag-ignored:toggle={toggle}"})
    obeying = parse_args(["--model-path", "/m", *flags], {})
    assert read_fields(ignoring.sglang, {})[toggle] == plain[toggle] != read_fields(obeying.sglang, {})[toggle]
    assert flags[0] in ignoring.launch_command


async def _release_and_probe(engine: Engine, model: Path) -> int:
    await connect(engine).release_memory()
    return await _ask(engine, "GET", "/health")


async def _update(engine: Engine, model: Path) -> int:
    return await _ask(engine, "POST", "/update_weights_from_disk", str(model))


async def _retract_and_update(engine: Engine, model: Path) -> int:
    asking = threading.Thread(target=_generate, args=(engine, [], 3))
    asking.start()
    _until(lambda: engine.scheduler.stats.running)
    client = connect(engine)
    await client.pause("retract")
    status = await _update(engine, model)
    if not engine.scheduler.fatal:
        await client.resume_generation()
    asking.join(30)
    return status


@pytest.mark.parametrize(
    ("fault", "args", "act", "error"),
    [
        ("health-kills-released", (), _release_and_probe, "cannot be accessed from Triton (cpu tensor?)"),
        ("ngram-update-dies", ("--speculative-algorithm", "NGRAM"), _update, "'NGRAMWorker' object has no attribute"),
        ("retract-update-dies", (), _retract_and_update, "Cache flush failed after updating weights"),
    ],
)
async def test_requests_that_end_a_real_engine_end_this_one(
    model_path: Path, fault: str, args: tuple[str, ...], act: Any, error: str
) -> None:
    for faults, status, fatal in ((fault, 500, error), ("", 503 if act is _release_and_probe else 200, "")):
        with _faulty(model_path, faults, *args) as engine:
            assert await act(engine, model_path) == status
            assert fatal in engine.scheduler.fatal
            engine.scheduler.fatal = ""  # the fixture takes any death for a failure


async def _ask(engine: Engine, method: str, path: str, model: str = "") -> int:
    async with _http(engine) as http:
        return (await http.request(method, path, json={"model_path": model} if model else None)).status_code


async def test_a_stalled_ngram_engine_waits_for_its_first_sampled_request(model_path: Path) -> None:
    args = ("--speculative-algorithm", "NGRAM")
    with _faulty(model_path, "ngram-stall:speculative=NGRAM:seconds=0.3", *args) as engine:
        client = connect(engine)
        await client.generate({"text": PROMPT, "sampling_params": SHORT | {"temperature": 0}})
        assert engine.injection.report()[0]["strikes"] == 0
        began = time.monotonic()
        await client.generate({"text": PROMPT, "sampling_params": SHORT})
        assert time.monotonic() - began >= 0.3


async def test_bad_faults_are_refused_by_a_living_engine(engine: Engine) -> None:
    async with _http(engine) as http:
        refused = await http.post("/rltop/faults", json={"on": "boom"})
        assert refused.status_code == 400
        assert "no fault is called 'boom'" in refused.json()["message"]
        assert (await http.get("/rltop/faults")).json()["faults"] == []


# ---------------------------------------------------------------------- how processes end


@contextmanager
def _process(
    model_path: Path, directory: Path, faults: str, *args: str, env: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    spec = EngineSpec(
        kind="cpu",
        model_path=model_path,
        directory=directory,
        run="test",
        engine_id="e0",
        args=args,
        env={VARIABLE: faults, CRASH_VARIABLE: "0.1"} | (env or {}),
    )
    engine = launch_engine(spec)
    try:
        yield engine
    finally:
        engine.stop(5)


def _ask_until_death(engine: EngineProcess) -> None:
    with EngineClient(engine.url) as client, pytest.raises(EngineUnreachable):
        client.generate({"text": PROMPT, "sampling_params": LONG})


def _in_order(log: str, *parts: str) -> None:
    places = [log.find(part) for part in parts]
    assert -1 not in places, (parts[places.index(-1)], log)
    assert places == sorted(places), log


def test_an_illegal_access_ends_the_tree_as_sglang_ends(model_path: Path, tmp_path: Path) -> None:
    with _process(model_path, tmp_path, "ima:cuda_graph:at=decode,batch=10") as engine:
        (child,) = psutil.Process(engine.pid).children()
        assert child.name() == "rltop-scheduler"
        _ask_until_death(engine)
        assert engine.process.wait(30) == -signal.SIGKILL
        _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        _in_order(
            engine.log.read_text(),
            f"{INJECTED}: armed: ima:cuda_graph:at=decode,batch=10",
            f"{INJECTED}: strikes: ima:cuda_graph:at=decode,batch=10, at batch 10 (decode)",
            "Scheduler hit an exception: Traceback (most recent call last):",
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
            "Sleeping 0.1 seconds before crash diagnostics to let GPU activity settle.",
            "No live scheduler processes found; skipping py-spy and CUDA coredump.",
            f"kill_process_tree called: parent_pid={engine.pid}, include_parent=True, pid={engine.pid}",
        )


def test_with_core_dumps_the_log_names_the_kernel_and_the_scheduler_aborts(model_path: Path, tmp_path: Path) -> None:
    env = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_FILE": f"{tmp_path}/core/%h.%p.%t"}
    with _process(model_path, tmp_path, "ima:kernel=paged_kernel", env=env) as engine:
        (child,) = psutil.Process(engine.pid).children()
        _ask_until_death(engine)
        assert engine.process.wait(30) == -signal.SIGKILL
        _in_order(
            engine.log.read_text(),
            "coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)",
            "\tpaged_kernel\n",
            "coredump: Writing ELF file to",
            "Fatal Python error: Aborted",
            f"Subprocess scheduler_0 (pid={child.pid}) crashed with exit code -6. Triggering SIGQUIT for cleanup...",
            "SIGQUIT received.",
        )
        (core,) = (tmp_path / "core").iterdir()
        assert INJECTED in core.read_text()


def test_a_killed_scheduler_ends_the_tree(model_path: Path, tmp_path: Path) -> None:
    with _process(model_path, tmp_path, "") as engine:
        (child,) = psutil.Process(engine.pid).children()
        child.kill()
        assert engine.process.wait(30) == -signal.SIGKILL
        assert f"Subprocess scheduler_0 (pid={child.pid}) crashed with exit code -9." in engine.log_tail(20)


def test_the_watchdog_has_its_own_last_words(model_path: Path, tmp_path: Path) -> None:
    with _process(model_path, tmp_path, "watchdog:seconds=0.2", "--watchdog-timeout", "77") as engine:
        _ask_until_death(engine)
        assert engine.process.wait(30) == -signal.SIGKILL
        _in_order(
            engine.log.read_text(),
            "Scheduler watchdog timeout (self.watchdog_timeout=77, self.soft=False)",
            "SIGQUIT received.",
        )
        assert "Scheduler hit an exception" not in engine.log.read_text()


@pytest.mark.parametrize(
    ("faults", "status", "line"),
    [
        ("port-in-use", 1, "[Errno 98] error while attempting to bind on address"),
        ("start-dies", 1, "Rank 0 scheduler died during initialization (exit code: -9)."),
        ("oom:cuda_graph:while=capture", -9, "Received sigquit from a child process. It usually means the child"),
    ],
)
def test_starts_fail_like_sglangs(model_path: Path, tmp_path: Path, faults: str, status: int, line: str) -> None:
    with pytest.raises(RltopError) as failed, _process(model_path, tmp_path, faults):
        pass
    assert f"exit status {status}" in failed.value.why
    log = (tmp_path / "stdout.log").read_text()
    assert line in log
    assert f"{INJECTED}: strikes: {faults}" in log


def test_an_orphan_keeps_the_lock_of_a_dead_engine(model_path: Path, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        port, log = tmp_path / "port", tmp_path / "log"
        command = [sys.executable, "-m", "rltop.train.cpu_engine", "--model-path", str(model_path), "--port", "0"]
        with log.open("wb") as output:
            engine = subprocess.Popen(
                [*command, "--port-file", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
                start_new_session=True,
                env=os.environ | {VARIABLE: "orphan:seconds=60"},
            )
    try:
        _until(lambda: "INJECTED FAULT: orphan" in log.read_text())
        orphan = psutil.Process(int(log.read_text().split("INJECTED FAULT: orphan ")[1].split()[0]))
        _until(port.exists)
        (child,) = psutil.Process(engine.pid).children()
        engine.kill()
        engine.wait()
        _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert orphan.name() == "rltop-orphan"
        orphan.terminate()
        with (tmp_path / "lock").open() as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        orphan.kill()
        _until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
        with (tmp_path / "lock").open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        engine.kill()
        engine.wait()


def test_sigterm_ends_0_5_14_by_its_own_sigkill_after_the_drain(model_path: Path, tmp_path: Path) -> None:
    with _process(model_path, tmp_path, "", "--sglang-version", "0.5.14") as engine:
        engine.process.terminate()
        assert engine.process.wait(30) == -signal.SIGKILL
        _in_order(engine.log_tail(20), "SIGTERM received.", "kill_process_tree called")


def test_a_stuck_drain_needs_sigkill(model_path: Path, tmp_path: Path) -> None:
    with _process(model_path, tmp_path, "drain-stuck") as engine:
        assert engine.stop(timeout_s=0.5) == -signal.SIGKILL
        assert f"{INJECTED}: strikes: drain-stuck" in engine.log_tail(20)


def test_every_generation_draws_its_own_hazards(model_path: Path) -> None:
    args = parse_args(["--model-path", str(model_path), "--port", "1"], {VARIABLE: "ima:hazard=0.02"})

    def struck(marker: str) -> int:
        injection = build(args, {MARKER: marker}).injection
        for batch in range(1, 5000):
            try:
                injection.before_batch("decode", lambda: True)
            except SchedulerDied:
                return batch
        raise AssertionError("it never struck")

    assert len({struck(f"run/0/{generation}") for generation in range(5)}) > 1
    assert struck("run/0/1") == struck("run/0/1")
