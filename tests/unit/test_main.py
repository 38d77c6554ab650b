"""How the operator's parts are put together, where a wrong connection would show on a busy cluster only."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from ddpjob_operator.cluster.cache import Key
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.main import _assemble
from ddpjob_operator.settings import Settings


@pytest.mark.usefixtures("client")
async def test_a_namespace_of_many_jobs_does_not_make_that_of_one_wait() -> None:
    looked_at: list[str] = []
    done = asyncio.Event()

    async def look(key: Key) -> None:
        looked_at.append(key.namespace)
        if len(looked_at) == 21:
            done.set()

    async with AsyncExitStack() as cleanup:
        operator = await _assemble(Settings(workers=1, leader_election=False), lambda _: Defaults(), cleanup)
        operator.queue.add_all(Key("many", f"job-{number}") for number in range(20))
        operator.queue.add(Key("one", "job"))
        operator.queue.start(look)
        await done.wait()
        await operator.queue.stop(0)
    assert looked_at.index("one") <= 1
