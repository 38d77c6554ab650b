"""The processes of one attempt in this pod: a clean run directory, pipes for what the ranks print, torchrun.

Without torch and with few imports: it is what a pod does first. A pod that waits for its next attempt has torchrun
started already, with torch imported: that is half of what a start costs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddp_trainer.contract import run_dir
from ddp_trainer.contract.environment import PodEnvironment, Target
from ddp_trainer.launch.code import volume_failure
from ddp_trainer.launch.interface import gloo_interface
from ddp_trainer.launch.relay import Relay, StderrRelay
from ddp_trainer.launch.torchrun import place_variables, torchrun_arguments, torchrun_environment, usable_cpus


class Attempt(NamedTuple):
    """One start of torchrun in the place that `pod` names. `agent` is its pid, a child of this process."""

    pod: PodEnvironment
    agent: int
    errors: Mapping[int, StderrRelay]
    """By local rank."""
    printed: Sequence[Relay]
    """On stdout, where there are several ranks."""
    began: float
    """Epoch seconds."""


class CannotStart(Exception):
    """torchrun could not be started; `reason` as in docs/contracts.md section 5."""

    def __init__(self, pod: PodEnvironment, error: OSError) -> None:
        self.reason, message = volume_failure(f"torchrun could not be started with DDPJOB_RUN_DIR={pod.run_dir}", error)
        super().__init__(message)


class PreparedTorchrun(NamedTuple):
    """A torchrun that has no place yet: its pid, and the end of a pipe where it waits for one."""

    agent: int
    pipe: int

    def give_up(self) -> None:
        """There will be no place for it."""
        os.close(self.pipe)


def prepare_torchrun(pod: PodEnvironment) -> PreparedTorchrun | None:
    """Start torchrun as far as it goes without a place; None if this machine gives no process."""
    given, pipe = os.pipe()
    try:
        agent = _start_torchrun(pod, [run_dir.PREPARED], given)
    except OSError:
        os.close(pipe)
        return None
    finally:
        os.close(given)
    return PreparedTorchrun(agent, pipe)


def start_attempt(
    pod: PodEnvironment, target: Target, began: float | None = None, prepared: PreparedTorchrun | None = None
) -> Attempt:
    """Start torchrun in the place that `pod` names, or give it to the prepared one. No process of an earlier attempt
    may be left. Raises CannotStart.
    """
    arguments = torchrun_arguments(pod, target)
    try:
        run_dir.clear(pod.run_dir)
        ranks = range(pod.procs_per_node)
        errors = {local: StderrRelay(pod.run_dir, local, _prefix(local)) for local in ranks}
        printed = [
            Relay(run_dir.stdout_pipe(pod.run_dir, local), "stdout", _prefix(local))
            for local in ranks
            if len(ranks) > 1
        ]
        agent = None if prepared is None else _release(prepared, pod, arguments)
        if agent is None:
            agent = _start_torchrun(pod, arguments)
    except OSError as error:
        raise CannotStart(pod, error) from error
    return Attempt(pod, agent, errors, printed, time.time() if began is None else began)


def _release(prepared: PreparedTorchrun, pod: PodEnvironment, arguments: Sequence[str]) -> int | None:
    """Its pid once it has its orders; None if it is gone."""
    run_dir.write_agent_orders(pod.run_dir, arguments, place_variables(pod, os.environ))
    try:
        os.write(prepared.pipe, b"\n")
    except BrokenPipeError:
        return None
    finally:
        os.close(prepared.pipe)
    return prepared.agent


def _start_torchrun(pod: PodEnvironment, arguments: Sequence[str], stdin: int = subprocess.DEVNULL) -> int:
    """In a session of its own, out of reach of a terminal's signals; returns its pid."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "ddp_trainer.rank.agent", *arguments],
        env=torchrun_environment(pod, os.environ, usable_cpus(), gloo_interface(pod.pod_ip)),
        stdin=stdin,
        start_new_session=True,
    )
    # Its exit code is collected with that of every other child, by `processes.reap`.
    agent.returncode = 0
    return agent.pid


def _prefix(local_rank: int) -> str:
    return f"[local rank {local_rank}] " if local_rank else ""
