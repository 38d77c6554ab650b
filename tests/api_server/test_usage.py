"""What the operator counts of jobs that are gone, beside an account that the test keeps from conditions and ends."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api_server.conftest import StartOperator
from tests.api_server.fleet import Fleet, ended, fleet
from tests.api_server.harness import Cluster, Operator

WAVE = 100
GPUS = 8

Object = dict[str, Any]


async def counted(operator: Operator, metric: str) -> float:
    """Of all namespaces and causes, as Prometheus would scrape it."""
    _, page = await operator.probe("metrics")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return sum(sample.value for sample in families[metric].samples if sample.name == f"{metric}_total")


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def ran_since(job: Object) -> datetime:
    (condition,) = (item for item in job["status"]["conditions"] if item["type"] == "Running")
    return time_of(condition["lastTransitionTime"])


async def begin(cluster: Cluster, seen: Fleet, names: list[str]) -> dict[str, datetime]:
    """Since when each job runs."""
    gpus = {"limits": {"nvidia.com/gpu": GPUS}}
    await asyncio.gather(*(cluster.apply_job(name, nodes=1, resources=gpus) for name in names))
    await seen.until(lambda: seen.in_phase(names, "Running"), "all jobs of the wave run")
    return {name: ran_since(seen.jobs[name]) for name in names}


async def finish(cluster: Cluster, seen: Fleet, since: dict[str, datetime]) -> float:
    """End the jobs and delete them; the seconds for which they ran."""
    names = list(since)
    await asyncio.gather(*(seen.report(f"{name}-0-0", ended(0)) for name in names))
    await seen.until(lambda: seen.in_phase(names, "Succeeded"), "all jobs of the wave have succeeded")
    until = {name: time_of(seen.jobs[name]["status"]["completionTime"]) for name in names}
    await asyncio.gather(*(cluster.delete_job(name) for name in names))
    await seen.until(lambda: not seen.jobs.keys() & since.keys(), "the wave is gone")
    return sum((until[name] - since[name]).total_seconds() for name in names)


@pytest.mark.timeout(300)
async def test_gpu_seconds_of_jobs_that_are_gone_are_counted_across_a_restart_of_the_operator(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """Two waves; the operator is replaced while the jobs of the second one run."""
    first = await start_operator()
    async with fleet(cluster) as seen:
        running = await begin(cluster, seen, [f"first-{number}" for number in range(WAVE)])
        account = await finish(cluster, seen, running)
        running = await begin(cluster, seen, [f"second-{number}" for number in range(WAVE)])
        before = {unit: await counted(first, f"ddpjob_{unit}_seconds") for unit in ("gpu", "node")}
        assert await first.stop() == 0
        second = await start_operator()
        account += await finish(cluster, seen, running)
        total = {unit: before[unit] + await counted(second, f"ddpjob_{unit}_seconds") for unit in before}
    assert total["node"] == pytest.approx(account, rel=0.01)
    assert total["gpu"] == pytest.approx(account * GPUS, rel=0.01)
