"""One moment of an engine that may be updated meanwhile: version, checksums, and the checkpoint to hold them to.

A checksum answer is of one moment. The version is read before and after it, and where it changed both are asked again.
The checkpoint's files are opened before: a run keeps its newest two published versions, and an open file outlives them.

Failure policy: an engine that does not answer, or refuses, is an `EngineUnreachable` or `EngineRefused`; what is no
SGLang server, and an engine whose version changes in every try, is an `RltopError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rltop.engines.calls import EngineRefused, EngineUnreadable
from rltop.engines.client import EngineClient
from rltop.engines.engine_layout import Shard
from rltop.engines.ranks import ranks_of
from rltop.engines.raw_tensors import Checkpoint
from rltop.errors import RltopError

TRIES = 5
"""Checksums that are asked for until the version before and after is the same. A sync takes seconds at most, and
between two of them lies a rollout."""
HOLD_STILL = "hold the run still: rltop engine http pause --engine ID, compare with --no-probe, then continue"
_PREFIX = "weight_v"


def number_of(directory: Path) -> int | None:
    """The version of a published directory `weight_vNNNNNN`; None: it is none."""
    number = directory.name.removeprefix(_PREFIX)
    plain = number != directory.name and number.isascii() and number.isdigit()
    return int(number) if plain else None


def versions_in(root: Path) -> dict[int, Path]:
    """The published versions in a directory, oldest first."""
    found = {number: path for path in root.glob(f"{_PREFIX}*") if (number := number_of(path)) is not None}
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Moment:
    """What an engine said of itself, and what it is compared with."""

    info: Mapping[str, Any]
    server: Mapping[str, Any]
    version: str
    ranks: Sequence[tuple[Shard, dict[str, str]]]
    """Digests per rank, by the engine's names."""
    checkpoint: Checkpoint

    @property
    def stand_in(self) -> bool:
        """It is rltop's CPU engine."""
        return "rltop_engine" in self.info or "rltop_engine" in self.server

    @property
    def model_path(self) -> str:
        """What the engine was loaded from last: an update from disk changes it."""
        return str(self.info.get("model_path", ""))


def moment(client: EngineClient, path: Path, *, tries: int = TRIES) -> Moment:
    """The engine's digests and an open checkpoint that belongs to them.

    path: a checkpoint; or a directory of published versions (a run's `weights`), of which the engine's is taken.
    """
    checkpoint = None if (root := _root(path)) is not None else _opened(path)
    info = _introduced(client)
    server = _server_info(client)
    version, now = _version(info), ""
    for _ in range(tries):
        chosen = checkpoint
        if chosen is None and root is not None:
            try:
                chosen = _published(root, version)
            except RltopError:
                if (now := client.weight_version()) == version:
                    raise
        if chosen is not None:
            answer = client.weights_checker("checksum")
            info = client.model_info()
            if (now := _version(info)) == version:
                if ranks := ranks_of(answer):
                    return Moment(info, server, version, ranks, chosen)
                raise RltopError("its checksum answer has no ranks", where=f"{client.url}/weights_checker")
        before, version = version, now
    raise RltopError(
        "the engine's weights changed in every try",
        where=client.url,
        why=f"{tries} checksums, each with another version after it than before; at last {before!r} became {version!r}",
        do=HOLD_STILL,
    )


def _opened(path: Path) -> Checkpoint:
    try:
        return Checkpoint(path)
    except RltopError as error:
        if number_of(path) is None or path.is_dir() or not versions_in(path.parent):
            raise
        why = "no such directory or file; a run keeps its newest published versions only"
        do = f"{path.parent} instead: the version that the engine holds is taken from it"
        raise RltopError(error.what, where=error.where, why=why, do=do) from error


def _root(path: Path) -> Path | None:
    """The directory of published versions that is meant; None: it is a checkpoint, or nothing."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return next((one for one in (path, path / "weights") if versions_in(one)), None)


def _published(root: Path, version: str) -> Checkpoint:
    """The published version that the engine holds, whole."""
    there = versions_in(root)
    path = there.get(int(version)) if version.isascii() and version.isdigit() else None
    if path is None:
        have = ", ".join(map(str, there)) or "none"
        what = f"the engine is at version {version!r}, which is not here"
        do = "the checkpoint that it was started from, or one of these by name"
        raise RltopError(what, where=str(root), why=f"published versions here: {have}", do=do)
    found = Checkpoint(path)
    if not found.config:
        raise RltopError("cannot read the checkpoint", where=str(path), why="it has no config.json")
    return found


def _version(info: Mapping[str, Any]) -> str:
    return str(info.get("weight_version", ""))


def _introduced(client: EngineClient) -> dict[str, Any]:
    """`/model_info` of what really is an SGLang server. Raises RltopError in a line for anything else."""
    try:
        info = client.model_info()
    except EngineRefused as error:
        if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or error.status >= 500:
            raise
        unreadable = isinstance(error, EngineUnreadable)
        why = "/model_info answers with something that is not JSON" if unreadable else f"/model_info: {error.why}"
        raise _no_engine(client.url, why) from error
    if not isinstance(info.get("model_path"), str):
        raise _no_engine(client.url, "/model_info does not name a model as SGLang does")
    return info


def _no_engine(url: str, why: str) -> RltopError:
    do = "the address of an engine itself: http://HOST:PORT; rltop engine list has those of a run"
    return RltopError("this is no SGLang engine", where=url, why=why, do=do)


def _server_info(client: EngineClient) -> Mapping[str, Any]:
    try:
        return client.server_info()
    except EngineRefused:
        return {}
