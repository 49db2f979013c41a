"""Several trainer ranks as processes of a test, over gloo and without Ray: who talks to whom is the same."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rltop.train.layout import Layout, Place

Work = Callable[..., Any]
"""Called on every rank as `work(place, store, *args)`; a module's function, so that a new process can import it."""

TIMEOUT_S = 120


def run_ranks(layout: Layout, directory: Path, work: Work, *args: Any) -> list[Any]:
    """What `work` returned on every rank. Fails with the first traceback, and leaves no process behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.preload"])
    meeting = directory / "store"
    pipes, processes = [], []
    for rank in range(layout.world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, layout.place(rank), str(meeting), work, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for at, pipe in enumerate(pipes) if at not in results], timeout=TIMEOUT_S)
        assert ready, f"no answer in {TIMEOUT_S} s; ranks that answered: {sorted(results)}"
        for at, pipe in enumerate(pipes):
            if pipe in ready:
                good, value = pickle.loads(pipe.recv_bytes())
                assert good, f"rank {at}: {value}"
                results[at] = value
    return [results[at] for at in range(len(pipes))]


def _rank(pipe: Any, place: Place, meeting: str, work: Work, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        from torch import distributed

        store = distributed.FileStore(meeting, place.layout.world)  # type: ignore[attr-defined]  # missing in the stub
        answer: tuple[bool, Any] = (True, work(place, store, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain bytes: torch would send a handle to shared memory that dies with this process.
    pipe.send_bytes(pickle.dumps(answer))
