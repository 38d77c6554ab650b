"""Faults of the operator, and of jobs that never run, fire the chart's alerts on a real Prometheus that scrapes it; a
job that is well fires none. tests/local/test_alerts.py has the faults of a run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster
from tests.api_server.proxy import FaultProxy
from tests.cluster.prometheus import Prometheus, started
from tests.support.alerts import Fired, fired, shortened_file
from tests.support.tiers import program
from tests.support.waiting import eventually

from ddpjob_operator.runtime.login import log_in

SHORTER = {
    "DDPJobOperatorDown": 60,
    "DDPJobOperatorWatchStale": 200,  # 4.5 s, for as long
    "DDPJobOperatorBacklog": 300,  # 3 s, for as long
    "DDPJobQueueStuck": 720,  # 5 s
    "DDPJobCrashLooping": 60,
    "DDPJobStalled": 60,
    "DDPJobGoodputLow": 60,
    "DDPJobSnapshotTooOld": 60,
    "DDPJobSnapshotsFailing": 60,
    "DDPJobVolumeNearlyFull": 60,
    "DDPJobGPUsIdle": 60,
}
WORKERS = 2
WAITING = [f"waits-{number}" for number in range(WORKERS + 18)]


async def until_fired(server: Prometheus, since: float, expected: Fired) -> None:
    await asyncio.to_thread(
        eventually, lambda: expected <= fired(server, since), f"{sorted(expected)} fire",
        instead=lambda: [sorted(fired(server, since)), *server.scrape_errors()],
    )  # fmt: skip


async def run_and_crash(cluster: Cluster, job: str, times: int) -> None:
    """Its pods run, and exit with 1 so often; then they run on."""
    for attempt in range(times + 1):
        (pod,) = await cluster.gang_exists(attempt, nodes=1, job=job)
        await cluster.runs(pod["metadata"]["name"])
        await cluster.phase_is("Running", job)
        if attempt < times:
            await cluster.ends(pod["metadata"]["name"], code=1)


async def test_each_fault_of_the_operator_fires_its_alert_and_a_job_that_is_well_fires_none(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    binary = program("prometheus", "prometheus")
    async with FaultProxy(await log_in(), tmp_path, watch_seconds=1) as proxy:
        operator = await start_operator(proxy.kubeconfig, WORKERS=WORKERS)
        await cluster.apply_job("well", nodes=1)
        await run_and_crash(cluster, "well", 0)
        target = {"targets": [f"127.0.0.1:{operator.port}"], "labels": {"pod": "operator-0"}}
        scrapes = [{"job_name": "operator", "static_configs": [target]}]
        with ExitStack() as stack:
            prometheus = started(Path(binary), scrapes, tmp_path, shortened_file(tmp_path, SHORTER), every="1s")
            server = await asyncio.to_thread(stack.enter_context, prometheus)
            # Prometheus looks for its targets seconds after its start; until then no operator leads
            await asyncio.to_thread(
                eventually, lambda: server.query("ddpjob_operator_leader == 1") and not server.query("ALERTS"),
                "the operator is scraped, and nothing is wrong", instead=server.scrape_errors,
            )  # fmt: skip
            since = time.time()
            restart = {"maxRestarts": 10, "backoff": {"initialSeconds": 0}}
            await cluster.apply_job("crashes", nodes=1, restart=restart)
            series = f'ddpjob_status_restarts_total{{ddpjob="crashes", namespace="{cluster.namespace}"}}'
            await asyncio.to_thread(eventually, lambda: server.query(series), "the job is seen before its first crash")
            assert fired(server, since) == set()
            await run_and_crash(cluster, "crashes", 3)
            await until_fired(server, since, {("DDPJobCrashLooping", "crashes")})
            assert {about for _, about in fired(server, since)} == {"crashes"}

            # no write is answered, and a watch that the API server has ended is not known to be
            proxy.hold = asyncio.Event()
            proxy.freeze = lambda request: request.query.get("watch") == "true" and request.path.endswith("/pods")
            await asyncio.gather(*(cluster.apply_job(name, nodes=1) for name in WAITING))
            await until_fired(server, since, {("DDPJobOperatorBacklog", ""), ("DDPJobOperatorWatchStale", "pods")})
            assert ("DDPJobOperatorDown", "") not in fired(server, since)
            proxy.hold.set()
            proxy.hold = None
            await until_fired(server, since, {("DDPJobQueueStuck", name) for name in WAITING})

            await operator.kill()
            await until_fired(server, since, {("DDPJobOperatorDown", "")})
            assert {about for _, about in fired(server, since)} == {"crashes", *WAITING, "pods", ""}
            assert {alert for alert, about in fired(server, since) if not about} == {
                "DDPJobOperatorBacklog",
                "DDPJobOperatorDown",
            }
