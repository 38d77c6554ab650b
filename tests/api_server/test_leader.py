"""Of two operators one acts; the other takes over when the first is gone, and only then."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.api_server.proxy import FaultProxy
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime.leader import FENCE_SECONDS, LEASE_SECONDS, STANDBY_POLL_SECONDS
from ddpjob_operator.runtime.login import log_in

TAKEOVER_SECONDS = 17.0
SLACK_SECONDS = 3.0
"""What a busy machine may add to a figure that is the sum of timers."""


@pytest.fixture
async def pair(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> AsyncIterator[list[tuple[Operator, FaultProxy]]]:
    """Two operators, each behind a proxy that counts its writes; the first one leads."""
    async with AsyncExitStack() as stack:
        made = []
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            proxy = await stack.enter_async_context(FaultProxy(await log_in(), folder))
            operator = await start_operator(proxy.kubeconfig, IDENTITY=name)
            made.append((operator, proxy))
        yield made


def writes(proxy: FaultProxy, cluster: Cluster) -> int:
    return len(proxy.calls.get(cluster.namespace, []))


async def test_two_operators_do_the_work_once(cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]) -> None:
    (_, first), (_, second) = pair
    await cluster.apply_job(nodes=3)
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=3)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    kinds = Counter(call.kind for call in first.calls[cluster.namespace])
    assert kinds == {
        "POST services": 1,
        "POST persistentvolumeclaims": 1,
        "POST pods": 3,
        "PATCH ddpjobs/status": 2,
    }
    assert writes(second, cluster) == 0


async def test_the_standby_takes_over_after_a_crash(cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]) -> None:
    (leader, _), (_, second) = pair
    await leader.kill()
    began = asyncio.get_running_loop().time()
    await cluster.apply_job()
    await cluster.gang_exists(seconds=TAKEOVER_SECONDS + SLACK_SECONDS)
    took = asyncio.get_running_loop().time() - began
    assert writes(second, cluster) > 0
    assert took <= TAKEOVER_SECONDS + SLACK_SECONDS
    assert LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS <= TAKEOVER_SECONDS


async def test_the_standby_takes_over_at_once_after_a_graceful_end(
    cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]
) -> None:
    (leader, _), _ = pair
    assert await leader.stop() == 0
    began = asyncio.get_running_loop().time()
    await cluster.apply_job()
    await cluster.gang_exists(seconds=2 + SLACK_SECONDS)
    assert asyncio.get_running_loop().time() - began <= 2 + SLACK_SECONDS


@pytest.mark.fault(13)
async def test_a_leader_that_slept_past_its_lease_writes_nothing_when_it_wakes(
    cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]
) -> None:
    (leader, first), (_, second) = pair
    await cluster.apply_job("early")

    async def shows_it() -> bool:
        return 'job="early"' in (await leader.probe("metrics"))[1]

    await eventually_async(shows_it, "the leader shows the job that it acts for")
    leader.signal(signal.SIGSTOP)
    await cluster.apply_job()
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(seconds=TAKEOVER_SECONDS + SLACK_SECONDS)]
    before = writes(first, cluster)
    leader.signal(signal.SIGCONT)
    # it has slept through the job's creation, so it has something to do as soon as it believes to lead
    await cluster.runs(*names)
    await cluster.phase_is("Running")

    async def stands_by() -> bool:
        _, page = await leader.probe("metrics")
        return "ddpjob_operator_leader 0.0" in page and 'ddpjob="' not in page

    await eventually_async(
        stands_by, "the first one knows that it does not lead, and shows no job", seconds=FENCE_SECONDS
    )
    assert writes(first, cluster) == before
    assert writes(second, cluster) > 0


@pytest.mark.fault(13)
async def test_calls_of_a_leader_that_arrive_when_another_has_replaced_it_change_nothing(
    cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]
) -> None:
    """It sleeps in the middle of a restart, with calls on their way that no fence of its own can stop any more."""
    (leader, first), (_, second) = pair
    async with recorded(cluster) as history:
        await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
        old = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*old)
        await cluster.phase_is("Running")
        before = writes(first, cluster)
        first.hold = asyncio.Event()
        await cluster.ends(old[1], code=1)

        async def on_its_way() -> bool:
            return writes(first, cluster) > before

        await eventually_async(on_its_way, "the leader has sent the new attempt")
        leader.signal(signal.SIGSTOP)
        new = [pod["metadata"]["name"] for pod in await cluster.gang_exists(1, seconds=TAKEOVER_SECONDS + 30)]
        await cluster.runs(*new)
        await cluster.phase_is("Running")
        first.hold.set()
        await first.delivered()
        leader.signal(signal.SIGCONT)
        await cluster.ends(*new)
        status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert history.broken_rules() == []
    assert writes(second, cluster) > 0


async def test_a_standby_whose_picture_of_a_job_is_old_leaves_its_new_gang_alone(
    cluster: Cluster, pair: list[tuple[Operator, FaultProxy]]
) -> None:
    """Its watch of DDPJobs brings nothing any more, but that of pods does: they are of an attempt that it has not
    heard of."""
    (leader, _), (standby, second) = pair
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    old = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*old)
    await cluster.phase_is("Running")
    second.freeze = lambda request: request.query.get("watch") == "true" and request.path.endswith("/ddpjobs")
    await cluster.ends(old[1], code=1)
    new = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.gang_exists(1)}
    await cluster.runs(*new)
    await cluster.phase_is("Running")
    await leader.kill()

    async def leads() -> bool:
        return "ddpjob_operator_leader 1.0" in (await standby.probe("metrics"))[1]

    await eventually_async(leads, "the standby leads", seconds=TAKEOVER_SECONDS + SLACK_SECONDS)
    await asyncio.sleep(2)
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()} == new
    assert [call.kind for call in second.calls.get(cluster.namespace, [])] == []
    await cluster.ends(*new)
    status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_a_leader_whose_lease_could_not_be_renewed_for_a_while_misses_nothing_of_that_time(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """What it looks at while it may not act is looked at again as soon as it may; the next resync is minutes away."""
    silent = asyncio.Event()

    async def no_leases(request: web.Request) -> web.StreamResponse | None:
        if "/leases" in request.path and silent.is_set():
            await asyncio.sleep(60)
        return None

    async with FaultProxy(await log_in(), tmp_path, read_fault=no_leases) as proxy:
        operator = await start_operator(proxy.kubeconfig)

        async def leads(expected: str) -> bool:
            return f"ddpjob_operator_leader {expected}" in (await operator.probe("metrics"))[1]

        await eventually_async(lambda: leads("1.0"), "it leads", seconds=LEASE_SECONDS + SLACK_SECONDS)
        silent.set()
        await eventually_async(lambda: leads("0.0"), "it knows that it does not", seconds=2 * FENCE_SECONDS)
        await cluster.apply_job()
        await asyncio.sleep(1)
        assert writes(proxy, cluster) == 0
        silent.clear()
        await cluster.gang_exists(seconds=LEASE_SECONDS + SLACK_SECONDS)
