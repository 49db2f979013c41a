"""The local launcher with the real CPU engine: a port that it found itself, a good end, and a loop that runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.client import AsyncEngineClient
from rltop.engines.host import Host
from rltop.engines.launcher import Launched, LaunchSpec, Look
from rltop.engines.local import LocalLauncher
from tests.engines.stand_in import PATIENCE_S, spec


@pytest.fixture
async def launcher() -> AsyncIterator[LocalLauncher]:
    made = LocalLauncher()
    yield made
    await made.close()


def cpu(model_path: Path, tmp_path: Path, **fields: Any) -> LaunchSpec:
    return spec(tmp_path, kind="cpu", model_path=str(model_path), python=sys.executable, **fields)


async def look_until(launcher: LocalLauncher, launched: Launched, **wanted: object) -> Look:
    """The first look whose fields are as wanted (True stands for any true value)."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen = await launcher.look(launched)
        if all(
            bool(getattr(seen, name)) if value is True else getattr(seen, name) == value
            for name, value in wanted.items()
        ):
            return seen
        assert time.monotonic() < deadline, (wanted, seen, await launcher.read_log(launched, 0, 1 << 20))
        await asyncio.sleep(0.05)


async def test_the_cpu_engine_reports_the_port_that_it_found(
    launcher: LocalLauncher, model_path: Path, tmp_path: Path
) -> None:
    launched = await launcher.start(cpu(model_path, tmp_path))
    try:
        assert (await launcher.look(launched)).port == 0
        seen = await look_until(launcher, launched, port=True)
        async with AsyncEngineClient(f"http://{launched.host}:{seen.port}") as client:
            assert (await client.server_info())["port"] == seen.port
        left = await launcher.remains(launched)
        assert f"held by pid {launched.pid}" in left.port_holder
        assert {pid for pid, _ in (await launcher.look(launched)).children} | {launched.pid} == {
            pid for pid, _ in left.processes
        }
        await launcher.terminate(launched)
        seen = await look_until(launcher, launched, alive=False, lock_held=False)
        assert (seen.exit_code, seen.children) == (0, ())
        assert (await launcher.remains(launched)).clean
        log = await launcher.read_log(launched, 0, 1 << 20)
        assert len(log) == seen.log_size
        assert b"stand-in for SGLang" in log
    finally:
        await launcher.kill(launched)


async def test_the_engines_own_error_is_in_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    launched = await launcher.start(cpu(tmp_path / "nowhere", tmp_path))
    seen = await look_until(launcher, launched, alive=False)
    assert seen.exit_code == 2
    assert b"cannot read the checkpoint" in await launcher.read_log(launched, 0, 1 << 20)


async def test_a_slow_call_holds_up_neither_the_loop_nor_other_calls(tmp_path: Path) -> None:
    class Slow(Host):
        def kill(self, launched: Launched) -> None:
            time.sleep(1)

    launcher = LocalLauncher(Slow())
    launched = await launcher.start(spec(tmp_path, "sleep 600"))
    killing = asyncio.ensure_future(launcher.kill(launched))
    for _ in range(5):
        assert (await launcher.look(launched)).alive
    assert not killing.done()
    await killing
    await launcher.close()
    Host().kill(launched)
