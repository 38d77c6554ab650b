"""Of what begins at once, one thing begins in each turn of the event loop."""

from __future__ import annotations

import asyncio

from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.runtime.turns import OneATurn


async def test_those_who_wait_go_on_in_turns_of_their_own_and_in_order() -> None:
    turns, turn, seen = OneATurn(), 0, list[tuple[int, int]]()

    async def count() -> None:
        nonlocal turn
        while len(seen) < 20:
            turn += 1
            await asyncio.sleep(0)

    async def one(number: int) -> None:
        await turns.wait()
        seen.append((turn, number))

    await asyncio.gather(count(), *(one(number) for number in range(20)))
    assert [number for _, number in seen] == list(range(20))
    assert len({when for when, _ in seen}) == 20


async def test_one_that_gives_up_holds_up_nobody() -> None:
    turns = OneATurn()
    first, second, third = (asyncio.create_task(turns.wait()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await third
    assert (first.cancelled(), second.cancelled()) == (True, True)
