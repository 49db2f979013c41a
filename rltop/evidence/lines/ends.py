"""How a job ends in the words of those around it: argparse, the shell, Slurm, Kubernetes, and whoever kills for memory.

None of these lines is a traceback, and the process that they are about says nothing any more. They are the launcher's
or the host's, whatever process printed the line before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser, number

# -- usage, shell, scheduler

_USAGE = re.compile(
    r"^(?P<program>[\w./-]{1,200}): error: (?P<what>(?:unrecognized arguments|argument \S+: |ambiguous option|"
    r"the following arguments are required|one of the arguments |(?:invalid|unknown) (?:choice|option)|"
    r"no such option).*)"
)
_SHELL = re.compile(
    r"^(?P<script>[^\s:]{1,400}): (?:line )?(?P<line>\d+): (?:(?:source|\.|exec|cd): )?(?P<what>[^:]{1,400}): "
    r"(?P<why>command not found|not found|No such file or directory|Permission denied|unbound variable|"
    r"syntax error.*|bad substitution)$"
)
_NO_COMMAND = re.compile(r"^(?:-?(?:bash|sh|zsh)): (?P<what>[^\s:]{1,400}): command not found$")
_SIGNALLED = re.compile(
    r"^(?:(?P<script>[^\s:]{1,400}): line (?P<line>\d+):\s+)?(?P<victim>\d{2,10}) (?P<signal>Killed|Aborted|Bus error|"
    r"Illegal instruction|Segmentation fault)(?: +\(core dumped\))? +(?P<command>\S.{0,400})"
)
_SMALL_TALK = re.compile(r"^\(?\s*(?:sleep|tail|tee|watch|nvidia-smi|nvitop|htop|top|grep|cat)\b")
"""Helpers of a script, whose end is nobody's fault."""
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<job>\S+) ON (?P<on>\S+) CANCELLED AT (?P<at>\S+)(?: DUE TO (?P<why>[A-Z][A-Z /_-]+?))?"
    r"(?: \*\*\*|$)"
)


def ended(line: Line) -> Mapping[str, object] | None:
    """The end of a job: how (usage, shell, signal, cancelled), what, why, victim (pid), program, command, job.

    `cancelled` with an empty `why` is a person's `scancel`.
    """
    text = line.text.strip()
    if found := _USAGE.match(text):
        return {"how": "usage", "program": found["program"], "what": found["what"], "owner": "launcher"}
    if found := _SIGNALLED.match(text):
        if _SMALL_TALK.match(found["command"]):
            return None
        told = {"victim": int(found["victim"]), "what": found["signal"], "command": found["command"].strip()}
        return {"how": "signal", **told, "owner": "host"}
    if found := _SHELL.match(text) or _NO_COMMAND.match(text):
        groups = found.groupdict()
        return {
            "how": "shell",
            "program": groups.get("script") or "",
            "what": groups["what"].strip(),
            "why": groups.get("why") or "command not found",
            "owner": "launcher",
        }
    if found := _CANCELLED.search(text):
        told = {"job": found["job"], "what": found["on"], "why": (found["why"] or "").strip().lower()}
        return {"how": "cancelled", **told, "owner": "launcher"}
    return None


# -- host memory

_BY_KERNEL = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process (?P<victim>\d+)(?:,? \(?(?P<name>[^),]+)\)?)?|"
    r"oom-kill:.*?task=(?P<name2>[^,]+),pid=(?P<victim2>\d+)",
    re.I,
)
_RSS = re.compile(r"\banon-rss:(?P<kb>\d{1,15})kB")
_BY_RAY = re.compile(
    r"killed due to (?:memory pressure|the node running low on memory)|OOM killer|OutOfMemoryError: Task was killed",
    re.I,
)
_ADVICE = re.compile(r"potential root causes|common causes? (?:is|include)", re.I)
"""Ray names the OOM killer for any lost worker, SGLang for a scheduler that dies at the start: that is no evidence."""
_NOBODY = re.compile(r"(?<!\d)0 Workers \(tasks / actors\) killed due to")
_RAY_FIGURES = re.compile(
    r"Memory on the node \(IP: (?P<node>[^,)]+).{0,200}? where the (?:task|lease|worker|actor) \((?P<task>.{0,300}?)\) "
    r"was running was (?P<used>[\d.]+)GB / (?P<total>[\d.]+)GB.{0,60}?threshold of (?P<limit>[\d.]+)"
)
_TASK_NAME = re.compile(r"\bname=(?P<name>[\w.:<>-]+)")
_TASK_PID = re.compile(r"\bpid=(?P<pid>\d{1,10})")
_TASK_GB = re.compile(r"memory used=(?P<gb>[\d.]+)GB")
_BY_SLURM = re.compile(
    r"^(?:srun|slurmstepd): error: .*?(?:Detected \d+ oom[_-]kill event|: Out Of Memory\b|OOM Killed|oom-kill)|"
    r"\bStepId=\S+ .*OOM Killed"
)
_SLURM_NODE = re.compile(r"^srun: error: (?P<node>[\w.-]+): tasks? ")
_BY_KUBERNETES = re.compile(r"\bOOMKilled\b")
_VICTIM = re.compile(r"\bpid[=:]? ?(?P<pid>\d{1,10})", re.I)


def oom_killer(line: Line) -> Mapping[str, object] | None:
    """A process was killed because host memory ran out: by (kernel, ray, slurm, kubernetes), victim, name, rss_gb (of
    the victim), used_gb and total_gb (of the node), limit (share of it)."""
    if found := _BY_KERNEL.search(line.text):
        victim, name = found["victim"] or found["victim2"], found["name"] or found["name2"]
        data: dict[str, object] = {"by": "kernel", "victim": int(victim), "name": (name or "").strip()}
        if rss := _RSS.search(line.text):
            data["rss_gb"] = round(int(rss["kb"]) * 1024 / 1e9, 1)
        return data | {"owner": "host"}
    if found := _RAY_FIGURES.search(line.text):
        return _by_ray(found)
    if _BY_RAY.search(line.text) and not _ADVICE.search(line.text) and not _NOBODY.search(line.text):
        victim_of_ray = _VICTIM.search(line.text)
        return {"by": "ray"} | ({"victim": int(victim_of_ray["pid"])} if victim_of_ray else {})
    if _BY_SLURM.search(line.text):
        node = _SLURM_NODE.match(line.text)
        return {"by": "slurm", "owner": "host"} | ({"node": node["node"]} if node else {})
    return {"by": "kubernetes", "owner": "host"} if _BY_KUBERNETES.search(line.text) else None


def _by_ray(found: re.Match[str]) -> Mapping[str, object]:
    data: dict[str, object] = {"by": "ray", "owner": "ray", "node": found["node"]}
    data |= {"used_gb": number(found["used"]), "total_gb": number(found["total"]), "limit": number(found["limit"])}
    if name := _TASK_NAME.search(found["task"]):
        data["name"] = name["name"]
    if pid := _TASK_PID.search(found["task"]):
        data["victim"] = int(pid["pid"])
    if held := _TASK_GB.search(found["task"]):
        data["rss_gb"] = number(held["gb"])
    return data


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser(
        "ended",
        (
            ": error: ",
            "command not found",
            ": not found",
            "No such file or directory",
            "Permission denied",
            "unbound variable",
            "syntax error",
            "bad substitution",
            "Killed",
            "Aborted",
            "Bus error",
            "Illegal instruction",
            "Segmentation fault",
            "CANCELLED AT",
        ),
        ended,
    ),
    Recogniser(
        "oom_killer", ("Kill", "kill", "OOM", "Out Of Memory", "Out of memory", "Memory on the node"), oom_killer
    ),
)
