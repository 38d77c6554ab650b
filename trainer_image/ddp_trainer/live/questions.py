"""What one member asks another, and what the answer says of it, or that none comes.

A question is one JSON object in a line, over TCP, and so is its answer (`listener` has them all). It names the member
that it is for: an address and a port may belong to another process by now, which then says who it is.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Any, Final

from ddp_trainer.live.views import SILENT_SECONDS, Answers, Member

ANSWER_SECONDS: Final = 0.5
AGAIN_SECONDS: Final = 0.1
"""From an answer of a member that has not come yet to the next question."""
MOST_AT_ONCE: Final = 32
"""Members that one member asks at the same time: some may leave it without an answer."""
MOST_BYTES: Final = 16 << 20
"""Of one line: a view of 100,000 members."""


class Heard(Enum):
    """What a question says of the member that it is for."""

    ANSWER = auto()
    ENDED = auto()
    """Its process has ended: its host refuses the connection, or another program has the port."""
    NOTHING = auto()
    """It, its node or the network may stand still, or this process has no file left for a connection."""


def ask(member: Member, question: Mapping[str, Any]) -> Heard:
    """Ask a member once."""
    try:
        with socket.create_connection(member.address, timeout=ANSWER_SECONDS) as connection:
            send(connection, {**question, "to": member.id})
            answer = receive(connection)
    except (ConnectionRefusedError, ValueError):
        return Heard.ENDED
    except OSError:
        return Heard.NOTHING
    return Heard.ANSWER if answer.get("id") == member.id else Heard.ENDED


def line_of(value: Mapping[str, Any]) -> bytes:
    """An object as it is sent."""
    return json.dumps(value).encode() + b"\n"


def send(connection: socket.socket, value: Mapping[str, Any]) -> None:
    connection.sendall(line_of(value))


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next object. Raises OSError, ConnectionResetError at the end of the connection, and ValueError for what is
    none.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        if not data or len(line) > MOST_BYTES:
            raise ConnectionResetError("the connection was closed before an answer came")
        line += data
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("an answer is an object")
    return value


class Inquiry:
    """Asks members one question again and again, many at a time, and keeps what that says of them."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self._question = question
        self._gone: set[str] = set()
        self._answered: set[str] = set()
        self._silent_since: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """When to ask a member again."""
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, "live question")

    def __enter__(self) -> Inquiry:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, members: Iterable[Member]) -> None:
        """Ask those whose turn it is. Does not wait."""
        now = time.monotonic()
        for member in members:
            if member.id not in self._gone and self._due.get(member.id, now) <= now:
                self._due[member.id] = math.inf
                self._pool.submit(self._ask, member)

    def _ask(self, member: Member) -> None:
        heard = ask(member, self._question)
        if heard is Heard.ENDED:
            self._gone.add(member.id)
        elif heard is Heard.NOTHING:
            self._silent_since.setdefault(member.id, time.monotonic())
        else:
            self._silent_since.pop(member.id, None)
            self._answered.add(member.id)
        self._due[member.id] = time.monotonic() + AGAIN_SECONDS

    def have_answered(self, members: Iterable[Member]) -> bool:
        """Whether any of these has, ever."""
        return any(member.id in self._answered for member in members)

    def answers(self, arrived: Collection[str] = (), found_silent: Collection[str] = ()) -> Answers:
        """What is known by now. Members that others have `found_silent` are so as soon as one question here stays
        without an answer, too. That one has arrived is an answer: if it leaves again, its silence begins anew.
        """
        for one in arrived:
            self._silent_since.pop(one, None)
        now = time.monotonic()
        silent = {
            one: max(now - since, SILENT_SECONDS if one in found_silent else 0.0)
            for one, since in self._silent_since.copy().items()
        }
        return Answers(arrived, self._gone.copy(), silent)
