"""`rltop dump …`: looks into what a run saved with `--save-debug-rollout-data`, `--save-debug-train-data`,
`--dump-details`. What the commands do is in modules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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


Pattern = Annotated[
    str, typer.Argument(metavar="PATTERN", help="A dump, a directory, a glob, or a path with {rollout_id}.")
]
Filter = Annotated[
    str,
    typer.Option(
        "--filter",
        metavar="EXPR",
        help="All of: reward<0.5 status=truncated length>=4000 gap>0.1 group=3 index=17 version=4 "
        "metadata.KEY=x text~REGEX, and words.",
    ),
]
Eval = Annotated[bool, typer.Option("--eval", help="The eval_ dumps instead of those of the training.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md has the schema).")]


@dump_app.command()
def show(
    pattern: Pattern,
    chosen: Filter = "",
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only samples with this in prompt or response.")] = "",
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="reward, length, gap, status or group; -reward for descending.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="So many samples.")] = 10,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many before.")] = 0,
    evaluation: Eval = False,
    plain: Annotated[bool, typer.Option("--plain", help="Text, also on a terminal.")] = False,
    as_json: Json = False,
    whole: Annotated[bool, typer.Option("--whole", help="Prompts and responses in full.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="A line per token: log-probs, gap, mask.")] = False,
    metrics: Annotated[
        bool | None,
        typer.Option("--metrics/--no-metrics", help="Recompute slime's metrics. Default: of dumps up to 32 MB."),
    ] = None,
    colour: Annotated[Literal["auto", "always", "never"], typer.Option(help="Log-probs as colours.")] = "auto",
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Only ASCII characters in the pager.")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="A checkpoint with tokenizer.json, where none is beside it."),
    ] = None,
) -> int:
    """Samples one by one: prompt, response by log-prob, reward, status, weight versions, metadata.

    On a terminal a pager. A tokenizer of --dump-details beside the dump, or that of --tokenizer, gives the tokens
    their texts, a train dump beside it the gap between trainer and engine.
    """
    from rltop.cli.dump_open import Wanted
    from rltop.cli.dump_show import How
    from rltop.cli.dump_show import show as run_show

    wanted = Wanted(chosen=chosen, search=search, sort=sort, offset=offset, limit=limit)
    how = How(
        as_json=as_json,
        plain=plain,
        metrics=metrics,
        whole=whole,
        tokens=tokens,
        colour=colour,
        ascii_only=ascii_only,
        tokenizer=tokenizer,
    )
    return run_show(pattern, wanted, how, evaluation=evaluation)


@dump_app.command()
def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A dump, a directory, a glob, or a path with {rollout_id}.")
    ],
    second: Annotated[str | None, typer.Argument(metavar="[B]", help="The other; not with --versions of one.")] = None,
    versions: Annotated[
        str | None, typer.Option(metavar="X,Y", help="Samples that ended with weight version X against those with Y.")
    ] = None,
    chosen: Filter = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="So many prompts.")] = 20,
    evaluation: Eval = False,
    as_json: Json = False,
) -> int:
    """The same prompts in two dumps, or under two weight versions: the first diverging token, rewards, log-probs."""
    from rltop.cli.dump_diff import diff as run_diff

    return run_diff(
        first, second, versions=versions, chosen=chosen, limit=limit, evaluation=evaluation, as_json=as_json
    )


@dump_app.command()
def stats(
    pattern: Pattern,
    groups: Annotated[int, typer.Option(min=0, help="So many groups, those of the widest rewards first.")] = 10,
    evaluation: Eval = False,
    reward_key: Annotated[str | None, typer.Option(metavar="KEY", help="slime's: of rewards that are maps.")] = None,
    log_reward_category: Annotated[
        str | None, typer.Option(metavar="KEY", help="slime's: share of each value of a reward's key.")
    ] = None,
    rollout_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="perf/rollout_time, for tokens per second.")
    ] = None,
    rollout_num_gpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="For tokens per GPU.")] = None,
    as_json: Json = False,
) -> int:
    """What slime would log for each dump, computed from its samples, and a table of its groups."""
    from rltop.cli.dump_stats import Asked
    from rltop.cli.dump_stats import stats as run_stats

    asked = Asked(reward_key, log_reward_category, rollout_time, rollout_num_gpus)
    return run_stats(pattern, asked, groups=groups, evaluation=evaluation, as_json=as_json)


dump_app.command("replay-reward")(replay_reward)
dump_app.command("send")(send)
