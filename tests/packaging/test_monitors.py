"""The chart's monitors on a real Prometheus: which labels the series have, without honor_labels."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus import Prometheus, started
from tests.packaging.chart import of_kind, rendered
from tests.support.tiers import program
from tests.support.waiting import eventually

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.metrics import metrics_page
from ddp_trainer.launch.status.pod_state import PodState
from ddpjob_operator import metrics
from ddpjob_operator.api.status import Phase

Page = Callable[[str], tuple[bytes, str]]
OWNER = {"__meta_kubernetes_pod_controller_kind": "DDPJob", "__meta_kubernetes_pod_controller_name": "digits"}
"""What Prometheus finds out of a pod of the job `digits`."""
BOTH = {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}
STEPS = 7
FORGED = b"""\
ddpjob_operator_leader{service="ddpjob-operator"} 5
DCGM_FI_DEV_GPU_UTIL{namespace="team",pod="d-0"} 0
ddpjob_pod_memory_bytes{ddpjob="digits"} 1
ddpjob_trainer_info{ddpjob="another"} 1
ddpjob_trainer_info{ddpjob="and-another",exported_ddpjob="a-third"} 1
"""
"""What a pod may answer that serves a page of its own on the port of the launcher."""


def trainer(folder: Path, node_rank: int) -> Page:
    """The page of a pod that has trained some steps."""
    heartbeat = Heartbeat(heartbeat_dir(folder), rank=node_rank)
    for step in range(1, STEPS + 1):
        heartbeat.step(step=step, total_steps=10, loss=0.5, step_seconds=0.1)
    heartbeat.flush()
    heartbeats = read_heartbeats(folder)
    pod = PodEnvironment(
        job="digits", namespace="team", uid="u", attempt=3, node_rank=node_rank, nodes=2, procs_per_node=1,
        pod_ip="127.0.0.1", rdzv_host="127.0.0.1", rdzv_port=29500, status_port=0, shared=folder, run_dir=folder,
        termination_log=folder / "log",
    )  # fmt: skip
    ranks = [{"rank": node_rank, "localRank": 0, "pid": 1, "time": 0.0}]
    state = PodState(now=heartbeats[0]["time"], wall=5.0, ranks=ranks, heartbeats=heartbeats)
    return metrics_page(lambda: (pod, state), CounterLedger())


@contextmanager
def served(page: Page) -> Iterator[str]:
    """The address of a page that Prometheus can scrape."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = page(self.headers["Accept"])
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:  # else its thread polls a closed socket, without an end
            server.shutdown()


def scrape(monitor: dict[str, Any], endpoints: str, namespace: str, targets: dict[str, str]) -> dict[str, Any]:
    """What the Prometheus Operator makes of a monitor: the labels of each target, then the relabelings."""
    endpoint = monitor["spec"][endpoints][0]
    relabelings, of_series = (
        [{snake(key): value for key, value in item.items()} for item in endpoint.get(field, ())]
        for field in ("relabelings", "metricRelabelings")
    )
    labels = {"namespace": namespace, "container": "c", "endpoint": endpoint["port"]}
    if monitor["kind"] == "PodMonitor":
        labels |= OWNER
    return {
        "job_name": f"{endpoints}-{monitor['metadata']['name']}",
        "honor_labels": endpoint.get("honorLabels", False),
        "static_configs": [
            {"targets": [address], "labels": {**labels, "pod": pod}} for pod, address in targets.items()
        ],
        "relabel_configs": relabelings,
        "metric_relabel_configs": of_series,
        **{snake(name): limit for name, limit in monitor["spec"].items() if name.endswith("Limit")},
    }


def snake(name: str) -> str:
    return re.sub("([A-Z])", lambda upper: f"_{upper[0].lower()}", name)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = program("prometheus", "prometheus")
    metrics.JOBS.put("monitors", metrics.JobFigures("team", "digits", Phase.RUNNING, 3, 0, 2, 2, step=STEPS))
    manifests, folder = rendered(BOTH), tmp_path_factory.mktemp("prometheus")
    with (
        served(lambda accept: asyncio.run(metrics.page(accept))) as operator,
        served(trainer(tmp_path_factory.mktemp("first"), 0)) as first,
        served(trainer(tmp_path_factory.mktemp("second"), 1)) as second,
        served(lambda _: (FORGED, "text/plain; version=0.0.4; charset=utf-8")) as forged,
    ):
        pods = {"d-0": first, "d-1": second, "d-2": forged}
        scrapes = [
            scrape(of_kind("ServiceMonitor", manifests)[0], "endpoints", "ddpjob-system", {"operator-0": operator}),
            scrape(of_kind("PodMonitor", manifests)[0], "podMetricsEndpoints", "team", pods),
            {"job_name": "stock", "static_configs": [{"targets": [operator]}]},
        ]
        with started(Path(binary), scrapes, folder) as server:
            eventually(
                lambda: len(server.query("up == 1")) == 5, "all targets are scraped", instead=server.scrape_errors
            )
            yield server
    metrics.JOBS.drop("monitors")


def test_every_series_of_a_job_has_its_namespace_and_its_name_and_nothing_is_renamed(prometheus: Prometheus) -> None:
    series = prometheus.query('{__name__=~"ddpjob_(status|train|snapshot|rank|trainer)_.+"}')
    assert {(sample.labels.get("namespace"), sample.labels.get("ddpjob")) for sample in series} == {("team", "digits")}
    every = prometheus.query('{__name__=~".+"}')
    assert sorted({name for sample in every for name in sample.labels if name.startswith("exported_")}) == []


def test_a_sum_over_the_pods_of_a_run_counts_each_step_once(prometheus: Prometheus) -> None:
    (total,) = prometheus.query("sum by (namespace, ddpjob) (ddpjob_train_steps_total)")
    assert (total.labels, total.value) == ({"namespace": "team", "ddpjob": "digits"}, STEPS)


def test_a_series_is_joined_with_the_attempt_of_its_pod(prometheus: Prometheus) -> None:
    join = "ddpjob_train_step * on (namespace, pod) group_left (attempt) ddpjob_trainer_info"
    assert [(sample.labels["attempt"], sample.value) for sample in prometheus.query(join)] == [("3", STEPS)]


def test_a_pod_writes_no_series_of_the_operator_nor_of_another_exporter(prometheus: Prometheus) -> None:
    found = prometheus.query('{__name__=~"(ddpjob|DCGM)_.+", pod="d-2"}')
    assert sorted((sample.labels["__name__"], sample.labels["ddpjob"]) for sample in found) == [
        ("ddpjob_pod_memory_bytes", "digits"),
        ("ddpjob_trainer_info", "digits"),
    ]
