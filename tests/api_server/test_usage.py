"""What the operator counts of jobs that are gone, beside an account that the test keeps from conditions and ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api_server.conftest import StartOperator
from tests.api_server.fleet import Fleet, ended, fleet
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

WAVE = 100
GPUS = 8

Object = dict[str, Any]


async def page_of(operator: Operator) -> str:
    """Its metrics. A busy one may take longer than a probe waits."""
    pages: list[str] = []

    async def answered() -> bool:
        status, page = await operator.probe("metrics")
        pages.append(page)
        return status == 200

    await eventually_async(answered, "the operator shows its metrics")
    return pages[-1]


async def counted(operator: Operator, metric: str) -> Counter[str]:
    """By outcome, of all namespaces and causes, as Prometheus would scrape it. Jobs that have not ended have none."""
    families = {family.name: family for family in text_string_to_metric_families(await page_of(operator))}
    found: Counter[str] = Counter()
    for sample in families[metric].samples:
        if sample.name == f"{metric}_total":
            found[sample.labels.get("outcome", "")] += sample.value  # type: ignore[assignment]
    return found


async def series_of_jobs(operator: Operator) -> set[str]:
    """All series that a job has on its page: names and labels."""
    lines = [line for line in (await page_of(operator)).splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0] for line in lines if 'ddpjob="' in line}


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def ran_since(job: Object) -> datetime:
    (condition,) = (item for item in job["status"]["conditions"] if item["type"] == "Running")
    return time_of(condition["lastTransitionTime"])


async def begin(cluster: Cluster, seen: Fleet, names: list[str]) -> dict[str, datetime]:
    """Since when each job runs."""
    job = {"nodes": 1, "resources": {"limits": {"nvidia.com/gpu": GPUS}}, "restart": {"maxRestarts": 0}}
    await asyncio.gather(*(cluster.apply_job(name, **job) for name in names))
    await seen.until_each(names, lambda name: seen.phase(name) == "Running", "all jobs of the wave run")
    return {name: ran_since(seen.jobs[name]) for name in names}


async def one_that_stays(operator: Operator, cluster: Cluster, seen: Fleet) -> set[str]:
    """A job that succeeds and is not deleted; its series."""
    await cluster.apply_job("stays", nodes=1)
    await seen.until(lambda: seen.phase("stays") == "Running", "the job that stays runs")
    await seen.report("stays-0-0", ended(0))
    found: set[str] = set()

    async def settled() -> bool:
        found.clear()
        found.update(await series_of_jobs(operator))
        return any('phase="Succeeded"' in series for series in found)

    await eventually_async(settled, "the end of the job that stays is on the page")
    return found


async def finish(
    operator: Operator, cluster: Cluster, seen: Fleet, since: dict[str, datetime], outcomes: dict[str, str]
) -> tuple[Counter[str], float]:
    """End the jobs and delete them; the seconds for which they ran, by outcome, and how many more it may take until the
    operator has noticed the deletions."""
    deleted = [name for name, outcome in outcomes.items() if outcome == "Deleted"]
    until: dict[str, datetime] = {}

    async def delete(name: str) -> None:
        await cluster.delete_job(name)
        until.setdefault(name, datetime.now(UTC))

    async def known() -> bool:
        page = await page_of(operator)
        return all(f'ddpjob="{name}"' in page for name in outcomes)

    async def noticed() -> bool:
        page = await page_of(operator)
        return not any(f'ddpjob="{name}"' in page for name in deleted)

    # what is deleted before an operator has looked at it is deleted while none runs
    await eventually_async(known, "the operator has looked at the jobs")
    await asyncio.gather(*(delete(name) for name in deleted))
    await eventually_async(noticed, "the operator has noticed the deletions")
    late = sum((datetime.now(UTC) - until[name]).total_seconds() for name in deleted)
    ends = {name: outcome for name, outcome in outcomes.items() if outcome != "Deleted"}
    await asyncio.gather(*(seen.report(f"{name}-0-0", ended(int(way == "Failed"))) for name, way in ends.items()))
    await seen.until(
        lambda: all(seen.phase(name) == outcome for name, outcome in ends.items()), "the jobs of the wave have ended"
    )
    until |= {name: time_of(seen.jobs[name]["status"]["completionTime"]) for name in ends}
    await asyncio.gather(*(delete(name) for name in ends))
    await seen.until(lambda: not seen.jobs.keys() & since.keys(), "the wave is gone")
    account: Counter[str] = Counter()
    for name, outcome in outcomes.items():
        account[outcome] += (until[name] - since[name]).total_seconds()  # type: ignore[assignment]
    return account, late


@pytest.mark.timeout(300)
async def test_gpu_seconds_of_jobs_that_are_gone_are_counted_across_a_restart_of_the_operator(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """Two waves; the operator is replaced while the jobs of the second one run. Half of them succeed, a quarter fails,
    and a quarter is deleted before its end. Of their series, none is left; a job that stays keeps each of its own."""
    first_wave = {f"first-{number}": "Succeeded" for number in range(WAVE)}
    ways = ("Succeeded", "Failed", "Succeeded", "Deleted")
    second_wave = {f"second-{number}": ways[number % len(ways)] for number in range(WAVE)}
    metrics = [f"ddpjob_{kind}_seconds" for kind in ("gpu", "node", "held_gpu", "held_node")]
    first = await start_operator()
    async with fleet(cluster) as seen:
        series = await one_that_stays(first, cluster, seen)
        of_the_one = {metric: await counted(first, metric) for metric in metrics}
        running = await begin(cluster, seen, list(first_wave))
        account, _ = await finish(first, cluster, seen, running, first_wave)
        running = await begin(cluster, seen, list(second_wave))
        before = {metric: await counted(first, metric) for metric in metrics}
        assert await first.stop() == 0
        second = await start_operator()
        of_second, late = await finish(second, cluster, seen, running, second_wave)
        account += of_second
        total = {metric: before[metric] + await counted(second, metric) - of_the_one[metric] for metric in metrics}
        left: set[str] = set()

        async def as_before() -> bool:
            left.clear()
            left.update(await series_of_jobs(second))
            return left == series

        # the operator may hear of the last deletions later than this test
        await eventually_async(as_before, "the series of jobs are those of before", instead=lambda: left ^ series)
    for metric, each in zip(metrics, (GPUS, 1, GPUS, 1), strict=True):
        by_outcome = total[metric]
        assert account.total() * each * 0.99 <= by_outcome.total() <= (account.total() + late) * each * 1.01, metric
        if "held" not in metric:
            assert by_outcome["Succeeded"] == pytest.approx(account["Succeeded"] * each, rel=0.01)
            assert by_outcome["Failed"] == pytest.approx(account["Failed"] * each, rel=0.01)
            assert (
                account["Deleted"] * each * 0.99 <= by_outcome["Deleted"] <= (account["Deleted"] + late) * each * 1.01
            )
