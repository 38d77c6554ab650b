"""Of two operators one acts; the other takes over when the first is gone, and only then."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from tests.api_server.conftest import StartOperator, new_name, operators_of
from tests.api_server.harness import NO_PROGRESS, Cluster, Object, Operator
from tests.api_server.history import recorded
from tests.api_server.proxy import FaultProxy
from tests.api_server.server import ApiServer, as_kubeconfig
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime import paths
from ddpjob_operator.runtime.leader import LEASE_SECONDS, STANDBY_POLL_SECONDS
from ddpjob_operator.runtime.login import log_in

TAKEOVER_SECONDS = 17.0
SLACK_SECONDS = 3.0
"""What a busy machine may add to a figure that is the sum of timers, measured by who holds the Lease and since when."""


Operators = list[tuple[Operator, FaultProxy]]
Waiting = Callable[[Cluster, Operators], Awaitable[None]]
WAITING: dict[str, tuple[int, Waiting]] = {}


@pytest.fixture
async def pair(cluster: Cluster, start_operator: StartOperator, tmp_path: Path) -> AsyncIterator[Operators]:
    async with proxied(2, start_operator, tmp_path) as made:
        yield made


@asynccontextmanager
async def proxied(count: int, start: StartOperator, folder: Path) -> AsyncIterator[Operators]:
    """One or two operators, each behind a proxy that counts its writes; the first one leads."""
    async with AsyncExitStack() as stack:
        made = []
        for name in ("first", "second")[:count]:
            own = folder / name
            own.mkdir()
            proxy = await stack.enter_async_context(FaultProxy(await log_in(), own))
            operator = await start(proxy.kubeconfig, IDENTITY=name, **NO_PROGRESS)
            made.append((operator, proxy))
        yield made


def at_once(operators: int) -> Callable[[Waiting], Callable[..., None]]:
    """A test that waits for a Lease to expire most of its time. These tests run at the same time, each with so many
    operators in a namespace of its own, when the first one is due, which has the time of all."""

    def decorate(waiting: Waiting) -> Callable[..., None]:
        def test(ended: dict[str, BaseException | None]) -> None:
            if (error := ended[waiting.__name__]) is not None:
                raise error

        test.__name__, test.__doc__ = waiting.__name__, waiting.__doc__
        WAITING[waiting.__name__] = operators, waiting
        return test

    return decorate


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ended(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException | None]:
    """How each of them has ended."""
    async with AsyncExitStack() as stack:
        stack.enter_context(as_kubeconfig(api_server.kubeconfig))
        begun = []
        for count, waiting in WAITING.values():  # one after the other: a leader that must share two cores is slow
            cluster = await Cluster.connect(api_server.kubeconfig, new_name())
            stack.push_async_callback(cluster.client.close)
            await cluster.create_namespace()
            if not api_server.ours:
                stack.push_async_callback(cluster.delete_namespace)
            folder = tmp_path_factory.mktemp("operators")
            start = await stack.enter_async_context(operators_of(cluster, folder))
            begun.append(waiting(cluster, await stack.enter_async_context(proxied(count, start, folder))))
        ends = await asyncio.gather(*begun, return_exceptions=True)
    return dict(zip(WAITING, ends, strict=True))


async def lease(cluster: Cluster) -> Object:
    """What the Lease says."""
    found: Object = (await cluster.client.get(f"{paths.leases(cluster.namespace)}/ddpjob-operator", "leases"))["spec"]
    return found


async def taken(cluster: Cluster, by: str) -> datetime:
    """When this operator took the Lease, as it says there: what it has to do then takes as long as the machine does."""

    async def seen() -> str | None:
        found = await lease(cluster)
        return str(found["acquireTime"]) if found["holderIdentity"] == by else None

    return datetime.fromisoformat(await eventually_async(seen, f"the {by} one holds the Lease"))


def writes(proxy: FaultProxy, cluster: Cluster) -> int:
    return len(proxy.calls.get(cluster.namespace, []))


async def test_two_operators_do_the_work_once(cluster: Cluster, pair: Operators) -> None:
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


async def test_the_standby_takes_over_after_a_crash(cluster: Cluster, pair: Operators) -> None:
    (leader, _), (_, second) = pair
    await leader.kill()
    renewed = datetime.fromisoformat((await lease(cluster))["renewTime"])
    await cluster.apply_job()
    took = await taken(cluster, by="second") - renewed
    assert took <= timedelta(seconds=TAKEOVER_SECONDS + SLACK_SECONDS)
    await cluster.gang_exists()
    assert writes(second, cluster) > 0
    assert LEASE_SECONDS + 2 * STANDBY_POLL_SECONDS <= TAKEOVER_SECONDS


async def test_the_standby_takes_over_at_once_after_a_graceful_end(cluster: Cluster, pair: Operators) -> None:
    (leader, _), _ = pair
    assert await leader.stop() == 0
    ended = datetime.now(UTC)
    await cluster.apply_job()
    assert await taken(cluster, by="second") - ended <= timedelta(seconds=2 + SLACK_SECONDS)
    await cluster.gang_exists()


@pytest.mark.fault(13)
@at_once(operators=2)
async def test_a_leader_that_slept_past_its_lease_writes_nothing_when_it_wakes(
    cluster: Cluster, pair: Operators
) -> None:
    (leader, first), (_, second) = pair
    await cluster.apply_job("early")

    async def shows_it() -> bool:
        return 'job="early"' in await leader.metrics()

    await eventually_async(shows_it, "the leader shows the job that it acts for")
    leader.signal(signal.SIGSTOP)
    await cluster.apply_job()
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    before = writes(first, cluster)
    leader.signal(signal.SIGCONT)
    # it has slept through the job's creation, so it has something to do as soon as it believes to lead
    await cluster.runs(*names)
    await cluster.phase_is("Running")

    async def stands_by() -> bool:
        page = await leader.metrics()
        return "ddpjob_operator_leader 0.0" in page and 'ddpjob="' not in page

    await eventually_async(stands_by, "the first one knows that it does not lead, and shows no job")
    assert writes(first, cluster) == before
    assert writes(second, cluster) > 0


@pytest.mark.fault(13)
@at_once(operators=2)
async def test_calls_of_a_leader_that_arrive_when_another_has_replaced_it_change_nothing(
    cluster: Cluster, pair: Operators
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
        new = [pod["metadata"]["name"] for pod in await cluster.gang_exists(1)]
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


@at_once(operators=2)
async def test_a_standby_whose_picture_of_a_job_is_old_leaves_its_new_gang_alone(
    cluster: Cluster, pair: Operators
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
        return "ddpjob_operator_leader 1.0" in await standby.metrics()

    await eventually_async(leads, "the standby leads")
    await asyncio.sleep(2)
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()} == new
    assert [call.kind for call in second.calls.get(cluster.namespace, [])] == []
    await cluster.ends(*new)
    status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)


@at_once(operators=1)
async def test_a_leader_whose_lease_could_not_be_renewed_for_a_while_misses_nothing_of_that_time(
    cluster: Cluster, alone: Operators
) -> None:
    """What it looks at while it may not act is looked at again as soon as it may; the next resync is minutes away."""
    ((operator, proxy),) = alone
    silent = asyncio.Event()

    async def no_leases(request: web.Request) -> web.StreamResponse | None:
        if "/leases" in request.path and silent.is_set():
            await asyncio.sleep(60)
        return None

    async def leads(expected: str) -> bool:
        return f"ddpjob_operator_leader {expected}" in await operator.metrics()

    proxy.read_fault = no_leases
    await eventually_async(lambda: leads("1.0"), "it leads")
    silent.set()
    await eventually_async(lambda: leads("0.0"), "it knows that it does not")
    await cluster.apply_job()
    await asyncio.sleep(1)
    assert writes(proxy, cluster) == 0
    silent.clear()
    await cluster.gang_exists()
