"""`rltop keys`: who may send records over TCP to a run. The files are described in `rltop.keys`."""

from __future__ import annotations

from pathlib import Path

from rltop import keys as files
from rltop import runs
from rltop.cli.output import note, print_json
from rltop.errors import RltopError


def keys(name: str | None, *, run: str | None, out: Path | None, revoke: bool, as_json: bool) -> int:
    """List the keys of a run, make one, or take one away. Raises RltopError."""
    found = runs.find_run(run)
    folder = found.path / "keys"
    if name is None:
        if revoke or out is not None:
            raise RltopError("say which key", where="keys", do="rltop keys NAME")
        return _list(found.name, folder, as_json=as_json)
    if revoke:
        files.revoke_client(folder, name)
        note(f"key {name} of run {found.name} is revoked: what its holder sends is refused from now on")
        return 0
    path = files.known_client(folder, name) if out is None else None
    if path is None:
        path = files.add_client(folder, name, out.absolute() if out is not None else None)
    listen = files.read_listen(folder)
    url = files.Ingest(listen[0], listen[1], path).url() if listen else ""
    if as_json:
        print_json({"run": found.name, "name": name, "file": str(path), "ingest": url})
    elif url:
        print(f"RLTOP_INGEST={url}")
    note(f"the key file is {path} (secret, mode 0600): it must be at that path where the producer runs")
    if not url:
        note(f"run {found.name} does not listen on TCP: rltop up CONFIG --ingest-tcp HOST:PORT")
    return 0


def _list(run: str, folder: Path, *, as_json: bool) -> int:
    listen = files.read_listen(folder)
    known = sorted((name, public.hex()) for public, name in files.clients(folder).items())
    if as_json:
        rows = [{"name": name, "public": public} for name, public in known]
        fields = {"endpoint": listen[0], "server_key": listen[1].hex()} if listen else {}
        print_json({"run": run, "endpoint": "", "server_key": "", **fields, "keys": rows})
        return 0
    if listen is None:
        note(f"run {run} does not listen on TCP: rltop up CONFIG --ingest-tcp HOST:PORT")
    else:
        note(f"run {run} listens at {listen[0]}, its public key is {listen[1].hex()}")
    for name, public in known:
        print(f"{name}  {public}")
    return 0
