"""The commands and their flags. Each one imports what it needs when it runs: `--help` must stay instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from rltop.cli.bisect import bisect_app
from rltop.cli.dump import dump_app
from rltop.cli.engine_app import engine_app
from rltop.cli.weights import weights_app
from rltop.errors import RltopError

# Typer brings its own copy of click since 0.2x, and click itself before: take the class from what it exports.
UsageError = cast(Any, typer.BadParameter.__base__)

app = typer.Typer(
    name="rltop",
    help="top for LLM reinforcement-learning post-training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bisect_app)
app.add_typer(engine_app)
app.add_typer(dump_app)
app.add_typer(weights_app)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")]
RemoteRltop = Annotated[
    str,
    typer.Option(metavar="PATH", help="The rltop on the other machine; also words like 'docker exec -i box rltop'."),
]
Via = Annotated[
    str | None, typer.Option(metavar="CMD", help="Command prefix instead of ssh, e.g. 'kubectl exec -i pod --'.")
]
Target = Annotated[str | None, typer.Argument(metavar="[RUN|ssh://…]", help="Default: the newest living run.")]
RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Default: the newest living run.")]


def dispatch(args: list[str]) -> int:
    """Parse and run. Raises RltopError for a wrong command line, with the closest match."""
    command = typer.main.get_command(app)
    try:
        # Not `command.main`, which turns interrupts and broken pipes into exit codes of its own.
        with command.make_context("rltop", args or ["--help"]) as context:
            result = command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "rltop"
        raise RltopError(error.format_message().rstrip("."), where=_below(where), do=f"{where} --help") from None
    return result if isinstance(result, int) else 0


def _below(command_path: str) -> str:
    return command_path.partition(" ")[2]


def _version(wanted: bool) -> None:
    if wanted:
        from rltop import __version__

        print(f"rltop {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """top for LLM reinforcement-learning post-training: watch a run, check it, find out what broke it."""


@app.command()
def attach(
    target: Target = None,
    control: Annotated[
        bool, typer.Option("--control", help="Act on the run; without it nothing can be changed.")
    ] = False,
    name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="Who you are, for the others and the journal.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the state once as text and exit.")] = False,
    as_json: Json = False,
    fps: Annotated[float, typer.Option(min=0.1, max=30, help="Most updates per second.")] = 2.0,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Only ASCII characters on the screen.")] = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """The dashboard of a run, here or behind ssh.

    Read-only without --control. Leaving it (q) does nothing to the run. --once prints the state and needs no terminal.
    """
    from rltop.cli.attach import attach as run_attach
    from rltop.cli.connect import Place

    if as_json and not once:
        raise RltopError("--json goes with --once", where="attach", do="rltop attach --once --json")
    place = Place(target, remote_rltop=remote_rltop, via=via)
    if once:
        from rltop.cli.once import print_once

        return print_once(place, as_json=as_json)
    return run_attach(place, control=control, name=name, fps=fps, ascii_only=ascii_only)


@app.command()
def proxy(
    run: RunName = None,
    stdio: Annotated[bool, typer.Option("--stdio", help="Over stdin and stdout (the only way there is).")] = False,
    role: Annotated[Literal["view", "control"], typer.Option(help="Which socket of the run.")] = "view",
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="This very run directory.")] = None,
) -> int:
    """The wire over stdin and stdout, for attach ssh://.

    `rltop attach ssh://host/run` starts it on the other machine; nobody needs to type it.
    """
    if not stdio:
        raise RltopError("say what to carry the wire over", where="proxy", do="rltop proxy --stdio")
    from rltop.cli.proxy import proxy as run_proxy

    return run_proxy(run, role, run_dir=run_dir)


@app.command()
def ps(
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Dead runs too.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove the oldest dead runs above the quota, and leftovers of killed ones.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --prune: only say what would go.")] = False,
) -> int:
    """The runs of this user on this machine, newest first."""
    if dry_run and not prune:
        raise RltopError("--dry-run goes with --prune", where="ps", do="rltop ps --prune --dry-run")
    if prune:
        from rltop.cli.prune import prune as run_prune

        return run_prune(as_json=as_json, dry_run=dry_run)
    from rltop.cli.ps import ps as run_ps

    return run_ps(as_json=as_json, every=every)


@app.command()
def drill(
    name: Annotated[Literal["ima", "hang", "oom", "nan", "stale"], typer.Argument(help="What is planted.")],
    seed: Annotated[int, typer.Option(help="Draws what exactly is planted.")] = 0,
    tell: Annotated[bool, typer.Option("--tell", help="Say at once what is planted, not only at the end.")] = False,
    as_json: Json = False,
) -> int:
    """A rehearsal: plant a fault in a small run of its own and see whether rltop finds it (exit code 0), or not (1).

    Needs no GPU and touches no other run. ima also bisects: about half a minute, on a busy machine more.
    """
    from rltop.cli.drill import drill as run_drill

    return run_drill(name, seed=seed, tell=tell, as_json=as_json)


@app.command()
def up(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    name: Annotated[str | None, typer.Option(help="Name of the run, instead of the one in the file.")] = None,
    as_json: Json = False,
    ingest_tcp: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Take records from other machines too: TCP, with CURVE keys only."),
    ] = "",
) -> int:
    """Start a daemon and the trainer of CONFIG.toml.

    Both go on when this returns. The run's name is printed on stdout. With --ingest-tcp (or `tcp` in [ingest]) the
    daemon also listens there, for holders of a key and for records only; `rltop keys` makes keys and says what to
    export.
    """
    from rltop.cli.up import up as run_up

    return run_up(config, name=name, as_json=as_json, ingest_tcp=ingest_tcp)


@app.command()
def watch(
    target: Annotated[
        str | None, typer.Argument(metavar="[ssh://HOST]", help="Where the run is; default: this machine.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option("--log", metavar="FILE", help="A log, a directory of logs, or a pattern; may be repeated."),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="An SGLang server; may be repeated.")
    ] = None,
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Ray's dashboard (http://HEAD:8265), or a `ray status` file."),
    ] = "",
    args: Annotated[
        str, typer.Option("--args", metavar="FILE", help="The launch script or the arguments of the run.")
    ] = "",
    start: Annotated[
        Literal["start", "end"], typer.Option("--from", help="Read logs that are there from their start, or their end.")
    ] = "start",
    control: Annotated[
        bool, typer.Option("--control", help="Flush, pause, continue and profile from the dashboard.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the daemon going when the dashboard is left.")] = False,
    headless: Annotated[
        bool, typer.Option("--headless", help="No dashboard: print the run's name and return.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    as_json: Json = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Only ASCII characters on the screen.")] = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """The dashboard of a run that knows nothing of rltop: its logs, its engines, its Ray cluster (docs/watch.md).

    Reads only, except for what SGLang's HTTP API allows (--control). Nothing that others run is started or stopped.
    """
    from rltop.cli.watch import Subjects
    from rltop.cli.watch import watch as run_watch

    if as_json and not headless:
        raise RltopError("--json goes with --headless", where="watch", do="rltop watch --log FILE --headless --json")
    if not (engine or log or ray):
        do = "rltop watch --log train.log, rltop watch --engine http://host:30000"
        raise RltopError("say what to watch", where="watch", do=do)
    subjects = Subjects(engines=engine or (), logs=log or (), ray=ray, args=args, start=start)
    if target is not None or via is not None:
        from rltop.cli.connect import Place
        from rltop.cli.watch_far import watch_far

        place = Place(target, remote_rltop=remote_rltop, via=via)
        return watch_far(
            place,
            subjects,
            name=name,
            control=control,
            keep=keep,
            headless=headless,
            as_json=as_json,
            ascii_only=ascii_only,
        )
    return run_watch(
        subjects,
        name=name,
        control=control,
        keep=keep,
        headless=headless,
        as_json=as_json,
        ascii_only=ascii_only,
    )


@app.command(name="slime-env")
def slime_env(
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Default: the newest living run.")] = None,
    start: Annotated[
        str | None, typer.Option("--start", metavar="NAME", help="Begin a run that waits for records.")
    ] = None,
    ingest_tcp: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --start: take records from other machines too.")
    ] = "",
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key for other machines, where every node sees it.")
    ] = None,
    merge: Annotated[
        str, typer.Option(metavar="FILE|JSON", help="A runtime env of yours; nothing of it is lost.")
    ] = "",
    path: Annotated[
        str, typer.Option(metavar="DIR", help="rltop lies in this directory on every node: PYTHONPATH.")
    ] = "",
    installed: Annotated[bool, typer.Option("--installed", help="rltop is installed on every node.")] = False,
    preflight: Annotated[bool, typer.Option("--preflight", help="Ask a worker on every node first.")] = False,
    ray: Annotated[str, typer.Option(metavar="ADDRESS", help="The cluster to ask; default: the one of here.")] = "auto",
    as_json: Json = False,
) -> int:
    """The Ray runtime env that attaches a slime job, for `ray job submit --runtime-env-json`.

    slime is not changed and gets no flag. Without --path or --installed the job brings rltop along.
    """
    from rltop.cli.slime_env import Wanted
    from rltop.cli.slime_env import slime_env as run_slime_env

    wanted = Wanted(run, start, ingest_tcp, key_file, merge, path, installed, preflight, ray)
    return run_slime_env(wanted, as_json=as_json)


@app.command(name="slime-flags")
def slime_flags(
    changes: Annotated[list[str], typer.Argument(metavar="TOGGLE=VALUE…")],
    script: Annotated[Path | None, typer.Option(metavar="RUN.sh", help="The launch to edit.")] = None,
    ab: Annotated[
        int, typer.Option(metavar="GPUS", min=0, help="Instead: two groups on so many GPUs, for --sglang-config.")
    ] = 0,
    gpus_per_engine: Annotated[int, typer.Option(metavar="N", min=1, help="With --ab.")] = 1,
    model: Annotated[str, typer.Option(metavar="NAME", help="With --ab: the model's name in the file.")] = "default",
    sglang_version: Annotated[str, typer.Option(metavar="V", help="The release that slime runs.")] = "",
) -> int:
    """A slime launch line with engine toggles changed, or the two groups of an A/B inside one run.

    Only text: the toggles are those of `rltop engine set`, written as slime's --sglang- flags.
    """
    from rltop.cli.slime_flags import slime_flags as run_slime_flags

    return run_slime_flags(
        changes, script=script, ab=ab, gpus_per_engine=gpus_per_engine, model=model, version=sglang_version
    )


@app.command()
def keys(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Make a key for this producer.")] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Default: the newest living run.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where its key file goes; default: the run's directory.")
    ] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Let the holder of this key in no more.")] = False,
    as_json: Json = False,
) -> int:
    """Keys of producers on other machines (up --ingest-tcp).

    With NAME: makes a key (once; --revoke, then again, makes a new one) and prints the RLTOP_INGEST that its holder
    exports. Without: lists them. Key files are secret.
    """
    from rltop.cli.keys import keys as run_keys

    return run_keys(name, run=run, out=out, revoke=revoke, as_json=as_json)


@app.command()
def down(
    run: RunName = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds until what does not end is killed; default 20, or 65."),
    ] = None,
) -> int:
    """Stop a run: its trainer, its engines, then its daemon."""
    from rltop.cli.down import down as run_down

    return run_down(run, timeout_s=timeout)


@app.command()
def changed(
    first: Annotated[str, typer.Argument(metavar="RUN", help="The run before; alone: the one that is in question.")],
    second: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run after.")] = None,
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Unlikely culprits too, however many.")] = False,
) -> int:
    """What changed between two runs, the likeliest culprit first.

    With one RUN: since the last good run before it. NAME#2 is the second attempt of a run.
    """
    from rltop.cli.changed import changed as run_changed

    return run_changed(first, second, as_json=as_json, every=every)


@app.command()
def get(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="snapshot, metrics, series, names, sources, checks, engines, events, around."
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY…|STEP]", help="Metrics for series (or 'train/*'), a step for around."),
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN|ssh://…", help="Default: the newest living run.")] = None,
    as_json: Json = False,
    lo: Annotated[float | None, typer.Option(help="First step (series), first event (events).")] = None,
    hi: Annotated[float | None, typer.Option(help="Last step (series), last event (events).")] = None,
    buckets: Annotated[int, typer.Option(min=1, max=100_000, help="Most points per series.")] = 200,
    window: Annotated[int, typer.Option(min=0, help="Steps on both sides of `around STEP`.")] = 2,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most events.")] = 200,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Facts of a run for scripts, as text or JSON."""
    from rltop.cli.connect import Place
    from rltop.cli.get import Query
    from rltop.cli.get import get as run_get

    place = Place(run, remote_rltop=remote_rltop, via=via)
    query = Query(what, tuple(args or ()), lo=lo, hi=hi, buckets=buckets, window=window, limit=limit)
    return run_get(place, query, as_json=as_json)


@app.command()
def export(
    run: Annotated[str | None, typer.Argument(metavar="[RUN|ssh://…]", help="Default: the newest living run.")] = None,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="csv, parquet, tensorboard.")] = "csv",
    what: Annotated[
        str, typer.Option("--what", metavar="TABLE,…", help="series, events, checks (every change of a verdict).")
    ] = "series",
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="METRIC", help="Only these; * and ? stand for anything.")
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="One row per step, one column per metric.")] = False,
    attempts: Annotated[bool, typer.Option("--attempts", help="What a restart went over again, too.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE|DIR", help="Default: stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """A run's curves, events and verdicts as files for other programs; living or dead, here or behind ssh."""
    from rltop.cli.connect import Place
    from rltop.cli.export import Query
    from rltop.cli.export import export as run_export

    words = tuple(dict.fromkeys(word for word in (part.strip() for part in what.split(",")) if word))
    query = Query(to, words or ("series",), tuple(name or ()), wide, attempts, output, force)
    return run_export(Place(run, remote_rltop=remote_rltop, via=via), query)


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders or files that a run left.")],
    as_json: Json = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID,...", help="Checks that must have been tested; step1, step2 and launch are sets of them."
        ),
    ] = None,
    allow_skip: Annotated[bool, typer.Option("--allow-skip", help="A required check may be untested.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Thresholds from its [checks.thresholds].")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also what passed, and why the rest was not tested.")] = False,
    refs: Annotated[bool, typer.Option("--refs", help="--all, with the guide or report of each check.")] = False,
) -> int:
    """What broke a run, from what it left: logs, metrics, samples, dumps, checkpoints, arguments.

    Reads only, and nothing outside PATH. Exit 0: nothing failed; 1: a check failed; 2: the input can not be used.
    """
    from rltop.cli.check import check as run_check

    return run_check(
        paths,
        as_json=as_json,
        require=tuple(require or ()),
        allow_skip=allow_skip,
        config=config,
        refs=refs,
        every=every,
    )


@app.command(context_settings={"ignore_unknown_options": True})
def doctor(
    launch: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | -- COMMAND...",
            help="A launch script, a file of flags, a rltop config (.toml), or the command itself behind --.",
        ),
    ] = None,
    as_json: Json = False,
    ray: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The Ray cluster to place it on; default: the one Ray finds.")
    ] = "",
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Do not ask Ray.")] = False,
    patch: Annotated[
        bool, typer.Option("--patch", help="Print only the patch of the quantisation list, for `patch -p0`.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Thresholds from its [checks.thresholds].")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Every check, also what passed and what was not tested.")
    ] = False,
    refs: Annotated[bool, typer.Option("--refs", help="Say which guide or report each check comes from.")] = False,
) -> int:
    """Before the launch: what is wrong with the arguments, checkpoints, quantisation list, ports and cluster, and what
    the launch will load.

    Reads only. Exit 0: nothing failed; 1: a check failed; 2: the input can not be used.
    """
    from rltop.cli.doctor import doctor as run_doctor

    address = None if no_ray else ray
    return run_doctor(
        launch or (),
        as_json=as_json,
        ray_address=address,
        patch_only=patch,
        config=config,
        refs=refs,
        whole=whole,
    )


@app.command()
def demo(
    headless: Annotated[
        bool, typer.Option("--headless", help="No dashboard; progress on stderr, ends with the run.")
    ] = False,
    as_json: Json = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same rewards for the same seed.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 1,
    num_rollout: Annotated[int | None, typer.Option(min=1, help="Rollouts to run; default: enough to learn.")] = None,
    inject: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Plant a fault; may be repeated.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the run going when the dashboard is left.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Act on the run from the dashboard.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Only ASCII characters on the screen.")] = False,
) -> int:
    """A tiny GRPO run on this CPU and its dashboard.

    It learns its task within two minutes on two cores. What it started is stopped when the dashboard is left.
    """
    from rltop.cli.demo import DemoOptions
    from rltop.cli.demo import demo as run_demo

    if as_json and not headless:
        raise RltopError("--json goes with --headless", where="demo", do="rltop demo --headless --json")
    options = DemoOptions(
        deterministic=deterministic, seed=seed, num_rollout=num_rollout, inject=tuple(inject or ()), keep=keep
    )
    return run_demo(options, headless=headless, as_json=as_json, control=control, ascii_only=ascii_only)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> int:
    """The trainer alone; `rltop train --help` lists its flags."""
    # Only for the list in `rltop --help`: the words behind `train` never come here (main.py).
    raise AssertionError(f"train was dispatched: {context.args} {sys.argv}")
