"""What an answer, or none, says of the member that was asked; and that a listener survives what one connection does."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddp_trainer.live import questions, watch
from ddp_trainer.live.listener import Listener
from ddp_trainer.live.questions import Heard, Inquiry, ask, receive, send
from ddp_trainer.live.views import SILENT_SECONDS, Member

ALIVE = {"ask": "alive"}


class Answering:
    """A listener, and what it was told to leave."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.listener = Listener("127.0.0.1", "own", self.left.append)
        self.member = Member("own", 0, 0, "127.0.0.1", self.listener.port)


@pytest.fixture
def answering() -> Iterator[Answering]:
    answering = Answering()
    yield answering
    answering.listener.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes is waited for: on a busy machine, threads of this process may give none in half a second."""
    monkeypatch.setattr(questions, "ANSWER_SECONDS", PATIENCE_SECONDS)


answered = pytest.mark.usefixtures("patient")


@contextmanager
def program(answer: bytes | None) -> Iterator[Member]:
    """Another program that has the member's port by now, or one that stands still (None)."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            if answer is None:
                ended.wait(PATIENCE_SECONDS)
                return
            connection.recv(1 << 16)
            connection.sendall(answer)

    ended = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    yield Member("own", 0, 0, "127.0.0.1", listening.getsockname()[1])
    ended.set()
    thread.join()
    listening.close()


@answered
def test_a_member_that_answers(answering: Answering) -> None:
    assert ask(answering.member, ALIVE) is Heard.ANSWER


def test_a_port_that_is_closed_is_that_of_a_process_that_has_ended() -> None:
    assert ask(Member("own", 0, 0, "127.0.0.1", free_port()), ALIVE) is Heard.ENDED


@answered
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"\xff\n", b"[]\n", b'{"id": "other"}\n'])
def test_a_port_that_another_program_has_is_that_of_a_process_that_has_ended(answer: bytes) -> None:
    with program(answer) as member:
        assert ask(member, ALIVE) is Heard.ENDED


@pytest.mark.parametrize("answer", [None, b"", b'{"id'])
def test_no_answer_does_not_say_that_a_process_has_ended(answer: bytes | None) -> None:
    with program(answer) as member:
        assert ask(member, ALIVE) is Heard.NOTHING


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET])
def test_a_network_that_fails_does_not_say_that_a_process_has_ended(
    answering: Answering, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: Any, **__: Any) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", fails)
    assert ask(answering.member, ALIVE) is Heard.NOTHING


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open no other file, though threads of earlier tests may close some meanwhile: below the limit
    are the standard streams alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_asker_without_files_does_not_take_others_for_ended(answering: Answering) -> None:
    with no_more_files():
        assert ask(answering.member, ALIVE) is Heard.NOTHING


def test_a_listener_without_files_answers_once_it_has_some(answering: Answering) -> None:
    with socket.socket() as earlier, socket.socket() as connection:
        with no_more_files():
            earlier.connect(answering.member.address)  # for which the kernel has a file already
            connection.connect(answering.member.address)
            send(connection, {**ALIVE, "to": "own"})
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                receive(connection)
        connection.settimeout(PATIENCE_SECONDS)
        assert receive(connection) == {"id": "own"}


def test_a_listener_without_threads_answers_once_it_has_some(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "live answer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        assert ask(answering.member, ALIVE) is Heard.NOTHING
    monkeypatch.setattr(questions, "ANSWER_SECONDS", PATIENCE_SECONDS)
    assert ask(answering.member, ALIVE) is Heard.ANSWER


def test_a_listener_that_is_closed_refuses_the_next_connection(answering: Answering) -> None:
    answering.listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(answering.member.address)


@answered
def test_a_question_for_another_process_has_no_effect(answering: Answering) -> None:
    earlier = replace(answering.member, id="earlier")
    assert ask(earlier, {"ask": "leave", "view": 3}) is Heard.ENDED
    question = {"to": "earlier", "ask": "next", "view": 3, "member": asdict(earlier), "isNew": True, "silent": []}
    with socket.create_connection(earlier.address) as connection:
        send(connection, question)
        assert receive(connection) == {"id": "own"}
    assert (answering.left, answering.listener.newcomers(3)) == ([], [])
    assert ask(answering.member, {"ask": "leave", "view": 3}) is Heard.ANSWER
    eventually(lambda: answering.left == [3], "the member itself leaves")


def test_a_member_that_another_has_found_silent_is_so_once_it_does_not_answer_here(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_SECONDS", PATIENCE_SECONDS)
    with program(None) as silent, Inquiry(ALIVE) as inquiry:
        silent = replace(silent, id="silent")
        inquiry.ask([answering.member])
        eventually(lambda: inquiry.have_answered([answering.member]), "the other one answers")
        monkeypatch.setattr(questions, "ANSWER_SECONDS", 0.1)
        inquiry.ask([silent])
        eventually(lambda: inquiry.answers().silent, "a question has no answer")
        answers = inquiry.answers(found_silent={"silent", "own"})
        assert answers.silent["silent"] >= SILENT_SECONDS
        assert "own" not in answers.silent


def test_the_silence_of_one_member_is_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(watch, "ask", lambda *_: Heard.NOTHING)
    watched = [(0, Member("a", 1, 0, "", 1)), (1, Member("b", 1, 0, "", 1))]
    lost: dict[str, float] = {}
    over = threading.Event()

    def found(number: int, silent: set[str]) -> None:
        lost.setdefault(*silent, time.monotonic())
        if number:
            over.set()

    watch.watch(lambda: watched[min(len(lost), 1)], lambda: False, found, over)
    assert lost["b"] - lost["a"] >= 0.5


def test_a_member_that_comes_and_leaves_again_is_silent_only_since_then() -> None:
    inquiry = Inquiry(ALIVE)
    inquiry._silent_since["own"] = time.monotonic() - 100.0
    assert inquiry.answers().silent["own"] >= 100.0
    inquiry.answers({"own"})
    assert "own" not in inquiry.answers().silent
