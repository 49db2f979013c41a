"""The operator's desk: from what was chosen on the engine screen to commands, their plans and their answers.

Every command is shown as the daemon's plan first, needs a reason, and carries the generations that the operator saw
(compare-and-set): whoever changed an engine in between is not overwritten.

Failure policy: no answer is told as such; whether a command was taken is then seen in the operations, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, LinesAnswer, Rejected
from rltop.tui.clientlike import ClientLike
from rltop.tui.engine_scene import Scene
from rltop.tui.fleet import HTTP_ACTIONS, EngineView
from rltop.tui.operations import OpView, op_of, op_views
from rltop.tui.screens.engines import EnginesScreen
from rltop.tui.screens.plan import Order, PlanDialog, Proposal
from rltop.tui.staging import changes_text, names, target_text
from rltop.tui.theme import Glyphs, Palette
from rltop.tui.toggle_views import toggle_views
from rltop.tui.view import Frame

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "engine-set": ("mode", "keep", "when"),
    "engine-restart": ("mode", "keep", "when"),
    "engine-revert": ("mode", "keep", "when"),
    "engine-stop": ("when",),
    "engine-ab": ("keep", "when"),
    "engine-ab-end": ("keep", "when"),
}
"""What a command lets one choose of how it is carried out."""
LOG_LINES = 500
LOG_EVERY_S = 2.0


class Host(Protocol):
    """What the desk needs of the app."""

    def say(self, text: str) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    def open_dialog(self, dialog: Any, done: Callable[[str | None], None]) -> None: ...

    def put_aside(self, text: str) -> None:
        """Copy to the clipboard."""


class Desk:
    """Works for one engine screen."""

    def __init__(self, host: Host, client: ClientLike, screen: EnginesScreen, glyphs: Glyphs) -> None:
        self._host, self._client, self._screen, self._glyphs = host, client, screen, glyphs
        self._log_asked = -1e9
        self._log_source = ""
        self._asking = False

    # -------------------------------------------------------------- log

    def tick(self, now: float) -> None:
        """Ask for the newest lines of the log in sight: at once for another engine, else every two seconds."""
        source = self._screen.log_wanted
        again = source == self._log_source and now - self._log_asked < LOG_EVERY_S
        if not source or again or self._asking or self._client.status != "live":
            return
        self._log_source, self._log_asked, self._asking = source, now, True
        self._host.spawn(self._read(source))

    async def _read(self, source: str) -> None:
        try:
            answer = await self._client.lines(source, 0, before=LOG_LINES)
        except RltopError as error:
            answer = LinesAnswer(source, why=f"{error.what}: {error.why}" if error.why else error.what)
        finally:
            self._asking = False
        self._screen.take_log(answer)

    # -------------------------------------------------------------- actions

    def perform(self, action: str, palette: Palette) -> bool:
        """Take an action of the engine screen; False when it is none."""
        scene = self._screen.scene()
        changes = dict(self._screen.staging.changes)
        match action:
            case "diff":
                self._propose("engine-set", f"Change {_who(scene)}", scene, palette, {"changes": changes})
            case "restart":
                self._propose("engine-restart", f"Restart {_who(scene)}", scene, palette)
            case "revert":
                self._propose("engine-revert", f"Back to the generation before: {_who(scene)}", scene, palette)
            case "stop" if all(view.stopped for view in scene.targets):
                self._propose("engine-start", f"Start {_who(scene)}", scene, palette)
            case "stop":
                self._propose("engine-stop", f"Stop {_who(scene)}", scene, palette)
            case "ab-run" if scene.fleet is not None and scene.fleet.ab is not None:
                self._propose("engine-ab-end", "End the A/B run", scene, palette, targets=())
            case "ab-run":
                # One engine has no halves: then all of ours are meant.
                among = scene.targets if len(scene.targets) > 1 else [view for view in scene.views if view.owned]
                who = names([scene.frame.safe(view.id) for view in among])
                title = f"A/B: half of {who} with {changes_text(changes)}"
                self._propose("engine-ab", title, scene, palette, {"changes": changes}, targets=among)
            case "http":
                self._http(scene, palette)
            case "cancel-op":
                self._cancel(scene, palette)
            case _:
                return False
        return True

    def _propose(
        self,
        name: str,
        title: str,
        scene: Scene,
        palette: Palette,
        args: Mapping[str, Any] | None = None,
        *,
        targets: Sequence[EngineView] | None = None,
    ) -> None:
        """Show the plan of a command. targets: empty for commands on the whole fleet."""
        chosen = scene.targets if targets is None else targets
        proposal = Proposal(
            name,
            title,
            tuple(view.id for view in chosen),
            args or {},
            options=OPTIONS.get(name, ()),
            keep=scene.fleet.keep if scene.fleet is not None else 1,
            generations=_generations(chosen or [view for view in scene.views if view.owned]),
        )
        before = _picture(scene.frame, proposal)

        def look(old: Proposal) -> tuple[Proposal, Sequence[str]]:
            frame = self._screen.scene().frame
            views = [view for view in frame.engines() if view.id in old.generations]
            return replace(old, generations=_generations(views)), _news(before, _picture(frame, old), frame, old)

        dialog = PlanDialog(proposal, palette, self._glyphs, send=self._send, look=look, copy=self._host.put_aside)
        self._host.open_dialog(dialog, lambda op: self._sent(name, op))

    def _send(self, dialog: PlanDialog, order: Order) -> None:
        async def send() -> None:
            dialog.take(order, await self._order(order))

        self._host.spawn(send())

    async def _order(self, order: Order) -> Accepted | Rejected:
        proposal = order.proposal
        more: dict[str, Any] = {"dry_run": order.dry_run, "reason": order.reason}
        if len(proposal.engines) == 1 and (seen := proposal.generations.get(proposal.engines[0])) is not None:
            more["if_gen"] = seen
        args = {**order.args, "generations": dict(proposal.generations)}
        try:
            return await self._client.command(proposal.name, target_text(proposal.engines), args=args, **more)
        except RltopError as error:
            do = "" if order.dry_run else "it may have been taken all the same: look at the operations"
            return Rejected("no-answer", f"{error.what}: {error.why}" if error.why else error.what, error.do or do)

    def _sent(self, name: str, op: str | None) -> None:
        if op is None:
            self._host.say("nothing was sent")
            return
        if name in ("engine-set", "engine-ab"):
            self._screen.staging.drop()
        self._host.say(f"{name} accepted, operation {op}")

    def _http(self, scene: Scene, palette: Palette) -> None:
        from rltop.tui.screens.dialogs import Choice, PaletteDialog

        words = {
            "flush": "Flush the KV and prefix cache",
            "pause": "Pause generation",
            "continue": "Continue generation",
            "profile": "Profile some steps",
        }
        offered = [Choice(action, words[action]) for action in HTTP_ACTIONS]
        cursor = scene.cursor
        if cursor is None:
            return
        who = names([scene.frame.safe(cursor.id)])

        def chosen(action: str | None) -> None:
            if action in HTTP_ACTIONS:
                title = f"{words[action]}: {who}"
                self._propose("engine-http", title, scene, palette, {"action": action}, targets=[cursor])

        self._host.open_dialog(PaletteDialog(offered, palette, self._glyphs, f"Ask {who}"), chosen)

    def _cancel(self, scene: Scene, palette: Palette) -> None:
        """Cancel what runs on the cursor's engine, else the newest."""
        from rltop.tui.screens.dialogs import ConfirmDialog

        running = [op for op in scene.ops if op.runs]
        mine = op_of(running, scene.cursor.id) if scene.cursor is not None else None
        op = mine or running[0]
        safe = scene.frame.safe
        question = safe(f"Cancel {op.name} {op.target} (operation {op.op})?")
        details = [
            safe(f"It is at: {op.stage or op.state}." + (f" Begun by {op.who}." if op.who else "")),
            "It stops at the next whole step: no engine is left half-changed.",
        ]
        dialog = ConfirmDialog(question, details, palette, self._glyphs)
        self._host.open_dialog(
            dialog, lambda yes: self._host.spawn(self._cancel_now(op)) if yes == "yes" else self._host.say("it goes on")
        )

    async def _cancel_now(self, op: OpView) -> None:
        answer = await self._client.command("cancel", op.op, reason="dashboard")
        if isinstance(answer, Rejected):
            self._host.say(f"cancel refused: {answer.why} {answer.do}".rstrip())
        else:
            self._host.say(f"operation {op.op} was told to stop")


def _who(scene: Scene) -> str:
    return names([scene.frame.safe(view.id) for view in scene.targets])


def _generations(views: Sequence[EngineView]) -> dict[str, int]:
    return {view.id: view.generation for view in views if view.generation is not None}


def _picture(frame: Frame, proposal: Proposal) -> dict[str, tuple[EngineView, dict[str, str]]]:
    """Engines of a proposal as they are now, with what their toggles are asked to be."""
    return {
        view.id: (view, {toggle.name: toggle.now for toggle in toggle_views(frame.state, view.id)})
        for view in frame.engines()
        if view.id in proposal.generations
    }


def _news(
    before: Mapping[str, tuple[EngineView, Mapping[str, str]]],
    now: Mapping[str, tuple[EngineView, Mapping[str, str]]],
    frame: Frame,
    proposal: Proposal,
) -> list[str]:
    """What somebody else did, engine by engine."""
    lines: list[str] = []
    ops = op_views(frame.state)
    for engine, (old, toggles) in before.items():
        if engine not in now:
            lines.append(f"engine {engine} is gone")
            continue
        view, newer = now[engine]
        if view.generation == old.generation == proposal.generations.get(engine) and newer == toggles:
            continue
        changed = [
            f"{name} {toggles.get(name) or '-'} -> {value}"
            for name, value in newer.items()
            if value and toggles.get(name) != value  # while it starts nothing is known of it
        ]
        told = f"engine {engine}: generation {old.generation} -> {view.generation}, {view.state}"
        told += f"; {', '.join(changed)}" if changed else ""
        op = op_of(ops, engine)
        told += f" (by {op.who}: {op.reason or op.name})" if op is not None and op.who else ""
        lines.append(told)
    return lines
