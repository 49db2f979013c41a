"""What leaves the machine in a bug report: text without keys, tokens, hosts, addresses, users and paths.

Names that are known (of this machine, of the run's hosts, of its users) are taken out wherever they stand; of all
else the shape decides: an address, an absolute path, the host of a URL. Of a path the last part stays (the model, the
file), of a Python file what stands below `site-packages`, because a traceback without it tells nothing.

Failure policy: in doubt something harmless is taken out too. What has no shape (a secret typed as a prompt) stays:
whoever sends a report reads it first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rltop.runs.masks import is_secret, mask_command, mask_environment

HOST, ADDRESS, USER, PATH, SECRET = "HOST", "ADDRESS", "USER", "PATH", "***"
_KEPT_HOSTS = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"})
_PUBLIC = frozenset({"docs.nvidia.com", "github.com", "pytorch.org", "docs.pytorch.org", "huggingface.co"})
_EVERYDAY = frozenset(
    {"root", "user", "admin", "ubuntu", "ray", "run", "the", "vm", "box", "node", "gpu", "test", "data"}
)
"""Names that are words as well: only taken out of paths and addresses, for they stand everywhere else too."""
_ASSIGNED = re.compile(
    r"(?<![#\w])(?P<name>#?[A-Za-z][\w.-]*)(?P<sep>[\"']?\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"',;&)}\]]+)"
)
"""`#token: 12` and `#new-token: 12` of a log are counts."""
_FLAG = re.compile(r"(?P<name>--[\w-]+)(?P<sep>\s+)(?P<value>[^\s-][^\s\"',]*)")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_LONG_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{8,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?:[^/\s@]*@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^/\s:?#\"'<>),\]]+)")
_AT = re.compile(r"[\w.+-]+@[\w-][\w.-]*")
_V4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_V6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4}(?:%\w+)?(?![\w:])|(?<![\w:])fe80:[0-9A-Fa-f:]+"
)
_INSIDE = re.compile(
    r"\b[\w-]+(?:\.[\w-]+)*\.(?:internal|local|lan|corp|cluster|intra|intranet|svc|compute|amazonaws)\b[\w.]*"
)
_PATH = re.compile(
    r"(?<![\w.:/<])(?:~|/)(?:[^\s\"'`,;:()<>|=\[\]{}]*/)+[^\s\"'`,;:()<>|=\[\]{}]*|(?<![\w.:/<])~?/[\w.+-]{2,}"
)
_PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|python|lib/python3\.\d+)/(?=[A-Za-z_])")
_ROUTE = re.compile(r"/[a-z_]{2,40}")
_METHODS = ("GET ", "HEAD ", "POST ", "PUT ", "DELETE ")
_HARMLESS = ("/dev/", "/proc/", "/generate", "/health", "/flush_cache", "/server_info", "/metrics", "/v1/")
_HOST_FLAG = re.compile(r"--?(?:[\w-]*-)?(?:host|addr|address|ip|endpoint|url|master)$")
_NO_NEWS = frozenset({"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HOSTNAME", "VIRTUAL_ENV", "TMPDIR"})
"""Technical variables that only tell how a machine is laid out."""


@dataclass(frozen=True, slots=True)
class Scrub:
    """hosts, users: known names, wherever they stand."""

    hosts: Collection[str] = ()
    users: Collection[str] = ()

    def text(self, line: str) -> str:
        """One line of a log, of a message or of a page."""
        line = _BEARER.sub(lambda match: f"{match[1]} {SECRET}", line)
        line = _LONG_SECRET.sub(SECRET, line)
        line = _FLAG.sub(_assigned, _ASSIGNED.sub(_assigned, line))
        line = _URL.sub(_url, line)
        line = _AT.sub(f"{USER}@{HOST}", line)
        line = _PATH.sub(_path, line)
        line = _V4.sub(lambda match: match[0] if match[0] in _KEPT_HOSTS else ADDRESS, line)
        line = _V6.sub(ADDRESS, line)
        line = _INSIDE.sub(HOST, line)
        for names, word in ((self.hosts, HOST), (self.users, USER)):
            for name in sorted(set(names), key=len, reverse=True):
                if len(name) > 2 and name.lower() not in _EVERYDAY and name not in _KEPT_HOSTS:
                    line = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, line)
        return line

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command line: what belongs to a flag for keys is `***`, to one for hosts `HOST`."""
        found: list[str] = []
        flag = ""
        for word in mask_command(argv, None):
            name, equals, value = word.partition("=")
            if word.startswith("-") and equals:
                hidden = _HOST_FLAG.fullmatch(name) is not None
                found.append(f"{name}={self._host(value) if hidden else self.text(value)}")
            elif not word.startswith("-") and _HOST_FLAG.fullmatch(flag):
                found.append(self._host(word))
            else:
                found.append(self.text(word))
            flag = word if word.startswith("-") and not equals else ""
        return found

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Technical variables with their values; any other is left out, and so is how the machine is laid out."""
        kept = mask_environment(env, None)
        return {
            name: self.text(str(one["value"])) for name, one in kept.items() if "value" in one and name not in _NO_NEWS
        }

    def _host(self, value: str) -> str:
        """`10.0.0.3:5000` as `HOST:5000`; this machine's own loopback stays."""
        host, colon, port = value.rpartition(":") if re.fullmatch(r".+:\d+", value) else (value, "", "")
        bare = host.partition("://")[2] or host
        return value if bare.strip("[]") in _KEPT_HOSTS else f"{HOST}{colon}{port}"


def _assigned(match: re.Match[str]) -> str:
    """`HF_TOKEN=abc`, `api_key='abc'` and `--api-key abc` without what they hold."""
    name, sep, value = match["name"], match["sep"], match["value"]
    if name.startswith("#") or value in ("None", "null", "True", "False") or not is_secret(name):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{sep}{quote}{SECRET}{quote}"


def _url(match: re.Match[str]) -> str:
    host = match["host"]
    return match["scheme"] + (host if host.strip("[]") in _KEPT_HOSTS or host in _PUBLIC else HOST)


def _path(match: re.Match[str]) -> str:
    path = match[0]
    if path.startswith(_HARMLESS) or path == "/":
        return path
    if _ROUTE.fullmatch(path) and match.string[: match.start()].endswith(_METHODS):
        return path
    below = _PACKAGES.sub("", path)
    if below != path:
        return below
    last = path.rstrip("/").rpartition("/")[2]
    return f"{PATH}/{last}" if last else PATH
