"""Run with SGLang's Python: prints its command line as the table that rltop ships, one option a line.

    python table.py > rltop/engines/arguments/0.5.23.json

Nothing of rltop is imported: the environment of SGLang need not have it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "loads": "json",
    "json_list_type": "json",
    "human_readable_int": "human_int",
    "nullable_str": "nullable_str",
    "parse_cuda_graph_config_arg": "graph_config",
    "parse_cuda_graph_backend_arg": "graph_backend",
}
"""Name of the converting function in SGLang -> name in the table."""


def describe(action: argparse.Action) -> list[Any]:
    """[[spellings], destination, kind, {what differs from the usual}]."""
    kind = type(action).__name__
    known = {
        "_StoreAction": "store",
        "_StoreTrueAction": "true",
        "BooleanOptionalAction": "on_off",
        "LoRAPathAction": "paths",
        "DeprecatedAliasStoreAction": "store",
        "DeprecatedStoreTrueAction": "true",
        "DeprecatedStoreConstAction": "const",
        "DeprecatedAction": "none",
    }[kind]
    extra: dict[str, Any] = {}
    if known in ("store", "const", "paths") and action.nargs is not None:
        extra["nargs"] = action.nargs
    if action.type is not None:
        name = TYPES[action.type.__name__]  # type: ignore[union-attr]  # every type is a function or a class
        if name != "str":
            extra["type"] = name
        if name == "graph_config":
            from sglang.srt.model_executor.cuda_graph_config import ALLOWED_KEYS_PER_PHASE

            extra["keys"] = ALLOWED_KEYS_PER_PHASE
    if action.choices is not None:
        kept = isinstance(action.choices, (list, tuple))
        extra["choices"] = list(action.choices) if kept else sorted(action.choices)
    if action.default not in (None, argparse.SUPPRESS) and not (known == "true" and action.default is False):
        extra["default"] = action.default
    if action.default is argparse.SUPPRESS:
        extra["no_default"] = True
    if known == "const":
        extra["const"] = action.const_value  # type: ignore[attr-defined]  # SGLang's own action
    elif known == "store" and action.nargs == "?":
        extra["const"] = action.const
    if kind.startswith("Deprecated"):
        extra["deprecated"] = getattr(action, "new_flag", None) or ""
        if getattr(action, "error_message", None):
            extra["error"] = action.error_message  # type: ignore[attr-defined]  # SGLang's own action
    return [list(action.option_strings), action.dest, known, extra]


def main() -> None:
    """Print the table."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    rows = [describe(action) for action in parser._actions if action.dest != "help"]
    body = ",\n".join(json.dumps(row) for row in rows)
    print(f'{{"version": {json.dumps(sglang.__version__)}, "options": [\n{body}\n]}}')


if __name__ == "__main__":
    main()
