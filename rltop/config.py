"""The file that `rltop up` takes: which run, which trainer, which environment. Pure: text in, config out.

    [run]
    name = "tiny-1"

    [trainer]                # the flags of `rltop train`, with underscores or dashes
    num_rollout = 60
    deterministic = true
    inject = ["nan-grad"]

    [trainer]                # or the command line of any other trainer
    command = ["python", "train.py", "--lr", "1e-6"]

    [env]
    CUDA_VISIBLE_DEVICES = "0"

    [ingest]
    tcp = "10.0.0.1:7411"    # take records from other machines too, with CURVE keys (docs/security.md)

    [checks]
    on_fail = ["./tell.sh"]  # run when a check fails; the verdict is on its stdin, as JSON
    webhook = "https://…"    # POSTed the same
    notify = "warn"          # from which status on; default "fail"

    [checks.thresholds]
    gap_warn = 0.05

    [engines]                # how the daemon keeps the engines; with rltop's own trainer they are its by default
    keep_serving = 1
    restart = "auto"         # or "never"
    model_path = "/models/m" # without [trainer]: engines alone
    count = 2

Every error names the line.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.checks.thresholds import override
from rltop.errors import RltopError
from rltop.keys import parse_listen

TABLES = ("run", "trainer", "env", "ingest", "checks", "engines")
PASSED_ON = "sglang_"
"""Keys that start so are not checked here: they are SGLang's own flags."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What `rltop up` starts."""

    name: str | None
    command: tuple[str, ...]
    """The trainer's argv; empty when `flags` are for `rltop train`."""
    flags: tuple[str, ...]
    """Command line of `rltop train`."""
    env: dict[str, str]
    lines: dict[str, int]
    """Flag (`--num-rollout`), or `command`, -> line of the file that set it, from 1."""
    ingest_tcp: str = ""
    """HOST:PORT where records from other machines are taken; empty: nowhere."""
    checks: dict[str, Any] = field(default_factory=dict)
    """`on_fail`, `webhook`, `notify`, `thresholds`, as far as given."""
    engines: dict[str, Any] | None = None
    """`[engines]` as given; None: there is no such table."""
    trainer: bool = True
    """Whether there is a trainer; else the run is engines alone."""


def parse_up(text: str, *, where: str, trainer_flags: Sequence[str]) -> UpConfig:
    """Config from TOML.

    where: the file's name for errors. trainer_flags: flags that `rltop train` knows, `--num-rollout`.
    Raises RltopError with `file:line`: not TOML, unknown table or key (with the closest match), value of a wrong type.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        raise RltopError("not TOML", where=f"{where}:{at[1]}" if at else where, why=str(error)) from None
    place = Place(where, text)
    _only_known(tables, place)
    run, trainer, env, ingest, checks, engines = (tables.get(name, {}) for name in TABLES)
    place.only("run", run, ("name",))
    name = run.get("name")
    if name is not None and not isinstance(name, str):
        raise place.wrong("run", "name", "a string")
    alone = "trainer" not in tables and "model_path" in engines
    command, flags, lines = ((), (), {}) if alone else _trainer(trainer, place, trainer_flags)
    lines |= {f"engines.{key}": place.line("engines", key) for key in engines}
    return UpConfig(
        name,
        command,
        flags,
        _env(env, place),
        lines,
        _ingest(ingest, place),
        _checks(checks, place),
        _engines(engines, place, flags=bool(flags)) if "engines" in tables else None,
        not alone,
    )


def _trainer(
    table: Mapping[str, Any], place: Place, known: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    if "command" in table:
        place.only("trainer", table, ("command",), "with `command` the flags belong into the command")
        command = table["command"]
        if not _is_strings(command) or not command:
            raise place.wrong("trainer", "command", "a list of strings, the program first")
        return tuple(command), (), {"command": place.line("trainer", "command")}
    if not table:
        raise RltopError(
            "there is no trainer to start",
            where=place.where,
            do="add [trainer] with its flags or a command, or [engines] with a model_path for engines alone",
        )
    names = [flag.removeprefix("--").replace("-", "_") for flag in known]
    flags: list[str] = []
    lines: dict[str, int] = {}
    for key, value in table.items():
        plain = key.replace("-", "_")
        if plain not in names and not plain.startswith(PASSED_ON):
            raise place.unknown("trainer", key, names, "`rltop train --help` lists them")
        flag = "--" + plain.replace("_", "-")
        lines[flag] = place.line("trainer", key)
        no = "--no-" + flag.removeprefix("--")
        flags += [no] if value is False and no in known else _words(flag, key, value, place)
    return (), tuple(flags), lines


def _words(flag: str, key: str, value: Any, place: Place) -> list[str]:
    """One key as words of a command line."""
    match value:
        case True:
            return [flag]
        case False:
            return []
        case int() | float() | str():
            return [flag, str(value)]
        case list() if all(isinstance(item, int | float | str) for item in value):
            return [word for item in value for word in (flag, str(item))]
        case _:
            raise place.wrong("trainer", key, "a number, a string, true or false, or a list of them")


def _env(table: Mapping[str, Any], place: Place) -> dict[str, str]:
    for key, value in table.items():
        if not isinstance(value, str):
            raise place.wrong("env", key, 'a string: write "0", not 0')
    return dict(table)


def _ingest(table: Mapping[str, Any], place: Place) -> str:
    place.only("ingest", table, ("tcp",))
    listen = table.get("tcp", "")
    if not isinstance(listen, str):
        raise place.wrong("ingest", "tcp", 'a string "HOST:PORT"')
    if listen:
        try:
            parse_listen(listen)
        except ValueError as error:
            raise RltopError(
                "not an address to listen at", where=f"{place.where}:{place.line('ingest', 'tcp')}", why=str(error)
            ) from None
    return listen


KEEPING = ("keep_serving", "restart", "on_hang", "drain_s", "start_s", "launcher", "ray_address")
"""Keys of `[engines]` that say how engines are kept."""
STARTING = ("kind", "model_path", "count", "host", "port", "args", "env", "python")
"""Keys of `[engines]` that say which engines the daemon starts by itself."""
ATTACHED = ("trainer", "weights_dir", "router")
"""Keys of `[engines]` that say whose trainer uses those engines from outside (docs/slime.md)."""
_WORDS = {
    "restart": ("auto", "never"),
    "on_hang": ("alarm", "restart"),
    "launcher": ("local", "ray"),
    "kind": ("sglang", "cpu", "null"),
    "trainer": ("slime",),
}


def _engines(table: Mapping[str, Any], place: Place, *, flags: bool) -> dict[str, Any]:
    """flags: the run has rltop's own trainer, which says itself which engines it wants."""
    starting = (*STARTING, *ATTACHED)
    place.only("engines", table, (*KEEPING, *starting))
    for key, value in table.items():
        if flags and key in starting:
            why = "rltop's own trainer says which engines it wants: --rollout-num-engines, --sglang-…, --engine-…"
            raise RltopError(f"{key} is for a run without [trainer]", where=place.at("engines", key), why=why)
        if (expected := _wrong(key, value)) is not None:
            raise place.wrong("engines", key, expected)
    if table.get("launcher") == "ray" and "model_path" in table and "ray_address" not in table:
        raise RltopError(
            'launcher = "ray" needs ray_address',
            where=place.at("engines", "launcher"),
            why="without a trainer of rltop's nobody else says which cluster",
            do='ray_address = "10.0.0.1:6379"',
        )
    if "model_path" not in table and (stray := next((key for key in table if key in starting), None)):
        why = "the daemon starts engines of its own only when it knows their model"
        raise RltopError(f"{stray} without model_path", where=place.at("engines", stray), why=why)
    _attached(table, place)
    return dict(table)


def _attached(table: Mapping[str, Any], place: Place) -> None:
    """What must hold for engines that a trainer uses from outside."""
    if "trainer" not in table:
        if (stray := next((key for key in table if key in ATTACHED), None)) is not None:
            why = "it is about a trainer that uses these engines from outside"
            raise RltopError(f"{stray} without trainer", where=place.at("engines", stray), why=why, do=_SLIME)
        return
    if not table.get("port"):
        why = "slime is given their addresses at its start, and an engine comes back there after a restart"
        raise RltopError(
            f"{_SLIME} needs port",
            where=place.at("engines", "trainer"),
            why=why,
            do="port = 30000, of the first engine",
        )
    if table.get("launcher") == "ray":
        why = "an engine must keep its address, and Ray may place it on another machine"
        raise RltopError(f'{_SLIME} needs launcher = "local"', where=place.at("engines", "launcher"), why=why)
    if table.get("host") in ("0.0.0.0", "::", "[::]"):
        why = "it is also the address that slime is given, and that slime's router sends requests to"
        raise RltopError(
            f'host = "{table["host"]}" is no address to ask',
            where=place.at("engines", "host"),
            why=why,
            do='host = "10.0.0.2", the address of this machine that the trainer reaches',
        )


_SLIME = 'trainer = "slime"'


def _wrong(key: str, value: Any) -> str | None:
    """What a value should have been; None: it is right."""
    match key:
        case "keep_serving" | "count" | "port":
            least = 1 if key == "count" else 0
            right = isinstance(value, int) and not isinstance(value, bool) and value >= least
            return None if right else f"a whole number from {least} on"
        case "drain_s" | "start_s":
            right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
            return None if right else "a number of seconds above 0"
        case "host":
            right = isinstance(value, str) and value != "" and not set(value) & set("[]/ ")
            return None if right else "an address or a name of this machine, without a port or brackets"
        case "router":
            return None if isinstance(value, str) and _is_address(value) else 'a string "HOST:PORT"'
        case "weights_dir":
            right = isinstance(value, str) and value.startswith("/")
            return None if right else "the whole path of a folder that engines and trainer see under the same name"
        case "args":
            return None if _is_strings(value) else "a list of strings, as on SGLang's command line"
        case "env":
            right = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
            return None if right else 'a table of strings: write "0", not 0'
        case _ if key in _WORDS:
            return None if value in _WORDS[key] else " or ".join(f'"{word}"' for word in _WORDS[key])
        case _:
            return None if isinstance(value, str) and value else "a string"


def _is_address(text: str) -> bool:
    try:
        host, port = parse_listen(text)
    except ValueError:
        return False
    return host != "*" and port > 0


def parse_checks(text: str, *, where: str) -> dict[str, Any]:
    """`[checks]` alone, of any configuration. The other tables are those of `rltop up` and are not looked into.

    Raises RltopError with `file:line`: not TOML, an unknown table, an unknown key or value in `[checks]`.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RltopError("is no TOML", where=where, why=str(error)) from None
    place = Place(where, text)
    _only_known(tables, place)
    return _checks(tables.get("checks", {}), place)


def _only_known(tables: Mapping[str, Any], place: Place) -> None:
    known = ", ".join(f"[{table}]" for table in TABLES)
    for name, table in tables.items():
        if name not in TABLES:
            raise place.unknown("", name, TABLES, f"there are the tables {known}")
        if not isinstance(table, dict):
            raise RltopError(f"[{name}] must be a table", where=f"{place.where}:{place.line('', name)}", do=f"[{name}]")


def _checks(table: Mapping[str, Any], place: Place) -> dict[str, Any]:
    place.only("checks", table, ("on_fail", "webhook", "notify", "known_crashes", "thresholds"))
    if "on_fail" in table and not (_is_strings(table["on_fail"]) and table["on_fail"]):
        raise place.wrong("checks", "on_fail", "a list of strings, the program first")
    webhook = table.get("webhook", "https://")
    if not isinstance(webhook, str) or not webhook.startswith(("http://", "https://")):
        raise place.wrong("checks", "webhook", "a URL that begins with http:// or https://")
    if table.get("notify", "fail") not in ("fail", "warn"):
        raise place.wrong("checks", "notify", '"fail" or "warn"')
    if not isinstance(thresholds := table.get("thresholds", {}), dict):
        raise place.wrong("checks", "thresholds", "a table")
    for name, value in thresholds.items():
        override({name: value}, where=f"{place.where}:{place.line('checks.thresholds', name)}")
    return dict(table)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


@dataclass(frozen=True, slots=True)
class Place:
    """The file, for errors."""

    where: str
    text: str

    def line(self, table: str, key: str) -> int:
        """Line of `key` in `[table]` (of the header when `table` is empty); 1 when it can not be told."""
        current = ""
        pattern = re.compile(rf"""\s*(["']?){re.escape(key)}\1\s*[=.]""")
        dotted = re.compile(rf"""\s*{re.escape(table)}\s*\.\s*(["']?){re.escape(key)}\1\s*[=.]""")
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
                current = header[1].strip("\"'")
                if (not table and current.split(".")[0] == key) or (table and current == f"{table}.{key}"):
                    return number
            elif (current == table and pattern.match(line)) or (not current and table and dotted.match(line)):
                return number
        return 1

    def at(self, table: str, key: str) -> str:
        """`file:line` of a key."""
        return f"{self.where}:{self.line(table, key)}"

    def only(self, table: str, values: Mapping[str, Any], known: Iterable[str], why: str = "") -> None:
        """Raise for the first key of `values` that is not in `known`."""
        for key in values:
            if key not in known:
                raise self.unknown(table, key, tuple(known), why)

    def unknown(self, table: str, key: str, known: Sequence[str], why: str) -> RltopError:
        """The error for a key that nobody reads."""
        close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
        thing = f"key {key!r} in [{table}]" if table else f"table or key {key!r}"
        return RltopError(
            f"unknown {thing}" + (f"; did you mean {close[0]!r}?" if close else ""),
            where=f"{self.where}:{self.line(table, key)}",
            why=why,
        )

    def wrong(self, table: str, key: str, expected: str) -> RltopError:
        """The error for a value of a wrong type."""
        return RltopError(f"{key} must be {expected}", where=f"{self.where}:{self.line(table, key)}")
