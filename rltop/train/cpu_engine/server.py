"""SGLang's HTTP API over the scheduler: the routes, generation, health and information. `control.py` has the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import rltop
from rltop.train.cpu_engine import control, update_group
from rltop.train.cpu_engine.answers import BadRequest, error_answer, error_object, json_answer, read_body, unknown_path
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.generate import WrongType, collect, stream
from rltop.train.cpu_engine.params import SamplingParams, UnknownParameter
from rltop.train.cpu_engine.request import LogprobWishes, Sample
from rltop.train.cpu_engine.stats import LOGGER, load_report, metrics_text

T = TypeVar("T")

Handler = Callable[[Engine, Request], Awaitable[Response]]


def make_app(engine: Engine) -> Starlette:
    """The application. Every request is counted for `/metrics`."""

    def bind(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            key = (request.url.path, request.method)
            counts = engine.scheduler.stats.http_requests
            counts[key] = counts.get(key, 0) + 1
            with engine.answering(key):
                try:
                    return await handler(engine, request)
                except BadRequest as error:
                    return error_object(HTTPStatus.BAD_REQUEST, str(error), "Bad Request")

        return endpoint

    routes = [Route(path, bind(handler), methods=methods) for path, methods, handler in _routes(engine.args)]
    return Starlette(routes=routes, exception_handlers={HTTPException: unknown_path})


def _routes(args: EngineArgs) -> list[tuple[str, list[str], Handler]]:
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    routes: list[tuple[str, list[str], Handler]] = [
        ("/generate", ["POST", "PUT"], generate),
        ("/health", get, health),
        ("/health_generate", get, health),
        ("/model_info", get, model_info),
        ("/get_model_info", get, model_info),
        ("/server_info", get, server_info),
        ("/get_server_info", get, server_info),
        ("/v1/loads", get, loads),
        ("/v1/models", get, models),
        ("/flush_cache", both, control.flush_cache),
        ("/pause_generation", post, control.pause_generation),
        ("/continue_generation", post, control.continue_generation),
        ("/abort_request", post, control.abort_request),
        ("/release_memory_occupation", both, control.release_memory),
        ("/resume_memory_occupation", both, control.resume_memory),
        ("/update_weights_from_disk", post, control.update_from_disk),
        ("/update_weights_from_tensor", post, control.update_from_tensor),
        ("/init_weights_update_group", post, update_group.init_group),
        ("/update_weights_from_distributed", post, update_group.update_from_distributed),
        ("/destroy_weights_update_group", post, update_group.destroy_group),
        ("/update_weight_version", post, control.update_version),
        ("/weights_checker", both, control.weights_checker),
        ("/get_weights_by_name", both, control.weights_by_name),
        ("/start_profile", both, control.start_profile),
        ("/stop_profile", both, control.stop_profile),
        ("/rltop/faults", both, control.faults),
    ]
    if args.modern:
        routes += [
            ("/ready", get, ready),
            ("/begin_weight_update", post, control.weight_update_session),
            ("/end_weight_update", post, control.weight_update_session),
        ]
    else:
        routes += [
            ("/get_load", get, load),
            ("/get_weight_version", get, control.weight_version),
            ("/weight_version", get, control.weight_version),
        ]
    if args.enable_metrics:
        routes.append(("/metrics", get, metrics))
    return routes


# ---------------------------------------------------------------------- generation and health


async def generate(engine: Engine, request: Request) -> Response:
    """Sample; 400 with SGLang's `{"error": {"message": …}}` for a bad request."""
    body = await read_body(request)
    if engine.released & {"weights", "kv_cache"}:
        # Real SGLang dies here; a stand-in that dies would only hide who asked, so it does so on demand only.
        if engine.injection.strike("health-kills-released"):
            await engine.die("released")
        return error_answer(HTTPStatus.SERVICE_UNAVAILABLE, "memory is released: call /resume_memory_occupation first")
    try:
        if body.get("stream"):
            engine.reader.read(body, lambda index, answer: None)
            return StreamingResponse(_streamed(engine, body), media_type="text/event-stream")
        with engine.crash_dump.request(body) as answered:
            answers = await _unless_gone(request, collect(engine.reader, engine.scheduler, body))
            if answers is not None:
                answered(answers)
        return Response() if answers is None else json_answer(answers)
    except WrongType as error:
        raise BadRequest(str(error)) from error
    except UnknownParameter as error:
        return json_answer({"error": str(error)}, HTTPStatus.BAD_REQUEST)
    except ValueError as error:
        LOGGER.error("[http_server] Error: %s", error)
        return error_answer(HTTPStatus.BAD_REQUEST, str(error))


async def _streamed(engine: Engine, body: Any) -> AsyncIterator[bytes]:
    # The handler's own is over when the first event is sent.
    with engine.answering(("/generate", "POST")), engine.crash_dump.request(body):
        async for event in stream(engine.reader, engine.scheduler, body):
            yield event


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
    if engine.released and engine.injection.strike("health-kills-released"):
        await engine.die("released")
    if not engine.ready or engine.released or engine.injection.strike("probe-fails"):
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    if engine.injection.standing == "hang":
        return Response(status_code=HTTPStatus.OK)
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
        engine.unhealthy = True
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    engine.unhealthy = False
    return Response(status_code=HTTPStatus.OK)


# ---------------------------------------------------------------------- information


async def model_info(engine: Engine, request: Request) -> Response:
    """Identity of what is served, with the weight version."""
    now = {"model_path": engine.model_path, "weight_version": engine.scheduler.live.version}
    if engine.args.served_model_name == str(engine.args.model_path):
        now["served_model_name"] = engine.model_path  # a name nobody chose follows the path
    answer = engine.model_info | now
    if not engine.args.modern:
        answer = {name: value for name, value in answer.items() if name not in _MODEL_INFO_LATER}
    return json_answer(answer | {"rltop_engine": engine.marker})


_MODEL_INFO_LATER = (
    *("served_model_name", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode"),
)
"""Fields of `/model_info` that 0.5.14 does not have."""


async def server_info(engine: Engine, request: Request) -> Response:
    """Settings plus live state, as the imitated release lists them. Waits for the scheduler, as in SGLang."""
    await engine.do(lambda: None)
    stats, args = engine.scheduler.stats, engine.args
    answer = dict(args.sglang) | {
        "rltop_engine": engine.marker,
        "sglang_version": args.sglang_version,
        "status": "ready" if engine.ready else "starting",
        "max_total_num_tokens": stats.max_total_num_tokens,
        "max_req_input_len": stats.context_length - 1,
        "internal_states": [_internal_state(engine)],
        "version": _version(engine),
    }
    if not args.modern:
        answer["kv_events"] = None
    else:
        answer |= {"startup_time": {"scheduler_e2e": engine.startup_s}, "frontend": "python"}
        answer["launch_command"] = args.launch_command
    return json_answer(answer)


def _internal_state(engine: Engine) -> dict[str, Any]:
    stats, modern = engine.scheduler.stats, engine.args.modern
    loop = engine.scheduler
    memory: dict[str, Any] = {"weight": loop.live.gigabytes, "kvcache": loop.pool_gigabytes}
    memory["token_capacity"] = stats.max_total_num_tokens
    memory |= {"graph": {"prefill": 0.0, "decode": 0.0}, "token_capacity_swa": None} if modern else {"graph": 0.0}
    # 0.5.14 repeats every setting here.
    state = {} if modern else dict(engine.args.sglang)
    state |= {
        "last_gen_throughput": stats.gen_throughput,
        "memory_usage": memory,
        "effective_max_running_requests_per_dp": stats.max_running_requests,
    }
    if stats.speculative is not None:
        state["avg_spec_accept_length"] = stats.verified_tokens / max(1, stats.verify_steps)
    return state


def _version(engine: Engine) -> str:
    """SGLang's, marked as not SGLang's own."""
    return f"{engine.args.sglang_version}+rltop.{rltop.__version__}"


async def load(engine: Engine, request: Request) -> Response:
    """0.5.14's short form of the loads."""
    stats = engine.scheduler.stats
    counts = {"num_reqs": stats.running + stats.queued, "num_waiting_reqs": stats.queued}
    counts |= {"num_tokens": stats.used_tokens, "num_pending_tokens": 0}
    return json_answer([{"dp_rank": 0} | counts | {"ts_tic": time.perf_counter()}])


async def loads(engine: Engine, request: Request) -> Response:
    """Load of the one data-parallel rank."""
    return json_answer(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": _version(engine),
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
    return json_answer({"object": "list", "data": [card]})


async def metrics(engine: Engine, request: Request) -> Response:
    """Prometheus text."""
    text = metrics_text(engine.scheduler.stats, engine.args.served_model_name)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
