"""`rltop keys`, the address that it prints, and where a config file says that a run listens."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop import keys
from rltop.cli.main import main
from rltop.config import parse_up
from rltop.errors import RltopError
from tests.daemon.util import real_daemon


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(tmp_path / "r", ingest_tcp="127.0.0.1:0") as run:
        assert main(["keys", "node7", "--out", str(tmp_path / "node7.key")]) == 0
        said = capsys.readouterr()
        url = said.out.strip().removeprefix("RLTOP_INGEST=")
        found = keys.parse_ingest(url)
        assert (found.key_file, found.server) == (tmp_path / "node7.key", keys.server_pair(run.path / "keys").public)
        assert stat.S_IMODE(found.key_file.stat().st_mode) == 0o600
        assert keys.read_pair(found.key_file).secret.hex() not in said.out + said.err

        assert main(["keys", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in listed["keys"]] == ["node7", "trainer"]
        assert listed["endpoint"] == found.endpoint
        assert main(["keys", "node7"]) == 0
        assert capsys.readouterr().out == said.out, "the same line again"
        assert main(["keys", "node7", "--out", str(tmp_path / "other.key")]) == 2
        assert "already" in capsys.readouterr().err
        found.key_file.unlink()
        assert main(["keys", "node7"]) == 2
        assert "rltop keys node7 --revoke" in capsys.readouterr().err
        assert main(["keys", "node7", "--revoke"]) == 0
        assert main(["keys", "node7", "--revoke"]) == 2
        assert "known: trainer" in capsys.readouterr().err
        assert main(["keys", "../evil"]) == 2
        assert main(["keys", "--revoke"]) == 2


def test_a_run_that_does_not_listen_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(tmp_path):
        assert main(["keys"]) == 0
        assert "--ingest-tcp" in capsys.readouterr().err


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(1, 65535),
    st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20),
)
def test_the_address_survives_its_text(server: bytes, port: int, name: str) -> None:
    for host in ("10.0.0.1", "node-7.cluster", "[fe80::1]"):
        ingest = keys.Ingest(f"tcp://{host}:{port}", server, Path("/a b") / name)
        url = ingest.url()
        assert keys.parse_ingest(url) == ingest
        assert " " not in url


@given(st.text(max_size=80))
def test_any_other_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="curve://"):
        keys.parse_ingest("curve://" + text)


@pytest.mark.parametrize("text", ["", "7411", ":7411", "h:", "h:x", "h:70000", "::1:80", "a/b:80", "h h:80"])
def test_what_is_no_address_to_listen_at_is_refused_with_its_place(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text:
        toml = f'[trainer]\ncommand = ["x"]\n\n[ingest]\ntcp = "{text}"\n'
        with pytest.raises(RltopError, match=r"run\.toml:5: not an address"):
            parse_up(toml, where="run.toml", trainer_flags=())
        assert main(["up", "run.toml", "--ingest-tcp", text]) == 2
        assert "--ingest-tcp" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="HOST:PORT"):
            keys.parse_listen(text)


def test_a_port_that_is_too_large_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("65536", "99999", "9" * 5000):
        assert main(["up", "run.toml", "--ingest-tcp", f"127.0.0.1:{port}"]) == 2
        assert f"the port {port[:20]} is too large: the largest is 65535" in capsys.readouterr().err


def test_the_config_file_says_where_to_listen() -> None:
    toml = '[trainer]\ncommand = ["x"]\n[ingest]\ntcp = "[::1]:7411"\n'
    assert parse_up(toml, where="run.toml", trainer_flags=()).ingest_tcp == "[::1]:7411"
    assert keys.parse_listen("[::1]:7411") == ("::1", 7411)
    with pytest.raises(RltopError, match=r"run\.toml:4: unknown key 'udp'"):
        parse_up(toml.replace("tcp", "udp"), where="run.toml", trainer_flags=())


@pytest.mark.parametrize("junk", ["", "{}", "[1]", '{"public": "ab", "secret": "cd"}', "\0" * 9000])
def test_a_file_that_is_no_key_is_refused_by_name(junk: str, tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    path.write_text(junk)
    with pytest.raises(RltopError, match=r"x\.key: is not a key file"):
        keys.read_pair(path)
