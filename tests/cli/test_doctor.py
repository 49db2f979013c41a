"""`rltop doctor`: the launch as it would happen on a made-up host, with real directories."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rltop.checks.found import RaySnapshot
from rltop.cli.doctor import doctor
from rltop.cli.main import main
from rltop.errors import RltopError


@dataclass
class FakeHost:
    """A machine with these versions, listeners and cluster."""

    taken: dict[int, str] = field(default_factory=dict)
    cluster: RaySnapshot | None = None
    asked: list[str] = field(default_factory=list)

    def versions(self) -> Mapping[str, str]:
        return {"python": "3.11.7", "sglang": "0.5.14"}

    def listeners(self, ports: Iterable[int]) -> Mapping[int, str]:
        return {port: who for port, who in self.taken.items() if port in set(ports)}

    def ray(self, address: str) -> RaySnapshot | None:
        self.asked.append(address)
        return self.cluster


@pytest.fixture
def launch_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a resumable checkpoint in `out` and a converted one in `base`."""
    monkeypatch.chdir(tmp_path)
    for name in ("out/iter_0000020", "out/iter_0000040", "base/release"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / ".metadata").write_text("x")
        (folder / "__0_0.distcp").write_text("x")
    (tmp_path / "out/latest_checkpointed_iteration.txt").write_text("40")
    (tmp_path / "base/latest_checkpointed_iteration.txt").write_text("release")
    (tmp_path / "out/rollout").mkdir()
    (tmp_path / "out/rollout/global_dataset_state_dict_40.pt").write_bytes(b"x")
    return tmp_path


FLAGS = "--load out --save out --save-interval 20 --ref-load base --rollout-batch-size 4 --n-samples-per-prompt 8"


def run(capsys: pytest.CaptureFixture[str], *words: str, host: FakeHost | None = None, **options: object) -> str:
    doctor(words, host=host or FakeHost(), **options)  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_a_resume_is_announced_with_its_rollout(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (launch_dir / "run.sh").write_text(f"ARGS=(\n {FLAGS} )\npython train.py ${{ARGS[@]}}\n")
    out = " ".join(run(capsys, "run.sh").split())
    assert "this will start at rollout 41 from out/iter_0000040 (the tracker)" in out
    assert "the dataset goes on behind rollout 40" in out


def test_the_silent_fallback_is_said(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (launch_dir / "out/latest_checkpointed_iteration.txt").unlink()
    (launch_dir / "args.txt").write_text(FLAGS)
    assert "silently falls back to base" in " ".join(run(capsys, "args.txt").split())


def test_a_taken_port_and_the_versions_are_shown(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = FakeHost(taken={30000: "python, pid 12"})
    out = run(capsys, "python", "train.py", "--sglang-router-port", "30000", "--load", "out", host=host)
    assert "30000, wanted by --sglang-router-port, is taken on this host by python, pid 12" in " ".join(out.split())
    assert "sglang 0.5.14" in out


def test_json_is_one_document_with_plan_and_verdicts(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "python", "train.py", *FLAGS.split(), as_json=True))
    assert found["schema"] == 1
    assert found["command"].startswith("python train.py --load out")
    assert found["plan"][0] == {
        "topic": "start",
        "text": "this will start at rollout 41 from out/iter_0000040 (the tracker)",
        "warn": False,
        "fatal": False,
    }
    assert {"args.batch", "ckpt.resume", "quant.map"} <= {verdict["id"] for verdict in found["verdicts"]}
    assert "train.nan" not in {verdict["id"] for verdict in found["verdicts"]}


def test_a_wrong_batch_fails_with_exit_code_1(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["python", "train.py", *FLAGS.split(), "--global-batch-size", "64", "--num-rollout", "10"]
    assert doctor(words, host=FakeHost()) == 1
    assert "args.batch" in capsys.readouterr().out


def test_ray_is_asked_only_when_wanted(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = FakeHost()
    run(capsys, "python", "train.py", "--load", "out", host=host, ray_address="10.0.0.1:6379")
    run(capsys, "python", "train.py", "--load", "out", host=host, ray_address=None)
    assert host.asked == ["10.0.0.1:6379"]


def test_secrets_of_the_environment_are_not_shown(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (launch_dir / "run.sh").write_text("export WANDB_API_KEY=abc123\npython train.py --load out\n")
    assert "abc123" not in run(capsys, "run.sh")


@pytest.mark.parametrize(
    ("content", "name", "what"),
    [
        (None, "gone.sh", "there is no such file"),
        (b"echo hello\n", "run.sh", "it starts no run that rltop understands"),
        (b"\xff\xfe\x00x", "run.sh", "is no text"),
        (b"[trainer]\nnum_rolout = 3\n", "up.toml", "num_rolout"),
    ],
)
def test_bad_input_is_one_error(launch_dir: Path, content: bytes | None, name: str, what: str) -> None:
    if content is not None:
        (launch_dir / name).write_bytes(content)
    with pytest.raises(RltopError, match=what) as caught:
        doctor([name], host=FakeHost())
    assert caught.value.exit_code == 2
    assert name in str(caught.value)


def test_nothing_given_says_what_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 2
    assert "rltop doctor FILE" in capsys.readouterr().err


def test_a_command_behind_two_dashes_keeps_its_flags(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-ray", "--json", "--", "python", "train.py", "--load", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "python train.py --load out --json"


def test_the_corrected_list_is_a_patch_on_stdout_and_no_file_changes(
    launch_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (launch_dir / "hf").mkdir()
    config = launch_dir / "hf/config.json"
    config.write_text(
        json.dumps({"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}}, indent=2)
    )
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight"]
    (launch_dir / "hf/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    before = config.read_text()
    patch = run(capsys, "python", "train.py", "--hf-checkpoint", "hf", patch_only=True)
    assert patch.startswith("--- hf/config.json\n+++ hf/config.json\n")
    assert '+      "model.embed_tokens"' in patch
    assert config.read_text() == before


TRAIN = "python3 train.py --rollout-batch-size 8 --n-samples-per-prompt"
SAVES = "python3 train.py --load out --save out --save-interval 2"
DYNAMIC = "python3 train.py --use-dynamic-batch-size --max-tokens-per-gpu 8192 --load out"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (
            f"{TRAIN} 8 --global-batch-size 256 2>&1 | tee x\n",
            1,
            "256",
        ),
        (
            f"{TRAIN} $N --global-batch-size 256 --load out\n",
            0,
            "$N",
        ),
        (
            f"N=8\n{TRAIN} $((N)) --global-batch-size 256\n",
            1,
            "256",
        ),
        (SAVES + " ${NONE[@]}\npkill -9 python\n", 0, "rollout 41"),
        (
            f"{SAVES}\npython3 tools/eval.py --model x\n",
            0,
            "rollout 41",
        ),
        ("python3 train.py --save /x\n", 1, "cannot work"),
        (
            DYNAMIC + " ${EVAL_ARGS[@]}\n",
            0,
            "EVAL_ARGS",
        ),
        ("python3 train.py --rollout-batch-size 8 \\\r\n --load out\r\n", 0, "carriage returns"),
    ],
)
def test_scripts_as_people_write_them(
    launch_dir: Path, capsys: pytest.CaptureFixture[str], script: str, code: int, words: str
) -> None:
    (launch_dir / "run.sh").write_bytes(script.encode())
    assert doctor(["run.sh"], host=FakeHost()) == code
    out = " ".join(capsys.readouterr().out.split())
    assert words in out
    assert "judged run.sh:" in out


@pytest.mark.parametrize("words", [["a.sh", "b.sh"], ["-"], ["no", "flags"]])
def test_what_is_no_launch_is_refused(launch_dir: Path, words: list[str]) -> None:
    for name in ("a.sh", "b.sh"):
        (launch_dir / name).write_text("python3 train.py --load out\n")
    with pytest.raises(RltopError) as caught:
        doctor(words, host=FakeHost())
    assert caught.value.exit_code == 2


def test_a_taken_port_stops_the_launch(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = FakeHost(taken={30000: "python, pid 12"})
    assert doctor(["python", "train.py", "--sglang-router-port", "30000", "--load", "out"], host=host) == 1
    assert "port 30000 is taken" in capsys.readouterr().out


def test_the_plan_of_rltops_own_trainer_knows_what_only_it_has(
    launch_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = launch_dir / "own.toml"
    flags = 'load = "out"\nsave = "out"\nsave_interval = 20\nuse_kl_loss = true\nnum_rollout = 100\n'
    config.write_text(f"[trainer]\n{flags}")
    (launch_dir / "out/rollout/global_dataset_state_dict_40.pt").unlink()
    told = " ".join(run(capsys, str(config)).split())
    assert "the checkpoint keeps no reference model and --ref-load is not given" in told
    (launch_dir / "out/reference").mkdir()
    told = " ".join(run(capsys, str(config)).split())
    assert "this will start at rollout 41 from out/iter_0000040" in told
    assert "the reference model is out/reference, kept since the run's start" in told
    assert "the prompts go on: they are drawn from the seed and the rollout id" in told
    assert "global_dataset_state_dict" not in told
    assert "there is no reference model" not in told
    config.write_text("[trainer]\n" + flags.replace('load = "out"', 'load = "new"', 1))
    told = " ".join(run(capsys, str(config)).split())
    assert "starts at rollout 0 from a tiny model of its own" in told
    assert "the reference model is the weights that this run starts with" in told


@pytest.mark.train
def test_what_rltops_own_trainer_refuses_stops_the_launch(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["rltop", "train", "--engine", "sglang", "--engine-python", "nosuchpy"]
    config = launch_dir / "own.toml"
    config.write_text('[trainer]\nengine = "sglang"\n\nengine_python = "nosuchpy"\n')
    (launch_dir / "run.sh").write_text(
        "export A=1\n\nrltop train --engine sglang \\\n --engine-python nosuchpy | tee x\n"
    )
    for words, place in ((own, ""), (["own.toml"], "own.toml:4: "), (["run.sh"], "run.sh:4: ")):
        assert doctor(words, host=FakeHost()) == 1, words
        told = " ".join(capsys.readouterr().out.split())
        assert f"rltop train refuses this: {place}--engine-python nosuchpy: no such interpreter" in told
        assert "Nothing is wrong" not in told
    assert doctor(own, host=FakeHost(), as_json=True) == 1
    (step,) = json.loads(capsys.readouterr().out)["plan"]
    assert (step["topic"], step["fatal"]) == ("refused", True)


@pytest.mark.train
def test_what_rltops_own_trainer_takes_is_not_stopped_and_nothing_is_made(
    launch_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--save-dir", "new/one"], ["--engine-python", "$PY"], ["--engine-python", "nosuchpy", "--help"]):
        assert doctor(["rltop", "train", "--num-rollout", "3", *more], host=FakeHost()) == 0
        assert "refuses" not in capsys.readouterr().out
    assert not (launch_dir / "new").exists()


def test_a_directory_is_said_in_words(launch_dir: Path) -> None:
    with pytest.raises(RltopError, match="can not be read") as caught:
        doctor([str(launch_dir)], host=FakeHost())
    assert caught.value.why == "it is a directory"
    assert caught.value.do
