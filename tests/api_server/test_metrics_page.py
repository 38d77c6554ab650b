"""The operator's metrics page: what is on it, in which format, and what is left of jobs that are gone."""

from __future__ import annotations

import asyncio
import re
import subprocess

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator
from tests.support.tiers import program
from tests.support.waiting import eventually_async


def _series(cluster: Cluster) -> str:
    return f'ddpjob="digits",namespace="{cluster.namespace}"'


async def _job_on_the_page(cluster: Cluster, operator: Operator) -> str:
    await cluster.apply_job()
    await cluster.gang_exists()

    async def listed() -> str | None:
        page = await operator.metrics()
        return page if _series(cluster) in page else None

    return await eventually_async(listed, "the job is on the page")


async def test_promtool_finds_no_fault_in_the_metrics_page(cluster: Cluster, operator: Operator) -> None:
    page = await _job_on_the_page(cluster, operator)
    command = [program("prometheus", "promtool"), "check", "metrics"]
    checked = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_the_metrics_page_forgets_deleted_jobs(cluster: Cluster, operator: Operator) -> None:
    await _job_on_the_page(cluster, operator)
    await cluster.delete_job()

    async def forgotten() -> bool:
        return _series(cluster) not in await operator.metrics()

    await eventually_async(forgotten, "no series of the job is left")


JOBS = 1000
WAVE = 200
OF_ANSWERS = (
    "ddpjob_operator_api_requests_total",
    "ddpjob_operator_events_total",
    "ddpjob_operator_resyncs_total",
)
"""Metrics with a series for each kind of answer of the API server: under load it has more of them than for one job."""
LABELS_OF_ANSWERS = re.compile(r'(code="\d{1,3}"|verb="[A-Z]+"|(resource|result)="[a-z/]+")(,|$)')
"""Of which there are so many kinds at most, whatever jobs there are: no name, namespace or uid of one is among them."""


def _all_series(page: str) -> tuple[set[str], set[str]]:
    """Names and labels of what is on a page: all series but those OF_ANSWERS, and those."""
    found = {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    answers = {series for series in found if series.startswith(OF_ANSWERS)}
    return found - answers, answers


def _labels(series: str) -> str:
    return series.partition("{")[2].removesuffix("}")


@pytest.mark.fault(49)
async def test_series_and_memory_are_where_they_were_after_a_thousand_jobs_have_come_and_gone(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """One job first, after which each series is there that such a job leaves behind; then waves of the same size. An
    allocator keeps up to 17 MiB in the meantime; `make soak` shows a slope."""
    operator = await start_operator()

    async def on_the_page(count: int) -> str | None:
        page = await operator.metrics()
        return page if page.count("ddpjob_status_restarts_total{") == count else None

    async def come_and_go(names: list[str], *, until_suspended: bool = False) -> str:
        """The page when they are gone."""
        await asyncio.gather(*(cluster.apply_job(name, suspend=True) for name in names))
        await eventually_async(lambda: on_the_page(len(names)), "all of these jobs are on the page")
        if until_suspended:
            await asyncio.gather(*(cluster.phase_is("Suspended", name) for name in names))
        await asyncio.gather(*(cluster.delete_job(name) for name in names))
        return await eventually_async(lambda: on_the_page(0), "no series of a job is left")

    before, _ = _all_series(await come_and_go(["job-first"], until_suspended=True))
    memory = []
    for wave in range(JOBS // WAVE):
        page = await come_and_go([f"job-{wave}-{number}" for number in range(WAVE)])
        assert '"job-' not in page, "a label has the name of a job that is gone"
        others, of_answers = _all_series(page)
        assert others == before, f"after wave {wave}: {sorted(others ^ before)}"
        foreign = {series for series in of_answers if LABELS_OF_ANSWERS.sub("", _labels(series))}
        assert of_answers
        assert not foreign, f"after wave {wave}: {sorted(foreign)}"
        memory.append(operator.resident_bytes())
    assert memory[-1] <= memory[0] + 24 * 2**20, [f"{resident / 2**20:.0f} MiB" for resident in memory]


async def test_the_page_is_what_prometheus_reads(operator: Operator) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{operator.port}/metrics") as page:
        assert page.content_type == "text/plain"
        assert page.charset == "utf-8"


async def test_the_page_of_a_running_operator_is_strict_openmetrics(cluster: Cluster, operator: Operator) -> None:
    await _job_on_the_page(cluster, operator)
    headers = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    url = f"http://127.0.0.1:{operator.port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as page:
        assert page.content_type == "application/openmetrics-text"
        families = {family.name for family in text_string_to_metric_families(await page.text())}
    assert {"ddpjob_operator_reconcile_seconds", "ddpjob_status_phase", "process_cpu_seconds"} <= families
