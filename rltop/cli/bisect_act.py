"""`rltop bisect start|pause|resume|stop`: what it would do first, then a question, then the command.

The bisection is the daemon's: it goes on when this process ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.cli.bisect_find import WANT
from rltop.cli.bisect_show import followed
from rltop.cli.connect import Place, running
from rltop.cli.engine import Ask, act, refused
from rltop.cli.output import clean, note, print_json
from rltop.client import Client
from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, Rejected

BEGIN_S = 30.0
"""Longest wait for the first picture of a bisection that was accepted."""


@dataclass(frozen=True, slots=True)
class Start:
    """A bisection, as typed."""

    args: Mapping[str, Any]
    reason: str = ""
    yes: bool = False
    dry_run: bool = False
    follow: bool = False
    name: str = ""

    @property
    def ask(self) -> Ask:
        """As a command."""
        return Ask("bisect-start", str(self.args.get("engine", "")), self.args, reason=self.reason, name=self.name)


def start(place: Place, wanted: Start, *, as_json: bool) -> int:
    """Plan, ask, begin; with `follow` until it is over. Raises RltopError: refused, or nobody said yes."""
    plan, seen = asyncio.run(_plan(place, wanted))
    if wanted.dry_run:
        if as_json:
            print_json({"run": seen["run"], "op": "", "dry_run": True, "plan": list(plan)})
        else:
            print("\n".join(map(clean, plan)))
        return 0
    for line in plan:
        note(clean(line))
    if not wanted.yes and not _confirmed():
        note("nothing was begun")
        return 1
    try:
        return asyncio.run(_begin(place, wanted, seen, plan, as_json=as_json))
    except KeyboardInterrupt:
        _goes_on(place)
        raise


def _goes_on(place: Place) -> None:
    where = "" if place.target is None else f" --run {place.target}"
    note(f"\nit goes on without this command: rltop bisect status{where}, rltop bisect stop{where}")


def _confirmed() -> bool:
    """The answer of whoever sits there. Raises RltopError: nobody does."""
    if not sys.stdin.isatty():
        raise RltopError(
            "nobody is there to say yes to this plan",
            where="bisect start",
            why="stdin is no terminal",
            do="--yes begins without a question, --dry-run only shows the plan",
        )
    print("Begin? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _plan(place: Place, wanted: Start) -> tuple[Sequence[str], dict[str, Any]]:
    """The daemon's plan, and what was seen when it was made."""
    client = place.client(role="control", name=wanted.name, want=WANT)
    async with running(client):
        await client.wait_live(place.patience_s)
        answer = await client.command(
            "bisect-start", wanted.ask.target, dict(wanted.args), reason=wanted.reason, dry_run=True
        )
        if isinstance(answer, Rejected):
            raise refused(wanted.ask, answer)
        mirror = client.mirror
        return answer.plan, {"run": mirror.run, "epoch": mirror.epoch, "generations": _generations(mirror.state)}


def _generations(state: Mapping[str, Any]) -> dict[str, int]:
    """Of the engines that rltop owns: whoever restarts one between plan and yes is not overrun."""
    cells = {key.removeprefix("engine/"): value for key, value in state.items() if key.startswith("engine/")}
    return {
        name: cell["generation"]
        for name, cell in cells.items()
        if cell.get("owner") == "rltop" and isinstance(cell.get("generation"), int)
    }


async def _begin(place: Place, wanted: Start, seen: Mapping[str, Any], plan: Sequence[str], *, as_json: bool) -> int:
    client = place.client(role="control", name=wanted.name, want=WANT, fps=5.0)
    async with running(client):
        await client.wait_live(place.patience_s)
        args = {**wanted.args, "generations": seen["generations"]}
        answer = await client.command(
            "bisect-start", wanted.ask.target, args, reason=wanted.reason, if_epoch=seen["epoch"]
        )
        if isinstance(answer, Rejected):
            raise refused(wanted.ask, answer)
        return await _away(client, "bisect start", answer, plan, follow=wanted.follow, as_json=as_json)


async def _away(
    client: Client, where: str, answer: Accepted, plan: Sequence[str], *, follow: bool, as_json: bool
) -> int:
    """It runs: that is said, or with `follow` all of it is."""
    bisection = await _begun(client, where, answer)
    if follow:
        note(f"bisection {bisection}, operation {answer.op}")
        return await followed(client, bisection, as_json=as_json)
    if as_json:
        told = {"run": client.mirror.run, "op": answer.op, "dry_run": False, "id": bisection, "plan": list(plan)}
        print_json(told)
    else:
        print(clean(f"bisection {bisection} runs (operation {answer.op}): rltop bisect status --follow"))
    return 0


def resume(place: Place, ask: Ask, *, follow: bool, as_json: bool) -> int:
    """Go on after a pause, or with one that was cut off; returns when it runs, with `follow` when it is over.

    Raises RltopError: refused, or it could not be gone on with.
    """
    try:
        return asyncio.run(_resume(place, ask, follow=follow, as_json=as_json))
    except KeyboardInterrupt:
        _goes_on(place)
        raise


async def _resume(place: Place, ask: Ask, *, follow: bool, as_json: bool) -> int:
    client = place.client(role="control", name=ask.name, want=WANT, fps=5.0)
    async with running(client):
        await client.wait_live(place.patience_s)
        answer = await client.command(ask.command, ask.target, {}, reason=ask.reason, dry_run=ask.dry_run)
        if isinstance(answer, Rejected):
            raise refused(ask, answer)
        if not ask.dry_run:
            for line in answer.plan:
                note(clean(line))
            return await _away(client, "bisect resume", answer, answer.plan, follow=follow, as_json=as_json)
        if as_json:
            print_json({"run": client.mirror.run, "op": "", "dry_run": True, "plan": list(answer.plan)})
        else:
            print("\n".join(map(clean, answer.plan)))
        return 0


async def _begun(client: Client, where: str, answer: Accepted) -> str:
    """The id of what was accepted. Raises RltopError: it could not be begun after all."""
    while True:
        op = client.mirror.state.get(f"op/{answer.op}") or {}
        cell = client.mirror.state.get("bisect") or {}
        if op.get("state") in ("failed", "cancelled"):
            raise RltopError("it could not be begun", where=where, why=str(op.get("text")), exit_code=1)
        goes_on = not cell.get("ended") and cell.get("state") != "paused"
        if op and cell and (goes_on or float(cell.get("ended") or 0.0) >= float(op.get("t") or 0.0)):
            return str(cell.get("id"))
        try:
            async with asyncio.timeout(BEGIN_S):
                await client.wait_change()
        except TimeoutError:
            why = client.problem or "the daemon shows no bisection"
            raise RltopError(
                f"operation {answer.op} was accepted, and nothing is seen of it", why=why, exit_code=1
            ) from None


def other(place: Place, command: str, *, reason: str, dry_run: bool, name: str, as_json: bool) -> int:
    """Pause or stop the one that runs, and wait until that is done."""
    return act(place, Ask(command, "", {}, reason=reason, dry_run=dry_run, name=name), as_json=as_json)
