"""Keys of a run's ingest over TCP: a pair for the daemon, one for every producer. Who may send is a folder of files.

    <run>/keys/server.key            the daemon's pair
    <run>/keys/clients/NAME.pub      the public key of a producer that may send; its name is who it is
    <run>/keys/clients/NAME.key      its pair, to be given to the producer (may be moved away)
    <run>/keys/listen.json           where the daemon listens, while it does

All are mode 0600 in 0700 folders. A key is 32 bytes of Curve25519, written as 64 hexadecimal digits: no character of
them means anything to a shell, a URL or YAML.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from rltop.errors import RltopError

SCHEME = "curve://"
FIRST_CLIENT = "trainer"
"""Name of the key that `rltop up` makes for the trainer that it starts."""
MAX_FILE_BYTES = 4096
MAX_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A key pair."""

    name: str
    public: bytes
    """32 bytes."""
    secret: bytes = field(repr=False)
    """32 bytes."""


@dataclass(frozen=True, slots=True)
class Ingest:
    """What a producer has to know: `curve://SERVER_PUBLIC_KEY@HOST:PORT/PATH/TO/NAME.key`."""

    endpoint: str
    """`tcp://HOST:PORT` for ZeroMQ."""
    server: bytes
    """The daemon's public key, 32 bytes."""
    key_file: Path

    def url(self) -> str:
        """The value of RLTOP_INGEST."""
        where = self.endpoint.removeprefix("tcp://")
        return f"{SCHEME}{self.server.hex()}@{where}{quote(str(self.key_file))}"


def parse_ingest(url: str) -> Ingest:
    """What `Ingest.url` wrote. Raises ValueError that says what is wrong with it."""
    form = "write curve://SERVER_PUBLIC_KEY@HOST:PORT/PATH/TO/NAME.key, as `rltop keys NAME` prints it"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{error}; {form}") from None
    server, at, where = parts.netloc.rpartition("@")
    if parts.scheme != "curve" or not at or not _HEX.fullmatch(server) or len(parts.path) < 2:
        raise ValueError(form)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port:
        raise ValueError(f"no HOST:PORT in {where!r}; {form}")
    return Ingest(f"tcp://{where}", bytes.fromhex(server), Path(unquote(parts.path)))


def parse_listen(text: str) -> tuple[str, int]:
    """HOST and PORT of `HOST:PORT` (`[HOST]:PORT` for IPv6, `*` for every address); 0 lets the system choose a port.

    Raises ValueError that says what is wrong.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"an IPv6 address goes into brackets: [{host}]:{port}")
    if not colon or not host or not port.isdecimal() or "/" in host or " " in host:
        raise ValueError(f"{text!r} is not HOST:PORT, for example 10.0.0.1:7411")
    if len(port) > 5 or int(port) > MAX_PORT:
        raise ValueError(f"the port {port[:20]} is too large: the largest is {MAX_PORT}")
    return host, int(port)


# ---------------------------------------------------------------- files


def read_pair(path: Path) -> Pair:
    """The pair in a key file. Raises RltopError: not there, not readable, no key file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise RltopError("cannot read the key file", where=str(path), why=error.strerror or str(error)) from error
    fields = _fields(text)
    public, secret = str(fields.get("public", "")), str(fields.get("secret", ""))
    if not _HEX.fullmatch(public) or not _HEX.fullmatch(secret):
        raise RltopError("is not a key file of rltop", where=str(path), do="rltop keys NAME makes one")
    return Pair(str(fields.get("name", path.stem)), bytes.fromhex(public), bytes.fromhex(secret))


def server_pair(keys: Path) -> Pair:
    """The daemon's pair in the folder `keys`, made if there is none. Raises RltopError."""
    path = keys / "server.key"
    if path.exists():
        return read_pair(path)
    pair = _new_pair("server")
    _write(path, _secret_fields(pair))
    return pair


def add_client(keys: Path, name: str, out: Path | None = None) -> Path:
    """Make a pair for the producer `name` and let it in; returns its key file (`out`, default in the folder).

    Raises RltopError: a bad name, one that is there already, a file that cannot be written.
    """
    check_name(name)
    if name in clients(keys).values():
        raise RltopError(f"there is a key {name!r} already", where=str(keys / "clients"), do="--revoke it first")
    pair = _new_pair(name)
    path = out or keys / "clients" / f"{name}.key"
    if out is not None and out.exists():
        raise RltopError("the file is there already", where=str(out), do="remove it, or name another")
    _write(path, _secret_fields(pair), private_folder=out is None)
    _write(
        keys / "clients" / f"{name}.pub", {"rltop_key": 1, "name": name, "public": pair.public.hex(), "file": str(path)}
    )
    return path


def known_client(keys: Path, name: str) -> Path | None:
    """The key file of a producer that is let in already; None: there is no such key. Raises RltopError: it is gone."""
    if check_name(name) not in clients(keys).values():
        return None
    fields = _fields((keys / "clients" / f"{name}.pub").read_bytes()[:MAX_FILE_BYTES])
    path = Path(str(fields.get("file") or client_file(keys, name)))
    if not path.is_file():
        raise RltopError(
            f"the file of key {name!r} is not here any more",
            where=str(path),
            why="it was moved to where the producer runs, or removed; nobody else has the secret",
            do=f"rltop keys {name} --revoke, then rltop keys {name} makes a new one",
        )
    return path


def client_file(keys: Path, name: str) -> Path:
    """Where `add_client` puts the pair of `name` unless told otherwise."""
    return keys / "clients" / f"{name}.key"


def revoke_client(keys: Path, name: str) -> None:
    """Let the producer `name` in no more. Raises RltopError when there is no such key."""
    path = keys / "clients" / f"{check_name(name)}.pub"
    try:
        path.unlink()
    except FileNotFoundError:
        known = ", ".join(sorted(clients(keys).values()))
        raise RltopError(f"there is no key {name!r}", where=str(path.parent), why=f"known: {known or 'none'}") from None
    except OSError as error:
        raise RltopError("cannot remove the key", where=str(path), why=error.strerror or str(error)) from error
    client_file(keys, name).unlink(missing_ok=True)


def clients(keys: Path) -> dict[bytes, str]:
    """Public key -> name of everybody who may send. A file that is none is nobody."""
    found = {}
    try:
        files = sorted((keys / "clients").glob("*.pub"))
    except OSError:
        return {}
    for path in files:
        with contextlib.suppress(OSError):
            public = str(_fields(path.read_bytes()[:MAX_FILE_BYTES]).get("public", ""))
            if _HEX.fullmatch(public) and _NAME.fullmatch(path.stem):
                found[bytes.fromhex(public)] = path.stem
    return found


def write_listen(keys: Path, endpoint: str, server: bytes) -> None:
    """Note where the daemon listens, for `rltop keys`."""
    _write(keys / "listen.json", {"endpoint": endpoint, "server": server.hex()})


def read_listen(keys: Path) -> tuple[str, bytes] | None:
    """Endpoint (`tcp://HOST:PORT`) and public key of the daemon; None when it never listened on TCP."""
    try:
        fields = _fields((keys / "listen.json").read_bytes())
    except OSError:
        return None
    endpoint, server = str(fields.get("endpoint", "")), str(fields.get("server", ""))
    return (endpoint, bytes.fromhex(server)) if endpoint and _HEX.fullmatch(server) else None


def check_name(name: str) -> str:
    """`name` if it can be a key's name; raises RltopError otherwise."""
    if not _NAME.fullmatch(name):
        raise RltopError(
            f"{name!r} cannot be the name of a key",
            why="a name has 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        )
    return name


def _new_pair(name: str) -> Pair:
    import zmq
    from zmq.utils import z85

    public, secret = zmq.curve_keypair()
    return Pair(name, z85.decode(public), z85.decode(secret))


def _secret_fields(pair: Pair) -> dict[str, Any]:
    return {"rltop_key": 1, "name": pair.name, "public": pair.public.hex(), "secret": pair.secret.hex()}


def _fields(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, fields: dict[str, Any], *, private_folder: bool = True) -> None:
    """Atomically, mode 0600; the folders that are missing become 0700."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if private_folder:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.chmod(0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(fields, file, indent=1)
                file.write("\n")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RltopError("cannot write the key file", where=str(path), why=error.strerror or str(error)) from error
