"""The decision itself, one look at a time. Whole lives are in test_world.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    DEFAULTS,
    NOW,
    UID,
    ended,
    failed,
    in_phase,
    later,
    make_job,
    make_pod,
    make_report,
    seen,
    succeeded,
)

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase, SnapshotStatus
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.model import (
    CreateClaim,
    CreatePod,
    CreateService,
    DeletePod,
    Job,
    Observed,
    Plan,
    PointService,
    Problem,
)
from ddpjob_operator.core.plan import plan

RUNNING = in_phase(Phase.RUNNING)
STARTING = in_phase(Phase.STARTING)
GANG = (make_pod(0), make_pod(1))
SNAPSHOT = SnapshotStatus(step=100, time=NOW, verified=True)


def look(job: Job, observed: Observed, seconds: float = 0.0) -> Plan:
    return plan(job, observed, later(seconds), DEFAULTS)


def created(decided: Plan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, CreatePod)]


def deleted(decided: Plan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, DeletePod)]


def kinds(decided: Plan) -> list[type]:
    return [type(action) for action in decided.actions]


def condition(status: DDPJobStatus, type_: str) -> tuple[str, str] | None:
    found = cond.find(status.conditions, type_)
    return (found.status, found.reason) if found else None


# The start


def test_the_service_and_the_claim_come_before_any_pod() -> None:
    decided = look(make_job(), seen(attempt=None, claim_exists=False))
    assert kinds(decided) == [CreateService, CreateClaim]
    assert decided.status == DDPJobStatus(), "nothing to write yet"


def test_a_claim_that_could_not_be_made_beside_the_service_is_tried_again() -> None:
    assert kinds(look(make_job(), seen(claim_exists=False))) == [CreateClaim]


def test_a_claim_of_the_users_own_is_never_created() -> None:
    job = make_job(shared={"claimName": "mine"})
    assert kinds(look(job, seen(attempt=None, claim_exists=False))) == [CreateService]
    assert created(look(job, seen(claim_exists=False))) == ["digits-0-0", "digits-0-1"]


def test_the_spec_is_on_record_before_the_first_pod_is_made_from_it() -> None:
    decided = look(make_job(), seen())
    assert decided.status_first
    assert decided.status.phase is Phase.STARTING
    assert decided.status.spec_digests
    assert decided.status.nodes == NodeCount(ready=0, total=2, summary="0/2")
    assert created(decided) == ["digits-0-0", "digits-0-1"]


def test_a_refused_service_leaves_the_job_pending_and_says_why() -> None:
    decided = look(make_job(), seen(attempt=None, problem=Problem("NameTaken", "Service digits-rdzv exists")))
    assert decided.status.phase is Phase.PENDING
    assert condition(decided.status, cond.DEGRADED) == ("True", "NameTaken")
    assert CreateService in kinds(decided)


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
    assert (after.phase, after.nodes.summary) == (phase, f"{ready}/2")


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
    decided = look(make_job(status), seen(*pods, report={"uid": UID, "attempt": 0, "step": 9}), 60)  # type: ignore[arg-type]
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


# Failures


def test_a_failure_begins_a_new_attempt_that_is_written_first() -> None:
    pods = (make_pod(0), failed(1, 137))
    decided = look(make_job(RUNNING.model_copy(update={"snapshot": SNAPSHOT})), seen(*pods))
    after = decided.status
    assert decided.status_first
    assert (after.phase, after.attempt, after.restarts) == (Phase.RESTARTING, 1, 1)
    assert condition(after, cond.RESTARTING) == ("True", "WorkerKilled")
    assert after.last_failure is not None
    assert (after.last_failure.attempt, after.last_failure.pod_name) == (0, "digits-0-1")
    assert deleted(decided) == ["digits-0-0", "digits-0-1"]
    assert created(decided) == ["digits-1-0", "digits-1-1"]
    assert [action.attempt for action in decided.actions if isinstance(action, PointService)] == [1]


def test_a_restart_after_no_progress_waits_and_creates_nothing_before_its_time() -> None:
    decided = look(make_job(RUNNING), seen(make_pod(0), failed(1, 137)))
    wait = decided.requeue_after
    assert wait == pytest.approx(1.0, rel=0.2)
    assert (created(decided), decided.status.restart_at) == ([], later(wait))
    waiting = make_job(decided.status)
    early, due = look(waiting, seen(), 0.4), look(waiting, seen(), wait)
    assert (early.actions, early.requeue_after) == ((), pytest.approx(wait - 0.4))
    assert early.status == decided.status
    assert created(due) == ["digits-1-0", "digits-1-1"]


def test_an_operator_that_was_started_meanwhile_keeps_to_the_wait() -> None:
    status = in_phase(Phase.RESTARTING, attempt=1, restarts=1, restart_at=later(30))
    assert look(make_job(status), seen(attempt=None)).actions == ()
    assert kinds(look(make_job(status), seen(attempt=None), 30)) == [CreateService]


def test_a_clock_that_is_set_back_does_not_stretch_a_wait_beyond_its_maximum() -> None:
    job = make_job(in_phase(Phase.RESTARTING, attempt=1, restart_at=later(5)), restart={"backoff": {"maxSeconds": 300}})
    assert created(look(job, seen(), -3600)) == ["digits-1-0", "digits-1-1"]


def test_a_pod_of_the_old_attempt_that_is_stuck_terminating_blocks_nothing() -> None:
    stuck = make_pod(0, deleting=True, gone_by=later(3600))
    decided = look(make_job(in_phase(Phase.RESTARTING, attempt=1)), seen(stuck))
    assert created(decided) == ["digits-1-0", "digits-1-1"]
    assert deleted(decided) == []
    pods = (stuck, make_pod(0, attempt=1), make_pod(1, attempt=1))
    assert look(make_job(in_phase(Phase.RESTARTING, attempt=1)), seen(*pods, attempt=1)).status.phase is Phase.RUNNING


def test_what_is_left_of_older_attempts_is_removed_even_if_it_ended() -> None:
    pods = (failed(0, 1), make_pod(0, attempt=1), make_pod(1, attempt=1))
    assert deleted(look(make_job(in_phase(Phase.RUNNING, attempt=1)), seen(*pods, attempt=1))) == ["digits-0-0"]


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        pytest.param(failed(1, 64, "ImportError"), "ImportError", id="exit 64 fails the job within one attempt"),
        pytest.param(failed(1, 77, "Fenced"), "Fenced", id="exit 77 of the current attempt fails the job"),
    ],
)
def test_what_cannot_be_retried_fails_the_job(pod: object, reason: str) -> None:
    decided = look(make_job(STARTING), seen(make_pod(0), pod))  # type: ignore[arg-type]
    after = decided.status
    assert (after.phase, after.attempt, after.restarts) == (Phase.FAILED, 0, 0)
    assert condition(after, cond.FAILED) == ("True", reason)
    assert after.last_failure is not None
    assert after.last_failure.message
    assert after.last_failure.advice
    assert after.completion_time == NOW
    assert deleted(decided) == ["digits-0-0"]
    assert decided.status_first


def test_exit_77_of_an_old_attempt_is_what_fencing_is_for() -> None:
    old = failed(0, 77, "Fenced")
    decided = look(
        make_job(in_phase(Phase.RUNNING, attempt=1)), seen(old, make_pod(0, attempt=1), make_pod(1, attempt=1))
    )
    assert decided.status.phase is Phase.RUNNING


def test_a_budget_that_is_used_up_fails_the_job_and_names_the_last_failure() -> None:
    used = {"restarts": 3, "restarts_since_progress": 3, "attempt": 3}
    job = make_job(RUNNING.model_copy(update=used), restart={"maxRestarts": 3})
    after = look(job, seen(make_pod(0, attempt=3), replace(failed(1, 137), attempt=3), attempt=3)).status
    assert (after.phase, after.restarts) == (Phase.FAILED, 3)
    failure = cond.find(after.conditions, cond.FAILED)
    assert failure is not None
    assert failure.reason == "BackoffLimitExceeded"
    assert "all 3 restarts are used up" in failure.message
    assert "killed by signal 9" in failure.message


def test_several_pods_that_fail_together_are_one_restart() -> None:
    after = look(make_job(RUNNING), seen(failed(0, 137), failed(1, 1, "WorkerException"))).status
    assert (after.attempt, after.restarts) == (1, 1)


def test_a_lost_peer_is_not_acted_on_before_its_cause_had_time_to_show() -> None:
    waiting = look(make_job(RUNNING), seen(failed(0, 1, "PeerLost", ago=1), make_pod(1)))
    assert (waiting.actions, waiting.status.phase) == ((), Phase.RUNNING)
    assert waiting.requeue_after is not None
    after = look(
        make_job(RUNNING), seen(failed(0, 1, "PeerLost", ago=1), failed(1, 1, "WorkerException", ago=0))
    ).status
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.last_failure.node_rank) == ("WorkerException", 1)


def test_a_pod_that_is_deleted_with_grace_is_waited_for_and_then_blamed_once() -> None:
    going = make_pod(1, deleting=True, gone_by=later(60))
    peers = (failed(0, 143, "Preempted", ago=20), going)
    waiting = look(make_job(RUNNING), seen(*peers))
    assert (waiting.actions, waiting.status.attempt) == ((), 0)
    saved = failed(1, 143, "Preempted", ago=0, deleting=True, gone_by=later(60))
    after = look(make_job(RUNNING), seen(peers[0], saved)).status
    assert after.last_failure is not None
    assert (after.restarts, after.last_failure.reason, after.last_failure.pod_name) == (1, "PodDeleted", "digits-0-1")


def test_a_pod_that_never_ends_its_grace_is_given_up_three_seconds_later() -> None:
    going = make_pod(1, deleting=True, gone_by=later(60))
    assert look(make_job(RUNNING), seen(make_pod(0), going), 62.9).status.attempt == 0
    assert look(make_job(RUNNING), seen(make_pod(0), going), 63).status.attempt == 1


def test_a_pod_that_was_deleted_by_force_is_missed_at_once() -> None:
    after = look(make_job(RUNNING), seen(make_pod(0))).status
    assert after.last_failure is not None
    assert (after.restarts, after.last_failure.reason, after.last_failure.pod_name) == (1, "PodDeleted", "digits-0-1")


# What is seen only in part


def test_a_status_that_was_lost_learns_its_attempt_from_the_pods_and_keeps_the_budget_spent() -> None:
    pods = (make_pod(0, attempt=3), make_pod(1, attempt=3))
    decided = look(make_job(), seen(*pods, attempt=3))
    after = decided.status
    assert (after.attempt, after.restarts, after.phase) == (3, 3, Phase.STARTING)
    assert decided.actions == ()
    assert look(make_job(after), seen(*pods, attempt=3)).status.phase is Phase.RUNNING


def test_a_running_gang_does_not_need_the_service_to_be_known() -> None:
    assert look(make_job(RUNNING), seen(*GANG, attempt=None)).actions == ()


def test_a_gang_that_starts_has_the_service_looked_at_even_if_every_pod_is_there() -> None:
    status = in_phase(Phase.RESTARTING, attempt=1, attempt_time=NOW)
    pods = (make_pod(0, "Pending", attempt=1), make_pod(1, "Pending", attempt=1))
    assert kinds(look(make_job(status), seen(*pods, attempt=None))) == [CreateService]
    assert kinds(look(make_job(status), seen(*pods, attempt=0))) == [PointService]
    assert kinds(look(make_job(status), seen(*pods, attempt=1))) == []


# Edits


def edited(status: DDPJobStatus, **spec: object) -> Job:
    return make_job(status, generation=2, **spec)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
@pytest.mark.parametrize("pods", [(), (make_pod(0, "Pending"),)], ids=["no pod is there", "one pod is there"])
def test_an_incomplete_gang_is_not_completed_from_another_spec(phase: Phase, pods: tuple[object, ...]) -> None:
    decided = look(edited(in_phase(phase), nodes=3), seen(*pods))  # type: ignore[arg-type]
    after = decided.status
    assert (after.attempt, after.restarts, after.nodes.total) == (1, 0, 3)
    assert decided.status_first
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert deleted(decided) == (["digits-0-0"] if pods else [])


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING])
def test_a_complete_gang_goes_on_as_it_was_started(phase: Phase, nodes: int) -> None:
    decided = look(edited(in_phase(phase), nodes=nodes), seen(*GANG))
    assert decided.actions == ()
    assert decided.status.phase is Phase.RUNNING
    assert decided.status.nodes.summary == "2/2"
    assert condition(decided.status, cond.DEGRADED) == ("True", "SpecChanged")


def test_the_next_attempt_uses_the_new_spec_throughout() -> None:
    decided = look(
        edited(RUNNING.model_copy(update={"snapshot": SNAPSHOT}), nodes=3), seen(make_pod(0), failed(1, 137))
    )
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert condition(decided.status, cond.DEGRADED) is None
    assert look(edited(decided.status, nodes=3), seen(attempt=1)).status.phase is Phase.RESTARTING


def test_an_edit_that_is_taken_back_leaves_nothing_behind() -> None:
    degraded = look(edited(RUNNING, args=["--x"]), seen(*GANG)).status
    after = look(make_job(degraded, generation=3), seen(*GANG)).status
    assert condition(after, cond.DEGRADED) == ("False", "AsExpected")
    assert after.observed_generation == 3


def test_what_may_change_while_running_disturbs_nothing() -> None:
    job = edited(RUNNING, restart={"maxRestarts": 99}, snapshots={"every": "5steps"})
    decided = look(job, seen(*GANG))
    assert decided.actions == ()
    assert decided.status.conditions == ()
    assert decided.status.observed_generation == 2


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
    report = {"version": 1, "uid": UID, "attempt": 0, "step": 5, "time": NOW.timestamp(), "etaSeconds": 60.0}
    observed = seen(*pods, report=report)  # type: ignore[arg-type]
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
    assert look(make_job(after), seen(attempt=1)).status == after, "and costs no further write"


def test_a_message_without_any_text_still_makes_an_event() -> None:
    pod = make_pod(1, "Failed", termination=ended(64, make_report("UserError", message="\n")))
    (event,) = look(make_job(RUNNING), seen(make_pod(0), pod)).events
    assert (event.type, event.reason) == ("Warning", "Failed")
