"""The file of `rltop up`: every mistake names its line and, where there is one, the closest right word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rltop.cli.main import main
from rltop.cli.up import ended_at_once, trainer_command
from rltop.config import UpConfig, parse_up
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.flags import flag_names

FLAGS = ("--num-rollout", "--deterministic", "--lr", "--inject", "--kl-loss-coef")


def parse(text: str) -> UpConfig:
    return parse_up(text, where="up.toml", trainer_flags=FLAGS)


def test_a_false_reaches_a_flag_that_may_be_left_open() -> None:
    text = "[trainer]\ncolocate = true\noffload_train = false\ndeterministic = false\n"
    flags = ("--colocate", "--offload-train", "--deterministic", "--no-offload-train")
    assert parse_up(text, where="up.toml", trainer_flags=flags).flags == ("--colocate", "--no-offload-train")


def test_flags_become_a_command_line_that_knows_its_lines() -> None:
    config = parse(
        '[run]\nname = "tiny-1"\n\n[trainer]\nnum_rollout = 60\ndeterministic = true\nkl-loss-coef = -0.5\n'
        'inject = ["a", "b@2"]\nsglang_mem_fraction_static = 0.8\n[env]\nOMP_NUM_THREADS = "1"\n'
    )
    assert config.name == "tiny-1"
    assert config.command == ()
    assert config.flags == (
        *("--num-rollout", "60", "--deterministic", "--kl-loss-coef", "-0.5"),
        *("--inject", "a", "--inject", "b@2", "--sglang-mem-fraction-static", "0.8"),
    )
    assert config.env == {"OMP_NUM_THREADS": "1"}
    assert config.lines["--kl-loss-coef"] == 7


def test_another_trainer_by_its_command_line() -> None:
    assert parse('[trainer]\ncommand = ["python", "train.py"]').command == ("python", "train.py")


def test_engines_alone_and_how_they_are_kept() -> None:
    alone = parse("[engines]\nmodel_path = '/m'\ncount = 2\nargs = ['--disable-cuda-graph']\n[engines.env]\nA = '1'\n")
    assert (alone.trainer, alone.command, alone.flags) == (False, (), ())
    assert alone.engines == {"model_path": "/m", "count": 2, "args": ["--disable-cuda-graph"], "env": {"A": "1"}}
    assert alone.lines["engines.count"] == 3
    kept = parse("[trainer]\nlr = 1\n[engines]\nkeep_serving = 2\nrestart = 'never'\ndrain_s = 12.5\n")
    assert kept.trainer
    assert kept.engines == {"keep_serving": 2, "restart": "never", "drain_s": 12.5}
    assert parse("[trainer]\nlr = 1\n").engines is None
    assert parse("[trainer]\nlr = 1\n[engines]\n").engines == {}


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[trainer]\nlr = \n", "up.toml:2", "not TOML"),
        ("[trainer]\nlr = 1\n[runn]\n", "up.toml:3", "table or key 'runn'; did you mean 'run'?"),
        ("name = 3\n", "up.toml:1", "table or key 'name'"),
        ('[run]\n\nnmae = "x"\n', "up.toml:3", "key 'nmae' in [run]; did you mean 'name'?"),
        ("[run]\nname = 3\n", "up.toml:2", "name must be a string"),
        ("[env]\nA = '1'\n[trainer]\nnum_rolout = 3\n", "up.toml:4", "did you mean 'num_rollout'?"),
        ("trainer.num_rolout = 3\n", "up.toml:1", "did you mean 'num_rollout'?"),
        ("[trainer]\nlr = {a = 1}\n", "up.toml:2", "lr must be"),
        ("[trainer]\nlr = 1\n\n[env]\nX = 3\n", "up.toml:5", 'X must be a string: write "0", not 0'),
        ("[trainer]\ncommand = 'python'\n", "up.toml:2", "a list of strings"),
        ("[trainer]\ncommand = ['python']\nlr = 1\n", "up.toml:3", "key 'lr' in [trainer]"),
        ("[run]\nname = 'x'\n", "up.toml", "there is no trainer to start"),
        ("", "up.toml", "there is no trainer to start"),
        ("[trainer]\nlr = 1\n[engines]\nkeep = 2\n", "up.toml:4", "key 'keep' in [engines]"),
        (
            "[trainer]\nlr = 1\n[engines]\nkeep_serving = -1\n",
            "up.toml:4",
            "must be a whole number from 0 on",
        ),
        ("[trainer]\nlr = 1\n[engines]\nkeep_serving = true\n", "up.toml:4", "keep_serving must be a whole number"),
        ("[trainer]\nlr = 1\n[engines]\nrestart = 'no'\n", "up.toml:4", 'restart must be "auto" or "never"'),
        ("[trainer]\nlr = 1\n[engines]\non_hang = 1\n", "up.toml:4", 'on_hang must be "alarm" or "restart"'),
        ("[trainer]\nlr = 1\n[engines]\ndrain_s = 0\n", "up.toml:4", "drain_s must be a number of seconds above 0"),
        ("[trainer]\nlr = 1\n[engines]\nstart_s = inf\n", "up.toml:4", "start_s must be a number of seconds above 0"),
        ("[trainer]\nlr = 1\n[engines]\nray_address = 5\n", "up.toml:4", "ray_address must be a string"),
        ("[trainer]\nlr = 1\n[engines]\nmodel_path = 'm'\n", "up.toml:4", "model_path is for a run without [trainer]"),
        ("[engines]\nmodel_path = 'm'\n\ncount = 0\n", "up.toml:4", "count must be a whole number from 1 on"),
        ("[engines]\nmodel_path = 'm'\nkind = 'gpu'\n", "up.toml:3", 'kind must be "sglang" or "cpu"'),
        ("[engines]\nmodel_path = 'm'\nargs = '--x'\n", "up.toml:3", "args must be a list of strings"),
        ("[engines]\nmodel_path = 'm'\n[engines.env]\nA = 1\n", "up.toml:3", "env must be a table of strings"),
        ("[trainer]\ncommand = ['x']\n[engines]\ncount = 2\n", "up.toml:4", "count without model_path"),
        ("[engines]\nrestart = 'auto'\n", "up.toml", "there is no trainer to start"),
        ("[engines]\nmodel_path = 'm'\nlauncher = 'ray'\n", "up.toml:3", "needs ray_address"),
        ("[engines]\nmodel_path = 'm'\nport = 1\ntrainer = 'verl'\n", "up.toml:4", 'trainer must be "slime"'),
        ("[engines]\nmodel_path = 'm'\ntrainer = 'slime'\n", "up.toml:3", 'trainer = "slime" needs port'),
        ("[engines]\nmodel_path = 'm'\nweights_dir = '/w'\n", "up.toml:3", "weights_dir without trainer"),
        ("[engines]\nmodel_path = 'm'\nweights_dir = 'w'\n", "up.toml:3", "weights_dir must be the whole path"),
        ("[engines]\nmodel_path = 'm'\nrouter = '10.0.0.1'\n", "up.toml:3", 'router must be a string "HOST:PORT"'),
        ("[engines]\nmodel_path = 'm'\nhost = '[::1]'\n", "up.toml:3", "host must be an address or a name"),
        ("[engines]\ntrainer = 'slime'\n", "up.toml", "there is no trainer to start"),
        ("[trainer]\nlr = 1\n[engines]\ntrainer = 'slime'\n", "up.toml:4", "trainer is for a run without [trainer]"),
        (
            "[engines]\nmodel_path = 'm'\nport = 1\ntrainer = 'slime'\nhost = '0.0.0.0'\n",
            "up.toml:5",
            'host = "0.0.0.0" is no address to ask',
        ),
        (
            "[engines]\nmodel_path = 'm'\nport = 1\ntrainer = 'slime'\nlauncher = 'ray'\nray_address = 'a:1'\n",
            "up.toml:5",
            'trainer = "slime" needs launcher = "local"',
        ),
    ],
)
def test_mistakes(text: str, where: str, what: str) -> None:
    with pytest.raises(RltopError) as raised:
        parse(text)
    assert raised.value.where == where
    assert what in raised.value.what
    assert raised.value.exit_code == 2


def test_what_the_trainer_refuses_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "up.toml"
    config.write_text("[trainer]\nn_samples_per_prompt = 4\nrollout_batch_size = 4\n\nglobal_batch_size = 5\n")
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert f"{config}:5: --global-batch-size: batch sizes do not divide" in err
    assert "16 / 5 leaves 1 over" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('apply_chat_template = "yes"', "{config}:3: apply_chat_template must be true or false, not 'yes'"),
        ("deterministic = 1", "{config}:3: deterministic must be true or false, not '1'"),
        ('lr = "abc"', "{config}:3: --lr: bad value\n  why: 'abc' is not a number"),
        ("lr = true", "{config}:3: --lr: bad value"),
        ("num_rollout = 1.5", "{config}:3: --num-rollout: bad value\n  why: '1.5' is not a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_names_file_line_and_key(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "up.toml"
    config.write_text(f"[trainer]\n\n{line}\n")
    assert main(["up", str(config)]) == 2
    assert said.format(config=config) in capsys.readouterr().err


@pytest.mark.train
def test_dumps_that_are_not_there_name_the_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "rltop"))
    config = tmp_path / "up.toml"
    config.write_text(f'[trainer]\nnum_rollout = 2\nload_debug_rollout_data = "{tmp_path}/d/{{rollout_id}}.pt"\n')
    assert main(["up", str(config)]) == 2
    assert f"{config}:3: --load-debug-rollout-data" in capsys.readouterr().err
    assert not (tmp_path / "rltop").exists()


@pytest.mark.train
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('engine = "sglang"\nengine_python = "nosuchpy"', "{config}:3: --engine-python nosuchpy: no such interpreter"),
        ('engine_python = "true"\nengine = "sglang"', "{config}:2: --engine-python true: no Python that starts"),
        ('lr = 1.0\nhf_checkpoint = "/nope"', "{config}:3: --hf-checkpoint /nope: checkpoint not found"),
        (
            'lr = 1.0\nhf_checkpoint = "{folder}"',
            "{config}:3: --hf-checkpoint: {folder}/config.json: checkpoint unread",
        ),
        ("rollout_max_response_len = 2000", "{config}:2: --rollout-max-response-len: prompt and response do not fit"),
        ("sglang_context_length = 20", "{config}:2: --sglang-context-length: --rollout-max-response-len: prompt and"),
        ('save_dir = "{config}/x"', "{config}:2: --save-dir {config}/x: cannot write there"),
    ],
)
def test_what_the_trainers_preflight_refuses_names_the_line_before_anything_starts(
    lines: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "rltop"))
    config, folder = tmp_path / "up.toml", tmp_path / "folder"
    folder.mkdir()
    config.write_text(f"[trainer]\n{lines.format(config=config, folder=folder)}\n")
    assert main(["up", str(config)]) == 2
    assert said.format(config=config, folder=folder) in capsys.readouterr().err
    assert not (tmp_path / "rltop").exists()


@pytest.mark.train
def test_the_trainers_preflight_is_of_the_environment_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mypy3").symlink_to(sys.executable)
    site = tmp_path / "site" / "sglang"
    site.mkdir(parents=True)
    for name in ("__init__.py", "launch_server.py"):
        (site / name).write_text("")
    env = f'[env]\nPATH = "{tmp_path}/bin"\nPYTHONPATH = "{site.parent}"\nRAY_ADDRESS = ""\n'
    text = '[trainer]\nengine = "sglang"\nengine_python = "mypy3"\n'
    known = [*flag_names(TrainConfig)]
    assert "train" in trainer_command(parse_up(text + env, where="f", trainer_flags=known), "f")
    with pytest.raises(RltopError, match="no such interpreter"):
        trainer_command(parse_up(text, where="f", trainer_flags=known), "f")


def test_a_trainer_that_said_itself_what_is_wrong_is_told_in_its_words() -> None:
    inner = RltopError("no such thing", where="--thing x", why="there are\ntwo lines", do="--thing y")
    error = ended_at_once("r", Path("/r/trainer.log"), "ended with code 2: rltop: …", f"one\nrltop: {inner}")
    assert str(error) == (
        "/r/trainer.log: the trainer of run 'r' ended at once: --thing x: no such thing\n"
        "  why: there are\ntwo lines\n  do:  --thing y"
    )
    bare = ended_at_once("r", Path("/r/trainer.log"), "code 2", "rltop: no more")
    assert (bare.what, bare.why, bare.do) == (
        "the trainer of run 'r' ended at once: no more",
        "code 2",
        "less /r/trainer.log",
    )
    other = ended_at_once("r", Path("/r/trainer.log"), "code 4", f"rltop: {inner}\nTraceback")
    assert other.why.startswith("code 4; its log ends:\nrltop: ")
    assert error.exit_code == bare.exit_code == other.exit_code == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "can not be read"), ("[[crash]]\nissue = 3\n", "issue must be a text"), ("x = 1\n", "must hold [[crash]]")],
)
def test_a_table_of_crashes_that_can_not_be_used_is_said_before_anything_starts(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "state"))
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    config = tmp_path / "up.toml"
    config.write_text('[trainer]\ncommand = ["sleep", "60"]\n\n[checks]\nknown_crashes = "mine.toml"\n')
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert str(tmp_path / "mine.toml") in err
    assert not (tmp_path / "state").exists(), "nothing was started"
