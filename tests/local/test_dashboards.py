"""The queries of the chart's dashboards, asked of a real Prometheus that watches a real run, a failure included.

The launchers are scraped as they are. There is no cluster: the operator's page shows the run's status, in the figures
that the operator makes of it. DCGM's exporter, the kubelet and the operator's own counters are stood in for.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus import Prometheus, started
from tests.local.conftest import paced
from tests.packaging.test_alerts import ALERTS
from tests.packaging.test_dashboards import PAGES, panels
from tests.packaging.test_monitors import served
from tests.support import local_run
from tests.support.local_run import new_job
from tests.support.tiers import program
from tests.support.waiting import eventually

from ddpjob_operator import metrics
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cluster.figures import count, figures
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.local.display import PlainDisplay
from ddpjob_operator.local.observed import RunView
from ddpjob_operator.local.volume import open_shared

pytestmark = pytest.mark.local

NAMESPACE = "team"
SPEC = {
    "nodes": 1,
    **paced(epochs=1000),
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "snapshots": {"every": "20steps"},
    "restart": {"backoff": {"initialSeconds": 0}},
}
VARIABLES = {
    "$__rate_interval_ms": "30000",
    "$__rate_interval": "30s",
    # the queries count in full what a process counted that began in this time, and other tests may run before
    "$__range_ms": "86400000",
    "$__range": "1d",
    "$cluster": "",
    "$namespace": ".*",
    "$ddpjob": ".*",
    "$price_gpu_hour": "2",
    "$price_node_hour": "0.5",
}
GPU = 'gpu="5", namespace="team", pod="digits-1-0"'
OTHERS = f"""
DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 3
DCGM_FI_DEV_FB_USED{{{GPU}}} 40000
DCGM_FI_DEV_POWER_USAGE{{{GPU}}} 300
DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 60
DCGM_FI_DEV_XID_ERRORS{{{GPU}}} 0
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{GPU}}} 0.2
""".lstrip()
# with what a pod says of its memory limit and its GPU, which a process here has not, and of live recovery
KUBELET = """
kubelet_volume_stats_available_bytes{namespace="team",persistentvolumeclaim="digits-shared"} 50
kubelet_volume_stats_capacity_bytes{namespace="team",persistentvolumeclaim="digits-shared"} 100
ddpjob_pod_memory_limit_bytes{namespace="team",ddpjob="digits"} 8e9
ddpjob_gpu_utilization_ratio{namespace="team",ddpjob="digits",pod="digits-1-0",gpu="0"} 0.03
ddpjob_train_live_recovery_seconds_sum{namespace="team",ddpjob="digits",kind="lost"} 0.2
""".lstrip()


@dataclass
class Watched(PlainDisplay):
    """Puts each status of the run on the operator's page, and its launchers among the targets of Prometheus."""

    job: Job
    targets: Path
    status: DDPJobStatus = field(default_factory=DDPJobStatus)

    def __post_init__(self) -> None:
        super().__init__()

    def show(self, view: RunView) -> None:
        key = Key(NAMESPACE, self.job.name)
        metrics.RECONCILE_SECONDS.observe(0.01)
        metrics.LOOP_LAG.observe(0.001)
        count(NAMESPACE, self.job, self.status, view.status)
        metrics.JOBS.put(key, figures(key, self.job, view.status, "trainer:1"))
        self.status = view.status
        found = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": NAMESPACE, "pod": node.pod}}
            for node in view.nodes
            if node.pid and (port := status_port(node.pid))
        ]
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self.targets)


def status_port(pid: int) -> str | None:
    """Where a launcher serves its metrics."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ports = (item.partition(b"=")[2] for item in variables if item.startswith(b"DDPJOB_STATUS_PORT="))
    return next((port.decode() for port in ports), None)


def static(text: str) -> Callable[[str], tuple[bytes, str]]:
    return lambda accept: (text.encode(), "text/plain; version=0.0.4")


@contextmanager
def watching(folder: Path) -> Iterator[tuple[Prometheus, Path]]:
    """A Prometheus, and the file with its trainer targets."""
    binary = program("prometheus", "prometheus")
    targets = folder / "trainer.json"
    targets.write_text("[]")
    with (
        served(lambda accept: asyncio.run(metrics.page(accept))) as operator,
        served(static(OTHERS)) as dcgm,
        served(static(KUBELET)) as kubelet,
    ):
        exporter = {"namespace": "gpu-operator", "pod": "dcgm-x"}
        scrapes: list[dict[str, Any]] = [
            {"job_name": "operator", "static_configs": [{"targets": [operator], "labels": {"pod": "operator-0"}}]},
            {"job_name": "trainer", "file_sd_configs": [{"files": [str(targets)]}]},
            {"job_name": "dcgm", "static_configs": [{"targets": [dcgm], "labels": exporter}]},
            {"job_name": "kubelet", "honor_labels": True, "static_configs": [{"targets": [kubelet]}]},
        ]
        with started(Path(binary), scrapes, folder) as server:
            yield server, targets


def stand_in_for_the_rest_of_the_operator() -> None:
    """A job that waits, one that failed, one that succeeded, and what a running operator counts. Counters begin anew:
    other tests of this process count restarts, too.
    """
    for counter in (metrics.RESTARTS, metrics.FAILED_JOBS, metrics.NODE_SECONDS):
        counter.clear()
    waiting = metrics.JobFigures(
        NAMESPACE, "waiting", Phase.STARTING, 0, 0, 0, 2, gpus=16, conditions={"Degraded": "Unschedulable"},
        created=new_job("waiting", SPEC).created,
    )  # fmt: skip
    metrics.JOBS.put("waiting", waiting)
    metrics.FAILED_JOBS.labels(NAMESPACE, "UserError").inc()
    metrics.NODE_SECONDS.labels(NAMESPACE, "training", "Succeeded").inc(3600)
    metrics.LEADER.set(1)
    metrics.API_REQUESTS.labels("GET", "pods", "200").inc()
    metrics.WATCH_STARTS.labels("pods", "").inc()


def asked(expr: str) -> str:
    """A query as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


def without_data(server: Prometheus) -> list[str]:
    """Queries that Prometheus answers with nothing, with the panels they belong to."""
    return [
        f"{name}: {panel['title']}: {target['expr']}"
        for name, page in PAGES.items()
        for panel in panels(page)
        for target in panel["targets"]
        if all(math.isnan(sample.value) for sample in server.query(asked(target["expr"])))
    ]


def figure(server: Prometheus, page: str, title: str) -> float:
    """What a panel with one figure shows."""
    (panel,) = (panel for panel in panels(PAGES[page]) if panel["title"] == title)
    (sample,) = server.query(asked(panel["targets"][0]["expr"]))
    return sample.value


async def test_every_panel_shows_a_run_and_its_restart(tmp_path: Path) -> None:
    stand_in_for_the_rest_of_the_operator()
    job = new_job("digits", SPEC, namespace=NAMESPACE)
    shared = open_shared(tmp_path / "shared")
    with watching(tmp_path) as (server, targets):
        eventually(lambda: server.query('up{job="operator"} == 1'), "the operator's page is scraped before the run")
        display = Watched(job, targets)
        running = asyncio.create_task(local_run.run(job, shared, display, chaos="kill-rank@1%"))
        try:
            await asyncio.to_thread(
                eventually, lambda: running.done() or not without_data(server), "every panel has data", 300,
                lambda: "\n".join([*without_data(server), *server.scrape_errors()]),
            )  # fmt: skip
            assert not running.done(), "the run ended before that"
            assert display.status.restarts == 1
            for rule in ALERTS.values():
                server.query(rule["expr"])  # an error if it is none
            assert figure(server, "gpus", "Measured") == 1, "its pod and DCGM's exporter number it differently"
            assert figure(server, "failures", "Restarts") == figure(server, "failures", "Jobs failed") == 1
        finally:
            if not running.done():
                os.kill(os.getpid(), signal.SIGTERM)
            outcome = await running
            metrics.JOBS.clear()
            metrics.LEADER.set(0)
    assert outcome.stopped_by is signal.SIGTERM
