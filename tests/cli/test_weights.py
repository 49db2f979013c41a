"""`rltop weights diff` as people call it: exit codes, both outputs, bad input."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rltop.cli.main import main
from rltop.cli.weights import patience, read_keys
from rltop.engines.calls import Call, Keys, checker_call
from rltop.engines.client import EngineClient
from rltop.engines.launch import EngineProcess, EngineSpec, launch_engine
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from tests.cli.conftest import rltop

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("weights") / "model", TinyModelConfig(seed=1))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    spec = EngineSpec(
        kind="cpu",
        model_path=model,
        directory=model.parent / "engine",
        run="test",
        engine_id="0",
        python=Path(sys.executable),
        env={"OMP_NUM_THREADS": "1"},
    )
    process = launch_engine(spec)
    yield process
    process.stop()


def test_equal_then_different_then_json(
    engine: EngineProcess, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "diff", engine.url, str(model)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("equal: the engine holds this checkpoint\n")
    assert "a stand-in for SGLang" in said
    assert "no rotary table was lost" in said
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"].zero_()
    with EngineClient(engine.url) as client:
        client.update_weights_from_tensor(weights.items(), "broken")
    assert main(["weights", "diff", engine.url, str(model)]) == 1
    said = capsys.readouterr().out
    assert any(line.split()[:2] == ["zero", "model.layers.1.input_layernorm.weight"] for line in said.splitlines())
    assert said.endswith("different: 1 tensor\n")
    assert main(["weights", "diff", engine.url, str(model), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verdict"], found["engine"]["weight_version"]) == (1, "different", "broken")
    assert [(one["name"], one["kind"]) for one in found["findings"]] == [
        ("model.layers.1.input_layernorm.weight", "zero")
    ]
    # A checkpoint of which a part is quantised: nothing that was compared differs, and that is not "equal".
    part = tmp_path / "part"
    make_tiny_model(part, TinyModelConfig(seed=1))
    packed = {**weights, "model.layers.0.mlp.up_proj.weight_scale_inv": weights["model.norm.weight"][:1].clone()}
    save_file(packed, part / "model.safetensors")
    assert main(["weights", "diff", engine.url, str(part)]) == 2
    assert "quantised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["127.0.0.1:1", "MODEL"], "not an engine's address"),
        (["http://127.0.0.1:1", "/nowhere"], "no such directory"),
        (["http://127.0.0.1:1", "MODEL", "--previous", "/nowhere"], "the engine does not answer"),
    ],
)
def test_bad_input_is_one_clear_error(
    model: Path, argv: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["weights", "diff", *(str(model) if word == "MODEL" else word for word in argv)])
    said = capsys.readouterr()
    assert what in said.err
    assert (code, said.out) == (1 if "answer" in what else 2, "")


def test_help_is_instant_and_loads_no_torch() -> None:
    said = rltop("weights", "diff", "--help")
    assert said.returncode == 0
    assert "Exit code 0: equal" in " ".join(said.stdout.split())


def test_a_comparison_needs_no_torch(engine: EngineProcess, model: Path, tmp_path: Path) -> None:
    """Where torch cannot be imported, everything but the rotary tables is compared all the same."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    with EngineClient(engine.url) as client:
        client.update_weights_from_disk(model, "whole")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = rltop("weights", "diff", engine.url, str(model), env={"PYTHONPATH": path})
    assert (said.returncode, said.stdout.splitlines()[-1]) == (0, "equal: the engine holds this checkpoint")
    assert "rotary tables and other buffers were not compared: torch is missing" in said.stdout


# ---------------------------------------------------------------------- servers that are no engine, or answer nobody


class Page(BaseHTTPRequestHandler):
    """A web server: a page for every address; 401 without the right key where it has one."""

    key = ""
    hold = threading.Event()
    """Set: it answers. Otherwise it takes the request and says nothing."""

    def do_GET(self) -> None:
        if not self.hold.wait(30):
            return
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            status, body = 401, b'{"error": "Unauthorized"}'
        else:
            status, body = 404, b"<!DOCTYPE html><html><body>" + b"<p>no such page</p>" * 40
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def page(*, key: str = "", answers: bool = True) -> Iterator[str]:
    """Its address."""
    hold = threading.Event()
    if answers:
        hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Page,), {"key": key, "hold": hold}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_no_engine_is_said_in_a_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with page() as url:
        assert main(["weights", "diff", url, str(model)]) == 2
    said = capsys.readouterr().err
    assert "this is no SGLang engine" in said
    assert "/model_info: status 404: an HTML page" in said
    assert not any(word in said for word in ("no such page", "weights_checker", "api-key"))


def test_an_engine_that_hangs_is_left_after_the_timeout(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with page(answers=False) as url:
        begin = time.monotonic()
        assert main(["weights", "diff", url, str(model), "--timeout", "0.5"]) == 1
    assert time.monotonic() - begin < 10
    assert "no answer within 0.5 s" in capsys.readouterr().err


def test_who_waits_is_told_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltop.cli.weights.TELL_AFTER_S", 0.01)
    told, twice = [], threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) > 1:
            twice.set()

    wait = patience(20.0, clock=lambda: 0.0, tell=tell)
    with wait(checker_call("checksum")) as limit_s:
        assert (limit_s, twice.wait(10)) == (200.0, True)
    assert told[0] == "waiting for the engine's answer to /weights_checker checksum: 0 s of at most 200"
    with wait(Call("GET", "/model_info")) as limit_s:
        assert limit_s == 20.0


def test_keys_come_from_a_file_or_the_environment_and_are_never_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    with page(key="sesame") as url:
        assert main(["weights", "diff", url, str(model)]) == 2
        said = capsys.readouterr().err
        assert "the engine wants a key" in said
        assert "--api-key-file" in said
        for given, variable in ((["--api-key-file", str(file)], ""), ([], "sesame")):
            monkeypatch.setenv("RLTOP_ENGINE_API_KEY", variable)
            assert main(["weights", "diff", url, str(model), *given]) == 2
            said = capsys.readouterr().err
            assert "this is no SGLang engine" in said  # it got past the key
            assert "sesame" not in said
    file.write_text("\n")
    assert main(["weights", "diff", url, str(model), "--api-key-file", str(file)]) == 2
    assert "the file holds no key" in capsys.readouterr().err
    assert read_keys(None, None, {"RLTOP_ENGINE_ADMIN_API_KEY": "tahini"}) == Keys(admin="tahini")
