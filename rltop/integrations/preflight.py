"""Whether the hooks can be imported on every node of a Ray cluster, asked of a worker on each.

A worker whose setup hook cannot be imported never starts, and the job then waits without a word. So the same runtime
env, without the hook, is tried first. `probe` travels by value: where rltop is missing it must still be able to say so.

Failure policy: a node that does not answer, or whose environment cannot be made, is a `Node` with problems; only a
cluster that cannot be reached at all raises (`RltopError`).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.engines.ray_path import without_current_directory
from rltop.errors import RltopError

PATIENCE_S = 90.0
"""For all nodes together: the first worker of an environment waits for its upload."""
REACH_S = 5.0
HOOK = "rltop.integrations.slime.setup"


@dataclass(frozen=True, slots=True)
class Node:
    """What one node says."""

    host: str
    address: str
    problems: tuple[str, ...]
    """Why a worker of the job would not start, or would tell nothing; empty: fine."""
    found: str = ""
    """Where rltop lies there, and with what Python."""


def probe(hook: str, ingest: str) -> dict[str, Any]:
    """Runs in a worker, with nothing but the standard library at hand."""
    import importlib
    import os
    import platform
    import socket as sockets
    import urllib.parse

    problems = []
    found = f"Python {platform.python_version()}"
    module, _, name = hook.rpartition(".")
    try:
        loaded = importlib.import_module(module)
        if not callable(getattr(loaded, name, None)):
            problems.append(f"{module} ({loaded.__file__}) has no {name}: an older rltop lies there")
        found += f", {loaded.__file__}"
    except BaseException as error:
        problems.append(f"cannot import {module}: {type(error).__name__}: {error}")
    for needed in ("msgpack", "zmq"):
        try:
            importlib.import_module(needed)
        except BaseException as error:
            problems.append(f"cannot import {needed}, without which nothing is sent: {error}")
    words = ingest.split()
    local = next((w[6:] for w in words if w.startswith("ipc://") and os.path.exists(w[6:])), None)
    remote = next((urllib.parse.urlsplit(w) for w in words if w.startswith("curve://")), None)
    if words and local is None and remote is None:
        problems.append("the daemon is on another machine and takes records on its own only")
    elif local is None and remote is not None:
        key = urllib.parse.unquote(remote.path)
        if not os.access(key, os.R_OK):
            problems.append(f"cannot read the key file {key}")
        try:
            sockets.create_connection((remote.hostname or "", remote.port or 0), timeout=5).close()
        except OSError as error:
            problems.append(f"cannot reach the daemon at {remote.hostname}:{remote.port}: {error}")
    return {"problems": problems, "found": found}


def preflight(
    runtime_env: Mapping[str, Any], *, address: str, ingest: str, patience_s: float = PATIENCE_S
) -> list[Node]:
    """Ask every living node. runtime_env: of the job; its hook and RLTOP_INGEST are left out for the question.

    Raises RltopError: no Ray here, or no cluster at `address`.
    """
    try:
        import ray
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        where, do = "slime-env --preflight", "run it in the Python that submits the job"
        raise RltopError("Ray is not installed here", where=where, why=str(error), do=do) from None
    _reach(address)
    given = {key: value for key, value in runtime_env.items() if key != "worker_process_setup_hook"}
    variables = {k: v for k, v in dict(given.get("env_vars") or {}).items() if not k.startswith("RLTOP_")}
    try:
        ray.init(
            address=address,
            runtime_env={**given, "env_vars": variables},
            log_to_driver=False,
            logging_level="ERROR",
            namespace="rltop-preflight",
            job_config=without_current_directory(address),
        )
    except Exception as error:
        what = f"cannot join the Ray cluster {address!r}"
        where, do = "slime-env --preflight", "--ray HOST:6379, or ray://HOST:10001 from outside the cluster"
        raise RltopError(what, where=where, why=_short(error), do=do, exit_code=1) from None
    try:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        nodes = [node for node in ray.nodes() if node.get("Alive")]
        ask = ray.remote(num_cpus=0, max_retries=0)(probe)
        asked = {}
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[ask.options(scheduling_strategy=here).remote(HOOK, ingest)] = node
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience_s)
        return [_node(node, ref, ref in done, ray, patience_s) for ref, node in asked.items()]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise RltopError when nobody listens there: `ray.init` itself would try for many minutes."""
    text = (os.environ.get("RAY_ADDRESS") or "") if address == "auto" else address
    scheme, _, place = text.rpartition("://")
    host, _, port = place.partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto" and "local": Ray finds it in its own files
    do = "--ray HOST:6379, or ray://HOST:10001 from outside the cluster"
    if scheme not in ("", "ray"):
        why = "that is the address of the dashboard, which takes jobs; the question needs a worker on every node"
        raise RltopError(f"cannot ask {address!r}", where="slime-env --preflight", why=why, do=do)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        what = f"no Ray cluster at {text}"
        raise RltopError(what, where="slime-env --preflight", why=str(error), do=do, exit_code=1) from None


def refuse(nodes: Sequence[Node]) -> None:
    """Raise RltopError when a node has a problem, with its name and the reason."""
    bad = [node for node in nodes if node.problems]
    if not bad:
        return
    lines = [f"{node.host} ({node.address}): {'; '.join(node.problems)}" for node in bad[:10]]
    lines += [f"and {len(bad) - 10} more"] if len(bad) > 10 else []
    what = f"{len(bad)} of {len(nodes)} nodes are not ready: workers there would not start, or tell nothing"
    missing = any("cannot import rltop" in problem for node in bad for problem in node.problems)
    keys = any("key file" in problem for node in bad for problem in node.problems)
    do = "install rltop there, or leave out --installed and --path: then the job brings it along"
    if not missing:
        do = "put the key where every node sees it: --key-file /shared/NAME.key"
        do = do if keys else "let the daemon listen where every node can reach it: --ingest-tcp HOST:PORT"
    raise RltopError(what, where="slime-env --preflight", why="\n       ".join(lines), do=do, exit_code=1)


def _node(node: Mapping[str, Any], ref: Any, done: bool, ray: Any, patience_s: float) -> Node:
    host, address = str(node.get("NodeManagerHostname")), str(node.get("NodeManagerAddress"))
    if not done:
        return Node(host, address, (f"no worker answered within {patience_s:.0f} s",))
    try:
        answer = ray.get(ref)
    except Exception as error:
        return Node(host, address, (_short(error),))
    return Node(host, address, tuple(map(str, answer["problems"])), str(answer["found"]))


def _short(error: BaseException) -> str:
    """The last line that says something, of an error that may hold a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:400]
