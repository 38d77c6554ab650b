"""The dashboard of all jobs."""

from __future__ import annotations

from grafana import Column, Dashboard, Query, Row
from queries import (
    AT_WORK,
    CLUSTER,
    GOOD_IS_MORE,
    GOOD_IS_NONE,
    JOB,
    NODES,
    ON_JOB,
    PROGRESS,
    RANGE,
    SNAPSHOT,
    SNAPSHOT_AGE,
    TIME_LEFT,
    TRAINING,
    WAITS,
    WARN_IF_ANY,
    choices,
    counted,
    held_now,
    in_phase,
    lines,
    or_zero,
    per_job,
    quantiles,
    seconds,
    stat,
    table,
)

GOODPUT = (
    f"clamp_min({seconds('ddpjob_held_node_seconds_total', RANGE, TRAINING)}"
    f" - {seconds('ddpjob_lost_node_seconds_total', RANGE)}, 0) / {seconds('ddpjob_held_node_seconds_total', RANGE)}"
)
"""What a failure loses may have been trained before the time shown."""
FLEET = Dashboard(
    "fleet", "Fleet",
    "All jobs: what needs attention, what waits, what the nodes do, and how the operator is.",
    (
        Row("Now", (
            stat("Alerts", "Alerts of the chart that fire (prometheusRules.enabled). runbook_url says what to do.",
                 or_zero(f'count(ALERTS{{{CLUSTER}, alertname=~"DDPJob.+", alertstate="firing"}})'),
                 steps=GOOD_IS_NONE),
            stat("Running", "Jobs with all pods of their gang ready.",
                 or_zero(f'sum(ddpjob_status_phase{{{JOB}, phase="Running"}})')),
            stat("Waiting", "Jobs that wait for nodes, image, volume or initializers. The table says how long.",
                 or_zero(f"sum(ddpjob_status_phase{{{JOB}, {WAITS}}})"), steps=WARN_IF_ANY),
            stat("Restarting", "Jobs between two attempts. If it stays above 0, see DDPJob / Failures.",
                 or_zero(f'sum(ddpjob_status_phase{{{JOB}, phase="Restarting"}})'), steps=WARN_IF_ANY),
            stat("Failed in this time", "Jobs that failed for good in the time shown, including deleted ones.",
                 or_zero(f"round(sum{counted('ddpjob_operator_failed_jobs_total', RANGE)})"),
                 steps=GOOD_IS_NONE),
            stat("Goodput in this time",
                 "Share of the time for which gangs held their nodes that went into training steps that were kept. "
                 "Below a half, look at 'What the nodes do' for the largest other part.",
                 GOODPUT, unit="percentunit", steps=GOOD_IS_MORE),
            stat("GPUs held", "GPUs of jobs that run or restart.",
                 or_zero(f'sum(ddpjob_status_gpus{{{JOB}}} and {in_phase(AT_WORK)})')),
            stat("GPUs awaited", "GPUs that waiting jobs request.",
                 or_zero(f"sum(ddpjob_status_gpus{{{JOB}}} and {in_phase(WAITS)})")),
        )),
        Row("Needs attention", (
            table("Conditions",
                  "Jobs with a condition that needs somebody: Degraded has the reason why a job does not run. "
                  "docs/conditions.md explains each reason; `ddpjob why JOB` says it in words.",
                  Column("", f"max by (namespace, ddpjob, condition, reason) (ddpjob_status_condition{{{JOB}}})",
                         hidden=True), width=12),
            table("Waiting jobs", "Longest waits first. An hour or more: `ddpjob why JOB` has the scheduler's words.",
                  Column("Waits", f"topk(50, (time() - {per_job('ddpjob_status_creation_timestamp_seconds')})"
                                  f" * {ON_JOB} group_left (queue)"
                                  f" max by (namespace, ddpjob, queue) (ddpjob_info{{{JOB}}})"
                                  f" and {in_phase(WAITS)})",
                         "s", ((0, "green"), (600, "orange"), (3600, "red"))), order="Waits", width=12),
        )),
        Row("Jobs", (
            table("Jobs", "One line for each job that exists. Click a name for its own dashboard.",
                  Column("", f"max by (namespace, ddpjob, phase) (ddpjob_status_phase{{{JOB}}})", hidden=True),
                  Column("Progress", PROGRESS, "percentunit"),
                  Column("Time left", TIME_LEFT, "s"),
                  Column("Goodput", per_job("ddpjob_status_goodput_ratio"), "percentunit", GOOD_IS_MORE),
                  Column("Nodes", per_job("ddpjob_status_nodes")),
                  Column("GPUs", per_job("ddpjob_status_gpus")),
                  Column("Restarts", per_job("ddpjob_status_restarts_total"), steps=((0, "green"), (1, "orange"),
                                                                                    (3, "red"))),
                  Column("Age of snapshot", SNAPSHOT, "s", SNAPSHOT_AGE), order="GPUs"),
            lines("Jobs by phase", "Waiting jobs that pile up need nodes or quota; many that restart share a cause.",
                  Query(f"sum by (phase) (ddpjob_status_phase{{{JOB}}})", "{{phase}}"), stacked=True),
            lines("What the nodes do",
                  "Nodes held by gangs, by what they spend their time on, smoothed over ten minutes. Training should "
                  "be nearly all of it. Much pulling: large images; rendezvous, first_step: slow starts; saving: large "
                  "snapshots; recovering: failures.",
                  Query(held_now(NODES, by="by (cause) "), "{{cause}}"),
                  stacked=True),
            lines("How long jobs wait", "Jobs of six hours: for nodes, and from their start to their first training "
                  "step. The difference of the two is image, imports and compilation.",
                  *quantiles("ddpjob_queue_seconds", "6h", legend="nodes ", most=90),
                  *quantiles("ddpjob_first_step_wait_seconds", "6h", legend="first step ", most=90), unit="s"),
        )),
        Row("Operator", (
            stat("Leaders", "Of each shard. 1 is right. Less: no replica acts, see the alert DDPJobOperatorDown.",
                 or_zero(f"sum(ddpjob_operator_leader{{{CLUSTER}}}) / max(ddpjob_operator_shards{{{CLUSTER}}})"),
                 steps=((0, "red"), (1, "green"), (1.01, "red"))),
            stat("Jobs in its queue", "Jobs that wait to be reconciled. Above 10 for long: DDPJobOperatorBacklog.",
                 f"max(ddpjob_operator_queue_depth{{{CLUSTER}}})", steps=((0, "green"), (10, "orange"), (100, "red"))),
            lines("Reconciliation", "How long one look at a job takes, API requests included. Seconds point to the API "
                  "server, a lag of the event loop above 0.1 s to too little CPU.",
                  *quantiles("ddpjob_operator_reconcile_seconds", "$__rate_interval"),
                  quantiles("ddpjob_operator_loop_lag_seconds", "$__rate_interval", legend="event loop's lag ")[1],
                  unit="s", width=6),
            lines("API requests by code", "429 is throttling, 403 a missing permission, 0 no answer at all.",
                  Query(f"sum by (code) (rate(ddpjob_operator_api_requests_total{{{CLUSTER}}}[$__rate_interval]))",
                        "{{code}}"),
                  unit="reqps", width=6),
            lines("Errors", "Reconciliations and full lists that failed and are tried again. The log has the cause.",
                  Query(f"sum(increase(ddpjob_operator_reconcile_errors_total{{{CLUSTER}}}[$__rate_interval]))",
                        "reconciliations"),
                  Query(or_zero(f'sum(increase(ddpjob_operator_resyncs_total{{{CLUSTER}, result="failed"}}'
                                "[$__rate_interval]))"), "full lists"), bars=True, width=6),
            lines("Watch requests in 15 minutes", "3 to 13 of each resource and namespace are normal, most where "
                  "nothing changes. None: DDPJobOperatorWatchStale. More: broken connections.",
                  Query(f"sum by (resource) (increase(ddpjob_operator_watch_starts_total{{{CLUSTER}}}[15m]))",
                        "{{resource}}"),
                  width=6),
        )),
    ),
    choices(many=True),
)  # fmt: skip
