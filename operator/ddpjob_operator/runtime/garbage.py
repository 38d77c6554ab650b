"""Keeps Python's garbage collector from holding up the event loop.

A full collection visits every object that may be part of a cycle: with the picture of 8,000 pods in memory that takes
0.2 s. What survives one is therefore left out of all later ones (`gc.freeze`): it is the cluster's picture and the
program, which reference counting frees. Only a cycle that is abandoned after it survived a full collection stays: until
all is collected, once an hour. tests/api_server/soak.py shows that the operator has none that matter, on uvloop. On
asyncio's own loop a closed connection is such a cycle. An error that is kept is one wherever a function that it came
through has it in a variable: see `errors.without_frames`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping

THRESHOLDS = (2_000, 5, 2)
"""For `gc.set_threshold`: a full collection for every 36,000 objects that are new and still there. Under load it takes
26 ms of processor time at most; for every 72,000 it took 38, and up to 80 on a slower machine. The first is far above
Python's 700, which a list of pods passes thousands of times."""

ALL_SECONDS = 3600.0
"""So often the event loop is held up for a collection of everything, since a process that lives for months would grow
by each cycle that one of its libraries abandons."""


def keep_collections_short() -> None:
    """From now on, for the whole process."""
    gc.set_threshold(*THRESHOLDS)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)
    _collect_all()


async def collect_all_every_hour() -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(ALL_SECONDS)
        _collect_all()


def _collect_all() -> None:
    gc.unfreeze()
    gc.collect()
    gc.collect()  # Python makes no other before a quarter as much is new as this one leaves: not all, but nothing


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
