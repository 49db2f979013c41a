"""Whether samples may be put to an engine: it serves, its memory is there, its tokenizer is the dump's.

Failure policy: `NotServing` rather than a request to an engine that is paused (it never answers) or released (SGLang
dies of it). SGLang says of a pause (`/ready`), but nothing of a release: a run of rltop may know, or a running request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rltop.cli.connect import running
from rltop.cli.output import note
from rltop.client import local_client
from rltop.engines.client import AsyncEngineClient
from rltop.engines.resend import Examined, NotServing, Unsendable, recorded, tokens_of
from rltop.errors import RltopError
from rltop.evidence.dump_sample import DumpSample
from rltop.runs import list_runs

GLANCE_S = 2.0
"""Longest wait for what the living runs say of their engines."""
SERVING = ("HEALTHY", "SUSPECT", "STALE")


@contextlib.asynccontextmanager
async def owner(url: str) -> AsyncIterator[Callable[[], str]]:
    """A function that says the state of this engine in the living run of this machine that has it; `` without one."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for found in list_runs():
            if found.alive:
                client = await stack.enter_async_context(running(local_client(found, want=("engine/*",))))
                clients.append((found.name, client))
        waits: list[Awaitable[None]] = [client.wait_live(GLANCE_S) for _, client in clients]
        await asyncio.gather(*waits, return_exceptions=True)

        def state() -> str:
            for name, client in clients:
                for key, engine in client.mirror.state.items():
                    if key.startswith("engine/") and isinstance(engine, Mapping) and _same(engine.get("url"), url):
                        return f"{engine.get('state')} in run {name}"
            return ""

        yield state


def _same(left: Any, right: str) -> bool:
    """Two addresses of one engine, as far as they can be compared."""
    told = [str(one).rstrip("/").replace("://localhost", "://127.0.0.1") for one in (left or "", right)]
    return told[0] == told[1]


def check_state(url: str, state: str) -> None:
    """state: as `owner` says it."""
    if state and state.split()[0] not in SERVING:
        raise NotServing(
            "the engine does not serve",
            where=url,
            why=f"it is {state}"
            + (
                ": its memory is lent to the trainer, and a request would end it"
                if state.startswith("OFFLOADED")
                else ""
            ),
            do="rltop engine list says when it serves again",
            exit_code=1,
        )


def check_memory(facts: Examined, url: str, *, known: bool) -> None:
    """known: a run says that it serves, or the user does."""
    if facts.memory_saver and not (known or facts.seen_working):
        raise NotServing(
            "nobody knows whether the engine's memory is released: a request would end it then",
            where=url,
            why="it runs with --enable-memory-saver, nothing runs in it now, and no run of rltop here knows it",
            do="--awake, if you know that it serves",
            exit_code=1,
        )


async def check_tokenizer(client: AsyncEngineClient, facts: Examined, sample: DumpSample, where: str) -> None:
    """Whether the engine reads the prompt's text into the recorded tokens: another model may have as many."""
    if facts.vocab_size is None:
        note(f"{client.url} does not say its vocabulary's size: a token beyond it is for the engine to refuse")
    if not facts.has_tokenizer or sample.messages is not None or not sample.prompt:
        return
    try:
        wanted = list(recorded(sample).prompt_ids)
    except Unsendable:
        return
    found = await tokens_of(client, sample.prompt, version=facts.version)
    if not found or not wanted or found[len(found) - len(wanted) :] == wanted:
        return
    at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    raise RltopError(
        "this dump is of another model: the engine's tokenizer reads its prompt differently",
        where=f"{where}, sample {sample.at}",
        why=f"{len(wanted)} tokens are recorded, {facts.model_path or 'it'} makes {len(found)}, from {at} on others",
        do="give the engine that serves the dump's model, or --force if the prompt was not tokenized as it stands",
    )
