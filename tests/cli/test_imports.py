"""What is imported, looked at in a fresh process: light commands stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.evidence.dump_files import rollout

HEAVY = ("textual", "torch", "ray", "transformers", "megatron", "httpx", "rltop.tui", "rltop.daemon", "rltop.train")
SCRIPT = """
import sys
from rltop.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("\\n".join(sorted(sys.modules)), file=sys.stderr)
raise SystemExit(code)
"""


def modules_after(*argv: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, timeout=60, check=False
    )
    return set(ended.stderr.splitlines())


@pytest.mark.parametrize(
    ("argv", "also"),
    [
        (["--help"], ("zmq", "asyncio", "msgspec")),
        (["get", "--help"], ("zmq", "asyncio", "msgspec")),
        (["train", "--help"], ("zmq",)),
        (["get", "snapshot", "--run", "nosuch"], ("zmq",)),
        (["attach", "--once", "--via", "/bin/false"], ("zmq",)),
        (["ps", "--json"], ()),
        (["dump", "--help"], ("zmq", "asyncio", "msgspec")),
        (["proxy", "--stdio", "nosuch"], ()),
    ],
)
def test_light_commands_import_nothing_heavy(argv: list[str], also: tuple[str, ...]) -> None:
    loaded = modules_after(*argv)
    assert "rltop.cli.main" in loaded
    heavy = set(HEAVY) - ({"rltop.train"} if argv[0] == "train" else set())
    assert not loaded & heavy
    assert not loaded & set(also)


@pytest.mark.parametrize("command", [["show"], ["show", "--json", "--sort", "gap"], ["stats"], ["diff", "{dump}"]])
def test_commands_that_read_dumps_import_nothing_heavy(tmp_path: Path, command: list[str]) -> None:
    dump = str(rollout(tmp_path / "3.pt"))
    loaded = modules_after("dump", *(word.format(dump=dump) for word in command), dump)
    assert "rltop.evidence.dump_file" in loaded
    assert not loaded & {*HEAVY, "zmq", "asyncio", "numpy"}
