"""What a run was started with, written down at its start: `manifest.json` in the run directory, mode 0600.

Command line, working directory, environment (secrets masked, `rltop.runs.masks`), versions in the trainer's own Python,
driver, git state of the places that its code comes from, checkpoints that its flags name. `rltop changed` compares two.

Failure policy: it runs beside the run and never holds it up. What cannot be found out is a note that says why; nothing
is guessed. Every process that it starts has a deadline.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rltop
from rltop.runs.masks import load_key, mask_command, mask_environment

MANIFEST = "manifest.json"
SCHEMA = 1
GIT_S = 10.0
PYTHON_S = 20.0
MAX_DIFF_BYTES = 64 << 20
MAX_STAT_LINES = 40
PACKAGES = (
    *("torch", "megatron-core", "sglang", "ray", "transformers", "tokenizers", "transformer-engine", "flash-attn"),
    *("flashinfer-python", "sgl-kernel", "triton", "numpy", "slime", "deep-ep", "deep-gemm", "apex", "vllm"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "safetensors", "mbridge"),
)
CHECKPOINT_FLAGS = (
    *("load", "ref-load", "hf-checkpoint", "save", "pretrained-checkpoint", "critic-load", "critic-save", "model-path"),
    *("sglang-model-path", "sglang-speculative-draft-model-path", "teacher-load", "rm-load", "tokenizer-model"),
)
_VERSIONS = """
import sys
sys.path = [folder for folder in sys.path if folder]  # not what lies in the current directory
import importlib.metadata as m, json, platform
found = {}
for name in sys.argv[1:]:
    try:
        dist = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    try:
        where = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        where = {}
    commit = where.get("vcs_info", {}).get("commit_id", "")
    editable = where.get("dir_info", {}).get("editable")
    found[name] = dist.version + (" @" + commit[:12] if commit else "") + (" editable" if editable else "")
print(json.dumps({"python": platform.python_version(), "executable": sys.executable, "packages": found}))
"""


def write_manifest(
    run_dir: Path,
    *,
    attempt: int,
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    config: Mapping[str, Any],
) -> None:
    """Capture and write; the manifest of the attempt before is kept as `manifest.<attempt>.json`.

    config: of `run.json`; its `env` names the variables that the user's file set. Raises OSError when the disk does
    not take it.
    """
    found = capture(attempt=attempt, command=command, env=env, cwd=cwd, config=config)
    path = run_dir / MANIFEST
    try:
        before = json.loads(path.read_text(encoding="utf-8")).get("attempt")
    except (OSError, ValueError, AttributeError):
        before = None
    if isinstance(before, int) and before < attempt:
        path.replace(path.with_name(f"manifest.{before}.json"))
    temporary = path.with_name(MANIFEST + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1, ensure_ascii=False)
    temporary.replace(path)


def capture(
    *, attempt: int, command: Sequence[str], env: Mapping[str, str], cwd: Path, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest (docs/cli.md describes its keys)."""
    key = load_key()
    notes: list[str] = [] if key else ["no key for fingerprints: values that are not kept cannot be compared"]
    chosen = config.get("env")
    script = _script(command, cwd)
    return {
        "schema": SCHEMA,
        "attempt": attempt,
        "captured": time.time(),
        "command": mask_command(command, key),
        "cwd": str(cwd),
        "host": socket.gethostname(),
        "environment": mask_environment(env, key, chosen=chosen if isinstance(chosen, list) else ()),
        "versions": _versions(command, env, cwd, notes),
        "git": _git_states([cwd, *([script.parent] if script else [])], notes),
        "checkpoints": _checkpoints(command, cwd),
        "notes": notes,
    }


# ---------------------------------------------------------------- versions


def _versions(command: Sequence[str], env: Mapping[str, str], cwd: Path, notes: list[str]) -> dict[str, str]:
    found = {"rltop": rltop.__version__, "os": f"{platform.system()} {platform.release()}"}
    driver = _driver()
    if driver is None:
        notes.append("driver: no NVIDIA driver is loaded on this machine")
    else:
        found["driver"] = driver
    python = _interpreter(command, env)
    if not command:
        notes.append("the daemon started no trainer: environment, versions and code are the daemon's own")
    if python is None:
        what = command[0] if command else "nothing"
        notes.append(f"versions: {what} is no Python program, so the Python behind it is not known")
        return found
    try:
        told = subprocess.run(
            [python, "-c", _VERSIONS, *PACKAGES],
            capture_output=True,
            text=True,
            timeout=PYTHON_S,
            env=dict(env),
            cwd=cwd,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        answer = json.loads(told.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        notes.append(f"versions: {python} did not tell: {error}")
        return found
    return {**found, "python": answer["python"], "executable": answer["executable"], **answer["packages"]}


def _interpreter(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The Python that runs the command: itself, or the one in a script's first line; None: it is something else."""
    if not command:
        return sys.executable
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        return None
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        return program
    try:
        with open(program, "rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
    except OSError:
        return None
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return None
    return shutil.which(words[0], path=env.get("PATH"))


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*?(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else None


# ---------------------------------------------------------------- code


def _script(command: Sequence[str], cwd: Path) -> Path | None:
    """The first Python or shell file among the words of a command."""
    for word in command:
        if word.endswith((".py", ".sh")) and (path := cwd / word).is_file():
            return path.resolve()
    return None


def _git_states(folders: Sequence[Path], notes: list[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        try:
            root = _git(folder, "rev-parse", "--show-toplevel").strip()
            if root not in found:
                found[root] = _git_state(Path(root))
        except FileNotFoundError:
            notes.append("git: it is not installed")
            break
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            notes.append(f"git: {folder}: {said.strip().splitlines()[0] if said.strip() else 'no answer'}")
    return list(found.values())


def _git_state(root: Path) -> dict[str, Any]:
    diff = _git(root, "diff", "HEAD", "--no-ext-diff")
    untracked = sorted(_git(root, "ls-files", "--others", "--exclude-standard").splitlines())
    dirty = [line for line in _git(root, "status", "--porcelain").splitlines() if line]
    digest = hashlib.sha256("\n".join([diff, *untracked]).encode(errors="replace")).hexdigest()[:16]
    try:
        branch = _git(root, "symbolic-ref", "--short", "-q", "HEAD").strip()
    except subprocess.CalledProcessError:
        branch = ""  # detached
    return {
        "root": str(root),
        "commit": _git(root, "rev-parse", "HEAD").strip(),
        "branch": branch,
        "subject": _git(root, "log", "-1", "--format=%s").strip(),
        "dirty": len(dirty),
        "diff": digest if dirty else "",
        "diff_stat": _git(root, "diff", "--stat=100", "HEAD").splitlines()[-MAX_STAT_LINES:],
        "untracked": untracked[:MAX_STAT_LINES],
    }


def _git(folder: Path, *args: str) -> str:
    # A status must not write the index, and no pager, prompt or hook may wait for anybody.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)
    told = subprocess.run(
        ["git", "-C", str(folder), *args],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=GIT_S,
        env=env,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return told.stdout[:MAX_DIFF_BYTES]


# ---------------------------------------------------------------- checkpoints


def _checkpoints(command: Sequence[str], cwd: Path) -> dict[str, dict[str, Any]]:
    """Flag -> what lies at the path that it names."""
    found: dict[str, dict[str, Any]] = {}
    for index, word in enumerate(command):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or name not in CHECKPOINT_FLAGS:
            continue
        if not equals:
            value = command[index + 1] if index + 1 < len(command) else ""
        if value and not value.startswith("-"):
            found[name] = checkpoint(value, cwd)
    return found


def checkpoint(value: str, cwd: Path) -> dict[str, Any]:
    """What lies at a checkpoint's path: step by its tracker, hashes of its configuration, number and size of files."""
    path = cwd / Path(value).expanduser()
    if not path.exists():
        return {"path": value, "exists": False}
    about: dict[str, Any] = {"path": value, "exists": True}
    tracker = path / "latest_checkpointed_iteration.txt"
    folder = path
    if tracker.is_file():
        about["step"] = tracker.read_text(encoding="utf-8", errors="replace").strip()[:40]
        inner = path / (f"iter_{int(about['step']):07d}" if about["step"].isdigit() else about["step"])
        folder = inner if inner.is_dir() else path
    for name in ("config.json", "metadata.json", "model.safetensors.index.json"):
        for place in dict.fromkeys((path, folder)):
            if (place / name).is_file():
                about[name] = hashlib.sha256((place / name).read_bytes()).hexdigest()[:16]
                break
    if folder.is_dir():
        sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()]
        about |= {"files": len(sizes), "bytes": sum(sizes)}
    return about
