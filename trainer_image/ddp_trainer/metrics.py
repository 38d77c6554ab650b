"""`/metrics` of a trainer pod, from the heartbeats of its ranks (docs/contracts.md section 4).

Progress is that of the lowest rank on this node. Samples and steps are those of the whole run, the same on every
node: aggregate them over nodes with max, not with sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ddp_trainer.environment import PodEnvironment
from ddp_trainer.heartbeat import BUCKETS
from ddp_trainer.status import Moment, progress

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


class CounterLedger:
    """Counters that only grow while the pod lives, though each rank process starts its own at zero."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._before: dict[str, Any] = {}
        self._current: dict[str, Any] = {}
        self._lock = threading.Lock()

    def totals(self, beats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The counters of the lowest rank, on top of those of the processes that had its place before."""
        with self._lock:
            if beats:
                if beats[0]["pid"] != self._pid:
                    self._before = _add(self._before, self._current)
                    self._pid = beats[0]["pid"]
                self._current = beats[0]["counters"]
            return _add(self._before, self._current)


class TrainerCollector(Collector):
    """Reads the heartbeats anew at every scrape."""

    def __init__(self, pod: PodEnvironment, moment: Callable[[], Moment]) -> None:
        self._labels = (pod.job, pod.namespace, str(pod.attempt), str(pod.node_rank))
        self._moment = moment
        self._ledger = CounterLedger()

    def collect(self) -> Iterator[Metric]:
        moment = self._moment()
        known = progress(moment.beats)
        rate = moment.beats[0].get("learningRate") if moment.beats else None
        yield from self._gauges(_GAUGES, known)
        yield self._gauge("ddpjob_train_learning_rate", "Learning rate of the first parameter group.", rate)
        yield from self._gauges(_MEASURED_GAUGES, known["metrics"])
        yield from self._gauges(_SNAPSHOT_GAUGES, known["snapshot"] or {})
        age = GaugeMetricFamily(
            "ddpjob_rank_heartbeat_age_seconds",
            "Seconds since the rank last made progress.",
            labels=(*_POD_LABELS, "rank"),
        )
        for beat in moment.beats:
            age.add_metric((*self._labels, str(beat["rank"])), max(0.0, moment.now - beat["time"]))
        yield age
        yield from self._counted(self._ledger.totals(moment.beats))

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


def metrics_page(pod: PodEnvironment, moment: Callable[[], Moment]) -> Callable[[], bytes]:
    """A function that gives the text of `/metrics`, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrainerCollector(pod, moment))
    return lambda: generate_latest(registry)


def _add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Sum two sets of counters, key by key and bucket by bucket."""
    result = dict(left)
    for key, value in right.items():
        present = result.get(key)
        if present is None:
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _add(present, value)
        elif isinstance(value, list):
            result[key] = [a + b for a, b in zip(present, value, strict=True)]
        else:
            result[key] = present + value
    return result
