"""`rltop engine …`: the commands and their flags. What they do is in `rltop.cli.engine` and `rltop.cli.engine_logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.cli.connect import Place
    from rltop.cli.engine import Ask

engine_app = typer.Typer(
    name="engine",
    help="Engines from the shell: what the dashboard does. They are restarted one after the other, and serve nothing "
    "until they hold the right weights.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Run = Annotated[str | None, typer.Option("--run", metavar="RUN|ssh://…", help="Default: the newest living run.")]
Engines = Annotated[str, typer.Option("--engine", metavar="0,2|all", help="Which engines.")]
OneEngine = Annotated[str, typer.Option("--engine", metavar="ID", help="Which engine.")]
Keep = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="At least so many go on serving; default: what the run says.")
]
Rolling = Annotated[bool, typer.Option("--rolling/--at-once", help="One after the other, or all together.")]
When = Annotated[
    Literal["now", "safe-point"], typer.Option(help="At once, or when no rollout is going on (between two steps).")
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for the journal and the others.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not follow the operation to its end.")]
AsName = Annotated[str, typer.Option("--as", metavar="NAME", help="Who you are, for the others and the journal.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")]
RemoteRltop = Annotated[str, typer.Option(metavar="PATH", help="The rltop on the other machine.")]
Via = Annotated[str | None, typer.Option(metavar="CMD", help="Command prefix instead of ssh.")]


def _place(run: str | None, remote_rltop: str, via: str | None) -> Place:
    from rltop.cli.connect import Place

    return Place(run, remote_rltop=remote_rltop, via=via)


def _act(place: Place, ask: Ask, *, as_json: bool) -> int:
    from rltop.cli.engine import act

    return act(place, ask, as_json=as_json)


@engine_app.command("list")
def list_engines(
    run: Run = None,
    engine: Annotated[str, typer.Option("--engine", metavar="0,2|all", help="Which engines.")] = "all",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """State, since when and why, health signals, toggles and weights of every engine."""
    from rltop.cli.engine import show

    return show(_place(run, remote_rltop, via), engine, as_json=as_json)


@engine_app.command("set")
def set_toggles(
    changes: Annotated[list[str], typer.Argument(metavar="TOGGLE=VALUE…", help="For example cuda_graph=off.")],
    engine: Engines,
    run: Run = None,
    rolling: Rolling = True,
    keep: Keep = None,
    when: When = "now",
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Restart engines with toggles changed, and look whether the change took effect.

    --dry-run shows the arguments and variables that would change. Ctrl-C leaves the operation going.
    """
    from rltop.cli.engine import Ask, changes_of

    args = {"changes": changes_of(changes), **_how(rolling, keep, when)}
    ask = Ask("engine-set", engine, args, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def restart(
    engine: Engines,
    run: Run = None,
    rolling: Rolling = True,
    keep: Keep = None,
    when: When = "now",
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Restart engines as they are: drain, stop, wait for the memory, start, load the weights."""
    from rltop.cli.engine import Ask

    ask = Ask(
        "engine-restart",
        engine,
        _how(rolling, keep, when),
        reason=reason,
        dry_run=dry_run,
        wait=not no_wait,
        name=name,
    )
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def stop(
    engine: Engines,
    run: Run = None,
    when: When = "now",
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Drain and stop engines; they stay stopped until `start`."""
    from rltop.cli.engine import Ask

    ask = Ask("engine-stop", engine, {"when": when}, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def start(
    engine: Engines,
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Start engines that are stopped, quarantined or waiting out a crash."""
    from rltop.cli.engine import Ask

    ask = Ask("engine-start", engine, {}, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def revert(
    engine: Engines,
    run: Run = None,
    rolling: Rolling = True,
    keep: Keep = None,
    when: When = "now",
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Back to the arguments and variables of the generation before."""
    from rltop.cli.engine import Ask

    how = _how(rolling, keep, when)
    ask = Ask("engine-revert", engine, how, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def ab(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="TOGGLE=VALUE…", help="What half of the engines get.")
    ] = None,
    engine: Engines = "all",
    end: Annotated[bool, typer.Option("--end", help="End it: all engines as they were.")] = False,
    run: Run = None,
    keep: Keep = None,
    when: When = "now",
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Half of the engines one way, half the other, on the same traffic; without a change: the difference so far."""
    from rltop.cli.engine import Ask, changes_of, show_ab

    place = _place(run, remote_rltop, via)
    if end and changes:
        raise RltopError("--end takes no toggles", where="engine ab", do="rltop engine ab --end")
    if not end and not changes:
        return show_ab(place, as_json=as_json)
    command = "engine-ab-end" if end else "engine-ab"
    args: dict[str, object] = {"when": when, **({} if keep is None else {"keep": keep})}
    if not end:
        args["changes"] = changes_of(changes or [])
    ask = Ask(command, engine, args, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(place, ask, as_json=as_json)


@engine_app.command()
def http(
    action: Annotated[Literal["flush", "pause", "continue", "profile"], typer.Argument(help="What to ask of it.")],
    engine: Engines,
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """What SGLang's HTTP API allows, also on engines that others run: empty the cache, pause, go on, profile."""
    from rltop.cli.engine import Ask

    ask = Ask("engine-http", engine, {"action": action}, reason=reason, dry_run=dry_run, wait=not no_wait, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def cancel(
    op: Annotated[str, typer.Argument(metavar="OP", help="Number of the operation.")],
    run: Run = None,
    reason: Reason = "",
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Stop an operation that is going on: what is half done is finished or taken back, nothing new is begun."""
    from rltop.cli.engine import Ask

    ask = Ask("cancel", op, {}, reason=reason, name=name)
    return _act(_place(run, remote_rltop, via), ask, as_json=as_json)


@engine_app.command()
def logs(
    engine: OneEngine,
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what it says from now on.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=500, help="Last lines.")] = 50,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """The end of an engine's log. With -f over restarts too, each generation announced."""
    from rltop.cli.engine_logs import logs as run_logs

    return run_logs(_place(run, remote_rltop, via), engine, follow=follow, lines=lines)


def _how(rolling: bool, keep: int | None, when: str) -> dict[str, object]:
    found: dict[str, object] = {"mode": "rolling" if rolling else "at-once", "when": when}
    return found if keep is None else {**found, "keep": keep}
