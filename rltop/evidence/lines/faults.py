"""Lines in which something breaks: faults of the GPU, deaths, ports, collectives, launch mistakes.

Spellings are those of torch, Triton, flashinfer, FlashAttention, NCCL, the driver, Ray, SGLang, Megatron and
TransformerEngine as they stand in public reports and recorded logs; a recogniser says what the line says, not whose
fault it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser

_IMA = re.compile(
    r"(?P<access>illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|"
    r"CUDBG_EXCEPTION_\w*ILLEGAL_ADDRESS|CUDA Exception: \w+ Illegal Address)|"
    r"(?P<misaligned>misaligned address|CUDBG_EXCEPTION_\w*MISALIGNED_ADDRESS)|(?P<launch>unspecified launch failure)|"
    r"(?P<instruction>illegal instruction was encountered|CUDA_ERROR_ILLEGAL_INSTRUCTION)",
    re.I,
)
_IMA_ERROR = re.compile(
    r"CUDA error|Error:|Exception:|coredump: Detected|Triton Error|error code|ProcessGroupNCCL|CUDA_ERROR|"
    r"what\(\):|failed",
    re.I,
)
"""What makes the line the error itself and not advice about it."""
_IMA_ADVICE = re.compile(r"^\s*(?:Search for `|Compile with|For debugging|CUDA kernel errors might)")
_KERNEL = re.compile(
    r"coredump:\s+#0\s+0x[0-9a-f]+\s+(?P<core>[A-Za-z_]\w*)|"
    r"triggered at PC 0x[0-9a-f]+\s+(?P<gdb>[A-Za-z_]\w*)|"
    r"^=+\s+at (?P<sanitizer>[A-Za-z_]\w*)\([^)]*\)\+0x"
)
_KERNEL_FAILED = re.compile(r"\b(?P<kernel>[A-Za-z_]\w+) failed with error code", re.I)
_NCCL_RANK = re.compile(r"\bRank (?P<rank>\d+)\]")


def illegal_access(line: Line) -> Mapping[str, object] | None:
    """An illegal memory access, or one of its siblings, in any library's spelling: fault, from, capture, kernel."""
    found = _IMA.search(line.text)
    if found is None or _IMA_ADVICE.search(line.text) or not _IMA_ERROR.search(line.text):
        return None
    fault = {"access": "illegal memory access", "misaligned": "misaligned address", "launch": "launch failure"}
    data: dict[str, object] = {"fault": fault.get(found.lastgroup or "", "illegal instruction")}
    if "ProcessGroupNCCL" in line.text or "watchdog thread" in line.text:
        data["from"] = "nccl-watchdog"
        if line.rank is None and (rank := _NCCL_RANK.search(line.text)):
            data["rank"] = int(rank["rank"])
    elif "what():" in line.text:
        data["from"] = "terminate"
    if re.search(r"captur\w+ .*graph\w* failed", line.text, re.I):
        data["phase"] = "capture"
    if kernel := _KERNEL_FAILED.search(line.text):
        data["kernel"] = kernel["kernel"]
    return data


def _kernel(line: Line) -> Mapping[str, object] | None:
    found = _KERNEL.search(line.text)
    return {"kernel": found["core"] or found["gdb"] or found["sanitizer"]} if found else None


_SAVER = re.compile(r"\[torch_memory_saver")
_SAVER_FUNCTION = re.compile(r"\bfunc=(?P<function>\w+)")


def memory_saver(line: Line) -> Mapping[str, object] | None:
    """torch_memory_saver out of memory: function, benign (it says that it may not be an issue)."""
    if not _SAVER.search(line.text) or not re.search(r"out[ _]of[ _]memory", line.text, re.I):
        return None
    function = _SAVER_FUNCTION.search(line.text)
    return {"function": function["function"] if function else "", "benign": "may not be an issue" in line.text}


_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<xid>\d+)")


def xid(line: Line) -> Mapping[str, object] | None:
    """The driver's Xid: number, device, pid and process where it names them."""
    found = _XID.search(line.text)
    if found is None:
        return None
    data: dict[str, object] = {"xid": int(found["xid"]), "device": found["device"]}
    if pid := re.search(r"pid='?(\d+)", line.text):
        data["process"] = int(pid[1])
    return data


_DEATHS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("server", re.compile(r"Server process terminated unexpectedly")),
    ("init", re.compile(r"scheduler died during initialization(?: \(exit code: (?P<code>-?\d+)\))?")),
    ("subprocess", re.compile(r"Subprocess \S+ \(pid=(?P<victim>\d+)\) crashed with exit code (?P<code>-?\d+)")),
    ("watchdog", re.compile(r"(?<!soft )[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<limit>\d+)(?!.*soft=True)")),
    ("sigquit", re.compile(r"SIGQUIT received|Received sigquit from a child process")),
    ("actor", re.compile(r"(?:Ray)?ActorDiedError|The actor (?:is dead|died)|ActorUnavailableError|RayActorError")),
    (
        "worker",
        re.compile(r"worker (?:died or was killed|process has died|exited unexpectedly)|WorkerCrashedError", re.I),
    ),
    (
        "killed",
        re.compile(r"\b(?:killed by|received|signal:?) ?(?:signal )?\(?SIGKILL|exit code:? -9\b|\bKilled\b\s*$"),
    ),
)
_MEANT = re.compile(
    r"INTENDED_(?:USER|SYSTEM)_EXIT|Force kill actor request|owner has died|ray\.kill|killed by `?ray|exit_actor\(\)|"
    r"out of scope"
)
"""How Ray says that an actor's end was wanted: the job is over, or its handle is gone."""
_VICTIM = re.compile(r"\bpid[=:]? ?(?P<pid>\d+)", re.I)
_VICTIM_NAME = re.compile(r"class_name: (?P<name>\w+)|ray::(?P<name2>\w+)|\b(?P<name3>SGLangEngine|\w+RayActor)\b")


def death(line: Line) -> Mapping[str, object] | None:
    """A process is gone: how (server, init, subprocess, watchdog, sigquit, actor, worker, killed), victim (pid), name,
    code."""
    if _MEANT.search(line.text):
        return None
    for how, pattern in _DEATHS:
        found = pattern.search(line.text)
        if found is None:
            continue
        groups = {key: value for key, value in found.groupdict().items() if value is not None}
        data: dict[str, object] = {"how": how} | {key: int(value) for key, value in groups.items()}
        if "victim" not in data and (pid := _VICTIM.search(line.text)):
            data["victim"] = int(pid["pid"])
        if name := _VICTIM_NAME.search(line.text):
            data["name"] = next(value for value in name.groups() if value)
        return data
    return None


_IN_USE = re.compile(r"EADDRINUSE|address already in use|Port (?P<port>\d+)? ?is already in use|\[Errno 98\]", re.I)
_PORTS = (
    re.compile(r"\bport[:=]? ?(?P<port>\d{2,5})\b", re.I),
    re.compile(r"\('[^']*', (?P<port>\d{2,5})"),
    re.compile(r"(?:\d{1,3}(?:\.\d{1,3}){3}|\]|localhost|\*):(?P<port>\d{2,5})\b"),
)


def port_in_use(line: Line) -> Mapping[str, object] | None:
    """A port that somebody else holds: port (None where the line does not say)."""
    found = _IN_USE.search(line.text)
    if found is None:
        return None
    if found["port"]:
        return {"port": int(found["port"])}
    match = next((m for pattern in _PORTS if (m := pattern.search(line.text))), None)
    return {"port": int(match["port"]) if match else None}


_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+).*?Timeout\(ms\)=(?P<timeout>\d+)\)(?: ran for (?P<ran>\d+) ms| "
    r"ran for (?P<ran2>\d+) milliseconds)?"
)
_PROGRESS = re.compile(
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+), last completed(?: NCCL)? work: (?P<completed>-?\d+)"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<group>\d+)(?: PG GUID (?P<guid>[^\]\s]+))?(?: \(?(?P<name>[\w-]+)\)?)? Rank (?P<rank>\d+)\]"
)
_RANK = re.compile(r"\[Rank (?P<rank>\d+)\]")


def collective(line: Line) -> Mapping[str, object] | None:
    """NCCL's watchdog on a collective that does not end: rank_in_group, group, op, seq, enqueued, completed,
    timeout_ms; stuck where the watchdog itself does not move."""
    work, progress = _WORK.search(line.text), _PROGRESS.search(line.text)
    timed_out = work is not None and "timeout" in line.text.lower()
    stuck = "watchdog got stuck" in line.text
    if not timed_out and progress is None and not stuck:
        return None
    data: dict[str, object] = {"stuck": True} if stuck else {}
    if work:
        data |= {"seq": int(work["seq"]), "op": work["op"], "timeout_ms": int(work["timeout"])}
    if progress:
        data |= {"enqueued": int(progress["enqueued"]), "completed": int(progress["completed"])}
    if group := _GROUP.search(line.text):
        data |= {"group": group["guid"] or group["group"], "rank_in_group": int(group["rank"])}
    elif rank := _RANK.search(line.text):
        data["rank_in_group"] = int(rank["rank"])
    if line.rank is None and "rank_in_group" in data:
        data["rank"] = data["rank_in_group"]
    return data


_NOT_OPENED = re.compile(r"(?:python[\d.]*|bash|sh|zsh): can'?t open(?: file)? '(?P<path>[^']+)'", re.I)
_NO_SCRIPT = re.compile(
    r"^(?:/\S*/)?(?:bash|sh|zsh)(?:: line \d+|: \d+)?: (?P<path>\S+): (?:No such file or directory|not found)$|"
    r"^(?:/\S*/)?sh: \d+: (?:[Cc]an'?t open|Can't open) (?P<path2>\S+)|"
    r"^(?:/\S*/)?python[\d.]*: No module named (?P<module>\S+)|"
    r"^(?:/\S*/)?python[\d.]*: Error while finding module specification for '(?P<module2>[^']+)'"
)


def entry_missing(line: Line) -> Mapping[str, object] | None:
    """Python or the shell cannot open what it was told to run: path, or module."""
    text = line.text.strip()
    if found := _NOT_OPENED.search(text):
        return {"path": found["path"]}
    if found := _NO_SCRIPT.search(text):
        if module := found["module"] or found["module2"]:
            return {"module": module.strip("'")}
        return {"path": (found["path"] or found["path2"]).strip("'")}
    return None


_NO_ATTENTION = re.compile(
    r"No dot product attention (?:backend is available|support)|Selected backend = NoBackend|"
    r"no attention backend (?:is )?available",
    re.I,
)


def _no_attention(line: Line) -> Mapping[str, object] | None:
    return {} if _NO_ATTENTION.search(line.text) else None


_BATCH = re.compile(
    r"assert .*lr_decay_steps > 0|global_batch_size \d+ is not equal to|over_sampling_batch_size .* should be|"
    r"global batch size .* is not divisible|must be >= (?:actor|critic)\.ppo_mini_batch_size|"
    r"ppo_mini_batch_size .*(?:must|should) be"
)


def _batch_assert(line: Line) -> Mapping[str, object] | None:
    return {} if _BATCH.search(line.text) else None


_REFUSED = re.compile(
    r"Unsupported (?:global: GLOBAL|class) (?P<name>\w+(?:\.\w+){1,30})|"
    r"WeightsUnpickler error:.*?(?:instance|class|global|type) <?(?:class )?['\"]?(?P<name2>\w+(?:\.\w+){1,30})"
)


def _pickle_refused(line: Line) -> Mapping[str, object] | None:
    """A load with weights_only refused a class; torch names it in its message."""
    found = _REFUSED.search(line.text)
    return {"class": found["name"] or found["name2"]} if found else None


_JOB_ENDED = re.compile(
    r"Job '(?P<job>[^']+)' (?P<state>failed|succeeded|stopped)|"
    r"job \S+ .*status(?: message)?:? .*?(?P<state2>FAILED|SUCCEEDED|STOPPED)|"
    r"Job entrypoint command failed with exit code (?P<code>-?\d+)|exited with exit code (?P<code2>-?[1-9]\d*)",
    re.I,
)


def job_end(line: Line) -> Mapping[str, object] | None:
    """The job, or a process that was started, came to its end: state, code."""
    found = _JOB_ENDED.search(line.text)
    if found is None:
        return None
    code = found["code"] or found["code2"]
    state = (found["state"] or found["state2"] or "failed").lower()
    return {"state": state} | ({"code": int(code)} if code else {})


_FATAL = re.compile(r"^(?:Fatal Python error|Segmentation fault|.*\bcore dumped\b|terminate called|FATAL\b|CRITICAL\b)")


def _fatal(line: Line) -> Mapping[str, object] | None:
    return {} if _FATAL.search(line.text) or line.level in ("FATAL", "CRITICAL") else None


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser(
        "ima",
        ("llegal", "ILLEGAL", "isaligned address", "MISALIGNED", "unspecified launch failure"),
        illegal_access,
    ),
    Recogniser("kernel", ("coredump:", "triggered at PC", "=====     at "), _kernel),
    Recogniser("memory_saver", ("torch_memory_saver",), memory_saver),
    Recogniser("xid", ("Xid",), xid),
    Recogniser(
        "death",
        (
            "terminated unexpectedly",
            "died",
            "crashed",
            "atchdog timeout",
            "SIGQUIT",
            "sigquit",
            "ctor",
            "orker",
            "SIGKILL",
            "Killed",
            "exit code",
        ),
        death,
    ),
    Recogniser("port_in_use", ("EADDRINUSE", "ddress already in use", "lready in use", "Errno"), port_in_use),
    Recogniser("collective", ("WorkNCCL", "last completed", "watchdog got stuck"), collective),
    Recogniser("entry_missing", ("open", "No such file", "not found", "No module named", "module spec"), entry_missing),
    Recogniser("no_attention", ("ttention", "NoBackend"), _no_attention),
    Recogniser("batch_assert", ("lr_decay_steps", "_batch_size", "global batch size"), _batch_assert),
    Recogniser("pickle_refused", ("Unsupported ", "WeightsUnpickler"), _pickle_refused),
    Recogniser("job_end", ("Job", "job", "exit code"), job_end),
    Recogniser("fatal", ("Fatal", "FATAL", "CRITICAL", "Segmentation", "core dumped", "terminate called"), _fatal),
)
