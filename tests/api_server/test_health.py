"""What the operator says of itself, and what it does when one of its senses is gone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster
from tests.api_server.proxy import FaultProxy, refusal
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

from ddpjob_operator.runtime.login import log_in

Answer = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def is_watch(request: web.Request, resource: str) -> bool:
    return request.query.get("watch") == "true" and request.path.endswith(f"/{resource}")


def error_event(code: int) -> Answer:
    """A watch of pods whose only event is an error."""

    async def answer(request: web.Request) -> web.StreamResponse | None:
        if not is_watch(request, "pods"):
            return None
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "by the proxy"}
        return web.Response(
            text=json.dumps({"type": "ERROR", "object": status}) + "\n", content_type="application/json"
        )

    return answer


async def not_found(request: web.Request) -> web.StreamResponse | None:
    return refusal(404, "NotFound") if is_watch(request, "pods") else None


@pytest.mark.fault(9)
@pytest.mark.parametrize("fault", [error_event(500), not_found], ids=["an error in the stream", "404"])
async def test_an_operator_whose_watch_has_ended_for_good_ends_with_an_error(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path, fault: Answer
) -> None:
    async with FaultProxy(await log_in(), tmp_path) as proxy:
        operator = await start_operator(proxy.kubeconfig)
        proxy.read_fault = fault
        proxy.hang_up()
        assert operator.process is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await operator.process.wait() == 1


@pytest.mark.fault(4)
async def test_an_expired_watch_begins_anew_and_what_was_deleted_meanwhile_is_missed_at_once(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """The list that the watch begins with only lacks it, and the next resync is minutes away."""
    async with FaultProxy(await log_in(), tmp_path) as proxy:
        await start_operator(proxy.kubeconfig)
        await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
        names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*names)
        await cluster.phase_is("Running")
        struck = []

        async def expire_once(request: web.Request) -> web.StreamResponse | None:
            if struck or not is_watch(request, "pods"):
                return None
            struck.append(request)
            await cluster.client.delete(f"/api/v1/namespaces/{cluster.namespace}/pods/{names[1]}", "pods")
            return await error_event(410)(request)

        proxy.read_fault = expire_once
        proxy.hang_up()
        await cluster.gang_exists(attempt=1)
        assert struck
        assert (await cluster.status())["lastFailure"]["reason"] == "PodDeleted"


@pytest.mark.fault(11)
async def test_a_deletion_that_no_watch_announced_is_noticed_by_the_resync(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    async with FaultProxy(await log_in(), tmp_path) as proxy:
        await start_operator(proxy.kubeconfig, RESYNC_SECONDS=1)
        await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
        names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*names)
        await cluster.phase_is("Running")
        test_over = asyncio.Event()

        async def silence(request: web.Request) -> web.StreamResponse | None:
            if not is_watch(request, "pods"):
                return None
            stream = web.StreamResponse(headers={"Content-Type": "application/json"})
            await stream.prepare(request)
            await test_over.wait()
            return stream

        proxy.read_fault = silence
        proxy.hang_up()
        await cluster.client.delete(f"/api/v1/namespaces/{cluster.namespace}/pods/{names[1]}", "pods")
        await cluster.gang_exists(attempt=1)
        assert (await cluster.status())["lastFailure"]["reason"] == "PodDeleted"
        test_over.set()


async def test_a_namespace_that_cannot_be_read_keeps_no_other_one_waiting(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    async with FaultProxy(await log_in(), tmp_path) as proxy:

        async def forbid(request: web.Request) -> web.StreamResponse | None:
            return refusal(403, "Forbidden") if request.path.startswith("/api") and "/gone/" in request.path else None

        proxy.read_fault = forbid
        operator = await start_operator(proxy.kubeconfig, NAMESPACES=f"gone,{cluster.namespace}")
        await cluster.apply_job()
        await cluster.gang_exists()
        assert "cannot list in namespace gone" in operator.log.read_text()


@pytest.mark.fault(12)
async def test_new_credentials_are_read_when_the_old_ones_are_refused(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with FaultProxy(await log_in(), tmp_path, token="first") as proxy:
        await start_operator(proxy.kubeconfig)
        token.write_text("second")
        proxy.token = "second"
        proxy.hang_up()  # so that watches and calls both have to log in anew
        await cluster.apply_job()
        names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*names)
        await cluster.phase_is("Running")


async def test_it_is_ready_only_after_the_first_lists(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    async def no_lists(request: web.Request) -> web.StreamResponse | None:
        return refusal(503, "ServiceUnavailable") if request.path.endswith("/pods") else None

    async with FaultProxy(await log_in(), tmp_path, read_fault=no_lists) as proxy:
        operator = await start_operator(proxy.kubeconfig, ready=False)

        async def answers() -> bool:
            return (await operator.probe("healthz"))[0] == 200

        await eventually_async(answers, "it is healthy")

        async def is_not_ready() -> str:
            code, text = await operator.probe("readyz")
            return text if code == 503 else ""

        assert "have not been listed" in await eventually_async(is_not_ready, "it says why it is not ready")
        await cluster.apply_job()
        proxy.read_fault = None
        await operator.ready()
        await cluster.gang_exists()


async def test_it_watches_although_discovery_lags_behind_a_new_crd(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """A server lists and serves a new CRD's objects before `/apis` names its group."""
    asked = 0

    async def no_group(request: web.Request) -> web.StreamResponse | None:
        nonlocal asked
        asked += request.path == "/apis"
        if request.path != "/apis" or asked > 3:
            return None
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async with FaultProxy(await log_in(), tmp_path, read_fault=no_group) as proxy:
        await start_operator(proxy.kubeconfig)
        assert asked > 3
        await cluster.apply_job()
        await cluster.gang_exists()


IMPATIENT = "import sys; from ddpjob_operator import main; main.BEGIN_SECONDS = 5.0; sys.exit(main.main())"
"""An operator that gives its watches less than half a minute to begin."""


async def test_an_operator_whose_watches_never_begin_ends_with_an_error(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    """Of several API servers, the one that kopf asks may know the CRD later than the one that was asked before."""
    asked = 0

    async def no_group_for_kopf(request: web.Request) -> web.StreamResponse | None:
        nonlocal asked
        asked += request.path == "/apis"
        if request.path != "/apis" or asked == 1:
            return None
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async with FaultProxy(await log_in(), tmp_path, read_fault=no_group_for_kopf) as proxy:
        operator = await start_operator(proxy.kubeconfig, ready=False, command=(sys.executable, "-c", IMPATIENT))
        assert operator.process is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await operator.process.wait() == 1
        assert "watches have ended for good (watcher for ddpjobs" in operator.log.read_text()


async def test_a_setting_that_cannot_be_used_is_named(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(ready=False, WORKERS="many")
    assert operator.process is not None
    assert await operator.process.wait() == 64
    assert "DDPJOB_OPERATOR_WORKERS is 'many', but must be a whole number" in operator.log.read_text()


def report(uid: str, step: int, loss: str = "0.5") -> str:
    known = {"version": 1, "uid": uid, "attempt": 0, "nodeRank": 0, "phase": "train", "step": step, "totalSteps": 400}
    return json.dumps(known)[:-1] + f', "loss": {loss}, "samplesPerSecond": 900.5}}'


async def test_progress_of_a_running_job_reaches_status_and_metrics(
    cluster: Cluster, start_operator: StartOperator, trainer: tuple[str, list[str]]
) -> None:
    ip, answers = trainer
    operator = await start_operator(POLL_SECONDS=0.1, PROGRESS_SECONDS=1)
    job = await cluster.apply_job()
    answers.append(report(job["metadata"]["uid"], 120))
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names, ip=ip)
    await cluster.phase_is("Running")

    async def reported() -> dict | None:
        progress = (await cluster.status()).get("progress") or {}
        return progress if progress.get("step") == 120 else None

    assert (await eventually_async(reported, "the step is in the status"))["loss"] == 0.5

    async def on_the_page() -> bool:
        shown = f'ddpjob_status_step{{ddpjob="digits",namespace="{cluster.namespace}"}} 120.0'
        return shown in await operator.metrics()

    # it follows the answer to the write of the status, which this test may see first
    await eventually_async(on_the_page, "the step is on the page")
    answers.append(report(job["metadata"]["uid"], 121, loss="NaN"))

    async def diverged() -> bool:
        return (await cluster.status())["progress"]["step"] == 121

    await eventually_async(diverged, "a loss that is no number does not stop the news")


async def test_what_a_trainer_says_of_its_snapshots_and_its_time_reaches_the_status(
    cluster: Cluster, start_operator: StartOperator, trainer: tuple[str, list[str]]
) -> None:
    ip, answers = trainer
    await start_operator(POLL_SECONDS=0.1, PROGRESS_SECONDS=0)
    job = await cluster.apply_job()
    reported = {
        "snapshotProblem": {"step": 110, "result": "failed", "message": "no space left on device", "failures": 3},
        "snapshotsSetAside": [{"step": 80, "message": "snapshot of step 80 is not used: SHA-256 differs"}],
        # the ledger believes no more than the time that has passed, and here that is milliseconds
        "seconds": {"train": 0.001},
    }
    answers.append(json.dumps(json.loads(report(job["metadata"]["uid"], 120)) | reported))
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names, ip=ip)
    await cluster.phase_is("Running")
    failing = await cluster.condition("SnapshotsFailing", "SavesFail")
    assert "no space left on device" in failing["message"]
    status = await cluster.status()
    assert status["corruptSnapshots"] == ["snapshot of step 80 is not used: SHA-256 differs"]

    async def counted() -> bool:
        return (await cluster.status())["goodput"].get("training") == 0.001

    await eventually_async(counted, "the seconds of training are in the ledger")


async def test_progress_alone_is_written_no_more_often_than_asked_for(
    cluster: Cluster, start_operator: StartOperator, trainer: tuple[str, list[str]]
) -> None:
    ip, answers = trainer
    operator = await start_operator(POLL_SECONDS=0.1, PROGRESS_SECONDS=3600)
    job = await cluster.apply_job()
    uid = job["metadata"]["uid"]
    answers.append(report(uid, 0))
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names, ip=ip)
    await cluster.phase_is("Running")
    before = len(await cluster.cost())
    answers.append(report(uid, 7))

    async def seen() -> bool:
        shown = f'ddpjob_status_step{{ddpjob="digits",namespace="{cluster.namespace}"}} 7.0'
        return shown in await operator.metrics()

    await eventually_async(seen, "the operator has heard of step 7")
    assert len(await cluster.cost()) == before
