"""`ddpjob dashboard` on a real API server: what it reads of jobs that failed and wait, and what it refuses."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer
from tests.api_server.harness import Cluster, Operator
from tests.api_server.rights import in_force
from tests.api_server.test_postmortem import fail_on_node_rank_1
from tests.support.accessible import looks_right
from tests.support.browser import browser, new_tab
from tests.support.command import to_cluster
from tests.support.dashboard import dashboard
from tests.support.waiting import eventually_async
from tests.unit.page.conftest import Folder

from ddpjob_operator.cluster import paths
from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.server import make_app, serve
from ddpjob_operator.runtime.client import connect
from ddpjob_operator.runtime.errors import ApiError

ROLE = Path(__file__).parents[2] / "charts/ddpjob-operator/files/rbac/dashboard.yaml"
RBAC = "rbac.authorization.k8s.io"


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


async def test_the_pages_of_a_cluster_are_accessible_and_fit_a_phone(
    cluster: Cluster, operator: Operator, tmp_path: Path
) -> None:
    client = await connect()
    runner, url = await serve(ClusterSource(client, cluster.namespace), "127.0.0.1", 0)
    job = f"{url}jobs/{cluster.namespace}"
    try:
        async with new_tab(browser(), tmp_path / "profile") as tab:
            await looks_right(tab, url)
            assert "No job yet" in await tab.text("#jobs")
            await fail_on_node_rank_1(cluster, cleanPodPolicy="All")
            await cluster.apply_job("other")
            await cluster.gang_exists(job="other")
            await tab.open(f"{job}/other")
            await tab.until("#answer", lambda text: "other-0-1: no node yet" in text, "it waits for nodes")
            await looks_right(tab, f"{job}/other")
            await looks_right(tab, f"{job}/digits")
            assert "CUDA out of memory" in await tab.text("#failures-first")
            await looks_right(tab, f"{job}/digits/logs")
            await looks_right(tab, url)
            assert await tab.run("document.querySelectorAll('#jobs tbody tr').length") == 2
    finally:
        await runner.cleanup()
        await client.close()


async def test_the_command_shows_a_job_that_is_gone_where_its_volume_is_mounted(
    cluster: Cluster, tmp_path: Path
) -> None:
    volume = Folder(tmp_path / "nfs")
    volume.events("digits", {"event": "started", "step": 0, "totalSteps": 2}, {"event": "finished", "step": 2})
    volume.log("digits-0-0", "[local rank 1] the last words\n")
    job = f"jobs/{cluster.namespace}/digits"
    options = ("-n", cluster.namespace, "--shared", str(volume.root), "--volume-of", f"{cluster.namespace}/data")

    def pages() -> tuple[str, ...]:
        environment = to_cluster(cluster.kubeconfig)
        without = dashboard(tmp_path / "without.txt", environment, *options[:2])
        with without as url, pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/{job}")
        with dashboard(tmp_path / "with.txt", environment, *options) as url:
            return tuple(urlopen(f"{url}/{path}").read().decode() for path in ("", job, f"{job}/logs"))

    listed, shown, log = await asyncio.to_thread(pages)
    assert f'href="/{job}"' in listed
    assert "The DDPJob is gone; this is what its volume has" in shown
    assert "the last words" in log


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


async def test_the_account_of_the_chart_reads_all_that_is_shown_and_changes_nothing(
    cluster: Cluster, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles, bindings = (f"/apis/{RBAC}/v1/namespaces/{cluster.namespace}/{kind}" for kind in ("roles", "rolebindings"))
    kubeconfig = await cluster.kubeconfig_of("dashboard", tmp_path / "kubeconfig")
    rules = {"metadata": {"name": "dashboard"}, "rules": yaml.safe_load(ROLE.read_text())}
    await cluster.client.create(roles, "roles", rules)
    of_account = {
        "metadata": {"name": "dashboard"},
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": "dashboard"},
        "subjects": [{"kind": "ServiceAccount", "name": "dashboard", "namespace": cluster.namespace}],
    }
    await cluster.client.create(bindings, "rolebindings", of_account)
    await in_force(cluster, "dashboard", "get", "ddpjobs.training.ddpjob.io")
    await cluster.apply_job("digits")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    client = await connect()
    source = ClusterSource(client, cluster.namespace)
    try:

        async def shown() -> bool:
            found = await source.detail(cluster.namespace, "digits")
            return found is not None and bool(found.pods and found.events) and found.notes == ()

        await eventually_async(shown, "the job is shown with its pods and events, and all of it could be read")
        assert [job.name for job in await source.jobs()] == ["digits"]
        job = f"{paths.jobs(cluster.namespace)}/digits"
        for change in (
            client.merge_patch(job, "ddpjobs", {"spec": {"suspend": True}}),
            client.delete(job, "ddpjobs"),
            client.delete(f"{paths.pods(cluster.namespace)}/digits-0-0", "pods"),
            client.get(f"/api/v1/namespaces/{cluster.namespace}/secrets", "secrets"),
        ):
            with pytest.raises(ApiError) as refused:
                await change
            assert refused.value.status == 403
    finally:
        await client.close()
