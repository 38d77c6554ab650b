"""What one member answers to the others while it trains: one JSON object a line, over TCP.

    {"ask": "alive"}                          → {"id": …}
    {"ask": "leave", "view": 3}               → {"id": …}; this member's group of view 3 is aborted
    {"ask": "next", "view": 3, "member": …}   → view 4, once it is decided; the connection stays open until then

"next" comes from a member that has left view 3, or from a new one that wants to join. A connection that is refused is
proof that a process has ended, which a timeout is not. As with the process group itself, a process that reaches the
port of a pod is trusted: the job's network policy admits its own pods.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddp_trainer.live.views import Member, View

ANSWER_SECONDS: Final = 0.5
MOST_BYTES: Final = 16 << 20
"""Of one line: a view of 100,000 members."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A member that waits for the view after `view`. `is_new`: it was not in it."""

    member: Member
    view: int
    is_new: bool
    connection: socket.socket
    silent: frozenset[str] = frozenset()
    """Ids of members that it has found silent for too long."""

    def answer(self, view: View) -> None:
        """Say what was decided; a member that is gone meanwhile is found out by its group."""
        with contextlib.suppress(OSError), self.connection:
            send(self.connection, view.to_json())

    def dismiss(self) -> None:
        """It has to ask again."""
        self.connection.close()


class Listener:
    """Answers on threads of its own. `leave` is called with the number of the view to leave, on such a thread."""

    def __init__(self, host: str, own: str, leave: Callable[[int], None]) -> None:
        self._own, self._leave = own, leave
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="live listener", daemon=True).start()

    def arrivals(self, view: int) -> dict[str, Arrival]:
        """Those that wait for the view after `view`, by id."""
        with self._lock:
            return {one: arrival for one, arrival in self._arrivals.items() if arrival.view == view}

    def take_arrivals(self) -> list[Arrival]:
        """All, once: they are to be answered or dismissed."""
        with self._lock:
            arrivals, self._arrivals = list(self._arrivals.values()), {}
        return arrivals

    def has_newcomer(self, view: int) -> bool:
        """Whether a new member waits for the view after `view`. One that asked for an earlier one has gone on since."""
        with self._lock:
            return any(arrival.is_new and arrival.view >= view for arrival in self._arrivals.values())

    def close(self) -> None:
        self._socket.close()
        for arrival in self.take_arrivals():
            arrival.dismiss()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), name="live answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(10 * ANSWER_SECONDS)
            question = receive(connection)
            if question["ask"] == "next":
                member = Member(**question["member"])
                arrival = Arrival(
                    member, question["view"], bool(question["isNew"]), connection, frozenset(question["silent"])
                )
                with self._lock:
                    self._arrivals[member.id] = arrival
                if not arrival.is_new:
                    self._leave(arrival.view)
                return
            with connection:
                send(connection, {"id": self._own})
            if question["ask"] == "leave":
                self._leave(question["view"])
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()


def ask(address: tuple[str, int], question: Mapping[str, Any], *, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The answer of the member that listens at `address`. Raises TimeoutError where none comes in time, and another
    OSError where there is no such process any more.
    """
    with socket.create_connection(address, timeout=seconds) as connection:
        send(connection, question)
        return receive(connection)


def send(connection: socket.socket, value: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next object. Raises OSError, ConnectionResetError at the end of the connection."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        if not data or len(line) > MOST_BYTES:
            raise ConnectionResetError("the connection was closed before an answer came")
        line += data
    value: dict[str, Any] = json.loads(line)
    return value


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
