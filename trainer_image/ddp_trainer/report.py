"""The end of a pod, told twice: on a line of its log, and in the termination message that the operator reads."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

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


def told(cause: Cause, pod: PodEnvironment, ending: Ending) -> dict[str, Any]:
    """The termination message as its reader gets it, redacted and cut, of a pod that does not end yet."""
    message = termination.redacted(termination.message_of(cause, pod, ending), os.environ)
    told: dict[str, Any] = json.loads(termination.encode(message))
    return told


def refuse(code: int, reason: str, text: str, pod: PodEnvironment | None, path: Path | None) -> int:
    """Nothing could be started: the exit code `code`, with `text` as the cause."""
    return report_cause(Cause(code, reason, text), pod, Ending(wall=time.time(), procs=0), path)


def log(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)
