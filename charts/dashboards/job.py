"""The dashboard of one job."""

from __future__ import annotations

from grafana import Dashboard, Panel, Query, Row
from queries import (
    BY_JOB,
    GOOD_IS_MORE,
    JOB,
    SMOOTH,
    SNAPSHOT,
    SNAPSHOT_AGE,
    TEAM,
    bars,
    choices,
    lines,
    quantiles,
    stat,
)

OF_ITS_CLAIM = (
    "and on (namespace, persistentvolumeclaim)"
    f' label_replace(ddpjob_info{{{JOB}}}, "persistentvolumeclaim", "$1", "claim", "(.+)")'
)
"""By the name that the operator gives: that of a claim may be the user's, or have a digest of that of the job."""


def mean(histogram: str) -> str:
    sums = (f"sum(rate({histogram}_{part}{{{JOB}}}[{SMOOTH}]))" for part in ("sum", "count"))
    return " / ".join(sums)


def recovery_seconds() -> str:
    """Of live recoveries in an interval. A pod that takes node rank 0 goes on with the sum in a series that does not
    begin at 0, which `increase` sees only after the aggregation.
    """
    return f"increase((max by (kind) (ddpjob_train_live_recovery_seconds_sum{{{JOB}}}))[$__rate_interval:15s])"


def excess(metric: str) -> str:
    """Seconds by which the slowest rank exceeds the fastest one."""
    return f"max({metric}{{{JOB}}}) - min({metric}{{{JOB}}})"


ONE_JOB = Dashboard(
    "job", "Job", "One job: progress, loss, where its time goes, its ranks and its snapshots.",
    (
        Row("Now", (
            stat("Phase", "Starting for long: `ddpjob why` has the scheduler's words.",
                 Query(f"max by (phase) (ddpjob_status_phase{{{JOB}}}) > 0", "{{phase}}"), name_only=True),
            stat("Progress", "Completed steps of all steps. Without a known total there is none.",
                 f"max(ddpjob_status_step{{{JOB}}}) / max(ddpjob_status_total_steps{{{JOB}}})", unit="percentunit",
                 empty="unknown"),
            stat("Time left", "Until training is expected to end.",
                 f"clamp_min(max(ddpjob_status_eta_timestamp_seconds{{{JOB}}}) - time(), 0)", unit="s",
                 empty="unknown"),
            stat("Goodput", "Share of its time that went into training steps that were kept. If it is low, 'Where its "
                 "time goes' says what took the rest.", f"max(ddpjob_status_goodput_ratio{{{JOB}}})",
                 unit="percentunit", steps=GOOD_IS_MORE),
            stat("Nodes", "Ready pods, and pods that the attempt needs.",
                 Query(f"max(ddpjob_status_nodes_ready{{{JOB}}})", "ready"),
                 Query(f"max(ddpjob_status_nodes{{{JOB}}})", "needed")),
            stat("Restarts", "After failures. `ddpjob why` lists them with advice.",
                 f"max(ddpjob_status_restarts_total{{{JOB}}})", steps=((0, "green"), (1, "orange"), (3, "red"))),
            stat("Age of the snapshot", "What a failure would cost now. Hours: see the alert DDPJobSnapshotTooOld.",
                 SNAPSHOT, unit="s", steps=SNAPSHOT_AGE, empty="none"),
            stat("Attention", "Conditions that need somebody, with their reasons; docs/conditions.md explains them.",
                 Query(f"max by (condition, reason) (ddpjob_status_condition{{{JOB}}})", "{{condition}}: {{reason}}"),
                 name_only=True, steps=((0, "orange"),), empty="nothing"),
        )),
        Row("Training", (
            lines("Loss", "Of the last reported step, over all ranks. A gap or a jump at an attempt is a restart.",
                  Query(f"max(ddpjob_train_loss{{{JOB}}}) or max(ddpjob_status_loss{{{JOB}}})", "loss")),
            lines("Throughput", "Samples a second of all ranks. A drop: one slow rank, data, or the network.",
                  Query(f"max(ddpjob_train_samples_per_second{{{JOB}}}) or "
                        f"max(ddpjob_status_samples_per_second{{{JOB}}})", "samples"), unit="cps"),
            lines("Step time", "Half of the steps are faster than p50. A p99 far above: data, snapshots, network.",
                  *quantiles("ddpjob_train_step_seconds", SMOOTH, JOB), unit="s"),
            lines("Wait for data", "Of it, the time for which rank 0 waits for its samples; in a script of your own, "
                  "for torch's DataLoader. A p99 far above p50: single batches come late. Near the step time: more "
                  "data workers.",
                  *quantiles("ddpjob_train_data_wait_seconds", SMOOTH, JOB), unit="s"),
            lines("Steps", "The distance between the two is what a failure would cost.",
                  Query(f"max(ddpjob_status_step{{{JOB}}})", "completed"),
                  Query(f"max(ddpjob_status_snapshot_step{{{JOB}}})", "in the newest snapshot")),
            lines("Learning rate", "Of the first parameter group.",
                  Query(f"max(ddpjob_train_learning_rate{{{JOB}}})", "learning rate")),
            lines("Values of the program", "What the training program reports, such as eval_accuracy.",
                  Query(f"max by (metric) (ddpjob_train_metric{{{JOB}}})", "{{metric}}")),
            lines("Skipped steps", "Steps that updated nothing. overflow: fp16 looks for its loss scale, a few at the "
                  "start; on and on, the loss diverges. rollback: batches left out after a loss that was not finite. "
                  "no_update: a script has left its optimizer.step() out.",
                  Query(f"sum by (reason) (increase(ddpjob_train_skipped_steps_total{{{JOB}}}[$__rate_interval]))",
                        "{{reason}}"), bars=True),
            lines("Steps whose loss is not finite", "NaN or infinite. The condition LossNotFinite has the step, and "
                  "spec.nonFiniteLossPolicy says what follows.",
                  Query(f"sum(increase(ddpjob_train_non_finite_losses_total{{{JOB}}}[$__rate_interval]))", "steps"),
                  bars=True),
        )),
        Row("Time", (
            bars("Where its time goes", "Since the job began. Much queued: nodes or quota. pulling: image. rendezvous, "
                 "first_step: imports, compilation. saving: snapshots. recovering: failures.",
                 Query(f"sort_desc(max by (activity) (ddpjob_status_activity_seconds{{{JOB}}}) > 0)", "{{activity}}"),
                 "s"),
            Panel("Phases", "state-timeline", "One line for each phase that the job was in.",
                  [Query(f"max by (phase) (ddpjob_status_phase{{{JOB}}})", "{{phase}}")]),
            lines("Attempts", "Disruptions (evictions, lost nodes, changes of size) do not count towards maxRestarts.",
                  Query(f"max(ddpjob_status_attempt{{{JOB}}})", "attempts begun before this one"),
                  Query(f"max(ddpjob_status_disruptions_total{{{JOB}}})", "disruptions")),
        )),
        Row("Ranks and pods", (
            lines("Seconds since the last progress", "The ten ranks that have been silent for longest. One that grows "
                  "alone is stuck; all together wait for it or for the volume.",
                  Query(f"topk(10, max by (rank) (ddpjob_rank_heartbeat_age_seconds{{{JOB}}}))", "rank {{rank}}"),
                  unit="s"),
            lines("Wait for data by rank", "Median of the ten ranks that wait longest for their samples. One far above "
                  "the others: its node or its shard of the data is slow.",
                  Query(f"topk(10, max by (rank) (ddpjob_rank_data_wait_seconds{{{JOB}}}))", "rank {{rank}}"),
                  unit="s"),
            lines("Forward and backward passes by rank", "Median of the ten slowest ranks, without their wait for "
                  "others, where DistributedDataParallel measures it. One far above the others slows the whole job.",
                  Query(f"topk(10, max by (rank) (ddpjob_rank_passes_seconds{{{JOB}}}))", "rank {{rank}}"), unit="s"),
            lines("Excess of the slowest rank", "Over the fastest one. Ranks that synchronize in every step all wait "
                  "for the one whose data comes last or whose passes take longest, and have the same step time: a "
                  "difference of that is one of ranks that do not.",
                  Query(excess("ddpjob_rank_data_wait_seconds"), "wait for data"),
                  Query(excess("ddpjob_rank_passes_seconds"), "passes"),
                  Query(excess("ddpjob_rank_step_seconds"), "step"), unit="s"),
            lines("Ranks that train", "With restart.scope Live, fewer while some are lost and their replacements have "
                  "not joined yet.", Query(f"max(ddpjob_train_world_size{{{JOB}}})", "ranks")),
            lines("Time of live recoveries", "With restart.scope Live: seconds from the last step of a group of ranks "
                  "to the first of the next one. Above 3 s a rank or a node stood still; see docs/live-recovery.md.",
                  Query(recovery_seconds(), "{{kind}}"), unit="s", bars=True),
            lines("CPU cores", "Used by each pod. One that differs from the others is a straggler or a crowded node.",
                  Query(f"sum by (pod) (rate(ddpjob_pod_cpu_seconds_total{{{JOB}}}[$__rate_interval]))", "{{pod}}")),
            lines("Memory", "Of each pod, and the limit above which it is killed (OOMKilled).",
                  Query(f"max by (pod) (ddpjob_pod_memory_bytes{{{JOB}}})", "{{pod}}"),
                  Query(f"max(ddpjob_pod_memory_limit_bytes{{{JOB}}})", "limit"), unit="bytes"),
            lines("Free share of its volume", "Of the job's claim. It needs the kubelet's metrics. Below a tenth, see "
                  "the alert DDPJobVolumeNearlyFull.",
                  Query(f"min by (namespace, persistentvolumeclaim) (kubelet_volume_stats_available_bytes{{{TEAM}}}"
                        f" / kubelet_volume_stats_capacity_bytes{{{TEAM}}}) {OF_ITS_CLAIM}",
                        "{{persistentvolumeclaim}}"),
                  unit="percentunit", steps=((0, "red"), (0.1, "green"))),
        )),
        Row("Snapshots", (
            lines("Saves by result", "Skipped: the one before was not done. Failed: condition SnapshotsFailing.",
                  Query(f"sum by (result) (increase(ddpjob_snapshot_saves_total{{{JOB}}}[$__rate_interval]))",
                        "{{result}}"), bars=True),
            lines("Duration of a save", "Training stops only for the first of the two. The second limits how often a "
                  "snapshot can be due.",
                  Query(mean("ddpjob_snapshot_stall_seconds"), "training stopped"),
                  Query(mean("ddpjob_snapshot_save_seconds"), "until complete"), unit="s"),
            lines("Size of the newest snapshot", "All its files. Its volume holds spec.snapshots.keep of them, and one "
                  "more while it is written.",
                  Query(f"max(ddpjob_snapshot_last_bytes{{{JOB}}})", "size"), unit="bytes"),
        )),
    ),
    choices(many=False),
    annotations=(Query(f"max {BY_JOB} (changes(ddpjob_status_attempt{{{JOB}}}[1m])) > 0", "New attempt"),),
)  # fmt: skip
