"""Leader election: who leads when, by virtual clocks, on a Lease whose server is slow, silent or loses answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.main import leases_of
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.leader import FENCE_SECONDS, LEASE_SECONDS, STANDBY_POLL_SECONDS, Leader, NotLeading
from ddpjob_operator.settings import Settings
from ddpjob_operator.shards import Shard

Json = dict[str, Any]


@dataclass
class Server:
    """Serves Leases by path. `delay` gives the seconds until a write begun at a time takes effect, `answering` those
    from then on until its answer; `loses` whether that is lost."""

    delay: Callable[[float], float] = lambda now: 0.0
    answering: Callable[[float], float] = lambda now: 0.0
    loses: Callable[[float], bool] = lambda now: False
    reading: float = 0.0
    """Seconds that a read takes."""
    leases: dict[str, Json] = field(default_factory=dict)
    renewals: list[float] = field(default_factory=list)

    async def get(self, path: str, resource: str) -> Json:
        await asyncio.sleep(self.reading)
        if path not in self.leases:
            raise ApiError(404, "NotFound", "no such lease")
        return self.leases[path]

    async def create(self, path: str, resource: str, body: Json) -> Json:
        path = f"{path}/{body['metadata']['name']}"
        if path in self.leases:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.leases[path] = body | {"metadata": body["metadata"] | {"resourceVersion": "1"}}
        return self.leases[path]

    async def json_patch(self, path: str, resource: str, operations: Sequence[Json]) -> Json:
        test, change = operations
        assert (test["op"], test["path"], change["path"]) == ("test", "/spec/holderIdentity", "/spec/renewTime")

        def accepts(lease: Json) -> None:
            if lease["spec"]["holderIdentity"] != test["value"]:
                raise ApiError(422, "Invalid", "testing value failed")

        return await self._write(path, {"renewTime": change["value"]}, accepts)

    async def merge_patch(self, path: str, resource: str, body: Json) -> Json:
        def accepts(lease: Json) -> None:
            if body["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "the object has been modified")

        return await self._write(path, body["spec"], accepts)

    async def _write(self, path: str, spec: Json, accepts: Callable[[Json], None]) -> Json:
        """It goes on although the caller waits no longer."""
        return await asyncio.shield(asyncio.create_task(self._takes_effect(path, spec, accepts)))

    async def _takes_effect(self, path: str, spec: Json, accepts: Callable[[Json], None]) -> Json:
        began = clock()
        await asyncio.sleep(self.delay(began))
        before = self.leases[path]
        accepts(before)
        version = str(int(before["metadata"]["resourceVersion"]) + 1)
        metadata = before["metadata"] | {"resourceVersion": version}
        self.leases[path] = after = before | {"metadata": metadata, "spec": before["spec"] | spec}
        self.renewals.append(began)
        await asyncio.sleep(self.answering(began))
        if self.loses(began):
            raise ApiError(0, "ConnectionFailed", "reset by peer")
        return after


def clock() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Replica:
    """A leader, and when what was called."""

    server: Server
    identity: str = "one"
    shard: Shard = Shard()  # noqa: RUF009 - it is frozen
    elected: list[float] = field(default_factory=list)
    deposed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = Settings(
            shards=self.shard.count, shard=self.shard.number, identity=self.identity, lease_namespace="ns"
        )
        self.leader = Leader(leases_of(settings, self.server))  # type: ignore[arg-type]

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
        server.delay = lambda now: 60.0
        await asyncio.wait_for(second.leader.release(), FENCE_SECONDS)  # its pod has only so long to end
        return second.elected[0]

    assert run(scenario()) <= 10.5 + STANDBY_POLL_SECONDS


@pytest.mark.parametrize(("delay", "answering"), [(0.0, 0.5), (0.5, 0.0)], ids=["before", "after"])
def test_a_lease_is_given_back_although_a_renewal_was_cancelled_that_takes_effect(
    delay: float, answering: float
) -> None:
    """Before the Lease is read to be given back, or after."""

    async def scenario() -> float:
        server = Server(delay=lambda now: delay, answering=lambda now: answering)
        first, second = Replica(server, "first"), Replica(server, "second")
        stopping, task = first.start(), second.start()
        await asyncio.sleep(10.2)  # one of the renewals of every two seconds is under way
        stopping.cancel()
        await first.leader.release()
        renewed, given_back = (round(began, 1) for began in server.renewals[-2:])
        assert (renewed, given_back) == (10.0, 10.2 if answering else 10.7), "the second try, if it came before"
        await asyncio.sleep(5)
        task.cancel()
        return second.elected[0]

    assert run(scenario()) <= 10.2 + 2 * delay + STANDBY_POLL_SECONDS + 0.5


async def seconds_of(replicas: list[Replica], seconds: float) -> list[list[Shard]]:
    """Of which shards replicas led at once, tenth by tenth of a second."""
    seen = []
    for _ in range(int(seconds * 10)):
        await asyncio.sleep(0.1)
        seen.append([replica.shard for replica in replicas if replica.leader.leading])
        assert all(replica.elected for replica in replicas if replica.leader.leading)
    return seen


def started(*replicas: Replica) -> list[asyncio.Task[None]]:
    return [replica.start() for replica in replicas]


def test_each_shard_has_a_leader_of_its_own_and_they_renew_what_they_share_side_by_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> list[Replica]:
        server = Server(delay=lambda now: 0.02)
        replicas = [Replica(server, f"{number}-{i}", Shard(number, 3)) for number in range(3) for i in range(2)]
        tasks = started(*replicas)
        await asyncio.sleep(600)
        for task in tasks:
            task.cancel()
        return replicas

    replicas = run(scenario())
    assert sorted(replica.shard.number for replica in replicas if replica.elected) == [0, 1, 2]
    assert [replica.deposed for replica in replicas] == [[]] * 6
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "renewals were refused"


@pytest.mark.parametrize("seconds", [1.2, 1.8, 2.2])
def test_a_slow_server_deposes_no_leader_of_a_shard_that_it_would_not_depose_without(seconds: float) -> None:
    """Each change of the leader lists everything anew, which a slow server would bear least."""

    async def scenario(shard: Shard) -> Replica:
        replica = Replica(Server(), "one", shard)
        task = replica.start()
        await asyncio.sleep(5)
        replica.server.delay, replica.server.reading = (lambda now: seconds), seconds
        await asyncio.sleep(600)
        task.cancel()
        return replica

    for shard in (Shard(), Shard(0, 2)):
        replica = run(scenario(shard))
        assert (len(replica.elected), replica.deposed) == (1, []), shard


@pytest.mark.parametrize(("seconds", "shard"), [(2.5, Shard()), (1.8, Shard(0, 2)), (2.5, Shard(0, 2))])
def test_a_server_that_is_slow_from_the_start_keeps_nobody_from_leading(seconds: float, shard: Shard) -> None:
    async def scenario() -> list[Replica]:
        server = Server(delay=lambda now: seconds, reading=seconds)
        for task in started(*(replicas := [Replica(server, identity, shard) for identity in ("one", "two")])):
            await seconds_of(replicas, 120)
            task.cancel()
        return replicas

    assert [(len(replica.elected), replica.deposed) for replica in run(scenario())] == [(1, []), (1, [])]


def test_shards_of_another_number_wait_no_longer_where_the_former_ones_have_crashed() -> None:
    async def scenario() -> list[float]:
        server = Server()
        former = [Replica(server, f"former-{number}", Shard(number, 2)) for number in range(2)]
        later = [Replica(server, f"later-{number}", Shard(number, 3)) for number in range(3)]
        tasks = started(*former)
        await asyncio.sleep(10.5)
        waiting = started(*later)
        await asyncio.sleep(30)
        for task in tasks:
            task.cancel()
        crashed = clock()
        await asyncio.sleep(60)
        for task in waiting:
            task.cancel()
        return [replica.elected[0] - crashed for replica in later]

    assert max(run(scenario())) <= LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS


def test_the_standby_of_a_shard_takes_over_and_the_other_shard_notices_nothing() -> None:
    async def scenario() -> tuple[Replica, Replica]:
        server = Server()
        first, second = Replica(server, "one", Shard(0, 2)), Replica(server, "two", Shard(0, 2))
        other = Replica(server, "three", Shard(1, 2))
        crashing, *tasks = started(first, second, other)
        await asyncio.sleep(60.5)
        crashing.cancel()
        await asyncio.sleep(30)
        for task in tasks:
            task.cancel()
        return second, other

    second, other = run(scenario())
    assert LEASE_SECONDS - 2 <= second.elected[0] - 60.5 <= LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS
    assert (len(other.elected), other.deposed) == (1, [])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_shards_of_another_number_wait_until_the_former_ones_have_gone(before: int, after: int) -> None:
    async def scenario() -> list[list[Shard]]:
        server = Server()
        former = [Replica(server, f"former-{number}", Shard(number, before)) for number in range(before)]
        later = [Replica(server, f"later-{number}", Shard(number, after)) for number in range(after)]
        tasks = started(*former)
        await asyncio.sleep(10.5)
        waiting = started(*later)
        seen = await seconds_of([*former, *later], 60)
        for task, replica in zip(tasks, former, strict=True):  # one after the other
            task.cancel()
            await replica.leader.release()
            seen += await seconds_of([*former, *later], 5)
        seen += await seconds_of([*former, *later], LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS)
        for task in waiting:
            task.cancel()
        return seen

    seen = run(scenario())
    assert max(len({shard.count for shard in leaders}) for leaders in seen) == 1, "both divide the namespaces at once"
    assert {shard.count for shard in seen[590]} == {before}
    assert sorted(shard.number for shard in seen[-1]) == list(range(after))


def test_two_divisions_never_lead_at_once_and_no_shard_has_two_leaders_whatever_the_server_does() -> None:
    async def scenario() -> list[list[Shard]]:
        def moody(now: float) -> float:
            return (0.0, 0.5, 3.0, 9.0, 30.0)[int(now / 7) % 5]

        server = Server(delay=moody, loses=lambda now: int(now) % 11 == 0)
        shards = [Shard(0, 2), Shard(1, 2), Shard(1, 2), Shard(0, 3), Shard(1, 3), Shard(2, 3), Shard()]
        replicas = [Replica(server, f"replica-{place}", shard) for place, shard in enumerate(shards)]
        tasks = started(*replicas)
        seen = await seconds_of(replicas, 1800)
        for task in tasks:
            task.cancel()
        return seen

    seen = run(scenario())
    assert any(seen), "nobody leads"
    assert max(len({shard.count for shard in leaders}) for leaders in seen) == 1
    assert all(len(set(leaders)) == len(leaders) for leaders in seen)


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


def test_who_holds_the_lease_writes_nothing_before_it_is_elected() -> None:
    """What it would write may have been decided when it led last."""

    async def scenario() -> tuple[bool, bool, bool]:
        leader = Replica(Server()).leader
        (lease,) = leader.leases
        await lease.observe()
        await lease.run_for()
        return lease.held, leader.leading, writes(leader)

    assert run(scenario()) == (True, False, False)


def test_a_lease_that_was_taken_during_a_stall_is_not_given_back_by_the_one_before() -> None:
    async def scenario() -> str:
        server = Server()
        (stalled,), (taker,) = (Replica(server, identity).leader.leases for identity in ("one", "two"))
        await stalled.observe()
        await stalled.run_for()
        await taker.observe()
        await asyncio.sleep(LEASE_SECONDS + 1)
        await taker.run_for()
        await stalled.observe()
        await stalled.release()
        (lease,) = server.leases.values()
        holder: str = lease["spec"]["holderIdentity"]
        return holder

    assert run(scenario()) == "two"


def test_a_shared_lease_that_another_replica_has_taken_is_held_by_a_renewal_of_ones_own() -> None:
    """Others count from that of the other replica, which may be long ago."""

    async def scenario() -> tuple[bool, list[float]]:
        server = Server()
        former = Replica(server, "former", Shard(0, 3)).leader.leases[0]
        ours, others = (Replica(server, str(number), Shard(number, 2)).leader.leases[0] for number in range(2))
        await former.observe()
        await former.run_for()
        await asyncio.gather(ours.observe(), others.observe())
        await asyncio.sleep(LEASE_SECONDS + 1)
        await others.run_for()
        await asyncio.sleep(5)
        await ours.run_for()
        return ours.held, server.renewals

    held, renewals = run(scenario())
    assert (held, renewals) == (True, [LEASE_SECONDS + 1, LEASE_SECONDS + 6])
