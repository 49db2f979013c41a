"""`rltop weights diff ENGINE_URL CHECKPOINT`: what an engine really holds, against a checkpoint. Needs no torch.

Exit code 0: equal; 1: something differs, or the engine does not answer; 2: it could not be compared, or not all of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.engines.calls import Call, EngineRefused, Keys
    from rltop.engines.weight_diff import Comparison

weights_app = typer.Typer(
    name="weights",
    help="What an engine really holds.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)
EXIT = {"equal": 0, "different": 1, "cannot": 2}
MOST_LINES = 40
"""Findings that are printed; --json has all."""
API_KEY, ADMIN_API_KEY = "RLTOP_ENGINE_API_KEY", "RLTOP_ENGINE_ADMIN_API_KEY"
"""Variables with the keys of an engine: a command line is in every process list."""
TIMEOUT_S, CHECKER_FACTOR = 20.0, 10.0
"""For an answer, and how much longer one may take for which the engine goes through all of its weights."""
TELL_AFTER_S = 5.0
MOST_REFERENCE_BYTES = 4 << 30
"""Larger checkpoints get no forward pass of their own."""


@weights_app.callback()
def weights() -> None:
    """What an engine really holds."""


@weights_app.command("diff")
def weights_diff(
    engine_url: Annotated[str, typer.Argument(metavar="ENGINE_URL", help="http://host:port of an SGLang server.")],
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A Hugging Face directory, its only .safetensors file, or a directory of published weight_vNNNNNN: "
            "then the version that the engine holds is taken.",
        ),
    ],
    previous: Annotated[
        Path | None,
        typer.Option("--previous", metavar="DIR", help="A checkpoint that it may still hold: names stale tensors."),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot/--no-snapshot",
            help="Where a tensor is merely different, let the engine compare itself with a snapshot: finds NaN. Costs "
            "host memory for the weights and replaces an earlier snapshot.",
        ),
    ] = True,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Where all parameters are equal, compare log-probs of one prompt too: finds lost rotary tables. "
            "Needs torch and a small dense Qwen3.",
        ),
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            help="For an answer; ten times as long for checksums and snapshots.",
        ),
    ] = TIMEOUT_S,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help=f"The engine's --api-key; else the variable {API_KEY}."),
    ] = None,
    admin_api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-api-key-file", metavar="FILE", help=f"Its --admin-api-key; else the variable {ADMIN_API_KEY}."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")
    ] = False,
) -> int:
    """Compare an engine's weights with a checkpoint, tensor by tensor. Changes no weight; the engine goes on serving.

    Exit code 0: equal, 1: different, 2: not everything could be compared.
    """
    from rltop.cli.output import print_json
    from rltop.engines.client import EngineClient, EngineRefused
    from rltop.engines.weight_diff import Ways, diff

    if not engine_url.startswith(("http://", "https://")):
        raise RltopError("not an engine's address", where=engine_url, do="http://HOST:PORT")
    ways = Ways(previous, snapshot, _log_probs if probe else None)
    keys = read_keys(api_key_file, admin_api_key_file, os.environ)
    with EngineClient(engine_url, keys=keys, patience=patience(timeout)) as client:
        try:
            found = diff(client, checkpoint, ways)
        except EngineRefused as error:
            raise _refusal(error) from error
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(lines(found)))
    return EXIT[found.verdict]


def read_keys(api: Path | None, admin: Path | None, environ: Mapping[str, str]) -> Keys:
    """From files, else from the environment. Raises RltopError for a file that holds no key."""
    from rltop.engines.calls import Keys

    def read(path: Path | None, option: str, variable: str) -> str:
        try:
            text = path.read_text(encoding="utf-8") if path is not None else environ.get(variable, "")
        except (OSError, ValueError) as error:
            raise RltopError("cannot read the key", where=f"{option} {path}", why=str(error)) from error
        key = text.strip()
        where = f"{option} {path}" if path is not None else f"${variable}"
        if path is not None and not key:
            raise RltopError("the file holds no key", where=where)
        if key and not (key.isascii() and key.isprintable()):
            raise RltopError("no key that a header can carry", where=where, why="it must be one line of ASCII")
        return key

    return Keys(read(api, "--api-key-file", API_KEY), read(admin, "--admin-api-key-file", ADMIN_API_KEY))


def patience(
    timeout_s: float, *, clock: Callable[[], float] = time.monotonic, tell: Callable[[str], None] | None = None
) -> Callable[[Call], AbstractContextManager[float]]:
    """How long each answer may take; every 5 s a line on stderr says what is waited for, and until when."""
    from rltop.cli.output import note

    say = tell or note

    @contextmanager
    def wait(call: Call) -> Iterator[float]:
        limit = timeout_s * (CHECKER_FACTOR if call.path == "/weights_checker" else 1.0)
        action = str((call.body or {}).get("action", ""))
        what = f"{call.path} {action}".rstrip()
        answered = threading.Event()
        begin = clock()

        def narrate() -> None:
            while not answered.wait(TELL_AFTER_S):
                say(f"waiting for the engine's answer to {what}: {clock() - begin:.0f} s of at most {limit:g}")

        teller = threading.Thread(target=narrate, name="waiting", daemon=True)
        teller.start()
        try:
            yield limit
        finally:
            answered.set()
            teller.join()

    return wait


def _refusal(error: EngineRefused) -> RltopError:
    """Who said no, and what helps."""
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        do = f"--api-key-file FILE or {API_KEY}; with --admin-api-key also --admin-api-key-file FILE or {ADMIN_API_KEY}"
        return RltopError("the engine wants a key, or another one", where=error.where, why=error.why, do=do)
    missing = error.status == HTTPStatus.NOT_FOUND and "/weights_checker" in error.where
    do = "SGLang has /weights_checker since 0.5.10" if missing else "look at its log"
    return RltopError("the engine does not say what it holds", where=error.where, why=error.why, do=do)


def lines(found: Comparison) -> list[str]:
    """The comparison for people."""
    from rltop.cli.output import clean, table

    kind = "rltop's CPU engine, a stand-in for SGLang" if found.stand_in else "SGLang"
    head = [
        f"engine      {found.url}: {kind} {found.sglang}, weights version {found.weight_version!r}, "
        f"{found.ranks} rank{'s' * (found.ranks != 1)}",
        f"checkpoint  {found.checkpoint}: {found.tensors} tensors",
        f"compared    {found.compared} parameters {'as ' + found.dtype if found.dtype else 'as stored'}, "
        f"by SGLang's hash of tensors on a {found.hash.upper()}; {found.equal} are equal",
    ]
    out = [clean(line) for line in [*found.headline, *([""] if found.headline else []), *head]]
    if found.findings:
        rows: list[Sequence[object]] = []
        for one in found.findings[:MOST_LINES]:
            gap = f"max_abs_err {one.max_abs_err:.4g}" if one.max_abs_err is not None else ""
            name = (
                f"{one.name}  (in {one.parameter.rpartition('.layers.')[2] or one.parameter})"
                if one.parameter
                else one.name
            )
            rows.append((one.kind, name, ", ".join(part for part in (one.detail, gap) if part) or "-"))
        out += ["", *table(("kind", "tensor", "what"), rows)]
        if len(found.findings) > MOST_LINES:
            out.append(f"… {len(found.findings) - MOST_LINES} more (--json has all)")
    if found.not_compared:
        out += ["", f"not compared: {len(found.not_compared)} tensors"]
        reasons: dict[str, list[str]] = {}
        for name, why in found.not_compared:
            reasons.setdefault(why, []).append(name)
        out += [clean(f"  {why}: {', '.join(names[:4])}{', …' * (len(names) > 4)}") for why, names in reasons.items()]
    out += [clean(f"note: {note}") for note in found.notes]
    count = len(found.findings)
    verdicts = {
        "equal": "equal: the engine holds this checkpoint",
        "different": f"different: {count} tensor{'s' * (count != 1)}"
        + "".join(f"; {one}" for one in found.headline[:1]),
        "cannot": "cannot say: nothing that was compared differs, but not everything was compared",
    }
    return [*out, "", verdicts[found.verdict]]


def _log_probs(directory: Path, ids: Sequence[int]) -> Sequence[float]:
    """A forward pass over the checkpoint, where this machine can make one. Raises RltopError where it cannot."""
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if size > MOST_REFERENCE_BYTES:
        raise RltopError("no forward pass", why=f"the checkpoint has {size >> 20} MiB, which is too slow on a CPU")
    try:
        from rltop.train.cpu_engine.checkpoint import read_config, read_weights
        from rltop.train.cpu_engine.model import score
    except ImportError as error:
        raise RltopError("no forward pass", why="torch is missing", do="pip install 'rltop[train]'") from error
    config = read_config(directory)
    return score(config, read_weights(directory, config), ids)
