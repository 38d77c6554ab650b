"""The protocol of one member: from a group that lost a rank to the group of the next view.

1. Leave. The group of the view is aborted, which makes the next member's collective fail, and so on: all leave within
   milliseconds, those that compute at their next collective.
2. Ask the first member of the view that answers for the next one, and wait. The first that is left is the coordinator.
   It asks those that are missing to leave, and learns so who has ended.
3. The coordinator proposes the members that came as the next view (`register`). What it answers is what was decided,
   its proposal or another's.
4. The members of that view form its process group. If that fails, someone died meanwhile: again from 1, a view later.

A member that the next view does not have is excluded: it was silent for too long, or on the other side of a partition.
It has no group and takes no further step.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import Work

from ddp_trainer.contract.exit_codes import LiveRecoveryFailed
from ddp_trainer.live.connections import Connections
from ddp_trainer.live.listener import ANSWER_SECONDS, Listener, ask, receive, send
from ddp_trainer.live.register import Register, volume_used
from ddp_trainer.live.views import (
    REPLACEMENT_SECONDS,
    SILENT_SECONDS,
    Answers,
    Member,
    Verdict,
    View,
    is_known,
    judged,
    lost,
    successors,
)
from ddp_trainer.live.watch import WATCH_SECONDS, watch
from ddp_trainer.snapshots.trust.errors import SnapshotError

LOOK_SECONDS: Final = 0.005
"""How often the coordinator looks whether a member has come."""
ALONE_SECONDS: Final = 10.0
"""How long a new process looks for a member of the newest view that answers."""
FORM_SECONDS: Final = 10.0
"""How long the members of a view may take to form its group."""
FORM_TRIES: Final = 5
"""Views in a row whose group cannot be formed, until live recovery is given up."""
JOIN_TIMEOUT_SECONDS: Final = 600.0
"""How long the ranks of the first view wait for each other."""
BEGIN_LOOK_SECONDS: Final = 0.1


class Excluded(Exception):
    """The others went on without this member. Not a FencedError, which ends the job: only this process has to end."""


class Finished(Exception):
    """The others have come to the end without this process, which replaces one that was lost."""


class Membership:
    """Of one rank's process. `form` the first view or `join`, then `next_view` after each failure or newcomer."""

    def __init__(
        self, register: Register, *, node_rank: int, local_rank: int, host: str, least: int, timeout_seconds: float
    ) -> None:
        self._register = register
        self.least = least
        """How few ranks may go on."""
        own = uuid.uuid4().hex
        self._listener = Listener(host, own, self._abort)
        self.own = Member(own, node_rank, local_rank, host, self._listener.port)
        self._store: TCPStore | None = None
        self._timeout = timedelta(seconds=timeout_seconds)
        self.view: View | None = None
        """The one whose group is formed, or was formed last."""
        self._connections = Connections()
        self._silent: set[str] = set()
        """What the watch has found."""
        self._is_leaving = threading.Event()
        self._is_lost = threading.Event()
        """Set once a rank of the view is known to be lost."""
        watched = (self._next_member, self._waits_for_lost, self._next_is_lost)
        threading.Thread(target=watch, args=watched, name="live watch", daemon=True).start()

    @property
    def rank(self) -> int:
        assert self.view is not None
        rank = self.view.rank_of(self.own.id)
        assert rank is not None
        return rank

    @property
    def size(self) -> int:
        assert self.view is not None
        return len(self.view.members)

    @property
    def has_newcomer(self) -> bool:
        """Whether a new member waits at this one: all should leave the view after the same step."""
        return self.view is not None and self._listener.has_newcomer(self.view.number)

    def check_leads(self) -> None:
        """Raise SnapshotError unless this process is rank 0 of the newest view, which alone writes snapshots; OSError
        where the volume cannot be read. From any thread.
        """
        newest = self._register.newest()
        if newest is None or newest.members[0].id != self.own.id:
            number = "no view" if newest is None else f"view {newest.number}"
            raise SnapshotError(
                f"this process does not lead the ranks any more ({number}): it leaves snapshots to others"
            )

    def close(self) -> None:
        """Leave together, after success: a rank that is still in a collective has all that it needs. One that is lost
        now changes nothing: training is complete.
        """
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        self._is_leaving.set()  # others may have ended already
        self._register.finish()
        self.stop()
        dist.destroy_process_group()

    def stop(self) -> None:
        """Answer no other member any more, and take no notice of one that is lost: this process is about to end."""
        self._is_leaving.set()
        self._listener.close()

    def depart(self) -> None:
        """Leave for good: the others learn at once that this process has ended."""
        self.stop()
        self._leave_group()

    # Forming a group

    def begin(self, members: int) -> None:
        """Form the first view, of `members` ranks, or join the view that there is: this process replaces one.

        The process in place (0, 0) proposes the first view once all places have registered. Raises Finished,
        LiveRecoveryFailed, and RuntimeError where ranks did not come.
        """
        with volume_used():
            self._settle(self._first_view(members))

    def _first_view(self, members: int) -> View:
        """The first view of all, or the newest."""
        self._register.enter(self.own)
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while (newest := self._newest()) is None:
            present = self._register.entered()
            if self.own.place == (0, 0) and len(present) == members:
                return self._propose(0, tuple(present[place] for place in sorted(present)))
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"timed out after {JOIN_TIMEOUT_SECONDS:.0f} seconds waiting for clients: {len(present)} of "
                    f"{members} ranks came"
                )
            time.sleep(BEGIN_LOOK_SECONDS)
        return newest

    def leave(self) -> None:
        """Leave the group: no collective of it, under way or to come, waits for another rank any more."""
        self._is_leaving.set()
        self._connections.close()

    def lost(self) -> None:
        """A rank of the view is lost: a collective has failed."""
        self._is_lost.set()

    def waited(self, work: Work) -> None:
        """Wait for a collective that is not of a step. Raises RuntimeError where it fails, or a rank is lost."""
        self._connections.waited(work, self._is_lost.is_set)

    def next_view(self) -> None:
        """Leave the view, and form the next one that this member is in. Raises Excluded, LiveRecoveryFailed, and
        RuntimeError where another member has found that the ranks cannot go on.
        """
        assert self.view is not None
        with volume_used():
            self._settle(None)

    def _settle(self, decided: View | None) -> None:
        """Form `decided`, or what follows it."""
        tries = 0
        while True:
            self._is_leaving.set()
            self._leave_group()
            if decided is None:
                assert self.view is not None
                decided = self._decision_after(self.view)
            if decided.rank_of(self.own.id) is None:
                decided = self._joined(decided)
            self.view, decided, self._silent = decided, None, set()
            try:
                self._form(self.view)
            except (RuntimeError, OSError) as error:
                print(f"ddp_trainer: view {self.view.number} was not formed: {error}", file=sys.stderr, flush=True)
                tries += 1
                if tries == FORM_TRIES:
                    self.give_up(f"the process group could not be formed {tries} times in a row: {error}")
                continue
            self._is_lost.clear()
            self._is_leaving.clear()
            return

    def _form(self, view: View) -> None:
        """Make the process group of a view. Raises RuntimeError if one of its members is gone."""
        store = self._store
        if view.proposer != self.own.id or store is None:
            seconds = timedelta(seconds=FORM_SECONDS)
            store = TCPStore(view.store_host, view.store_port, is_master=False, wait_for_workers=False, timeout=seconds)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"view-{view.number}", store),
            rank=view.rank_of(self.own.id) or 0,
            world_size=len(view.members),
            timeout=timedelta(seconds=FORM_SECONDS),
        )
        group = dist.distributed_c10d._get_default_group()
        group.set_timeout(self._timeout)
        self._connections.opened(group)

    def _leave_group(self) -> None:
        """Without waiting for another rank, and so that none waits for this one."""
        self._connections.destroy(is_lost=self._is_lost.is_set())

    # Deciding on the next view

    def _decision_after(self, view: View) -> View:
        """What follows `view`, of which this member was one."""
        skipped: set[str] = set()
        while True:
            newest = self._newest()
            assert newest is not None
            if newest.number > view.number:
                return newest
            first = next(member for member in view.members if member.id not in skipped)
            if first.id == self.own.id:
                return self._coordinate(view)
            answer = self._ask_for_next(first, view, is_new=False)
            if answer is not None:
                return answer
            skipped.add(first.id)

    def _joined(self, view: View) -> View:
        """The first view that has this process; it asks those that go on."""
        alone_since: float | None = None
        while view.rank_of(self.own.id) is None:
            if self.view is not None:
                raise Excluded(f"the others went on without this rank, in view {view.number}: it was silent too long")
            for member in view.members:
                answer = self._ask_for_next(member, view, is_new=True)
                if answer is not None:
                    view = answer
                    break
            else:
                if self._register.is_finished:
                    raise Finished("training has come to its end before this process could join")
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > ALONE_SECONDS:
                    self.give_up(f"no rank that has the state answers: those of view {view.number} are lost")
                time.sleep(WATCH_SECONDS)
                view = self._newest() or view
        return view

    def _ask_for_next(self, member: Member, view: View, *, is_new: bool) -> View | None:
        """What `member` says follows `view`; None if it has ended, is silent or does not coordinate."""
        question: dict[str, Any] = {"ask": "next", "view": view.number, "member": asdict(self.own), "isNew": is_new}
        question["silent"] = sorted(self._silent)
        try:
            with socket.create_connection(member.address, timeout=ANSWER_SECONDS) as connection:
                send(connection, question)
                connection.settimeout(ANSWER_SECONDS)
                heard = time.monotonic()
                while True:
                    with contextlib.suppress(TimeoutError):
                        return View.from_json(receive(connection))
                    # the answer may be lost, of one that decided and was cut off, or this member may coordinate no more
                    if (newest := self._newest()) is not None and newest.number > view.number:
                        return newest
                    # a long step is no silence: the listener answers meanwhile
                    with contextlib.suppress(TimeoutError):
                        ask(member.address, {"ask": "alive"})
                        heard = time.monotonic()
                    if time.monotonic() - heard >= SILENT_SECONDS:
                        return None
        except (OSError, ValueError):
            return None

    def _coordinate(self, view: View) -> View:
        """Wait for the other members that are left, and propose the next view."""
        gone: set[str] = set()
        silent_since: dict[str, float] = {}
        known_since: float | None = None
        while True:
            newest = self._newest()
            if newest is not None and newest.number > view.number:
                return self._answered(newest)
            arrivals = self._listener.arrivals(view.number)
            now = time.monotonic()
            answers = Answers(arrivals.keys(), gone, {one: now - since for one, since in silent_since.items()})
            for one in self._silent.union(*(arrival.silent for arrival in arrivals.values())):
                silent_since.setdefault(one, now - SILENT_SECONDS)
            joining = [arrival.member for arrival in arrivals.values() if arrival.is_new]
            known_since = (known_since or now) if is_known(view, self.own.id, answers) else None
            waited = 0.0 if known_since is None else now - known_since
            verdict = judged(view, self.own.id, answers, joining=len(joining), least=self.least, waited=waited)
            if verdict is Verdict.PROPOSE:
                stay = {one for one, arrival in arrivals.items() if not arrival.is_new}
                members = successors(view, self.own.id, stay, joining)
                return self._answered(self._propose(view.number + 1, members))
            if verdict is Verdict.GIVE_UP:
                left = len(view.members) - len(lost(view, self.own.id, answers))
                self.give_up(
                    f"{left} of the {self.least} ranks that must take part are left, and no replacement came within "
                    f"{REPLACEMENT_SECONDS:.0f} s"
                )
            for member in view.members:
                if member.id != self.own.id and member.id not in arrivals and member.id not in gone:
                    self._ask_to_leave(member, view, gone, silent_since)
            time.sleep(WATCH_SECONDS if verdict is Verdict.TOO_FEW else LOOK_SECONDS)

    def _newest(self) -> View | None:
        """The newest view. Raises RuntimeError where another member has given up."""
        if (why := self._register.given_up) is not None:
            raise RuntimeError(f"Connection closed by peer: live recovery was given up: {why}")
        return self._register.newest()

    def give_up(self, why: str) -> NoReturn:
        """End this attempt. One process says why (LiveRecoveryFailed), and ends its pod; the others have lost their
        peer (RuntimeError), so that their pods wait for the next attempt, in place.
        """
        if self._register.give_up(why):
            raise LiveRecoveryFailed(why)
        self._newest()
        raise AssertionError("the reason is on record")

    def _ask_to_leave(self, member: Member, view: View, gone: set[str], silent_since: dict[str, float]) -> None:
        try:
            ask(member.address, {"ask": "leave", "view": view.number})
        except TimeoutError:
            silent_since.setdefault(member.id, time.monotonic())
        except OSError:
            gone.add(member.id)
        else:
            silent_since.pop(member.id, None)

    def _propose(self, number: int, members: tuple[Member, ...]) -> View:
        self._store = TCPStore(
            self.own.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=FORM_SECONDS)
        )
        return self._register.propose(View(number, members, self.own.id, self.own.host, self._store.port))

    def _answered(self, decided: View) -> View:
        """`decided`, once all that wait for it know it."""
        for arrival in self._listener.take_arrivals():
            arrival.answer(decided)
        return decided

    # While training

    def _abort(self, number: int) -> None:
        """Make training leave view `number`. On a thread of the listener or of the watch."""
        if not self._is_leaving.is_set() and self.view is not None and self.view.number == number:
            self._is_lost.set()
            self._connections.close()

    def _next_member(self) -> tuple[int, Member] | None:
        """The number of the view, and the member after this one; None where there is none, or the view is left."""
        view = self.view
        if view is None or self._is_leaving.is_set() or len(view.members) < 2:
            return None
        return view.number, view.members[(self.rank + 1) % len(view.members)]

    def _waits_for_lost(self) -> bool:
        return self._is_lost.is_set() and not self._is_leaving.is_set()

    def _next_is_lost(self, number: int, silent: set[str]) -> None:
        self._silent = silent or self._silent
        self._abort(number)
