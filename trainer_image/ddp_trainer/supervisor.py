"""Watches over the ranks of one pod and decides when their life is over.

It signals the ranks itself. torchrun's own forwarding goes to whole process groups, DataLoader workers included,
and ends in exit code 1 even after a good save; so torchrun is never signalled, it just sees its ranks leave.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Mapping

from ddp_trainer import processes, run_dir
from ddp_trainer.environment import PodEnvironment
from ddp_trainer.errors import EXIT_OK, EXIT_PREEMPTED
from ddp_trainer.heartbeat import read_heartbeats
from ddp_trainer.outcomes import read_outcomes
from ddp_trainer.relay import StderrRelay
from ddp_trainer.report import log, report_cause
from ddp_trainer.root_cause import Ending, find_cause
from ddp_trainer.status import Moment, status
from ddp_trainer.stop import StopSignals
from ddp_trainer.watchdog import Limits, ranks_of, stalled

TICK_SECONDS = 0.5
SURVIVOR_SECONDS = 10.0
"""How long ranks may outlive one that failed, unless they are saving: nothing wakes them from a NCCL collective."""
AGENT_SECONDS = 10.0
"""How long torchrun may outlive its ranks."""
EXIT_BARRIER_SECONDS = 310.0
"""The same on node rank 0, whose torchrun hosts the store that the other nodes still need; its own limit is 300."""


class Supervisor:
    """One pod from the start of torchrun to the termination message; `run` is called once.

    `agent` is torchrun's pid, a child of this process. `start_time` is when the pod began, in epoch seconds.
    """

    def __init__(
        self, pod: PodEnvironment, agent: int, relays: Mapping[int, StderrRelay], stop: StopSignals, start_time: float
    ) -> None:
        self._pod, self._agent, self._relays, self._stop = pod, agent, relays, stop
        self._start_time = start_time
        self._oom_kills = processes.oom_kills()
        self._limits = Limits(pod.stall_min_seconds, pod.stall_max_seconds)
        self._watch_from = 0.0
        self._forwarded = False
        self._killed: set[int] = set()
        self._stall: tuple[int, str] | None = None
        self._failed_at: float | None = None
        self._ranks_gone_at: float | None = None
        self._agent_code: int | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(stop, selectors.EVENT_READ)
        for relay in relays.values():
            self._selector.register(relay, selectors.EVENT_READ)

    def run(self) -> int:
        """Watch until torchrun has ended, report why, and return the exit code of docs/contracts.md section 3."""
        threading.Thread(target=self._serve, name="status", daemon=True).start()
        self._watch()
        return self._finish()

    def _watch(self) -> None:
        last = time.monotonic()
        while self._agent_code is None:
            self._wait(TICK_SECONDS)
            self._reap()
            now = time.monotonic()
            if now - last > 10 * TICK_SECONDS:
                # The whole pod stood still, as on a paused node: silence up to now says nothing about the ranks.
                self._watch_from = now + self._limits.min_seconds
            last = now
            if self._agent_code is None:
                self._stop_if_asked(now)
                self._end_what_lingers(now)
                self._kill_if_stalled(now)

    def _finish(self) -> int:
        """End what is left, write the termination message, and give the exit code."""
        self._kill_everything()
        for relay in self._relays.values():
            relay.drain()
        moment = self.moment()
        report = run_dir.agent_report(self._pod.run_dir)
        ending = Ending(
            wall=time.time(),
            procs=self._pod.procs_per_node,
            outcomes=read_outcomes(self._pod.run_dir),
            failures=report.get("failures", ()),
            beats=moment.beats,
            started=len(moment.ranks),
            stderr={local: relay.last_lines for local, relay in self._relays.items()},
            agent_code=self._agent_code or EXIT_OK,
            rendezvous_error=report.get("rendezvous"),
            stop_requested=self._stop.requested_at is not None,
            killed=frozenset(self._killed),
            stall=self._stall,
            oom_killed=processes.oom_kills() > self._oom_kills,
        )
        return report_cause(find_cause(ending), self._pod, ending, self._pod.termination_log)

    def moment(self) -> Moment:
        """What the ranks say now; heartbeats of processes that are no rank of this pod any more are left out."""
        ranks = run_dir.registrations(self._pod.run_dir)
        pids = {entry["rank"]: entry["pid"] for entry in ranks}
        beats = [beat for beat in read_heartbeats(self._pod.run_dir) if pids.get(beat["rank"]) == beat["pid"]]
        return Moment(now=time.monotonic(), wall=time.time(), ranks=ranks, beats=beats)

    def _wait(self, seconds: float) -> None:
        """Until a child ends, a signal comes, or the time is up; what ranks write meanwhile is passed on."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.fileobj, StderrRelay):
                key.fileobj.relay()
            else:
                self._stop.clear()

    def _reap(self) -> None:
        ended = processes.reap()
        if self._agent in ended:
            self._agent_code = ended[self._agent]

    def _stop_if_asked(self, now: float) -> None:
        if self._stop.requested_at is None:
            return
        if not self._forwarded:
            self._forwarded = True
            ranks = processes.children(self._agent)
            log(f"stopping: SIGTERM to {len(ranks)} ranks, {self._pod.shutdown_seconds:.0f} s to save and leave")
            processes.send(ranks or [self._agent], signal.SIGTERM if ranks else signal.SIGKILL)
        elif now - self._stop.requested_at > self._pod.shutdown_seconds:
            self._killed |= {entry["pid"] for entry in self._living()}
            self._kill_everything()

    def _end_what_lingers(self, now: float) -> None:
        """Survivors of a failed rank, and torchrun once its ranks are gone, get a limited time to leave."""
        ranks = run_dir.registrations(self._pod.run_dir)
        living = [entry for entry in ranks if processes.alive(entry["pid"])]
        if len(living) == len(ranks):
            return
        outcomes = {outcome["pid"]: outcome["exitCode"] for outcome in read_outcomes(self._pod.run_dir)}
        good = all(outcomes.get(entry["pid"]) in (EXIT_OK, EXIT_PREEMPTED) for entry in ranks if entry not in living)
        if not good and self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and living:
            saving = {beat["pid"] for beat in self.moment().beats if beat["phase"] == "save"}
            for entry in living:
                limit = self._pod.shutdown_seconds if entry["pid"] in saving else SURVIVOR_SECONDS
                if now - self._failed_at > limit:
                    self._killed.add(entry["pid"])
                    processes.send([entry["pid"]], signal.SIGKILL)
        if living or len(ranks) < self._pod.procs_per_node:
            return
        self._ranks_gone_at = self._ranks_gone_at or now
        hosts_store = self._pod.node_rank == 0 and good and self._stop.requested_at is None
        if now - self._ranks_gone_at > (EXIT_BARRIER_SECONDS if hosts_store else AGENT_SECONDS):
            self._kill_everything()

    def _kill_if_stalled(self, now: float) -> None:
        if self._stop.requested_at is not None or self._failed_at is not None or now < self._watch_from:
            return
        living = {entry["pid"]: entry for entry in self._living()}
        beats = [beat for beat in self.moment().beats if beat["pid"] in living]
        verdict = stalled(ranks_of(beats, {pid: processes.state(pid) for pid in living}), now, self._limits)
        if verdict is None:
            return
        log(f"stalled: {verdict.message}; taking the stacks of all ranks of this pod")
        from ddp_trainer.stacks import dump_stacks, innermost_frame, save_stacks

        by_local = dump_stacks(self._pod.run_dir, {entry["localRank"]: pid for pid, entry in living.items()})
        self._kill_everything()
        texts = {entry["rank"]: by_local[entry["localRank"]] for entry in living.values()}
        name = f"stacks-attempt-{self._pod.attempt}-node-{self._pod.node_rank}.txt"
        path = save_stacks(texts, verdict.message, [self._pod.log_dir, self._pod.run_dir], name)
        frames = "; ".join(
            f"rank {rank} stood in {innermost_frame(text) or 'an unknown place (no stack)'}"
            for rank, text in sorted(texts.items())
        )
        self._stall = (verdict.rank, f"{verdict.message}. {frames}. Stacks: {path or 'could not be saved'}")

    def _living(self) -> list[dict[str, int]]:
        return [entry for entry in run_dir.registrations(self._pod.run_dir) if processes.alive(entry["pid"])]

    def _kill_everything(self) -> None:
        """SIGKILL for every process below this one, until none is left or the kernel holds on to the rest."""
        deadline = time.monotonic() + 5.0
        while (left := processes.descendants(os.getpid())) and time.monotonic() < deadline:
            processes.send(left, signal.SIGKILL)
            self._wait(0.02)
            self._reap()
        self._reap()
        if self._agent_code is None:
            self._agent_code = -signal.SIGKILL

    def _serve(self) -> None:
        # imported beside torchrun's own start, not before it
        from ddp_trainer.metrics import metrics_page
        from ddp_trainer.status_server import StatusServer, write_port

        page = metrics_page(self._pod, self.moment)
        try:
            server = StatusServer(
                self._pod.status_port, lambda: status(self._pod, self._start_time, self.moment()), page
            )
        except OSError as error:
            log(f"no /status and /metrics: port {self._pod.status_port} cannot be used: {error}")
            return
        write_port(self._pod.run_dir, server.server_address[1])
        server.serve_forever()
