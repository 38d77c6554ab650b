"""Process 1 of a trainer pod: starts torchrun, watches over the ranks, and tells the operator how it ended.

    python -m ddp_trainer.launch --module ddp_trainer.train -- --epochs 3

It starts torchrun first and imports everything else meanwhile, torch never: start-up is time without training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_trainer.contract import processes, run_dir
from ddp_trainer.contract.environment import USAGE, PodEnvironment, Target, parse_pod, parse_target
from ddp_trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USER, UserError
from ddp_trainer.launch.attempt import CannotStart, start_attempt
from ddp_trainer.launch.output import OutputCopy, copy_output
from ddp_trainer.launch.signals import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod to its end. Returns the exit code of docs/contracts.md section 3."""
    stop, start_time = StopSignals(), time.time()
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["-h"], ["--help"]):
        print(f"usage: {USAGE}\n\nRun one pod of a DDPJob. Its place and settings come from the environment.")
        return EXIT_OK
    try:
        target = parse_target(argv)
        pod = _placed(os.environ)
    except UserError as error:
        path = os.environ.get("DDPJOB_TERMINATION_LOG")
        return _report_start_failure(EXIT_USER, "UserError", str(error), None, Path(path) if path else None)
    output = copy_output(pod)
    try:
        return _run(pod, target, stop, start_time, output)
    finally:
        if output is not None:
            output.close()


def _run(pod: PodEnvironment, target: Target, stop: StopSignals, start_time: float, output: OutputCopy | None) -> int:
    processes.allow_files()
    if pod.code is not None:
        failure = _put_code(pod)
        if failure is not None:
            return _report_start_failure(*failure, pod, pod.termination_log)
    try:
        run_dir.forget_port(pod.run_dir)
        waits = pod.node_rank is None or (pod.code is not None and pod.code.requirements is not None)
        first = None if waits else start_attempt(pod, target, start_time)
    except CannotStart as error:
        return _report_start_failure(EXIT_FAILED, error.reason, str(error), pod, pod.termination_log)
    processes.adopt_orphans()
    from ddp_trainer.launch.pod import Pod

    return Pod(pod, target, first, stop, start_time, output).run()


def _placed(env: Mapping[str, str]) -> PodEnvironment:
    """The environment, with the place in the gang that the assignment's files name where there are any."""
    folder = env.get("DDPJOB_ASSIGNMENT_DIR")
    if not folder:
        return parse_pod(env)
    from ddp_trainer.launch.assignment import read_assignment

    return parse_pod(env, read_assignment(Path(folder)))


def _put_code(pod: PodEnvironment) -> tuple[int, str, str] | None:
    """Where the ranks work. Exit code, reason and message if that is not possible."""
    from ddp_trainer.launch.code import put_code, volume_failure

    try:
        put_code(pod)
    except UserError as error:
        return EXIT_USER, "UserError", str(error)
    except OSError as error:
        return EXIT_FAILED, *volume_failure("the submitted code could not be put on the volume", error)
    return None


def _report_start_failure(code: int, reason: str, text: str, pod: PodEnvironment | None, path: Path | None) -> int:
    """Nothing was started: say why where the operator looks."""
    from ddp_trainer.launch.exit.report import report_start_failure

    return report_start_failure(code, reason, text, pod, path)


if __name__ == "__main__":
    sys.exit(main())
