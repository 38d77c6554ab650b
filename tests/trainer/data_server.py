"""A web server to fetch data from, and what a fetch may leave behind."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

BODY = b"0123456789" * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Web:
    """A web server that counts what it is asked for; `answer` may be replaced."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], None] = whole
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                web.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/digits.bin"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def whole(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(BODY)))
    request.end_headers()
    request.wfile.write(BODY)


def cut_short(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(2 * len(BODY)))
    request.end_headers()
    request.wfile.write(BODY)


def refusing(code: int) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    return lambda request: request.send_error(code)


def left_over(shared: Path) -> list[str]:
    """Temporary names that are still on the volume."""
    return [str(path) for path in shared.rglob(".*") if path.name.endswith((".part", ".old", ".gone"))]
