"""Launch scripts are understood without running them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.evidence.launch_script import Launch, from_argv, is_unread, read_script

SCRIPT = """\
#!/bin/bash
# rerun
pkill -9 sglang; set -ex
export PYTHONUNBUFFERED=1
LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$LINKS" -gt 0 ]; then
    FAST=1
fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/small.sh"
BASE=/models
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/Qwen3-4B
   #--hf-checkpoint /models/other
   --ref-load "$BASE/with space"
)
ROLLOUT_ARGS=( --prompt-data ${DATA:-/data/x.jsonl} )
ROLLOUT_ARGS+=( --n-samples-per-prompt 8 )
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {\\"NCCL_NVLS_ENABLE\\": \\"${FAST}\\"}
}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --colocate \\
   ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} \\
   "${ROLLOUT_ARGS[@]}"
"""


def launch(text: str = SCRIPT, environ: dict[str, str] | None = None) -> Launch:
    files = {"/here/models/small.sh": "MODEL_ARGS=(\n --num-layers 4\n)\n"}
    return read_script(text, "run.sh", environ, directory="/here", load=files.get)


def test_arrays_variables_comments_and_sourced_files_become_words_with_their_lines() -> None:
    words = [(word.text, word.line) for word in launch().words]
    assert words == [
        ("python3", 24),
        ("train.py", 24),
        ("--colocate", 25),
        ("--num-layers", 10),
        ("4", 10),
        ("--hf-checkpoint", 13),
        ("/models/Qwen3-4B", 13),
        ("--ref-load", 15),
        ("/models/with space", 15),
        ("--prompt-data", 17),
        ("/data/x.jsonl", 17),
        ("--n-samples-per-prompt", 18),
        ("8", 18),
    ]


def test_exports_and_the_runtime_env_are_the_environment() -> None:
    assert launch().env == {"PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "1"}


def test_what_only_a_shell_knows_is_named() -> None:
    assert launch().unresolved == ("$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)",)
    found = launch("source common.sh\npython train.py --load $WHERE\n")
    assert found.unresolved == ("source common.sh", "$WHERE")
    assert found.words[-1].text == "$WHERE"


@pytest.mark.parametrize("rest", ['"$@"', "$@", "$*", '"${@:2}"'])
def test_the_script_s_own_arguments_are_no_value_of_the_flag_before_them(rest: str) -> None:
    found = launch(f"python train.py --num-rollout 2 {rest}\n")
    assert [word.text for word in found.words] == ["python", "train.py", "--num-rollout", "2"]
    assert found.unresolved == (rest.strip('"'),)


def test_a_variable_from_outside_is_used_where_the_script_sets_none() -> None:
    found = launch("python train.py --load $WHERE", {"WHERE": "/out", "HOME": "/root"})
    assert [word.text for word in found.words[2:]] == ["--load", "/out"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "echo hello\n",
        "A=(",
        'A="unclosed',
        "$(",
        "`",
        "python",
        ")",
        "((",
        "A+=(1)",
        "\\",
        "'",
        "source",
        "export A",
    ],
)
def test_odd_scripts_are_no_crash(text: str) -> None:
    assert launch(text).source == "run.sh"


def test_a_script_that_sources_itself_ends() -> None:
    found = read_script("source me.sh", "me.sh", load=lambda _path: "source me.sh\npython train.py")
    assert [word.text for word in found.words] == ["python", "train.py"]


def test_words_of_the_command_line_lose_the_submitting_command() -> None:
    found = from_argv(
        ["ray", "job", "submit", "--runtime-env-json", '{"env_vars": {"A": 1}}', "--", "python", "train.py"]
    )
    assert found.text == "python train.py"
    assert found.env == {"A": "1"}


@given(st.text(alphabet="AB=()$'\"`{}\\ \n#;-.py|&[]@:", max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    launch(text)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python a.py --x 1 2>&1 | tee log\n", ["python", "a.py", "--x", "1"]),
        ("python a.py --x 1 > log 2>&1 &\n", ["python", "a.py", "--x", "1"]),
        ("( python a.py --x 1 )\n", ["python", "a.py", "--x", "1"]),
        ("python a.py --x 1 &> log\n", ["python", "a.py", "--x", "1"]),
        ("cat > x <<EOF\npython b.py --y 1 --z 2 --w 3\nEOF\npython a.py --x 1\n", ["python", "a.py", "--x", "1"]),
        ("python a.py --x $((32 * 8 / 2))\n", ["python", "a.py", "--x", "128"]),
        ('A="${A:-${B:-/root}/x}"\npython a.py --x $A\n', ["python", "a.py", "--x", "/root/x"]),
        ('HERE=$(dirname "$(realpath "$0")")\npython a.py --x $HERE/y\n', ["python", "a.py", "--x", "/here/y"]),
        ("python a.py --x 1 ${NONE[@]} --y 2\n", ["python", "a.py", "--x", "1", "--y", "2"]),
        ("python a.py --x 1 --y 2\npython b.py --z\npkill -9 python\n", ["python", "a.py", "--x", "1", "--y", "2"]),
        ("srun -N 2 python a.py --x 1\n", ["python", "a.py", "--x", "1"]),
        ("python a.py --x ${1:-8}\n", ["python", "a.py", "--x", "8"]),
    ],
)
def test_scripts_as_people_write_them(script: str, words: list[str]) -> None:
    assert [word.text for word in launch(script).words] == words


def test_what_cannot_be_known_is_named_whole() -> None:
    found = launch('python a.py --x $(python3 -c "print(3)") --y $((N * 2)) --z ${N}\n')
    assert found.unresolved == ('$(python3 -c "print(3)")', "$((N * 2))", "${N}")
    assert [word.text for word in found.words if is_unread(word.text)] == list(found.unresolved)
