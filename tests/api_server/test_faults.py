"""Whatever goes wrong with any single call, the job ends as if nothing had (`sweep`)."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.api_server.conftest import NewCluster
from tests.api_server.harness import NO_PROGRESS, Cluster, Operator
from tests.api_server.proxy import Call, Fault
from tests.api_server.sweep import (
    CALLS,
    LIFE_SECONDS,
    job_under,
    killed_after,
    old_picture,
    one_operator,
    proxy_before,
    restarted,
    resumed,
    struck_once,
    tried_again,
)
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

KINDS = (
    "POST services",
    "POST persistentvolumeclaims",
    "POST pods",
    "DELETE pods",
    "PATCH services",
    "PATCH ddpjobs/status",
)


async def test_the_fault_free_job_takes_the_calls_that_the_sweep_goes_through(
    new_cluster: NewCluster, start_operator: Any, tmp_path: Path, cluster: Cluster
) -> None:
    async with proxy_before(cluster, tmp_path) as proxy:
        await start_operator(proxy.kubeconfig, **NO_PROGRESS)
        assert await job_under(cluster, proxy) == ""
        kinds = [call.kind for call in proxy.calls[cluster.namespace]]
    expected = {"POST services": 1, "POST persistentvolumeclaims": 1, "POST pods": 4, "DELETE pods": 2, "PATCH pods": 4}
    assert Counter(kinds) == expected | {"PATCH services": 1, "PATCH ddpjobs/status": 5}


@pytest.mark.fault(2, 3)
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.CONFLICT, Fault.BROKEN], ids=lambda fault: fault.name)
async def test_a_call_that_goes_wrong_changes_nothing_in_the_end(
    new_cluster: NewCluster, tmp_path: Path, fault: Fault
) -> None:
    results = await struck_once(new_cluster, tmp_path, fault, range(CALLS))
    assert {call: result for call, result in results.items() if result} == {}


@pytest.mark.fault(5, 7)
async def test_a_call_of_any_kind_that_gets_no_whole_answer_is_made_again(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    """A busy server, a connection that is reset before or within the answer, a server that hangs: each once for each
    kind of call."""
    faults = (Fault.BUSY, Fault.CUT, Fault.HALF, Fault.FROZEN)
    pairs = [(fault, kind) for fault in faults for kind in KINDS]
    clusters = await asyncio.gather(*(new_cluster() for _ in pairs))
    open_: dict[str, tuple[Fault, str]] = {
        cluster.namespace: pair for cluster, pair in zip(clusters, pairs, strict=True)
    }

    def strike(call: Call) -> Fault:
        if open_.get(call.namespace, (None, ""))[1] != call.kind:
            return Fault.PASS
        return open_.pop(call.namespace)[0]

    async with (
        proxy_before(clusters[0], tmp_path, fault=strike) as proxy,
        one_operator(clusters, proxy, tmp_path),
    ):
        results = await asyncio.gather(*(job_under(cluster, proxy) for cluster in clusters))
    assert {pair: result for pair, result in zip(pairs, results, strict=True) if result} == {}
    assert open_ == {}, "every fault has struck"


@pytest.mark.fault(3)
async def test_a_status_that_was_decided_on_an_older_job_is_refused_and_decided_again(
    cluster: Cluster, start_operator: Any, tmp_path: Path
) -> None:
    struck: list[int] = []

    def every_other_status(call: Call) -> Fault:
        strikes = call.kind == "PATCH ddpjobs/status" and (not struck or not struck[-1])
        if call.kind == "PATCH ddpjobs/status":
            struck.append(strikes)
        return Fault.OVERTAKEN if strikes else Fault.PASS

    async def annotate() -> None:
        path = f"{paths.jobs(cluster.namespace)}/digits"
        await cluster.client.merge_patch(path, "ddpjobs", {"metadata": {"annotations": {"seen": str(len(struck))}}})

    async with proxy_before(cluster, tmp_path, fault=every_other_status, overtake=annotate) as proxy:
        await start_operator(proxy.kubeconfig, **NO_PROGRESS)
        assert await job_under(cluster, proxy) == ""
    codes = [entry.code for entry in await cluster.cost() if entry.resource == "ddpjobs/status"]
    assert codes == [409, 200] * 5


@pytest.mark.fault(1)
@pytest.mark.parametrize("stale", ["", "ddpjobs", "pods"], ids=["true lists", "an old job", "old pods"])
async def test_an_operator_killed_at_any_call_is_followed_by_one_that_does_the_rest(
    new_cluster: NewCluster, tmp_path: Path, stale: str
) -> None:
    results = await killed_after(new_cluster, tmp_path, range(-1, CALLS), stale)
    assert {number: result for number, result in results.items() if result} == {}


@pytest.mark.fault(3)
async def test_an_operator_with_an_old_picture_of_a_job_reads_it_before_it_touches_its_pods(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    stories = (restarted, resumed, tried_again)
    async with old_picture(new_cluster, tmp_path, stories) as seen:

        async def read_or_touched() -> bool:
            return len(seen.read) == len(stories) or bool(seen.touched)

        await eventually_async(read_or_touched, "every job is read", LIFE_SECONDS)
        assert seen.touched == {}


async def test_an_operator_that_is_told_to_stop_within_a_call_is_followed_by_one_that_does_the_rest(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    struck = range(1, CALLS, 4)
    results = await asyncio.gather(
        *[told_to_stop(await new_cluster(), index, tmp_path / str(index)) for index in struck]
    )
    assert {index: result for index, result in zip(struck, results, strict=True) if result} == {}


async def told_to_stop(cluster: Cluster, index: int, folder: Path) -> str:
    folder.mkdir()  # noqa: ASYNC240

    def strike(call: Call) -> Fault:
        return Fault.TERM if call.index == index else Fault.PASS

    async with proxy_before(cluster, folder, fault=strike) as proxy:
        operator = Operator(cluster.namespace, proxy.kubeconfig, folder / "log", forked=True)
        proxy.terminate = lambda: operator.signal(signal.SIGTERM)
        await operator.start()

        async def start_again() -> int:
            assert operator.process is not None
            code = await operator.process.wait()
            await operator.start()
            return code

        supervisor = asyncio.create_task(start_again())
        try:
            await operator.ready()
            result = await job_under(cluster, proxy)
            if result:
                return result
            async with asyncio.timeout(LIFE_SECONDS):
                code = await supervisor
            return "" if code == 0 else f"the first one ended with {code}"
        finally:
            supervisor.cancel()
            await operator.kill()
