"""Process 1 of a pod: runs one attempt, or several in a row where the pod is kept after a failure.

Without DDPJOB_ASSIGNMENT_DIR the pod ends with its attempt. With it, a pod whose ranks only lost a peer stays, and its
ranks start again once the operator has assigned it a node rank of the next attempt: only torchrun starts again, nothing
is scheduled or pulled. A spare starts with the wait.
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

from ddp_trainer.contract import processes
from ddp_trainer.contract.environment import Assignment, PodEnvironment, Target
from ddp_trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER, UserError
from ddp_trainer.launch.assignment import LOOK_SECONDS, AssignmentWatch
from ddp_trainer.launch.attempt import Attempt, CannotStart, PreparedTorchrun, prepare_torchrun, start_attempt
from ddp_trainer.launch.exit.report import log, report_exit, report_start_failure, termination_record
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence
from ddp_trainer.launch.output import OutputCopy
from ddp_trainer.launch.signals import StopSignals
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.pod_state import PodState, RankHeartbeat, status
from ddp_trainer.launch.supervisor import AttemptResult, Supervisor

CONSEQUENCES: Final = frozenset({"PeerLost", "RendezvousFailed"})
"""Reasons that say that the failure is another pod's."""

SPARE: Final = "spare"
WAITING: Final = "waiting"
REQUIREMENTS: Final = "requirements"


class AfterAttempt(Enum):
    """What the pod does after an attempt."""

    EXIT = auto()
    WAIT = auto()
    BEGIN = auto()


def after_attempt(result: AttemptResult, *, stopped: bool, stays: bool) -> AfterAttempt:
    """What a pod does after an attempt with this result.

    `stopped`: SIGTERM came to the pod itself. `stays`: the pod may be given a place in a later attempt.
    """
    # beside a process that cannot be killed no other has its memory and devices
    if stopped or not stays or result.stuck:
        return AfterAttempt.EXIT
    # ranks that leave in order though this pod was not asked to have agreed on it with those of one that was
    consequence = result.cause.reason in CONSEQUENCES or result.cause.exit_code == EXIT_PREEMPTED
    if result.superseded and (consequence or result.cause.exit_code == EXIT_OK):
        return AfterAttempt.BEGIN
    return AfterAttempt.WAIT if consequence else AfterAttempt.EXIT


@dataclass(frozen=True, slots=True)
class _View:
    """What /status and /metrics show: the attempt that runs, or the last one while the pod waits."""

    pod: PodEnvironment
    since: float
    """Epoch seconds at which it began."""

    supervisor: Supervisor | None = None
    idle: str | None = None
    heartbeats: Sequence[RankHeartbeat] = ()
    ended: Mapping[str, Any] | None = None

    def pod_state(self) -> PodState:
        if self.supervisor is not None:
            return self.supervisor.pod_state()
        now, wall = time.monotonic(), time.time()
        return PodState(now=now, wall=wall, ranks=(), heartbeats=self.heartbeats, idle=self.idle, ended=self.ended)


class Pod:
    """One pod to its end; `run` is called once.

    `first` is the attempt that has started already, None for a spare and where packages have to be installed before;
    `start_time`, in epoch seconds, the pod's start; `output` the copy of what it prints.
    """

    def __init__(
        self,
        pod: PodEnvironment,
        target: Target,
        first: Attempt | None,
        stop: StopSignals,
        start_time: float,
        output: OutputCopy | None = None,
    ) -> None:
        self._pod, self._target, self._first, self._stop, self._output = pod, target, first, stop, output
        self._watch = AssignmentWatch(pod.assignment_dir) if pod.assignment_dir is not None else None
        self._last_problem: str | None = None
        self._prepared: PreparedTorchrun | None = None
        self._tried = False
        self._ledger = CounterLedger()
        self._view = _View(pod, start_time, idle=SPARE)

    def run(self) -> int:
        """Run attempts until none can follow; the exit code of docs/contracts.md section 3."""
        threading.Thread(target=self._serve, name="status", daemon=True).start()
        next_place = self._begin() if self._first is None else self._run_attempt(self._first)
        while isinstance(next_place, Assignment):
            next_place = self._start_in(next_place)
        return next_place

    def _start_in(self, place: Assignment) -> Assignment | int:
        """Run the attempt of this assignment: the next assignment, or the exit code."""
        log(f"this pod goes on as {place}")
        self._pod = self._pod.placed(place)
        if self._output is not None:
            self._output.go_on(self._pod)
        return self._begin()

    def _begin(self) -> Assignment | int:
        """The same in the place that this pod has."""
        if self._pod.node_rank is None:
            return self._as_spare()
        if self._pod.code is not None and self._pod.code.requirements is not None:
            instead = self._have_packages(self._pod.code.requirements)
            if instead is not None:
                return instead
        prepared, self._prepared, self._tried = self._prepared, None, False
        try:
            return self._run_attempt(start_attempt(self._pod, self._target, prepared=prepared))
        except CannotStart as error:
            return report_start_failure(EXIT_FAILED, error.reason, str(error), self._pod, self._pod.termination_log)

    def _have_packages(self, requirements: str) -> Assignment | int | None:
        """Have them installed, by node rank 0 for all. What follows instead of the attempt, if it cannot begin."""
        from ddp_trainer.launch.code import volume_failure
        from ddp_trainer.launch.pip_output import NotInstalled
        from ddp_trainer.launch.requirements import Interrupted, note_for_others, packages

        if self._pod.site_packages is not None:  # of an earlier attempt
            note_for_others(self._pod, self._pod.site_packages)
            return None
        self._view = _View(self._pod, time.time(), idle=REQUIREMENTS)
        path = self._pod.termination_log
        while self._pod.site_packages is None:
            try:
                self._pod = replace(self._pod, site_packages=packages(self._pod, self._pause))
            except UserError as error:
                return report_start_failure(EXIT_USER, "UserError", str(error), self._pod, path)
            except NotInstalled as error:
                return report_start_failure(EXIT_FAILED, error.reason, str(error), self._pod, path)
            except OSError as error:
                reason, text = volume_failure(f"{requirements} could not be installed on the volume", error)
                return report_start_failure(EXIT_FAILED, reason, text, self._pod, path)
            except Interrupted:
                pass
            if self._stop.requested_at is not None:
                text = f"stopped by SIGTERM before {requirements} was installed and any rank had started"
                return report_start_failure(EXIT_PREEMPTED, self._reason_of_stop, text, self._pod, path)
            place = self._look()
            if place is not None and place.attempt > self._pod.attempt:
                return place  # another node was lost meanwhile
        return None

    def _pause(self, seconds: float) -> bool:
        """Wait. Whether to go on installing: node rank 0 does so for all attempts."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            if selector.select(seconds):
                self._stop.clear()
        return self._stop.requested_at is None and (self._pod.node_rank == 0 or not self._is_superseded())

    def _run_attempt(self, attempt: Attempt) -> Assignment | int:
        supervisor = Supervisor(attempt, self._stop, None if self._watch is None else self._is_superseded)
        self._view = _View(attempt.pod, attempt.began, supervisor)
        result = supervisor.run()
        if attempt.pod.node_rank == 0:  # which alone exports the totals of the run
            self._ledger.totals(attempt.pod.attempt, result.evidence.heartbeats)
        if (
            after_attempt(result, stopped=self._stop.requested_at is not None, stays=self._watch is not None)
            is AfterAttempt.EXIT
        ):
            return self._report(result.cause, result.evidence)
        log(f"attempt {attempt.pod.attempt} is over here ({result.cause.reason}): {result.cause.message}")
        return self._await_a_later_attempt(result)

    def _await_a_later_attempt(self, result: AttemptResult) -> Assignment | int:
        """The assignment in it. The exit code if there is none in time, or SIGTERM comes first."""
        ended = termination_record(result.cause, self._pod, result.evidence)
        self._view = _View(self._pod, time.time(), idle=WAITING, heartbeats=result.evidence.heartbeats, ended=ended)
        seconds = self._pod.reassign_seconds
        place = self._await(lambda place: place.attempt > self._pod.attempt, seconds)
        if place is not None:
            return place
        if self._stop.requested_at is not None:
            text = f"stopped by SIGTERM while it waited for a later attempt; {result.cause.message}"
            return self._report(ExitCause(EXIT_PREEMPTED, "Preempted", text), result.evidence)
        text = f"{result.cause.message}; this pod was given no place in a later attempt within {seconds:g} s"
        return self._report(replace(result.cause, message=text), result.evidence)

    def _as_spare(self) -> Assignment | int:
        """The assignment of this spare; the exit code if SIGTERM comes first."""
        self._view = _View(self._pod, time.time(), idle=SPARE)
        place = self._await(lambda place: place.node_rank is not None and place.attempt >= self._pod.attempt)
        if place is not None:
            return place
        text = "stopped by SIGTERM while it was a spare: it had nothing to save"
        return self._report(
            ExitCause(EXIT_PREEMPTED, self._reason_of_stop, text), ExitEvidence(wall=time.time(), procs=0)
        )

    @property
    def _reason_of_stop(self) -> str:
        """Of a pod without ranks. Where ranks recover live, it counts as one that has left, also a spare that was given
        a place meanwhile: with the other reason all ranks would have stopped.
        """
        return "Left" if self._pod.live else "Preempted"

    def _await(self, fits: Callable[[Assignment], bool], seconds: float = math.inf) -> Assignment | None:
        """An assignment that fits; None once SIGTERM has come or the time is up. Meanwhile a torchrun is prepared."""
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
            self._tried, self._prepared = True, prepare_torchrun(self._pod)
        elif self._prepared is not None and self._prepared.agent in ended:
            self._prepared.give_up()
            self._prepared = None  # the next start says why, if it still cannot

    def _is_superseded(self) -> bool:
        place = self._look()
        return place is not None and place.attempt > self._pod.attempt

    def _look(self) -> Assignment | None:
        """The assignment now; a problem with its files is logged once."""
        if self._watch is None:
            return None
        place = self._watch.look()
        if self._watch.problem is not None and self._watch.problem != self._last_problem:
            log(f"the assignment changes nothing: {self._watch.problem}")
        self._last_problem = self._watch.problem
        return place

    def _report(self, cause: ExitCause, evidence: ExitEvidence) -> int:
        return report_exit(cause, self._pod, evidence, self._pod.termination_log)

    def _serve(self) -> None:
        # imported beside torchrun's own start, not before it
        from ddp_trainer.launch.status.metrics import metrics_page
        from ddp_trainer.launch.status.server import StatusServer, write_port

        def shown() -> tuple[PodEnvironment, PodState]:
            view = self._view
            return view.pod, view.pod_state()

        def status_now() -> dict[str, Any]:
            view = self._view
            return status(view.pod, view.since, view.pod_state())

        port = self._pod.status_port
        try:
            server = StatusServer(port, status_now, metrics_page(shown, self._ledger))
        except OSError as error:
            log(f"no /status and /metrics: port {port} cannot be used: {error}")
            return
        write_port(self._pod.run_dir, server.server_address[1])
        server.serve_forever()
