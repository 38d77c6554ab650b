"""All metrics of the operator. `metrics` creates them from this table, and docs/metrics.md is generated from it.

Names follow the conventions of Prometheus: base units, `_total` for counters. Metrics of jobs have the labels
`namespace` and `ddpjob`. A label `job` would collide with the scrape job that Prometheus adds to every series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JOB_LABELS = ("namespace", "ddpjob")
DELETED = "Deleted"
OUTCOMES = ("Succeeded", "Failed", DELETED)
"""How a job ended: its last phase, or that it was deleted before."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    `aggregate` names the function that combines its series over jobs or replicas; empty where none makes sense.
    """

    name: str
    type: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    aggregate: Literal["sum", "max", ""] = "sum"


OPERATOR = (
    MetricRow("ddpjob_operator_build_info", "info", "Version of the operator.", ("version",)),
    MetricRow(
        "ddpjob_operator_start_timestamp_seconds",
        "gauge",
        "Unix time of the start of this process.",
        unit="seconds",
        aggregate="max",
    ),
    MetricRow("ddpjob_operator_leader", "gauge", "1 if this replica is the leader, otherwise 0."),
    MetricRow(
        "ddpjob_operator_shards",
        "gauge",
        "Into how many shards namespaces are divided: how many leaders there should be.",
        aggregate="max",
    ),
    MetricRow("ddpjob_operator_queue_depth", "gauge", "Jobs that wait to be reconciled."),
    MetricRow(
        "ddpjob_operator_reconcile_seconds",
        "histogram",
        "Duration of the reconciliation of one job, including API requests.",
        unit="seconds",
    ),
    MetricRow(
        "ddpjob_operator_loop_lag_seconds",
        "histogram",
        "How late the event loop runs a timer. If it is often above 0.1, the operator needs more CPU.",
        unit="seconds",
    ),
    MetricRow("ddpjob_operator_reconcile_errors_total", "counter", "Reconciliations that failed and are retried."),
    MetricRow(
        "ddpjob_operator_api_requests_total",
        "counter",
        "Requests to the API server. Code 0 is a request without a response.",
        ("verb", "resource", "code"),
    ),
    MetricRow(
        "ddpjob_operator_cut_answers_total",
        "counter",
        "Answers and watch events with an object nested deeper than 100 levels, which the operator read without them.",
    ),
    MetricRow("ddpjob_operator_watch_events_total", "counter", "Events received from watches.", ("resource",)),
    MetricRow(
        "ddpjob_operator_watch_starts_total",
        "counter",
        "Watch requests. Normal is one in five minutes for each resource and namespace, and one in 70 to 105 s where "
        "nothing changes. More are broken connections. `watched_namespace` is empty where all are watched at once.",
        ("resource", "watched_namespace"),
    ),
    MetricRow(
        "ddpjob_operator_resyncs_total",
        "counter",
        "Rounds of lists of jobs and pods: of all namespaces that are served, or, in between, of those whose lists "
        "have failed or whose watches have missed changes. "
        "The result is `done`, or `failed` if one could not be listed.",
        ("result",),
    ),
    MetricRow(
        "ddpjob_operator_status_writes_total",
        "counter",
        "Writes of the status of a job. The kind is `progress` if nothing else has changed, otherwise `change`.",
        ("kind",),
    ),
    MetricRow("ddpjob_operator_status_polls_total", "counter", "Requests to trainers for their status.", ("result",)),
    MetricRow("ddpjob_operator_events_total", "counter", "Kubernetes Events about jobs.", ("result",)),
    MetricRow(
        "ddpjob_operator_notifications_total",
        "counter",
        "Notifications of the end of jobs: `delivered`, or `failed` after the last try.",
        ("result",),
    ),
    MetricRow(
        "ddpjob_operator_restarts_total",
        "counter",
        "Restarts of all jobs after failures, including deleted jobs.",
        ("namespace", "reason"),
    ),
    MetricRow(
        "ddpjob_operator_live_recoveries_total",
        "counter",
        "Times that pods of all jobs were replaced while the other ranks went on, including deleted jobs.",
        ("namespace", "reason"),
    ),
    MetricRow(
        "ddpjob_operator_failed_jobs_total",
        "counter",
        "Jobs that failed, including deleted jobs.",
        ("namespace", "reason"),
    ),
    MetricRow("ddpjob_operator_jobs", "gauge", "Jobs by phase.", ("phase",)),
    MetricRow(
        "ddpjob_queue_seconds",
        "histogram",
        "Time for which a job waited for nodes until its gang ran for the first time.",
        unit="seconds",
    ),
    MetricRow(
        "ddpjob_first_step_wait_seconds",
        "histogram",
        "Time from the start of a job to its first training step, without suspensions.",
        unit="seconds",
    ),
    MetricRow(
        "ddpjob_recovery_seconds",
        "histogram",
        "Time from a failure to the next training step. Not observed where an elastic job is resized, or a job "
        "suspended, in between.",
        unit="seconds",
    ),
    *(
        row
        for unit, what in (("node", "Pod"), ("gpu", "GPU"))
        for row in (
            MetricRow(
                f"ddpjob_{unit}_seconds_total",
                "counter",
                f"{what}-seconds held by gangs, without spares, added when the job ends or is deleted. `cause` is the "
                "activity; training time that a failure lost has the cause `recovering`. `outcome` is "
                f"{', '.join(f'`{each}`' for each in OUTCOMES)}.",
                ("namespace", "cause", "outcome"),
                "seconds",
            ),
            MetricRow(
                f"ddpjob_held_{unit}_seconds_total",
                "counter",
                f"{what}-seconds held by gangs, without spares, incremented while they are held. `cause` is the "
                "activity.",
                ("namespace", "cause"),
                "seconds",
            ),
            MetricRow(
                f"ddpjob_lost_{unit}_seconds_total",
                "counter",
                f"Those of `ddpjob_held_{unit}_seconds_total` that were counted as training and that a failure lost "
                "later.",
                ("namespace",),
                "seconds",
            ),
        )
    ),
)
"""The operator itself. These counters outlive the jobs, and start from 0 with each new process."""

JOBS = (
    MetricRow(
        "ddpjob_info",
        "info",
        "Image of the trainer, claim of the volume; start of the digest of the code, queue of the gang scheduler, "
        "owner (empty without).",
        (*JOB_LABELS, "image", "claim", "code", "queue", "owner"),
    ),
    MetricRow("ddpjob_status_phase", "gauge", "1 for the phase of the job.", (*JOB_LABELS, "phase")),
    MetricRow(
        "ddpjob_status_condition",
        "gauge",
        "1 for each condition that needs attention and is True: `Degraded`, `SnapshotsFailing`, `LossNotFinite`, "
        "`ShutdownTooShort`.",
        (*JOB_LABELS, "condition", "reason"),
    ),
    MetricRow(
        "ddpjob_status_creation_timestamp_seconds",
        "gauge",
        "Unix time at which the job was created.",
        JOB_LABELS,
        "seconds",
        "max",
    ),
    MetricRow(
        "ddpjob_status_start_timestamp_seconds",
        "gauge",
        "Unix time at which the operator first acted on the job.",
        JOB_LABELS,
        "seconds",
        "max",
    ),
    MetricRow(
        "ddpjob_status_completion_timestamp_seconds",
        "gauge",
        "Unix time at which the job succeeded or failed.",
        JOB_LABELS,
        "seconds",
        "max",
    ),
    MetricRow(
        "ddpjob_status_eta_timestamp_seconds",
        "gauge",
        "Unix time at which training is expected to end. Only while the job runs.",
        JOB_LABELS,
        "seconds",
        "max",
    ),
    MetricRow("ddpjob_status_attempt", "gauge", "Number of the current attempt, from 0.", JOB_LABELS, aggregate="max"),
    MetricRow(
        "ddpjob_status_restarts_total",
        "counter",
        "Restarts after failures. One that turns out to be a disruption stays counted.",
        JOB_LABELS,
    ),
    MetricRow(
        "ddpjob_status_live_recoveries_total",
        "counter",
        "Times that pods were replaced while the other ranks went on. Each also counts as a restart or a disruption.",
        JOB_LABELS,
    ),
    MetricRow(
        "ddpjob_status_disruptions_total", "counter", "Restarts that do not count towards maxRestarts.", JOB_LABELS
    ),
    MetricRow("ddpjob_status_recomputed_steps_total", "counter", "Optimizer steps lost with failures.", JOB_LABELS),
    MetricRow("ddpjob_status_nodes", "gauge", "Pods that the current attempt needs.", JOB_LABELS),
    MetricRow("ddpjob_status_nodes_ready", "gauge", "Ready pods of the current attempt.", JOB_LABELS),
    MetricRow(
        "ddpjob_status_gpus",
        "gauge",
        "GPUs that the pods of the current attempt request, without spares, also while it waits or is suspended, and "
        "after its end.",
        JOB_LABELS,
    ),
    MetricRow("ddpjob_status_step", "gauge", "Completed optimizer steps.", JOB_LABELS, aggregate="max"),
    MetricRow("ddpjob_status_total_steps", "gauge", "Optimizer steps of the whole run.", JOB_LABELS, aggregate="max"),
    MetricRow("ddpjob_status_loss", "gauge", "Training loss of the last reported step.", JOB_LABELS, aggregate=""),
    MetricRow(
        "ddpjob_status_samples_per_second",
        "gauge",
        "Training throughput of all ranks. Only while the job runs.",
        JOB_LABELS,
    ),
    MetricRow("ddpjob_status_snapshot_step", "gauge", "Step of the newest snapshot.", JOB_LABELS, aggregate="max"),
    MetricRow(
        "ddpjob_status_snapshot_timestamp_seconds",
        "gauge",
        "Unix time of the newest snapshot.",
        JOB_LABELS,
        "seconds",
        "max",
    ),
    MetricRow(
        "ddpjob_status_goodput_ratio",
        "gauge",
        "Training seconds divided by all seconds except suspended ones, 0 to 1.",
        JOB_LABELS,
        "ratio",
        aggregate="",
    ),
    MetricRow(
        "ddpjob_status_activity_seconds",
        "gauge",
        "Seconds by activity, as in status.goodput. A failure moves lost training seconds to `recovering`.",
        (*JOB_LABELS, "activity"),
        "seconds",
    ),
)
"""The status of each job. The leader exports them while the job exists; unknown values have no series."""

MOST_SERIES = 30
"""Series of one job from the operator. Beyond that the activities with the fewest seconds have none."""

TABLE = {row.name: row for row in (*OPERATOR, *JOBS)}
