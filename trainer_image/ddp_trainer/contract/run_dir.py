"""What the processes of a pod leave for each other in `$DDPJOB_RUN_DIR`, memory-backed and gone with the pod.

ranks/local-<K>.json      which rank runs as local rank K, under which pid
heartbeats/rank-<N>.json  where it stands (heartbeat.py)
outcomes/rank-<N>.json    how it ended (outcomes.py)
stacks/local-<K>.txt      its Python stacks, once it was asked for them
stderr/local-<K>          the named pipe that its stderr goes through
stdout/local-<K>          the same of its stdout, where a pod has several ranks
torchrun/orders.json      arguments and environment of a prepared torchrun (launch/attempt.py)
torchrun/report.json      exit code or signal of each rank that failed (rank/agent.py)
port                      where the launcher serves /status
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_trainer.contract.json_files import read_json, reserve, write_json

STACK_SIGNAL = signal.SIGRTMIN + 5
"""Asks a rank for the Python stacks of its threads. A real-time signal: scripts and NCCL use SIGUSR1 and SIGUSR2."""

PREPARED = "--prepared"
"""The argument of a torchrun (rank/agent.py) that finds its arguments in its orders."""

JOIN_TIMEOUT_SECONDS = 600
"""How long a node waits for the others: an image pull on a slow node, within the operator's own deadlines."""

_REPORT_BYTES = 16 << 10
_OURS = ("ranks", "heartbeats", "outcomes", "stacks", "stderr", "stdout", "torchrun")


def clear(run_dir: Path) -> None:
    """Begin an attempt: remove what an earlier one left. Raises OSError if it cannot be written.

    The folders stay: the thread that serves /status may be reading them.
    """
    for name in _OURS:
        (run_dir / name).mkdir(parents=True, exist_ok=True)
        for entry in (run_dir / name).iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def forget_port(run_dir: Path) -> None:
    """Begin a pod: its former process is gone. All attempts in one pod share its port."""
    with contextlib.suppress(OSError):
        (run_dir / "port").unlink()


def register(run_dir: Path, rank: int, local_rank: int, pid: int, *, replaced: bool = False) -> None:
    """Say which process a rank is. `replaced`: it is another program now (`os.execv`), and leaves no outcome."""
    entry = {"rank": rank, "localRank": local_rank, "pid": pid, "time": time.monotonic(), "replaced": replaced}
    write_json(run_dir / "ranks" / f"local-{local_rank}.json", entry)


def registrations(run_dir: Path) -> list[dict[str, Any]]:
    """The ranks of this pod that have started, by rank: rank, localRank, pid, time (monotonic seconds), replaced."""
    read = (read_json(path) for path in (run_dir / "ranks").glob("local-*.json"))
    return sorted((entry for entry in read if entry is not None), key=lambda entry: entry["rank"])


def stack_file(run_dir: Path, local_rank: int) -> Path:
    """Where a rank's Python stacks go when it gets STACK_SIGNAL."""
    return run_dir / "stacks" / f"local-{local_rank}.txt"


def stderr_pipe(run_dir: Path, local_rank: int) -> Path:
    """The named pipe through which the launcher reads a rank's stderr, if it made one."""
    return run_dir / "stderr" / f"local-{local_rank}"


def stdout_pipe(run_dir: Path, local_rank: int) -> Path:
    """The same for what it prints on stdout, where a pod has several ranks."""
    return run_dir / "stdout" / f"local-{local_rank}"


def write_agent_orders(run_dir: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    write_json(_agent_orders(run_dir), {"arguments": list(arguments), "environment": dict(environment)})


def read_agent_orders(run_dir: Path) -> dict[str, Any]:
    """`arguments` of torchrun, and its `environment`."""
    orders: dict[str, Any] = json.loads(_agent_orders(run_dir).read_bytes())
    return orders


def agent_report(run_dir: Path) -> dict[str, Any]:
    """What torchrun knew of failed ranks: `failures` (rank, localRank, pid, exitCode, time in epoch seconds, in the
    order in which it saw them), in `rendezvous` why the nodes did not find each other, and in `torch` why there is no
    torchrun.
    """
    return read_json(_agent_report(run_dir)) or {}


def write_agent_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher then goes by torchrun's exit code
        write_json(_agent_report(run_dir), report)


def reserve_agent_report(run_dir: Path) -> None:
    """Have memory for it before the ranks run, which may use up what there is."""
    with contextlib.suppress(OSError):
        reserve(_agent_report(run_dir), _REPORT_BYTES)


def _agent_orders(run_dir: Path) -> Path:
    return run_dir / "torchrun" / "orders.json"


def _agent_report(run_dir: Path) -> Path:
    return run_dir / "torchrun" / "report.json"
