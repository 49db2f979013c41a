"""`rltop slime-env` and `rltop slime-flags`: what they print."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltop import keys, runs
from rltop.cli.main import main
from rltop.cli.slime_env import ingest_of, read_env, with_hook
from rltop.cli.slime_flags import prefixed, split
from rltop.errors import RltopError

HOOK = "rltop.integrations.slime.setup"


def _merged(given: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[str]]:
    return with_hook(given, run="r", ingest="curve://x", **{"path": "", "installed": True, **more})


def test_nothing_of_a_users_env_is_lost(tmp_path: Path) -> None:
    (tmp_path / "rltop").mkdir()
    given = {
        "working_dir": "/w",
        "py_modules": ["/mine"],
        "env_vars": {"PYTHONPATH": "/root/Megatron-LM/", "NCCL_DEBUG": "INFO", "RLTOP_RUN": "old"},
        "worker_process_setup_hook": "mine.setup",
    }
    env, notes = _merged(given, path=str(tmp_path))
    assert env == {
        "working_dir": "/w",
        "py_modules": ["/mine"],
        "env_vars": {
            "PYTHONPATH": f"/root/Megatron-LM/:{tmp_path}",
            "NCCL_DEBUG": "INFO",
            "RLTOP_RUN": "r",
            "RLTOP_INGEST": "curve://x",
            "RLTOP_SLIME_SETUP_PATH": "mine.setup",
        },
        "worker_process_setup_hook": HOOK,
    }
    assert notes == [
        "RLTOP_RUN was old and is now r",
        "the setup hook mine.setup runs after rltop's (RLTOP_SLIME_SETUP_PATH)",
    ]
    assert given["worker_process_setup_hook"] == "mine.setup"
    assert _merged(env, path=str(tmp_path))[0] == env  # once more changes nothing


def test_without_a_place_the_job_brings_rltop_along() -> None:
    env, _ = _merged({"py_modules": ["/mine"]}, installed=False)
    assert env["py_modules"][0] == "/mine"
    assert (Path(env["py_modules"][1]) / "integrations" / "slime.py").is_file()
    assert "PYTHONPATH" not in env["env_vars"]
    assert _merged(env, installed=False)[0] == env


@pytest.mark.parametrize("given", ["{", "[1]", '{"env_vars": 7}', "no such file.json"])
def test_an_env_that_is_none_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(RltopError):
        read_env(given)


def test_a_file_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text("env_vars:\n  A: '1'\n")
    assert read_env(str(path)) == {"env_vars": {"A": "1"}}
    path.write_text("a: [")
    with pytest.raises(RltopError, match="not a runtime env"):
        read_env(str(path))


def test_a_run_is_begun_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    try:
        assert main(["slime-env", "--start", "s-1", "--ingest-tcp", "127.0.0.1:0"]) == 0
        out, err = capsys.readouterr()
        env = json.loads(out)
        assert out.count("\n") == 1
        run = runs.find_run("s-1")
        local, remote = env["env_vars"]["RLTOP_INGEST"].split()
        assert local == run.sockets["ingest"]
        assert keys.parse_ingest(remote).key_file == run.path / "keys" / "clients" / "slime.key"
        assert env["worker_process_setup_hook"] == HOOK
        assert "rltop attach s-1" in err
        # Asked again it is the same run and the same key, and a key may lie elsewhere.
        assert main(["slime-env", "--run", "s-1"]) == 0
        assert json.loads(capsys.readouterr().out) == env
        assert ingest_of(run, tmp_path / "shared.key").endswith("/shared.key")
        assert keys.read_pair(tmp_path / "shared.key").public in keys.clients(run.path / "keys")
        other = keys.add_client(tmp_path / "keys", "slime")
        with pytest.raises(RltopError, match="does not know this key"):
            ingest_of(run, other)
    finally:
        main(["down", "s-1"])


def test_what_does_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    for words in (
        ["--path", "/x", "--installed"],
        ["--ingest-tcp", "127.0.0.1:0"],
        ["--start", "a", "--run", "b"],
        ["--run", "none"],
        ["--start", "a", "--ingest-tcp", "nonsense"],
    ):
        assert main(["slime-env", *words]) == 2, words
        assert capsys.readouterr().out == ""
    assert runs.list_runs() == []


def test_a_path_without_rltop_is_noted(tmp_path: Path) -> None:
    text = f"there is no {tmp_path}/rltop on this machine: it must be there on every node"
    assert text in _merged({}, path=f"{tmp_path}/")[1]
    (tmp_path / "rltop").mkdir()
    assert not [note for note in _merged({}, path=str(tmp_path))[1] if "there is no" in note]


# ---------------------------------------------------------------- slime-flags

SCRIPT = """
set -ex
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-max-bs 64
   --sglang-server-concurrency 512
)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"env_vars": {"PYTHONPATH": "/root/Megatron-LM/"}}' \\
   -- python3 train.py --actor-num-nodes 1 --save ${HOME_DIR}/x ${SGLANG_ARGS[@]}
"""


def test_a_launch_line_is_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert main(["slime-flags", "cuda_graph=off", "overlap_schedule=off", "--script", str(script)]) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[:4] == ["python3", "train.py", "--actor-num-nodes", "1"]
    assert " --save ${HOME_DIR}/x " in out  # for the shell, as it was
    assert words[words.index("--sglang-server-concurrency") + 1] == "512"
    assert "--sglang-disable-overlap-schedule" in words
    assert words[words.index("--sglang-cuda-graph-backend-decode") + 1] == "disabled"
    assert "+ --sglang-disable-overlap-schedule" in err


def test_what_the_environment_switches_spares_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slime-flags", "launch_blocking=on"]) == 0
    out, err = capsys.readouterr()
    assert shlex.split(out) == ["--train-env-vars", '{"CUDA_LAUNCH_BLOCKING": "0"}']
    assert 'in --runtime-env-json: {"env_vars": {"CUDA_LAUNCH_BLOCKING": "1"}}' in err


def test_two_groups_for_an_ab(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slime-flags", "cuda_graph=off", "--ab", "10", "--gpus-per-engine", "2"]) == 0
    (model,) = yaml.safe_load(capsys.readouterr().out)["sglang"]
    groups = model["server_groups"]
    assert (model["name"], model["num_gpus_per_engine"], model["update_weights"]) == ("default", 2, True)
    assert [group["num_gpus"] for group in groups] == [6, 4]
    assert "overrides" not in groups[0]
    assert groups[1]["overrides"] == {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    for words in (["launch_blocking=on", "--ab", "8"], ["cuda_graph=off", "--ab", "2", "--gpus-per-engine", "2"]):
        assert main(["slime-flags", *words]) == 2


@pytest.mark.parametrize(
    "words", [["nope=on"], ["cuda_graph"], ["cuda_graph=maybe"], ["cuda_graph=off", "--script", "/no"]]
)
def test_bad_input_is_one_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slime-flags", *words]) == 2
    assert capsys.readouterr().err.startswith("rltop: ")


def test_words_are_taken_apart_and_put_together() -> None:
    words = ["python", "train.py", "--lr", "1", "--sglang-a=b", "--sglang-c", "d", "e", "--f", "--sglang-config", "x"]
    parts = split(words)
    assert parts.others == ("python", "train.py", "--lr", "1", "--f", "--sglang-config", "x")
    assert parts.engine == ("--a=b", "--c", "d", "e")
    assert prefixed(parts.engine) == ["--sglang-a=b", "--sglang-c", "d", "e"]


LARGE = """
BASE=$(cat /etc/base)
FREQ="[$(seq -s, 1 3)]"
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine %(gpus)s
   --sglang-enable-dp-attention
   --sglang-dp-size %(groups)s
   --sglang-ep-size 16
   --sglang-enable-dp-lm-head
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
)
ray job submit -- python3 train.py --freq "${FREQ} \\"x\\"" --load ${BASE}/m --literal '${NOT}' ${EXTRA[@]} \\
   ${SGLANG_ARGS[@]}
"""


def _edit(path: Path, change: str, **values: object) -> int:
    path.write_text(LARGE % {"gpus": 64, "groups": 8, **values})
    return main(["slime-flags", change, "--script", str(path)])


def test_the_size_of_an_engine_is_slimes_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    for gpus in (64, "${GPUS}"):
        assert _edit(script, "overlap_schedule=off", gpus=gpus) == 0
        out = capsys.readouterr().out
        assert " --sglang-dp-size 8 " in out
        assert "tp-size" not in out
        assert "nnodes" not in out
    assert _edit(script, "overlap_schedule=off", gpus=20) == 2
    assert "--tp-size 20 must be divisible by 8 groups" in capsys.readouterr().err
    assert _edit(script, "overlap_schedule=off", gpus="many") == 2
    assert "'many' is no number of GPUs" in capsys.readouterr().err
    assert _edit(script, "overlap_schedule=off", groups="8 --sglang-pp-size 3") == 2
    assert "64 is not divisible by --sglang-pp-size 3" in capsys.readouterr().err


def test_what_the_shell_works_out_stands_as_written_and_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    assert _edit(script, "overlap_schedule=off", groups="${GROUPS_OF_IT}") == 0
    out, err = capsys.readouterr()
    assert " --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256) " in out  # bare: one word would be no number
    assert ' --freq "[$(seq -s, 1 3)] \\"x\\"" ' in out
    assert " --load $(cat /etc/base)/m --literal '${NOT}' " in out
    assert " --sglang-dp-size ${GROUPS_OF_IT} " in out
    assert "$(seq 16 8 256) is for the shell" in err
    assert "${EXTRA[@]} is not known here" in err
    assert "${NOT}" not in err
    assert _edit(script, "deepep=normal", groups="3 --sglang-max-running-requests ${MOST}", gpus=64) == 2
    assert "judged without $(seq 16 8 256), ${MOST}" in capsys.readouterr().err


def test_a_launch_that_loses_its_engine_flags_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("A=(--sglang-dp-size 2)\npython3 train.py --colocate --size 3\n  ${A[@]}\n")
    assert main(["slime-flags", "radix_cache=off", "--script", str(script)]) == 0
    out, err = capsys.readouterr()
    assert out == "python3 train.py --colocate --size 3 --sglang-disable-radix-cache\n"
    assert f"{script}:2: the launch has no --sglang-… flag although the script has" in err
