"""Operators that divide the namespaces among them: each acts in its own, whatever happens to the others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.api_server.conftest import NewCluster, StartOperator, new_name, operators_of
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.api_server.proxy import FaultProxy
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime.login import log_in
from ddpjob_operator.shards import shard_of

AT_ONCE = {"restart": {"backoff": {"initialSeconds": 0}}}


@dataclass(frozen=True)
class Divided:
    """Four namespaces of two shards, and what starts operators for them, each behind a proxy that counts its writes."""

    spaces: tuple[Cluster, ...]
    start: StartOperator
    folder: Path
    stack: AsyncExitStack

    def of(self, shard: int) -> list[Cluster]:
        return [space for space in self.spaces if shard_of(space.namespace, 2) == shard]

    async def operator(self, identity: str, **settings: object) -> tuple[Operator, FaultProxy]:
        own = self.folder / identity
        own.mkdir()
        proxy = await self.stack.enter_async_context(FaultProxy(await log_in(), own))
        all_spaces = {"NAMESPACES": ",".join(space.namespace for space in self.spaces)}
        return await self.start(proxy.kubeconfig, IDENTITY=identity, **(all_spaces | settings)), proxy


@pytest.fixture
async def divided(new_cluster: NewCluster, tmp_path: Path) -> AsyncIterator[Divided]:
    names: dict[int, list[str]] = {0: [], 1: []}
    while min(map(len, names.values())) < 2:
        name = new_name()
        names[shard_of(name, 2)].append(name)
    spaces = []
    for name in (*names[0][:2], *names[1][:2]):
        spaces.append(await new_cluster(name))
        await spaces[-1].create_namespace()
    async with AsyncExitStack() as stack, operators_of(spaces[0], tmp_path) as start:
        yield Divided(tuple(spaces), start, tmp_path, stack)


async def trains(space: Cluster, job: str = "digits") -> list[str]:
    """Apply a job, and let its pods run; their names."""
    await space.apply_job(job, **AT_ONCE)
    pods = [pod["metadata"]["name"] for pod in await space.gang_exists(job=job)]
    await space.runs(*pods)
    await space.phase_is("Running", job)
    return pods


def acted(proxy: FaultProxy, spaces: Iterable[Cluster]) -> list[str]:
    """Those of these namespaces in which it has written anything but a Lease or an Event."""
    return [space.namespace for space in spaces if proxy.calls.get(space.namespace)]


async def shown(operator: Operator, space: Cluster) -> bool:
    """Does it export series of the jobs there? A watch of theirs is another shard's too."""
    return re.search(rf'[{{,]namespace="{space.namespace}"', await operator.metrics()) is not None


async def test_each_shard_acts_in_its_own_namespaces_and_an_outage_stays_in_its_own(
    divided: Divided,
) -> None:
    shards = [await divided.operator(f"shard-{number}", SHARDS=2, SHARD=number) for number in (0, 1)]
    pods = {space.namespace: await trains(space) for space in divided.spaces}
    for number, (operator, proxy) in enumerate(shards):
        mine = [space.namespace for space in divided.of(number)]
        assert acted(proxy, divided.spaces) == mine
        assert [space.namespace for space in divided.spaces if await shown(operator, space)] == mine
    lost, other = divided.of(0)[0], divided.of(1)[0]
    async with recorded(lost) as history:
        await lost.ends(pods[lost.namespace][1], code=1)
        await lost.gang_exists(1)
        await shards[0][0].kill()  # in the middle of a restart
        await trains(other, "second")
        successor, proxy = await divided.operator("successor", SHARDS=2, SHARD=0)
        new = [pod["metadata"]["name"] for pod in await lost.gang_exists(1)]
        await lost.runs(*new)
        await lost.phase_is("Running")
        await lost.ends(*new)
        status = await lost.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert history.broken_rules() == []
    assert acted(shards[1][1], divided.of(0)) == []
    assert acted(proxy, divided.of(1)) == []
    assert not await shown(successor, other)


async def test_a_shard_sees_the_namespaces_of_another_and_leaves_them_alone(divided: Divided) -> None:
    """Where all namespaces are served, each shard watches all of them."""
    (space,) = divided.of(0)[:1]
    await space.apply_job("listed", **AT_ONCE)
    other, proxy = await divided.operator("other", SHARDS=2, SHARD=1, NAMESPACES=space.namespace)
    await space.apply_job("watched", **AT_ONCE)

    async def leads() -> bool:
        page = await other.metrics()
        return "ddpjob_operator_leader 1.0" in page and 'watch_events_total{resource="ddpjobs"} 1.0' in page

    await eventually_async(leads, "the other shard leads, and has seen the job")
    await asyncio.sleep(2)
    assert (await space.status("listed"), await space.status("watched")) == ({}, {})
    assert acted(proxy, [space]) == []
    await divided.operator("own", SHARDS=2, SHARD=0, NAMESPACES=space.namespace)
    for job in ("listed", "watched"):
        pods = [pod["metadata"]["name"] for pod in await space.gang_exists(job=job)]
        await space.runs(*pods)
        await space.phase_is("Running", job)
        await space.ends(*pods)
        await space.phase_is("Succeeded", job)
    assert not await shown(other, space)
    assert acted(proxy, [space]) == []


async def test_a_change_of_their_number_waits_for_the_former_operator_and_loses_nothing(divided: Divided) -> None:
    former, _ = await divided.operator("former")
    pods = {space.namespace: await trains(space) for space in divided.spaces}
    shards = [await divided.operator(f"shard-{number}", SHARDS=2, SHARD=number) for number in (0, 1)]
    last = divided.of(1)[0]
    async with recorded(last) as history:
        await last.ends(pods[last.namespace][0], code=1)
        new = [pod["metadata"]["name"] for pod in await last.gang_exists(1)]
        assert [acted(proxy, divided.spaces) for _, proxy in shards] == [[], []]
        assert await former.stop() == 0
        await last.runs(*new)
        await last.phase_is("Running")
        await last.ends(*new)
        status = await last.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert history.broken_rules() == []
    assert [acted(proxy, divided.spaces) for _, proxy in shards] == [[], [last.namespace]]
