"""The operator, with the lag of its event loop in processor time: `python -m tests.api_server.processor_lag`.

By the clock, a loop is late as well where its process waits for a core, of which another has nothing to say. What its
thread computes between two looks a pause apart, less the pause, is at most what the turn took in which the second look
was due.
"""

from __future__ import annotations

import asyncio
import sys
import time

from ddpjob_operator import main, metrics

PAUSE_SECONDS = 0.01


async def measure_lag() -> None:
    while True:
        before = time.thread_time()
        await asyncio.sleep(PAUSE_SECONDS)
        metrics.LOOP_LAG.observe(max(0.0, time.thread_time() - before - PAUSE_SECONDS))


if __name__ == "__main__":
    main.measure_lag = measure_lag
    sys.exit(main.main())
