"""Which values of an environment or a command line are kept, and how the others can still be compared.

A value is kept only where its name says that it is technical (`CUDA_…`, `NCCL_…`) or the user put it into the run's own
file, and neither name nor value look like a secret. Of every other value a fingerprint is kept: HMAC-SHA256 with a key
that only this user can read, so "it changed" can be said, and nobody who sees the file can try passwords on it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rltop.errors import RltopError
from rltop.runs import places

KEY_BYTES = 32
HIDDEN = "***"
"""Stands where a secret was."""
_SECRET_WORDS = frozenset(
    {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "cookie", "bearer"}
    | {"webhook", "dsn", "pat", "apikey"}
)
_KEY_OF = frozenset(
    {"api", "access", "secret", "private", "wandb", "ssh", "encryption", "signing", "license", "account", "auth"}
)
_TOKEN_OF_TEXT = frozenset(
    {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "end", "start", "per", "special", "first", "last"}
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{8,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]*:[^/\s@]+@"
)
_TECHNICAL = re.compile(
    r"(CUDA|CUDNN|CUBLAS|NCCL|NVTE|NVSHMEM|NVIDIA|GPU|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|INDUCTOR|SGLANG|SGL|FLASHINFER"
    r"|FLASH|MEGATRON|RAY|SLIME|RELAX|RLTOP|OMP|MKL|OPENBLAS|GLOO|UCX|NVLINK|DEEPEP|DEEP_EP|DEEPGEMM|DG|HF|TRANSFORMERS"
    r"|TOKENIZERS|VLLM|XLA|TF|NUMBA|KINETO|WANDB|SLURM|OMPI|PMI|MASTER|WORLD|LOCAL|NODE|FI|IB|MALLOC|CONDA)_\w+"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w*|VIRTUAL_ENV|RANK|WORLD_SIZE|LANG|LC_ALL|TZ|TMPDIR|HOSTNAME"
    r"|(http|https|all|no)_proxy|(HTTP|HTTPS|ALL|NO)_PROXY"
)
_OURS = frozenset({"RLTOP_INGEST", "RLTOP_RUN", "RLTOP_RUN_DIR", "RLTOP_JOB"})
"""Different in every run, by construction."""
_NOISE = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM\w*|COLORTERM|LS_COLORS|LINES|COLUMNS|DISPLAY|SSH_\w+|TMUX\w*|STY|WINDOWID|XDG_\w+|DBUS_\w+"
    r"|PS\d|PROMPT\w*|HIST\w+|EDITOR|PAGER|LESS\w*|MAIL|INVOCATION_ID|JOURNAL_STREAM|PYTEST_\w+|SLURM_JOB_(START|END)_TIME"
    r"|BASH_FUNC_.+"
)
"""Of the terminal and the login, not of the run."""


def is_noise(name: str) -> bool:
    """Whether an environment variable tells of the terminal, the login or the shell (its functions), not of the run."""
    return name in _OURS or _NOISE.fullmatch(name) is not None


def is_secret(name: str, value: str = "") -> bool:
    """Whether a value must not be kept or shown."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    before = {word: words[index - 1] if index else "" for index, word in enumerate(words)}
    return (
        not _SECRET_WORDS.isdisjoint(words)
        or before.get("key", "") in _KEY_OF
        or (words[-1:] == ["token"] and before["token"] not in _TOKEN_OF_TEXT)
        or bool(_SECRET_VALUE.search(value))
    )


def load_key() -> bytes | None:
    """This user's key for fingerprints, made if need be; None where it cannot be kept."""
    try:
        path = places.private_dir(places.shared_base()) / "fingerprint.key"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            key = path.read_bytes()
            return key if len(key) == KEY_BYTES else None
        with open(fd, "wb") as file:
            file.write(key := secrets.token_bytes(KEY_BYTES))
        return key
    except (OSError, RltopError):
        return None


def fingerprint(value: str, key: bytes | None) -> str | None:
    """16 hex digits; None without a key: then nothing can be compared."""
    return None if key is None else hmac.new(key, value.encode(errors="replace"), hashlib.sha256).hexdigest()[:16]


def mask_environment(
    environ: Mapping[str, str], key: bytes | None, *, chosen: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Name -> `{value}` where it may be kept, else `{fingerprint, secret}`. chosen: names set in the run's own file."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in sorted(environ.items()):
        if is_noise(name):
            continue
        secret = is_secret(name, value)
        if not secret and (name in chosen or _TECHNICAL.fullmatch(name)):
            found[name] = {"value": value}
        else:
            found[name] = {"fingerprint": fingerprint(value, key), "secret": secret}
    return found


def mask_command(argv: Sequence[str], key: bytes | None) -> list[str]:
    """A command line in which secrets are `***FINGERPRINT`, the flags that they belong to as they were."""
    masked: list[str] = []
    name = ""
    for word in argv:
        flag, equals, value = word.partition("=")
        if word.startswith("-") and equals and is_secret(flag, value):
            masked.append(f"{flag}={_hidden(value, key)}")
        elif not word.startswith("-") and ((name and is_secret(name)) or is_secret("", word)):
            masked.append(_hidden(word, key))
        else:
            masked.append(word)
        name = word if word.startswith("-") and not equals else ""
    return masked


def mask_data(value: Any, name: str = "") -> Any:
    """Plain data in which every secret is `***`, however deep: by the name that it stands under, or by its look.

    Numbers stay unless their name is a password's: `image_token` is one of the vocabulary. Lists of words are read as a
    command line too. What holds no secret comes back as it was.
    """
    match value:
        case dict():
            return {key: mask_data(one, str(key) if not is_secret(name) else name) for key, one in value.items()}
        case list() | tuple() if not is_secret(name) and all(isinstance(one, str) for one in value):
            return mask_command([str(one) for one in value], None)
        case list() | tuple():
            return [mask_data(one, name) for one in value]
        case str() if value and is_secret(name, value):
            return HIDDEN
        case bytes() if is_secret(name, value.decode(errors="replace")):
            return HIDDEN
        case int() | float() if not isinstance(value, bool) and is_secret(name):
            return value if re.search(r"(?i)token$", name) else HIDDEN
    return value


def _hidden(value: str, key: bytes | None) -> str:
    return f"{HIDDEN}{fingerprint(value, key) or ''}"
