"""What the operator tells Prometheus, on /metrics.

Figures of the operator itself are ordinary counters and histograms. Figures of jobs are read from a table at the
moment of a scrape, so that the series of a deleted job are gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ddpjob_operator.api.status import Phase
from ddpjob_operator.settings import VERSION

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

RECONCILE_SECONDS = Histogram(
    "ddpjob_operator_reconcile_seconds",
    "Time of one look at one job, API calls included.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15),
    registry=REGISTRY,
)
RECONCILE_ERRORS = Counter(
    "ddpjob_operator_reconcile_errors_total", "Looks at a job that failed and are repeated.", registry=REGISTRY
)
API_REQUESTS = Counter(
    "ddpjob_operator_api_requests_total",
    "Calls to the API server; code 0 is a call without an answer.",
    ["verb", "resource", "code"],
    registry=REGISTRY,
)
WATCH_EVENTS = Counter(
    "ddpjob_operator_watch_events_total", "Events that the watches delivered.", ["resource"], registry=REGISTRY
)
WATCH_STARTS = Counter(
    "ddpjob_operator_watch_starts_total",
    "Watch requests begun. Each lasts five minutes; more of them means that streams are lost.",
    ["resource"],
    registry=REGISTRY,
)
RESYNCS = Counter("ddpjob_operator_resyncs_total", "Complete lists of jobs and pods.", ["result"], registry=REGISTRY)
STATUS_WRITES = Counter("ddpjob_operator_status_writes_total", "Writes of a job's status.", ["kind"], registry=REGISTRY)
STATUS_POLLS = Counter(
    "ddpjob_operator_status_polls_total", "Questions to trainers for their progress.", ["result"], registry=REGISTRY
)
EVENTS = Counter(
    "ddpjob_operator_events_total",
    "Kubernetes Events about jobs, by what became of them.",
    ["result"],
    registry=REGISTRY,
)
RESTARTS = Counter(
    "ddpjob_operator_job_restarts_total",
    "Attempts that failed and were followed by another.",
    ["reason"],
    registry=REGISTRY,
)
FAILURES = Counter("ddpjob_operator_job_failures_total", "Jobs that ended Failed.", ["reason"], registry=REGISTRY)
LEADER = Gauge("ddpjob_operator_leader", "1 while this replica acts, 0 while it stands by.", registry=REGISTRY)
QUEUE_DEPTH = Gauge("ddpjob_operator_queue_depth", "Jobs that wait for a worker.", registry=REGISTRY)
BUILD_INFO = Gauge("ddpjob_operator_build_info", "Always 1; the version is a label.", ["version"], registry=REGISTRY)
BUILD_INFO.labels(version=VERSION).set(1)


_REASONS: set[str] = set()
_MOST_REASONS = 64


def bounded(reason: str) -> str:
    """`reason` as a label value.

    It may come from a user's container, which must not be able to make series without end.
    """
    if reason in _REASONS or (len(_REASONS) < _MOST_REASONS and len(reason) <= 64 and reason.isalnum()):
        _REASONS.add(reason)
        return reason
    return "Other"


def watch_queue_depth(depth: Callable[[], int]) -> None:
    """Read the queue's depth at each scrape."""
    QUEUE_DEPTH.set_function(depth)


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One job as it stands, for Prometheus; None where a figure is not known."""

    namespace: str
    name: str
    phase: Phase
    attempt: int
    restarts: int
    nodes_ready: int
    nodes: int
    step: float | None = None
    total_steps: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    snapshot_step: float | None = None
    disruptions: int = 0
    goodput: float | None = None
    recomputed_steps: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where its time went, by cause."""


_PER_JOB: tuple[tuple[str, str, Callable[[JobFigures], float | None]], ...] = (
    ("attempt", "The current attempt, from 0.", lambda job: job.attempt),
    ("restarts", "Restarts after failures.", lambda job: job.restarts),
    ("disruptions", "Restarts that count against no budget.", lambda job: job.disruptions),
    ("goodput_ratio", "Share of the time that went into steps that were kept.", lambda job: job.goodput),
    ("recomputed_steps", "Steps that were lost and trained again.", lambda job: job.recomputed_steps),
    ("nodes_ready", "Pods of the current attempt that are ready.", lambda job: job.nodes_ready),
    ("nodes", "Pods that make up the gang.", lambda job: job.nodes),
    ("step", "Optimizer steps finished, as last reported.", lambda job: job.step),
    ("total_steps", "Optimizer steps that make up the run.", lambda job: job.total_steps),
    ("loss", "Mean training loss of the last reported step.", lambda job: job.loss),
    ("samples_per_second", "Throughput of the whole gang.", lambda job: job.samples_per_second),
    ("snapshot_step", "The step of the newest snapshot.", lambda job: job.snapshot_step),
)


class JobTable(Collector):
    """The jobs that exist now. A row is replaced by `put` and gone after `drop`."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, JobFigures] = {}

    def put(self, key: Hashable, figures: JobFigures) -> None:
        self._rows[key] = figures

    def drop(self, key: Hashable) -> None:
        self._rows.pop(key, None)

    def clear(self) -> None:
        self._rows.clear()

    def collect(self) -> Iterator[Metric]:
        rows = list(self._rows.values())
        for suffix, text, read in _PER_JOB:
            family = GaugeMetricFamily(f"ddpjob_operator_job_{suffix}", text, labels=("namespace", "job"))
            for row in rows:
                if (value := read(row)) is not None:
                    family.add_metric((row.namespace, row.name), value)
            yield family
        phases = GaugeMetricFamily(
            "ddpjob_operator_job_phase", "1 for the phase that the job is in.", labels=("namespace", "job", "phase")
        )
        for row in rows:
            phases.add_metric((row.namespace, row.name, row.phase.value), 1)
        yield phases
        seconds = GaugeMetricFamily(
            "ddpjob_operator_job_seconds", "Where the job's time went.", labels=("namespace", "job", "cause")
        )
        for row in rows:
            for cause, spent in row.seconds.items():
                seconds.add_metric((row.namespace, row.name, cause), spent)
        yield seconds
        jobs = GaugeMetricFamily("ddpjob_operator_jobs", "Jobs by phase.", labels=("phase",))
        for phase in Phase:
            jobs.add_metric((phase.value,), sum(row.phase is phase for row in rows))
        yield jobs


JOBS = JobTable()
REGISTRY.register(JOBS)
