"""Report how the pod ended: a line in its log, and the termination message that the operator reads."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.launch.exit import termination_message as termination
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence


def report_exit(cause: ExitCause, pod: PodEnvironment | None, evidence: ExitEvidence, path: Path | None) -> int:
    message = termination.redacted(termination.message_of(cause, pod, evidence), os.environ)
    log(f"{message['outcome']} ({cause.reason}): {message['message']}")
    if path is not None:
        try:
            termination.write(path, termination.encode(message))
        except OSError as error:
            log(f"the termination message cannot be written: {error}")
    return cause.exit_code


def termination_record(cause: ExitCause, pod: PodEnvironment, evidence: ExitEvidence) -> dict[str, Any]:
    """The termination message as its reader gets it, redacted and cut, of a pod that does not end yet."""
    message = termination.redacted(termination.message_of(cause, pod, evidence), os.environ)
    termination_record: dict[str, Any] = json.loads(termination.encode(message))
    return termination_record


def report_start_failure(code: int, reason: str, text: str, pod: PodEnvironment | None, path: Path | None) -> int:
    """Nothing could be started: the exit code `code`, with `text` as the cause."""
    return report_exit(ExitCause(code, reason, text), pod, ExitEvidence(wall=time.time(), procs=0), path)


def log(text: str) -> None:
    # the log may be on a full disk, and its reader may be gone; neither ends a run
    with contextlib.suppress(OSError):
        print(f"ddpjob: {text}", file=sys.stderr, flush=True)
