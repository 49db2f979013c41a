"""The CPU engine without a socket: its application in this process, its scheduler in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rltop.engines.client import AsyncEngineClient
from rltop.train.cpu_engine.args import parse_args
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.server import make_app
from rltop.train.cpu_engine.start import build
from tests.engines.contract import contract_model

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint."""
    return contract_model(tmp_path_factory.mktemp("model"))


@contextmanager
def running(model_path: Path, *args: str) -> Iterator[Engine]:
    """A started engine; `args` as on its command line."""
    torch.set_num_threads(1)
    engine = build(parse_args(["--model-path", str(model_path), "--port", "1", "--enable-metrics", *args]))
    thread = threading.Thread(target=engine.scheduler.run, name="scheduler", daemon=True)
    thread.start()
    engine.ready = True
    try:
        yield engine
    finally:
        engine.scheduler.stop()
        thread.join()
    assert not engine.scheduler.fatal, engine.scheduler.fatal


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    """A fresh engine with default arguments."""
    with running(model_path) as started:
        yield started


@pytest.fixture
def client(engine: Engine) -> AsyncEngineClient:
    """rltop's client of `engine`."""
    return connect(engine)


def connect(engine: Engine) -> AsyncEngineClient:
    """rltop's client of an engine in this process."""
    return AsyncEngineClient("http://engine", transport=httpx.ASGITransport(make_app(engine)))


class Blocking(httpx.BaseTransport):
    """Runs an ASGI application for a blocking client, one event loop per request."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            forwarded = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            response = await transport.handle_async_request(forwarded)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return asyncio.run(ask())
