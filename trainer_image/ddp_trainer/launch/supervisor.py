"""Watches over the ranks of one attempt in this pod, and decides when it is over. `pod` runs one after another.

It signals the ranks itself. torchrun's own forwarding goes to whole process groups, DataLoader workers included,
and ends in exit code 1 even after a good save; so torchrun is never signalled, it just sees its ranks leave.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddp_trainer.contract import processes, run_dir
from ddp_trainer.contract.exit_codes import EXIT_OK, EXIT_PREEMPTED
from ddp_trainer.contract.heartbeat import read_heartbeats
from ddp_trainer.contract.outcomes import read_outcomes, record_cut
from ddp_trainer.launch.assignment import LOOK_SECONDS
from ddp_trainer.launch.attempt import Attempt
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence, find_cause
from ddp_trainer.launch.gang_watch import GangWatch, Stall
from ddp_trainer.launch.relay import Relay
from ddp_trainer.launch.run_memory import RunMemory
from ddp_trainer.launch.signals import StopSignals
from ddp_trainer.launch.status.host import ThrottlingWatch
from ddp_trainer.launch.status.pod_state import PodState, RankHeartbeat

TICK_SECONDS = 0.5
SURVIVOR_SECONDS = 10.0
"""How long ranks may outlive one that failed, unless they are saving: nothing wakes them from a NCCL collective."""
HANGING_SECONDS = 3.0
"""How long a rank that steps may be silent once it was asked to leave for a later attempt, or three times its p99."""
LEFT_SECONDS = 0.5
"""How long processes of a script that is done may take to see that it is."""
CLEANERS_SECONDS = 3.0
"""How long those have that remove the shared memory of killed ranks: torch's manager waits for 2 s before it does."""
STALLED_FIRST_SECONDS = 2.0
"""How long the ranks of other nodes stay, for the pod of a stalled rank to take its stack and end."""
AGENT_SECONDS = 10.0
"""How long torchrun may outlive its ranks."""
FINISHED_AGENT_SECONDS = 2.0
"""The same where all ranks are done and another node hosts the store: torchrun has notified the others by then."""
EXIT_BARRIER_SECONDS = 310.0
"""The same on node rank 0, whose torchrun hosts the store that the other nodes still need; its own limit is 300."""
SUPERSEDED_AGENT_SECONDS = 2.0
"""The same where a new attempt waits: all outcomes are written, and the other nodes lose nothing with the store."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended in this pod."""

    cause: ExitCause
    evidence: ExitEvidence
    superseded: bool = False
    """A later attempt had begun, and its ranks were asked to leave."""

    stuck: bool = False
    """The kernel holds on to a process of it, as on a volume or a device that does not answer."""


class Supervisor:
    """One attempt from the start of torchrun to its last process; `run` is called once.

    `superseded` is asked a few times a second whether this pod has a place in a later attempt; None: it never will.
    """

    def __init__(self, attempt: Attempt, stop: StopSignals, superseded: Callable[[], bool] | None = None) -> None:
        self._pod, self._agent, self._stop = attempt.pod, attempt.agent, stop
        self._errors = attempt.errors
        self._relays = (*attempt.printed, *attempt.errors.values())
        self._superseded = superseded
        self._superseded_at: float | None = None
        self._next_look = 0.0
        self._oom_kills = processes.oom_kills()
        self._gang = GangWatch(self._pod)
        self._watch_from = 0.0
        self._memory = RunMemory(self._pod.run_dir)
        self._throttling = ThrottlingWatch()
        self._forwarded = False
        self._killed: set[int] = set()
        self._stall: Stall | None = None
        self._failed_at: float | None = None
        self._ranks_gone_at: float | None = None
        self._agent_code: int | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(stop, selectors.EVENT_READ)
        for relay in self._relays:
            self._selector.register(relay, selectors.EVENT_READ)

    def run(self) -> AttemptResult:
        """Watch until torchrun has ended and no process of this attempt is left; then say why."""
        try:
            self._watch()
            return self._finish()
        finally:
            self._gang.close()
            self._selector.close()
            for relay in self._relays:
                relay.close()

    def _watch(self) -> None:
        tick = TICK_SECONDS if self._superseded is None else LOOK_SECONDS
        while self._agent_code is None:
            self._wait(tick)
            self._reap()
            now = time.monotonic()
            if self._gang.stood_still(now):
                self._watch_from = now + self._pod.stall_min_seconds
            self._throttling.look(now)
            if self._memory.look(now):
                log(f"{self._memory.problem(now)}; what the ranks report is written in the place of what was there")
            if self._agent_code is None:
                self._look_for_a_later_attempt(now)
                self._stop_if_asked(now)
                self._end_what_lingers(now)
                self._end_what_hangs(now)
                self._kill_if_stalled(now)

    def _finish(self) -> AttemptResult:
        """End what is left, and weigh what everyone left behind."""
        if self._agent_code == EXIT_OK:
            self._name_what_is_left()
        self._kill_everything()
        for relay in self._relays:
            relay.drain()
        pod_state = self.pod_state()
        report = run_dir.agent_report(self._pod.run_dir)
        if self._stall is None and self._asked_at is None and self._agent_code != EXIT_OK:
            # ranks that other launchers have ended for a stall die of their absence, maybe before this one knew of it
            found = self._gang.final()
            self._stall = None if found is None else self._gang.save_stacks(found)
        evidence = ExitEvidence(
            wall=time.time(),
            procs=self._pod.procs_per_node,
            nodes=self._pod.nodes,
            live=self._pod.live,
            outcomes=read_outcomes(self._pod.run_dir),
            failures=report.get("failures", ()),
            heartbeats=pod_state.heartbeats,
            started=len(pod_state.ranks),
            stderr={local: relay.last_lines for local, relay in self._errors.items()},
            agent_code=self._agent_code or EXIT_OK,
            rendezvous_error=report.get("rendezvous"),
            torch_error=report.get("torch"),
            stop_requested=self._asked_at is not None,
            stop_time=None if self._asked_at is None else time.time() - (time.monotonic() - self._asked_at),
            killed=frozenset(self._killed),
            stall=None if self._stall is None or not self._stall.here else (self._stall.rank, self._stall.message),
            peer_stall=None if self._stall is None or self._stall.here else self._stall.message,
            oom_killed=processes.oom_kills() > self._oom_kills,
            memory_problem=self._memory.problem(),
        )
        stuck = bool(processes.descendants(os.getpid()))
        return AttemptResult(find_cause(evidence), evidence, superseded=self._superseded_at is not None, stuck=stuck)

    def _name_what_is_left(self) -> None:
        """Log the processes that outlive a script that is done, such as a server that it started."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (left := processes.descendants(os.getpid())) and time.monotonic() < deadline:
            self._wait(0.02)
            self._reap()
        left = [pid for pid in left if not processes.removes_shared_memory(pid)]
        if left:
            names = ", ".join(f"{pid} ({processes.command(pid)})" for pid in left)
            log(f"the script is done; ending the processes that it left: {names}")

    @property
    def _asked_at(self) -> float | None:
        """When the ranks had to leave, by SIGTERM to this pod or for a later attempt."""
        return min((at for at in (self._stop.requested_at, self._superseded_at) if at is not None), default=None)

    def pod_state(self) -> PodState:
        """What the ranks say now; heartbeats of processes that are no rank of this pod any more are left out."""
        ranks = run_dir.registrations(self._pod.run_dir)
        pids = {entry["rank"]: entry["pid"] for entry in ranks}
        heartbeats = [
            heartbeat
            for heartbeat in read_heartbeats(self._pod.run_dir)
            if pids.get(heartbeat["rank"]) == heartbeat["pid"]
        ]
        return PodState(
            now=time.monotonic(),
            wall=time.time(),
            ranks=ranks,
            heartbeats=heartbeats,
            throttling=self._throttling.lately,
        )

    def _wait(self, seconds: float) -> None:
        """Until a child ends, a signal comes, or the time is up; what ranks write meanwhile is passed on."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.fileobj, Relay):
                key.fileobj.relay()
            else:
                self._stop.clear()

    def _reap(self) -> None:
        ended = processes.reap()
        if self._agent in ended:
            self._agent_code = ended[self._agent]

    def _look_for_a_later_attempt(self, now: float) -> None:
        if self._superseded is None or self._superseded_at is not None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._superseded():
            self._superseded_at = now

    def _stop_if_asked(self, now: float) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            return
        if not self._forwarded:
            self._forwarded = True
            ranks = processes.children(self._agent)
            log(f"stopping: SIGTERM to {len(ranks)} ranks, {self._pod.shutdown_seconds:.0f} s to save and leave")
            processes.send(ranks or [self._agent], signal.SIGTERM if ranks else signal.SIGKILL)
        elif now - asked_at > self._pod.shutdown_seconds:
            self._killed |= {entry["pid"] for entry in self._living()}
            self._kill_everything()

    def _end_what_hangs(self, now: float) -> None:
        if self._superseded_at is not None:
            living = {entry["pid"] for entry in self._living()}
            hung = living.intersection(hanging(self.pod_state().heartbeats, self._superseded_at, now))
            self._killed |= hung
            processes.send(hung, signal.SIGKILL)

    def _end_what_lingers(self, now: float) -> None:
        """Survivors of a failed rank, and torchrun once its ranks are gone, get a limited time to leave."""
        ranks = run_dir.registrations(self._pod.run_dir)
        living = [entry for entry in ranks if processes.alive(entry["pid"])]
        if len(living) == len(ranks):
            return
        # of a rank that is another program by now torchrun alone knows how it ended; it ends the others itself then
        outcomes: dict[int, int] = {entry["pid"]: EXIT_OK for entry in ranks if entry.get("replaced")}
        outcomes |= {outcome["pid"]: outcome["exitCode"] for outcome in read_outcomes(self._pod.run_dir)}
        good = all(outcomes.get(entry["pid"]) in (EXIT_OK, EXIT_PREEMPTED) for entry in ranks if entry not in living)
        if not good and self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and living:
            saving = {heartbeat["pid"] for heartbeat in self.pod_state().heartbeats if heartbeat["phase"] == "save"}
            for entry in living:
                limit = self._pod.shutdown_seconds if entry["pid"] in saving else SURVIVOR_SECONDS
                if now - self._failed_at > limit:
                    if entry["pid"] not in self._killed:
                        log(f"another rank has failed; ending rank {entry['rank']}, which did not leave in {limit:g} s")
                    self._killed.add(entry["pid"])
                    processes.send([entry["pid"]], signal.SIGKILL)
        if living or len(ranks) < self._pod.procs_per_node:
            return
        self._ranks_gone_at = self._ranks_gone_at or now
        limit = torchrun_seconds(
            [outcomes.get(entry["pid"]) for entry in ranks],
            hosts_store=self._pod.node_rank == 0,
            asked=self._asked_at is not None,
            superseded=self._superseded_at is not None,
        )
        if now - self._ranks_gone_at > limit:
            self._kill_everything()

    def _kill_if_stalled(self, now: float) -> None:
        if self._asked_at is not None or self._failed_at is not None:
            return
        stall = self._gang.look(now, may_ask=now >= self._watch_from)
        if stall is None:
            self._end_what_hangs_at_the_end(now)
            return
        log(f"stalled: {stall.message}; taking the stacks of all ranks of this pod")
        self._stall = self._gang.save_stacks(stall)
        if not stall.here:
            # the node of the stalled rank reports it first: its ranks end as soon as these are gone
            self._wait(STALLED_FIRST_SECONDS)
        self._kill_everything()

    def _end_what_hangs_at_the_end(self, now: float) -> None:
        if now < self._watch_from:
            return
        pids = {entry["rank"]: entry["pid"] for entry in self._living()}
        for rank in self._gang.hung_at_the_end(now):
            if rank.rank in pids and pids[rank.rank] not in self._killed:
                idle = f"its process, which did not end and was idle for {now - rank.progress_at:.0f} s"
                log(f"the script of rank {rank.rank} is done; ending {idle}")
                record_cut(self._pod.run_dir, rank.rank, idle)
                self._killed.add(pids[rank.rank])
                processes.send([pids[rank.rank]], signal.SIGKILL)

    def _living(self) -> list[dict[str, int]]:
        return [entry for entry in run_dir.registrations(self._pod.run_dir) if processes.alive(entry["pid"])]

    def _kill_everything(self) -> None:
        """SIGKILL for every process below this one, until none is left or the kernel holds on to the rest.

        Those that remove the shared memory of the others do so once these are gone, and end: the /dev/shm of a pod that
        is kept has to do for its next attempt, and a data set may refuse to begin with what is left there. A pod that
        has to go takes it along, and may have little time.
        """
        began = time.monotonic()
        while (left := processes.descendants(os.getpid())) and (took := time.monotonic() - began) < 5.0:
            spared = LEFT_SECONDS if self._stop.requested_at is not None else CLEANERS_SECONDS
            ended = [pid for pid in left if took >= spared or not processes.removes_shared_memory(pid)]
            processes.send(ended, signal.SIGKILL)
            self._wait(0.02)
            self._reap()
        self._reap()
        if self._agent_code is None:
            self._agent_code = -signal.SIGKILL


def torchrun_seconds(exit_codes: Collection[int | None], *, hosts_store: bool, asked: bool, superseded: bool) -> float:
    """How long torchrun may outlive its ranks, whose exit codes are given; None for a rank without an outcome.

    It waits for the torchrun of every other node (the exit barrier), and one of those may never come: torchrun passes
    over the barrier where a rank failed. Only where all ranks are done may ranks of other nodes still need the store;
    ranks that were preempted agreed with all others to leave after the same step.
    """
    if superseded:
        return SUPERSEDED_AGENT_SECONDS
    others_may_train = set(exit_codes) == {EXIT_OK} and not asked
    if others_may_train:
        return EXIT_BARRIER_SECONDS if hosts_store else FINISHED_AGENT_SECONDS
    return AGENT_SECONDS


def hanging(heartbeats: Sequence[RankHeartbeat], asked_at: float, now: float) -> set[int]:
    """The processes that were asked to leave for a later attempt, yet neither step nor save: they wait for a lost peer.

    Where a whole node fell silent nothing wakes them, and they cannot save, since all ranks agree on a last step. Times
    are monotonic seconds.
    """
    return {
        heartbeat["pid"]
        for heartbeat in heartbeats
        if heartbeat["phase"] != "save" and now - max(heartbeat["time"], asked_at) > _patience(heartbeat)
    }


def _patience(heartbeat: RankHeartbeat) -> float:
    p99 = heartbeat["stepSecondsP99"]
    return SURVIVOR_SECONDS if heartbeat["phase"] != "train" or p99 is None else max(HANGING_SECONDS, 3 * p99)
