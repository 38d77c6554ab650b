"""A pod on this machine: a tree of processes under `container.py`, its log file and its scratch directory.

A pod is started once and ends once. Its `view()` is what `core.plan` decides from, with the words and numbers
that a kubelet would report: phase, exit code, the text of the termination message.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ddpjob_operator.core.values.names import LABEL_NODES
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.local import clock
from ddpjob_operator.local.assignment import write_assignment
from ddpjob_operator.local.environment import Command, Endpoints
from ddpjob_operator.local.network import LOOPBACK

_CONTAINER = Path(__file__).with_name("container.py")
_MESSAGE_LIMIT = 4096


def make_scratch(pod: str) -> Path:
    """A private directory for heartbeats and the termination message: in memory where the machine has /dev/shm."""
    memory = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory of an unpredictable name there
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"ddpjob-{pod}-", dir=parent))


def log_header(pod: str, uid: str, env: Mapping[str, str], now: datetime) -> str:
    """The line before what a pod prints; of one of the gang, whose variables are in `env`, with the job and its ranks
    (docs/contracts.md section 6).
    """
    job, ranks = env.get("DDPJOB_UID"), env.get("DDPJOB_PROCS_PER_NODE")
    of_gang = f" of {job} with {ranks} ranks" if job and ranks else ""
    return f"---- {now:%Y-%m-%dT%H:%M:%SZ} {pod}{of_gang} ({uid}) starts"


@dataclass(slots=True)
class LocalPod:
    """One node of the gang. `changed` is called whenever what `view()` says may have changed."""

    name: str
    uid: str
    attempt: int
    node_rank: int | None
    host: str
    endpoints: Endpoints
    log: Path
    grace_seconds: float
    changed: Callable[[], None]
    log_start: int = 0
    """Where its output begins in the log, which pods of its name share."""

    seat: int = 0
    """Whose share of this machine's GPUs it has."""

    nodes: int | None = None
    """Size of the gang that it was last assigned to, if that can change."""

    report: TrainerReport | None = None
    """The last `/status` answer of this pod's launcher."""

    ready_since: datetime | None = None
    """When its launcher first answered for the place that it has."""

    deleting: bool = False
    gone_by: datetime | None = None
    termination: Termination | None = None
    _process: asyncio.subprocess.Process | None = None
    _tether: int | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _watch: asyncio.Task[None] | None = None
    _grace: asyncio.TimerHandle | None = None

    async def start(self, command: Command, labels: Mapping[str, str] | None = None) -> None:
        """Start the command; its output is appended to the log. With LABEL_NODES among `labels`, the files of the
        assignment are there as well.

        Raises:
            OSError: if the log cannot be opened or no process can be started.
            ValueError: if an argument or a variable holds what no process can be given, a NUL.
        """
        self.endpoints.run_dir.mkdir(parents=True, exist_ok=True)
        self.endpoints.termination_log.touch()
        if labels and LABEL_NODES in labels:
            self.assign(self.attempt, self.node_rank, int(labels[LABEL_NODES]))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        held, given = _tether()
        try:
            with self.log.open("ab") as log:
                header = log_header(self.name, self.uid, command.env, datetime.now(UTC))
                self.log_start = log.tell() + len(header) + 1
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_CONTAINER), str(self.endpoints.scratch), header, *command.argv),
                    env=command.env,
                    stdin=given,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the runner, which then asks the launchers to stop
                )
        except BaseException:
            os.close(held)
            self._ended.set()
            raise
        finally:
            os.close(given)
        self._tether = held
        self._watch = asyncio.create_task(self._wait(self._process), name=f"watch {self.name}")

    def assign(self, attempt: int, node_rank: int | None, nodes: int) -> None:
        """Give the pod another place in the gang; its launcher reads it from the files.

        Raises:
            OSError: if they cannot be written.
        """
        write_assignment(self.endpoints.assignment_dir, attempt, node_rank, nodes)
        self.attempt, self.node_rank, self.nodes = attempt, node_rank, nodes
        self.report = self.ready_since = None  # of another place
        self.changed()

    def on_report(self, report: TrainerReport) -> None:
        """Take in an answer of its launcher."""
        self.report = report
        self.ready_since = self.ready_since or clock.now()

    @property
    def pid(self) -> int | None:
        """Process id of the pod's first process while it lives."""
        return self._process.pid if self._process and not self.ended else None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def view(self) -> PodView:
        return PodView(
            name=self.name,
            uid=self.uid,
            attempt=self.attempt,
            node_rank=self.node_rank,
            phase=self._phase(),
            ready=self.report is not None and not self.ended,
            ready_since=self.ready_since if not self.ended else None,
            nodes=self.nodes,
            scheduled=True,
            deleting=self.deleting,
            gone_by=self.gone_by,
            node_name=self.host,
            pod_ip=LOOPBACK,
            termination=self.termination,
        )

    def terminate(self, grace_seconds: float | None = None) -> None:
        """SIGTERM to the launcher now, SIGKILL to all of the pod after the grace; the first call counts."""
        if self.ended or self._process is None or self._grace is not None:
            return
        with suppress(ProcessLookupError):  # it has just ended by itself: asyncio drops it before it says so
            self._process.send_signal(signal.SIGTERM)
        self._grace = asyncio.get_running_loop().call_later(
            self.grace_seconds if grace_seconds is None else grace_seconds, self.kill
        )

    def kill(self) -> None:
        """SIGKILL to every process of the pod."""
        if self._tether is not None:
            with suppress(BrokenPipeError):  # it has just ended by itself
                os.write(self._tether, b"\0")
            self._release()

    async def wait(self) -> None:
        """Return once no process of the pod is left."""
        await self._ended.wait()

    def remove(self) -> None:
        """Remove the scratch of a pod that has ended, or that never started."""
        shutil.rmtree(self.endpoints.scratch, ignore_errors=True)

    def failed_to_start(self, reason: str) -> None:
        """Count as a pod whose container could not be started (exit code 128, as container runtimes report it)."""
        self.termination = Termination(128, reason="StartError", message=reason, finished_at=clock.now())
        self._ended.set()
        self.changed()

    def _release(self) -> None:
        if self._tether is not None:
            os.close(self._tether)
            self._tether = None

    def _phase(self) -> PodPhase:
        if self.termination is None:
            return PodPhase.RUNNING if self._process else PodPhase.PENDING
        return PodPhase.SUCCEEDED if self.termination.exit_code == 0 else PodPhase.FAILED

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._grace is not None:
            self._grace.cancel()
        self._release()
        self.termination = Termination(
            exit_code=code if code >= 0 else 128 - code,
            signal=-code if code < 0 else None,
            reason="Completed" if code == 0 else "Error",
            message=_read_message(self.endpoints.termination_log),
            finished_at=clock.now(),
        )
        self._ended.set()
        self.changed()


def _tether() -> tuple[int, int]:
    """The end of a pipe that the runner holds and the one that the pod's first process reads (see `container`)."""
    given, held = os.pipe()
    return held, given


def _read_message(path: Path) -> str:
    """The termination message as the kubelet takes it: at most 4,096 bytes."""
    try:
        with path.open("rb") as file:
            return file.read(_MESSAGE_LIMIT).decode(errors="replace")
    except OSError:
        return ""
