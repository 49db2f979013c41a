"""`rltop watch`: a daemon and its dashboard over a run that knows nothing of rltop: its logs, engines, Ray cluster.

Everything that is named is looked at before anything starts, and one mistake starts nothing. Of an engine `/model_info`
(cheap, of every release) is asked and, by the daemon, `/server_info`, `/metrics` and `/v1/loads`; never `/health` or
`/generate`, which run the model.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltop.cli.output import clean, note, print_json
from rltop.cli.signals import held, raised
from rltop.errors import RltopError
from rltop.runs import RunInfo

ASK_S = 5.0
Ask = Callable[[str], tuple[int, bytes]]
"""Address -> status and body. Raises OSError when nobody answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subjects:
    """What is to be watched, as it was typed."""

    engines: Sequence[str] = ()
    logs: Sequence[str] = ()
    ray: str = ""
    args: str = ""
    start: Literal["start", "end"] = "start"
    """Whether logs that are there are read from their start."""
    directory: Path = field(default_factory=Path.cwd)
    """Where relative paths count from."""

    def config(self) -> dict[str, Any]:
        """The daemon's key `watch`. Raises RltopError for the first thing that can not be watched."""
        from rltop.cli.watch_places import checked_args, checked_logs, checked_ray
        from rltop.daemon.watched_cluster import ask_json

        logs = checked_logs(self.logs, self.directory)
        args = checked_args(self.args, self.directory) if self.args else ""
        engines = checked(self.engines, _get)
        ray = checked_ray(self.ray, self.directory, ask_json) if self.ray else ""
        return {"engines": engines, "logs": logs, "from": self.start, "ray": ray, "args": args}


def watch(
    subjects: Subjects,
    *,
    name: str | None,
    control: bool,
    keep: bool,
    headless: bool,
    as_json: bool,
    ascii_only: bool,
) -> int:
    """Look at what is to be watched, start the daemon, show. Returns the exit code.

    Raises RltopError: a file that is missing, a URL that is none or is no SGLang server (exit code 2), an engine or a
    dashboard of Ray that does not answer (1), no terminal and not headless. What is named is looked at first.
    """
    from rltop.cli.watch_places import log_doubts

    config = subjects.config()
    for line in log_doubts(config["logs"]):
        note(clean(line))
    if not headless:
        from rltop.cli.attach import require_terminal

        require_terminal("watch", "rltop watch … --headless; then rltop attach, get, engine list")
    with raised(), _started(config, name, keep=keep or headless) as run:
        if headless:
            if as_json:
                print_json({"run": run.name, "pid": run.pid, "path": str(run.path), **config})
            else:
                print(run.name)
            return 0
        from rltop.cli.attach import show
        from rltop.client import local_client
        from rltop.tui.app import RltopApp

        client = local_client(run, role="control" if control else "view")
        return show(RltopApp(client, control=control, ascii_only=ascii_only, title="watch"))


@contextlib.contextmanager
def _started(config: dict[str, Any], name: str | None, *, keep: bool) -> Iterator[RunInfo]:
    from rltop.daemon.spawn import start_daemon, stop_daemon
    from rltop.daemon.tether import Tether

    run: RunInfo | None = None
    tether = None if keep else Tether()  # a dashboard that is killed takes its daemon along
    try:
        with held():
            run = start_daemon(name, config={"watch": config}, tether=tether)
        yield run
    finally:
        if run is not None and keep:
            note(f"run {run.name} goes on: rltop attach {run.name}   (rltop down {run.name} stops it)")
        elif run is not None:
            with held(lambda: note("still stopping …")):
                stop_daemon(run)


def checked(urls: Sequence[str], ask: Ask) -> list[str]:
    """The URLs in one form, each once, each of them an SGLang server. Raises RltopError for the first that is not."""
    found: list[str] = []
    for typed in urls:
        url = _normal(typed)
        if url not in found:
            _check(typed, url, ask)
            found.append(url)
    return found


def _normal(typed: str) -> str:
    text = typed if "://" in typed else f"http://{typed}"
    try:
        parts = urllib.parse.urlsplit(text)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        right = right and ("://" in typed or parts.port is not None)  # a word alone is no address
    except ValueError:
        right = False
    if not right:
        do = "rltop watch --engine http://host:30000"
        raise RltopError(f"{typed!r} is no URL of an engine", where="watch --engine", why="http://HOST:PORT", do=do)
    return text.rstrip("/")


def _check(typed: str, url: str, ask: Ask) -> None:
    status, body = 0, b""
    for path in ("/model_info", "/get_model_info"):  # the second is the name of older releases
        try:
            status, body = ask(url + path)
        except OSError as error:
            raise RltopError(
                "the engine does not answer",
                where=f"watch --engine {typed}",
                why=str(error),
                do="is the port right, and can it be reached from here?",
                exit_code=1,
            ) from None
        if status != 404:
            break
    if status in (401, 403):
        why = f"{url}/model_info says {status}"
        do = "an engine that was started with --api-key can not be watched"
        raise RltopError("the engine wants a key", where=f"watch --engine {typed}", why=why, do=do)
    if (wrong := _not_sglang(status, body)) is not None:
        raise RltopError("this is no SGLang server", where=f"watch --engine {typed}", why=f"{url}/model_info {wrong}")


def _not_sglang(status: int, body: bytes) -> str | None:
    if status != 200:
        return f"answers with status {status}"
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return "answers with something that is not JSON"
    if not isinstance(found, dict) or not isinstance(found.get("model_path"), str) or "is_generation" not in found:
        return "does not name a model as SGLang does"
    return None


def _get(address: str) -> tuple[int, bytes]:
    """Within ASK_S, however slowly it comes, and up to a limit."""
    import asyncio

    import httpx

    from rltop.engines.bounded import PLAIN, Unreadable, fetch

    async def ask() -> tuple[int, bytes]:
        # Engines are inside the cluster; a proxy from the environment would only be in the way.
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=False) as http:
            return await fetch(http, http.build_request("GET", address, headers=PLAIN), timeout_s=ASK_S)

    try:
        return asyncio.run(ask())
    except (httpx.TimeoutException, TimeoutError) as error:
        raise OSError(f"no whole answer within {ASK_S:.0f} s") from error
    except Unreadable as error:
        raise OSError(f"its answer is {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
