"""The work queue: when a key is looked at, how often, and by how many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.queue import Backoff, WorkQueue
from ddpjob_operator.runtime.shares import FairSemaphore

Feed = Callable[[WorkQueue[str]], Awaitable[None]]


def clock() -> float:
    return asyncio.get_running_loop().time()


class Looks:
    """Records when each key was looked at; `seconds` each takes; `then` says how it ends."""

    def __init__(self, seconds: float = 0.0, then: Callable[[str, int], float | None] = lambda key, n: None) -> None:
        self.seconds = seconds
        self.then = then
        self.seen: list[tuple[float, str]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.running: set[str] = set()

    async def __call__(self, key: str) -> float | None:
        assert key not in self.running, "two workers have the same key"
        self.running.add(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        self.seen.append((clock(), key))
        await asyncio.sleep(self.seconds)
        self.running.discard(key)
        return self.then(key, len(self.seen))

    @property
    def times(self) -> list[float]:
        return [time for time, _ in self.seen]


async def within(
    looks: Looks, seconds: float, feed: Callable[[WorkQueue[str]], Awaitable[None]], **options: object
) -> None:
    queue: WorkQueue[str] = WorkQueue(**options)  # type: ignore[arg-type]
    queue.start(looks)
    await feed(queue)
    await asyncio.sleep(seconds)
    await queue.stop(within=0)


def test_a_key_that_waits_is_not_queued_twice() -> None:
    looks = Looks()

    async def feed(queue: WorkQueue[str]) -> None:
        for _ in range(5):
            queue.add("a")

    run(within(looks, 1, feed))
    assert looks.times == [0]


def test_a_key_that_is_added_while_it_is_looked_at_is_looked_at_once_more() -> None:
    looks = Looks(seconds=1.0)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(0.5)
        for _ in range(5):
            queue.add("a")

    run(within(looks, 10, feed))
    assert looks.times == [0, 1]


def test_what_is_due_at_a_moment_does_not_wait_for_the_backoff_after_a_failure() -> None:
    def due_in_two_seconds(key: str, looks: int) -> None:
        error = ApiError(403, "Forbidden", "exceeded quota")
        error.look_within = 2.0 if looks == 1 else None
        raise error

    looks = Looks(then=due_in_two_seconds)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")

    run(within(looks, 30, feed, backoff=Backoff(first=60.0)))
    assert looks.times == [0, 2]


def test_keys_are_looked_at_side_by_side_up_to_the_number_of_workers() -> None:
    looks = Looks(seconds=1.0)

    async def feed(queue: WorkQueue[str]) -> None:
        for key in "abcde":
            queue.add(key)

    run(within(looks, 10, feed, workers=2))
    assert looks.times == [0, 0, 1, 1, 2]
    assert looks.most_at_once == 2


def test_a_key_is_looked_at_again_after_the_time_it_asked_for() -> None:
    looks = Looks(then=lambda key, n: 7.0 if n == 1 else None)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")

    run(within(looks, 60, feed))
    assert looks.times == [0, 7]


def test_of_two_delays_the_earlier_one_counts() -> None:
    looks = Looks()

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a", after=9.0)
        queue.add("a", after=3.0)
        queue.add("a", after=6.0)

    run(within(looks, 60, feed))
    assert looks.times == [3]


def test_an_event_does_not_wait_for_a_delay() -> None:
    looks = Looks()

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a", after=9.0)
        queue.add("a")

    run(within(looks, 60, feed))
    assert looks.times == [0]


def test_a_failure_is_tried_again_with_growing_waits_that_end_with_success() -> None:
    def fail_four_times(key: str, n: int) -> None:
        if n <= 4:
            raise ValueError("not yet")

    looks = Looks(then=fail_four_times)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")

    run(within(looks, 600, feed, backoff=Backoff(first=1.0, longest=60.0)))
    waits = [after - before for before, after in zip(looks.times, looks.times[1:], strict=False)]
    assert len(waits) == 4
    assert all(whole / 2 <= wait <= whole for wait, whole in zip(waits, (1, 2, 4, 8), strict=True))


def test_success_forgets_earlier_failures() -> None:
    def fail_first_and_third(key: str, n: int) -> float | None:
        if n in (1, 2, 4):
            raise ValueError("not yet")
        return 100.0 if n == 3 else None

    looks = Looks(then=fail_first_and_third)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")

    run(within(looks, 600, feed, backoff=Backoff(first=1.0, longest=60.0)))
    assert looks.times[4] - looks.times[3] <= 1.0


def test_an_event_during_a_pass_that_fails_does_not_shorten_the_wait() -> None:
    def fail_once(key: str, n: int) -> None:
        if n == 1:
            raise ValueError("not yet")

    looks = Looks(seconds=1.0, then=fail_once)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(0.5)
        queue.add("a")

    run(within(looks, 600, feed, backoff=Backoff(first=30.0)))
    assert looks.times[1] >= 1.0 + 15.0
    assert len(looks.times) == 2


def test_what_comes_all_the_time_does_not_shorten_the_wait_after_a_failure_and_an_event_does() -> None:
    def fail_once(key: str, n: int) -> None:
        if n == 1:
            raise ValueError("not yet")

    looks = Looks(then=fail_once)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")
        for _ in range(3):
            await asyncio.sleep(2.0)
            queue.add_unless_backing_off("a")
        queue.add("a")
        await asyncio.sleep(2.0)
        queue.add_unless_backing_off("a")

    run(within(looks, 600, feed, backoff=Backoff(first=100.0)))
    assert looks.times == [0.0, 6.0, 8.0]


def test_a_failing_key_holds_up_no_other() -> None:
    def fail_a(key: str, n: int) -> None:
        if key == "a":
            raise ValueError("never")

    looks = Looks(then=fail_a)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add("a")
        queue.add("b")

    run(within(looks, 0.1, feed, workers=1))
    assert (0, "b") in looks.seen


@pytest.mark.parametrize(("failures", "longest_wait"), [(1, 0.25), (2, 0.5), (5, 4.0), (50, 60.0), (10**6, 60.0)])
def test_the_backoff_doubles_up_to_its_limit(failures: int, longest_wait: float) -> None:
    backoff = Backoff()
    assert backoff.seconds(failures, 1.0) == longest_wait
    assert backoff.seconds(failures, 0.0) == longest_wait / 2


def test_stopping_lets_a_pass_finish_and_begins_no_other() -> None:
    looks = Looks(seconds=2.0)

    async def main() -> float:
        queue: WorkQueue[str] = WorkQueue(workers=1)
        queue.start(looks)
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(1)
        await queue.stop(within=10)
        queue.add("c")
        await asyncio.sleep(10)
        return queue.longest_pass()

    assert run(main()) == 0
    assert looks.seen == [(0, "a")]
    assert not looks.running


def test_stopping_cancels_a_pass_that_takes_too_long() -> None:
    looks = Looks(seconds=100.0)

    async def main() -> float:
        queue: WorkQueue[str] = WorkQueue()
        queue.start(looks)
        queue.add("a")
        await asyncio.sleep(1)
        await queue.stop(within=5)
        return clock()

    assert run(main()) == 6


def test_it_tells_how_long_the_longest_pass_takes() -> None:
    async def main() -> float:
        queue: WorkQueue[str] = WorkQueue()
        queue.start(Looks(seconds=100.0))
        queue.add("a")
        await asyncio.sleep(40)
        queue.add("b")
        await asyncio.sleep(2)
        longest = queue.longest_pass()
        await queue.stop(within=0)
        return longest

    assert run(main()) == 42


def test_a_pass_that_shows_signs_of_life_is_not_a_long_one() -> None:
    async def main() -> tuple[float, float]:
        queue: WorkQueue[str] = WorkQueue()
        queue.start(Looks(seconds=1000.0))
        queue.add("a")
        for _ in range(10):
            await asyncio.sleep(40)
            queue.sign_of_life("a")
        queue.sign_of_life("b")
        await asyncio.sleep(2)
        longest = queue.longest_pass()
        await asyncio.sleep(400)
        await asyncio.sleep(0)
        stuck = queue.longest_pass()
        await queue.stop(within=0)
        return longest, stuck

    assert run(main()) == (2, 402)


@pytest.mark.parametrize(("seconds", "silent"), [(10.0, 5.0), (1000.0, 405.0)], ids=["it moves", "it stands still"])
def test_a_pass_whose_call_waits_in_a_line_that_moves_is_not_a_long_one(seconds: float, silent: float) -> None:
    """As behind a thousand deletions of another job of the namespace, each of which a webhook holds up."""

    async def main() -> float:
        places = FairSemaphore(1)

        async def call() -> None:
            async with places.place("ns"):
                await asyncio.sleep(seconds)

        async def look(key: str) -> None:
            await asyncio.gather(call(), call())

        ahead = [asyncio.create_task(call()) for _ in range(100)]
        await asyncio.sleep(0)
        queue: WorkQueue[str] = WorkQueue()
        queue.start(look)
        queue.add("b")
        await asyncio.sleep(405)
        longest = queue.longest_pass()
        await queue.stop(within=0)
        for task in ahead:
            task.cancel()
        return longest

    assert run(main()) == silent


def test_the_jobs_of_one_namespace_do_not_take_every_worker() -> None:
    looks = Looks(seconds=60.0)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add_all(f"a/{n}" for n in range(100))
        await asyncio.sleep(1)
        queue.add("b/0")

    run(within(looks, 2.0, feed, workers=16, share=lambda key: key[0]))
    assert (1.0, "b/0") in looks.seen
    assert looks.most_at_once == 13


def test_every_key_of_one_namespace_has_its_turn() -> None:
    looks = Looks(seconds=1.0)

    async def feed(queue: WorkQueue[str]) -> None:
        queue.add_all(f"a/{n}" for n in range(100))

    run(within(looks, 60.0, feed, workers=4, share=lambda key: key[0]))
    assert len({key for _, key in looks.seen}) == 100


def test_passes_without_a_call_let_others_go_on() -> None:
    """10,000 resting jobs, each looked at without any call, must not keep the Lease from being renewed."""
    turns = 0

    async def at_once(key: str) -> None:
        return None

    async def feed(queue: WorkQueue[str]) -> None:
        nonlocal turns
        queue.add_all(str(n) for n in range(1000))
        while queue.depth:
            turns += 1
            await asyncio.sleep(0)

    async def all_of_it() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=16)
        queue.start(at_once)
        await feed(queue)
        await queue.stop(within=0)

    run(all_of_it())
    assert turns >= 1000
