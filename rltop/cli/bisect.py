"""`rltop bisect …`: the commands and their flags. What they do is in the modules of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

bisect_app = typer.Typer(
    name="bisect",
    help="Which toggle makes an engine crash (docs/bisect.md).",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")]


@bisect_app.callback()
def root() -> None:
    """Which toggle makes an engine crash (docs/bisect.md)."""


@bisect_app.command("simulate")
def simulate(
    bug: Annotated[
        str, typer.Option(metavar="A+B", help="Play one bisection of this culprit, step by step; 'none': of no toggle.")
    ] = "",
    mean_min: Annotated[float, typer.Option(min=0.1, max=10_000, help="With --bug: mean minutes to a crash.")] = 20.0,
    bugs: Annotated[int, typer.Option(min=1, max=100_000, help="Without --bug: so many random bugs.")] = 50,
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
    as_json: Json = False,
) -> int:
    """A rehearsal: what a bisection would do, and how often it would be right. No engine is touched.

    With --bug every step of one bisection with its reason; without, rltop beside what people do today on random bugs.
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
    )
    if bug:
        return rehearsal(asked, bug, mean_min, as_json=as_json)
    return table(asked, bugs, as_json=as_json)
