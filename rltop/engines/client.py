"""HTTP client of one engine: SGLang's API, or the CPU engine's, which is the same.

`EngineClient` blocks, `AsyncEngineClient` does not; both run the flows of `calls.py` and have the same methods. Nothing
is retried here: a caller that may retry knows what it is doing, a client does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
import msgspec

from rltop.engines.bounded import PLAIN, Unreadable, fetch, fetch_blocking
from rltop.engines.calls import (
    Call,
    CheckerAction,
    EngineRefused,
    EngineUnreachable,
    EngineUnreadable,
    Flow,
    Keys,
    PauseMode,
    Reply,
    T,
    WrongWeightVersion,
    abort_call,
    by_name_call,
    checker_call,
    destroy_group_call,
    disk_call,
    distributed_call,
    generate_flow,
    health_flow,
    init_group_call,
    json_flow,
    label_call,
    memory_call,
    profile_call,
    tensor_call,
    text_flow,
    update_flow,
)
from rltop.engines.scrape import EngineStats, scrape
from rltop.engines.transport import Transport, certified

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AsyncEngineClient",
    "EngineClient",
    "EngineRefused",
    "EngineUnreachable",
    "EngineUnreadable",
    "WrongWeightVersion",
]

GENERATE_TIMEOUT_S = 600.0
"""A hung engine must not hang a rollout for ever."""

KEEP_ALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection, so that a request never meets a closing one."""


Patience = Callable[[Call], AbstractContextManager[float]]
"""Wraps one question; gives the seconds that its answer may take."""


class EngineClient:
    """Blocking client. Every method raises `EngineUnreachable` or `EngineRefused`. Use as a context manager.

    keys: for servers that ask for them. patience: how long it waits instead of the call's own limit.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: httpx.BaseTransport | None = None,
        keys: Keys | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._keys, self._patience = keys or Keys(), patience
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        self._http = httpx.Client(
            base_url=self.url, limits=limits, transport=transport, trust_env=False, verify=certified(self.url)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _run(self, flow: Flow[T]) -> T:
        try:
            call = next(flow)
            while True:
                call = flow.send(self._send(call))
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _send(self, call: Call) -> Reply:
        if self._patience is None:
            return self._ask(call)
        with self._patience(call) as limit_s:
            return self._ask(dataclasses.replace(call, timeout_s=limit_s))

    def _ask(self, call: Call) -> Reply:
        arguments = _arguments(call)
        arguments["headers"] |= self._keys.headers(call.path)
        try:
            request = self._http.build_request(call.method, call.path, **arguments)
            reply = fetch_blocking(self._http, request, timeout_s=call.timeout_s, limit_bytes=call.limit_bytes)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineUnreachable(self.url, call, _reason(error, call)) from error
        except Unreadable as error:
            raise EngineUnreadable(self.url, call, f"its answer is {error}") from error
        return Reply(*reply)

    def generate(
        self, payload: Mapping[str, Any], *, require_version: str | None = None, timeout_s: float = GENERATE_TIMEOUT_S
    ) -> list[Any]:
        """SGLang's `/generate` body -> one answer per sample, in order.

        With `require_version`, raises `WrongWeightVersion` if any token was, or may have been, drawn by other weights.
        """
        return self._run(generate_flow(self.url, payload, require_version, timeout_s))

    def model_info(self) -> dict[str, Any]:
        """`/model_info`, with `weight_version`."""
        return _object(self._json(Call("GET", "/model_info")))

    def server_info(self) -> dict[str, Any]:
        """`/server_info`. Real SGLang shows its API keys in it: scrub before it goes anywhere."""
        return _object(self._json(Call("GET", "/server_info")))

    def loads(self) -> dict[str, Any]:
        """`/v1/loads`: cheap, never blocks, goes stale when the engine hangs."""
        return _object(self._json(Call("GET", "/v1/loads")))

    def metrics_text(self) -> str:
        """`/metrics` in Prometheus' text format."""
        return self._run(text_flow(self.url, Call("GET", "/metrics")))

    def weight_version(self) -> str:
        """The label of the weights served now."""
        return str(self.model_info().get("weight_version"))

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. `abort` ends running requests; the other modes keep them. Never retract, then flush: 400."""
        self._json(Call("POST", "/pause_generation", {"mode": mode}))

    def resume_generation(self) -> None:
        """Go on after `pause`."""
        self._json(Call("POST", "/continue_generation", {}))

    def flush_cache(self) -> None:
        """Empty the prefix cache; refused while requests are in flight."""
        self._run(text_flow(self.url, Call("POST", "/flush_cache")))

    def abort(self, rid: str = "") -> None:
        """End one request, or all."""
        self._run(text_flow(self.url, abort_call(rid)))

    def update_weights_from_disk(self, path: Path | str, version: str, *, flush: bool = True) -> None:
        """Load a checkpoint directory that the engine can read."""
        self._json(disk_call(path, version, flush))

    def update_weights_from_tensor(
        self, named: Iterable[tuple[str, Tensor]], version: str, *, flush: bool = True
    ) -> None:
        """Send tensors (Hugging Face names) by value, for one tensor-parallel rank."""
        self._run(update_flow(self.url, tensor_call(_serialized(named), version, flush)))

    def update_weights_from_shared(
        self, named: Iterable[tuple[str, Tensor]], version: str, *, flush: bool = True
    ) -> None:
        """Let an SGLang on the same GPU copy these CUDA tensors itself (CUDA IPC), for one tensor-parallel rank."""
        from rltop.engines.weights import buckets, serialize_shared

        for piece, last in buckets(named):
            bucket = serialize_shared(piece)
            self._run(update_flow(self.url, tensor_call(bucket.text, version, flush and last)))
            del bucket  # kept until the engine had answered

    def init_weights_update_group(
        self, address: str, port: int, world: int, name: str, backend: str, *, timeout_s: float
    ) -> None:
        """`/init_weights_update_group`: answers when every member is there."""
        self._json(init_group_call(address, port, world, name, backend, timeout_s))

    def update_weights_from_distributed(
        self, tensors: Iterable[tuple[str, str, tuple[int, ...]]], group: str, version: str | None, *, timeout_s: float
    ) -> None:
        """`/update_weights_from_distributed`: (name, dtype, shape) of what rank 0 broadcasts meanwhile. An engine that
        does not know the group dies. version: of the last call of a push only."""
        self._run(update_flow(self.url, distributed_call(tensors, group, version, timeout_s)))

    def destroy_weights_update_group(self, name: str) -> None:
        """`/destroy_weights_update_group`."""
        self._json(destroy_group_call(name))

    def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        """`/weights_checker`. Raises `EngineRefused` with the tensors' names when `compare` finds a difference."""
        return _object(self._json(checker_call(action)))

    def weights_by_name(self, name: str, rows: int) -> Any:
        """`/get_weights_by_name`: the first rows as nested lists, where the model's class can (Llama, not Qwen3)."""
        return self._json(by_name_call(name, rows))

    def set_weight_version(self, version: str) -> None:
        """`/update_weight_version`: another label for the weights that are served now."""
        self._json(label_call(version))

    def inject(self, faults: str) -> None:
        """Arm faults of rltop's CPU engine (`/rltop/faults`); real SGLang has no such path."""
        self._json(Call("POST", "/rltop/faults", {"on": faults}))

    def profile(self, steps: int = 5) -> None:
        """`/start_profile`: it ends by itself after so many forward passes."""
        self._run(text_flow(self.url, profile_call(steps)))

    def release_memory(self, tags: Iterable[str] | None = None) -> None:
        """Give memory back (kv_cache, weights, cuda_graph; None: all). Kills a busy SGLang: pause and flush first."""
        self._json(memory_call("release", tags))

    def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back. Released weights are not restored: update before the next request."""
        self._json(memory_call("resume", tags))

    def ready(self) -> None:
        """`/ready`: costs nothing. Raises EngineRefused: 503 while starting or paused, 404 before SGLang 0.5.23."""
        self._run(text_flow(self.url, Call("GET", "/ready", timeout_s=10.0)))

    def health(self) -> bool:
        """Whether one token came through. See `health_flow` for when not to ask."""
        return self._run(health_flow())

    def _json(self, call: Call) -> Any:
        return self._run(json_flow(self.url, call))


class AsyncEngineClient:
    """The same methods as `EngineClient`, as coroutines. Use as an async context manager."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        transport = transport or Transport(limits=limits, trust_env=False, verify=certified(self.url))
        self._http = httpx.AsyncClient(base_url=self.url, transport=transport, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; whoever still waits for an answer gets `EngineUnreachable`."""
        await self._http.aclose()

    async def _run(self, flow: Flow[T]) -> T:
        try:
            call = next(flow)
            while True:
                call = flow.send(await self._send(call))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _send(self, call: Call) -> Reply:
        try:
            request = self._http.build_request(call.method, call.path, **_arguments(call))
            reply = await fetch(self._http, request, timeout_s=call.timeout_s, limit_bytes=call.limit_bytes)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineUnreachable(self.url, call, _reason(error, call)) from error
        except Unreadable as error:
            raise EngineUnreadable(self.url, call, f"its answer is {error}") from error
        return Reply(*reply)

    async def generate(
        self, payload: Mapping[str, Any], *, require_version: str | None = None, timeout_s: float = GENERATE_TIMEOUT_S
    ) -> list[Any]:
        """See `EngineClient.generate`."""
        return await self._run(generate_flow(self.url, payload, require_version, timeout_s))

    async def model_info(self) -> dict[str, Any]:
        """See `EngineClient.model_info`."""
        return _object(await self._json(Call("GET", "/model_info")))

    async def server_info(self) -> dict[str, Any]:
        """See `EngineClient.server_info`."""
        return _object(await self._json(Call("GET", "/server_info")))

    async def loads(self) -> dict[str, Any]:
        """See `EngineClient.loads`."""
        return _object(await self._json(Call("GET", "/v1/loads")))

    async def metrics_text(self) -> str:
        """See `EngineClient.metrics_text`."""
        return await self._run(text_flow(self.url, Call("GET", "/metrics")))

    async def scrape(self) -> EngineStats:
        """What its routes say, each of them asked; never raises."""
        return await scrape(self.url, self._http)

    async def weight_version(self) -> str:
        """See `EngineClient.weight_version`."""
        return str((await self.model_info()).get("weight_version"))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `EngineClient.pause`."""
        await self._json(Call("POST", "/pause_generation", {"mode": mode}))

    async def resume_generation(self) -> None:
        """See `EngineClient.resume_generation`."""
        await self._json(Call("POST", "/continue_generation", {}))

    async def flush_cache(self) -> None:
        """See `EngineClient.flush_cache`."""
        await self._run(text_flow(self.url, Call("POST", "/flush_cache")))

    async def abort(self, rid: str = "") -> None:
        """See `EngineClient.abort`."""
        await self._run(text_flow(self.url, abort_call(rid)))

    async def update_weights_from_disk(self, path: Path | str, version: str, *, flush: bool = True) -> None:
        """See `EngineClient.update_weights_from_disk`."""
        await self._json(disk_call(path, version, flush))

    async def update_weights_from_tensor(
        self, named: Iterable[tuple[str, Tensor]], version: str, *, flush: bool = True
    ) -> None:
        """See `EngineClient.update_weights_from_tensor`."""
        await self._run(update_flow(self.url, tensor_call(_serialized(named), version, flush)))

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        """See `EngineClient.weights_checker`."""
        return _object(await self._json(checker_call(action)))

    async def weights_by_name(self, name: str, rows: int) -> Any:
        """See `EngineClient.weights_by_name`."""
        return await self._json(by_name_call(name, rows))

    async def set_weight_version(self, version: str) -> None:
        """See `EngineClient.set_weight_version`."""
        await self._json(label_call(version))

    async def inject(self, faults: str) -> None:
        """See `EngineClient.inject`."""
        await self._json(Call("POST", "/rltop/faults", {"on": faults}))

    async def profile(self, steps: int = 5) -> None:
        """See `EngineClient.profile`."""
        await self._run(text_flow(self.url, profile_call(steps)))

    async def release_memory(self, tags: Iterable[str] | None = None) -> None:
        """See `EngineClient.release_memory`."""
        await self._json(memory_call("release", tags))

    async def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        """See `EngineClient.resume_memory`."""
        await self._json(memory_call("resume", tags))

    async def ready(self) -> None:
        """See `EngineClient.ready`."""
        await self._run(text_flow(self.url, Call("GET", "/ready", timeout_s=10.0)))

    async def health(self) -> bool:
        """See `EngineClient.health`."""
        return await self._run(health_flow())

    async def _json(self, call: Call) -> Any:
        return await self._run(json_flow(self.url, call))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"answer": value}


def _serialized(named: Iterable[tuple[str, Tensor]]) -> str:
    # Imported here: the daemon uses this client and runs where torch is not installed.
    from rltop.engines.weights import serialize

    return serialize(named)


def _arguments(call: Call) -> dict[str, Any]:
    timeout = httpx.Timeout(call.timeout_s, connect=min(5.0, call.timeout_s))
    if call.body is None:
        return {"timeout": timeout, "headers": dict(PLAIN)}
    return {
        "timeout": timeout,
        "content": msgspec.json.encode(call.body),
        "headers": {"content-type": "application/json", **PLAIN},
    }


def _reason(error: Exception, call: Call) -> str:
    if isinstance(error, TimeoutError):
        return f"no whole answer within {call.timeout_s:g} s"
    if isinstance(error, httpx.ReadTimeout):
        return f"no answer within {call.timeout_s:g} s (ReadTimeout)"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
