"""Measures how long the event loop keeps others waiting."""

from __future__ import annotations

import asyncio
import time

from ddpjob_operator import metrics

PAUSE_SECONDS = 0.1


async def measure_lag() -> None:
    """Until it is cancelled. A timer runs late by what is left of the turn of the loop in which it was due."""
    while True:
        due = time.monotonic() + PAUSE_SECONDS  # uvloop's own clock stands still during a turn
        await asyncio.sleep(PAUSE_SECONDS)
        metrics.LOOP_LAG.observe(max(0.0, time.monotonic() - due))
