"""What follows a view: how one member comes to the next one that it is in.

Each member asks the first one that is not lost, the coordinator, for the next view, and waits. Whether an earlier one
is back, it asks all the time: that one may have stood still, or a question to it may have been lost. So two that
both coordinate, because one did not hear the other, do so only until it does.

The coordinator asks those that are missing to leave the view, and proposes the members that came (`register`). What it
answers is what was decided, its proposal or another's.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, NoReturn

from torch._C._distributed_c10d import TCPStore

from ddp_trainer.contract.exit_codes import LiveRecoveryFailed, StoppedTooFew
from ddp_trainer.live.listener import Arrival, Listener
from ddp_trainer.live.questions import ANSWER_SECONDS, Inquiry, line_of, receive, send
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import (
    REPLACEMENT_SECONDS,
    Answers,
    Member,
    Verdict,
    View,
    coordinator,
    is_known,
    judged,
    lost,
    mates,
    successors,
    whole_pods,
)

LOOK_SECONDS: Final = 0.005
"""How often the coordinator looks whether a member has come."""
WAIT_SECONDS: Final = 0.02
"""How often one that waits looks whether it waits for the right one. An answer wakes it."""
VOLUME_SECONDS: Final = 0.5
"""How often a member looks on the volume whether another one has decided: an answer may be lost."""
ALONE_SECONDS: Final = 10.0
"""How long a new process looks for a member of the newest view that answers, until it takes those for lost whose places
have been given away, or that have ended.
"""
UNREACHED_SECONDS: Final = 120.0
"""How long it looks where some may go on: meanwhile its network may begin to work, or new pods take their places."""
FORM_SECONDS: Final = 10.0
"""How long the members of a view may take to form its group."""
JOIN_TIMEOUT_SECONDS: Final = 600.0
"""How long the ranks of the first view wait for each other."""
BEGIN_LOOK_SECONDS: Final = 0.1
LONGEST_BEGIN_LOOK_SECONDS: Final = 1.0
"""How often each rank looks for the first view: less often where many do, as each look changes one folder of the volume
(`Register.newest`), but often enough to form the group in time.
"""
BEGIN_LOOKS_A_SECOND: Final = 1000.0
"""Of all ranks together, as far as `LONGEST_BEGIN_LOOK_SECONDS` allows."""


class Excluded(Exception):
    """The others went on without this member. Not a FencedError, which ends the job: only this process has to end."""


class Finished(Exception):
    """The others have come to the end without this process, which replaces one that was lost, or was cut off."""


class Unreached(Exception):
    """This process is new, and reaches no rank that has the state. They may go on without it, so only this process has
    to end, and its pod is replaced: no LiveRecoveryFailed, which ends the attempt.
    """


def begin_look_seconds(members: int) -> float:
    """How long one of so many ranks waits between two looks for the first view."""
    return min(max(BEGIN_LOOK_SECONDS, members / BEGIN_LOOKS_A_SECOND), LONGEST_BEGIN_LOOK_SECONDS)


class Deciding:
    """Of one member. All methods raise OSError where the volume cannot be used, LiveRecoveryFailed where this member is
    the first to find that the ranks cannot go on, and RuntimeError where another was.
    """

    def __init__(
        self,
        own: Member,
        listener: Listener,
        register: Register,
        least: int,
        procs: int,
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        """`least`: how few ranks may go on; `procs`: how many ranks each pod has."""
        self._own, self._listener, self._register, self._least, self._procs = own, listener, register, least, procs
        self._is_asked_to_stop = is_asked_to_stop
        self.store: TCPStore | None = None
        """That of the last view that this member has proposed."""

    def first(self, members: int) -> View:
        """The first view, of all, or the newest. Raises RuntimeError where ranks did not come."""
        self._register.enter(self._own)
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while (newest := self.newest()) is None:
            is_late = time.monotonic() > deadline
            # if each rank read what all have written, a gang of 1,024 would read a million files at each look
            if is_late or self._own.place == (0, 0):
                present = self._register.entered()
                whole = self._procs * len(whole_pods(present.values(), self._procs))
                if self._own.place == (0, 0) and whole == members:
                    return self._propose(0, tuple(present[place] for place in sorted(present)))
                if is_late:
                    raise RuntimeError(
                        f"timed out after {JOIN_TIMEOUT_SECONDS:.0f} seconds waiting for clients: {whole} of "
                        f"{members} ranks came"
                    )
            time.sleep(begin_look_seconds(members))
        return newest

    def after(self, view: View, found_silent: frozenset[str]) -> View:
        """What follows `view`, of which this member was one. It has `found_silent` these others.

        Raises Excluded where another rank of its pod is lost, and Finished where too few are left since the others have
        come to the end.
        """
        looks = _Looks(self, view)
        known_since: float | None = None
        pod = mates(view, self._own)
        question = {"isNew": False, "silent": sorted(found_silent)}
        with Inquiry({"ask": "leave", "view": view.number}) as inquiry, _Wait(self._own, view, question) as wait:
            decided = looks.decided()
            while decided is None:
                arrivals = self._listener.arrivals(view.number)
                silent = found_silent.union(*(arrival.silent for arrival in arrivals.values()))
                answers = inquiry.answers(arrivals, silent)
                if {member.id for member in pod}.intersection(lost(view, self._own.id, answers)):
                    if self._register.is_finished:
                        raise Finished("training has come to its end while this pod was cut off")
                    raise Excluded("another rank of this pod is lost, and a pod is replaced as a whole")
                inquiry.ask(one for one in pod if one.id not in arrivals)
                first = coordinator(view, self._own.id, answers)
                if first.id != self._own.id:
                    known_since = None
                    inquiry.ask(view.members[: view.members.index(first) + 1])
                    decided = wait.answer_of(first)
                else:
                    wait.end()
                    inquiry.ask(one for one in view.members if one.id != self._own.id and one.id not in arrivals)
                    now = time.monotonic()
                    known_since = (known_since or now) if is_known(view, self._own.id, answers) else None
                    waited = 0.0 if known_since is None else now - known_since
                    decided = self._coordinated(view, arrivals, answers, waited)
                decided = decided or looks.decided()
        return self._answered(decided)

    def _coordinated(self, view: View, arrivals: Mapping[str, Arrival], answers: Answers, waited: float) -> View | None:
        """What this member decides as the coordinator; None if it waits, which it has done a little then."""
        joining = [arrival.member for arrival in arrivals.values() if arrival.is_new]
        verdict = judged(
            view, self._own.id, answers, joining=joining, least=self._least, waited=waited, procs=self._procs
        )
        if verdict is Verdict.PROPOSE:
            stay = {one for one, arrival in arrivals.items() if not arrival.is_new}
            return self._propose(view.number + 1, successors(view, self._own.id, stay, joining, self._procs))
        if verdict in (Verdict.TOO_FEW, Verdict.GIVE_UP) and self._register.is_finished:
            raise Finished("training has come to its end while this process was cut off")
        left = len(view.members) - len(lost(view, self._own.id, answers))
        few = f"{left} of the {self._least} ranks that must take part"
        if verdict is Verdict.GIVE_UP:
            self.give_up(f"{few} are left, and no replacement came within {REPLACEMENT_SECONDS:.0f} s")
        if verdict is Verdict.TOO_FEW and self._is_asked_to_stop():  # this process ends, and with it the state
            self.give_up(f"asked to stop while {few} were left", StoppedTooFew)
        time.sleep(VOLUME_SECONDS if verdict is Verdict.TOO_FEW else LOOK_SECONDS)
        return None

    def joined(self, view: View, *, is_new: bool) -> View:
        """The first view that has this process; it asks those that go on in `view`. Raises Excluded unless it `is_new`,
        Finished, and Unreached.

        Where it `is_new`, it is in none before its whole pod has asked the same member.
        """
        alone_since: float | None = None
        while view.rank_of(self._own.id) is None:
            if not is_new:
                raise Excluded(f"the others went on without this rank, in view {view.number}: it was silent too long")
            answer = next(filter(None, (self._asked(member, view) for member in view.members)), None)
            if answer is not None:
                view, alone_since = answer, None
                continue
            if self._register.is_finished:
                raise Finished("training has come to its end before this process could join")
            alone_since = alone_since or time.monotonic()
            self._end_if_unreached(view, time.monotonic() - alone_since)
            time.sleep(VOLUME_SECONDS)
            view = self.newest() or view
        return view

    def _end_if_unreached(self, view: View, seconds: float) -> None:
        """End this process, which is new, and has been alone for so many seconds; and the attempt where the volume
        knows that no member of `view` goes on. That none answers does not show it: the network of this pod alone may
        not work (yet).
        """
        if seconds > ALONE_SECONDS and self._register.are_gone(view.members):
            self.give_up(f"no rank that has the state answers: those of view {view.number} are lost")
        if seconds > UNREACHED_SECONDS:
            raise Unreached(
                f"this pod reaches none of the {len(view.members)} ranks of view {view.number}, such as "
                f"{view.members[0].host}: check whether the network of its node, a network policy or a proxy keeps "
                "the pods of this job apart"
            )

    def _asked(self, member: Member, view: View) -> View | None:
        """What follows `view`, in which `member` is; None if that one is lost. `view` itself where one before it has
        answered, at which the other ranks of this pod may wait: all are to ask the same.
        """
        before = view.members[: view.members.index(member)]
        looks = _Looks(self, view)
        with Inquiry({"ask": "alive"}) as inquiry, _Wait(self._own, view, {"isNew": True, "silent": []}) as wait:
            while member.id not in lost(view, self._own.id, inquiry.answers()):
                inquiry.ask([*before, member])
                decided = wait.answer_of(member) or looks.decided()
                if decided is not None:
                    return decided
                if inquiry.have_answered(before):
                    return view
        return None

    def newest(self) -> View | None:
        """The newest view. Raises RuntimeError where another member has given up."""
        if (why := self._register.given_up) is not None:
            raise RuntimeError(f"Connection closed by peer: live recovery was given up: {why}")
        return self._register.newest()

    def give_up(self, why: str, error: type[LiveRecoveryFailed] = LiveRecoveryFailed) -> NoReturn:
        """End this attempt. One process says why (`error`), and ends its pod; the others have lost their peer
        (RuntimeError), so that their pods wait for the next attempt, in place.
        """
        if self._register.give_up(why):
            raise error(why)
        self.newest()
        raise AssertionError("the reason is on record")

    def _propose(self, number: int, members: tuple[Member, ...]) -> View:
        self.store = TCPStore(
            self._own.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=FORM_SECONDS)
        )
        return self._register.propose(View(number, members, self._own.id, self._own.host, self.store.port))

    def _answered(self, decided: View) -> View:
        """`decided`, once all that wait for it know it."""
        if arrivals := self._listener.take_arrivals(decided.number):
            # once for all: of 1,024 members it takes 30 ms each time, and this member is to form the group with them
            line = line_of(decided.to_json())
            for arrival in arrivals:
                arrival.answer(line)
        return decided


class _Looks:
    """Looks on the volume, now and then, for what follows a view."""

    def __init__(self, deciding: Deciding, view: View) -> None:
        self._deciding, self._view = deciding, view
        self._next = 0.0

    def decided(self) -> View | None:
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + VOLUME_SECONDS
        newest = self._deciding.newest()
        return newest if newest is not None and newest.number > self._view.number else None


class _Wait:
    """For the answer of one member at a time to the question for the next view."""

    def __init__(self, own: Member, view: View, question: Mapping[str, Any]) -> None:
        self._question = {"ask": "next", "view": view.number, "member": asdict(own), **question}
        self._member: Member | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> _Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait no longer."""
        if self._connection is not None:
            self._connection.close()
        self._member = self._connection = None

    def answer_of(self, member: Member) -> View | None:
        """What `member` has answered; None, after a little while, as long as it has not."""
        try:
            if self._connection is None or member != self._member:
                self.end()
                self._connection = socket.create_connection(member.address, timeout=ANSWER_SECONDS)
                self._member = member
                send(self._connection, {**self._question, "to": member.id})
            self._connection.settimeout(WAIT_SECONDS)
            with contextlib.suppress(TimeoutError):
                self._connection.recv(1, socket.MSG_PEEK)
                self._connection.settimeout(ANSWER_SECONDS)
                return View.from_json(receive(self._connection))
        except (OSError, ValueError, KeyError, TypeError):
            self.end()  # whether it has ended is found out by another question
            time.sleep(WAIT_SECONDS)
        return None
