"""Leader election: who leads when, by virtual clocks, on a Lease whose server is slow, silent or loses answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.leader import FENCE_SECONDS, LEASE_SECONDS, STANDBY_POLL_SECONDS, Leader, NotLeading

Json = dict[str, Any]


@dataclass
class Server:
    """Serves one Lease. `delay` gives the seconds that a write begun at a time takes; `loses` whether its answer is
    lost, after it took effect."""

    delay: Callable[[float], float] = lambda now: 0.0
    loses: Callable[[float], bool] = lambda now: False
    lease: Json | None = None
    renewals: list[float] = field(default_factory=list)

    async def get(self, path: str, resource: str) -> Json:
        if self.lease is None:
            raise ApiError(404, "NotFound", "no such lease")
        return self.lease

    async def create(self, path: str, resource: str, body: Json) -> Json:
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": "1"}}
        return self.lease

    async def merge_patch(self, path: str, resource: str, body: Json) -> Json:
        began = clock()
        await asyncio.sleep(self.delay(began))
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        version = str(int(self.lease["metadata"]["resourceVersion"]) + 1)
        self.lease = self.lease | {
            "metadata": self.lease["metadata"] | {"resourceVersion": version},
            "spec": self.lease["spec"] | body["spec"],
        }
        self.renewals.append(began)
        if self.loses(began):
            raise ApiError(0, "ConnectionFailed", "reset by peer")
        return self.lease


def clock() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Replica:
    """A leader, and when what was called."""

    server: Server
    identity: str = "one"
    elected: list[float] = field(default_factory=list)
    deposed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leader = Leader(self.server, "ns", "lease", self.identity)  # type: ignore[arg-type]

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.leader.run(lambda: self.elected.append(clock()), lambda: self.deposed.append(clock()))
        )


async def lead(server: Server, seconds: float) -> Replica:
    """One replica alone, for so many seconds."""
    replica = Replica(server)
    task = replica.start()
    await asyncio.sleep(seconds)
    task.cancel()
    return replica


def first_takes(seconds: float) -> Callable[[float], float]:
    """The first renewal takes so many seconds."""
    delays = iter([seconds])
    return lambda now: next(delays, 0.0)


def test_who_can_renew_leads_in_one_epoch() -> None:
    replica = run(lead(Server(), 600))
    assert (replica.elected, replica.deposed) == ([0.0], [])


def test_a_renewal_that_hangs_is_tried_again_before_the_fence_closes() -> None:
    replica = run(lead(Server(delay=first_takes(60.0)), 30))
    assert (replica.elected, replica.deposed) == ([0.0], [])
    tries = [time for time in replica.server.renewals if time < FENCE_SECONDS]
    assert tries[0] <= FENCE_SECONDS - 2.0


def test_an_answer_that_is_lost_after_the_renewal_took_effect_ends_no_epoch() -> None:
    replica = run(lead(Server(loses=lambda now: 2.0 <= now < 3.0), 30))
    assert (replica.elected, replica.deposed) == ([0.0], [])


def test_a_lease_that_is_regained_begins_an_epoch_of_its_own() -> None:
    """What was looked at while the fence was closed is looked at again: nothing else would bring it back."""

    async def scenario() -> Replica:
        def silence(now: float) -> float:
            return 60.0 if 1.0 < now < 12.0 else 0.0

        return await lead(Server(delay=silence), 60)

    replica = run(scenario())
    assert len(replica.elected) == 2
    assert replica.leader.epoch == 2
    assert FENCE_SECONDS <= replica.deposed[0] <= replica.elected[1] <= 12.0 + FENCE_SECONDS / 2 + STANDBY_POLL_SECONDS


def test_a_renewal_that_is_answered_just_after_the_fence_closed_begins_another_epoch() -> None:
    async def scenario() -> Replica:
        return await lead(Server(delay=lambda now: 3.9 if 1.0 < now < 12.0 else 0.0), 40)

    replica = run(scenario())
    closed = 0.0 + FENCE_SECONDS
    assert replica.elected[1] > closed
    assert replica.leader.epoch == len(replica.elected)


def test_what_was_decided_in_an_earlier_epoch_is_not_written_in_the_next() -> None:
    async def scenario() -> list[bool]:
        replica = Replica(Server(delay=lambda now: 60.0 if 1.0 < now < 12.0 else 0.0))
        task = replica.start()
        await asyncio.sleep(1)
        replica.leader.begin_pass()
        may = [writes(replica.leader)]
        await asyncio.sleep(9)
        may.append(writes(replica.leader))
        await asyncio.sleep(20)
        may.append(writes(replica.leader))
        replica.leader.begin_pass()
        may.append(writes(replica.leader))
        task.cancel()
        return may

    assert run(scenario()) == [True, False, False, True]


def test_a_standby_waits_for_the_whole_lease_of_one_that_crashed_and_no_longer() -> None:
    async def scenario() -> tuple[Replica, Replica]:
        server = Server()
        first, second = Replica(server, "one"), Replica(server, "two")
        crashing, task = first.start(), second.start()
        await asyncio.sleep(60.5)
        crashing.cancel()
        await asyncio.sleep(30)
        task.cancel()
        return first, second

    first, second = run(scenario())
    last = max(time for time in first.server.renewals if time <= 60.5)
    assert LEASE_SECONDS <= second.elected[0] - last <= LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS
    assert second.elected[0] >= last + FENCE_SECONDS, "two lead at once"


def test_two_never_lead_at_once_whatever_the_server_does() -> None:
    async def scenario() -> int:
        def moody(now: float) -> float:
            return (0.0, 0.5, 3.0, 9.0, 30.0)[int(now / 7) % 5]

        server = Server(delay=moody, loses=lambda now: int(now) % 11 == 0)
        replicas = [Replica(server, "one"), Replica(server, "two")]
        tasks = [replica.start() for replica in replicas]
        most = 0
        for _ in range(6000):
            await asyncio.sleep(0.1)
            most = max(most, sum(replica.leader.leading for replica in replicas))
        for task in tasks:
            task.cancel()
        return most

    assert run(scenario()) == 1


def test_a_lease_that_is_given_back_is_taken_by_the_next() -> None:
    async def scenario() -> float:
        server = Server()
        first, second = Replica(server, "one"), Replica(server, "two")
        stopping, task = first.start(), second.start()
        await asyncio.sleep(10.5)
        stopping.cancel()
        await first.leader.release()
        await asyncio.sleep(5)
        task.cancel()
        return second.elected[0]

    assert run(scenario()) <= 10.5 + STANDBY_POLL_SECONDS


def writes(leader: Leader) -> bool:
    try:
        leader.fence()
    except NotLeading:
        return False
    return True


@pytest.mark.parametrize("leads", [True, False])
def test_who_does_not_lead_writes_nothing(leads: bool) -> None:
    async def scenario() -> bool:
        server = Server()
        if not leads:
            holder = Replica(server, "another").start()
            await asyncio.sleep(0.1)
            holder.cancel()
        replica = Replica(server)
        task = replica.start()
        await asyncio.sleep(1)
        task.cancel()
        return writes(replica.leader)

    assert run(scenario()) is leads
