"""Errors that say themselves what is wrong: the class of an error, what it means in plain words, and what to do.

They are no faults of training and no check of their own: a full disk, a missing module, a flag that is misspelt, a key
that the user's own reward function does not find. `host.unexplained` shows them with this advice. The first entry whose
pattern matches wins, so what is exact stands above what is general.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rltop.checks.events import own_frame, whole_text, word
from rltop.checks.found import LogEvent


@dataclass(frozen=True, slots=True)
class Remedy:
    """One class of errors. `{name}` in the texts are the pattern's named groups, `-` where one is empty."""

    pattern: re.Pattern[str]
    says: str
    """What it means, as the end of a sentence."""
    advice: tuple[str, ...]
    sure: bool = True
    """The message names the cause itself. Else it counts in the user's own code only."""
    shell: bool = False
    """Words of the shell, which mean something else in an exception."""


def _entry(pattern: str, says: str, *advice: str, sure: bool = True, shell: bool = False) -> Remedy:
    return Remedy(re.compile(pattern, re.DOTALL), says, advice, sure, shell)


_QUOTED = r"(?:.{0,200}?'(?P<path>/[^'\n]{1,300})')?"
_REMEDIES: tuple[Remedy, ...] = (
    _entry(
        r"(?:Errno 28\b|No space left on device|ENOSPC)" + _QUOTED,
        "the disk is full",
        "df -h and df -i of the folder of {path}, on the node of that process",
        "free space there, or another --save; a checkpoint that was cut off is no use, --load takes the last whole one",
    ),
    _entry(
        r"(?:Errno 122\b|[Dd]isk quota exceeded)" + _QUOTED,
        "the user's quota is used up",
        "quota -s; free space, or another --save than the folder of {path}",
    ),
    _entry(
        r"No module named '?(?P<module>[\w.]+)",
        "Python does not find {module}",
        "python3 -c 'import {module}' with the job's own Python, on every node",
        "PYTHONPATH (for a Ray job: env_vars of --runtime-env-json) with the folder that holds {module}, or install it",
    ),
    _entry(
        r"cannot import name '(?P<what>[^']+)' from '(?P<module>[\w.]+)",
        "the installed {module} has no {what}: two packages do not fit each other",
        "pip show of the package of {module}, against the version that the framework asks for",
    ),
    _entry(
        r"(?P<file>[\w.+-]+): cannot open shared object file|undefined symbol: (?P<symbol>\S+)",
        "a compiled library does not fit what is installed",
        "pip list: torch, CUDA and the package of that library must be built for each other",
        "LD_LIBRARY_PATH, on the node of that process",
    ),
    _entry(
        r"unrecognized arguments: (?P<flag>--?[\w-]+)",
        "the program has no flag {flag}",
        "the spelling of {flag} (python3 PROGRAM --help), or the version that has it",
        "rltop doctor SCRIPT before the next start",
    ),
    _entry(
        r"argument (?P<flag>-[\w/-]+): (?P<why>[^\n]{1,120})",
        "the flag {flag} has a value that it can not have",
        "the value of {flag}: {why}",
        "rltop doctor SCRIPT before the next start",
    ),
    _entry(
        r"the following arguments are required: (?P<flag>[^\n]{1,120})",
        "a flag is missing",
        "add {flag}",
        "rltop doctor SCRIPT before the next start",
    ),
    _entry(
        r"ambiguous option: (?P<flag>-[\w-]+)[^\n]*?could match (?P<which>[^\n]{1,120})",
        "the flag {flag} could be several",
        "write it in full: {which}",
    ),
    _entry(
        r"(?P<what>[^\s:]+): (?:command )?not found",
        "the shell does not find {what}",
        "PATH in the job's own environment: is its image or its conda environment active?",
        shell=True,
    ),
    _entry(
        r"(?P<what>[A-Za-z_]\w*): unbound variable",
        "the script uses {what}, which nobody set",
        "export {what} before the script, or give it a default",
        shell=True,
    ),
    _entry(r"syntax error|bad substitution", "the shell can not read the script", "bash -n on the script", shell=True),
    _entry(
        r"(?:Errno 13\b|Permission denied)" + _QUOTED,
        "the job's user may not do that",
        "ls -ld {path} on the node of that process, and the user that the job runs as",
    ),
    _entry(
        r"(?:Errno 24\b|Too many open files)",
        "the process has no more file handles",
        "ulimit -n 65536 before ray start, on every node",
    ),
    _entry(
        r"connect to (?P<peer>[^\s<]+)(?:<\d+>)? (?:returned|failed)[^\n]*[Rr]efused",
        "nobody listens at {peer} any more",
        "the log of the process at {peer}: it is the one that ended first",
        "NCCL_SOCKET_IFNAME, if {peer} is an address that the nodes do not share",
    ),
    _entry(
        r"GatedRepoError|RepositoryNotFoundError|LocalEntryNotFoundError|OfflineModeIsEnabled|"
        r"(?:401|403|404) Client Error[^\n]*huggingface",
        "the model or the data is not on this machine and can not be fetched",
        "download it before the start and give the path of the folder",
        "HF_TOKEN, HF_HOME and HF_ENDPOINT in the job's own environment",
    ),
    _entry(
        r"No CUDA GPUs are available|no CUDA-capable device|driver version is insufficient|CUDA_ERROR_NO_DEVICE",
        "the process sees no usable GPU",
        "nvidia-smi and CUDA_VISIBLE_DEVICES in that process (Ray sets it from num_gpus)",
    ),
    _entry(
        r"device-side assert triggered",
        "a kernel was given an index that is out of range",
        "once more with CUDA_LAUNCH_BLOCKING=1: the frame is then the right one",
        "token ids against the vocabulary, and labels against the number of classes",
    ),
    _entry(
        r"Bus error|unable to (?:open|write|mmap) (?:shared memory|file <)",
        "shared memory ran out, or a file that is mapped was cut",
        "df -h /dev/shm; a larger --shm-size for the container",
    ),
    _entry(
        r"FileNotFoundError: [^\n]*'(?P<path>[^'\n]{1,300})'|(?P<path2>/[^\s:']+): No such file or directory|"
        r"Errno 2\b[^\n]*'(?P<path3>[^'\n]{1,300})'",
        "the file is not there",
        "ls -l {path} on the node of that process: a mount that only some nodes have, or a wrong path",
    ),
    _entry(
        r"KeyError: (?P<key>'[^'\n]{1,80}'|\"[^\"\n]{1,80}\"|\S{1,80})",
        "a map has no entry {key}",
        "whether every row of --prompt-data has {key} (a field of its metadata, --label-key, --input-key)",
        sure=False,
    ),
    _entry(
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "the scheduler's time limit was over; nothing broke",
        "a longer limit, or start again with --load set to the --save of this run",
        "a smaller --save-interval: what came after the last checkpoint is lost",
    ),
    _entry(
        r"CANCELLED AT \S+ DUE TO PREEMPT",
        "the scheduler gave the nodes to another job",
        "start again with --load set to the --save of this run",
    ),
    _entry(
        r"CANCELLED AT \S+ DUE TO (?P<why>NODE[ _]FAIL\w*)",
        "a node failed",
        "scontrol show node, and dmesg of that node",
        "start again with --load set to the --save of this run, without that node",
    ),
)
_MORE = re.compile(r"\{(\w+)\}")
_FRAMEWORK = re.compile(
    r"site-packages|dist-packages|/lib/python|<frozen|<string>|/torch/|^torch/|^ray/|/ray/_|/triton/|"
    r"(?:^|/)(?:slime|relax|miles|verl|openrlhf|megatron|Megatron-LM|sglang|vllm|sgl_kernel)/"
)
"""Code that the user of a run did not write."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an error says: its meaning (empty where nobody knows), advice, and whether that is sure."""

    says: str
    advice: tuple[str, ...]
    sure: bool


def remedy(event: LogEvent) -> Told:
    """What is known about the class of an error. `says` is empty, and the advice general, for one of no known class."""
    last = f"{word(event, 'detail')}\n{word(event, 'exception')}: {word(event, 'message')}"
    mine = users_frame(event)
    look = (f"{mine}: your own code; run that function on one sample by hand",) if mine else ()
    # The last exception says what happened; those before it, and its frames, only where it says nothing.
    for text, entry in ((text, entry) for text in (last, whole_text(event)) for entry in _REMEDIES):
        if (entry.shell and event.kind != "ended") or not (entry.sure or mine):
            continue
        if found := entry.pattern.search(text):
            groups = {re.sub(r"\d$", "", name): value for name, value in found.groupdict().items() if value}
            advice = tuple(_filled(one, groups) for one in entry.advice)
            return Told(
                _filled(entry.says, groups), (*look, *advice) if not entry.sure else (*advice, *look), entry.sure
            )
    if mine:
        return Told("", (*look, "its input: --dump-details DIR keeps every sample of the next run"), False)
    where = event.where
    return Told(
        "",
        (f"the lines before {where.source}:{where.line}", "--dump-details DIR (a full capture at the next run)"),
        False,
    )


def _filled(text: str, groups: dict[str, str]) -> str:
    """The text with what the message named; a path that it did not name is `that path`."""
    return _MORE.sub(lambda found: groups.get(found[1], f"that {found[1]}"), text)


def users_frame(event: LogEvent) -> str:
    """The innermost frame, where it is neither a library's nor the framework's: `file:line in function`."""
    frame = event.data.get("own_frame")
    if not isinstance(frame, list | tuple) or not frame or _FRAMEWORK.search(str(frame[0])):
        return ""
    return own_frame(event) if "/" in str(frame[0]) and not str(frame[0]).endswith("/train.py") else ""
