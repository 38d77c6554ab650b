"""What comes to the operator late, twice, in another order, in part or not at all changes nothing in the end."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import NO_PROGRESS, Cluster
from tests.api_server.proxy import Call, Fault, FaultProxy, refusal
from tests.api_server.sweep import job_under, proxy_before
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.login import log_in

Rearrange = Callable[[list[bytes]], list[bytes]]


def shuffled_and_doubled(seed: int) -> Rearrange:
    chance = random.Random(seed)

    def rearrange(events: list[bytes]) -> list[bytes]:
        twice = events * 2
        chance.shuffle(twice)
        return twice

    return rearrange


def every_other_lost() -> Rearrange:
    count = 0

    def rearrange(events: list[bytes]) -> list[bytes]:
        nonlocal count
        count += len(events)
        return [event for number, event in enumerate(events, start=count) if number % 2]

    return rearrange


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    ("rearrange", "resync"),
    [(shuffled_and_doubled(7), 300), (every_other_lost(), 1)],
    ids=["doubled and in another order", "every other one lost"],
)
async def test_events_that_come_twice_in_disorder_or_never_cost_no_call(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path, rearrange: Rearrange, resync: int
) -> None:
    expected = {"POST services": 1, "POST persistentvolumeclaims": 1, "POST pods": 4, "DELETE pods": 2}
    async with proxy_before(cluster, tmp_path, rearrange=rearrange) as proxy:
        await start_operator(proxy.kubeconfig, RESYNC_SECONDS=resync, **NO_PROGRESS)
        assert await job_under(cluster, proxy) == ""
        made = [call.kind for call in proxy.calls[cluster.namespace]]
    assert {kind: made.count(kind) for kind in expected} == expected
    assert len(made) <= 18, made  # four of them release a pod


@pytest.mark.fault(7)
async def test_a_watch_that_breaks_off_within_an_event_misses_nothing(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    broken = 0

    def break_off(events: list[bytes]) -> list[bytes]:
        """Half of an event, and then the connection is reset; each third time."""
        nonlocal broken
        broken += 1
        if broken % 3:
            return events
        proxy.hang_up()
        return [events[0][: len(events[0]) // 2]]

    async with proxy_before(cluster, tmp_path, rearrange=break_off) as proxy:
        await start_operator(proxy.kubeconfig)
        assert await job_under(cluster, proxy) == ""
    assert broken >= 3


IMPATIENT = (
    "import sys; from ddpjob_operator.runtime import client; client.SILENCE_SECONDS = 5.0; "
    "from ddpjob_operator import main; sys.exit(main.main())"
)
"""An operator that takes a watch for lost before the API server's next bookmark, which comes within a minute."""


@pytest.mark.fault(8)
async def test_what_happens_while_the_watches_are_silent_is_missed_only_until_they_are_given_up(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """The connections stay, and nothing comes any more: of pods, of jobs, or of Services. No resync is near."""
    silent: list[web.Request] = []
    held: set[str] = set()
    changed = asyncio.Event()

    async def begun(request: web.Request) -> None:
        # one that is given up before all has changed is followed by one that must be as silent
        if request.query.get("watch") == "true" and not changed.is_set():
            silent.append(request)

    async with FaultProxy(await log_in(), tmp_path, read_fault=begun) as proxy:
        await start_operator(proxy.kubeconfig, command=(sys.executable, "-c", IMPATIENT))
        jobs = ("fails", "suspended", "without-service")
        for job in jobs:
            await cluster.apply_job(job, restart={"backoff": {"initialSeconds": 0}})
            await cluster.runs(*(pod["metadata"]["name"] for pod in await cluster.gang_exists(job=job)))
        await asyncio.gather(*(cluster.phase_is("Running", job) for job in jobs))

        def is_silent(request: web.Request) -> bool:
            found = any(request is one for one in silent)
            held.update({request.path.rpartition("/")[2]} if found else ())
            return found

        service = await cluster.service("without-service-rdzv")
        proxy.freeze = is_silent
        await cluster.ends("fails-0-1", code=1)
        await cluster.edit_job("suspended", suspend=True)
        await cluster.client.delete(f"{paths.services(cluster.namespace)}/without-service-rdzv", "services")
        changed.set()

        async def made_anew() -> bool:
            found = await cluster.client.list(paths.services(cluster.namespace), "services")
            uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in found[0]}
            return uids.get("without-service-rdzv", service["metadata"]["uid"]) != service["metadata"]["uid"]

        await cluster.gang_exists(attempt=1, job="fails")
        await cluster.phase_is("Suspended", "suspended")
        await eventually_async(made_anew, "the Service is made anew")
        assert {"pods", "ddpjobs", "services"} <= held
        proxy.freeze = lambda request: False


@pytest.mark.fault(10)
async def test_a_pod_that_only_an_old_list_shows_is_not_deleted_by_its_name(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """The pods have been replaced by others of their names. One whose list is from before wants to delete the old
    ones."""
    old: list[dict[str, Any]] = []

    async def lists(request: web.Request) -> web.StreamResponse | None:
        listed = request.path.endswith("/pods") and "watch" not in request.query
        return web.json_response(old[0]) if old and listed else None

    async with FaultProxy(await log_in(), tmp_path, read_fault=lists) as proxy:
        proxy.freeze = lambda request: bool(old) and request.path.endswith("/pods")
        first = await start_operator(proxy.kubeconfig)
        await cluster.apply_job()
        before = await cluster.gang_exists()
        listed = await cluster.client.get(paths.pods(cluster.namespace), "pods")
        for pod in before:
            await cluster.client.delete(f"{paths.pods(cluster.namespace)}/{pod['metadata']['name']}", "pods")
        gone = {pod["metadata"]["uid"] for pod in before}

        async def others() -> dict[str, str] | None:
            found = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()}
            return found if len(found) == 2 and not gone & set(found.values()) else None

        new = await eventually_async(others, "the pods are replaced by others of their names")
        await first.kill()
        await cluster.edit_job(suspend=True)
        old.append(listed)
        await start_operator(proxy.kubeconfig)

        async def refused() -> bool:
            asked = [entry for entry in await cluster.cost() if (entry.verb, entry.code) == ("delete", 409)]
            return {entry.name for entry in asked} == new.keys()

        await eventually_async(refused, "it tries to delete the pods that it sees, and may not")
        old.clear()
        await cluster.phase_is("Suspended")
        assert await cluster.pods() == []


@pytest.mark.fault(12)
async def test_a_right_that_was_taken_away_is_a_condition_until_it_is_given_back(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """403 to each creation of a pod: what a change of the operator's role leads to."""
    forbidden = True

    def no_pods(call: Call) -> Fault:
        return Fault.FORBIDDEN if forbidden and call.kind == "POST pods" else Fault.PASS

    async with FaultProxy(await log_in(), tmp_path, fault=no_pods) as proxy:
        await start_operator(proxy.kubeconfig)
        await cluster.apply_job()
        degraded = await cluster.condition("Degraded", "Forbidden")
        assert degraded["status"] == "True"
        assert "the API server rejected Pod digits-0-" in degraded["message"]
        forbidden = False
        await cluster.runs(*(pod["metadata"]["name"] for pod in await cluster.gang_exists()))
        status = await cluster.phase_is("Running")
    assert {item["type"]: item["status"] for item in status["conditions"]}["Degraded"] == "False"
    assert (status["attempt"], status.get("restarts", 0)) == (0, 0)


@pytest.mark.fault(6)
async def test_lists_that_fail_for_a_while_take_nothing_from_a_job_that_runs(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    failing = False
    asked = 0

    async def no_lists(request: web.Request) -> web.StreamResponse | None:
        nonlocal asked
        ours = request.path.endswith(("/pods", "/ddpjobs"))
        asked += ours and failing
        return refusal(503, "ServiceUnavailable") if ours and failing else None

    async with FaultProxy(await log_in(), tmp_path, read_fault=no_lists) as proxy:
        operator = await start_operator(proxy.kubeconfig, RESYNC_SECONDS=1)
        await cluster.apply_job()
        names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*names)
        await cluster.phase_is("Running")
        failing = True
        proxy.hang_up()

        async def unready() -> bool:
            return asked > 4 and (await operator.probe("readyz"))[0] == 503

        await eventually_async(unready, "it says that it cannot list")
        assert [pod["metadata"]["name"] for pod in await cluster.pods()] == names
        failing = False
        await operator.ready()
        await cluster.ends(*names)
        status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (0, 0)
