"""What a pod printed, on the volume: `logs/<job>/pods/<stem>-<attempt>-<node rank>.log` (docs/contracts.md section 6).

    ---- 2030-01-01T12:00:00Z digits-0-1 (0b0c…) starts, 2 ranks, with times
    2030-01-01T12:00:07.123456Z [local rank 1] step 1, loss 2.3

A later run of the name appends, with a header of its own. The launcher writes these files, `python -m
ddp_trainer.logs.pods` and the command `ddpjob` read them.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

FOLDER: Final = "pods"
STARTS: Final = re.compile(
    rb"---- [^\r\n]{0,500}?(?: of (?P<run>[^\s()]{1,100}) with (?P<ranks_of_run>\d{1,6}) ranks)?"
    rb"(?: \((?P<uid>[^\s()]{1,100})\))? starts(?:, (?P<ranks>\d{1,6}) ranks, with times)?\r?\n?"
)
"""A header. One that does not end with the number of ranks of the pod is of `ddpjob run`, whose lines have no times.
Its `uid` is that of the pod, and `run` that of the job, which older versions left out."""
STAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_NAME: Final = re.compile(r".+-(\d+)-(\d+)\.log")
_POD: Final = re.compile(r"(.+)-\d+-s?\d+")
"""Of the gang: the attempt and the node rank, or the number as a spare, that it was made for."""


def log_file(log_dir: Path, pod_name: str, attempt: int, node_rank: int) -> Path | None:
    """Of a place in the gang: a pod that is kept for a later attempt, or was a spare, has another file for each.

    None for a pod that is none of the gang's, as that of `ddpjob debug`, where a person starts the launcher by hand.
    """
    found = _POD.fullmatch(pod_name)
    return None if found is None else log_dir / FOLDER / f"{found[1]}-{attempt}-{node_rank}.log"


def place_of(file: Path) -> tuple[int, int] | None:
    """Attempt and node rank; None for another file."""
    found = _NAME.fullmatch(file.name)
    return None if found is None else (int(found[1]), int(found[2]))


def header(now: float, pod_name: str, uid: str, ranks: int) -> bytes:
    """The line before those of a pod of `ranks` ranks. `now` is in epoch seconds, `uid` the job's."""
    return f"---- {_time(now)}Z {pod_name} ({uid}) starts, {ranks} ranks, with times\n".encode()


def stamp(now: float) -> str:
    """As lines begin with it: in UTC, so that their order as text is that in time."""
    return f"{_time(now)}.{int(now % 1 * 1e6):06d}Z"


def _time(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
