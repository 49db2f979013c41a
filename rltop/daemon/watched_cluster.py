"""The cluster and the GPUs of a watched run: Ray's dashboard over HTTP, a file with `ray status`, and the driver here.

Ray is asked as its own tools ask it (`/api/v0/…`, `/api/jobs/`), only to read, all at once and with a deadline. The key
`cluster` is what it said; what does not answer leaves the key with its error and its age.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltop.checks.found import RaySnapshot
from rltop.daemon.core import Core
from rltop.evidence.ray_status import parse

if TYPE_CHECKING:
    import httpx

EVERY_S = 10.0
ASK_S = 6.0
MOST_BYTES = 16 << 20
MOST_ROWS = 1_000
MOST_TEXT = 300
NODES = "/api/v0/nodes"
ACTORS = "/api/v0/actors"
GROUPS = "/api/v0/placement_groups"
JOBS = "/api/jobs/"
PATHS = (NODES, ACTORS, GROUPS, JOBS)

Ask = Callable[[str], Awaitable[Any]]
"""URL -> the JSON of its answer. Raises OSError with a sentence where there is none."""


class Cluster:
    """Asks Ray, or reads the file, again and again. changed: called when there is another state for the checks."""

    def __init__(
        self,
        core: Core,
        place: str,
        *,
        changed: Callable[[], None],
        ask: Ask | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._core = core
        self._place = place
        self._changed = changed
        self._ask = ask or Asker()
        self._sleep = sleep
        self._snapshot: RaySnapshot | None = None
        self._problem = ""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self.once()
                await self._sleep(EVERY_S)
        finally:
            if isinstance(self._ask, Asker):
                await self._ask.close()

    def snapshots(self) -> list[RaySnapshot]:
        """What the rules see of it: the newest state."""
        return [self._snapshot] if self._snapshot is not None else []

    async def once(self) -> None:
        """Ask once."""
        try:
            if "://" in self._place:
                cell, snapshot = await self._over_http()
            else:
                cell, snapshot = await asyncio.to_thread(read_status, Path(self._place))
        except OSError as error:
            self._failed(str(error))
            return
        if self._problem:
            self._core.event("log", "info", f"Ray answers again ({self._place})", "ray")
            self._problem = ""
        self._core.set("cluster", {**cell, "address": self._place, "error": None, "seen": self._core.now()})
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._changed()

    def _failed(self, why: str) -> None:
        before = self._core.table.get("cluster") or {"address": self._place, "seen": None}
        self._core.set("cluster", {**before, "error": why[:MOST_TEXT]})
        if not self._problem:
            self._core.event("log", "warn", f"Ray does not answer at {self._place}: {why}", "ray")
        self._problem = why

    async def _over_http(self) -> tuple[dict[str, Any], RaySnapshot]:
        base = self._place.rstrip("/")
        query = f"?limit={MOST_ROWS}&detail=true"
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_or_error(self._ask(base + path + ("" if path == JOBS else query)))) for path in PATHS
            ]
        answers = [task.result() for task in tasks]
        if isinstance(answers[0], OSError):
            raise answers[0]
        nodes, actors, groups, jobs = (rows_of(answer) for answer in answers)
        return cell_of(nodes, actors, groups, jobs), snapshot_of(nodes, groups)


async def _or_error(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except OSError as error:
        return error


class Asker:
    """GET of small JSON documents over connections that stay."""

    def __init__(self) -> None:
        self._http: httpx.AsyncClient | None = None

    async def __call__(self, url: str) -> Any:
        """Raises OSError."""
        if self._http is None:
            import httpx

            # Clusters are inside; a proxy from the environment would only be in the way.
            self._http = httpx.AsyncClient(timeout=ASK_S, trust_env=False)
        return await _get(self._http, url)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()


async def ask_json(url: str) -> Any:
    """One GET. Raises OSError."""
    asker = Asker()
    try:
        return await asker(url)
    finally:
        await asker.close()


async def _get(http: httpx.AsyncClient, url: str) -> Any:
    import httpx

    from rltop.engines.bounded import PLAIN, Unreadable, fetch

    try:
        status, body = await fetch(http, http.build_request("GET", url, headers=PLAIN), timeout_s=ASK_S)
    except (httpx.TimeoutException, TimeoutError) as error:
        raise OSError(f"no whole answer within {ASK_S:.0f} s") from error
    except Unreadable as error:
        raise OSError(f"its answer is {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    if status in (401, 403):
        raise OSError(f"it wants a token (status {status}), and rltop has none to give")
    if status != 200:
        raise OSError(f"{url} answers with status {status}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise OSError(f"{url} answers with something that is not JSON") from None


def rows_of(answer: Any) -> list[Mapping[str, Any]]:
    """The rows of an answer of the state API (`data.result.result`) or the job API (a list); none of any other."""
    found = answer
    for key in ("data", "result", "result"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return [row for row in found[:MOST_ROWS] if isinstance(row, dict)] if isinstance(found, list) else []


def cell_of(
    nodes: Sequence[Mapping[str, Any]],
    actors: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    jobs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The key `cluster`."""
    alive = [node for node in nodes if node.get("state") == "ALIVE"]
    gpus = sum(_amount(node, "GPU") for node in alive)
    return {
        "nodes": {"alive": len(alive), "dead": len(nodes) - len(alive)},
        "gpus": gpus,
        "cpus": sum(_amount(node, "CPU") for node in alive),
        "actors": dict(Counter(str(actor.get("state")) for actor in actors)),
        "dead_actors": [
            {
                "class": str(actor.get("class_name") or ""),
                "pid": actor.get("pid"),
                "node": str(actor.get("node_id") or "")[:12],
                "why": _why(actor)[:MOST_TEXT],
            }
            for actor in actors
            if actor.get("state") == "DEAD" and not _meant(actor)
        ][:20],
        "groups": dict(Counter(str(group.get("state")) for group in groups)),
        "waiting": [
            {"name": str(group.get("name") or ""), "gpus": sum(b.get("GPU", 0.0) for b in _bundles(group))}
            for group in groups
            if group.get("state") in ("PENDING", "RESCHEDULING")
        ][:20],
        "jobs": [
            {
                "id": str(job.get("submission_id") or job.get("job_id") or ""),
                "status": str(job.get("status") or ""),
                "message": str(job.get("message") or "")[:MOST_TEXT],
                "entrypoint": str(job.get("entrypoint") or "")[:MOST_TEXT],
            }
            for job in jobs[-20:]
        ],
    }


def snapshot_of(nodes: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> RaySnapshot:
    """What the rules know of a cluster. What is in use is not told here: the bundles that are placed are."""
    alive = [node for node in nodes if node.get("state") == "ALIVE"]
    totals = tuple(_resources(node) for node in alive)
    placed = [bundle for group in groups if group.get("state") == "CREATED" for bundle in _bundles(group)]
    waiting = [group for group in groups if group.get("state") in ("PENDING", "RESCHEDULING")]
    usage = {
        name: (sum(bundle.get(name, 0.0) for bundle in placed), sum(node.get(name, 0.0) for node in totals))
        for name in ("CPU", "GPU")
        if any(name in node for node in totals)
    }
    demands = tuple((bundle, 1, str(group.get("strategy") or "")) for group in waiting for bundle in _bundles(group))
    return RaySnapshot("ray", None, len(alive), 0, usage, demands, {}, totals)


def _resources(node: Mapping[str, Any]) -> dict[str, float]:
    found = node.get("resources_total")
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)} if isinstance(found, dict) else {}


def _amount(node: Mapping[str, Any], name: str) -> float:
    return _resources(node).get(name, 0.0)


def _bundles(group: Mapping[str, Any]) -> list[dict[str, float]]:
    found = group.get("bundles")
    kept = []
    for bundle in found[:MOST_ROWS] if isinstance(found, list) else ():
        asked = bundle.get("unit_resources") or bundle.get("unitResources") if isinstance(bundle, dict) else None
        if isinstance(asked, dict):
            kept.append({str(k): float(v) for k, v in asked.items() if isinstance(v, int | float)})
    return kept


def _why(actor: Mapping[str, Any]) -> str:
    cause = actor.get("death_cause")
    if isinstance(cause, dict):
        for value in cause.values():
            if isinstance(value, dict) and value.get("error_message"):
                return str(value["error_message"])
    return ""


def _meant(actor: Mapping[str, Any]) -> bool:
    """Its end was wanted: the job is over, or nobody holds it any more."""
    why = _why(actor)
    return any(word in why for word in ("ray.kill", "INTENDED", "owner has died", "all references", "out of scope"))


def read_status(path: Path) -> tuple[dict[str, Any], RaySnapshot]:
    """A file with the output of `ray status`. Raises OSError where it cannot be read or is none."""
    with path.open("rb") as file:
        snapshot = parse(file.read(4 << 20).decode("utf-8", "replace"), path.name, path.stem)
    if not snapshot.nodes and not snapshot.usage and not snapshot.demands:
        raise OSError("it has no nodes, no usage and no demands: is it the output of `ray status`?")
    used, total = snapshot.usage.get("GPU", (0.0, 0.0))
    cell = {
        "nodes": {"alive": snapshot.nodes, "dead": 0},
        "gpus": total,
        "gpus_used": used,
        "cpus": snapshot.usage.get("CPU", (0.0, 0.0))[1],
        "waiting": [
            {"name": strategy, "gpus": bundle.get("GPU", 0.0) * count} for bundle, count, strategy in snapshot.demands
        ][:20],
    }
    return cell, snapshot
