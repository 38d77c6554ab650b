"""The lag of the event loop, as the operator measures it."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.unit.virtual_time import VirtualTimeLoop

from ddpjob_operator.metrics import REGISTRY
from ddpjob_operator.runtime import lag
from ddpjob_operator.runtime.lag import PAUSE_SECONDS, measure_lag


def test_a_turn_of_the_loop_that_takes_long_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(seconds: str) -> float:
        at_most = REGISTRY.get_sample_value("ddpjob_operator_loop_lag_seconds_bucket", {"le": seconds})
        every = REGISTRY.get_sample_value("ddpjob_operator_loop_lag_seconds_count")
        assert at_most is not None
        assert every is not None
        return every - at_most

    loop = VirtualTimeLoop()  # on a busy machine a real one has turns of its own that take long
    monkeypatch.setattr(lag, "time", SimpleNamespace(monotonic=loop.time))

    async def run() -> None:
        measuring = asyncio.create_task(measure_lag())
        await asyncio.sleep(0)
        loop.now += PAUSE_SECONDS + 0.3
        await asyncio.sleep(PAUSE_SECONDS)
        measuring.cancel()

    before = late("0.25")
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    assert late("0.25") == before + 1
