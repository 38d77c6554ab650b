"""The operator, with the longest turn of its event loop: `python -m tests.api_server.processor_lag`.

By the clock, a loop is late as well where its process waits for a core, of which another has nothing to say. Once it
has one again, what came meanwhile is done one turn after the other, and a timer waits for all of them. So each turn is
measured alone, which asyncio's own loop allows, and in processor time. A core that others compute on, in its caches or
its other hyperthread, takes several times as long for the same work. So after a long turn the core does a known work,
and the turn counts as a multiple of that: of the longest of a few times, since the others come and go.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from prometheus_client import Gauge
from pydantic_core import from_json

from ddpjob_operator import main, metrics

LARGE_OBJECTS = json.dumps([[{"name": f"c{number}", "image": "a"} for number in range(20_000)]] * 6).encode()
"""Decoded whole, so that the memory is as new as that of a list of such objects."""
LONG_SECONDS = 0.01
"""Of a turn that is worth a comparison: the known work takes five times as long on a quiet core."""
TIMES = 3
LONGEST_TURN = Gauge(
    "test_longest_turn", "Processor time of the longest turn, by that of the known work.", registry=metrics.REGISTRY
)


async def measure_lag() -> None:
    run = asyncio.Handle._run  # type: ignore[attr-defined]
    longest = 0.0

    def measured(handle: asyncio.Handle) -> None:
        nonlocal longest
        before = time.thread_time()
        run(handle)
        took = time.thread_time() - before
        if took > LONG_SECONDS and (turn := took / known_work_seconds()) > longest:
            longest = turn
            LONGEST_TURN.set(turn)

    known_work_seconds()  # the first time in a process takes longer, and would be compared with the next ones
    asyncio.Handle._run = measured  # type: ignore[attr-defined]
    asyncio.get_running_loop().call_soon(from_json, LARGE_OBJECTS)  # a turn of 1: what measures nothing shows 0
    await asyncio.Event().wait()


def known_work_seconds() -> float:
    """What this core needs for it now."""
    found = []
    for _ in range(TIMES):
        before = time.thread_time()
        from_json(LARGE_OBJECTS)
        found.append(time.thread_time() - before)
    return max(found)


if __name__ == "__main__":
    main.measure_lag = measure_lag
    main._loop_factory = lambda: None
    sys.exit(main.main())
