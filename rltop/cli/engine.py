"""`rltop engine list|set|restart|stop|start|revert|ab|http|cancel`: from the shell what the dashboard does.

An operation belongs to the daemon: it goes on when this process ends. What is shown here comes from the state that
every viewer has; `generations` in the arguments makes each command a compare-and-set on what was seen when it was sent.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.cli.connect import Place, ask, running
from rltop.cli.once import group
from rltop.cli.output import age, clean, note, number, print_json, table
from rltop.client import Client
from rltop.errors import RltopError
from rltop.protocol.messages import Rejected

WANT = ("run", "daemon", "fleet", "op/*", "engine/*", "toggles/*")
ENDED = frozenset({"done", "failed", "cancelled"})
LOST_S = 60.0
"""An operation is followed over the loss of its daemon for so long; the next daemon of the run finishes it."""
NAMED = ("cuda_graph", "speculative", "deepep", "launch_blocking")
"""Toggles that an engine's block always shows, the table where they are on; others only where not as wanted."""
LETTERS = {"process": "P", "probe": "H", "progress": "G", "trainer": "T", "log": "L"}
"""Of the five signals, as in the dashboard."""
HEAD = ("engine", "state", "since", "PHGTL", "gen", "weights", "run", "tok/s", "toggles", "why")
WIDTH = 120
"""Cells of a table that goes into a file or to another program."""
TOGGLES_WIDTH = 32
"""Most cells of the toggles in the table."""
LEAST_WHY = 20
_ALREADY = ("engine-set", "engine-stop", "engine-start")
"""Commands that leave out engines that are as asked for already."""
MOMENTS = frozenset({"busy", "not-running", "stale-generation", "stale-epoch"})
"""Codes of refusals that may be none a moment later."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One command, as typed."""

    command: str
    target: str
    args: Mapping[str, Any]
    reason: str = ""
    dry_run: bool = False
    wait: bool = True
    name: str = ""


def changes_of(words: Sequence[str]) -> dict[str, str]:
    """`["cuda_graph=off"]` as a map. Raises RltopError: no `=`, one toggle twice. Names are the daemon's to judge."""
    found: dict[str, str] = {}
    for word in words:
        toggle, equals, value = word.partition("=")
        if not equals or not toggle or not value:
            raise RltopError(
                f"{word!r} is no TOGGLE=VALUE", where="engine", do="rltop engine set cuda_graph=off --engine 0"
            )
        if found.setdefault(toggle.replace("-", "_"), value) != value:
            raise RltopError(f"{toggle} is given twice", where="engine", why=f"{found[toggle]} and {value}")
    return found


# ---------------------------------------------------------------- list


def show(place: Place, engines: str, *, as_json: bool) -> int:
    """Print the engines. Raises RltopError: no such engine, the run can not be reached."""

    async def look(client: Client) -> tuple[str, Mapping[str, Any], float]:
        return client.mirror.run, dict(client.mirror.state), client.mirror.server_time

    run, state, now = ask(place, look, want=WANT)
    chosen = _chosen(state, engines)
    if as_json:
        cells = {name: {**state[f"engine/{name}"], "toggle_choices": state.get(f"toggles/{name}")} for name in chosen}
        print_json({"run": run, "engines": cells, "fleet": state.get("fleet"), "ops": _ops(state)})
        return 0
    chosen_cells = [state[f"engine/{name}"] for name in chosen]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    if engines == "all":
        print("\n".join(rows(chosen_cells, now, width)))
    else:
        print("\n\n".join("\n".join(block(cell, now)) for cell in chosen_cells))
    fleet = state.get("fleet") or {}
    if fleet:
        required = fleet.get("required") or {}
        weights = f"; required weights {required.get('version')} ({required.get('source')})" if required else ""
        kept = f"a rolling change keeps at least {fleet.get('keep')}"
        note(f"{fleet.get('serving')} of {fleet.get('total')} serve; {kept}{weights}")
    if others := [name for name in chosen if state[f"engine/{name}"].get("owner") == "other"]:
        note(f"not rltop's: {', '.join(others)}: others run them, only what HTTP allows can be done")
    for op in _ops(state):
        if op["state"] not in ENDED:
            note(f"operation {op['op']} ({op['name']} {op['target']}, by {op['who']}): {op['stage'] or op['state']}")
    return 0


def _ops(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = [op for op in group(state, "op/").values() if str(op.get("name", "")).startswith(("engine-", "engines-"))]
    return sorted(found, key=lambda op: int(op["op"]))


def _chosen(state: Mapping[str, Any], engines: str) -> list[str]:
    known = sorted(group(state, "engine/"), key=lambda name: (len(name), name))
    if engines == "all":
        return known
    wanted = [word.strip() for word in engines.split(",") if word.strip()]
    for name in wanted:
        if name not in known:
            why = f"there are {', '.join(known)}" if known else "the run has no engines"
            raise RltopError(f"no such engine: {name!r}", where="engine", why=why, do="rltop engine list")
    return wanted


def rows(engines: Sequence[Mapping[str, Any]], now: float, width: int) -> list[str]:
    """The table, one line per engine, no line longer than `width`: signals as letters, the last column cut."""
    found = table(HEAD, [_row(engine, now) for engine in engines])
    start = len(found[0]) - len(HEAD[-1])
    if width - start >= LEAST_WHY or max(map(len, found)) <= width:
        return [_cut(line, width) for line in found]
    # Too narrow for a reason worth reading beside the rest: it goes below.
    lines = [_cut(line, width) for line in table(HEAD[:-1], [_row(engine, now)[:-1] for engine in engines])]
    for at in range(len(engines), 0, -1):
        if why := why_words(engines[at - 1], now):
            lines.insert(at + 1, _cut(f"    {clean(why)}", width))
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def _row(engine: Mapping[str, Any], now: float) -> list[Any]:
    since = engine.get("since")
    speed = engine.get("tokens_per_s")
    toggles = toggle_words(engine, every=False)
    return [
        _cut(str(engine.get("id")), 16),
        _state(engine),
        age(now - since) if since else None,
        signal_letters(engine.get("signals") or {}),
        engine.get("generation"),
        _cut(str(engine.get("weight_version") or "-"), 12),
        engine.get("running"),
        None if speed is None else round(speed),
        toggles and _cut(toggles, TOGGLES_WIDTH),
        why_words(engine, now),
    ]


def _state(engine: Mapping[str, Any]) -> str:
    return str(engine.get("state")) + (" (other's)" if engine.get("owner") == "other" else "")


def signal_letters(signals: Mapping[str, Any]) -> str | None:
    """`✓✓G·✓`: a tick for each signal that is well, its letter where it is not, a dot where nothing is known."""
    if not signals:
        return None
    found = {name: (signals.get(name) or {}).get("ok") for name in LETTERS}
    return "".join("·" if found[name] is None else "✓" if found[name] else LETTERS[name] for name in LETTERS)


def block(engine: Mapping[str, Any], now: float) -> list[str]:
    """Everything of one engine, nothing cut: a line per fact."""
    since, speed, seen = engine.get("since"), engine.get("tokens_per_s"), engine.get("seen")
    facts: list[tuple[str, Any]] = [
        ("state", _state(engine) + (f" for {age(now - since)}" if since else "")),
        ("why", why_words(engine, now)),
        ("generation", engine.get("generation")),
        ("weights", engine.get("weight_version") or None),
        ("load", f"{number(engine.get('running'))} running, {number(None if speed is None else round(speed))} tok/s"),
        ("seen", f"{age(now - seen)} ago" if seen else None),
    ]
    for name, letter in LETTERS.items():
        one = (engine.get("signals") or {}).get(name) or {}
        mark = "·" if one.get("ok") is None else "✓" if one["ok"] else letter
        facts.append((name, f"{mark} {one.get('text') or 'nothing known'}"))
    facts += [("toggles", toggle_words(engine)), ("last crash", engine.get("fingerprint"))]
    facts += [(name, engine.get(name)) for name in ("url", "host", "pid", "version", "model_path", "log")]
    lines = [f"  {name:<11} {clean(number(value))}" for name, value in facts if value not in (None, "")]
    return [clean(f"engine {engine.get('id')}"), *lines]


def toggle_words(engine: Mapping[str, Any], *, every: bool = True) -> str | None:
    """`cuda_graph=on …`: the four that have a name of their own, and every one that is not as wanted.

    every: also those of the four that are off; else only `cuda_graph` and what is on, the unusual first.
    """
    toggles, wanted = engine.get("toggles") or {}, engine.get("wanted") or {}
    ignored = set(engine.get("ignored") or ())
    words = []
    names = list(dict.fromkeys((*NAMED, *sorted({*wanted, *ignored}))))
    if not every:  # the table cuts its end off: what is unusual comes first
        names.sort(key=lambda name: _usual(name, toggles.get(name), wanted.get(name), name in ignored))
    for name in names:
        value, want = toggles.get(name), wanted.get(name)
        if name in ignored:
            words.append(f"{name}={number(value)} (wanted {number(want)}: the flag had no effect)")
        elif want is not None and value is not None and want != value:
            words.append(f"{name}={value}->{want}")
        elif name in NAMED and value is not None and (every or name == "cuda_graph" or value != "off"):
            words.append(f"{name}={value}")
    return " ".join(words) or None


def _usual(name: str, value: object, want: object, ignored: bool) -> int:
    """0: not as wanted; 1: a switch that is seldom so; 2: the rest, a CUDA graph that is on among them."""
    if ignored or (want is not None and value is not None and want != value):
        return 0
    return 1 if (name == "launch_blocking" and value != "off") or (name == "cuda_graph" and value != "on") else 2


def why_words(engine: Mapping[str, Any], now: float) -> str | None:
    """Why it is in its state, what it waits for, and how often it was restarted."""
    # Of a healthy one the cause is how it became so, long ago.
    told = ("stage", "pending", "error") if engine.get("state") == "HEALTHY" else ("cause", "stage", "pending", "error")
    words = [paused_words(engine["paused"], now)] if engine.get("paused") else []
    words += [str(engine[key]) for key in told if engine.get(key)]
    words = [word for word in words if not any(word != other and word in other for other in words)]
    if engine.get("backoff_until"):
        words.append(f"again in {age(engine['backoff_until'] - now)}")
    if engine.get("restarts"):
        words.append(f"{engine['restarts']} restart{'s' * (engine['restarts'] != 1)}")
    return "; ".join(dict.fromkeys(words)) or None


def paused_words(pause: Mapping[str, Any], now: float) -> str:
    """`paused by ana since 3m05s: rltop engine http continue`."""
    who = str(pause.get("by")).partition(" (")[0]  # without what the daemon knows of the caller
    return f"paused by {who} since {age(now - (pause.get('since') or now))}: rltop engine http continue"


# ---------------------------------------------------------------- acting


def act(place: Place, ask: Ask, *, as_json: bool) -> int:
    """Send the command and follow its operation to the end. Exit code 1 when it failed or was cancelled, or a
    toggle that was asked for has no effect.

    Raises RltopError: refused (exit code 2; 1 when only the moment is wrong), the run can not be reached.
    """
    begun: list[str] = []
    try:
        return asyncio.run(_act(place, ask, begun, as_json=as_json))
    except KeyboardInterrupt:
        if begun:
            where = "" if place.target is None else f" --run {place.target}"
            note(f"\noperation {begun[0]} goes on without this command: rltop engine cancel {begun[0]}{where} stops it")
        raise


async def _act(place: Place, ask: Ask, begun: list[str], *, as_json: bool) -> int:
    client = place.client(role="control", name=ask.name, fps=10.0, want=WANT)
    async with running(client):
        await client.wait_live(place.patience_s)
        mirror = client.mirror
        chosen = _chosen(mirror.state, ask.target) if ask.command.startswith("engine-") else []
        if ask.command == "engine-http" and len(chosen) > 1:
            return await _each(client, ask, chosen, as_json=as_json)
        target = chosen[0] if ask.command == "engine-http" else ask.target
        args = dict(ask.args)
        if chosen and ask.command != "engine-http":
            args["generations"] = {name: mirror.state[f"engine/{name}"]["generation"] for name in chosen}
        start = time.monotonic()
        answer = await client.command(ask.command, target, args, reason=ask.reason, dry_run=ask.dry_run)
        if isinstance(answer, Rejected):
            raise refused(ask, answer)
        if ask.dry_run or not ask.wait:
            if as_json:
                print_json({"run": mirror.run, "op": answer.op, "dry_run": ask.dry_run, "plan": answer.plan})
            elif ask.dry_run:
                print("\n".join(clean(line) for line in answer.plan))
            else:
                for line in answer.plan:
                    note(clean(line))
                print(clean(f"operation {answer.op}"))
            return 0
        begun.append(answer.op)
        for line in answer.plan:
            note(clean(line))
        op = await _followed(client, answer.op)
        begun.clear()
        seconds = time.monotonic() - start
        engines = {name: mirror.state.get(f"engine/{name}") or {} for name in chosen}
        ignored = _without_effect(ask, engines)
        moved = op.get("engines") or chosen if ask.command in _ALREADY else chosen
        same = [name for name in chosen if name not in moved]
        if as_json:
            told = {**_told(op, seconds), "ignored": ignored, "unchanged": same, "plan": answer.plan}
            told["engines"] = engines
            print_json({"run": mirror.run, **told})
        else:
            effect = "".join(f", without effect on engine {name}: {', '.join(one)}" for name, one in ignored.items())
            effect += f", engine {', '.join(same)} left alone: so already" if same else ""
            print(clean(f"{op['state']} in {seconds:.1f} s{effect}") + (f": {op['text']}" if op["text"] else ""))
        return 0 if op["state"] == "done" and not ignored else 1


def _without_effect(ask: Ask, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Engine -> toggles that were asked for and have no effect there: it serves, but not as it was meant to."""
    if ask.command not in ("engine-set", "engine-ab", "engine-revert"):
        return {}
    asked = ask.args.get("changes")  # a revert asks for every argument of the generation before
    found = {
        name: [toggle for toggle in engine.get("ignored") or () if asked is None or toggle in asked]
        for name, engine in engines.items()
        if ask.command != "engine-ab" or engine.get("arm") == "B"
    }
    return {name: toggles for name, toggles in found.items() if toggles}


async def _each(client: Client, ask: Ask, chosen: Sequence[str], *, as_json: bool) -> int:
    """A command about one engine, for several: all are asked at once, also where one refuses."""

    async def one(name: str) -> dict[str, Any]:
        start = time.monotonic()
        answer = await client.command(ask.command, name, dict(ask.args), reason=ask.reason, dry_run=ask.dry_run)
        if isinstance(answer, Rejected):
            return {"target": name, "state": "refused", "text": f"{answer.why} {answer.do}".strip()}
        if ask.dry_run or not ask.wait:
            state = "plan" if ask.dry_run else "begun"
            text = "; ".join(answer.plan) if ask.dry_run else f"operation {answer.op}"
            return {"target": name, "op": answer.op, "state": state, "text": text, "plan": answer.plan}
        op = await _followed(client, answer.op)
        return {**_told(op, time.monotonic() - start), "plan": answer.plan}

    found = await asyncio.gather(*map(one, chosen))
    if as_json:
        print_json({"run": client.mirror.run, "dry_run": ask.dry_run, "ops": list(found)})
    else:
        print("\n".join(clean(f"engine {op['target']}: {op['state']}: {op['text']}") for op in found))
    return 0 if all(op["state"] in ("done", "plan", "begun") for op in found) else 1


def refused(ask: Ask, answer: Rejected) -> RltopError:
    """A rejected command as an error: the input is at fault, or only the moment."""
    moment = answer.code in MOMENTS
    words, target = ask.command.replace("-ab-end", "-ab").replace("-", " ", 1), ask.target
    words = words if " " in words else f"engine {words}"
    named = f" --engine {target}" if target and ask.command.startswith(("engine-", "bisect-start")) else f" {target}"
    return RltopError(
        f"{'not now' if moment else 'refused'} ({answer.code})",
        where=f"{words}{named}".rstrip(),
        why=answer.why,
        do=answer.do or ("look again, then repeat" if moment else f"rltop {words} --help"),
        exit_code=1 if moment else 2,
    )


def _told(op: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    keys = ("op", "name", "target", "state", "text", "who", "reason", "engines", "stages")
    found: dict[str, Any] = {key: op.get(key) for key in keys}
    stages = [{**stage, "seconds": round(stage["t"] - op["t"], 3)} for stage in op.get("stages") or []]
    ended = op.get("ended")
    return {**found, "targets": found.pop("engines"), "stages": stages} | {
        "seconds": round(ended - op["t"] if ended else seconds, 3)
    }


async def _followed(client: Client, op: str) -> dict[str, Any]:
    """The operation at its end; its stages are narrated meanwhile, each with the seconds since the command."""
    shown = 0
    while True:
        cell = client.mirror.state.get(f"op/{op}")
        if cell is not None:
            stages = cell.get("stages") or []
            for stage in stages[shown:]:
                note(clean(f"{stage['t'] - cell['t']:7.1f} s  {stage['text']}"))
            shown = max(shown, len(stages))
            if cell["state"] in ENDED:
                return dict(cell)
        try:
            async with asyncio.timeout(LOST_S):
                await client.wait_change()
                while client.status != "live":
                    await client.wait_change()
        except TimeoutError:
            if client.status != "live":
                raise RltopError(
                    f"the daemon is gone; operation {op} is not over",
                    why=client.problem,
                    do="rltop up under the same name finishes it, or takes it back",
                    exit_code=1,
                ) from None


# ---------------------------------------------------------------- A/B


def show_ab(place: Place, *, as_json: bool) -> int:
    """The difference so far. Exit code 1 when no A/B comparison is going on."""

    async def look(client: Client) -> tuple[str, Any, float]:
        return client.mirror.run, (client.mirror.state.get("fleet") or {}).get("ab"), client.mirror.server_time

    run, found, now = ask(place, look, want=WANT)
    if as_json:
        print_json({"run": run, "ab": found})
    elif not found:
        note("no A/B comparison is going on: rltop engine ab cuda_graph=off begins one")
    else:
        print("\n".join(ab_lines(found, now)))
    return 0 if found else 1


def ab_lines(found: Mapping[str, Any], now: float) -> list[str]:
    """Lines: what is compared, one row per measure with its 95 % interval, the verdict."""
    changes = " ".join(f"{name}={value}" for name, value in (found.get("changes") or {}).items())
    rows = [_ab_row(row) for row in found.get("rows") or []]
    head = [clean(f"B has {changes}; since {age(now - (found.get('since') or now))}")]
    verdict = [clean(str(found["verdict"]))] if found.get("verdict") else []
    return [*head, *table(("", "A", "B", "B - A", "95 %", "n"), rows), *verdict]


def _ab_row(row: Mapping[str, Any]) -> Sequence[Any]:
    low, high = row.get("low"), row.get("high")
    interval = None if low is None or high is None else f"{number(low)} … {number(high)}"
    return [*(row.get(key) for key in ("name", "a", "b", "diff")), interval, row.get("n")]
