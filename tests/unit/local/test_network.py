"""Free ports, and answers of a launcher that may be anything."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.local.network import fetch_status, free_port


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """A server on a port of its own that gives the same answer to every question."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ports_differ_and_can_be_listened_on() -> None:
    taken: set[int] = set()
    ports = [free_port(taken) for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port(set())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        monkeypatch.setattr("random.sample", lambda ports, count: [first, first + 1])
        assert free_port(set()) != first


def test_an_answer_of_version_1_is_taken() -> None:
    with answering(200, b'{"version": 1, "step": 7}') as port:
        assert fetch_status(port, PATIENCE_SECONDS) == TrainerReport(step=7)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b'{"version": 2}'),
        (200, b"[1]"),
        (200, b'{"version": 1'),
        (200, b"\xff\xfe"),
        (500, b'{"version": 1}'),
    ],
)
def test_any_other_answer_is_none(status: int, body: bytes) -> None:
    with answering(status, body) as port:
        assert fetch_status(port, PATIENCE_SECONDS) is None


def test_nobody_listening_is_none() -> None:
    assert fetch_status(free_port(set())) is None


def test_a_launcher_that_hangs_is_given_up_on() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert fetch_status(silent.getsockname()[1], timeout=0.1) is None


def test_programs_that_seed_python_alike_take_other_ports():
    def taken() -> set[int]:
        random.seed(7)
        ports: set[int] = set()
        for _ in range(3):
            free_port(ports)
        return ports

    assert taken() != taken()
