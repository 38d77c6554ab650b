"""Process 1 of a pod over all its lives: one start of torchrun, or one after another where the pod outlives a failure.

Without DDPJOB_ASSIGNMENT_DIR there is one life, and the pod ends with it. With it, a pod whose ranks only lost a peer
stays, and its ranks begin anew once the operator has given it a place in the next attempt: nothing is scheduled, pulled
or started again but torchrun itself. A spare begins with the wait.
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

from ddp_trainer import processes
from ddp_trainer.assignment import LOOK_SECONDS, Assignment, AssignmentWatch
from ddp_trainer.counters import CounterLedger
from ddp_trainer.environment import PodEnvironment, Target
from ddp_trainer.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED
from ddp_trainer.life import CannotStart, Life, Prepared, prepare_life, start_life
from ddp_trainer.report import log, refuse, report_cause, told
from ddp_trainer.root_cause import Cause, Ending
from ddp_trainer.status import Beat, Moment, status
from ddp_trainer.stop import StopSignals
from ddp_trainer.supervisor import End, Supervisor

CONSEQUENCES: Final = frozenset({"PeerLost", "RendezvousFailed"})
"""Reasons that say that the failure is another pod's."""

SPARE: Final = "spare"
WAITING: Final = "waiting"


class Next(Enum):
    """What follows a life."""

    EXIT = auto()
    WAIT = auto()
    BEGIN = auto()


def after(end: End, *, stopped: bool, stays: bool) -> Next:
    """What a pod does after a life that ended so.

    `stopped`: SIGTERM came to the pod itself. `stays`: the pod may be given a place in a later attempt.
    """
    if stopped or not stays or end.stuck:  # beside a process that cannot be killed no other has its memory and devices
        return Next.EXIT
    # ranks that leave in order though this pod was not asked to have agreed on it with those of one that was
    consequence = end.cause.reason in CONSEQUENCES or end.cause.exit_code == EXIT_PREEMPTED
    if end.superseded and (consequence or end.cause.exit_code == EXIT_OK):
        return Next.BEGIN
    return Next.WAIT if consequence else Next.EXIT


@dataclass(frozen=True, slots=True)
class _Scene:
    """What /status and /metrics show: a life, or what is left of the last one while the pod waits."""

    pod: PodEnvironment
    since: float
    """Epoch seconds at which it began."""

    supervisor: Supervisor | None = None
    idle: str | None = None
    beats: Sequence[Beat] = ()
    ended: Mapping[str, Any] | None = None

    def moment(self) -> Moment:
        if self.supervisor is not None:
            return self.supervisor.moment()
        now, wall = time.monotonic(), time.time()
        return Moment(now=now, wall=wall, ranks=(), beats=self.beats, idle=self.idle, ended=self.ended)


class Lives:
    """One pod to its end; `run` is called once.

    `first` is the life that has begun already, None for a spare. `start_time` is when the pod began, in epoch seconds.
    """

    def __init__(
        self, pod: PodEnvironment, target: Target, first: Life | None, stop: StopSignals, start_time: float
    ) -> None:
        self._pod, self._target, self._first, self._stop = pod, target, first, stop
        self._watch = AssignmentWatch(pod.assignment_dir) if pod.assignment_dir is not None else None
        self._complaint: str | None = None
        self._prepared: Prepared | None = None
        self._tried = False
        self._ledger = CounterLedger()
        self._scene = _Scene(pod, start_time, idle=SPARE)

    def run(self) -> int:
        """Live until there is nothing left to live for; the exit code of docs/contracts.md section 3."""
        threading.Thread(target=self._serve, name="status", daemon=True).start()
        followed = self._as_spare() if self._first is None else self._live(self._first)
        while isinstance(followed, Assignment):
            followed = self._take(followed)
        return followed

    def _take(self, place: Assignment) -> Assignment | int:
        """Go on in another place of the gang: the place after that, or the exit code."""
        log(f"this pod goes on as {place}")
        self._pod = self._pod.placed(place)
        if place.node_rank is None:
            return self._as_spare()
        prepared, self._prepared, self._tried = self._prepared, None, False
        try:
            return self._live(start_life(self._pod, self._target, prepared=prepared))
        except CannotStart as error:
            return refuse(EXIT_FAILED, error.reason, str(error), self._pod, self._pod.termination_log)

    def _live(self, life: Life) -> Assignment | int:
        supervisor = Supervisor(life, self._stop, None if self._watch is None else self._is_superseded)
        self._scene = _Scene(life.pod, life.began, supervisor)
        end = supervisor.run()
        self._ledger.totals(life.pod.attempt, end.ending.beats)
        if after(end, stopped=self._stop.requested_at is not None, stays=self._watch is not None) is Next.EXIT:
            return self._report(end.cause, end.ending)
        log(f"attempt {life.pod.attempt} is over here ({end.cause.reason}): {end.cause.message}")
        return self._await_a_later_attempt(end)

    def _await_a_later_attempt(self, end: End) -> Assignment | int:
        """The place in it. The exit code if there is none in time, or SIGTERM comes first."""
        ended = told(end.cause, self._pod, end.ending)
        self._scene = _Scene(self._pod, time.time(), idle=WAITING, beats=end.ending.beats, ended=ended)
        seconds = self._pod.reassign_seconds
        place = self._await(lambda place: place.attempt > self._pod.attempt, seconds)
        if place is not None:
            return place
        if self._stop.requested_at is not None:
            text = f"stopped by SIGTERM while it waited for a later attempt; {end.cause.message}"
            return self._report(Cause(EXIT_PREEMPTED, "Preempted", text), end.ending)
        text = f"{end.cause.message}; this pod was given no place in a later attempt within {seconds:g} s"
        return self._report(replace(end.cause, message=text), end.ending)

    def _as_spare(self) -> Assignment | int:
        """The place that this pod is given; the exit code if SIGTERM comes first."""
        self._scene = _Scene(self._pod, time.time(), idle=SPARE)
        place = self._await(lambda place: place.node_rank is not None and place.attempt >= self._pod.attempt)
        if place is not None:
            return place
        cause = Cause(EXIT_PREEMPTED, "Preempted", "stopped by SIGTERM while it was a spare: it had nothing to save")
        return self._report(cause, Ending(wall=time.time(), procs=0))

    def _await(self, fits: Callable[[Assignment], bool], seconds: float = math.inf) -> Assignment | None:
        """A place that fits; None once SIGTERM has come or the time is up. Meanwhile a torchrun gets ready for it."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            while self._stop.requested_at is None and time.monotonic() < deadline:
                place = self._look()
                if place is not None and fits(place):
                    return place
                self._prepare()
                if selector.select(LOOK_SECONDS):
                    self._stop.clear()
        if self._prepared is not None:
            self._prepared.give_up()
        return None

    def _prepare(self) -> None:
        """Have a torchrun ready, and see whether it still is."""
        ended = processes.reap()
        if self._prepared is None and not self._tried:
            self._tried, self._prepared = True, prepare_life(self._pod)
        elif self._prepared is not None and self._prepared.agent in ended:
            self._prepared.give_up()
            self._prepared = None  # the start of the life will say why, if it still cannot

    def _is_superseded(self) -> bool:
        place = self._look()
        return place is not None and place.attempt > self._pod.attempt

    def _look(self) -> Assignment | None:
        """What the assignment's files say; what they get wrong is told, once."""
        if self._watch is None:
            return None
        place = self._watch.look()
        if self._watch.problem is not None and self._watch.problem != self._complaint:
            log(f"the assignment changes nothing: {self._watch.problem}")
        self._complaint = self._watch.problem
        return place

    def _report(self, cause: Cause, ending: Ending) -> int:
        return report_cause(cause, self._pod, ending, self._pod.termination_log)

    def _serve(self) -> None:
        # imported beside torchrun's own start, not before it
        from ddp_trainer.metrics import metrics_page
        from ddp_trainer.status_server import StatusServer, write_port

        def shown() -> tuple[PodEnvironment, Moment]:
            scene = self._scene
            return scene.pod, scene.moment()

        def status_now() -> dict[str, Any]:
            scene = self._scene
            return status(scene.pod, scene.since, scene.moment())

        port = self._pod.status_port
        try:
            server = StatusServer(port, status_now, metrics_page(shown, self._ledger))
        except OSError as error:
            log(f"no /status and /metrics: port {port} cannot be used: {error}")
            return
        write_port(self._pod.run_dir, server.server_address[1])
        server.serve_forever()
