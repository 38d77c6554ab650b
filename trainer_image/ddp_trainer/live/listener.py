"""What one member answers to the others while it trains (`questions` has the way they ask).

    {"to": …, "ask": "alive"}                                → {"id": …}
    {"to": …, "ask": "leave", "view": 3}                     → {"id": …}; this member's group of view 3 is aborted
    {"to": …, "ask": "next", "view": 3, "member": …, …}      → view 4, once it is decided; the connection stays open

"next" comes from a member that has left view 3, or from a new one that wants to join. A question for another process
is answered with the id of this one, and has no other effect. As with the process group itself, a process that reaches
the port of a pod is trusted: the job's network policy admits its own pods.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ddp_trainer.live.questions import receive, send
from ddp_trainer.live.views import Member

PATIENCE_SECONDS: Final = 5.0
"""With one that has connected, and sends or reads nothing."""
AGAIN_SECONDS: Final = 0.05
"""After a connection that could not be accepted: this process may have no file left for it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A member that waits for the view after `view`. `is_new`: it was not in it."""

    member: Member
    view: int
    is_new: bool
    connection: socket.socket
    """Does not block."""
    silent: frozenset[str] = frozenset()
    """Ids of members that it has found silent for too long."""

    @property
    def waits(self) -> bool:
        """Whether it still does: its end of the connection is open."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def answer(self, line: bytes) -> None:
        """Say what was decided: a view, as it is sent. A member that is gone meanwhile is found out by its group."""
        with contextlib.suppress(OSError), self.connection:
            self.connection.settimeout(PATIENCE_SECONDS)
            self.connection.sendall(line)

    def dismiss(self) -> None:
        """It has to ask again."""
        self.connection.close()


class Listener:
    """Answers on threads of its own. `leave` is called with the number of the view to leave, on such a thread."""

    def __init__(self, host: str, own: str, leave: Callable[[int], None]) -> None:
        self._own, self._leave = own, leave
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._is_closed = threading.Event()
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="live listener", daemon=True).start()

    def arrivals(self, view: int) -> dict[str, Arrival]:
        """Those that wait for the view after `view`, by id."""
        with self._lock:
            for one, arrival in list(self._arrivals.items()):
                if not arrival.waits:
                    self._arrivals.pop(one).dismiss()
            return {one: arrival for one, arrival in self._arrivals.items() if arrival.view == view}

    def take_arrivals(self, before: float) -> list[Arrival]:
        """Those that wait for view `before` or an earlier one, once: they are to be answered or dismissed."""
        with self._lock:
            taken = [one for one, arrival in self._arrivals.items() if arrival.view < before]
            return [self._arrivals.pop(one) for one in taken]

    def newcomers(self, view: int) -> list[Member]:
        """New members that wait for the view after `view`. One that asked for an earlier one has gone on since."""
        with self._lock:
            arrivals = self._arrivals.values()
            return [each.member for each in arrivals if each.is_new and each.view >= view and each.waits]

    def close(self) -> None:
        """From now on connections are refused."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which would take one more
        self._socket.close()
        for arrival in self.take_arrivals(math.inf):
            arrival.dismiss()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # of one connection that was given up meanwhile, say
                self._is_closed.wait(AGAIN_SECONDS)
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), name="live answer", daemon=True).start()
            except RuntimeError:  # no thread can be started now
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(PATIENCE_SECONDS)
            question = receive(connection)
            if question["to"] == self._own and question["ask"] == "next":
                connection.setblocking(False)
                arrival = Arrival(
                    Member(**question["member"]),
                    question["view"],
                    bool(question["isNew"]),
                    connection,
                    frozenset(question["silent"]),
                )
                self._arrived(arrival)
                return
            with connection:
                send(connection, {"id": self._own})
            if question["to"] == self._own and question["ask"] == "leave":
                self._leave(question["view"])
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()

    def _arrived(self, arrival: Arrival) -> None:
        with self._lock:
            if self._is_closed.is_set():
                arrival.dismiss()
                return
            earlier = self._arrivals.get(arrival.member.id)
            self._arrivals[arrival.member.id] = arrival
        if earlier is not None:
            earlier.dismiss()
        if not arrival.is_new:
            self._leave(arrival.view)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
