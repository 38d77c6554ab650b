"""One job on this machine, from its first process to its last: see, `plan`, act, and again at every change.

The loop is the operator's, with processes where the cluster has pods, so what a job does here after a crash is
what it does there. A run is a new job (a new uid); the snapshots in the shared folder are what it
resumes from.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.progress import with_final_report
from ddpjob_operator.core.ledger.ranks import reports_of, together
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_termination
from ddpjob_operator.local import clock
from ddpjob_operator.local.chaos import KillRank, find_victim
from ddpjob_operator.local.children import Children
from ddpjob_operator.local.display import Display
from ddpjob_operator.local.environment import Machine
from ddpjob_operator.local.machine import as_run_here
from ddpjob_operator.local.network import fetch_status
from ddpjob_operator.local.observed import NodeView, RunView
from ddpjob_operator.local.output import Logs, OutputFollower
from ddpjob_operator.local.processes import LocalPod
from ddpjob_operator.local.record import RanksFile, StatusFile
from ddpjob_operator.local.volume import pod_log

_POLL_SECONDS = 0.5
_POLL_SECONDS_BEFORE_CHAOS = 0.05
_FOLLOW_SECONDS = 0.2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_OF_ONE_REQUEST = 1.0
"""A request to stop may come as two signals: SIGHUP of a terminal that is closed from the shell and from the kernel,
SIGTERM of timeout(1) to the process and to its group.
"""
_SECONDS_TO_SHOW = 0.2
"""What is written before a Ctrl-Z has this long to reach the terminal; a thread writes it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `stopped_by` is the signal that ended it before its time."""

    status: DDPJobStatus
    stopped_by: signal.Signals | None = None
    failed_log: Path | None = None
    """Output of the pod that failed last."""
    killed: bool = False
    """Whether the fault that was asked for has happened."""


class Runner:
    """Runs one job once. `await run()` returns when nothing of it is left on this machine."""

    def __init__(
        self,
        job: Job,
        machine: Machine,
        display: Display,
        chaos: KillRank | None = None,
        logs: Logs = Logs.NONE,
    ) -> None:
        self._job = as_run_here(job)
        self._machine = machine
        self._display = display
        self._chaos = chaos
        self._killed = False
        self._chaos_note: str | None = None
        self._started = clock.now()
        self._changed = asyncio.Event()
        self._children = Children(self._job, machine, self._changed.set)
        self._stopped_by: signal.Signals | None = None
        self._asked_at = 0.0
        self._output = OutputFollower(logs, display.output)
        self._record = StatusFile(machine.shared, self._job)
        self._ranks = RanksFile(machine.shared, self._job)

    async def run(self) -> Outcome:
        """Until the job is Succeeded or Failed, or a signal stops it."""
        loop = asyncio.get_running_loop()
        stop_signals = _heard()
        for number in stop_signals:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGTSTP, self._on_ctrl_z)
        polling = asyncio.create_task(self._poll(), name="poll launchers")
        polling.add_done_callback(lambda _: self._changed.set())
        following = asyncio.create_task(self._follow(), name="follow output")
        try:
            await self._until_over(polling)
        finally:
            polling.cancel()
            following.cancel()
            await self._end_all()
            self._output.close()
            self._ranks.write()
            for number in (*stop_signals, signal.SIGTSTP):
                loop.remove_signal_handler(number)
        return Outcome(self._job.status, self._stopped_by, self._failed_log(), self._killed)

    async def _until_over(self, polling: asyncio.Task[None]) -> None:
        while True:
            self._changed.clear()
            if polling.done():
                polling.result()  # it never ends by itself: let its error be seen
            requeue_after = await self._pass() if self._stopped_by is None else None
            self._display.show(self._view())
            if self._is_over():
                break
            try:
                async with asyncio.timeout(requeue_after):
                    await self._changed.wait()
            except TimeoutError:
                pass
        if self._stopped_by is not None:
            await self._take_last_words()
        self._display.show(self._view())

    def _is_over(self) -> bool:
        """The job's end is decided, and no process is left."""
        final = self._job.status.is_final
        return (final or self._stopped_by is not None) and all(pod.ended for pod in self._children.running)

    async def _pass(self) -> float | None:
        """One look at the job; the seconds until the next, if nothing happens before."""
        self._children.forget_deleted()
        observed = self._children.observed(self._job.status.attempt)
        decided = plan(self._job, observed, clock.now(), Defaults())
        self._job = replace(self._job, status=decided.status)
        self._record.write(self._job, self._children.places)
        for event in decided.events if not decided.status.is_final else ():
            self._display.event(event)  # how it all ended is for the caller to tell
        for action in decided.actions:
            if await self._children.carry_out(action):
                self._changed.set()
        self._record.write(self._job, self._children.places)  # with the places that they have given pods
        return decided.requeue_after

    async def _poll(self) -> None:
        """Ask every launcher how far it is, for as long as the run lasts."""
        while True:
            running = [pod for pod in self._children.pods if not pod.ended]
            await asyncio.gather(*(self._ask(pod) for pod in running))
            if self._chaos is not None:
                self._kill_if_due([pod.report for pod in running if pod.report is not None and not pod.ended])
            await asyncio.sleep(_POLL_SECONDS if self._chaos is None else _POLL_SECONDS_BEFORE_CHAOS)

    async def _follow(self) -> None:
        """Show what the ranks print, for as long as the run lasts."""
        while True:
            self._output.look(self._children.pods)
            await asyncio.sleep(_FOLLOW_SECONDS)

    async def _ask(self, pod: LocalPod) -> None:
        report = await asyncio.to_thread(fetch_status, pod.endpoints.status_port)
        if report is not None and report.is_of(self._job.uid, pod.attempt):
            pod.on_report(report)
            self._ranks.on_report(pod.name, report, datetime.now(UTC))  # for readers with clocks of their own
            self._changed.set()

    def _kill_if_due(self, reports: list[TrainerReport]) -> None:
        if self._chaos is None:
            return
        victim = find_victim(self._chaos, reports, self._job.spec.nodes * self._job.spec.ranks_per_node)
        if victim is None:
            self._note_if_never_due(reports)
            return
        self._chaos = None
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._display.write_line(f"chaos: rank {victim.rank} (pid {victim.pid}) had already ended")
        else:
            self._killed = True
            self._display.write_line(
                f"chaos: killed rank {victim.rank} (pid {victim.pid}) with SIGKILL at step {victim.step}"
            )

    def _note_if_never_due(self, reports: list[TrainerReport]) -> None:
        """Say it at the first step, once, and not only after the last."""
        trains = next((report for report in reports if report.step), None)
        if self._chaos is None or trains is None or self._chaos_note is not None:
            return
        self._chaos_note = self._chaos.never_due(trains.step, trains.total_steps)
        if self._chaos_note is not None:
            self._display.write_line(f"chaos: {self._chaos_note}")

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks for a snapshot and an end, the second does not ask."""
        now = asyncio.get_running_loop().time()
        if self._stopped_by is None:
            self._stopped_by, self._asked_at = number, now
            self._children.closed = True
            self._display.write_line("stopping: ranks may save before they leave (once more to kill)")
            for pod in self._children.running:
                pod.terminate()
        elif now - self._asked_at >= _SECONDS_OF_ONE_REQUEST:
            for pod in self._children.running:
                pod.kill()
        self._changed.set()

    def _on_ctrl_z(self) -> None:
        """Give the terminal back with its cursor, and stop this process alone: ranks that stand still would be taken
        for hung ones after it.
        """
        self._display.write_line("Ctrl-Z stops only this view: the ranks train on, none is restarted; fg goes on")
        self._display.__exit__()
        asyncio.get_running_loop().call_later(_SECONDS_TO_SHOW, self._stand_still)

    def _stand_still(self) -> None:
        """Until fg. SIGTSTP, and not SIGSTOP: it does nothing where no shell could continue the process."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, self._on_ctrl_z)
        self._display.__enter__()

    async def _take_last_words(self) -> None:
        """After a stop: what the pods said at their end. A gang that had just finished has succeeded all the same."""
        attempt = self._job.status.attempt
        current = [pod for pod in self._children.pods if pod.attempt == attempt and pod.node_rank is not None]
        if current and all(pod.termination is not None and pod.termination.exit_code == 0 for pod in current):
            await self._pass()
            if self._job.status.phase is Phase.SUCCEEDED:
                self._stopped_by = None
                return
        for pod in current:
            report = read_termination(pod.termination.message) if pod.termination else None
            status = with_final_report(self._job.status, report, clock.now())
            self._job = replace(self._job, status=status)
        self._record.write(self._job, self._children.places)

    async def _end_all(self) -> None:
        """Whatever happened above: no process and no scratch is left."""
        for pod in self._children.running:
            pod.kill()
        for pod in self._children.running:
            await pod.wait()
            pod.remove()

    def _failed_log(self) -> Path | None:
        failure = self._job.status.last_failure
        return pod_log(self._machine.shared, self._job.name, failure.pod_name) if failure and failure.pod_name else None

    def _view(self) -> RunView:
        now = clock.now()
        present = [pod for pod in self._children.pods if not pod.deleting]
        live = [pod for pod in present if not pod.ended]
        said = [reports_of(pod.report, pod.name, "", now) for pod in live if pod.report is not None]
        shown = sorted(present, key=lambda pod: (pod.node_rank is None, pod.node_rank, pod.name))
        return RunView(
            job=self._job.name,
            status=self._job.status,
            nodes=tuple(_node_view(pod) for pod in shown),
            started=self._started,
            now=now,
            reports=together(said),
            stopping=self._stopped_by is not None,
        )


def _heard() -> tuple[signal.Signals, ...]:
    """What stops a run: not the end of its terminal where nohup has SIGHUP ignored. Ctrl-C does, although a script has
    SIGINT ignored for what it starts with `&`: it ends the script, and the run would go on unseen.
    """
    hangup = signal.SIGHUP
    return tuple(
        number for number in _STOP_SIGNALS if number is not hangup or signal.getsignal(hangup) != signal.SIG_IGN
    )


def _node_view(pod: LocalPod) -> NodeView:
    return NodeView(
        node_rank=pod.node_rank,
        pod=pod.name,
        phase=str(pod.view().phase),
        pid=pod.pid,
        step=pod.report.step if pod.report else None,
        doing=pod.report.phase if pod.report else "",
        log=pod.log,
    )
