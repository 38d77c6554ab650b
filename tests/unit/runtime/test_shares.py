"""Places are shared fairly, whoever asks first and most."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ddpjob_operator.runtime.shares import FairSemaphore


class Calls:
    """Calls that hold a place until they are let go."""

    def __init__(self, places: int) -> None:
        self.semaphore = FairSemaphore(places)
        self.tasks: list[asyncio.Task[None]] = []
        self.holding: dict[asyncio.Event, str] = {}

    async def ask(self, who: str, times: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._hold(who)) for _ in range(times)]
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def _hold(self, who: str) -> None:
        async with self.semaphore.place(who):
            over = asyncio.Event()
            self.holding[over] = who
            try:
                await over.wait()
            finally:
                self.holding.pop(over, None)

    async def end(self, who: str) -> None:
        next(over for over, holder in self.holding.items() if holder == who).set()
        await self.settle()

    @property
    def held(self) -> Counter[str]:
        return Counter(self.holding.values())


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (2, 2), (64, 48)])
async def test_one_alone_gets_most_places_but_not_all(places: int, alone: int) -> None:
    calls = Calls(places)
    await calls.ask("a", 1024)
    assert calls.held == {"a": alone}


async def test_another_finds_a_place_at_once() -> None:
    calls = Calls(64)
    for tenant in ("a", "b", "c"):
        await calls.ask(tenant, 1024)
    await calls.ask("status", 1)
    assert calls.held["status"] == 1
    assert all(calls.held[tenant] for tenant in ("a", "b", "c"))


async def test_places_that_become_free_go_round() -> None:
    calls = Calls(8)
    for tenant in ("a", "b", "c", "d"):
        await calls.ask(tenant, 100)
    for _ in range(40):
        await calls.end(max(calls.held, key=lambda who: calls.held[who]))
    assert set(calls.held) == {"a", "b", "c", "d"}
    assert max(calls.held.values()) - min(calls.held.values()) <= 2


async def test_one_that_gives_up_while_it_waits_leaves_no_hole() -> None:
    calls = Calls(1)
    await calls.ask("a", 3)
    calls.tasks[1].cancel()
    await calls.end("a")
    assert calls.held == {"a": 1}
    calls.tasks[2].cancel()
    await calls.settle()
    await calls.ask("b")
    assert calls.held == {"b": 1}


async def test_one_that_gives_up_as_its_turn_comes_passes_it_on() -> None:
    calls = Calls(1)
    await calls.ask("a", 3)
    next(iter(calls.holding)).set()
    await asyncio.sleep(0)
    calls.tasks[1].cancel()
    await calls.settle()
    assert calls.held == {"a": 1}
    assert not calls.tasks[2].done()


@pytest.mark.parametrize("first", ["holders", "waiters"])
async def test_where_all_give_up_at_once_every_place_is_free_again(first: str) -> None:
    """As where a replica stands down: those that held a place let go of it before the others know that they gave up."""
    calls = Calls(4)
    for tenant in ("a", "b"):
        await calls.ask(tenant, 20)
    assert calls.held == {"a": 3, "b": 1}
    order = calls.tasks if first == "holders" else calls.tasks[::-1]
    for task in order:
        task.cancel()
    ends = await asyncio.gather(*calls.tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}
    await calls.ask("a", 20)
    assert calls.held == {"a": 3}
