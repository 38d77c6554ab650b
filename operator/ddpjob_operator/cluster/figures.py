"""What `/metrics` shows of a job: its status and its spec in figures, and what a write of its status counts."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator import metrics
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.ledger.goodput import seconds_of
from ddpjob_operator.core.ledger.usage import until_deleted, usage_between, with_usage
from ddpjob_operator.core.ledger.waits import waits_between
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import SHOWN_DIGEST, Job
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.metric_table import DELETED
from ddpjob_operator.metrics import JobFigures


def figures(key: Key, job: Job | None, status: DDPJobStatus, default_image: str) -> JobFigures:
    """The figures of a job with this status. Without `job`, its spec could not be read."""
    progress, snapshot, goodput = status.progress, status.snapshot, status.goodput
    nodes = status.nodes.total or (job.spec.nodes if job else 0)
    estimated = progress if status.phase is Phase.RUNNING else None
    return JobFigures(
        namespace=key.namespace,
        name=key.name,
        phase=status.phase or Phase.PENDING,
        attempt=status.attempt,
        restarts=status.restarts + (status.internal.refunded_restarts or 0),
        live_recoveries=status.live_recoveries or 0,
        nodes_ready=status.nodes.ready,
        nodes=nodes,
        step=progress.step if progress else None,
        total_steps=progress.total_steps if progress else None,
        loss=progress.loss if progress else None,
        samples_per_second=estimated.samples_per_second if estimated else None,
        snapshot_step=snapshot.step if snapshot else None,
        snapshot_time=snapshot.time if snapshot else None,
        created=job.created if job else None,
        started=status.start_time,
        completed=status.completion_time,
        eta=estimated.eta if estimated else None,
        gpus=nodes * job.spec.accelerators_per_node if job else 0,
        image=(job.spec.image or default_image) if job else "",
        claim=(job.spec.shared.claim_name or pvc_name(job.name)) if job else "",
        code=(job.code_digest or "")[:SHOWN_DIGEST] if job else "",
        queue=_queue(job.spec) if job else "",
        owner=job.owner if job else "",
        conditions={
            each.type: each.reason
            for each in status.conditions
            if each.type in cond.ATTENTION and each.status == "True"
        },
        disruptions=status.disruptions,
        goodput=goodput.ratio if goodput else None,
        recomputed_steps=goodput.recomputed_steps if goodput else None,
        seconds=seconds_of(goodput) if goodput else {},
    )


def count(namespace: str, job: Job | None, before: DDPJobStatus, after: DDPJobStatus) -> None:
    """Add what a write of the status has recorded to the counters that outlive the job."""
    cause = metrics.bounded(after.last_failure.reason if after.last_failure else "Unknown")
    if after.restarts > before.restarts:
        metrics.RESTARTS.labels(namespace, cause).inc(after.restarts - before.restarts)
    if recovered := (after.live_recoveries or 0) - (before.live_recoveries or 0):
        metrics.LIVE_RECOVERIES.labels(namespace, cause).inc(max(0, recovered))
    if after.phase is Phase.FAILED and before.phase is not Phase.FAILED:
        metrics.FAILED_JOBS.labels(namespace, cause).inc()
    waits = waits_between(before, after)
    for histogram, waited in (
        (metrics.QUEUE_SECONDS, waits.queue),
        (metrics.FIRST_STEP_WAIT, waits.first_step),
        (metrics.RECOVERY_SECONDS, waits.recovery),
    ):
        if waited is not None:
            histogram.observe(waited)
    _count_held(namespace, before, after, job.spec.accelerators_per_node if job else 0)
    if after.is_final and not before.is_final:
        _count_ended(namespace, after, str(after.phase))


def count_deleted(namespace: str, status: DDPJobStatus, gpus_per_node: int, now: datetime) -> None:
    """Add a job that was deleted before its end, with the last status that it had."""
    last = until_deleted(status, now)
    _count_held(namespace, status, last, gpus_per_node)
    _count_ended(namespace, with_usage(status, last, gpus_per_node), DELETED)


def _count_held(namespace: str, before: DDPJobStatus, after: DDPJobStatus, gpus_per_node: int) -> None:
    usage = usage_between(before, after)
    for counted, lost, number in (
        (metrics.HELD_NODE_SECONDS, metrics.LOST_NODE_SECONDS, usage.nodes),
        (metrics.HELD_GPU_SECONDS, metrics.LOST_GPU_SECONDS, usage.nodes * gpus_per_node),
    ):
        if number:
            for activity, seconds in usage.seconds.items():
                counted.labels(namespace, activity).inc(number * seconds)
            lost.labels(namespace).inc(number * usage.lost)


def _count_ended(namespace: str, status: DDPJobStatus, outcome: str) -> None:
    account = status.internal
    for counted, spent in ((metrics.NODE_SECONDS, account.node_seconds), (metrics.GPU_SECONDS, account.gpu_seconds)):
        for activity, seconds in spent.items():
            counted.labels(namespace, activity, outcome).inc(seconds)


def _queue(spec: DDPJobSpec) -> str:
    return (spec.scheduling.queue if spec.scheduling else None) or ""
