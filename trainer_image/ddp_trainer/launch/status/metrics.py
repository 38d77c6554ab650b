"""`/metrics` of a trainer pod, from the heartbeats of its ranks (docs/contracts.md section 4).

Progress is that of the lowest rank on this node. Samples and steps are those of the whole run, the same on every
node: aggregate them over nodes with max, not with sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import BUCKETS
from ddp_trainer.launch.assignment import SPARE
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.pod_state import PodState, progress

View = Callable[[], tuple[PodEnvironment, PodState]]
"""The pod in its place of now, and what is known at this moment."""

_POD_LABELS = ("job", "namespace", "attempt", "node_rank")

_GAUGES = {
    "ddpjob_train_loss": ("loss", "Training loss of the last step that was reported."),
    "ddpjob_train_step": ("step", "Optimizer steps finished in the whole run."),
    "ddpjob_train_epoch": ("epoch", "Epoch that training is in."),
    "ddpjob_train_total_steps": ("totalSteps", "Optimizer steps that the whole run will have."),
    "ddpjob_train_samples_per_second": ("samplesPerSecond", "Samples that all ranks together train on in a second."),
}
_SNAPSHOT_GAUGES = {
    "ddpjob_snapshot_last_step": ("step", "Step of the newest snapshot."),
    "ddpjob_snapshot_last_timestamp_seconds": (
        "time",
        "When the newest snapshot was saved, in seconds since the epoch.",
    ),
}
_MEASURED_GAUGES = {
    "ddpjob_train_eval_accuracy": ("eval_accuracy", "Accuracy of the last validation, 0 to 1."),
    "ddpjob_train_eval_loss": ("eval_loss", "Loss of the last validation."),
}
_COUNTERS = {
    "ddpjob_train_samples": ("samples", "Samples trained on in this life of the run, by all ranks together."),
    "ddpjob_train_steps": ("steps", "Optimizer steps finished in this life of the run."),
    "ddpjob_train_out_of_memory": ("outOfMemory", "Times that the micro-batch was lowered for want of memory."),
}
_HISTOGRAMS = {
    "ddpjob_train_step_seconds": ("stepSeconds", "Duration of an optimizer step."),
    "ddpjob_snapshot_stall_seconds": ("stallSeconds", "How long training stood still for a snapshot."),
    "ddpjob_snapshot_save_seconds": ("saveSeconds", "How long a snapshot took until it was safe on the volume."),
}


class TrainerCollector(Collector):
    """Reads the heartbeats anew at every scrape."""

    def __init__(self, view: View, ledger: CounterLedger) -> None:
        self._view = view
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        pod, pod_state = self._view()
        return _Page(pod).metrics(pod_state, self._ledger.totals(pod.attempt, pod_state.heartbeats))


class _Page:
    """The samples of one scrape, all with the labels of the pod's place at that moment."""

    def __init__(self, pod: PodEnvironment) -> None:
        node_rank = SPARE if pod.node_rank is None else str(pod.node_rank)
        self._labels = (pod.job, pod.namespace, str(pod.attempt), node_rank)

    def metrics(self, pod_state: PodState, totals: Mapping[str, Any]) -> Iterator[Metric]:
        known = progress(pod_state.heartbeats)
        rate = pod_state.heartbeats[0].get("learningRate") if pod_state.heartbeats else None
        yield from self._gauges(_GAUGES, known)
        yield self._gauge("ddpjob_train_learning_rate", "Learning rate of the first parameter group.", rate)
        yield from self._gauges(_MEASURED_GAUGES, known["metrics"])
        yield from self._gauges(_SNAPSHOT_GAUGES, known["snapshot"] or {})
        age = GaugeMetricFamily(
            "ddpjob_rank_heartbeat_age_seconds",
            "Seconds since the rank last made progress.",
            labels=(*_POD_LABELS, "rank"),
        )
        running = {entry["rank"] for entry in pod_state.ranks}
        for heartbeat in (heartbeat for heartbeat in pod_state.heartbeats if heartbeat["rank"] in running):
            age.add_metric((*self._labels, str(heartbeat["rank"])), max(0.0, pod_state.now - heartbeat["time"]))
        yield age
        yield from self._counted(totals)

    def _counted(self, totals: Mapping[str, Any]) -> Iterator[Metric]:
        for name, (key, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_POD_LABELS)
            counter.add_metric(self._labels, totals.get(key, 0))
            yield counter
        saves = CounterMetricFamily(
            "ddpjob_snapshot_saves", "Snapshots that were begun, by how they ended.", labels=(*_POD_LABELS, "result")
        )
        for result, count in totals.get("saves", {}).items():
            saves.add_metric((*self._labels, result), count)
        yield saves
        for name, (key, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=_POD_LABELS)
            counted = totals.get(key, {"counts": [0] * (len(BUCKETS) + 1), "sum": 0.0})
            bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
            cumulative = accumulate(counted["counts"])
            histogram.add_metric(self._labels, list(zip(bounds, cumulative, strict=True)), counted["sum"])
            yield histogram

    def _gauges(self, table: Mapping[str, tuple[str, str]], values: Mapping[str, Any]) -> Iterator[Metric]:
        for name, (key, text) in table.items():
            yield self._gauge(name, text, values.get(key))

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=_POD_LABELS)
        if value is not None:
            gauge.add_metric(self._labels, value)
        return gauge


def metrics_page(view: View, ledger: CounterLedger) -> Callable[[], bytes]:
    """A function that gives the text of `/metrics`, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrainerCollector(view, ledger))
    return lambda: generate_latest(registry)
