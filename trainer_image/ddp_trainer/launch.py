"""Process 1 of a trainer pod: starts torchrun, watches over the ranks, and tells the operator how it ended.

    python -m ddp_trainer.launch --module ddp_trainer.train -- --epochs 3

It starts torchrun first and everything else beside it, and never imports torch: start-up is time without training.
It signals the ranks itself. torchrun's own forwarding goes to whole process groups, DataLoader workers included,
and ends in exit code 1 even after a good save; so torchrun is never signalled, it just sees its ranks leave.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ddp_trainer import processes, run_dir, termination
from ddp_trainer.environment import PodEnvironment, Target, parse_environment, parse_target
from ddp_trainer.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER, UserError
from ddp_trainer.heartbeat import read_heartbeats
from ddp_trainer.json_files import read_json
from ddp_trainer.outcomes import read_outcomes
from ddp_trainer.relay import StderrRelay
from ddp_trainer.rendezvous import torchrun_arguments, torchrun_environment, usable_cpus
from ddp_trainer.status import Moment, status
from ddp_trainer.termination import Cause, Ending
from ddp_trainer.watchdog import Limits, ranks_of, stalled

TICK_SECONDS = 0.5
SURVIVOR_SECONDS = 10.0
"""How long ranks may outlive one that failed, unless they are saving: nothing wakes them from a NCCL collective."""
AGENT_SECONDS = 10.0
"""How long torchrun may outlive its ranks."""
EXIT_BARRIER_SECONDS = 310.0
"""The same on node rank 0, whose torchrun hosts the store that the other nodes still need; its own limit is 300."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod to its end. Returns the exit code of docs/contracts.md section 3."""
    launch = Launch()
    try:
        target = parse_target(sys.argv[1:] if argv is None else argv)
        pod = parse_environment(os.environ)
    except UserError as error:
        return _refuse(error)
    try:
        launch.start(pod, target)
    except OSError as error:
        cause = Cause(EXIT_FAILED, "WorkerException", f"cannot start a pod in DDPJOB_RUN_DIR={pod.run_dir}: {error}")
        return _report(cause, pod, Ending(wall=time.time(), procs=pod.procs_per_node), pod.termination_log)
    launch.supervise()
    return launch.finish()


class Launch:
    """One pod's life. The clock is monotonic; `start`, `supervise` and `finish` are called once, in this order."""

    def __init__(self) -> None:
        # Process 1 ignores signals that it has no handler for, so these come before anything else.
        self._stop_requested_at: float | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.start_time = time.time()
        self._oom_kills = processes.oom_kills()
        self._forwarded = False
        self._killed: set[int] = set()
        self._stall: tuple[int, str] | None = None
        self._failed_at: float | None = None
        self._ranks_gone_at: float | None = None
        self._agent_code: int | None = None

    def start(self, pod: PodEnvironment, target: Target) -> None:
        """Start torchrun and the status page. Raises OSError if the run directory cannot be used."""
        self._pod = pod
        run_dir.clear(pod.run_dir)
        prefixed = pod.procs_per_node > 1
        self._relays = {
            local: StderrRelay(pod.run_dir, local, f"[local rank {local}] " if prefixed else "")
            for local in range(pod.procs_per_node)
        }
        agent = subprocess.Popen(
            [sys.executable, "-m", "ddp_trainer.agent", *torchrun_arguments(pod, target)],
            env=torchrun_environment(pod, os.environ, usable_cpus()),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._agent = agent.pid
        # Its exit code is collected with that of every other child, by `processes.reap`.
        agent.returncode = 0
        processes.adopt_orphans()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for relay in self._relays.values():
            self._selector.register(relay, selectors.EVENT_READ)
        self._limits = Limits(pod.stall_min_seconds, pod.stall_max_seconds)
        self._watch_from = 0.0
        threading.Thread(target=self._serve, name="status", daemon=True).start()

    def supervise(self) -> None:
        """Returns once torchrun has ended, by itself or because it was killed."""
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

    def finish(self) -> int:
        """End what is left, write the termination message, and give the exit code."""
        self._kill_everything()
        for relay in self._relays.values():
            relay.drain()
        moment = self.moment()
        report = read_json(self._pod.run_dir / "torchrun" / "report.json") or {}
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
            stop_requested=self._stop_requested_at is not None,
            killed=frozenset(self._killed),
            stall=self._stall,
            oom_killed=processes.oom_kills() > self._oom_kills,
        )
        return _report(termination.find_cause(ending), self._pod, ending, self._pod.termination_log)

    def moment(self) -> Moment:
        """What the ranks say now; heartbeats of processes that are no rank of this pod any more are left out."""
        ranks = run_dir.registrations(self._pod.run_dir)
        pids = {entry["rank"]: entry["pid"] for entry in ranks}
        beats = [beat for beat in read_heartbeats(self._pod.run_dir) if pids.get(beat["rank"]) == beat["pid"]]
        return Moment(now=time.monotonic(), wall=time.time(), ranks=ranks, beats=beats)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        # The first one counts: ranks that are saving must not be disturbed by an impatient second.
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()

    def _wait(self, seconds: float) -> None:
        """Until a child ends, a signal comes, or the time is up; what ranks write meanwhile is passed on."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.fileobj, StderrRelay):
                key.fileobj.relay()
            else:
                self._wake_read.recv(4096)

    def _reap(self) -> None:
        ended = processes.reap()
        if self._agent in ended:
            self._agent_code = ended[self._agent]

    def _stop_if_asked(self, now: float) -> None:
        if self._stop_requested_at is None:
            return
        if not self._forwarded:
            self._forwarded = True
            ranks = processes.children(self._agent)
            _log(f"stopping: SIGTERM to {len(ranks)} ranks, {self._pod.shutdown_seconds:.0f} s to save and leave")
            processes.send(ranks or [self._agent], signal.SIGTERM if ranks else signal.SIGKILL)
        elif now - self._stop_requested_at > self._pod.shutdown_seconds:
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
        hosts_store = self._pod.node_rank == 0 and good and self._stop_requested_at is None
        if now - self._ranks_gone_at > (EXIT_BARRIER_SECONDS if hosts_store else AGENT_SECONDS):
            self._kill_everything()

    def _kill_if_stalled(self, now: float) -> None:
        if self._stop_requested_at is not None or self._failed_at is not None or now < self._watch_from:
            return
        living = {entry["pid"]: entry for entry in self._living()}
        beats = [beat for beat in self.moment().beats if beat["pid"] in living]
        verdict = stalled(ranks_of(beats, {pid: processes.state(pid) for pid in living}), now, self._limits)
        if verdict is None:
            return
        _log(f"stalled: {verdict.message}; taking the stacks of all ranks of this pod")
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
                self._pod.status_port, lambda: status(self._pod, self.start_time, self.moment()), page
            )
        except OSError as error:
            _log(f"no /status and /metrics: port {self._pod.status_port} cannot be used: {error}")
            return
        write_port(self._pod.run_dir, server.server_address[1])
        server.serve_forever()


def _refuse(error: UserError) -> int:
    """The pod was started wrongly: say so where the operator looks, if that much is known."""
    path = os.environ.get("DDPJOB_TERMINATION_LOG", "")
    cause = Cause(EXIT_USER, "UserError", str(error))
    return _report(cause, None, Ending(wall=time.time(), procs=0), Path(path) if path else None)


def _report(cause: Cause, pod: PodEnvironment | None, ending: Ending, path: Path | None) -> int:
    message = termination.redacted(termination.message_of(cause, pod, ending), os.environ)
    _log(f"{message['outcome']} ({cause.reason}): {message['message']}")
    if path is not None:
        try:
            termination.write(path, termination.encode(message))
        except OSError as error:
            _log(f"the termination message cannot be written: {error}")
    return cause.exit_code


def _log(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
