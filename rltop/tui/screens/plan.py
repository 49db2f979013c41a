"""What a command on engines would do, before it is sent: the daemon's plan, how it is carried out, and the reason.

Nothing is sent before a reason was typed and Enter pressed. Somebody else's change in between is told with what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from rltop.protocol.messages import Accepted, Rejected
from rltop.tui.rows import Row, Span
from rltop.tui.screens.dialogs import Dialog
from rltop.tui.text import clean, wrap
from rltop.tui.theme import Glyphs, Palette


class Proposal(Struct, frozen=True):
    """One command on engines, not sent yet."""

    name: str
    """The command."""
    title: str
    engines: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """What can be chosen of `mode` (one after the other or at once), `keep` (how many go on serving) and `when` (now or
    at the next safe point)."""
    keep: int = 1
    """Engines that go on serving, to begin with."""
    generations: Mapping[str, int] = field(default_factory=dict)
    """What the operator has seen: the daemon refuses when it is otherwise."""


class Order(Struct, frozen=True):
    """A proposal with its options: what is sent."""

    proposal: Proposal
    args: Mapping[str, Any]
    dry_run: bool
    reason: str = ""


class PlanDialog(Dialog):
    """Asks for the plan as soon as it is up, and again after each change of an option.

    send: hands an order to the daemon; the answer comes back through `take`. look: the proposal as of now, with the
    newest generations, and what has changed since the old one, in words. Dismissed with the number of the operation.
    """

    def __init__(
        self,
        proposal: Proposal,
        palette: Palette,
        glyphs: Glyphs,
        *,
        send: Callable[[PlanDialog, Order], None],
        look: Callable[[Proposal], tuple[Proposal, Sequence[str]]],
        copy: Callable[[str], None],
    ) -> None:
        super().__init__(proposal.title, palette, glyphs, widest=110)
        self.proposal = proposal
        self._send, self._look, self._copy = send, look, copy
        self._mode = "rolling"
        self._keep = proposal.keep
        self._when = "now"
        self._plan: list[str] = []
        self._refusal: Rejected | None = None
        self._changed: Sequence[str] = ()
        self._waits = False
        self._reason: str | None = None
        """What was typed so far; None: the plan is being read."""
        self._note = ""

    def on_mount(self) -> None:
        self._ask()

    # -------------------------------------------------------------- asking

    @property
    def args(self) -> dict[str, Any]:
        """The command's arguments with the options."""
        chosen: dict[str, Any] = {"mode": self._mode, "keep": self._keep, "when": self._when}
        return dict(self.proposal.args) | {name: value for name, value in chosen.items() if self._offers(name)}

    def _offers(self, option: str) -> bool:
        """Whether an option has a meaning now."""
        return option in self.proposal.options and (option != "keep" or self._mode == "rolling")

    def _ask(self) -> None:
        self._waits, self._refusal = True, None
        self._send(self, Order(self.proposal, self.args, dry_run=True))

    def take(self, order: Order, answer: Accepted | Rejected) -> None:
        """The daemon's answer. One to options that were changed since is not looked at."""
        if order.proposal is not self.proposal or dict(order.args) != self.args:
            return
        self._waits = False
        if isinstance(answer, Accepted):
            if not order.dry_run:
                self.dismiss(answer.op)
                return
            self._plan = list(answer.plan)
        else:
            self._refuse(answer)
        if self.is_mounted:
            self.paint()

    def _refuse(self, answer: Rejected) -> None:
        self._refusal, self._reason = answer, None
        self._plan = []
        if answer.code == "stale-generation":
            self.proposal, self._changed = self._look(self.proposal)

    # -------------------------------------------------------------- painting

    def body(self, width: int) -> list[Row]:
        self._hint = self._hints()
        rows: list[Row] = []
        if self.proposal.options:
            rows += [self._options(), ()]
        if self._reason is not None:
            rows += [(("reason: ", "accent"), (self._reason, "strong"), (self._glyphs.half, "accent")), ()]
        if self._note:
            rows += [((self._note, "warn"),), ()]
        if self._refusal is not None:
            rows += self._refused(self._refusal, width)
        elif self._waits:
            rows.append((("asking the daemon ...", "dim"),))
        elif not self._plan:
            rows.append((("nothing would change", "dim"),))
        for line in self._plan:
            rows += plan_rows(self._clean(line), width)
        return rows

    def _options(self) -> Row:
        row: list[Span] = []
        if self._offers("mode"):
            row.append(("m ", "accent"))
        if self._offers("keep"):
            row += [(f"rolling, {self._keep} keep serving ", "strong"), ("(+ -)   ", "accent")]
        elif self._offers("mode"):
            row.append(("all at once   ", "strong"))
        if self._offers("when"):
            row += [("w ", "accent"), ("now" if self._when == "now" else "at the next safe point", "strong")]
        return tuple(row)

    def _refused(self, answer: Rejected, width: int) -> list[Row]:
        stale = answer.code == "stale-generation"
        first = "Somebody else changed it since you looked." if stale else f"The daemon refuses ({answer.code})."
        rows: list[Row] = [((first, "warn+b"),)]
        for text, style in ((answer.why, "text"), (answer.do, "accent")):
            rows += [((line, style),) for line in wrap(self._clean(text), width)] if text else []
        for line in self._changed if stale else ():
            rows += [((piece, "strong"),) for piece in wrap(self._clean(line), width)]
        return rows

    def _hints(self) -> str:
        dot = self._glyphs.dot
        if self._reason is not None:
            return f"enter sends it {dot} esc back to the plan"
        if self._refusal is not None:
            return f"r looks again {dot} esc closes"
        return f"enter goes on {dot} y copy {dot} esc closes" if self._plan else "esc closes"

    def _clean(self, text: str) -> str:
        return clean(text, ascii_only=self._glyphs.ascii_only, newline=self._glyphs.newline)

    # -------------------------------------------------------------- keys

    def press(self, key: str, character: str | None) -> None:
        self._note = ""
        if self._reason is not None:
            self._type(key, character)
            return
        match key:
            case "enter" if self._plan and self._refusal is None and not self._waits:
                self._reason, self.top = "", 0
            case "enter":
                pass
            case "r" if self._refusal is not None:
                self._changed = ()
                self._ask()
            case "m" if self._offers("mode"):
                self._mode = "at-once" if self._mode == "rolling" else "rolling"
                self._ask()
            case "w" if self._offers("when"):
                self._when = "safe-point" if self._when == "now" else "now"
                self._ask()
            case "plus" | "equals_sign" if self._offers("keep"):
                self._keep += 1
                self._ask()
            case "minus" if self._offers("keep") and self._keep:
                self._keep -= 1
                self._ask()
            case "y" if self._plan:
                self._copy("\n".join(self._plan))
                self._note = "copied"
            case _:
                super().press(key, character)

    def _type(self, key: str, character: str | None) -> None:
        reason = self._reason or ""
        match key:
            case "escape":
                self._reason = None
            case "ctrl+c":
                self.dismiss("interrupt")
            case "enter" if reason.strip() and not self._waits:
                self._waits = True
                self._send(self, Order(self.proposal, self.args, dry_run=False, reason=reason.strip()))
            case "enter":
                self._note = "it needs a reason: whoever comes next will want to know it"
            case "backspace":
                self._reason = reason[:-1]
            case "ctrl+u":
                self._reason = ""
            case _ if character is not None and character.isprintable():
                self._reason = reason + character


def plan_rows(line: str, width: int) -> list[Row]:
    """A line of a plan: what goes in red, what comes in green, warnings in yellow; each keeps its sign."""
    bare = line.lstrip()
    indent = len(line) - len(bare)
    style = "text"
    if bare.startswith("- "):
        style = "bad"
    elif bare.startswith("+ "):
        style = "ok"
    elif bare.lower().startswith(("warning", "alias", "pin", "!")):
        style = "warn"
    elif not indent:
        style = "strong"
    return [((" " * indent + piece, style),) for piece in wrap(bare, max(10, width - indent))]
