"""Hooks: who is told of a failing check, and that nothing of theirs can hurt the daemon."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon import hooks as hooks_module
from rltop.daemon.hooks import QUEUE, HookOptions, Hooks

FAIL: dict[str, Any] = {"id": "train.nan", "status": "fail", "cause": "NaN", "consequence_of": []}
WRITE = "import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(os.environ['RLTOP_CHECK'] + sys.stdin.read())"


class Desk:
    """Hooks that say what they have to say into a list."""

    def __init__(self, *, answer: int = 200, **options: Any) -> None:
        self.told: list[str] = []
        self.posted: list[dict[str, Any]] = []
        self.answer = answer
        self.hooks = Hooks(
            HookOptions(**options), run="tiny", told=lambda _level, text: self.told.append(text), post=self._post
        )

    async def _post(self, url: str, body: bytes) -> int:
        self.posted.append(json.loads(body))
        return self.answer

    async def fire(self, *verdicts: dict[str, Any]) -> None:
        for verdict in verdicts:
            self.hooks.fire(verdict, "pass")
        await self.hooks.finish(patience_s=30.0)


async def test_a_failing_check_reaches_command_and_webhook_with_the_same_document(tmp_path: Path) -> None:
    out = tmp_path / "out"
    desk = Desk(on_fail=(sys.executable, "-c", WRITE, str(out)), webhook="https://x.example/hook")
    await desk.fire(FAIL)
    text = out.read_text()
    assert text.startswith("train.nan{")
    document = json.loads(text.removeprefix("train.nan"))
    assert document == desk.posted[0] == {"schema": 1, "run": "tiny", "from": "pass", "verdict": FAIL}
    assert desk.told == []


@pytest.mark.parametrize(
    ("verdict", "notify", "count"),
    [
        (FAIL, "fail", 1),
        ({**FAIL, "status": "warn"}, "fail", 0),
        ({**FAIL, "status": "warn"}, "warn", 1),
        ({**FAIL, "status": "pass"}, "warn", 0),
        ({**FAIL, "consequence_of": ["args.batch"]}, "fail", 0),
        ({**FAIL, "muted": {"reason": "known"}}, "fail", 0),
    ],
)
async def test_only_root_causes_that_nobody_muted_are_told(verdict: dict[str, Any], notify: str, count: int) -> None:
    desk = Desk(webhook="https://x.example/hook", notify=notify)
    await desk.fire(verdict)
    assert len(desk.posted) == count


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("/no/such/program",), "No such file"),
        ((sys.executable, "-c", "import sys; sys.exit('the pager is down')"), "exit code 1: the pager is down"),
    ],
)
async def test_a_hook_that_fails_is_said(argv: tuple[str, ...], text: str) -> None:
    desk = Desk(on_fail=argv)
    await desk.fire(FAIL)
    assert len(desk.told) == 1
    assert text in desk.told[0]


async def test_a_hook_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_module, "COMMAND_S", 0.2)
    desk = Desk(on_fail=(sys.executable, "-c", "import time; time.sleep(600)"))
    await desk.fire(FAIL)
    assert "was killed" in desk.told[0]


async def test_a_webhook_that_refuses_is_said_without_its_url() -> None:
    desk = Desk(webhook="https://x.example/secret", answer=403)
    await desk.fire(FAIL)
    assert desk.told == ["the webhook hook failed: it answered 403"]


async def test_a_flood_is_counted_not_kept() -> None:
    desk = Desk(webhook="https://x.example/hook")
    await desk.fire(*[FAIL] * (QUEUE + 10))
    assert len(desk.posted) <= QUEUE
    assert sum("more checks fail at once" in text for text in desk.told) == 1


async def test_the_real_post_says_why_it_could_not() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/secret"
    with pytest.raises(OSError, match=r"Protocol|Read|Disconnected") as caught:
        await hooks_module._post(url, b"{}")
    assert "secret" not in str(caught.value)
    server.close()
    await server.wait_closed()
