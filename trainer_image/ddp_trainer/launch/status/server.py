"""The launcher's HTTP: /healthz, /status and /metrics, read-only, for the operator and for Prometheus."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE_SECONDS = 10
"""Timeout of a connection on which nothing is read or written."""


MOST_CONNECTIONS = 32
"""Each has a thread. What comes beyond is closed at once: the pod has its ranks to feed."""


class StatusServer(ThreadingHTTPServer):
    """Serves on all addresses of `port` (0: a free one), IPv6 too where there is any."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self, port: int, status: Callable[[], dict[str, Any]], metrics: Callable[[str], tuple[bytes, str]]
    ) -> None:
        self.status = status
        self.metrics = metrics
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        # the scraper is another pod, with an address of either kind
        self.address_family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
        super().__init__(("::" if self.address_family == socket.AF_INET6 else "0.0.0.0", port), _Handler)  # noqa: S104

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # such as RuntimeError where no thread can be started now
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # IPv4 too, whatever net.ipv6.bindv6only says
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer would ask a name server who "::" is, and wait for it where there is none
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]


def _has_ipv6() -> bool:
    """Whether this pod can listen on IPv6: kernels without it, and those where it is disabled, refuse one or both."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    server_version = "ddpjob"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = PAGE_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path == "/status":
            body = json.dumps(self.server.status(), allow_nan=False).encode()
            self._answer(200, "application/json", body)
        elif path == "/metrics":
            body, content_type = self.server.metrics(self.headers.get("Accept", ""))
            self._answer(200, content_type, body)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found; try /status, /metrics or /healthz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes every few seconds do not belong in a training log."""


def write_port(run_dir: Path, port: int) -> None:
    """Leave the port that was chosen in `$DDPJOB_RUN_DIR/port`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "port").write_text(f"{port}\n")
