"""`ddpjob run`: run one job on this machine and report its result."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ddpjob_operator.api.status import DDPJobStatus, Phase, Progress
from ddpjob_operator.cli.output import in_background
from ddpjob_operator.cli.parameters import FAILED, REFUSED, SUCCEEDED
from ddpjob_operator.core.manifests.code import part_name
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.local.chaos import KillRank, parse_chaos
from ddpjob_operator.local.display import display_for, without_controls
from ddpjob_operator.local.environment import Machine, MountedCode
from ddpjob_operator.local.machine import different_here, missing_here, program_in_words, this_machine
from ddpjob_operator.local.observed import short, success_in_words
from ddpjob_operator.local.output import Logs
from ddpjob_operator.local.runner import Outcome, Runner
from ddpjob_operator.local.volume import (
    VolumeError,
    created_after_others,
    folder_is_gone,
    has_begun_anew,
    has_written_files,
    lock_job,
    log_tail,
    newest_snapshot,
    open_shared,
    pod_log,
)
from ddpjob_operator.submit.job import Submission
from ddpjob_operator.submit.pack import PackedCode

_TAIL_LINES = 20
_SHOWN = {
    Logs.ALL: "showing the output of all ranks",
    Logs.RANK: "showing the output of rank 0",
    Logs.NONE: "showing no output of the ranks",
}


def run(submission: Submission, shared: Path, chaos: str | None, logs: Logs = Logs.RANK) -> int:
    """Run a job to its end and say how it ended; the exit code of the command."""
    job = submission.job
    try:
        fault = parse_chaos(chaos, job.ranks) if chaos else None
    except ValueError as error:
        return _refuse(f"--chaos: {error}")
    try:
        folder = open_shared(shared)
        with _mounted(submission.code) as code:
            machine = replace(this_machine(folder), code=code)
            if problems := missing_here(job, machine):
                return _refuse(*problems)
            with lock_job(folder, job.name):
                job = replace(job, created=created_after_others(folder, job.name, job.created))
                outcome = _run(replace(submission, job=job), machine, fault, logs)
                return _conclude(job, outcome, fault, _to_resume_from(folder, job))
    except VolumeError as error:
        return _refuse(str(error))
    except OSError as error:
        if folder_is_gone():
            raise
        print(f"error: {job.name} stopped: {error}; fix this and run the command again", file=sys.stderr)
        return FAILED


@contextmanager
def _mounted(code: PackedCode | None) -> Iterator[MountedCode | None]:
    """The parts of packed code in a directory, as a pod has them, for as long as the run lasts."""
    if code is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ddpjob-code-") as folder:
        for number, part in enumerate(code.parts):
            (Path(folder) / part_name(number)).write_bytes(part)
        yield MountedCode(Path(folder), code.folder)


def _run(submission: Submission, machine: Machine, fault: KillRank | None, logs: Logs) -> Outcome:
    job, code = submission.job, submission.code
    resume_from = newest_snapshot(machine.shared, job.name)
    with in_background(), display_for(sys.stdout) as display:
        display.write_line(f"{job.name}: {job.size_in_words} on this machine, files in {short(machine.shared)}")
        display.write_line(f"each rank runs as you: {program_in_words(job)}")
        display.write_line(f"{_SHOWN[logs]}; all output: {short(pod_log(machine.shared, job.name, '*'))}")
        if code is not None:
            work = short(_work(machine, job))
            display.write_line(f"{code.in_words} of {short(code.folder.resolve())}; relative paths are in {work}")
            for note in code.left_out:
                display.write_line(f"left out: {note}")
        begins_anew = job.spec.snapshots.resume == "Own"
        kept = code is not None and has_written_files(machine.shared, job.name)
        for line in _how_it_begins(resume_from, anew=begins_anew, kept=short(_work(machine, job)) if kept else None):
            display.write_line(line)
        for note in different_here(job, machine):
            display.write_line(f"note: {note}")
        if fault is not None:
            display.write_line(f"chaos: {fault.describe(job.ranks)}")
        return asyncio.run(Runner(job, machine, display, fault, logs).run())


def _to_resume_from(shared: Path, job: Job) -> int | None:
    """The step of the newest snapshot that another run may resume from. One that begins anew has none before it has set
    those of earlier runs aside.
    """
    if job.spec.snapshots.resume == "Own" and not has_begun_anew(shared, job.name, job.uid):
        return None
    return newest_snapshot(shared, job.name)


def _work(machine: Machine, job: Job) -> Path:
    """Where a script with submitted code has its relative paths."""
    return machine.shared / "work" / job.name


def _how_it_begins(resume_from: int | None, *, anew: bool, kept: str | None) -> Iterator[str]:
    """From which snapshot, or anew; `kept` is the folder with what scripts of this job have written themselves."""
    if resume_from is not None:
        resuming = f"resuming from step {resume_from}; --fresh begins anew"
        yield "beginning anew; snapshots of before are set aside" if anew else resuming
    if anew and kept is not None:
        yield f"note: {kept} keeps what the script has written itself; one that resumes from it needs another --name"


def _refuse(*problems: str) -> int:
    for problem in problems:
        _say(f"error: {problem}")
    return REFUSED


def _conclude(job: Job, outcome: Outcome, fault: KillRank | None, snapshot: int | None) -> int:
    status = outcome.status
    if outcome.stopped_by is not None:
        anew = job.spec.snapshots.resume == "Own"
        print(_how_to_resume(status, snapshot, built_in=job.spec.is_built_in, anew=anew))
        return 128 + outcome.stopped_by
    if status.phase is Phase.SUCCEEDED:
        print(success_in_words(status))
        if fault is not None and not outcome.killed:
            progress = status.progress or Progress()
            why = fault.never_due(progress.step, progress.total_steps)
            why = why or f"training ended before {fault.moment}; name an earlier moment, or use a longer job"
            print(f"error: chaos: no rank was killed: {why}", file=sys.stderr)
            return FAILED
        return SUCCEEDED
    _explain(outcome)
    return FAILED


def _how_to_resume(status: DDPJobStatus, snapshot: int | None, *, built_in: bool, anew: bool) -> str:
    reported = status.progress.step if status.progress else None
    step = max(reported or 0, snapshot or 0)  # the last report may be older than what the ranks have saved since
    where = f"stopped at step {step}" if step else "stopped before the first step"
    if snapshot is None and not built_in:
        return f"{where}; the same command starts the script again, which resumes if it loads what it has saved"
    if snapshot is None:
        return f"{where}; there is no snapshot yet: the same command starts from the beginning"
    if anew:  # each run is a new job, for which the snapshots of this one are another's
        return f"{where}; run the command again with --resume (in place of --fresh) to resume from step {snapshot}"
    return f"{where}; run the same command again to resume from step {snapshot}"


def _explain(outcome: Outcome) -> None:
    """Why the job failed, what to do, and the end of the log that shows it."""
    failure = outcome.status.last_failure
    if failure is None:
        _say("Failed")
        return
    _say(f"Failed: {failure.reason}: {failure.message}")
    reason = next((item for item in outcome.status.conditions if item.type == "Failed"), None)
    if reason is not None and reason.reason != failure.reason:
        _say(f"  {reason.reason}: {reason.message.splitlines()[0]}")
    if failure.advice:
        _say(f"  {failure.advice}")
    log = outcome.failed_log
    if log is not None and (tail := log_tail(log, lines=_TAIL_LINES)):
        _say(f"last lines of {short(log)}:")
        for line in tail.splitlines():
            _say(f"  {line.rstrip()}")


def _say(text: str) -> None:
    """What a job says may have control characters, which the terminal would obey."""
    print(without_controls(text), file=sys.stderr)
