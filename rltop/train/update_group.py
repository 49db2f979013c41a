"""Weights over the process group that SGLang opens for them: `--weight-transport distributed`.

`/init_weights_update_group` makes an engine the other members of a group whose rank 0 is this process; then every
tensor is broadcast, and `/update_weights_from_distributed` says which come. NCCL between GPUs, gloo where one side is
on a CPU. slime's decoupled runs send weights like that.

Failure policy: one group per engine, so that an engine that dies keeps nobody else from the weights. A broadcast that
the other side leaves never ends by itself: what counts is the engine's answer, and after a bad one the group is given
up and made anew at the next push. An engine asked for a group that it does not know dies of it (0.5.14 asserts), so a
group belongs to one process of one engine, never to an address.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in the stub
from torch.distributed import distributed_c10d as c10d

from rltop.engines.calls import Call
from rltop.engines.client import EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.weights import buckets

if TYPE_CHECKING:
    from rltop.train.ports import EngineFacts

GroupBackend = Literal["nccl", "gloo"]
T = TypeVar("T")
MEET_S = 60.0
"""For an engine to join, and for one broadcast."""
CUMEM = "NCCL_CUMEM_ENABLE"
"""SGLang sets it to 0 in its processes unless it is set; both sides of a communicator must agree."""
_log = logging.getLogger("rltop.train")


def agree_with_sglang() -> None:
    """What this process's NCCL must be told before its first communicator."""
    os.environ.setdefault(CUMEM, "0")


def listening_store(host: str) -> tuple[TCPStore, int]:
    """A store in this process, and its port. Only `host` listens, and the port cannot be lost before it is used."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join(store: Store, rank: int, world: int, name: str, backend: GroupBackend) -> Any:
    """A process group beside the default one, by the names that SGLang's `init_custom_process_group` gives its keys.

    torch has no public way to a group whose members are not all of the default one.
    """
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        backend,
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]  # a NewType of str in some releases
        timeout=timedelta(seconds=MEET_S),
    )
    c10d._world.pg_group_ranks[group] = {at: at for at in range(world)}
    return group


def leave(group: Any, *, broken: bool = False) -> None:
    """Give a group up. broken: the others may be gone, and nothing that was begun is waited for."""
    try:
        if broken and c10d.get_backend(group) == "nccl":
            c10d._abort_process_group(group)
        else:
            c10d.destroy_process_group(group)
    except Exception as error:  # whatever a broken communicator says: there is nothing to save in it
        _log.debug("group of an engine: %s: %s", type(error).__name__, error)


@dataclass(slots=True)
class _Member:
    """One engine's group."""

    name: str
    group: Any
    store: TCPStore
    """Lives here as long as the group."""


@dataclass(slots=True)
class UpdateGroups:
    """The groups of one trainer, one per engine process; made at the first push to it."""

    host: str
    """Under which the engines reach this process."""
    gpu: torch.device | None
    """From which tensors are broadcast, with NCCL; None: from the CPU, with gloo."""
    _members: dict[str, _Member] = field(default_factory=dict)

    @property
    def backend(self) -> GroupBackend:
        """Of all groups."""
        return "gloo" if self.gpu is None else "nccl"

    def push(
        self, engine: EngineFacts, client: EngineClient, named: Iterable[tuple[str, Tensor]], version: str
    ) -> None:
        """Every tensor, in pieces; the last one names the version. Raises `EngineRefused` and `EngineUnreachable`."""
        key = f"{engine.id}/{engine.generation}/{engine.pid}/{engine.url}"
        self._forget(engine.id, but=key)
        member = self._members.get(key) or self._meet(key, client)
        try:
            for piece, last in buckets(named):
                self._send(member, client, piece, version if last else None)
        except Exception as error:
            del self._members[key]
            leave(member.group, broken=True)
            _tell_to_leave(client, member.name)
            if isinstance(error, RuntimeError):  # torch's, of a group whose other side went away
                asked = Call("POST", "/update_weights_from_distributed")
                raise EngineUnreachable(client.url, asked, str(error)) from error
            raise

    def close(self) -> None:
        """Leave every group."""
        while self._members:
            leave(self._members.popitem()[1].group)

    def _forget(self, engine_id: str, *, but: str) -> None:
        """Give the groups of this engine's earlier processes up."""
        for key in [key for key in self._members if key.startswith(f"{engine_id}/") and key != but]:
            leave(self._members.pop(key).group, broken=True)

    def _meet(self, key: str, client: EngineClient) -> _Member:
        world = 1 + _ranks(client.server_info())
        name = f"rltop-{secrets.token_hex(8)}"  # no two of a process may have one name
        store, port = listening_store(self.host)

        def ask() -> None:
            client.init_weights_update_group(self.host, port, world, name, self.backend, timeout_s=MEET_S)

        group = _both(ask, lambda: join(store, 0, world, name, self.backend))
        self._members[key] = _Member(name, group, store)
        return self._members[key]

    def _send(
        self, member: _Member, client: EngineClient, piece: Sequence[tuple[str, Tensor]], version: str | None
    ) -> None:
        tensors = [(name, tensor.to(self.gpu or "cpu").contiguous()) for name, tensor in piece]

        def ask() -> None:
            client.update_weights_from_distributed(
                [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors],
                member.name,
                version,
                timeout_s=MEET_S,
            )

        def broadcast() -> list[Any]:
            with _on(self.gpu):
                return [c10d.broadcast(tensor, group=member.group, group_src=0, async_op=True) for _, tensor in tensors]

        for work in _both(ask, broadcast):
            work.wait()
        if self.gpu is not None:
            torch.cuda.synchronize(self.gpu)  # until then the tensors must live


def _both(ask: Callable[[], None], work: Callable[[], T]) -> T:
    """Ask the engine and do our half meanwhile. The engine's answer is the better reason where both fail."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="update-group") as pool:
        answer = pool.submit(ask)
        try:
            done = work()
        except Exception:
            answer.result()
            raise
        answer.result()
        return done


def _on(gpu: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """The pushes run in threads, and a new thread is on the first GPU."""
    return torch.cuda.device(gpu) if gpu is not None else contextlib.nullcontext()


def _ranks(server_info: Mapping[str, Any]) -> int:
    """How many members an engine brings: SGLang takes its tensor parallel ranks."""
    found = server_info.get("tp_size")
    return found if isinstance(found, int) and found > 0 else 1


def _tell_to_leave(client: EngineClient, name: str) -> None:
    """Best effort: an engine that is gone has left, and one that does not know the path keeps a dead group."""
    try:
        client.destroy_weights_update_group(name)
    except (EngineRefused, EngineUnreachable) as error:
        _log.debug("group %s of %s: %s", name, client.url, error)
