"""Suspension, and when a gang has done its work. What happens to a job that is over is in test_cleanup.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    DEFAULTS,
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
from looks import at, condition, look
from world import World

from ddpjob_operator.api.status import (
    DDPJobStatus,
    FailureStatus,
    Goodput,
    Internal,
    Phase,
    SnapshotStatus,
    UnresolvedSteps,
)
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.finished import has_finished
from ddpjob_operator.core.stages.suspend import is_suspending
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import (
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeletePod,
    Plan,
    ReleasePod,
)
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, PodView
from ddpjob_operator.wire.jobs import is_left_to_another

GANG = (make_pod(0), make_pod(1))
SNAPSHOT = SnapshotStatus(step=100, time=NOW, verified=True)


def names(decided: Plan, kind: type[CreatePod] | type[DeletePod]) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, kind)]


def suspending(phase: Phase = Phase.RUNNING) -> DDPJobStatus:
    """The status of a job whose pods are just being deleted."""
    return look(make_job(in_phase(phase, snapshot=SNAPSHOT), suspend=True), seen(*GANG)).status


def suspended(ago: float = 60.0, **fields: object) -> DDPJobStatus:
    """The status of a job that has been suspended for `ago` seconds."""
    job = make_job(in_phase(Phase.RUNNING, snapshot=SNAPSHOT, **fields), suspend=True)
    return plan(job, seen(), later(-ago), DEFAULTS).status


# Suspending


def test_how_far_the_pods_were_at_their_end_stays_on_record_when_they_are_gone() -> None:
    """The last live report, which is older, is there as long as the operator runs."""
    report = heard(step=90, snapshot={"step": 80, "time": NOW.timestamp(), "verified": True})
    saved = make_report("Preempted", step=105)
    pods = [make_pod(0, "Failed", deleting=True, termination=ended(143, saved)), failed(1, 143, deleting=True)]
    ended_at = look(make_job(suspending(), suspend=True), seen(*pods, report=report)).status
    after = look(make_job(ended_at, suspend=True), seen(report=report)).status
    assert after.phase is Phase.SUSPENDED
    assert [status.progress and status.progress.step for status in (ended_at, after)] == [105, 105]
    assert look(make_job(after, suspend=True), seen(report=report)).status == after


def test_a_suspension_keeps_what_is_known_of_steps_that_the_attempt_before_may_have_lost() -> None:
    """The attempt that it interrupts has not said yet where it resumes."""
    trained = UnresolvedSteps(first=0, last=300, training=900.0)
    ledger = Goodput(activity="recovering", training=900.0, last_update_time=NOW)
    status = in_phase(Phase.RESTARTING, attempt=1, snapshot=SNAPSHOT, unresolved_steps=trained, goodput=ledger)
    decided = look(make_job(status, suspend=True), seen(make_pod(0, attempt=1), make_pod(1, attempt=1), attempt=1))
    assert is_suspending(decided.status)
    assert decided.status.internal.unresolved_steps == trained


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.RESTARTING])
@pytest.mark.parametrize("pod", [make_pod(0), make_pod(0, "Pending")], ids=["runs", "waits"])
def test_a_suspension_is_on_record_before_any_pod_is_told_to_stop(phase: Phase, pod: PodView) -> None:
    decided = look(make_job(in_phase(phase), suspend=True), seen(pod, make_pod(1)))
    assert decided.status_first
    assert condition(decided.status, cond.SUSPENDED) == ("False", "Suspending")
    assert decided.status.phase is phase
    assert [event.reason for event in decided.events] == ["Suspending"]


def test_pods_are_stopped_with_the_grace_that_a_snapshot_takes() -> None:
    decided = look(make_job(in_phase(Phase.RUNNING), suspend=True), seen(*GANG))
    assert [(action.name, action.grace_seconds) for action in decided.actions if isinstance(action, DeletePod)] == [
        ("digits-0-0", None),
        ("digits-0-1", None),
    ]


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([make_pod(0, deleting=True, gone_by=later(60)), make_pod(1)], id="one pod still to be deleted"),
        pytest.param([failed(0, 143, "Preempted"), failed(1, 143, "Preempted")], id="both saved and ended"),
        pytest.param([failed(0, 143, "Left"), failed(1, 143, "Left")], id="both ended before they could save"),
        pytest.param([failed(0, 137), make_pod(1)], id="one was killed meanwhile"),
        pytest.param([failed(0, 1, "PeerLost", ago=0), failed(1, 1, "WorkerException")], id="both failed meanwhile"),
        pytest.param([failed(0, 64, "UserError")], id="an error of the user meanwhile"),
        pytest.param([], id="all are gone"),
    ],
)
@pytest.mark.parametrize("suspend", [True, False], ids=["suspended", "taken back"])
def test_nothing_that_happens_to_a_pod_that_stops_is_a_failure(pods: list[PodView], suspend: bool) -> None:
    after = look(make_job(suspending(), suspend=suspend), seen(*pods)).status
    assert (after.restarts, after.restarts_since_progress, after.disruptions) == (0, 0, 0)
    assert after.last_failure is None
    assert after.phase is not Phase.FAILED


def test_a_pod_that_had_ended_is_removed_too() -> None:
    decided = look(make_job(suspending(), suspend=True), seen(failed(0, 143, "Preempted"), make_pod(1)))
    assert names(decided, DeletePod) == ["digits-0-0", "digits-0-1"]


def test_pods_of_older_attempts_and_spares_stop_too() -> None:
    spare = replace(make_pod(0, attempt=1), name="digits-1-s0", node_rank=None)
    status = in_phase(Phase.RUNNING, attempt=1)
    decided = look(make_job(status, suspend=True), seen(make_pod(0), make_pod(0, attempt=1), spare, attempt=1))
    assert names(decided, DeletePod) == ["digits-0-0", "digits-1-0", "digits-1-s0"]


def test_the_pod_that_fetches_data_stops_too_and_is_waited_for() -> None:
    fetching = InitializerView("digits-init", "uid", PodPhase.RUNNING)
    status = DDPJobStatus(phase=Phase.PENDING, start_time=NOW)
    decided = look(make_job(status, suspend=True), seen(initializer=fetching))
    assert [action for action in decided.actions if isinstance(action, DeletePod)] == [
        DeletePod("digits-init", "uid", None)
    ]
    assert decided.status.phase is Phase.PENDING
    fetched = InitializerView("digits-init", "uid", PodPhase.SUCCEEDED)
    decided = look(make_job(status, suspend=True), seen(initializer=fetched))
    assert (decided.actions, decided.status.phase) == ((), Phase.SUSPENDED)


def test_a_job_that_was_suspended_while_it_fetched_data_fetches_it_when_it_is_resumed() -> None:
    data = {"initializers": [{"name": "data", "source": "https://example.com/x", "path": "datasets/x"}]}
    fetching = InitializerView("digits-init-0", "uid", PodPhase.RUNNING)
    pending = make_job(DDPJobStatus(phase=Phase.PENDING, start_time=NOW), suspend=True, **data)
    reported = look(pending, seen(initializer=fetching)).status
    gone = look(make_job(reported, suspend=True, **data), seen()).status
    decided = look(make_job(gone, **data), seen())
    assert (gone.phase, decided.status.phase, decided.status.attempt) == (Phase.SUSPENDED, Phase.PENDING, 0)
    assert names(decided, CreatePod) == []
    assert [action.manifest["kind"] for action in decided.actions if isinstance(action, CreateChild)] == ["Pod"]
    assert decided.status.initializer_failures == 0


def test_a_pod_that_fetches_data_on_a_node_that_is_gone_does_not_hold_the_suspension_for_ever() -> None:
    stuck = InitializerView("digits-init", "uid", PodPhase.RUNNING, deleting=True, gone_by=later(2))
    job = make_job(DDPJobStatus(phase=Phase.PENDING, start_time=NOW), suspend=True)
    waiting = look(job, seen(initializer=stuck), 4.9)
    assert (waiting.status.phase, waiting.requeue_after) == (Phase.PENDING, pytest.approx(0.1))
    assert look(job, seen(initializer=stuck), 5).status.phase is Phase.SUSPENDED


def test_the_snapshot_that_the_first_node_saved_is_known() -> None:
    message = make_report("Preempted", step=123, snapshot={"step": 123, "time": NOW.timestamp(), "verified": True})
    first = make_pod(0, "Failed", termination=ended(143, message), deleting=True, gone_by=later(60))
    decided = look(make_job(suspending(), suspend=True), seen(first, make_pod(1)))
    assert decided.status_first, "the pod is about to vanish, and with it what it said"
    assert decided.status.snapshot is not None
    assert decided.status.snapshot.step == 123


def saved(node_rank: int, step: int) -> PodView:
    """A pod that has left with a snapshot."""
    message = make_report("Preempted", snapshot={"step": step, "time": NOW.timestamp(), "verified": True})
    return make_pod(node_rank, "Failed", termination=ended(143, message), deleting=True, gone_by=later(60))


@pytest.mark.parametrize(
    ("pods", "step"),
    [
        ((make_pod(0, "Failed", exited=True, deleting=True), saved(1, 195)), 195),
        ((make_pod(0, "Failed", termination=ended(137, "")), saved(1, 195)), 195),
        ((saved(0, 140), saved(1, 195)), 195),
        ((saved(0, 195), saved(1, 140)), 195),
        ((saved(0, 90), make_pod(1)), 100),
    ],
    ids=["the kubelet lost its end", "its message", "it left before the save", "the other one did", "an older one"],
)
def test_what_any_pod_says_of_the_snapshot_that_it_left_with_is_known(pods: tuple[PodView, ...], step: int) -> None:
    decided = look(make_job(suspending(), suspend=True), seen(*pods))
    assert decided.status.snapshot is not None
    assert decided.status.snapshot.step == step


def test_a_pod_that_ends_while_nobody_looks_stays_until_what_it_said_is_on_record() -> None:
    """A watch that is made anew shows no pod that has come and gone."""
    world = World.start(nodes=2)
    world.settle()
    world.cluster.suspend(True)
    world.look()
    for name in ("digits-0-0", "digits-0-1"):
        world.cluster.end(name, 143, "Preempted")
        world.cluster.reap(name)
    world.restart()
    world.settle()
    assert (world.status.phase, world.cluster.pods) == (Phase.SUSPENDED, {})
    assert world.status.progress is not None
    assert world.status.progress.step == 10


HELD = {"held": True, "deleting": True}


@pytest.mark.parametrize(
    ("pods", "released"),
    [
        ((make_pod(0, **HELD), failed(1, 143, "Preempted", **HELD)), ["digits-0-1"]),
        ((failed(0, 143, "Preempted", **HELD), make_pod(1, "Pending", **HELD)), ["digits-0-0", "digits-0-1"]),
        ((make_pod(0, **HELD), make_pod(1, held=True)), []),
    ],
    ids=["one has ended", "one never began", "both run"],
)
def test_a_pod_that_stops_is_released_once_it_has_ended(pods: tuple[PodView, ...], released: list[str]) -> None:
    decided = look(make_job(suspending(), suspend=True), seen(*pods))
    assert [action.name for action in decided.actions if isinstance(action, ReleasePod)] == released
    assert not any(action.release for action in decided.actions if isinstance(action, DeletePod))


def test_a_pod_that_has_ended_tells_its_snapshot_although_its_grace_was_cut_by_the_kubelet() -> None:
    """Its last deletion, with a grace of 0, moves the deletionTimestamp back to when it was asked to stop."""
    message = make_report("Preempted", snapshot={"step": 200, "time": NOW.timestamp(), "verified": True})
    first = make_pod(0, "Failed", termination=ended(143, message), deleting=True, gone_by=later(-10))
    decided = look(make_job(suspending(), suspend=True), seen(first))
    assert decided.status.phase is Phase.SUSPENDED
    assert decided.status.snapshot is not None
    assert decided.status.snapshot.step == 200
    assert "from the snapshot of step 200" in decided.events[0].message
    assert "did not confirm" not in decided.events[0].message


def test_what_the_first_node_said_is_recorded_while_the_others_still_stop() -> None:
    """Its pod is released in this pass, and gone in the next one."""
    message = make_report("Preempted", snapshot={"step": 200, "time": NOW.timestamp(), "verified": True})
    first = make_pod(0, "Failed", termination=ended(143, message), deleting=True, gone_by=later(-10))
    second = make_pod(1, deleting=True, gone_by=later(20))
    decided = look(make_job(suspending(), suspend=True), seen(first, second))
    assert decided.status_first
    assert decided.status.snapshot is not None
    assert decided.status.snapshot.step == 200


def test_a_suspension_in_progress_costs_no_further_write_and_no_call() -> None:
    going = tuple(make_pod(rank, deleting=True, gone_by=later(60)) for rank in (0, 1))
    decided = look(make_job(suspending(), suspend=True), seen(*going))
    assert (decided.status, decided.actions, decided.events) == (suspending(), (), ())


DENIED = Problem("AdmissionDenied", "the API server rejected a change of digits-0-0: denied by a policy")


@pytest.mark.parametrize("status", [in_phase(Phase.RUNNING), suspended()], ids=["stopping", "suspended"])
def test_a_deletion_that_the_api_server_refuses_is_reported_until_it_does_not(status: DDPJobStatus) -> None:
    decided = look(make_job(status, suspend=True), seen(*GANG, problem=DENIED))
    assert condition(decided.status, cond.DEGRADED) == ("True", "AdmissionDenied")
    assert "Degraded" in [event.reason for event in decided.events]
    assert names(decided, DeletePod) == ["digits-0-0", "digits-0-1"]
    assert condition(look(make_job(decided.status, suspend=True), seen()).status, cond.DEGRADED) == (
        "False",
        "AsExpected",
    )


# Suspended


@pytest.mark.parametrize("phase", [None, Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING])
def test_a_job_without_pods_is_suspended_at_once(phase: Phase | None) -> None:
    status = in_phase(phase) if phase else DDPJobStatus()
    decided = look(make_job(status, suspend=True), seen())
    assert decided.status.phase is Phase.SUSPENDED
    assert condition(decided.status, cond.SUSPENDED) == ("True", "Suspended")
    assert decided.status.start_time is not None
    assert decided.actions == ()


def test_a_job_that_is_created_suspended_gets_nothing_at_all() -> None:
    decided = look(make_job(suspend=True), seen(attempt=None, pvc_exists=False))
    assert (decided.actions, decided.status.phase) == ((), Phase.SUSPENDED)
    assert look(make_job(decided.status, suspend=True), seen(attempt=None, pvc_exists=False)) == Plan(decided.status)


def test_a_suspended_job_says_what_it_will_resume_from() -> None:
    found = cond.find(suspended().conditions, cond.SUSPENDED)
    assert found is not None
    assert "resume from the snapshot of step 100" in found.message


def test_a_suspended_job_neither_runs_nor_restarts_nor_is_degraded() -> None:
    trouble = in_phase(
        Phase.RESTARTING,
        restart_at=later(30),
        conditions=tuple(
            condition
            for type_ in (cond.RUNNING, cond.RESTARTING, cond.DEGRADED, cond.SCHEDULED)
            for condition in cond.set_condition((), cond.Update(type_, True, "X", ""), NOW, 1)
        ),
    )
    after = look(make_job(trouble, suspend=True), seen()).status
    assert after.restart_at is None
    for type_ in (cond.RUNNING, cond.RESTARTING, cond.DEGRADED, cond.SCHEDULED):
        assert not cond.holds(after.conditions, type_), type_


def test_a_pod_whose_node_never_confirms_its_end_does_not_hold_the_suspension_for_ever() -> None:
    stuck = make_pod(1, deleting=True, gone_by=later(60))
    waiting = look(make_job(suspending(), suspend=True), seen(stuck), 62.9)
    assert waiting.status.phase is Phase.RUNNING
    assert waiting.requeue_after == pytest.approx(0.1)
    after = look(make_job(suspending(), suspend=True), seen(stuck), 63).status
    assert after.phase is Phase.SUSPENDED
    found = cond.find(after.conditions, cond.SUSPENDED)
    assert found is not None
    assert "digits-0-1 on node-1" in found.message


def test_a_pod_that_shows_up_during_a_suspension_is_stopped() -> None:
    status = suspended()
    decided = look(make_job(status, suspend=True), seen(make_pod(0)))
    assert (names(decided, DeletePod), decided.status) == (["digits-0-0"], status)


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_that_is_over_is_not_suspended(phase: Phase) -> None:
    status = in_phase(phase, completion_time=NOW)
    assert look(make_job(status, suspend=True), seen()).status == status


def test_a_gang_that_finishes_while_it_is_asked_to_stop_has_succeeded() -> None:
    assert look(make_job(suspending(), suspend=True), seen(succeeded(0), succeeded(1))).status.phase is Phase.SUCCEEDED


# Resuming


def test_a_resumed_job_begins_a_new_attempt_that_costs_no_budget() -> None:
    failure = FailureStatus(attempt=0, time=NOW, reason="WorkerKilled", message="", step=100)
    status = suspended(restarts=2, restarts_since_progress=1, disruptions=3, last_failure=failure)
    decided = look(make_job(status), seen())
    after = decided.status
    assert (after.phase, after.attempt) == (Phase.RESTARTING, 1)
    assert (after.restarts, after.restarts_since_progress, after.disruptions) == (2, 1, 3)
    assert decided.status_first
    assert names(decided, CreatePod) == ["digits-1-0", "digits-1-1"]
    assert condition(after, cond.SUSPENDED) == ("False", "Resumed")
    assert condition(after, cond.RESTARTING) == ("True", "Resumed")
    assert [event.reason for event in decided.events] == ["Resumed"]


def test_a_job_that_was_created_suspended_starts_as_any_other() -> None:
    status = plan(make_job(suspend=True), seen(attempt=None, pvc_exists=False), later(-60), DEFAULTS).status
    first = look(make_job(status), seen(attempt=None, pvc_exists=False))
    assert [type(action) for action in first.actions] == [CreateService, CreatePVC]
    decided = look(make_job(status), seen())
    assert (decided.status.phase, decided.status.attempt) == (Phase.STARTING, 0)
    assert decided.status_first
    assert names(decided, CreatePod) == ["digits-0-0", "digits-0-1"]


def test_a_job_that_is_made_larger_before_it_ever_ran_starts_with_the_new_size() -> None:
    status = look(make_job(suspend=True), seen()).status
    assert look(make_job(status, nodes=3), seen()).status.nodes.total == 3


def test_a_suspension_that_is_taken_back_is_carried_through_first() -> None:
    going = make_pod(0, deleting=True, gone_by=later(60))
    waiting = look(make_job(suspending()), seen(going, make_pod(1)))
    assert names(waiting, CreatePod) == []
    assert names(waiting, DeletePod) == ["digits-0-1"]
    decided = look(make_job(suspending()), seen())
    assert (decided.status.phase, decided.status.attempt) == (Phase.RESTARTING, 1)
    assert not is_suspending(decided.status)


def test_an_operator_that_crashed_while_it_suspended_a_job_carries_it_through() -> None:
    half_told = (make_pod(0, deleting=True, gone_by=later(60)), make_pod(1))
    assert names(look(make_job(suspending(), suspend=True), seen(*half_told, attempt=None)), DeletePod) == [
        "digits-0-1"
    ]


def test_a_status_that_was_lost_is_suspended_and_resumed_with_an_attempt_of_its_own() -> None:
    pods = (make_pod(0, attempt=3), make_pod(1, attempt=3))
    lost = look(make_job(suspend=True), seen(*pods, attempt=3)).status
    gone = look(make_job(lost, suspend=True), seen(attempt=3)).status
    assert (gone.phase, gone.attempt) == (Phase.SUSPENDED, 3)
    assert look(make_job(gone), seen(attempt=3)).status.attempt == 4


def test_a_job_that_another_version_suspended_resumes_with_an_attempt_of_its_own() -> None:
    """Of its record, which was elsewhere, only what the trainer had reported is left."""
    pruned = suspended().model_copy(update={"internal": Internal()})
    after = look(make_job(pruned), seen()).status
    assert (after.phase, after.attempt) == (Phase.RESTARTING, 1)


@pytest.mark.parametrize(("seconds", "counted"), [(0, 60.0), (40, 100.0), (-3600, 0.0)])
def test_the_time_of_a_suspension_is_added_up_when_it_ends(seconds: float, counted: float) -> None:
    after = look(make_job(suspended(60)), seen(), seconds).status
    assert after.suspended_seconds == counted


def test_the_time_of_several_suspensions_adds_up() -> None:
    status = suspended(60, suspended_seconds=12.5)
    assert look(make_job(status), seen()).status.suspended_seconds == 72.5


# Whose job it is


@pytest.mark.parametrize(
    ("spec", "another"),
    [
        ({}, False),
        ({"managedBy": "training.ddpjob.io/operator"}, False),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        ({"managedBy": "kueue.x-k8s.io/multikueue", "nodes": "not a number"}, True),
        (None, False),
    ],
)
def test_a_job_is_left_alone_if_it_names_another_controller(spec: object, another: bool) -> None:
    assert is_left_to_another({"metadata": {"name": "digits"}, "spec": spec}) is another


# Success


@pytest.mark.parametrize(
    ("policy", "pods", "finished"),
    [
        pytest.param("AllNodes", [succeeded(0), succeeded(1)], True, id="all nodes, all done"),
        pytest.param("AllNodes", [succeeded(0), make_pod(1)], False, id="all nodes, one still trains"),
        pytest.param("AllNodes", [succeeded(0)], False, id="all nodes, one is gone"),
        pytest.param("FirstNode", [succeeded(0), make_pod(1)], True, id="first node, which is done"),
        pytest.param("FirstNode", [succeeded(0)], True, id="first node, the other is gone"),
        pytest.param("FirstNode", [succeeded(0), failed(1, 1, "PeerLost")], True, id="first node, the other lost it"),
        pytest.param("FirstNode", [make_pod(0), succeeded(1)], False, id="first node, which still trains"),
        pytest.param("FirstNode", [succeeded(1)], False, id="first node, which is gone"),
        pytest.param("FirstNode", [], False, id="first node, no pods"),
        pytest.param("AllNodes", [], False, id="all nodes, no pods"),
    ],
)
def test_when_a_gang_has_done_its_work(policy: str, pods: list[PodView], finished: bool) -> None:
    job = make_job(in_phase(Phase.RUNNING), successPolicy=policy)
    assert has_finished(at(job, seen(*pods))) is finished
    assert (look(job, seen(*pods)).status.phase is Phase.SUCCEEDED) is finished


def test_a_failure_before_the_first_node_is_done_restarts_the_gang_under_either_policy() -> None:
    job = make_job(in_phase(Phase.RUNNING), successPolicy="FirstNode")
    assert look(job, seen(make_pod(0), failed(1, 137))).status.restarts == 1
