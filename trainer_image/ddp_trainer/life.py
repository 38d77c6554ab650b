"""The processes of one life: a run directory without traces of the life before, pipes for the ranks' stderr, torchrun.

Without torch and with few imports: it is what a pod does first.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from ddp_trainer import run_dir
from ddp_trainer.environment import PodEnvironment, Target
from ddp_trainer.relay import StderrRelay
from ddp_trainer.rendezvous import torchrun_arguments, torchrun_environment, usable_cpus


class Life(NamedTuple):
    """One start of torchrun in the place that `pod` names. `agent` is its pid, a child of this process."""

    pod: PodEnvironment
    agent: int
    relays: Mapping[int, StderrRelay]
    began: float
    """Epoch seconds."""


class CannotStart(Exception):
    """torchrun could not be started; `reason` as in docs/contracts.md section 5."""

    def __init__(self, pod: PodEnvironment, error: OSError) -> None:
        self.reason = "DiskFull" if error.errno == errno.ENOSPC else "WorkerException"
        super().__init__(f"torchrun could not be started with DDPJOB_RUN_DIR={pod.run_dir}: {error}")


def start_life(pod: PodEnvironment, target: Target, began: float | None = None) -> Life:
    """Start torchrun in the place that `pod` names. No process of a life before may be left. Raises CannotStart."""
    try:
        run_dir.clear(pod.run_dir)
        relays = {local: StderrRelay(pod.run_dir, local, _prefix(pod, local)) for local in range(pod.procs_per_node)}
        agent = _start_torchrun(pod, target)
    except OSError as error:
        raise CannotStart(pod, error) from error
    return Life(pod, agent, relays, time.time() if began is None else began)


def _start_torchrun(pod: PodEnvironment, target: Target) -> int:
    """In a session of its own, out of reach of a terminal's signals; returns its pid."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "ddp_trainer.agent", *torchrun_arguments(pod, target)],
        env=torchrun_environment(pod, os.environ, usable_cpus()),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Its exit code is collected with that of every other child, by `processes.reap`.
    agent.returncode = 0
    return agent.pid


def _prefix(pod: PodEnvironment, local_rank: int) -> str:
    return f"[local rank {local_rank}] " if pod.procs_per_node > 1 else ""
