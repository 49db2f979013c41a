"""What happens outside when a check fails: a command of the operator, a webhook.

Both get the same JSON document (`docs/cli.md`). Only root causes are told, once per change of status, and never a muted
check. A hook that hangs, fails or can not be started is said in the event feed and changes nothing else: hooks run
beside the daemon's loop, a few at a time, the rest wait in a short queue, and what does not fit is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

AT_ONCE = 2
QUEUE = 32
COMMAND_S = 60.0
"""A command that runs longer is killed with its children."""
WEBHOOK_S = 10.0
MAX_TAIL = 300
SCHEMA = 1

Told = Callable[[Literal["info", "warn"], str], object]
Post = Callable[[str, bytes], Awaitable[int]]
"""Sends a body to a URL and returns the status; raises OSError or ValueError with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOptions:
    """`[checks]` of the configuration."""

    on_fail: tuple[str, ...] = ()
    """argv; the document comes on its stdin, RLTOP_RUN, RLTOP_CHECK and RLTOP_STATUS are in its environment."""
    folder: str | None = None
    """Where it is run: the folder of the configuration, so that words like `tell.py` mean what they mean there."""
    webhook: str = ""
    """The document is POSTed here."""
    notify: Literal["fail", "warn"] = "fail"
    """From which status on."""


class Hooks:
    """Fires the hooks of one run."""

    def __init__(self, options: HookOptions, *, run: str, told: Told, post: Post | None = None) -> None:
        self._options = options
        self._run = run
        self._told = told
        self._post = post or _post
        self._waiting: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue(QUEUE)
        self._workers: list[asyncio.Task[None]] = []
        self._dropped = 0

    def fire(self, verdict: Mapping[str, Any], was: str | None) -> None:
        """A verdict changed its status from `was`. Returns at once."""
        options = self._options
        loud = ("fail",) if options.notify == "fail" else ("fail", "warn")
        if not (options.on_fail or options.webhook) or verdict["status"] not in loud:
            return
        if verdict.get("consequence_of") or verdict.get("muted"):
            return
        try:
            self._waiting.put_nowait({"schema": SCHEMA, "run": self._run, "from": was, "verdict": dict(verdict)})
        except asyncio.QueueFull:
            self._dropped += 1
            if self._dropped == 1:
                self._told("warn", f"more checks fail at once than hooks can tell: {verdict['id']} was not told")
            return
        if len(self._workers) < AT_ONCE:
            self._workers.append(asyncio.get_running_loop().create_task(self._work()))

    async def finish(self, patience_s: float = 5.0) -> None:
        """Give what waits a moment, then end it (the daemon ends)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._waiting.join()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            document = await self._waiting.get()
            try:
                await self._tell(document)
            finally:
                self._waiting.task_done()

    async def _tell(self, document: Mapping[str, Any]) -> None:
        body = json.dumps(document, default=str).encode()
        verdict = document["verdict"]
        if self._options.on_fail:
            await self._guarded("on_fail", self._command(body, verdict))
        if self._options.webhook:
            await self._guarded("webhook", self._send(body))

    async def _guarded(self, name: str, work: Awaitable[str]) -> None:
        try:
            problem = await work
        except (OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        if problem:
            self._told("warn", f"the {name} hook failed: {problem}")

    async def _command(self, body: bytes, verdict: Mapping[str, Any]) -> str:
        argv = self._options.on_fail
        told = {"RLTOP_RUN": self._run, "RLTOP_CHECK": str(verdict["id"]), "RLTOP_STATUS": str(verdict["status"])}
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd=self._options.folder,
            env={**os.environ, **told},
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                _, errors = await process.communicate(body)
        except TimeoutError:
            return f"{argv[0]} ran longer than {COMMAND_S:.0f} s and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        tail = errors.decode("utf-8", "replace").strip()[-MAX_TAIL:]
        return f"{argv[0]} ended with exit code {process.returncode}: {tail}" if process.returncode else ""

    async def _send(self, body: bytes) -> str:
        status = await self._post(self._options.webhook, body)
        return "" if 200 <= status < 300 else f"it answered {status}"


async def _post(url: str, body: bytes) -> int:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=WEBHOOK_S) as client:
            answer = await client.post(url, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        # Without the URL: it may hold a secret, and events are shown to every viewer.
        raise OSError(f"{type(error).__name__}: {str(error).replace(url, '<url>')}") from None
    return answer.status_code
