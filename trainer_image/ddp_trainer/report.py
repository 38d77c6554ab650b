"""The end of a pod, told twice: on a line of its log, and in the termination message that the operator reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddp_trainer import termination
from ddp_trainer.environment import PodEnvironment
from ddp_trainer.root_cause import Cause, Ending


def report_cause(cause: Cause, pod: PodEnvironment | None, ending: Ending, path: Path | None) -> int:
    message = termination.redacted(termination.message_of(cause, pod, ending), os.environ)
    log(f"{message['outcome']} ({cause.reason}): {message['message']}")
    if path is not None:
        try:
            termination.write(path, termination.encode(message))
        except OSError as error:
            log(f"the termination message cannot be written: {error}")
    return cause.exit_code


def log(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)
