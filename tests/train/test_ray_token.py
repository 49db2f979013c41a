"""A private cluster: only who shows the token of the run is let in, and nothing runs that it has no use for."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.train.cluster import exposure

pytestmark = pytest.mark.train

OWNER = """
import json, os, sys
from pathlib import Path
import psutil
from rltop.train.cluster import RayOptions, ray_cluster
from rltop.train.lifetime import Signals
with ray_cluster(RayOptions(None, ({"CPU": 1.0},), Path(sys.argv[1])), Signals()) as cluster:
    listening = [
        (process.name(), one.laddr.ip, one.laddr.port)
        for process in psutil.Process().children(recursive=True)
        for one in process.net_connections("tcp") if one.status == "LISTEN"
    ]
    print(json.dumps({
        "gcs": cluster.ray.get_runtime_context().gcs_address, "exposed": cluster.exposed,
        "token": os.environ["RAY_AUTH_TOKEN"], "listening": listening,
        "commands": [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)],
    }), flush=True)
    sys.stdin.readline()
"""
STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    print("in", len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)))
except Exception as error:
    print("out", type(error).__name__)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="rltop-", dir="/tmp"))  # Ray's sockets need a short path
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            yield json.loads(owner.stdout.readline())
        finally:
            owner.stdin.close()
            assert owner.wait(60) == 0
            shutil.rmtree(folder)


def stranger(cluster: dict[str, Any], home: Path, **auth: str) -> str:
    """What a process without rltop's environment is told."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(home), **auth}  # no token file of this user either
    command = [sys.executable, "-c", STRANGER, cluster["gcs"]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_only_who_has_the_runs_token_is_let_in(cluster: dict[str, Any], tmp_path: Path) -> None:
    assert cluster["exposed"] == ""
    assert stranger(cluster, tmp_path) == "out AuthenticationError"
    assert stranger(cluster, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64) == "out AuthenticationError"
    right = stranger(cluster, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=cluster["token"])
    assert right.startswith("in "), right


def test_its_http_server_asks_for_the_token_too(cluster: dict[str, Any]) -> None:
    agents = [(ip, port) for name, ip, port in cluster["listening"] if "RuntimeEnvAgent" in name]
    assert agents
    for ip, port in agents:
        connection = http.client.HTTPConnection("127.0.0.1" if ip in ("::", "0.0.0.0") else ip, port, timeout=10)
        connection.request("POST", "/get_or_create_runtime_env", b"")
        assert connection.getresponse().status == 401
        connection.close()


def test_no_monitor_of_what_cannot_change_is_started(cluster: dict[str, Any]) -> None:
    commands = cluster["commands"]
    assert any("raylet" in line for line in commands)
    assert [line for line in commands if "monitor.py" in line] == []


@pytest.mark.parametrize(
    ("private", "knows_tokens", "mode", "word"),
    [
        (True, True, "token", ""),
        (False, True, "token", ""),
        (True, False, "token", "has no token authentication"),
        (False, False, "", "has no token authentication"),
        (True, True, "disabled", "RAY_AUTH_MODE is 'disabled'"),
        (False, True, "", "asks for no token"),
    ],
)
def test_where_there_is_no_token_the_reason_is_said(private: bool, knows_tokens: bool, mode: str, word: str) -> None:
    said = exposure(private=private, version="2.44.1", knows_tokens=knows_tokens, mode=mode)
    assert word in said
    assert bool(word) == bool(said)
