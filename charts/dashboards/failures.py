"""The dashboard of failures."""

from __future__ import annotations

from grafana import Column, Dashboard, Query, Row
from queries import (
    AGAIN,
    BY_JOB,
    GOOD_IS_MORE,
    GOOD_IS_NONE,
    JOB,
    NODES,
    RANGE,
    SHARE_LOST,
    WARN_IF_ANY,
    bars,
    choices,
    counted,
    held_now,
    lines,
    or_zero,
    per_job,
    quantiles,
    seconds,
    stat,
    table,
)

LOST = f"({seconds('ddpjob_lost_node_seconds_total', RANGE)} + ({or_zero(seconds(NODES, RANGE, AGAIN))}))"


def by_reason(metric: str) -> Query:
    return Query(f"sum by (reason) {counted(metric, '$__rate_interval')}", "{{reason}}")


FAILURES = Dashboard(
    "failures", "Failures", "What fails, why, and what it costs. Counts include jobs that are gone.",
    (
        Row("In the time shown", (
            stat("Jobs failed", "For good: restart budget used up, or a failure that a retry would repeat.",
                 or_zero(f"round(sum{counted('ddpjob_operator_failed_jobs_total', RANGE)})"),
                 steps=GOOD_IS_NONE),
            stat("Restarts", "After failures, of all jobs.",
                 or_zero(f"round(sum{counted('ddpjob_operator_restarts_total', RANGE)})"),
                 steps=WARN_IF_ANY),
            stat("Disruptions", "Restarts after evictions, preemptions, lost nodes and changes of size, of jobs that "
                 "exist.", or_zero(f"round(sum(increase(ddpjob_status_disruptions_total{{{JOB}}}[{RANGE}])))"),
                 steps=WARN_IF_ANY),
            stat("Steps repeated", "Lost with failures and trained again, of jobs that exist. Many in each restart: "
                 "shorter snapshots.every.",
                 or_zero(f"round(sum(increase(ddpjob_status_recomputed_steps_total{{{JOB}}}[{RANGE}])))")),
            stat("Time lost", "Nodes times the time that went into steps that were lost, into stalls and into starting "
                 "again.", LOST, unit="s"),
            stat("Share lost", "Of the time for which gangs held their nodes. A tenth is much: see the most frequent "
                 "reason below.", f"clamp_max({LOST} / {seconds(NODES, RANGE)}, 1)",
                 unit="percentunit", steps=SHARE_LOST),
            stat("Losses not finite", "Steps with a loss that was NaN or infinite: a learning rate too high, a bad "
                 "sample, or fp16. nonFiniteLossPolicy decides what happens.",
                 or_zero(f"round(sum(increase(ddpjob_train_non_finite_losses_total{{{JOB}}}[{RANGE}])))"),
                 steps=WARN_IF_ANY),
            stat("Failed saves", "Snapshots that could not be saved. The condition SnapshotsFailing has the cause.",
                 or_zero(f'round(sum(increase(ddpjob_snapshot_saves_total{{{JOB}, result="failed"}}[{RANGE}])))'),
                 steps=GOOD_IS_NONE),
        )),
        Row("Causes", (
            lines("Restarts by reason", "NodeLost and Evicted are the cluster's, WorkerException the script's, "
                  "PeerLost alone the network's. docs/conditions.md has what to do for each.",
                  by_reason("ddpjob_operator_restarts_total"), bars=True, stacked=True, width=12),
            lines("Failed jobs by reason", "UserError and ImportError never ran: the user has to correct them.",
                  by_reason("ddpjob_operator_failed_jobs_total"), bars=True, stacked=True, width=12),
            bars("Restarts by namespace", "A single namespace points to one image or one script; all of them to the "
                 "cluster.",
                 Query(f"sort_desc(sum by (namespace) {counted('ddpjob_operator_restarts_total', RANGE)})",
                       "{{namespace}}")),
            lines("Nodes that recover", "Nodes held while a gang starts again or a stalled rank is waited for, "
                  "smoothed over ten minutes. They train nothing.",
                  Query(held_now(NODES, AGAIN, "by (cause) "), "{{cause}}"),
                  stacked=True),
            lines("From a failure to training again", "Failures of six hours. Minutes: image pulls, slow imports, a "
                  "long backoff, or too few nodes; restart.scope InPlace keeps the healthy pods.",
                  *quantiles("ddpjob_recovery_seconds", "6h", most=90), unit="s"),
            lines("Micro-batches made smaller", "After running out of GPU memory. Training goes on, slower: lower "
                  "--micro-batch.",
                  Query(f"sum {BY_JOB} (increase(ddpjob_train_micro_batch_reductions_total{{{JOB}}}"
                        "[$__rate_interval]))", "{{namespace}}/{{ddpjob}}"), bars=True),
        )),
        Row("Jobs", (
            table("Jobs that restart", "Most restarts first. `ddpjob why JOB` lists its failures with advice.",
                  Column("Restarts", f"{per_job('ddpjob_status_restarts_total')} > 0",
                         steps=((0, "green"), (1, "orange"), (3, "red"))),
                  Column("Disruptions", f"{per_job('ddpjob_status_disruptions_total')}"
                                        f" and {per_job('ddpjob_status_restarts_total')} > 0"),
                  Column("Steps repeated", f"{per_job('ddpjob_status_recomputed_steps_total')}"
                                           f" and {per_job('ddpjob_status_restarts_total')} > 0"),
                  Column("Goodput", f"{per_job('ddpjob_status_goodput_ratio')}"
                                    f" and {per_job('ddpjob_status_restarts_total')} > 0",
                         "percentunit", GOOD_IS_MORE), order="Restarts"),
        )),
    ),
    choices(many=True), since="now-24h",
)  # fmt: skip
