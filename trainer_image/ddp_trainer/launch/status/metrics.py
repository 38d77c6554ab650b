"""`/metrics` of a trainer pod, from the heartbeats of its ranks. The rows of `metric_table` say what each metric means.

Values of the whole run are exported by node rank 0 alone. A sum over the pods of a job is then right, also after an
in-place restart that gives node rank 0 to another pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.histograms import nothing_observed
from ddp_trainer.launch.assignment import SPARE
from ddp_trainer.launch.status import metric_table as table
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.host import GPU, GPUs, Usage, usage
from ddp_trainer.launch.status.pod_state import PodState, progress, ranks_that_train

View = Callable[[], tuple[PodEnvironment, PodState]]
"""The pod with its current assignment, and its state."""

MOST_METRICS = 64
"""Metrics of the training program that become series. It chooses their names, and must not exhaust Prometheus."""


class TrainerCollector(Collector):
    """Reads the heartbeats at every scrape."""

    def __init__(
        self, view: View, ledger: CounterLedger, used: Callable[[], Usage], gpus: Callable[[], Sequence[GPU]]
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._used = used
        self._gpus = gpus

    def collect(self) -> Iterator[Metric]:
        pod, pod_state = self._view()
        yield _info(pod)
        yield from _ranks(pod, pod_state)
        yield from _container(pod, self._used())
        yield from _gpus(pod, self._gpus())
        if pod.node_rank == 0:
            yield from _progress(pod, pod_state)
            yield from _counters(pod, self._ledger.totals(pod.attempt, pod_state.heartbeats))


def _info(pod: PodEnvironment) -> Metric:
    row = table.TABLE["ddpjob_trainer_info"]
    node_rank = SPARE if pod.node_rank is None else str(pod.node_rank)
    info = InfoMetricFamily(row.name.removesuffix("_info"), row.help, labels=row.labels)
    values = {"attempt": str(pod.attempt), "node_rank": node_rank, "world_size": str(pod.world_size)}
    info.add_metric((), {"ddpjob": pod.job, **values})
    return info


def _ranks(pod: PodEnvironment, pod_state: PodState) -> Iterator[Metric]:
    running = {entry["rank"] for entry in pod_state.ranks}
    heartbeats = [heartbeat for heartbeat in pod_state.heartbeats if heartbeat["rank"] in running]
    age = _gauge(table.TABLE["ddpjob_rank_heartbeat_age_seconds"])
    for heartbeat in heartbeats:
        age.add_metric((pod.job, str(heartbeat["rank"])), max(0.0, pod_state.now - heartbeat["time"]))
    yield age
    for row in table.RANK:
        gauge = _gauge(row)
        for heartbeat in heartbeats:
            if (value := heartbeat.get(row.source)) is not None:
                gauge.add_metric((pod.job, str(heartbeat["rank"])), value)
        yield gauge


def _container(pod: PodEnvironment, used: Usage) -> Iterator[Metric]:
    for row in table.CONTAINER:
        family = CounterMetricFamily if row.type == "counter" else GaugeMetricFamily
        metric = family(row.name, row.help, labels=row.labels)
        if (value := getattr(used, row.source)) is not None:
            metric.add_metric((pod.job,), value)
        yield metric


def _gpus(pod: PodEnvironment, gpus: Sequence[GPU]) -> Iterator[Metric]:
    for row in table.GPU:
        gauge = _gauge(row)
        for gpu in gpus:
            if (value := getattr(gpu, row.source)) is not None:
                gauge.add_metric((pod.job, str(gpu.index)), value)
        yield gauge


def _progress(pod: PodEnvironment, pod_state: PodState) -> Iterator[Metric]:
    world_size = _gauge(table.WORLD_SIZE)
    if (ranks := ranks_that_train(pod, pod_state)) is not None:
        world_size.add_metric((pod.job,), ranks)
    yield world_size
    known = progress(pod_state.heartbeats)
    known["learningRate"] = pod_state.heartbeats[0].get("learningRate") if pod_state.heartbeats else None
    for rows, values in ((table.PROGRESS, known), (table.SNAPSHOT, known["snapshot"] or {})):
        for row in rows:
            gauge = _gauge(row)
            if (value := values.get(row.source)) is not None:
                gauge.add_metric((pod.job,), value)
            yield gauge
    metrics = _gauge(table.METRIC)
    for name, value in islice(known["metrics"].items(), MOST_METRICS):
        if value is not None:  # one that is not finite, in JSON
            metrics.add_metric((pod.job, name), value)
    yield metrics


def _counters(pod: PodEnvironment, totals: Mapping[str, Any]) -> Iterator[Metric]:
    for row in table.COUNTERS:
        counter = CounterMetricFamily(row.name, row.help, labels=row.labels)
        counter.add_metric((pod.job,), totals.get(row.source, 0))
        yield counter
    for row in table.COUNTERS_BY_LABEL:
        counter = CounterMetricFamily(row.name, row.help, labels=row.labels)
        for label, count in (dict.fromkeys(row.known, 0) | totals.get(row.source, {})).items():
            counter.add_metric((pod.job, label), count)
        yield counter
    for row in table.HISTOGRAMS:
        yield _histogram(row, {(pod.job,): totals.get(row.source, nothing_observed())})
    waits = totals.get(table.DATA_WAIT.source)
    yield _histogram(table.DATA_WAIT, {(pod.job,): waits} if waits is not None else {})
    by_kind = totals.get(table.RECOVERY.source, {})
    yield _histogram(table.RECOVERY, {(pod.job, kind): observed for kind, observed in by_kind.items()})
    dropped = CounterMetricFamily(table.DROPPED.name, table.DROPPED.help, labels=table.DROPPED.labels)
    if table.DROPPED.source in totals:
        dropped.add_metric((pod.job,), totals[table.DROPPED.source])
    yield dropped


def _histogram(row: table.MetricRow, observed: Mapping[tuple[str, ...], Mapping[str, Any]]) -> Metric:
    """`observed` by the values of the labels."""
    histogram = HistogramMetricFamily(row.name, row.help, labels=row.labels)
    bounds = [*(str(bound) for bound in row.bounds), "+Inf"]
    for labels, found in observed.items():
        counts = list(zip(bounds, accumulate(found["counts"]), strict=True))
        histogram.add_metric(labels, counts, found["sum"])
    return histogram


def _gauge(row: table.MetricRow) -> GaugeMetricFamily:
    return GaugeMetricFamily(row.name, row.help, labels=row.labels)


def metrics_page(
    view: View,
    ledger: CounterLedger,
    used: Callable[[], Usage] = usage,
    gpus: Callable[[], Sequence[GPU]] | None = None,
) -> Callable[[str], tuple[bytes, str]]:
    """A function that returns the body and the content type of `/metrics` for an Accept header: OpenMetrics, or
    Prometheus' text format.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrainerCollector(view, ledger, used, gpus or GPUs().look))

    def page(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return page
