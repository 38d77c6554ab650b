"""The lag of the event loop, as the operator measures it."""

import asyncio
import time

from ddpjob_operator.metrics import REGISTRY
from ddpjob_operator.runtime.lag import PAUSE_SECONDS, measure_lag


def test_a_turn_of_the_loop_that_takes_long_is_seen() -> None:
    def late(seconds: str) -> float:
        at_most = REGISTRY.get_sample_value("ddpjob_operator_loop_lag_seconds_bucket", {"le": seconds})
        every = REGISTRY.get_sample_value("ddpjob_operator_loop_lag_seconds_count")
        assert at_most is not None
        assert every is not None
        return every - at_most

    async def run() -> None:
        measuring = asyncio.create_task(measure_lag())
        await asyncio.sleep(0)
        time.sleep(PAUSE_SECONDS + 0.3)  # noqa: ASYNC251 - what the loop must not do
        await asyncio.sleep(PAUSE_SECONDS)
        measuring.cancel()

    before = late("0.25")
    asyncio.run(run())
    assert late("0.25") == before + 1
