"""The decision itself, one look at a time. Whole jobs are in test_world.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from builders import (
    NOW,
    ended,
    failed,
    heard,
    in_phase,
    later,
    make_job,
    make_pod,
    make_report,
    seen,
    succeeded,
)
from looks import GANG, RUNNING, STARTING, condition, created, deleted, kinds, look
from tests.support.calls import Calls

from ddpjob_operator.api.status import Condition, DDPJobStatus, FailureStatus, NodeCount, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values import trainer_report
from ddpjob_operator.core.values.actions import CreatePVC, CreateService, Plan, creates
from ddpjob_operator.core.values.job import Job, Problem
from ddpjob_operator.core.values.observed import Observed

# The start


def test_the_service_and_the_claim_come_before_any_pod() -> None:
    decided = look(make_job(), seen(attempt=None, pvc_exists=False))
    assert kinds(decided) == [CreateService, CreatePVC]
    assert decided.status == DDPJobStatus(), "nothing to write yet"


def test_a_claim_that_could_not_be_made_beside_the_service_is_tried_again() -> None:
    assert kinds(look(make_job(), seen(pvc_exists=False))) == [CreatePVC]


def test_a_claim_of_the_users_own_is_never_created() -> None:
    job = make_job(shared={"claimName": "mine"})
    assert kinds(look(job, seen(attempt=None, pvc_exists=False))) == [CreateService]
    assert created(look(job, seen(pvc_exists=False))) == ["digits-0-0", "digits-0-1"]


def test_the_spec_is_on_record_before_the_first_pod_is_made_from_it() -> None:
    decided = look(make_job(), seen())
    assert decided.status_first
    assert decided.status.phase is Phase.STARTING
    assert decided.status.internal.spec_digests
    assert decided.status.nodes == NodeCount(ready=0, total=2)
    assert created(decided) == ["digits-0-0", "digits-0-1"]


CODE = {"configMaps": ["code-3f2a"], "sha256": "3f2a" * 16}


def test_each_attempt_has_the_digest_of_its_code_on_record_and_the_first_in_its_event() -> None:
    first = look(make_job(code=CODE), seen())
    assert first.status.code_digest == CODE["sha256"]
    assert [event.message for event in first.events] == ["creating 2 nodes with code 3f2a3f2a3f2a"]
    without = look(make_job(), seen())
    assert without.status.code_digest is None
    assert [event.message for event in without.events] == ["creating 2 nodes"]
    # of a job that an older operator has started, nothing is written until its next attempt
    running = in_phase(Phase.RUNNING, spec={"code": CODE})
    assert look(make_job(running, code=CODE), seen(make_pod(0), make_pod(1))).status.code_digest is None
    restarted = look(make_job(running, code=CODE), seen(make_pod(0), failed(1, 1, "WorkerException")))
    assert (restarted.status.attempt, restarted.status.code_digest) == (1, CODE["sha256"])


def test_a_refused_service_leaves_the_job_pending_and_says_why() -> None:
    decided = look(make_job(), seen(attempt=None, problem=Problem("NameTaken", "Service digits-rdzv exists")))
    assert decided.status.observed_generation == 1
    assert decided.status.phase is Phase.PENDING
    assert condition(decided.status, cond.DEGRADED) == ("True", "NameTaken")
    assert CreateService in kinds(decided)


@pytest.mark.parametrize(
    ("job", "observed"),
    [
        (make_job(), seen(attempt=None, pvc_exists=False)),
        (make_job(), seen()),
        (make_job(STARTING), seen(make_pod(0))),
        (make_job(RUNNING), seen(make_pod(0))),
        (make_job(RUNNING, elastic={"minNodes": 1}), seen(make_pod(0), failed(1, 0, "WorkerException"))),
    ],
    ids=["new", "without pods", "incomplete", "running", "failed"],
)
def test_nothing_is_created_for_a_job_in_a_namespace_that_is_deleted(job: Job, observed: Observed) -> None:
    refused = Problem("NamespaceTerminating", "the API server rejected Pod digits-0-1: it is being terminated")
    decided = look(job, replace(observed, problem=refused))
    assert not [action for action in decided.actions if creates(action)]


@pytest.mark.parametrize(
    ("pods", "phase", "ready"),
    [
        pytest.param([make_pod(0)], Phase.STARTING, 1, id="one of two pods does not make a gang"),
        pytest.param([make_pod(0), make_pod(1, "Pending")], Phase.STARTING, 1, id="a pod that waits is not ready"),
        pytest.param([make_pod(0), make_pod(1)], Phase.RUNNING, 2, id="all pods make a gang"),
        pytest.param([make_pod(0), succeeded(1)], Phase.RUNNING, 2, id="a node may be done before another starts"),
        pytest.param([succeeded(0), succeeded(1)], Phase.SUCCEEDED, 2, id="a short job is never seen running"),
    ],
)
def test_the_phase_follows_from_the_pods(pods: list[object], phase: Phase, ready: int) -> None:
    after = look(make_job(STARTING), seen(*pods)).status  # type: ignore[arg-type]
    assert (after.phase, after.nodes.ready, after.nodes.total) == (phase, ready, 2)


def test_a_pod_that_vanished_before_the_gang_ran_is_made_again() -> None:
    decided = look(make_job(STARTING), seen(make_pod(0)))
    assert created(decided) == ["digits-0-1"]
    assert decided.status.restarts == 0


# The end


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([succeeded(0)], id="the others' pods are gone"),
        pytest.param([succeeded(0), make_pod(1)], id="another node still trains"),
    ],
)
def test_one_node_that_is_done_does_not_end_the_job(pods: list[object]) -> None:
    assert look(make_job(STARTING), seen(*pods)).status.phase is not Phase.SUCCEEDED  # type: ignore[arg-type]


def test_a_job_ends_when_every_node_is_done_and_keeps_the_last_words_of_node_rank_0() -> None:
    after = look(make_job(RUNNING), seen(succeeded(0), succeeded(1))).status
    assert (after.phase, after.completion_time) == (Phase.SUCCEEDED, NOW)
    assert condition(after, cond.COMPLETE) == ("True", "Completed")
    assert after.progress is not None
    assert (after.progress.step, after.progress.metrics) == (400, {"eval_accuracy": 0.97})


def test_a_sidecar_that_does_not_end_does_not_keep_the_job_from_ending() -> None:
    pods = (make_pod(0, "Running", termination=ended(0)), make_pod(1, "Failed", termination=ended(0)))
    after = look(make_job(RUNNING), seen(*pods)).status
    assert after.phase is Phase.SUCCEEDED
    assert deleted(look(make_job(after), seen(*pods))) == ["digits-0-0"], "what still runs is stopped"


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([], id="no pods"),
        pytest.param([failed(0, 1, "WorkerException"), failed(1, 64, "UserError")], id="failed pods"),
        pytest.param([make_pod(0, attempt=7)], id="a pod of a later attempt"),
    ],
)
def test_a_final_status_never_changes(phase: Phase, pods: list[object]) -> None:
    status = in_phase(phase, completion_time=NOW)
    decided = look(make_job(status), seen(*pods, report=heard(step=9)), 60)  # type: ignore[arg-type]
    assert decided.status == status
    assert created(decided) == []


def test_pods_that_ended_are_kept_for_their_logs_when_a_job_failed() -> None:
    pods = (failed(0, 1, "WorkerException"), make_pod(1))
    assert deleted(look(make_job(in_phase(Phase.FAILED)), seen(*pods))) == ["digits-0-1"]


@pytest.mark.parametrize("phase", [None, *Phase])
def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector(phase: Phase | None) -> None:
    status = in_phase(phase) if phase else DDPJobStatus()
    for pods in ((), GANG, (failed(0, 1, "WorkerException"),), (make_pod(0, attempt=3),)):
        assert look(make_job(status, deleting=True), seen(*pods)) == Plan(status)


# Rest


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        pytest.param(DDPJobStatus(), (), id="a job that begins"),
        pytest.param(STARTING, (make_pod(0, "Pending"), make_pod(1, "Pending")), id="a gang that waits"),
        pytest.param(
            STARTING, (make_pod(0, "Pending", reason="Unschedulable"), make_pod(1)), id="an unschedulable pod"
        ),
        pytest.param(RUNNING, GANG, id="a gang that runs"),
        pytest.param(RUNNING, (make_pod(0), make_pod(1, deleting=True, gone_by=later(9))), id="a pod that is stopping"),
        pytest.param(RUNNING, (make_pod(0), failed(1, 137)), id="a failure"),
        pytest.param(RUNNING, (make_pod(0), failed(1, 64)), id="a user error"),
        pytest.param(RUNNING, (succeeded(0), succeeded(1)), id="a success"),
    ],
)
def test_a_status_that_was_written_is_not_changed_by_the_next_look(
    status: DDPJobStatus, pods: tuple[object, ...]
) -> None:
    observed = seen(*pods, report=heard(step=5, time=NOW.timestamp(), etaSeconds=60.0))  # type: ignore[arg-type]
    for seconds in (0.0, 0.1):
        status = look(make_job(status), observed, seconds).status
    for seconds in (0.2, 0.3):
        written = DDPJobStatus.model_validate_json(status.model_dump_json(by_alias=True, exclude_none=True))
        assert look(make_job(written), observed, seconds).status == status


def test_the_condition_for_trouble_keeps_the_time_at_which_it_began() -> None:
    waiting = (make_pod(0, "Pending", reason="Unschedulable", message="0/2 nodes"), make_pod(1))
    first = look(make_job(STARTING), seen(*waiting)).status
    assert condition(first, cond.DEGRADED) == ("True", "Unschedulable")
    second = look(make_job(first), seen(*waiting), 60).status
    assert second == first
    after = look(make_job(second), seen(*GANG), 90).status
    assert condition(after, cond.DEGRADED) == ("False", "AsExpected")
    assert condition(after, cond.RUNNING) == ("True", "GangRunning")


def test_trouble_ends_with_the_attempt_that_had_it() -> None:
    waiting = make_pod(0, "Pending", reason="Unschedulable", message="0/2 nodes")
    troubled = look(make_job(STARTING), seen(waiting, make_pod(1))).status
    after = look(make_job(troubled), seen(waiting, failed(1, 137))).status
    assert after.phase is Phase.RESTARTING
    assert condition(after, cond.DEGRADED) == ("False", "AsExpected")
    going = replace(waiting, deleting=True), make_pod(1, deleting=True)
    assert look(make_job(after), seen(*going, attempt=1)).status == after, "and costs no further write"


def test_a_message_without_any_text_still_makes_an_event() -> None:
    pod = make_pod(1, "Failed", termination=ended(64, make_report("UserError", message="\n")))
    (event,) = look(make_job(RUNNING), seen(make_pod(0), pod)).events
    assert (event.type, event.reason) == ("Warning", "Failed")


@pytest.mark.parametrize("error", [OverflowError, ValueError])
def test_a_job_is_suspended_and_ended_even_if_its_ledger_fails(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("cannot convert float infinity to integer")

    monkeypatch.setattr("ddpjob_operator.core.plan.with_goodput", fail)
    suspended = look(make_job(RUNNING, suspend=True), seen(*GANG))
    assert deleted(suspended) == ["digits-0-0", "digits-0-1"]
    late = look(make_job(RUNNING, activeDeadlineSeconds=1), seen(*GANG))
    assert late.status.phase is Phase.FAILED


# What a look costs


def suspending(nodes: int) -> Callable[[], Plan]:
    condition = {"type": "Suspended", "status": "False", "reason": "Suspending", "lastTransitionTime": NOW}
    status = in_phase(Phase.RUNNING, nodes=nodes, conditions=(Condition.model_validate(condition),))
    pods = [make_pod(rank, deleting=True, held=True, gone_by=later(60)) for rank in range(nodes)]
    return partial(look, make_job(status, nodes=nodes, suspend=True), seen(*pods))


def restarting(nodes: int) -> Callable[[], Plan]:
    failure = FailureStatus(attempt=0, time=NOW, reason="PeerLost")
    status = in_phase(Phase.RESTARTING, nodes=nodes, attempt=1, last_failure=failure)
    old = [make_pod(rank, deleting=True, gone_by=later(60)) for rank in range(nodes)]
    new = [make_pod(rank, "Pending", attempt=1, scheduled=True) for rank in range(nodes)]
    return partial(look, make_job(status, nodes=nodes), seen(*old, *new, attempt=1))


def losing_peers(nodes: int) -> Callable[[], Plan]:
    lost = [failed(rank, 1, "PeerLost", ago=1) for rank in range(nodes // 2)]
    others = [make_pod(rank, ready=True) for rank in range(nodes // 2, nodes)]
    return partial(look, make_job(in_phase(Phase.RUNNING, nodes=nodes), nodes=nodes), seen(*lost, *others))


@pytest.mark.parametrize("of", [suspending, restarting, losing_peers])
def test_the_cost_of_a_look_grows_with_the_gang_and_no_faster(of: Callable[[int], Callable[[], Plan]]) -> None:
    """A gang of 1,024 must not hold up the leases and probes of all others."""

    def cost(nodes: int) -> int:
        run, calls = of(nodes), Calls()
        with calls.counted():
            run()
        return calls.count

    assert cost(512) <= 9 * cost(64)


def test_the_last_words_of_kept_pods_are_read_few_times_at_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is JSON of up to 4 KiB, and a look asks ten times and more of which attempt it is."""
    nodes, load, read = 64, trainer_report._load, list[str | bytes]()

    def noted(text: str | bytes) -> dict[str, Any] | None:
        read.append(text)
        return load(text)

    monkeypatch.setattr(trainer_report, "_load", noted)
    spec: dict[str, Any] = {"restart": {"scope": "InPlace"}}
    kept = {f"digits-0-{rank}": rank for rank in range(nodes)}
    status = in_phase(Phase.RUNNING, nodes=nodes, spec=spec, attempt=1, attempt_start_time=NOW, kept_pods=kept)
    said = [make_report("Completed", outcome="Succeeded", attempt=1, step=rank) for rank in range(nodes)]
    pods = [make_pod(rank, "Succeeded", termination=ended(0, said[rank])) for rank in range(1, nodes)]
    gang = [replace(pod, attempt=1) for pod in (make_pod(0, ready=True), *pods)]
    decided = look(make_job(status, nodes=nodes, **spec), seen(*gang, attempt=1))
    assert decided.status.phase is Phase.RUNNING
    assert len(read) <= 3 * nodes
