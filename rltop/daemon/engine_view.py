"""The cells `engine/<id>`, `toggles/<id>` and `fleet` as viewers get them. Pure.

The numbers of an engine come from the scraper (`rltop.daemon.sources`), its state and everything else from the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rltop.engines.states import DYING

if TYPE_CHECKING:
    from rltop.engines.requests import Required

SCRAPED = ("running", "queued", "tokens_per_s", "token_usage", "cuda_graph", "spec_accept_length", "seen", "error")
MOST_OFFERS = 64
MOST_CRASHES = 8
MOST_CAUSE = 400
"""Characters of a crash's cause."""
CRASHED = frozenset({"CRASHED", "BACKOFF", "QUARANTINED"})
SERVING = frozenset({"HEALTHY", "SUSPECT"})
FLEET_KEYS: Mapping[str, Any] = {
    "owner": "other",
    "launcher": "",
    "since": None,
    "deadline": None,
    "cause": "",
    "fingerprint": None,
    "restarts": 0,
    "backoff_until": None,
    "stage": "",
    "pending": "",
    "signals": {},
    "toggles": {},
    "wanted": {},
    "ignored": [],
    "weight_digest": "",
    "arm": "",
    "previous_generation": None,
    "hung": False,
    "paused": None,
    "survived": None,
    "crashes": [],
    "reserved": "",
}
"""What `engine/<id>` has beside the fields of an `engine` record and the scraped ones, and what stands there for an
engine of which nobody knows more."""


def carried(before: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of an engine's cell under the fleet's new words: the scraped numbers, if it is the same process."""
    same = before.get("generation") == cell.get("generation")
    return {**FLEET_KEYS, **{name: before.get(name) if same else None for name in SCRAPED}}


def crashes(
    before: Mapping[str, Any], cell: Mapping[str, Any], now: float, rollout: int | None
) -> list[dict[str, Any]]:
    """The cell's `crashes`: the newest ends that nobody asked for, oldest first, each with its number, generation, time
    (wall clock, seconds), fingerprint, cause and the newest rollout that had begun.

    before: the cell so far. A crash is told once, whichever of the states that follow one is seen first; what is known
    better when the process has ended (another fingerprint, or all of its log) replaces what its log let expect. A
    crash of an engine on trial is what the trial is for: no news here.
    """
    known = [dict(one) for one in before.get("crashes") or ()]
    if cell.get("reserved") or cell.get("state") not in CRASHED or not cell.get("fingerprint"):
        return known
    told = {"fingerprint": str(cell["fingerprint"]), "cause": str(cell.get("cause") or "")[:MOST_CAUSE]}
    if known and known[-1]["generation"] == cell.get("generation"):
        known_early = known[-1]["cause"].startswith(DYING) and not told["cause"].startswith(DYING)
        if cell["state"] == "CRASHED" and (known_early or known[-1]["fingerprint"] != told["fingerprint"]):
            known[-1] |= told
        return known
    number = known[-1]["number"] + 1 if known else 1
    one = {"number": number, "generation": cell.get("generation"), "t": now, "rollout": rollout, **told}
    return [*known, one][-MOST_CRASHES:]


Launch = tuple[Sequence[str], Mapping[str, str], str]
"""argv, environment and release of SGLang of the generation that should run."""


class Offers:
    """What each toggle could be set to now, or why not. Engines with one command line share the answer: it takes
    tens of milliseconds to find out."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, dict[str, str]]] = {}

    def of(self, launch: Launch) -> Mapping[str, Mapping[str, str]]:
        """Toggle -> choice -> "", or the reason why it is refused."""
        from rltop.engines.toggles import choices

        argv, env, version = launch
        key = (tuple(argv), tuple(sorted(env.items())), version)
        if key not in self._known:
            if len(self._known) >= MOST_OFFERS:
                del self._known[next(iter(self._known))]
            self._known[key] = choices(argv, env, version=version)
        return self._known[key]


def toggle_cells(
    cell: Mapping[str, Any], offered: Mapping[str, Mapping[str, str]], trainer: Mapping[str, str | None]
) -> dict[str, Any]:
    """`toggles/<id>`: of every toggle its value, what is wanted, which choices there are and why others are refused.

    trainer: the trainer's side of toggles that have two (`trainer_sides`).
    """
    from rltop.engines.toggle_table import TOGGLES

    values, wanted = cell.get("toggles") or {}, cell.get("wanted") or {}
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*offered, *values, *wanted)):
        choices, known = offered.get(name, {}), TOGGLES.get(name)
        found[name] = {
            "value": values.get(name),
            "wanted": wanted.get(name),
            "choices": [choice for choice, why in choices.items() if not why],
            "refused": {choice: why for choice, why in choices.items() if why},
            "aliases": list((cell.get("aliases") or {}).get(name, ())),
            "verify": known.verify if known else "",
            "sides": {"engine": values.get(name), "trainer": trainer.get(name)},
            "free": known.value if known else "",
        }
    return found


def trainer_sides(args: Mapping[str, Any]) -> dict[str, str | None]:
    """The trainer's side of toggles that have two. args: of the run, under slime's names with underscores.

    slime's `--moe-enable-deepep` is the trainer's half of DeepEP (Megatron's flex dispatcher).
    """
    told = args.get("moe_enable_deepep")
    return {"deepep": None if told is None else "on" if told else "off"}


def serves(cell: Mapping[str, Any]) -> bool:
    """Requests to it are answered: it is in the rotation, and neither hangs nor is paused by somebody."""
    return cell.get("state") in SERVING and not cell.get("hung") and not cell.get("paused")


def fleet_cell(
    cells: Mapping[str, Mapping[str, Any]],
    keep: int,
    required: Required,
    *,
    safe_point: bool,
    ab: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`fleet`: how many serve, what weights are required, whether this is a safe point, the running comparison."""
    return {
        "serving": sum(serves(cell) for cell in cells.values()),
        "total": len(cells),
        "keep": keep,
        "required": {"version": required.version, "source": required.source},
        "safe_point": safe_point,
        "ab": ab,
    }
