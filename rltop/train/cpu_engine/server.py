"""SGLang's HTTP API over the scheduler: one handler per endpoint, answers and error shapes as SGLang's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import rltop
from rltop.engines.weights import deserialize
from rltop.errors import RltopError
from rltop.train.cpu_engine import MARKER, SPOKEN_API
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.generate import RequestReader, WrongType, collect, stream
from rltop.train.cpu_engine.request import LogprobWishes, Sample
from rltop.train.cpu_engine.sampling import SamplingParams, UnknownParameter
from rltop.train.cpu_engine.scheduler import Scheduler
from rltop.train.cpu_engine.stats import LOGGER, load_report, metrics_text

HEALTH_TIMEOUT_S = 20.0
"""SGLang's SGLANG_HEALTH_CHECK_TIMEOUT: how long `/health` waits for one token before it answers 503."""

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")

T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """What the handlers share."""

    args: EngineArgs
    scheduler: Scheduler
    reader: RequestReader
    model_info: dict[str, Any]
    startup_s: float
    """From the first look at the checkpoint to a scheduler that could run."""
    started: float = field(default_factory=time.time)
    model_path: str = ""
    """Of the weights served now; a disk update moves it."""
    released: set[str] = field(default_factory=set)
    ready: bool = False
    health_timeout_s: float = HEALTH_TIMEOUT_S

    async def do(self, work: Callable[[], T], *, exclusive: bool = False) -> T:
        """Run `work` in the scheduler's thread."""
        future: Future[T] = self.scheduler.call(work, exclusive=exclusive)
        return await asyncio.wrap_future(future)


Handler = Callable[[Engine, Request], Awaitable[Response]]


def make_app(engine: Engine) -> Starlette:
    """The application. Every request is counted for `/metrics`."""

    def bind(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            key = (request.url.path, request.method)
            counts = engine.scheduler.stats.http_requests
            counts[key] = counts.get(key, 0) + 1
            try:
                return await handler(engine, request)
            except _BadRequest as error:
                return _error_object(HTTPStatus.BAD_REQUEST, str(error), "Bad Request")

        return endpoint

    routes = [Route(path, bind(handler), methods=methods) for path, methods, handler in _routes(engine.args)]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


def _routes(args: EngineArgs) -> list[tuple[str, list[str], Handler]]:
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    routes: list[tuple[str, list[str], Handler]] = [
        ("/generate", ["POST", "PUT"], generate),
        ("/ready", get, ready),
        ("/health", get, health),
        ("/health_generate", get, health),
        ("/model_info", get, model_info),
        ("/get_model_info", get, model_info),
        ("/server_info", get, server_info),
        ("/get_server_info", get, server_info),
        ("/v1/loads", get, loads),
        ("/v1/models", get, models),
        ("/flush_cache", both, flush_cache),
        ("/pause_generation", post, pause_generation),
        ("/continue_generation", post, continue_generation),
        ("/abort_request", post, abort_request),
        ("/release_memory_occupation", both, release_memory),
        ("/resume_memory_occupation", both, resume_memory),
        ("/begin_weight_update", post, weight_update_session),
        ("/end_weight_update", post, weight_update_session),
        ("/update_weights_from_disk", post, update_from_disk),
        ("/update_weights_from_tensor", post, update_from_tensor),
        ("/update_weight_version", post, update_version),
        ("/weights_checker", both, weights_checker),
    ]
    if args.enable_metrics:
        routes.append(("/metrics", get, metrics))
    return routes


# ---------------------------------------------------------------------- generation and health


async def generate(engine: Engine, request: Request) -> Response:
    """Sample; 400 with SGLang's `{"error": {"message": …}}` for a bad request."""
    body = await _body(request)
    if engine.released & {"weights", "kv_cache"}:
        # Real SGLang dies here; a stand-in that dies would only hide who asked.
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, "memory is released: call /resume_memory_occupation first")
    try:
        if body.get("stream"):
            engine.reader.read(body, lambda index, answer: None)
            return StreamingResponse(stream(engine.reader, engine.scheduler, body), media_type="text/event-stream")
        answers = await _unless_gone(request, collect(engine.reader, engine.scheduler, body))
        return Response() if answers is None else _json(answers)
    except WrongType as error:
        raise _BadRequest(str(error)) from error
    except UnknownParameter as error:
        return _json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
    except ValueError as error:
        LOGGER.error("[http_server] Error: %s", error)
        return _error(HTTPStatus.BAD_REQUEST, str(error))


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, when the client closes the connection first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def ready(engine: Engine, request: Request) -> Response:
    """200 when started and not paused; no round trip through the scheduler."""
    ok = engine.ready and not engine.scheduler.paused
    return Response(status_code=HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE)


async def health(engine: Engine, request: Request) -> Response:
    """One token through the scheduler; 503 when none comes in time (paused, hung) or while starting or released."""
    if not engine.ready or engine.released:
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()

    def tell(answer: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(seen.set)

    probe = Sample(
        rid="HEALTH_CHECK",
        prompt=[0],
        params=SamplingParams(max_new_tokens=1, top_k=1),
        stream=0,
        limit=1,
        wishes=LogprobWishes(),
        deliver=tell,
        quiet=True,
        received=time.time(),
    )
    engine.scheduler.submit([probe])
    try:
        async with asyncio.timeout(engine.health_timeout_s):
            await seen.wait()
    except TimeoutError:
        LOGGER.error("Health check failed. No token for the last %.0f seconds.", engine.health_timeout_s)
        engine.scheduler.abort("HEALTH_CHECK")
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return Response(status_code=HTTPStatus.OK)


# ---------------------------------------------------------------------- information


async def model_info(engine: Engine, request: Request) -> Response:
    """Identity of what is served, with the weight version."""
    now = {"model_path": engine.model_path, "weight_version": engine.scheduler.live.version}
    if engine.args.served_model_name == str(engine.args.model_path):
        now["served_model_name"] = engine.model_path  # a name nobody chose follows the path
    return _json(engine.model_info | now | {"rltop_engine": MARKER})


async def server_info(engine: Engine, request: Request) -> Response:
    """Settings plus live state."""
    stats = engine.scheduler.stats
    state = {
        "last_gen_throughput": stats.gen_throughput,
        "memory_usage": {
            "weight": engine.scheduler.live.gigabytes,
            "kvcache": 0.0,
            "token_capacity": stats.max_total_num_tokens,
            "token_capacity_swa": None,
            "graph": {"prefill": 0.0, "decode": 0.0},
        },
        "effective_max_running_requests_per_dp": stats.max_running_requests,
    }
    return _json(
        engine.args.as_json()
        | {
            "rltop_engine": MARKER,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "status": "ready" if engine.ready else "starting",
            "max_total_num_tokens": stats.max_total_num_tokens,
            "max_req_input_len": stats.context_length - 1,
            "startup_time": {"scheduler_e2e": engine.startup_s},
            "internal_states": [state],
            "version": f"{SPOKEN_API}+rltop.{rltop.__version__}",
        }
    )


async def loads(engine: Engine, request: Request) -> Response:
    """Load of the one data-parallel rank."""
    return _json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": f"{SPOKEN_API}+rltop.{rltop.__version__}",
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [{"timestamp": time.time()} | load_report(engine.scheduler.stats)],
        }
    )


async def models(engine: Engine, request: Request) -> Response:
    """OpenAI's list of models: one."""
    name = engine.args.served_model_name
    card = {"id": name, "object": "model", "created": int(engine.started), "owned_by": "rltop", "root": name}
    card |= {"parent": None, "max_model_len": engine.scheduler.stats.context_length}
    return _json({"object": "list", "data": [card]})


async def metrics(engine: Engine, request: Request) -> Response:
    """Prometheus text."""
    text = metrics_text(engine.scheduler.stats, engine.args.served_model_name)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


# ---------------------------------------------------------------------- control


async def flush_cache(engine: Engine, request: Request) -> Response:
    """Empty the prompt cache; 400 while requests are in flight, after waiting `?timeout=` seconds for them."""
    deadline = time.monotonic() + float(request.query_params.get("timeout", 0))
    done = await engine.do(engine.scheduler.flush)
    while not done and time.monotonic() < deadline:  # polled, as SGLang does it
        await asyncio.sleep(0.05)
        done = await engine.do(engine.scheduler.flush)
    if not done:
        return PlainTextResponse("Flush cache failed.\n", status_code=HTTPStatus.BAD_REQUEST)
    return PlainTextResponse(
        "Cache flushed.\nPlease check backend logs for more details. "
        "(When there are running or waiting requests, the operation will not be performed.)\n"
    )


async def pause_generation(engine: Engine, request: Request) -> Response:
    """Pause with `mode` abort (default), retract or in_place."""
    match (await _body(request)).get("mode", "abort"):
        case "abort" | "retract" | "in_place" as mode:
            await engine.do(lambda: engine.scheduler.pause(mode))
        case other:
            raise _BadRequest(f"mode: Input should be 'abort', 'retract' or 'in_place', got {other!r}")
    return _json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(engine: Engine, request: Request) -> Response:
    """Go on after a pause."""
    await engine.do(engine.scheduler.resume)
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(engine: Engine, request: Request) -> Response:
    """End the requests with `rid`, or all of them with `abort_all`."""
    body = await _body(request)
    rid, everything = str(body.get("rid") or ""), bool(body.get("abort_all"))
    if rid or everything:
        engine.scheduler.abort(rid, everything=everything)
    else:
        LOGGER.warning("Ignore abort_request with empty rid and abort_all=False")
    return Response(status_code=HTTPStatus.OK)


async def release_memory(engine: Engine, request: Request) -> Response:
    """Give memory back. With `--enable-memory-saver` released weights are gone until the next update, as on a GPU."""
    tags = _tags(await _body(request))

    def release() -> bool:
        if not engine.scheduler.flush():
            return False
        if "weights" in tags and engine.args.enable_memory_saver:
            engine.scheduler.live.zero()
        return True

    if not await engine.do(release):
        return _error(HTTPStatus.BAD_REQUEST, "release_memory_occupation needs an idle server")
    engine.released |= tags
    return _json(None)


async def resume_memory(engine: Engine, request: Request) -> Response:
    """Take memory back."""
    engine.released -= _tags(await _body(request))
    return _json(None)


async def weight_update_session(engine: Engine, request: Request) -> Response:
    """SGLang 0.5.23 wants tensor updates between begin and end; here both are always fine."""
    return _json({"success": True, "message": "Success"})


async def update_from_disk(engine: Engine, request: Request) -> Response:
    """Load a checkpoint directory of the same shape."""
    body = await _body(request)
    directory = Path(str(body.get("model_path") or ""))
    if not body.get("model_path"):
        raise _BadRequest("model_path: Field required")
    LOGGER.info("Start update_weights. Load format=auto")
    success, message = await _update(engine, body, lambda: engine.scheduler.live.load_directory(directory), "disk")
    if success:
        engine.model_path = str(directory)
    return _json(
        {"success": success, "message": message, "num_paused_requests": 0},
        HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST,
    )


async def update_from_tensor(engine: Engine, request: Request) -> Response:
    """Load tensors from the body: `serialized_named_tensors`, one base64 string for the one rank."""
    body = await _body(request)
    payloads = body.get("serialized_named_tensors")
    if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
        raise _BadRequest("serialized_named_tensors: a list with one base64 string, this engine has one rank")
    if body.get("load_format") is not None:
        raise _BadRequest(f"load_format: the CPU engine knows only null, got {body['load_format']!r}")
    try:
        named = deserialize(payloads[0])
    except RltopError as error:
        return _json({"success": False, "message": str(error)}, HTTPStatus.BAD_REQUEST)
    success, message = await _update(engine, body, lambda: engine.scheduler.live.load(named), "tensor")
    return _json({"success": success, "message": message}, HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST)


async def _update(engine: Engine, body: dict[str, Any], apply: Callable[[], None], source: str) -> tuple[bool, str]:
    version, flush = body.get("weight_version"), body.get("flush_cache", True)
    if body.get("abort_all_requests"):
        engine.scheduler.abort(everything=True)
    try:
        success, message = await engine.do(
            lambda: engine.scheduler.update(apply, version, flush=bool(flush), source=source), exclusive=True
        )
    except RltopError as error:
        LOGGER.error("Failed to update weights: %s", error)
        return False, f"Failed to update weights: {error}"
    if success and version is not None:
        message += f" Weight version updated to {version}."
    return success, message


async def update_version(engine: Engine, request: Request) -> Response:
    """Change the version label only."""
    body = await _body(request)
    version = body.get("new_version")
    if not isinstance(version, str):
        raise _BadRequest("new_version: Field required")
    if body.get("abort_all_requests"):
        engine.scheduler.abort(everything=True)
    await engine.do(lambda: engine.scheduler.set_version(version))
    return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def weights_checker(engine: Engine, request: Request) -> Response:
    """snapshot, reset_tensors, compare, checksum."""
    action = str((await _body(request)).get("action") or "checksum")
    LOGGER.info("[WeightChecker] handle action=%s", action)

    def work() -> tuple[bool, dict[str, Any]]:
        if action == "reset_tensors":
            engine.scheduler.forget_prompts()
        return engine.scheduler.live.check(action)

    success, body = await engine.do(work)
    return _json(body, HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST)


# ---------------------------------------------------------------------- bodies and errors


class _BadRequest(Exception):
    """The body does not fit the endpoint."""


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise _BadRequest(f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequest("the body must be a JSON object")
    return body


def _tags(body: dict[str, Any]) -> set[str]:
    tags = body.get("tags") or MEMORY_TAGS
    unknown = sorted(set(tags) - set(MEMORY_TAGS))
    if unknown:
        raise _BadRequest(f"tags: unknown tag {unknown[0]!r}, known are {', '.join(MEMORY_TAGS)}")
    return set(tags)


def _json(content: Any, status: int = HTTPStatus.OK) -> Response:
    # msgspec writes NaN and infinities as null, like SGLang's orjson.
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json({"error": {"message": message}}, status)


def _error_object(status: int, message: str, kind: str) -> Response:
    return _json({"object": "error", "message": message, "type": kind, "param": None, "code": int(status)}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return _json({"detail": error.detail}, error.status_code)
