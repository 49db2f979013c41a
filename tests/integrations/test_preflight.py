"""What a worker says of its node, and what is made of the answers. With a real cluster: tests/soak."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.integrations.preflight import HOOK, Node, preflight, probe, refuse


def test_a_node_that_has_everything(tmp_path: Path) -> None:
    (tmp_path / "in.sock").touch()
    answer = probe(HOOK, f"ipc://{tmp_path}/in.sock curve://{'0' * 64}@nowhere:1/no.key")
    assert answer["problems"] == []
    assert "rltop/integrations/slime.py" in answer["found"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = tmp_path / "no such.key"
    words = f"ipc:///nowhere curve://{'0' * 64}@127.0.0.1:{port}{str(key).replace(' ', '%20')}"
    answer = probe("rltop_is_not_here.setup", words)
    assert answer["problems"] == [
        "cannot import rltop_is_not_here: ModuleNotFoundError: No module named 'rltop_is_not_here'",
        f"cannot read the key file {key}",
        f"cannot reach the daemon at 127.0.0.1:{port}: [Errno 111] Connection refused",
    ]
    assert "an older rltop" in probe("rltop.integrations.slime.nothing", "")["problems"][0]
    assert "on another machine" in probe(HOOK, "ipc:///nowhere")["problems"][0]


def test_nodes_with_problems_are_named() -> None:
    fine = Node("n0", "10.0.0.1", ())
    refuse([fine])
    bad = [Node(f"n{i}", f"10.0.0.{i}", ("cannot import rltop.integrations.slime: …",)) for i in range(1, 14)]
    with pytest.raises(RltopError) as error:
        refuse([fine, *bad])
    text = str(error.value)
    assert "13 of 14 nodes are not ready" in text
    assert "n1 (10.0.0.1): cannot import" in text
    assert "and 3 more" in text
    assert "install rltop there" in text
    with pytest.raises(RltopError, match="not ready") as error:
        refuse([Node("n1", "10.0.0.1", ("cannot read the key file /k",))])
    assert "--key-file /shared" in str(error.value)


@pytest.mark.train
@pytest.mark.parametrize(
    ("address", "said"), [("127.0.0.1:1", "no Ray cluster"), ("http://127.0.0.1:8265", "address of the dashboard")]
)
def test_a_cluster_that_is_not_there_is_said_at_once(address: str, said: str) -> None:
    with pytest.raises(RltopError) as error:
        preflight({}, address=address, ingest="")
    assert said in str(error.value)
