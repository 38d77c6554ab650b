"""What /metrics shows of a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from ddpjob_operator import metrics
from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Internal, NodeCount, Phase
from ddpjob_operator.cluster.figures import count, count_deleted, figures
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.failure.budget import refunded, spent
from ddpjob_operator.core.ledger.goodput import ACTIVITIES
from ddpjob_operator.core.ledger.notification import end_event
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.job import Bounds, Defaults
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.core.values.observed import Observed
from ddpjob_operator.metrics import JobFigures
from ddpjob_operator.wire.jobs import kept, parse_job

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = Key("team", "digits")
METADATA = {"name": "digits", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T12:00:00Z"}


def of(spec: dict[str, Any], status: dict[str, Any]) -> JobFigures:
    job = parse_job({"metadata": METADATA, "spec": spec, "status": status})
    return figures(KEY, job, job.status, "trainer:default")


def test_a_new_job_shows_what_it_asks_for() -> None:
    found = of({"nodes": 2, "resources": {"limits": {"nvidia.com/gpu": 8}}}, {})
    assert (found.phase, found.nodes, found.gpus, found.image, found.queue) == (
        Phase.PENDING, 2, 16, "trainer:default", "",
    )  # fmt: skip
    assert (found.created, found.started, found.completed, found.eta) == (NOON, None, None, None)


def test_a_restart_that_is_refunded_stays_counted_by_each_process() -> None:
    """A counter that goes back from 6 to 5 has begun anew, for Prometheus: `increase` has 5 more restarts."""
    status, policy = DDPJobStatus(restarts=6), Restart()
    shown = [figures(KEY, None, status, "").restarts]
    for change in (refunded, lambda known: spent(policy, known, NOON), refunded):
        status = change(status)
        shown.append(figures(KEY, None, status, "").restarts)
    assert shown == [6, 6, 7, 7]


def later(seconds: int) -> str:
    return (NOON + timedelta(seconds=seconds)).isoformat()


def test_each_figure_is_that_of_the_status() -> None:
    """No two numbers alike."""
    seconds = {activity: float(number) for number, activity in enumerate(ACTIVITIES, start=20)}
    conditions = [{"type": "Degraded", "status": "True", "reason": "FewerNodes", "lastTransitionTime": later(0)}]
    status = {
        "phase": "Running",
        "attempt": 4,
        "restarts": 6,
        "liveRecoveries": 8,
        "disruptions": 3,
        "nodes": {"ready": 1, "total": 2},
        "progress": {"step": 7, "totalSteps": 10, "loss": 0.5, "samplesPerSecond": 9.5, "eta": later(5)},
        "snapshot": {"step": 5, "time": later(3)},
        "startTime": later(1),
        "completionTime": later(4),
        "goodput": {
            **{to_camel(name): spent for name, spent in seconds.items()}, "ratio": 0.8, "recomputedSteps": 12,
        },
        "conditions": conditions,
    }  # fmt: skip
    assert of({"nodes": 3, "resources": {"limits": {"nvidia.com/gpu": 8}}}, status) == JobFigures(
        "team",
        "digits",
        Phase.RUNNING,
        attempt=4,
        restarts=6,
        nodes_ready=1,
        nodes=2,
        step=7,
        total_steps=10,
        loss=0.5,
        samples_per_second=9.5,
        snapshot_step=5,
        snapshot_time=NOON + timedelta(seconds=3),
        created=NOON,
        started=NOON + timedelta(seconds=1),
        completed=NOON + timedelta(seconds=4),
        eta=NOON + timedelta(seconds=5),
        gpus=16,
        image="trainer:default",
        claim="digits-shared",
        conditions={"Degraded": "FewerNodes"},
        disruptions=3,
        live_recoveries=8,
        goodput=0.8,
        recomputed_steps=12,
        seconds=seconds,
    )


def test_a_smaller_gang_of_an_elastic_job_has_fewer_gpus() -> None:
    spec = {"nodes": 4, "elastic": {"minNodes": 1}, "resources": {"limits": {"amd.com/gpu": 2}}}
    assert of(spec, {"phase": "Running", "nodes": {"ready": 3, "total": 3}}).gpus == 6


def test_gpus_of_the_template_are_shown_as_well() -> None:
    trainer = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    template = {"podTemplate": {"spec": {"containers": [trainer]}}, "procsPerNode": 8}
    assert of({"nodes": 2} | template, {}).gpus == 16


def test_code_is_named_by_the_start_of_its_digest() -> None:
    code = {"configMaps": ["digits-code"], "sha256": "0123456789abcdef" * 4}
    assert of({"nodes": 1, "code": code}, {}).code == "0123456789ab"
    assert of({"nodes": 1}, {}).code == ""


def test_image_and_queue_are_those_of_the_spec() -> None:
    found = of({"nodes": 1, "image": "mine:2", "scheduling": {"gang": "Kueue", "queue": "research"}}, {})
    assert (found.image, found.queue) == ("mine:2", "research")


@pytest.mark.parametrize(
    ("name", "shared", "claim"),
    [
        ("digits", {}, "digits-shared"),
        ("digits", {"claimName": "datasets"}, "datasets"),
        ("resnet50.v2", {"size": "1Ti"}, pvc_name("resnet50.v2")),
        ("x" * 60, {}, pvc_name("x" * 60)),
    ],
)
def test_the_claim_is_called_as_the_operator_calls_it(name: str, shared: dict[str, Any], claim: str) -> None:
    job = parse_job({"metadata": METADATA | {"name": name}, "spec": {"nodes": 1, "shared": shared}})
    assert figures(Key("team", name), job, job.status, "").claim == claim


@pytest.mark.parametrize(
    ("annotation", "shown"), [("ada@example.org", "ada@example.org"), (" vision\n", "vision"), ("x" * 100, "x" * 64)]
)
def test_the_owner_is_a_bounded_annotation_that_the_cache_keeps(annotation: str, shown: str) -> None:
    annotations = {"training.ddpjob.io/owner": annotation, "large": "y" * 100_000}
    remembered = kept({"metadata": METADATA | {"annotations": annotations}, "spec": {"nodes": 1}})
    assert remembered["metadata"]["annotations"] == {"training.ddpjob.io/owner": shown}
    job = parse_job(remembered)
    assert figures(KEY, job, job.status, "").owner == shown


@pytest.mark.parametrize("annotations", [None, {}, {"training.ddpjob.io/owner": 3}, ["x"]])
def test_a_job_without_an_owner_has_an_empty_one(annotations: Any) -> None:
    assert parse_job({"metadata": METADATA | {"annotations": annotations}, "spec": {"nodes": 1}}).owner == ""


@pytest.mark.parametrize(("phase", "shown"), [("Running", NOON), ("Restarting", None), ("Succeeded", None)])
def test_an_end_is_expected_only_of_a_job_that_runs(phase: str, shown: datetime | None) -> None:
    assert of({"nodes": 1}, {"phase": phase, "progress": {"step": 3, "eta": "2026-01-01T12:00:00Z"}}).eta == shown


@pytest.mark.parametrize(
    ("phase", "shown"), [("Running", 9.5), ("Restarting", None), ("Suspended", None), ("Succeeded", None)]
)
def test_a_job_that_does_not_run_has_no_part_in_the_throughput_of_all(phase: str, shown: float | None) -> None:
    found = of({"nodes": 1}, {"phase": phase, "progress": {"step": 3, "samplesPerSecond": 9.5}})
    assert found.samples_per_second == shown


def test_only_conditions_that_need_attention_are_shown_and_only_while_they_are_true() -> None:
    def condition(name: str, status: str) -> dict[str, Any]:
        return {"type": name, "status": status, "reason": "Because", "lastTransitionTime": "2026-01-01T12:00:00Z"}

    conditions = [condition("Degraded", "True"), condition("Running", "True"), condition("SnapshotsFailing", "False")]
    assert of({"nodes": 1}, {"conditions": conditions}).conditions == {"Degraded": "Because"}


def test_a_job_whose_spec_cannot_be_read_shows_its_status() -> None:
    found = figures(KEY, None, DDPJobStatus(phase=Phase.FAILED, restarts=2), "trainer:default")
    assert (found.phase, found.restarts, found.nodes, found.gpus, found.image) == (Phase.FAILED, 2, 0, 0, "")


def counted(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, {"namespace": "counted", **labels}) or 0.0


def test_what_a_write_adds_to_the_ledger_is_counted_for_each_node_and_each_gpu() -> None:
    job = parse_job({"metadata": METADATA, "spec": {"nodes": 2, "resources": {"limits": {"nvidia.com/gpu": 4}}}})
    statuses = [
        DDPJobStatus(nodes=NodeCount(total=2), goodput=Goodput(**seconds))
        for seconds in (
            {"queued": 100.0},
            {"queued": 100.0, "training": 60.0, "saving": 1.5},
            {"queued": 100.0, "training": 40.0, "saving": 1.5, "recovering": 25.0},  # 20 lost, 5 until it ran again
        )
    ]
    for before, after in pairwise([DDPJobStatus(), *statuses]):
        count("counted", job, before, after)
    of_nodes = {cause: counted("ddpjob_held_node_seconds_total", cause=cause) for cause in ACTIVITIES}
    assert {cause: seconds for cause, seconds in of_nodes.items() if seconds} == {
        "training": 120.0, "saving": 3.0, "recovering": 10.0,
    }  # fmt: skip
    assert counted("ddpjob_lost_node_seconds_total") == 40.0
    assert counted("ddpjob_held_gpu_seconds_total", cause="training") == 60.0 * 8
    assert counted("ddpjob_lost_gpu_seconds_total") == 20.0 * 8


def of_outcome(unit: str, namespace: str, outcome: str) -> dict[str, float]:
    found = {
        cause: counted(f"ddpjob_{unit}_seconds_total", namespace=namespace, cause=cause, outcome=outcome)
        for cause in ACTIVITIES
    }
    return {cause: seconds for cause, seconds in found.items() if seconds}


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_is_counted_with_its_outcome_once_when_it_ends(phase: Phase) -> None:
    namespace = f"ends-{phase}".lower()
    account = Internal(node_seconds={"training": 60.0, "recovering": 9.0}, gpu_seconds={"training": 240.0})
    running, ended = DDPJobStatus(phase=Phase.RUNNING, internal=account), DDPJobStatus(phase=phase, internal=account)
    count(namespace, None, DDPJobStatus(), running)
    assert of_outcome("node", namespace, phase) == {}
    count(namespace, None, running, ended)
    count(namespace, None, ended, ended)
    assert of_outcome("node", namespace, phase) == {"training": 60.0, "recovering": 9.0}
    assert of_outcome("gpu", namespace, phase) == {"training": 240.0}


FAILED_BEFORE = {
    "phase": "Restarting",
    "attempt": 1,
    "restarts": 1,
    "nodes": {"ready": 0, "total": 2},
    "internal": {"specDigests": {"nodes": "of another size"}},
    "lastFailure": {
        "attempt": 0,
        "time": "2026-01-01T12:00:00Z",
        "reason": "OOMKilled",
        "message": "pod digits-0-1 was killed by the kernel's OOM killer",
        "advice": "Raise resources.limits.memory.",
    },
}


@pytest.mark.parametrize(("when", "status"), [("new", {}), ("restarted", FAILED_BEFORE)])
def test_a_job_beyond_a_bound_is_counted_and_notified_for_that_end(when: str, status: dict[str, Any]) -> None:
    namespace = f"beyond-{when}"
    metadata = METADATA | {"namespace": namespace}
    job = parse_job({"metadata": metadata, "spec": {"nodes": 3}, "status": status})
    defaults = Defaults(trainer_image="trainer:default", bounds=Bounds(max_nodes=2))
    refused = plan(job, Observed(), NOON, defaults).status
    assert refused.phase is Phase.FAILED
    count(namespace, job, job.status, refused)
    found = {
        reason: counted("ddpjob_operator_failed_jobs_total", namespace=namespace, reason=reason)
        for reason in ("BeyondBounds", "OOMKilled", "Unknown")
    }
    assert found == {"BeyondBounds": 1.0, "OOMKilled": 0.0, "Unknown": 0.0}
    data = end_event(metadata, job, refused)["data"]
    assert data["reason"] == "BeyondBounds"
    assert data["advice"].startswith("Lower the value that the message names")
    assert refused.last_failure is not None
    assert refused.last_failure.message == data["message"]


def test_a_job_that_was_deleted_while_it_ran_is_counted_until_then() -> None:
    status = DDPJobStatus(
        phase=Phase.RUNNING,
        nodes=NodeCount(total=2),
        goodput=Goodput(queued=50.0, training=30.0, activity="training", last_update_time=NOON),
        internal=Internal(node_seconds={"training": 60.0}, gpu_seconds={"training": 240.0}),
    )
    count_deleted("deleted", status, 4, NOON + timedelta(seconds=5))
    assert of_outcome("node", "deleted", "Deleted") == {"training": 70.0}
    assert of_outcome("gpu", "deleted", "Deleted") == {"training": 280.0}
    assert counted("ddpjob_held_gpu_seconds_total", namespace="deleted", cause="training") == 40.0


def test_live_recoveries_are_counted_by_reason_and_as_restarts() -> None:
    lost = FailureStatus(attempt=0, time=NOON, reason="WorkerKilled", message="killed")
    before = DDPJobStatus(phase=Phase.RUNNING, restarts=1, live_recoveries=1, last_failure=lost)
    after = before.model_copy(update={"restarts": 2, "live_recoveries": 2})
    count("lives", None, before, after)
    count("lives", None, after, after)
    assert counted("ddpjob_operator_live_recoveries_total", namespace="lives", reason="WorkerKilled") == 1.0
    assert counted("ddpjob_operator_restarts_total", namespace="lives", reason="WorkerKilled") == 1.0


WAITS = ("ddpjob_queue_seconds", "ddpjob_first_step_wait_seconds", "ddpjob_recovery_seconds")


def observed_waits() -> dict[str, tuple[float, float]]:
    """Observations of each kind so far, and their sum in seconds."""
    value = metrics.REGISTRY.get_sample_value
    return {name: (value(f"{name}_count") or 0.0, value(f"{name}_sum") or 0.0) for name in WAITS}


def test_each_wait_that_is_over_is_observed_as_what_it_was() -> None:
    """In one life: 40 s until the gang ran, 2 s more to its first step, and 25 s from a failure to the next one."""
    failure = FailureStatus(attempt=0, time=NOON + timedelta(seconds=60), reason="WorkerKilled", message="killed")
    trained = Internal(reported_seconds={"training": 3.0})

    def ledger(at: float, **seconds: float) -> Goodput:
        return Goodput(queued=40.0, last_update_time=NOON + timedelta(seconds=at), **seconds)

    running = DDPJobStatus(phase=Phase.RUNNING, goodput=ledger(40))
    first_step = running.model_copy(update={"goodput": ledger(45, first_step=2.0, training=3.0), "internal": trained})
    failed = DDPJobStatus(
        phase=Phase.RESTARTING,
        attempt=1,
        attempt_start_time=failure.time,
        last_failure=failure,
        goodput=ledger(60, first_step=2.0, training=18.0),
    )
    running_again = failed.model_copy(update={"phase": Phase.RUNNING})
    next_step = running_again.model_copy(
        update={"goodput": ledger(88, first_step=2.0, training=21.0, recovering=25.0), "internal": trained}
    )
    statuses = [DDPJobStatus(phase=Phase.STARTING), running, first_step, failed, running_again, next_step]
    seen = []
    for before, after in pairwise(statuses):
        earlier = observed_waits()
        count("waits", None, before, after)
        now = observed_waits()
        changed = {name: (now[name][0] - earlier[name][0], round(now[name][1] - earlier[name][1], 6)) for name in WAITS}
        seen.append({name: change for name, change in changed.items() if change != (0.0, 0.0)})
    assert seen == [
        {"ddpjob_queue_seconds": (1.0, 40.0)},
        {"ddpjob_first_step_wait_seconds": (1.0, 42.0)},
        {},
        {},
        {"ddpjob_recovery_seconds": (1.0, 25.0)},
    ]
