"""Endpoints that change the engine: pause, cache, memory, weights."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rltop.errors import RltopError
from rltop.train.cpu_engine.answers import BadRequest, error_answer, error_object, json_answer, read_body
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.faults import INJECTED
from rltop.train.cpu_engine.stats import LOGGER

NO_TENSORS = "Failed to update weights: this engine has none; it takes a version, and the folder that it is in"
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


async def flush_cache(engine: Engine, request: Request) -> Response:
    """Empty the prompt cache; 400 while requests are in flight, after waiting `?timeout=` seconds for them."""
    try:
        deadline = time.monotonic() + float(request.query_params.get("timeout", 0))
    except ValueError as error:
        raise BadRequest(f"timeout: {error}") from error
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
    match (await read_body(request)).get("mode", "abort"):
        case "abort" | "retract" | "in_place" as mode:
            await engine.do(lambda: engine.scheduler.pause(mode))
        case other:
            raise BadRequest(f"mode: Input should be 'abort', 'retract' or 'in_place', got {other!r}")
    return json_answer({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(engine: Engine, request: Request) -> Response:
    """Go on after a pause."""
    await engine.do(engine.scheduler.resume)
    return json_answer({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(engine: Engine, request: Request) -> Response:
    """End the requests with `rid`, or all of them with `abort_all`."""
    body = await read_body(request)
    rid, everything = str(body.get("rid") or ""), bool(body.get("abort_all"))
    if rid or everything:
        engine.scheduler.abort(rid, everything=everything)
    else:
        LOGGER.warning("Ignore abort_request with empty rid and abort_all=False")
    return Response(status_code=HTTPStatus.OK)


async def release_memory(engine: Engine, request: Request) -> Response:
    """Give memory back. With `--enable-memory-saver` it really goes, and weights are gone until the next update, as on
    a GPU."""
    tags = _tags(await read_body(request))
    # From before the release on: nobody may be let in between.
    before, engine.released = engine.released, engine.released | tags
    if not await engine.do(lambda: engine.scheduler.release(tags)):
        engine.released = before
        return error_answer(HTTPStatus.BAD_REQUEST, "release_memory_occupation needs an idle server")
    return json_answer(None)


async def resume_memory(engine: Engine, request: Request) -> Response:
    """Take memory back. Weights are not restored: every token is 0 until an update."""
    tags = _tags(await read_body(request))
    if "weights" in tags & engine.released and engine.injection.strike("token-zero"):
        engine.scheduler.token_zero = True
    await engine.do(lambda: engine.scheduler.take_back(tags))
    engine.released -= tags
    return json_answer(None)


async def weight_update_session(engine: Engine, request: Request) -> Response:
    """SGLang 0.5.23 wants tensor updates between begin and end; here both are always fine."""
    return json_answer({"success": True, "message": "Success"})


async def update_from_disk(engine: Engine, request: Request) -> Response:
    """Load a checkpoint directory of the same shape."""
    body = await read_body(request)
    directory = Path(str(body.get("model_path") or ""))
    if not body.get("model_path"):
        raise BadRequest("model_path: Field required")
    LOGGER.info("Start update_weights. Load format=auto")
    if engine.args.sglang["speculative_algorithm"] == "NGRAM" and engine.injection.strike("ngram-update-dies"):
        await engine.die("ngram_update")
    success, message = await apply_update(engine, body, lambda: engine.scheduler.live.load_directory(directory), "disk")
    if success:
        engine.model_path = str(directory)
    return json_answer(
        {"success": success, "message": message, "num_paused_requests": 0},
        HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST,
    )


async def update_from_tensor(engine: Engine, request: Request) -> Response:
    """Load tensors from the body: `serialized_named_tensors`, one base64 string for the one rank."""
    body = await read_body(request)
    payloads = body.get("serialized_named_tensors")
    if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
        raise BadRequest("serialized_named_tensors: a list with one base64 string, this engine has one rank")
    if body.get("load_format") is not None:
        raise BadRequest(f"load_format: the CPU engine knows only null, got {body['load_format']!r}")
    if not engine.takes_tensors:
        return json_answer({"success": False, "message": NO_TENSORS}, HTTPStatus.BAD_REQUEST)
    from rltop.engines.weights import deserialize  # torch: only where there are tensors

    try:
        named = deserialize(payloads[0])
    except RltopError as error:
        return json_answer({"success": False, "message": str(error)}, HTTPStatus.BAD_REQUEST)
    success, message = await apply_update(engine, body, lambda: engine.scheduler.live.load(named), "tensor")
    return json_answer({"success": success, "message": message}, HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST)


async def apply_update(
    engine: Engine, body: dict[str, Any], apply: Callable[[], None], source: str
) -> tuple[bool, str]:
    """What every update does, with the faults that act on it: success, and SGLang's words."""
    version, flush = body.get("weight_version"), body.get("flush_cache", True)
    if engine.injection.strike("update-refused"):
        return False, f"Failed to update weights: {INJECTED}: update-refused"
    if flush and engine.scheduler.stats.retracted and engine.injection.strike("retract-update-dies"):
        await engine.die("retract_update")
    if body.get("abort_all_requests"):
        engine.scheduler.abort(everything=True)
    if engine.injection.strike("rotary-lost"):
        await engine.do(engine.scheduler.live.lose_buffers)
        await engine.do(engine.scheduler.forget_prompts)
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
    body = await read_body(request)
    version = body.get("new_version")
    if not isinstance(version, str):
        raise BadRequest("new_version: Field required")
    if body.get("abort_all_requests"):
        engine.scheduler.abort(everything=True)
    await engine.do(lambda: engine.scheduler.set_version(version))
    return json_answer({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def weights_checker(engine: Engine, request: Request) -> Response:
    """snapshot, reset_tensors, compare, checksum."""
    body = await read_body(request)
    action, skip = str(body.get("action") or "checksum"), body.get("skip_tensor_list") or []
    if not isinstance(skip, list) or not all(isinstance(part, str) for part in skip):
        raise BadRequest("skip_tensor_list: a list of strings")
    LOGGER.info("[WeightChecker] handle action=%s", action)

    def work() -> tuple[bool, dict[str, Any]]:
        if action == "reset_tensors":
            engine.scheduler.forget_prompts()
        return engine.scheduler.live.check(action, skip)

    success, answer = await engine.do(work)
    if not success:
        LOGGER.warning("check_weights see error: %s", answer["message"])
    return json_answer(answer, HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST)


async def start_profile(engine: Engine, request: Request) -> Response:
    """Profile the next `num_steps` batches, or until `/stop_profile`."""
    body = await read_body(request)
    steps = body.get("num_steps")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise BadRequest(f"num_steps: Input should be a positive integer, got {steps!r}")
    directory = Path(str(body.get("output_dir") or os.environ.get("SGLANG_TORCH_PROFILER_DIR") or "/tmp"))

    if not engine.takes_tensors:
        return error_answer(HTTPStatus.BAD_REQUEST, "this engine computes nothing: there is nothing to profile")
    from rltop.train.cpu_engine.profile import Profile  # torch

    def start() -> str:
        if engine.scheduler.profile is not None:
            return "Profiling is already in progress. Call /stop_profile first."
        try:
            engine.scheduler.profile = Profile(directory, steps)
        except OSError as error:
            return str(error)
        return ""

    if refused := await engine.do(start):
        return error_answer(HTTPStatus.BAD_REQUEST, refused)
    return PlainTextResponse("Start profiling.\n")


async def stop_profile(engine: Engine, request: Request) -> Response:
    """End a profile without a number of batches."""

    def stop() -> bool:
        profile, engine.scheduler.profile = engine.scheduler.profile, None
        if profile is not None:
            profile.stop()
        return profile is not None

    if not await engine.do(stop):
        return error_answer(HTTPStatus.BAD_REQUEST, "Profiling is not in progress. Call /start_profile first.")
    return PlainTextResponse("Stop profiling. This will take some time.\n")


async def weights_by_name(engine: Engine, request: Request) -> Response:
    """Refused, as by SGLang for Qwen3."""
    return error_answer(HTTPStatus.BAD_REQUEST, "Get parameter by name failed")


async def weight_version(engine: Engine, request: Request) -> Response:
    """Gone, as in SGLang 0.5.14, which says where to look instead."""
    message = "Endpoint '/get_weight_version' or '/weight_version' is deprecated. Please use '/model_info' instead."
    return error_object(HTTPStatus.NOT_FOUND, message, "404")


async def faults(engine: Engine, request: Request) -> Response:
    """rltop's own: list the armed faults, arm more (`on`), take some back (`off`: a name, or all)."""
    body = await read_body(request)
    for key in ("on", "off"):
        if not isinstance(body.get(key, ""), str):
            raise BadRequest(f"{key}: a string with faults")
    answer: dict[str, Any] = {}
    if off := body.get("off"):
        answer["disarmed"] = engine.injection.disarm(off)
    try:
        if on := body.get("on"):
            answer["armed"] = engine.injection.arm(on)
    except RltopError as error:
        raise BadRequest(str(error)) from error
    return json_answer({"rltop_engine": engine.marker, **answer, "faults": engine.injection.report()})


def _tags(body: dict[str, Any]) -> set[str]:
    tags = body.get("tags") or MEMORY_TAGS
    unknown = sorted(set(tags) - set(MEMORY_TAGS))
    if unknown:
        raise BadRequest(f"tags: unknown tag {unknown[0]!r}, known are {', '.join(MEMORY_TAGS)}")
    return set(tags)
