"""The protocol of one member: from a group that lost a rank to the group of the next view.

1. Leave. The group of the view is aborted, which makes the next member's collective fail, and so on: all leave within
   milliseconds, those that compute at their next collective.
2. Decide with the others on the next view (`deciding`).
3. The members of that view form its process group. If that fails, someone died meanwhile: again from 1, a view later.

A member that the next view does not have is excluded: it was silent for too long, or on the other side of a partition.
It has no group and takes no further step.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroup, Work

from ddp_trainer.contract.processes import allow_files
from ddp_trainer.contract.standard_error import say
from ddp_trainer.live.connections import Connections
from ddp_trainer.live.deciding import FORM_SECONDS, Deciding
from ddp_trainer.live.listener import Listener
from ddp_trainer.live.register import Register, volume_used
from ddp_trainer.live.views import Member, View, whole_pods
from ddp_trainer.live.watch import watch
from ddp_trainer.snapshots.trust.errors import SnapshotError

FORM_TRIES: Final = 5
"""Views in a row whose group cannot be formed, until live recovery is given up."""


class Membership:
    """Of one rank's process. `begin` with the first view or join, then `next_view` after each failure or newcomer."""

    def __init__(
        self,
        register: Register,
        *,
        node_rank: int,
        local_rank: int,
        host: str,
        least: int,
        timeout_seconds: float,
        pod: str = "",
        procs: int = 1,
        needs_replicas: bool = False,
    ) -> None:
        """`pod` is what all `procs` ranks of this pod, and no others, have in common. `needs_replicas` asks for
        `replicas` in each view.
        """
        allow_files()
        self._register = register
        self.least = least
        """How few ranks may go on."""
        own = uuid.uuid4().hex
        self._listener = Listener(host, own, self._abort)
        self.own = Member(own, node_rank, local_rank, host, self._listener.port, pod)
        self.procs = procs
        """How many ranks each pod has."""
        self.is_asked_to_stop: Callable[[], bool] = lambda: False
        """Whether SIGTERM has come to this process, where something listens to it."""
        self._deciding = Deciding(self.own, self._listener, register, least, procs, lambda: self.is_asked_to_stop())
        self._timeout = timedelta(seconds=timeout_seconds)
        self.view: View | None = None
        """The one whose group is formed, or was formed last."""
        self.replicas: ProcessGroup | None = None
        """The group of the ranks with this local rank in all pods of the view, in the order of these."""
        self._needs_replicas = needs_replicas
        self._connections = Connections(self._timeout)
        self._silent: tuple[int, frozenset[str]] = (0, frozenset())
        """What the watch has found: a view, and members of it that are silent."""
        self._is_leaving = threading.Event()
        self._is_lost = threading.Event()
        """Set once a rank of the view is known to be lost."""
        self._is_stopped = threading.Event()
        watched = (self._next_member, self._waits_for_lost, self._next_is_lost, self._is_stopped)
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
        """Whether a new pod waits at this member: all should leave the view after the same step."""
        return self.view is not None and bool(whole_pods(self._listener.newcomers(self.view.number), self.procs))

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
        now changes nothing: training is complete. Those that are ahead may have ended, which looks the same.
        """
        with contextlib.suppress(RuntimeError):
            self.waited(dist.barrier(async_op=True))
        self._is_leaving.set()
        self._register.finish()
        self.stop()
        if self._is_lost.is_set():
            self._leave_group()
        else:
            dist.destroy_process_group()

    def stop(self) -> None:
        """Answer no other member any more, and take no notice of one that is lost: this process is about to end."""
        self._is_leaving.set()
        self._is_stopped.set()
        self._listener.close()
        with contextlib.suppress(OSError):  # the volume may be why it ends
            self._register.leave(self.own.id)

    def depart(self) -> None:
        """Leave for good: the others learn at once that this process has ended."""
        self.stop()
        self._leave_group()

    # Forming a group

    def begin(self, members: int) -> None:
        """Form the first view, of `members` ranks, or join the view that there is: this process replaces one.

        The process in place (0, 0) proposes the first view once all places have registered. Raises Finished,
        Unreached, LiveRecoveryFailed, RuntimeError where ranks did not come, and OSError where the volume cannot be
        used: those that train may well use it, so only this process ends.
        """
        self._settle(self._deciding.first(members))

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
        """Leave the view, and form the next one that this member is in. Raises Excluded, Finished, LiveRecoveryFailed,
        and RuntimeError where another member has found that the ranks cannot go on.
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
                number, silent = self._silent
                decided = self._deciding.after(self.view, silent if number == self.view.number else frozenset())
            self.view, decided = self._deciding.joined(decided, is_new=self.view is None), None
            try:
                self._form(self.view)
            except (RuntimeError, OSError) as error:
                say(f"ddp_trainer: view {self.view.number} was not formed: {error}")
                tries += 1
                if tries == FORM_TRIES:
                    self.give_up(f"the process group could not be formed {tries} times in a row: {error}")
                continue
            self._is_lost.clear()
            self._is_leaving.clear()
            return

    def _form(self, view: View) -> None:
        """Make the process group of a view. Raises RuntimeError if one of its members is gone."""
        store = self._deciding.store
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
        if self._needs_replicas:
            self._form_replicas(view)

    def _form_replicas(self, view: View) -> None:
        for local_rank in range(self.procs):
            ranks = [rank for rank, member in enumerate(view.members) if member.local_rank == local_rank]
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=FORM_SECONDS))
            if local_rank == self.own.local_rank:
                group.set_timeout(self._timeout)
                self._connections.opened(group)
                self.replicas = group

    def _leave_group(self) -> None:
        """Without waiting for another rank, and so that none waits for this one."""
        self.replicas = None
        self._connections.destroy(is_lost=self._is_lost.is_set())

    def give_up(self, why: str) -> NoReturn:
        """End this attempt, as `Deciding.give_up` does."""
        self._deciding.give_up(why)

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
        return view.number, view.members[((view.rank_of(self.own.id) or 0) + 1) % len(view.members)]

    def _waits_for_lost(self) -> bool:
        return self._is_lost.is_set() and not self._is_leaving.is_set()

    def _next_is_lost(self, number: int, silent: set[str]) -> None:
        if silent:
            self._silent = (number, frozenset(silent))
        self._abort(number)
