"""What changed between two runs: masks, comparison, rank. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.runs.changes import Change, Facts, difference, parse_flags
from rltop.runs.masks import fingerprint, is_secret, mask_command, mask_environment

KEY = b"k" * 32


def manifest(**parts: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"command": ["python", "train.py"], "cwd": "/w", "host": "h", "environment": {}}
    return {**base, "versions": {"python": "3.11"}, "git": [], "checkpoints": {}, "notes": [], **parts}


def facts(name: str, args: dict[str, Any] | None = None, failing: tuple[str, ...] = (), **parts: Any) -> Facts:
    return Facts(name, f"/runs/{name}", manifest(**parts), args or {}, failing)


def names(changes: list[Change]) -> list[str]:
    return [f"{change.kind} {change.name}" for change in changes]


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "--hf-token",
        "--wandb-key",
        "MY_SECRET",
        "DB_PASSWORD",
        "SGLANG_API_KEY",
        "x-api-key",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "--input-key",
        "--label-key",
        "--max-tokens-per-gpu",
        "TOKENIZERS_PARALLELISM",
        "--rollout-stop-token-ids",
        "--pad-token",
    ],
)
def test_names_that_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("value", ["hf_abcdefghijklmnopqrst", "sk-proj-abcdefghijklmnop", "https://me:pw@host/x"])
def test_secret_values_under_any_name(value: str) -> None:
    assert is_secret("NCCL_DEBUG", value)
    assert value not in str(mask_environment({"NCCL_DEBUG": value}, KEY, chosen=["NCCL_DEBUG"]))
    assert value not in str(mask_command(["train", "--x", value, f"--y={value}"], KEY))


def test_only_technical_and_chosen_values_are_kept() -> None:
    found = mask_environment(
        {"NCCL_DEBUG": "INFO", "MINE": "1", "OTHER": "2", "SHLVL": "3", "RLTOP_RUN": "r", "BASH_FUNC_cap%%": "()"},
        KEY,
        chosen=["MINE"],
    )
    assert found["NCCL_DEBUG"] == {"value": "INFO"}
    assert found["MINE"] == {"value": "1"}
    assert found["OTHER"] == {"fingerprint": fingerprint("2", KEY), "secret": False}
    assert found.keys() == {"NCCL_DEBUG", "MINE", "OTHER"}
    assert fingerprint("2", KEY) != fingerprint("2", b"x" * 32)


def test_functions_of_a_shell_are_no_change() -> None:
    shell = {f"BASH_FUNC_{name}%%": {"fingerprint": name, "secret": False} for name in ("cap", "module", "ml")}
    mine = {"MINE": {"value": "1"}}
    found = difference(facts("a", environment=mine), facts("b", environment={**shell, "MINE": {"value": "2"}}))
    assert [change.name for change in found.changes] == ["MINE"]


def test_command_lines_keep_their_shape() -> None:
    masked = mask_command(["t", "--wandb-key", "abc", "--lr", "1", "--api-key=xyz", "--wandb-key"], KEY)
    hidden = fingerprint("abc", KEY), fingerprint("xyz", KEY)
    assert masked == ["t", "--wandb-key", f"***{hidden[0]}", "--lr", "1", f"--api-key=***{hidden[1]}", "--wandb-key"]


def test_flags() -> None:
    argv = ["train", "pos", "--a", "1", "--b=2", "--c", "--d", "1", "2", "--inject", "x", "--inject", "y", "--lr", "-1"]
    assert parse_flags(argv) == {"a": "1", "b": "2", "c": True, "d": ["1", "2"], "inject": ["x", "y"], "lr": "-1"}


def test_equal_runs_differ_in_nothing() -> None:
    one = facts("a-1", {"save": "/runs/a-1/ck", "lr": 1.0}, environment={"PATH": {"value": "/runs/a-1/bin:/bin"}})
    two = facts("b-2", {"save": "/runs/b-2/ck", "lr": 1.0}, environment={"PATH": {"value": "/runs/b-2/bin:/bin"}})
    assert difference(one, two).changes == []
    assert difference(one, two).unknown == []


def test_known_risks_come_first_then_versions_then_paths() -> None:
    one = facts(
        "a-1",
        {"sglang_attention_backend": "fa3", "save": "/x", "num_rollout": 1},
        versions={"python": "3.11", "torch": "2.6"},
        environment={"EDITOR2": {"fingerprint": "1", "secret": False}},
    )
    two = facts(
        "b-2",
        {"sglang_attention_backend": "triton", "save": "/y", "num_rollout": 2},
        versions={"python": "3.11", "torch": "2.7"},
        environment={"EDITOR2": {"fingerprint": "2", "secret": False}},
    )
    found = difference(one, two).changes
    assert names(found) == [
        "argument sglang_attention_backend",
        "version torch",
        "argument save",
        "environment EDITOR2",
        "argument num_rollout",
    ]
    assert found[0].why == "other attention kernels: trainer and engine no longer round alike"
    assert (found[3].before, found[3].after) == ("(not kept)", "(not kept)")


def test_what_explains_the_failed_check_goes_before_everything() -> None:
    one, two = (
        facts("a-1", {"lr": 1e-6, "transformer_impl": "local"}),
        facts("b-2", {"lr": 1.0, "transformer_impl": "te"}),
    )
    assert names(difference(one, two).changes) == ["argument transformer_impl", "argument lr"]
    failed = facts("b-2", {"lr": 1.0, "transformer_impl": "te"}, ("train.grad-high",))
    first, second = difference(one, failed).changes
    assert (first.name, first.explains, second.explains) == ("lr", ("train.grad-high",), ())
    assert first.why.endswith("can explain train.grad-high")


def test_secrets_change_without_being_shown() -> None:
    def with_token(name: str, secret: str) -> Facts:
        env = mask_environment({"HF_TOKEN": secret}, KEY)
        return facts(
            name, {"api_key": secret}, environment=env, command=mask_command(["t", "--wandb-key", secret], KEY)
        )

    found = difference(with_token("a-1", "s3cret-one"), with_token("b-2", "s3cret-two"))
    assert set(names(found.changes)) == {"argument api_key", "argument wandb_key", "environment HF_TOKEN"}
    assert all((change.before, change.after) == ("(secret)", "(secret)") for change in found.changes)
    assert "s3cret" not in str(found)
    assert difference(with_token("a-1", "same"), with_token("b-2", "same")).changes == []


def test_a_flag_that_only_the_command_line_has_is_compared_as_typed() -> None:
    one = facts("a-1", {"lr": 1}, command=["python", "train.py", "--lr", "1", "--extra", "x"])
    two = facts("b-2", {"lr": 1}, command=["python", "train.py", "--lr", "1.0", "--extra", "y"])
    (change,) = difference(one, two).changes
    assert (change.name, change.before, change.after) == ("extra", "x", "y")


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    old = Facts("a-1", "/runs/a-1", None, {}, ())
    found = difference(old, facts("b-2", {"lr": 1}, versions={"python": "3.11", "torch": "2.6"}))
    assert found.changes == []
    assert any("a-1: no manifest" in text for text in found.unknown)
    assert any("a-1: its trainer told no arguments" in text for text in found.unknown)
    blind = facts("a-1", environment={"X": {"fingerprint": None, "secret": True}})
    found = difference(blind, facts("b-2", environment={"X": {"fingerprint": "1", "secret": True}}))
    assert found.changes == []
    assert "1 variables could not be compared" in "".join(found.unknown)
    nameless = facts("a-1", versions={"rltop": "1"}, notes=["versions: bash is no Python program"])
    found = difference(nameless, facts("b-2", versions={"rltop": "1", "python": "3.11", "torch": "2"}))
    assert found.changes == []
    assert "a-1: versions: bash is no Python program" in found.unknown


def test_code_and_checkpoints() -> None:
    git = {"root": "/src/slime", "commit": "a" * 40, "subject": "One", "dirty": 0, "diff": "", "diff_stat": []}
    edited = {**git, "dirty": 2, "diff": "ff", "diff_stat": [" x.py | 2 +-", " 1 file changed, 1 insertion(+)"]}
    disk = {"path": "/m", "exists": True, "config.json": "1"}
    one = facts("a-1", git=[git], checkpoints={"load": {**disk, "step": "10"}})
    two = facts("b-2", git=[{**edited, "root": "/copy/slime"}], checkpoints={"load": {**disk, "step": "20"}})
    code, checkpoint = difference(one, two).changes
    assert (code.kind, code.after) == ("git", "aaaaaaaaaa One + uncommitted: 1 file changed, 1 insertion(+)")
    assert (checkpoint.name, checkpoint.before, checkpoint.after) == ("load", {"step": "10"}, {"step": "20"})
