"""Process 1 of a trainer pod: starts torchrun, watches over the ranks, and tells the operator how it ended.

    python -m ddp_trainer.launch --module ddp_trainer.train -- --epochs 3

It starts torchrun first and imports everything else meanwhile, torch never: start-up is time without training.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer import processes, run_dir
from ddp_trainer.environment import PodEnvironment, Target, parse_environment, parse_target
from ddp_trainer.errors import EXIT_FAILED, EXIT_USER, UserError
from ddp_trainer.relay import StderrRelay
from ddp_trainer.rendezvous import torchrun_arguments, torchrun_environment, usable_cpus
from ddp_trainer.stop import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod to its end. Returns the exit code of docs/contracts.md section 3."""
    stop, start_time = StopSignals(), time.time()
    try:
        target = parse_target(sys.argv[1:] if argv is None else argv)
        pod = parse_environment(os.environ)
    except UserError as error:
        path = os.environ.get("DDPJOB_TERMINATION_LOG")
        return _refuse(EXIT_USER, "UserError", str(error), None, Path(path) if path else None)
    try:
        run_dir.clear(pod.run_dir)
        relays = {local: StderrRelay(pod.run_dir, local, _prefix(pod, local)) for local in range(pod.procs_per_node)}
        agent = start_torchrun(pod, target)
    except OSError as error:
        text = f"torchrun could not be started with DDPJOB_RUN_DIR={pod.run_dir}: {error}"
        reason = "DiskFull" if error.errno == errno.ENOSPC else "WorkerException"
        return _refuse(EXIT_FAILED, reason, text, pod, pod.termination_log)
    processes.adopt_orphans()
    from ddp_trainer.supervisor import Supervisor

    return Supervisor(pod, agent, relays, stop, start_time).run()


def start_torchrun(pod: PodEnvironment, target: Target) -> int:
    """Start torchrun in a session of its own, out of reach of a terminal's signals; returns its pid."""
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


def _refuse(code: int, reason: str, text: str, pod: PodEnvironment | None, path: Path | None) -> int:
    """Nothing was started: say why where the operator looks."""
    from ddp_trainer.report import report_cause
    from ddp_trainer.root_cause import Cause, Ending

    return report_cause(Cause(code, reason, text), pod, Ending(wall=time.time(), procs=0), path)


if __name__ == "__main__":
    sys.exit(main())
