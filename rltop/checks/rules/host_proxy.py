"""`host.proxy`: a proxy answers for the engine.

`http_proxy` without the engines' addresses in `no_proxy` sends requests inside the cluster to the proxy. slime's wait
at the start swallows whatever it answers and never ends.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from rltop.checks.events import of_kind, whole, whole_text, word
from rltop.checks.found import Document, LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event, of_place
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ID = "host.proxy"
_SETTINGS = ("http_proxy", "https_proxy", "all_proxy")
_STATUSES = (403, 407, 500, 502, 503, 504)
_PROXIES = re.compile(
    r"squid|tinyproxy|privoxy|polipo|haproxy|zscaler|bluecoat|proxysg|mitmproxy|\bvarnish\b|trafficserver|\bproxy\b|"
    r"mwg|forcepoint|charles|cntlm|envoy|nginx|cloudflare|3proxy|goproxy",
    re.I,
)


_CLIENT_SAYS = re.compile(r"ProxyError\b|(?:unable to|cannot) connect to proxy|tunnel connection failed", re.I)
"""The client itself says that it went through a proxy."""
_ENGINE_URL = re.compile(
    r"(?P<url>https?://[\w.:\[\]-]+)/(?:health|health_generate|get_model_info|model_info|generate|server_info|"
    r"get_server_info|get_weight_version|update_weights\w*|flush_cache|workers|v1/)\b"
)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: a proxy that answers, a proxy that is set, or none."""
    settings, document = _environment(obs)
    proxies = {name: value for name, value in settings.items() if name in _SETTINGS and value}
    answers = _answers(obs, settings)
    if document is None and not answers:
        return [Verdict(ID, "skip", cause=missing(obs, "the environment (env.txt), or answers with a proxy's header"))]
    places = _places(document, (*proxies, "no_proxy"))
    if answers and (proxies or (document is None and any(by_header for _, by_header, _ in answers))):
        return [_fail(answers, proxies, places)]
    if proxies:
        shown = ", ".join(f"{name}={_masked(value)}" for name, value in proxies.items())
        cause = f"A proxy is set ({shown}); no request to an engine is known to have gone through it."
        value = {"no_proxy": settings.get("no_proxy", "")}
        advice = ("add the addresses of all nodes to no_proxy and NO_PROXY of all Ray actors",)
        return [Verdict(ID, "info", value=value, evidence=places, cause=cause, advice=advice)]
    return [Verdict(ID, "pass", cause="No proxy is set for HTTP requests inside the cluster.", evidence=places)]


def _environment(obs: Observations) -> tuple[dict[str, str], Document | None]:
    found: dict[str, str] = {}
    source: Document | None = None
    for document in obs.documents:
        if document.kind == "env":
            source = source or document
            for name, value in document.fields.items():
                if name.lower() in (*_SETTINGS, "no_proxy"):
                    found[name.lower()] = ",".join(filter(None, (found.get(name.lower(), ""), str(value).strip())))
    return found, source


def _places(document: Document | None, names: Iterable[str]) -> tuple[Evidence, ...]:
    if document is None:
        return ()
    wanted = set(names)
    given = [name for name in document.fields if name.lower() in wanted]
    return tuple(of_place(document.at(name, f"{name}={_masked(str(document.fields[name]))}")) for name in given)


def _masked(value: str) -> str:
    """A proxy's address without its password."""
    return re.sub(r"//[^/@\s]*@", "//***@", value)


Answer = tuple[str, bool, Evidence]
"""Address, whether a proxy's header gives it away, where it stands."""


def _answers(obs: Observations, settings: Mapping[str, str]) -> list[Answer]:
    """Bad answers to requests for an engine that is up, and good or bad ones that carry a proxy's header."""
    ready = [event for event in of_kind(obs, "engine_stage") if word(event, "stage") == "ready"]
    good = {_host(call.url) for call in obs.http if call.status == 200 and not _PROXIES.search(call.server)}
    found: list[Answer] = []
    for call in obs.http:
        host = _host(call.url)
        by_header = bool(_PROXIES.search(call.server)) or "via" in {str(name).lower() for name in call.extra}
        if host and bypassed(host, settings.get("no_proxy", "")):
            continue
        up = bool(ready) or host in good or any(_host(other.url) in ("127.0.0.1", "localhost") for other in obs.http)
        bad = call.status in _STATUSES
        if call.where is None or not ((by_header and (bad or call.status != 200)) or (bad and up)):
            continue
        text = f"{call.path} answered {call.status}" + (f" by {call.server}" if call.server else "")
        found.append((host, by_header, of_place(call.where, call.where.text or text)))
    found += _told_by_client(obs, settings, ready)
    for event in of_kind(obs, "retry"):
        host, status = _host(word(event, "url")), whole(event, "status")
        if status not in _STATUSES or event.data.get("no_workers") or bypassed(host, settings.get("no_proxy", "")):
            continue
        forbidden = status in (403, 407)
        if ready and (forbidden or _PROXIES.search(event.text)) and any(r.order < event.order for r in ready):
            found.append((host, bool(_PROXIES.search(event.text)), of_event(event)))
    return found


def _told_by_client(obs: Observations, settings: Mapping[str, str], ready: Sequence[LogEvent]) -> list[Answer]:
    """Requests to an engine that is up of which the client says that a proxy stood between."""
    found: list[Answer] = []
    for event in of_kind(obs, "retry", "traceback") if ready else ():
        host = _beyond(text) if _CLIENT_SAYS.search(text := whole_text(event)) else ""
        if host and not bypassed(host, settings.get("no_proxy", "")):
            found.append((host, True, of_event(event)))
    return found


def _beyond(text: str) -> str:
    """The engine's address that a client wanted to reach through a proxy; empty where it is no engine's."""
    found = _ENGINE_URL.search(text)
    return _host(found["url"]) if found else ""


def _host(url: str) -> str:
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def bypassed(host: str, no_proxy: str) -> bool:
    """`no_proxy` covers the host: `*`, the name, a domain it ends in, or a network that it is in."""
    for entry in (part.strip().lower().lstrip(".") for part in no_proxy.split(",")):
        if not entry:
            continue
        if entry == "*" or host == entry.partition(":")[0] or host == entry or host.endswith(f".{entry}"):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue
    return False


def _fail(answers: list[Answer], proxies: Mapping[str, str], places: tuple[Evidence, ...]) -> Verdict:
    header = any(by_header for _, by_header, _ in answers)
    hosts = sorted({host for host, _, _ in answers if host})
    address = ", ".join(hosts) or "the engine's address"
    through = ", ".join(f"{name}={_masked(value)}" for name, value in proxies.items()) or "a proxy"
    cause = (
        f"Requests to {address} are answered by a proxy instead of the engine, which is up: {through} is set and "
        f"no_proxy does not hold {address}; the wait at the start swallows such answers and never ends."
    )
    confidence: Confidence = "high" if header else "medium"
    return Verdict(
        ID,
        "fail",
        value={"hosts": hosts, "answers": len(answers)},
        threshold="no_proxy holds every node",
        evidence=tuple(place for _, _, place in answers[:3]) + places,
        cause=cause,
        advice=(
            f"no_proxy={','.join(hosts) or '<node addresses>'} (NO_PROXY too) in the environment of all Ray actors",
            "SLIME_HOST_IP: its address belongs into no_proxy too",
        ),
        confidence=confidence,
    )
