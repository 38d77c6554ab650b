"""`/metrics` of the operator. The rows of `metric_table` say what each metric means.

Metrics of the operator itself are counters, gauges and histograms in the process. Metrics of jobs are read from a table
at each scrape, so that the series of a deleted job disappear with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

from ddpjob_operator.api.reasons import FAILURES, STARTUP, STATES
from ddpjob_operator.api.status import Phase
from ddpjob_operator.metric_table import MOST_SERIES, TABLE
from ddpjob_operator.settings import VERSION

disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.5, 1, 2.5)
_WAIT_BUCKETS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 24 * 3600, 72 * 3600)


def _row(name: str) -> dict[str, Any]:
    """Arguments for the metric of a row."""
    row = TABLE[name]
    return {"name": name, "documentation": row.help, "labelnames": row.labels, "registry": REGISTRY}


RECONCILE_SECONDS = Histogram(**_row("ddpjob_operator_reconcile_seconds"), buckets=_RECONCILE_BUCKETS)
LOOP_LAG = Histogram(**_row("ddpjob_operator_loop_lag_seconds"), buckets=_LAG_BUCKETS)
RECONCILE_ERRORS = Counter(**_row("ddpjob_operator_reconcile_errors_total"))
API_REQUESTS = Counter(**_row("ddpjob_operator_api_requests_total"))
WATCH_EVENTS = Counter(**_row("ddpjob_operator_watch_events_total"))
CUT_ANSWERS = Counter(**_row("ddpjob_operator_cut_answers_total"))
WATCH_STARTS = Counter(**_row("ddpjob_operator_watch_starts_total"))
RESYNCS = Counter(**_row("ddpjob_operator_resyncs_total"))
STATUS_WRITES = Counter(**_row("ddpjob_operator_status_writes_total"))
STATUS_POLLS = Counter(**_row("ddpjob_operator_status_polls_total"))
EVENTS = Counter(**_row("ddpjob_operator_events_total"))
NOTIFICATIONS = Counter(**_row("ddpjob_operator_notifications_total"))
RESTARTS = Counter(**_row("ddpjob_operator_restarts_total"))
LIVE_RECOVERIES = Counter(**_row("ddpjob_operator_live_recoveries_total"))
FAILED_JOBS = Counter(**_row("ddpjob_operator_failed_jobs_total"))
QUEUE_SECONDS = Histogram(**_row("ddpjob_queue_seconds"), buckets=_WAIT_BUCKETS)
FIRST_STEP_WAIT = Histogram(**_row("ddpjob_first_step_wait_seconds"), buckets=_WAIT_BUCKETS)
RECOVERY_SECONDS = Histogram(**_row("ddpjob_recovery_seconds"), buckets=_WAIT_BUCKETS)
NODE_SECONDS = Counter(**_row("ddpjob_node_seconds_total"))
HELD_NODE_SECONDS = Counter(**_row("ddpjob_held_node_seconds_total"))
LOST_NODE_SECONDS = Counter(**_row("ddpjob_lost_node_seconds_total"))
GPU_SECONDS = Counter(**_row("ddpjob_gpu_seconds_total"))
HELD_GPU_SECONDS = Counter(**_row("ddpjob_held_gpu_seconds_total"))
LOST_GPU_SECONDS = Counter(**_row("ddpjob_lost_gpu_seconds_total"))
LEADER = Gauge(**_row("ddpjob_operator_leader"))
SHARDS = Gauge(**_row("ddpjob_operator_shards"))
QUEUE_DEPTH = Gauge(**_row("ddpjob_operator_queue_depth"))
Gauge(**_row("ddpjob_operator_start_timestamp_seconds")).set_to_current_time()
Info("ddpjob_operator_build", TABLE["ddpjob_operator_build_info"].help, registry=REGISTRY).info({"version": VERSION})


_END = b"# EOF\n"
_LINES_AT_ONCE = 2000
"""A millisecond or two."""

_KNOWN_REASONS = frozenset(reason.name for reason in (*FAILURES, *STARTUP, *STATES))
_REASONS: set[str] = set()
"""Others that were seen."""
_MOST_REASONS = 64


def bounded(reason: str) -> str:
    """`reason` as a label value.

    It may come from a user's container, which must not be able to create series without limit, nor to use up the places
    of what the operator itself finds in all other jobs.
    """
    if reason in _KNOWN_REASONS:
        return reason
    if reason in _REASONS or (len(_REASONS) < _MOST_REASONS and _word(reason) == reason):
        _REASONS.add(reason)
        return reason
    return "Other"


def _word(reason: str) -> str:
    """`reason` as a label value of a series that goes with its job."""
    return reason if len(reason) <= 64 and reason.isalnum() else "Other"


def watch_queue_depth(depth: Callable[[], int]) -> None:
    """Read the queue's depth at each scrape."""
    QUEUE_DEPTH.set_function(depth)


async def page(accept: str) -> tuple[bytes, str]:
    """The body and the content type of `/metrics` for an Accept header: OpenMetrics, or Prometheus' text format. Others
    go on while it is written."""
    encode, content_type = choose_encoder(accept)
    body, open_metrics = [encode(REGISTRY)], content_type.startswith("application/openmetrics-text")
    if open_metrics:
        body[0] = body[0].removesuffix(_END)
    for lines in _chunks(JOBS.lines(open_metrics)):
        body.append("".join(lines).encode())
        await asyncio.sleep(0)
    return b"".join((*body, _END if open_metrics else b"")), content_type


def _chunks(lines: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(lines, _LINES_AT_ONCE)):
        yield chunk


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The metrics of one job; None where a value is unknown."""

    namespace: str
    name: str
    phase: Phase
    attempt: int
    restarts: int
    """With those that were refunded: a counter may not go back."""
    nodes_ready: int
    nodes: int
    step: float | None = None
    total_steps: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    snapshot_step: float | None = None
    snapshot_time: datetime | None = None
    created: datetime | None = None
    started: datetime | None = None
    completed: datetime | None = None
    eta: datetime | None = None
    gpus: int = 0
    image: str = ""
    claim: str = ""
    code: str = ""
    """Digest of the code, as far as people write it."""
    queue: str = ""
    owner: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Conditions that need attention, and their reasons."""
    disruptions: int = 0
    live_recoveries: int = 0
    goodput: float | None = None
    recomputed_steps: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by activity."""


def _unix(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


_PER_JOB: dict[str, Callable[[JobFigures], float | None]] = {
    "ddpjob_status_creation_timestamp_seconds": lambda job: _unix(job.created),
    "ddpjob_status_start_timestamp_seconds": lambda job: _unix(job.started),
    "ddpjob_status_completion_timestamp_seconds": lambda job: _unix(job.completed),
    "ddpjob_status_eta_timestamp_seconds": lambda job: _unix(job.eta),
    "ddpjob_status_attempt": lambda job: job.attempt,
    "ddpjob_status_restarts_total": lambda job: job.restarts,
    "ddpjob_status_live_recoveries_total": lambda job: job.live_recoveries,
    "ddpjob_status_disruptions_total": lambda job: job.disruptions,
    "ddpjob_status_recomputed_steps_total": lambda job: job.recomputed_steps,
    "ddpjob_status_nodes": lambda job: job.nodes,
    "ddpjob_status_nodes_ready": lambda job: job.nodes_ready,
    "ddpjob_status_gpus": lambda job: job.gpus,
    "ddpjob_status_step": lambda job: job.step,
    "ddpjob_status_total_steps": lambda job: job.total_steps,
    "ddpjob_status_loss": lambda job: job.loss,
    "ddpjob_status_samples_per_second": lambda job: job.samples_per_second,
    "ddpjob_status_snapshot_step": lambda job: job.snapshot_step,
    "ddpjob_status_snapshot_timestamp_seconds": lambda job: _unix(job.snapshot_time),
    "ddpjob_status_goodput_ratio": lambda job: job.goodput,
}


class JobTable:
    """The jobs that exist now. `put` replaces a row, `drop` removes it."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, JobFigures] = {}

    def put(self, key: Hashable, figures: JobFigures) -> None:
        self._rows[key] = figures

    def drop(self, key: Hashable) -> None:
        self._rows.pop(key, None)

    def clear(self) -> None:
        self._rows.clear()

    def lines(self, open_metrics: bool) -> Iterator[str]:
        """The series in the text format of Prometheus or of OpenMetrics, some lines at a time.

        prometheus_client takes 100 µs a job for this, a second for 10,000.
        """
        rows = tuple(self._rows.values())
        labels = [_labels(namespace=row.namespace, ddpjob=row.name) for row in rows]
        yield from self._of_values(rows, labels, open_metrics)
        yield _head("ddpjob_info", open_metrics)
        for row in rows:
            info = {"claim": row.claim, "code": row.code, "image": row.image, "owner": row.owner, "queue": row.queue}
            yield f"ddpjob_info{{{_of(row, **info)}}} 1.0\n"
        yield _head("ddpjob_status_phase", open_metrics)
        for row in rows:
            yield f"ddpjob_status_phase{{{_of(row, phase=row.phase)}}} 1.0\n"
        yield _head("ddpjob_status_condition", open_metrics)
        for row in rows:
            for condition, reason in row.conditions.items():
                yield f"ddpjob_status_condition{{{_of(row, condition=condition, reason=_word(reason))}}} 1.0\n"
        yield _head("ddpjob_status_activity_seconds", open_metrics)
        for row, known in zip(rows, labels, strict=True):
            for activity, spent in _shown_activities(row):
                labelled = f"{_labels(activity=activity)},{known}"
                yield f"ddpjob_status_activity_seconds{{{labelled}}} {_number(spent)}\n"
        yield _head("ddpjob_operator_jobs", open_metrics)
        phases = Counts(row.phase for row in rows)
        for phase in Phase:
            yield f"ddpjob_operator_jobs{{{_labels(phase=phase)}}} {_number(phases[phase])}\n"

    @staticmethod
    def _of_values(rows: Sequence[JobFigures], labels: Sequence[str], open_metrics: bool) -> Iterator[str]:
        for name, read in _PER_JOB.items():
            yield _head(name, open_metrics)
            for row, known in zip(rows, labels, strict=True):
                if (value := read(row)) is not None:
                    yield f"{name}{{{known}}} {_number(value)}\n"


def _shown_activities(row: JobFigures) -> Sequence[tuple[str, float]]:
    """As many activities as MOST_SERIES leaves room for, the longest ones."""
    others = sum(read(row) is not None for read in _PER_JOB.values()) + len(row.conditions) + len(("info", "phase"))
    room = max(0, MOST_SERIES - others)
    if len(row.seconds) <= room:
        return tuple(row.seconds.items())
    return sorted(row.seconds.items(), key=lambda item: item[1], reverse=True)[:room]


def _head(name: str, open_metrics: bool) -> str:
    row = TABLE[name]
    if not open_metrics:
        return f"# HELP {name} {row.help}\n# TYPE {name} {'gauge' if row.type == 'info' else row.type}\n"
    family = name.removesuffix("_total").removesuffix("_info")
    return f"# HELP {family} {row.help}\n# TYPE {family} {row.type}\n"


def _labels(**values: str) -> str:
    """Sorted by name, as prometheus_client has them."""
    return ",".join(f'{name}="{_escaped(values[name])}"' for name in sorted(values))


def _of(row: JobFigures, **labels: str) -> str:
    return _labels(namespace=row.namespace, ddpjob=row.name, **labels)


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


JOBS = JobTable()
