"""`ddpjob dashboard` on a real API server: what it reads of jobs that failed and wait, and what it refuses."""

from __future__ import annotations

import re

from aiohttp.test_utils import TestClient, TestServer
from tests.api_server.harness import Cluster, Operator
from tests.api_server.test_postmortem import fail_on_node_rank_1
from tests.support.waiting import eventually_async

from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.server import make_app
from ddpjob_operator.runtime.client import connect


def refuse() -> None:
    raise AssertionError("the dashboard changes something")


async def test_the_pages_explain_a_job_that_failed_and_one_that_waits(cluster: Cluster, operator: Operator) -> None:
    await fail_on_node_rank_1(cluster, cleanPodPolicy="All")
    await cluster.apply_job("other")
    client = await connect()
    client.fence = refuse
    source = ClusterSource(client, cluster.namespace)
    try:
        async with TestClient(TestServer(make_app(source))) as browser:

            async def page(path: str, status: int = 200) -> str:
                answer = await browser.get(path)
                text = await answer.text()
                assert answer.status == status, text
                return re.sub(r"\s+", " ", text)

            async def waits() -> str | None:
                text = await page(f"/jobs/{cluster.namespace}/other")
                return text if "other-0-1: no node yet" in text else None

            waiting = await eventually_async(waits, "the pods of the other job are said to wait")
            assert "Starting for" in waiting
            assert "<code>other-0-0</code>" in waiting
            assert f"ddpjob suspend other -n {cluster.namespace}" in waiting
            jobs = await page("/")
            assert set(re.findall(r'href="/jobs/[^/]+/([^"]+)"', jobs)) == {"other", "digits"}
            assert "Failed <b>1</b>" in jobs
            failed = await page(f"/jobs/{cluster.namespace}/digits")
            assert "Failed (BackoffLimitExceeded)" in failed
            assert "CUDA out of memory" in failed
            assert "reduce the micro-batch" in failed

            async def happened() -> bool:
                return '<span class="unseen">Warning: </span>Failed</b>' in await page(
                    f"/jobs/{cluster.namespace}/digits"
                )

            await eventually_async(happened, "the event of the failure is shown")
            await page(f"/jobs/{cluster.namespace}/digits/logs")
            none = await page(f"/jobs/{cluster.namespace}/none", 404)
            assert f"There is no job none in {cluster.namespace}." in none
            await page("/jobs/default/digits", 404)
    finally:
        await client.close()


async def test_a_cluster_that_refuses_is_said_so(cluster: Cluster) -> None:
    client = await connect()
    source = ClusterSource(client, f"{cluster.namespace}/x")
    try:
        async with TestClient(TestServer(make_app(source))) as browser:
            answer = await browser.get("/")
            assert answer.status == 502
            assert "this cluster has no DDPJobs: install the operator in it" in await answer.text()
    finally:
        await client.close()
