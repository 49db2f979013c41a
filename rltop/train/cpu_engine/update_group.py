"""Weights over a process group: the CPU engine's side of `rltop.train.update_group`, with gloo only."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from rltop.train.cpu_engine.answers import BadRequest, json_answer, read_body
from rltop.train.cpu_engine.control import NO_TENSORS, apply_update
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.stats import LOGGER

if TYPE_CHECKING:
    from torch import Tensor


async def init_group(engine: Engine, request: Request) -> Response:
    """Join the group whose rank 0 is the trainer."""
    body = await read_body(request)
    name, backend = str(body.get("group_name") or ""), body.get("backend", "nccl")
    if not engine.takes_tensors:
        return _answer(False, NO_TENSORS)
    if backend != "gloo":
        return _answer(False, f"Failed to initialize custom process group: the CPU engine knows gloo, not {backend!r}.")
    try:
        host, port = str(body["master_address"]), int(body["master_port"])
        rank, world = int(body["rank_offset"]), int(body["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"init_weights_update_group: {type(error).__name__}: {error}") from error

    def meet() -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in the stub

        from rltop.train.update_group import join

        return join(TCPStore(host, port, is_master=False), rank, world, name, "gloo")

    LOGGER.info(
        "init custom process group: master_address=%s, master_port=%s, rank_offset=%s, rank=%s, world_size=%s, "
        "group_name=%s, backend=gloo",
        *(host, port, rank, rank, world, name),
    )
    try:
        engine.update_groups[name] = await asyncio.to_thread(meet)
    except RuntimeError as error:
        return _answer(False, f"Failed to initialize custom process group: {error}.")
    return _answer(True, "Succeeded to initialize custom process group.")


async def update_from_distributed(engine: Engine, request: Request) -> Response:
    """Receive what rank 0 broadcasts. SGLang dies of a group that it does not know; a stand-in says so."""
    body = await read_body(request)
    names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise BadRequest("names, dtypes, shapes: three lists")
    name = str(body.get("group_name") or "weight_update_group")
    group = engine.update_groups.get(name)
    if group is None:
        known = list(engine.update_groups)
        return _answer(False, f"Group {name} not in {known}. Please call `init_weights_update_group` first.")

    def receive() -> list[tuple[str, Tensor]]:
        import torch
        from torch.distributed import distributed_c10d as c10d

        got = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype)))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        for _, tensor in got:
            c10d.broadcast(tensor, group=group, group_src=0)
        return got

    try:
        named = await asyncio.to_thread(receive)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return _answer(False, f"Failed to update parameter online: {error}.")
    return _answer(*await apply_update(engine, body, lambda: engine.scheduler.live.load(named), "distributed"))


async def destroy_group(engine: Engine, request: Request) -> Response:
    """Leave a group."""
    group = engine.update_groups.pop(str((await read_body(request)).get("group_name") or "weight_update_group"), None)
    if group is None:
        return _answer(False, "The group to be destroyed does not exist.")
    from rltop.train.update_group import leave

    await asyncio.to_thread(leave, group)
    return _answer(True, "Succeeded to destroy custom process group.")


def _answer(success: bool, message: str) -> Response:
    status = HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST
    return json_answer({"success": success, "message": message}, status)
