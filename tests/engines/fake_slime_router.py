"""A stand-in for the router of a slime run: its list of workers over real HTTP, as `sglang_router` answers it.

GET /workers, POST /workers (a URL twice is refused), DELETE /workers/ID (202, the list changes behind the answer), and
POST /generate passed on to the workers in turn; without one it answers 503.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeSlimeRouter:
    """The list, and what was asked."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        """Id -> entry."""
        self.asked: list[str] = []
        """Changes of the list, in order: `POST URL`, `DELETE URL`."""
        self.lock = threading.Lock()
        self.broken = False
        """Answers 500 to everything."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._count = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def urls(self) -> list[str]:
        with self.lock:
            return sorted(entry["url"] for entry in self.workers.values())

    def add(self, entry: dict[str, Any]) -> bool:
        with self.lock:
            if any(one["url"] == entry["url"] for one in self.workers.values()):
                return False
            self._count += 1
            self.workers[f"w{self._count}"] = {**entry, "id": f"w{self._count}", "is_healthy": True, "load": 0}
            self.asked.append(f"POST {entry['url']}")
            return True

    def remove(self, worker: str) -> bool:
        with self.lock:
            found = self.workers.pop(worker, None)
            if found is not None:
                self.asked.append(f"DELETE {found['url']}")
            return found is not None


def _handler(router: FakeSlimeRouter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Say nothing."""

        def _answer(self, code: int, told: Any) -> None:
            body = json.dumps(told).encode()
            self.send_response(500 if router.broken else code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            with router.lock:
                workers = list(router.workers.values())
            self._answer(200, {"workers": workers, "total": len(workers)})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/workers":
                added = not router.broken and router.add(json.loads(body))
                return self._answer(202 if added else 409, {"status": "accepted" if added else "exists"})
            return self._pass_on(body)

        def _pass_on(self, body: bytes) -> None:
            urls = router.urls()
            if not urls:
                return self._answer(503, {"error": "no workers"})
            request = urllib.request.Request(urls[0] + self.path, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return self._answer(answer.status, json.load(answer))
            except urllib.error.HTTPError as error:
                with error:
                    return self._answer(error.code, {"error": str(error)})
            except OSError as error:
                return self._answer(502, {"error": str(error)})

        def do_DELETE(self) -> None:
            gone = not router.broken and router.remove(self.path.rpartition("/")[2])
            self._answer(202 if gone else 404, {"status": "accepted" if gone else "not found"})

    return Handler


@contextmanager
def fake_slime_router() -> Iterator[FakeSlimeRouter]:
    """One that listens on a port of its own until the block is left."""
    router = FakeSlimeRouter()
    thread = threading.Thread(target=lambda: router.server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield router
    finally:
        router.server.shutdown()
        router.server.server_close()
        thread.join()
