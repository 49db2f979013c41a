"""`rltop dump …`: looks into what a run saved with `--save-debug-rollout-data`, `--save-debug-train-data`,
`--dump-details`. What the commands do is in modules of their own."""

from __future__ import annotations

import typer

from rltop.cli.dump_replay import replay_reward
from rltop.cli.dump_send import send

dump_app = typer.Typer(
    name="dump",
    help="Look into rollout and train dumps: slime's, Relax's, rltop's. Needs no torch, unpickles nothing.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dump_app.callback()
def dump() -> None:
    """Look into rollout and train dumps: slime's, Relax's, rltop's. Needs no torch, unpickles nothing."""


dump_app.command("replay-reward")(replay_reward)
dump_app.command("send")(send)
