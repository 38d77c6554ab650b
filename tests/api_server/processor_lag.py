"""The operator, with the turns of its event loop in processor time: `python -m tests.api_server.processor_lag`.

By the clock, a loop is late as well where its process waits for a core, of which another has nothing to say. Once it
has one again, what came meanwhile is done one turn after the other, and a timer waits for all of them. So each turn is
measured alone, which asyncio's own loop allows.
"""

from __future__ import annotations

import asyncio
import sys
import time

from ddpjob_operator import main, metrics


async def measure_lag() -> None:
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def measured(handle: asyncio.Handle) -> None:
        before = time.thread_time()
        run(handle)
        metrics.LOOP_LAG.observe(time.thread_time() - before)

    asyncio.Handle._run = measured  # type: ignore[attr-defined]
    await asyncio.Event().wait()


if __name__ == "__main__":
    main.measure_lag = measure_lag
    main._loop_factory = lambda: None
    sys.exit(main.main())
