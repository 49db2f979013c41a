"""Whether a toggle took effect: from `/server_info`, `/metrics`, the log of the start and `/proc/PID/environ`.

A flag may be accepted and silently ignored. So what was asked for is never taken for what is: each toggle is looked up
in what the engine itself shows, the nearest thing to its kernels first.

Failure policy: what cannot be seen is None, never an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rltop.engines.toggle_table import read_fields


@dataclass(frozen=True, slots=True)
class Effective:
    """What one toggle is in the running engine."""

    value: str | None
    """None: cannot be seen."""
    holds: bool | None
    """Whether it is what was wanted; None: cannot be told."""
    source: str
    """Where it was seen, with the value found there; or why it cannot be seen."""


def read_server_info(
    info: Mapping[str, Any], environ: Mapping[str, str] | None, *, version: str
) -> dict[str, str | None]:
    """The toggles of a running engine, from `/server_info` and its environment. None: not shown there."""
    return read_fields(info, environ)


SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def scrub(info: Mapping[str, Any]) -> dict[str, Any]:
    """`/server_info` without its keys and passwords, which SGLang shows in clear; at any depth."""
    return {name: "***" if name in SECRETS and value else _scrubbed(value) for name, value in info.items()}


def _scrubbed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return scrub(value)
    if isinstance(value, (list, tuple)):
        return [_scrubbed(item) for item in value]
    return value


def verify(
    wanted: Mapping[str, str],
    *,
    server_info: Mapping[str, Any],
    metrics: str,
    log_lines: Iterable[str],
    environ: Mapping[str, str] | None,
    version: str,
) -> dict[str, Effective]:
    """Of each wanted toggle the value in effect.

    metrics: text of `/metrics` ("" if there is none). log_lines: of this generation's start. environ: of the engine's
    process; None on another host.
    """
    seen = read_server_info(server_info, environ, version=version)
    result = {}
    for name, value in wanted.items():
        found = seen.get(name)
        result[name] = Effective(found, None if found is None else found == value, "/server_info")
    return result
