"""What `rltop train` would refuse before its start, for the commands that start it or judge it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rltop.errors import RltopError

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def refusal(
    flags: Sequence[str], lines: Mapping[str, int], where: str, environ: Mapping[str, str], *, touch: bool = True
) -> RltopError | None:
    """The error of its checks and preflight, at the line of the flag that it is about; None: it would start.

    lines: flag -> line of the file `where`; empty for a command line. touch: as `rltop.train.preflight.preflight`.
    """
    from rltop.train.arguments import parse_args
    from rltop.train.preflight import preflight

    try:
        preflight(parse_args(flags, default_ray_address=environ.get("RAY_ADDRESS") or None), environ, touch=touch)
    except RltopError as error:
        return _placed(error, lines, where) if lines else error
    return None


def _placed(error: RltopError, lines: Mapping[str, int], where: str) -> RltopError:
    told = [flag for text in (error.where, error.why, error.do) for flag in _FLAG.findall(text)]
    flag = next((flag for flag in told if flag in lines), None)
    place = where if flag is None else f"{where}:{lines[flag]}"
    at = error.where if flag is None or flag in error.where else f"{flag}: {error.where}".removesuffix(": ")
    text = f"{place}: {at}" if at else place
    return RltopError(error.what, where=text, why=error.why, do=error.do, exit_code=error.exit_code)
