"""All metrics of a trainer pod. `metrics` creates them from this table, and docs/metrics.md is generated from it.

Each series has the label `ddpjob`. The label `namespace` comes from the scrape target: a pod must not be able to write
series of another namespace. A label `job` would collide with the scrape job that Prometheus adds to every series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_trainer.contract.histograms import BUCKETS, RECOVERY_BUCKETS

LABELS = ("ddpjob",)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    `source` is the key of its value in a heartbeat, in its counters, or in its snapshot. `aggregate` names the function
    that combines its series over pods; empty where none makes sense. `known` has the values of its last label that have
    a series from the start: `increase` does not see a series begin with its first event. `bounds` are those of a
    histogram.
    """

    name: str
    type: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = LABELS
    unit: str = ""
    aggregate: Literal["sum", "max", ""] = "sum"
    source: str = ""
    known: tuple[str, ...] = ()
    bounds: tuple[float, ...] = BUCKETS


RANK = (
    MetricRow(
        "ddpjob_rank_step_seconds",
        "gauge",
        "Median time from step to step of the rank, over its last 512 steps. Ranks that synchronize in every step "
        "report the same value, that of the slowest rank.",
        (*LABELS, "rank"),
        "seconds",
        "max",
        source="stepSecondsMedian",
    ),
    MetricRow(
        "ddpjob_rank_data_wait_seconds",
        "gauge",
        "Median time for which a step of the rank waited for its samples, over its last 512 steps. In a script of your "
        "own, for torch's DataLoader; one that loads in another way has no such series.",
        (*LABELS, "rank"),
        "seconds",
        "max",
        source="dataSecondsMedian",
    ),
    MetricRow(
        "ddpjob_rank_passes_seconds",
        "gauge",
        "Median time of the rank's own forward and backward passes, without the wait for other ranks. Only "
        "DistributedDataParallel measures it, in a sample of the steps.",
        (*LABELS, "rank"),
        "seconds",
        "max",
        source="passesSecondsMedian",
    ),
)

POD = (
    MetricRow(
        "ddpjob_trainer_info",
        "info",
        "Attempt and node rank of the pod (`none` for a spare), and the world size.",
        (*LABELS, "attempt", "node_rank", "world_size"),
    ),
    MetricRow(
        "ddpjob_rank_heartbeat_age_seconds",
        "gauge",
        "Seconds since the last progress of the rank.",
        (*LABELS, "rank"),
        "seconds",
        "max",
    ),
    *RANK,
)
"""Every pod exports these, and those of its container and GPUs."""

CONTAINER = (
    MetricRow(
        "ddpjob_pod_cpu_seconds_total",
        "counter",
        "CPU time that the trainer container has used.",
        unit="seconds",
        source="cpu_seconds",
    ),
    MetricRow(
        "ddpjob_pod_memory_bytes",
        "gauge",
        "Memory of the trainer container, without page cache that can be dropped.",
        unit="bytes",
        source="memory_bytes",
    ),
    MetricRow(
        "ddpjob_pod_memory_limit_bytes",
        "gauge",
        "Memory limit of the trainer container. No series without a limit.",
        unit="bytes",
        source="memory_limit_bytes",
    ),
)

GPU = (
    MetricRow(
        "ddpjob_gpu_utilization_ratio",
        "gauge",
        "Share of time in which a kernel ran on the GPU, 0 to 1. Series of GPUs need nvidia-ml-py in the image.",
        (*LABELS, "gpu"),
        unit="ratio",
        aggregate="",
        source="utilization",
    ),
    MetricRow(
        "ddpjob_gpu_memory_bytes",
        "gauge",
        "Memory of the GPU in use.",
        (*LABELS, "gpu"),
        unit="bytes",
        source="memory_bytes",
    ),
    MetricRow(
        "ddpjob_gpu_memory_limit_bytes",
        "gauge",
        "Memory of the GPU.",
        (*LABELS, "gpu"),
        unit="bytes",
        source="memory_limit_bytes",
    ),
)

WORLD_SIZE = MetricRow(
    "ddpjob_train_world_size",
    "gauge",
    "Ranks that train now. With live recovery fewer than the world size of the attempt while some are lost.",
    aggregate="max",
)

PROGRESS = (
    MetricRow("ddpjob_train_step", "gauge", "Completed optimizer steps of the run.", aggregate="max", source="step"),
    MetricRow(
        "ddpjob_train_total_steps", "gauge", "Optimizer steps of the whole run.", aggregate="max", source="totalSteps"
    ),
    MetricRow("ddpjob_train_epoch", "gauge", "Current epoch, from 0.", aggregate="max", source="epoch"),
    MetricRow("ddpjob_train_loss", "gauge", "Training loss of the last reported step.", aggregate="", source="loss"),
    MetricRow(
        "ddpjob_train_learning_rate",
        "gauge",
        "Learning rate of the first parameter group.",
        aggregate="",
        source="learningRate",
    ),
    MetricRow(
        "ddpjob_train_samples_per_second",
        "gauge",
        "Training throughput of all ranks.",
        source="samplesPerSecond",
    ),
)

METRIC = MetricRow(
    "ddpjob_train_metric",
    "gauge",
    "Last value of each metric that the training program reports, such as `eval_accuracy`.",
    (*LABELS, "metric"),
    aggregate="",
)

SNAPSHOT = (
    MetricRow("ddpjob_snapshot_last_step", "gauge", "Step of the newest snapshot.", aggregate="max", source="step"),
    MetricRow(
        "ddpjob_snapshot_last_timestamp_seconds",
        "gauge",
        "Unix time of the newest snapshot.",
        unit="seconds",
        aggregate="max",
        source="time",
    ),
    MetricRow(
        "ddpjob_snapshot_last_bytes", "gauge", "Size of the newest snapshot, all files.", unit="bytes", source="bytes"
    ),
)

COUNTERS = (
    MetricRow(
        "ddpjob_train_steps_total", "counter", "Optimizer steps trained, recomputed ones included.", source="steps"
    ),
    MetricRow("ddpjob_train_samples_total", "counter", "Samples trained on by all ranks.", source="samples"),
    MetricRow(
        "ddpjob_train_micro_batch_reductions_total",
        "counter",
        "Micro-batch reductions after running out of memory.",
        source="outOfMemory",
    ),
    MetricRow(
        "ddpjob_train_non_finite_losses_total",
        "counter",
        "Steps with a loss that is NaN or infinite.",
        source="nonFiniteLosses",
    ),
)

COUNTERS_BY_LABEL = (
    MetricRow(
        "ddpjob_train_skipped_steps_total",
        "counter",
        "Steps that updated nothing: `overflow` in fp16, which the built-in loop counts, `rollback`, batches that are "
        "left out since the job was rolled back from them, and `no_update`, steps of a script without an "
        "`optimizer.step()`.",
        (*LABELS, "reason"),
        source="skippedSteps",
        known=("rollback", "no_update"),
    ),
    MetricRow(
        "ddpjob_snapshot_saves_total",
        "counter",
        "Snapshots by result.",
        (*LABELS, "result"),
        source="saves",
        known=("saved", "failed", "skipped"),
    ),
)

HISTOGRAMS = (
    MetricRow(
        "ddpjob_train_step_seconds", "histogram", "Duration of an optimizer step.", unit="seconds", source="stepSeconds"
    ),
    MetricRow(
        "ddpjob_snapshot_stall_seconds",
        "histogram",
        "Time for which saving a snapshot blocked training.",
        unit="seconds",
        source="stallSeconds",
    ),
    MetricRow(
        "ddpjob_snapshot_save_seconds",
        "histogram",
        "Time until a snapshot was complete on the volume.",
        unit="seconds",
        source="saveSeconds",
    ),
)

DATA_WAIT = MetricRow(
    "ddpjob_train_data_wait_seconds",
    "histogram",
    "Time for which a step of rank 0 waited for its samples. In a script of your own, for torch's DataLoader; one that "
    "loads in another way has no such series.",
    unit="seconds",
    source="dataSeconds",
)

RECOVERY = MetricRow(
    "ddpjob_train_live_recovery_seconds",
    "histogram",
    "With restart.scope Live: time from the last step of a group of ranks to the first of the next one, after a rank "
    "was `lost`, has `left` after a step, or has `joined`. The histogram continues from its previous values "
    "when another pod takes node rank 0.",
    (*LABELS, "kind"),
    "seconds",
    source="recoverySeconds",
    bounds=RECOVERY_BUCKETS,
)

DROPPED = MetricRow(
    "ddpjob_train_steps_dropped_total",
    "counter",
    "With restart.scope Live: steps that were begun, put back and taken again, because a rank was lost. At most one "
    "for each recovery.",
    source="droppedSteps",
)

LIVE = (RECOVERY, DROPPED)
"""Only of jobs that recover live."""

RUN = (WORLD_SIZE, *PROGRESS, METRIC, *SNAPSHOT, *COUNTERS, *COUNTERS_BY_LABEL, *HISTOGRAMS, DATA_WAIT, *LIVE)
"""Values of the whole run. Only the pod with node rank 0 exports them, so that each run is counted once."""

TABLE = {row.name: row for row in (*POD, *CONTAINER, *GPU, *RUN)}
