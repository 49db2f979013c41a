"""The operator's desk for a bisection: each command is shown as the daemon's plan first and needs a reason.

Failure policy: no answer is told as such; whether a command was taken is then seen in the cell, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, LinesAnswer, Rejected
from rltop.tui.clientlike import ClientLike
from rltop.tui.desk import Host
from rltop.tui.screens.bisect import BisectScreen, EvidenceDialog
from rltop.tui.screens.plan import Order, PlanDialog, Proposal
from rltop.tui.theme import Glyphs, Palette
from rltop.tui.view import Frame

LOG_LINES = 200
_TITLES = {
    "bisect-start": "Which toggles does the crash take",
    "bisect-stop": "End the bisection",
    "bisect-pause": "Pause the bisection",
    "bisect-resume": "Let the bisection go on",
}


class BisectDesk:
    """Works for one Bisect screen."""

    def __init__(self, host: Host, client: ClientLike, screen: BisectScreen, glyphs: Glyphs) -> None:
        self._host, self._client, self._screen, self._glyphs = host, client, screen, glyphs

    def perform(self, action: str, frame: Frame, palette: Palette) -> bool:
        """Take an action of the Bisect screen; False when it is none."""
        story = self._screen.story()
        match action:
            case "bisect-start":
                engine = self._screen.engine
                self._propose("bisect-start", frame, palette, {"engine": engine} if engine else {})
            case "bisect-stop":
                self._propose("bisect-stop", frame, palette, {})
            case "bisect-pause" if story is not None and (story.state == "paused" or story.cut_off):
                self._propose("bisect-resume", frame, palette, {})
            case "bisect-pause":
                self._propose("bisect-pause", frame, palette, {})
            case "evidence" if story is not None and (trial := self._screen.matrix.cursor(story)) is not None:
                self._host.open_dialog(EvidenceDialog(trial, frame, palette, self._ask), lambda answer: None)
            case _:
                return False
        return True

    def _propose(self, name: str, frame: Frame, palette: Palette, args: dict[str, Any]) -> None:
        # While it runs its engines come and go: only a start is held against what was seen.
        seen = {view.id: view.generation for view in frame.engines() if view.owned and view.generation is not None}
        proposal = Proposal(name, _TITLES[name], (), args, generations=seen if name == "bisect-start" else {})

        def look(old: Proposal) -> tuple[Proposal, Sequence[str]]:
            return old, ["an engine was restarted meanwhile: close this and look again"]

        dialog = PlanDialog(proposal, palette, self._glyphs, send=self._send, look=look, copy=self._host.put_aside)
        self._host.open_dialog(
            dialog, lambda op: self._host.say("nothing was sent" if op is None else f"{name} accepted, operation {op}")
        )

    def _send(self, dialog: PlanDialog, order: Order) -> None:
        async def send() -> None:
            dialog.take(order, await self._order(order))

        self._host.spawn(send())

    async def _order(self, order: Order) -> Accepted | Rejected:
        proposal = order.proposal
        args = {**order.args, **({"generations": dict(proposal.generations)} if proposal.generations else {})}
        try:
            return await self._client.command(proposal.name, "", args=args, dry_run=order.dry_run, reason=order.reason)
        except RltopError as error:
            do = "" if order.dry_run else "it may have been taken all the same: look at the screen"
            return Rejected("no-answer", f"{error.what}: {error.why}" if error.why else error.what, error.do or do)

    def _ask(self, dialog: EvidenceDialog) -> None:
        async def ask() -> None:
            source = dialog.trial.log
            try:
                answer = await self._client.lines(source, 0, before=LOG_LINES)
            except RltopError as error:
                answer = LinesAnswer(source, why=f"{error.what}: {error.why}" if error.why else error.what)
            dialog.take(answer)

        self._host.spawn(ask())
