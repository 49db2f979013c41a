"""`rltop bisect …`: the commands and their flags. What they do is in the modules of the same names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.cli.connect import Place

bisect_app = typer.Typer(
    name="bisect",
    help="Which toggle makes an engine crash (docs/bisect.md).",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN|ssh://…", help="Default: the newest living run.")]
Which = Annotated[str, typer.Option("--id", metavar="N", help="Which bisection of the run; default: the newest.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for the journal and the others.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="A line for each trial that begins or ends, to the end.")]
AsName = Annotated[str, typer.Option("--as", metavar="NAME", help="Who you are, for the others and the journal.")]
RemoteRltop = Annotated[str, typer.Option(metavar="PATH", help="The rltop on the other machine.")]
Via = Annotated[str | None, typer.Option(metavar="CMD", help="Command prefix instead of ssh.")]


def _place(run: str | None, remote_rltop: str, via: str | None) -> Place:
    from rltop.cli.connect import Place

    return Place(run, remote_rltop=remote_rltop, via=via)


@bisect_app.callback()
def root() -> None:
    """Which toggle makes an engine crash (docs/bisect.md)."""


@bisect_app.command()
def start(
    engine: Annotated[
        str, typer.Option(metavar="ID", help="Whose newest crash; default: the newest illegal access of all.")
    ] = "",
    toggles: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Only these; default: every one that is on and can be off.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="0,2", help="The engines to try on; default: half of the fit ones."),
    ] = None,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="All engines are tried on; nobody serves the run meanwhile.")
    ] = False,
    budget_min: Annotated[
        float | None, typer.Option(min=0.1, metavar="MIN", help="Give up after so many minutes; default: a day.")
    ] = None,
    traffic: Annotated[
        str, typer.Option(metavar="DUMP|synthetic", help="Instead of the requests before the crash.")
    ] = "",
    time_scale: Annotated[
        float | None, typer.Option(min=0.001, help="Rehearsals with a stand-in: a second counts as so many.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    follow: Follow = False,
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Find out which toggles a crash takes: shows what would be done, asks, and begins.

    Some engines leave the rotation and are restarted with toggles off, under the traffic of the crash, until it is
    clear; then they go back to their own flags. The run goes on with the others.
    """
    from rltop.cli.bisect_act import Start
    from rltop.cli.bisect_act import start as begin

    given: dict[str, Any] = {"engine": engine, "traffic": traffic, "budget_min": budget_min, "time_scale": time_scale}
    given |= {
        "toggles": _words("--toggles", toggles),
        "engines": _words("--on", on),
        "mode": "exclusive" if exclusive else None,
    }
    args = {key: value for key, value in given.items() if value not in ("", None, [])}
    wanted = Start(args, reason=reason, yes=yes, dry_run=dry_run, follow=follow, name=name)
    return begin(_place(run, remote_rltop, via), wanted, as_json=as_json)


def _words(flag: str, text: str | None) -> list[str]:
    """Raises RltopError: it is given, and names nothing (a variable that is not set, say)."""
    found = [word.strip() for word in (text or "").split(",") if word.strip()]
    if text is not None and not found:
        where = f"bisect start {flag}"
        raise RltopError(f"{text!r} names nothing", where=where, do=f"{flag} A,B, or leave {flag} out for the default")
    return found


@bisect_app.command()
def status(
    bisection: Which = "",
    follow: Follow = False,
    run: Run = None,
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Where it stands: every trial, what is believed, what comes next. Also of a run that ended."""
    from rltop.cli.bisect_show import status as show

    return show(_place(run, remote_rltop, via), bisection, follow=follow, as_json=as_json)


@bisect_app.command()
def pause(
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """No traffic until `resume`; its engines stay reserved."""
    from rltop.cli.bisect_act import other

    place = _place(run, remote_rltop, via)
    return other(place, "bisect-pause", reason=reason, dry_run=dry_run, name=name, as_json=as_json)


@bisect_app.command()
def resume(
    follow: Follow = False,
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """Go on after a pause; or with the bisection that was cut off when the run went down, once its engines run.

    Returns when it goes on, as `start` does; --follow stays until it is over, and Ctrl-C leaves it going.
    """
    from rltop.cli.bisect_act import resume as go_on
    from rltop.cli.engine import Ask

    asked = Ask("bisect-resume", "", {}, reason=reason, dry_run=dry_run, name=name)
    return go_on(_place(run, remote_rltop, via), asked, follow=follow, as_json=as_json)


@bisect_app.command()
def stop(
    run: Run = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    name: AsName = "",
    as_json: Json = False,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """End it, and wait until its engines are back on their own flags."""
    from rltop.cli.bisect_act import other

    place = _place(run, remote_rltop, via)
    return other(place, "bisect-stop", reason=reason, dry_run=dry_run, name=name, as_json=as_json)


@bisect_app.command()
def export(
    bisection: Which = "",
    to: Annotated[Literal["md", "json"], typer.Option("--to", help="A page for a bug report, or data.")] = "md",
    file: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: stdout.")] = None,
    run: Run = None,
    remote_rltop: RemoteRltop = "rltop",
    via: Via = None,
) -> int:
    """A bug report without keys, hosts, users and paths: what crashes and how to see it. Needs no daemon."""
    from rltop.cli.bisect_export import export as write

    return write(_place(run, remote_rltop, via), bisection, to=to, file=file)


@bisect_app.command("simulate")
def simulate(
    bug: Annotated[
        str | None,
        typer.Option(metavar="A+B", help="Play a bisection of this culprit step by step; 'none': of no toggle."),
    ] = None,
    mean_min: Annotated[
        float | None, typer.Option(min=0.1, max=10_000, help="With --bug: mean minutes to a crash; default: 20.")
    ] = None,
    bugs: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="A table of so many random bugs (50); with --bug, of that one."),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=64, help="Engines that bisect at the same time.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed plays the same.")] = 0,
    law: Annotated[
        Literal["mixed", "steady", "waves", "wear", "early", "start"],
        typer.Option(help="When the crash comes; 'start': before the first request."),
    ] = "mixed",
    toggles: Annotated[
        str, typer.Option(metavar="A,B,…", help="What can be turned off.")
    ] = "cuda_graph,speculative,overlap_schedule,deepep,prefill_graph",
    restart_min: Annotated[float, typer.Option(min=0.0, max=600, help="Minutes of a restart.")] = 2.0,
    budget_min: Annotated[float, typer.Option(min=1, help="Give up after so many minutes.")] = 20_160.0,
    priors: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Instead of your bisect-priors.toml.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --bug: the first crash's core dump named this kernel.")
    ] = None,
    as_json: Json = False,
) -> int:
    """A rehearsal: what a bisection would do, and how often it would be right. No engine is touched.

    With --bug every step of one bisection with its reason; without, rltop beside what people do today on random bugs,
    with both on that one bug.
    """
    from rltop.cli.bisect_simulate import Asked, rehearsal, table

    asked = Asked(
        toggles=tuple(name.strip() for name in toggles.split(",") if name.strip()),
        engines=engines,
        seed=seed,
        law=law,
        restart_min=restart_min,
        budget_min=budget_min,
        priors=priors,
        kernel=(kernel or "").strip(),
    )
    if kernel is not None and bug is None:
        raise RltopError("--kernel goes with --bug", where="bisect simulate --kernel", do="--bug A+B --kernel NAME")
    if bug is not None and not bug.strip():
        raise RltopError("'' names no bug", where="bisect simulate --bug", do="--bug A+B, or none: of no toggle")
    if mean_min is not None and bug is None:
        raise RltopError("--mean-min goes with --bug", where="bisect simulate --mean-min", do="--bug A+B --mean-min 20")
    for flag, value in (("--budget-min", budget_min), ("--restart-min", restart_min), ("--mean-min", mean_min)):
        if value is not None and not math.isfinite(value):
            raise RltopError(f"{value} is no number of minutes", where=f"bisect simulate {flag}", do=f"{flag} 60, say")
    mean = 20.0 if mean_min is None else mean_min
    if bug is not None and bugs is None:
        return rehearsal(asked, bug, mean, as_json=as_json)
    return table(asked, 50 if bugs is None else bugs, bug=bug, mean_min=mean, as_json=as_json)
