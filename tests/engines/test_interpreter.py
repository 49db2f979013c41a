"""An interpreter is asked whether it has the server of an engine, and nothing of the server is imported."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from rltop.engines.interpreter import unfit


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package `sglang` that must not be imported."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "launch_server.py").write_text("")
    return package.parent


def test_a_module_is_found_where_the_engines_environment_has_it(site: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare = site / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    absent = unfit("sglang", str(bare), env)
    assert absent is not None
    assert absent.module == "sglang"
    assert unfit("sglang", str(bare), env | {"PYTHONPATH": str(site)}) is None
    assert unfit("cpu", sys.executable, dict(os.environ)) is None


def test_a_package_without_its_server_is_told_from_none(site: Path) -> None:
    (site / "sglang" / "launch_server.py").unlink()
    found = unfit("sglang", sys.executable, os.environ | {"PYTHONPATH": str(site)})
    assert found is not None
    assert found.module == "sglang.launch_server"


def test_a_python_that_talks_at_its_start_is_understood(site: Path) -> None:
    (site / "sitecustomize.py").write_text("print('welcome', end='')\n")
    assert unfit("sglang", sys.executable, os.environ | {"PYTHONPATH": str(site)}) is None


@pytest.mark.parametrize(("program", "said"), [("true", "exit status 0"), ("sh", "exit status")])
def test_what_is_no_python_is_said(program: str, said: str) -> None:
    found = unfit("sglang", program, os.environ)
    assert found is not None
    assert (found.what, found.module) == ("no Python that starts", "")
    assert said in found.why


def test_what_can_not_be_started_is_said(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("\0")
    (tmp_path / "python").chmod(0o755)
    found = unfit("sglang", str(tmp_path / "python"), os.environ)
    assert found is not None
    assert "Exec format error" in found.why


def test_one_that_hangs_is_not_judged_and_leaves_nobody(tmp_path: Path) -> None:
    wrapper, pid = tmp_path / "python", tmp_path / "pid"
    wrapper.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid}.new; mv {pid}.new {pid}\nwait\n")
    wrapper.chmod(0o755)
    began = time.monotonic()
    assert unfit("sglang", str(wrapper), os.environ, patience_s=1.0) is None
    while _lives(int(pid.read_text())):
        assert time.monotonic() - began < 30
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
