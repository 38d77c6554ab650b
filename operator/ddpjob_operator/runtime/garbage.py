"""Keeps Python's garbage collector from holding up the event loop.

A full collection visits every object that may be part of a cycle: with the picture of 8,000 pods in memory that takes
0.2 s. What survives one is therefore left out of all later ones (`gc.freeze`): it is the cluster's picture and the
program, which reference counting frees. Only a cycle that is abandoned after it survived a full collection is never
freed; tests/api_server/soak.py shows that the operator has none that matter, on uvloop. On asyncio's own loop a closed
connection is such a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

YOUNG = 2_000
"""New objects before a collection of these. Python's 700 are passed thousands of times in a list of pods; with 10,000
there is so much to free at once that it takes 80 ms."""


def keep_collections_short() -> None:
    """From now on, for the whole process."""
    gc.set_threshold(YOUNG, 5, 5)
    gc.collect()
    gc.freeze()
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
