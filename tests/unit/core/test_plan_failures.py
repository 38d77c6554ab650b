"""What the decision makes of a failure, one look at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    NOW,
    ended,
    failed,
    in_phase,
    later,
    make_job,
    make_pod,
    make_report,
    seen,
)
from looks import GANG, RUNNING, SNAPSHOT, STARTING, condition, created, deleted, kinds, look

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreateService, PointService
from ddpjob_operator.core.values.observed import PodView


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
    ledger = {"goodput": decided.status.goodput, "internal": decided.status.internal}
    assert early.status.model_copy(update=ledger) == decided.status, "but for where its time goes"
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


def fenced(uid: str, newer: int) -> PodView:
    message = f"attempt 0 (uid uid-1) is fenced: attempt {newer} (uid {uid}) owns /mnt/shared/checkpoints/digits"
    return make_pod(0, "Failed", termination=ended(77, make_report("Fenced", message=message)))


def test_a_status_that_is_older_than_the_volume_goes_on_after_the_attempt_that_the_volume_knows() -> None:
    after = look(make_job(RUNNING), seen(fenced("uid-1", 3), make_pod(1))).status
    assert (after.phase, after.attempt, after.restarts, after.disruptions) == (Phase.RESTARTING, 4, 0, 1)
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.last_failure.attempt) == ("StatusRestored", 0)


def test_an_attempt_that_another_job_has_fenced_fails_the_job() -> None:
    assert look(make_job(RUNNING), seen(fenced("uid-2", 3), make_pod(1))).status.phase is Phase.FAILED


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
    assert "all 3 restarts are used" in failure.message
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


@pytest.mark.parametrize("ago", [90.0, 10.0, -600.0], ids=["behind", "right", "ahead"])
def test_a_job_without_a_restart_waits_for_the_cause_of_a_lost_peer_whatever_the_clock_of_its_node(ago: float) -> None:
    """The node of the pod that still runs may be gone, which Kubernetes says after up to a minute."""
    survivor = replace(failed(0, 1, "PeerLost", ago=ago), end_seen=later(-10))
    job, pods = make_job(RUNNING, restart={"maxRestarts": 0}), seen(survivor, make_pod(1))
    waiting = look(job, pods)
    assert (waiting.status.phase, waiting.requeue_after) == (Phase.RUNNING, pytest.approx(50))
    assert look(job, pods, 51).status.phase is Phase.FAILED


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


def test_the_deadline_of_a_pod_leaves_the_others_as_the_policy_says() -> None:
    """A job that has begun may have one, and a rule that knows the kubelet's name for it."""
    rules = [{"reasons": ["DeadlineExceeded"], "action": "Fail"}]
    job = make_job(RUNNING, cleanPodPolicy="None", restart={"rules": rules})
    decided = look(job, seen(failed(0, 143, "Preempted", reason="DeadlineExceeded"), make_pod(1)))
    assert condition(decided.status, cond.FAILED) == ("True", "PodDeadlineExceeded")
    assert deleted(decided) == []
    assert decided.status.last_failure is not None
    assert "remove it from podTemplate" in decided.status.last_failure.advice


def test_a_pod_that_is_deleted_before_it_began_costs_no_restart_although_its_node_is_slow() -> None:
    """As one that waits for a volume. Its name is free once the kubelet has confirmed that it is gone."""
    waits = make_pod(0, "Pending", scheduled=True, began=False, deleting=True, gone_by=later(-4))
    starting = in_phase(Phase.STARTING, attempt_start_time=NOW)
    after = look(make_job(starting, restart={"maxRestarts": 0}), seen(waits, make_pod(1))).status
    assert (after.phase, after.attempt, after.restarts, after.disruptions) == (Phase.RESTARTING, 1, 0, 1)
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.last_failure.pod_name) == ("Disrupted", "digits-0-0")


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
    assert after.restarts_since_progress == 3, "these attempts have used up the budget, by all that is known"
    failing = seen(failed(0, 137, attempt=3), make_pod(1, attempt=3), attempt=3)
    assert look(make_job(restart={"maxRestarts": 3}), failing).status.phase is Phase.FAILED
    assert look(make_job(restart={"maxRestarts": 4}), failing).status.phase is Phase.RESTARTING
    assert decided.actions == ()
    assert look(make_job(after), seen(*pods, attempt=3)).status.phase is Phase.RUNNING


def test_a_running_gang_does_not_need_the_service_to_be_known() -> None:
    """A list says that it exists, and not where it points."""
    assert look(make_job(RUNNING), seen(*GANG, attempt=None, service_exists=True)).actions == ()


def test_a_gang_that_starts_has_the_service_looked_at_even_if_every_pod_is_there() -> None:
    status = in_phase(Phase.RESTARTING, attempt=1, attempt_start_time=NOW)
    pods = (make_pod(0, "Pending", attempt=1), make_pod(1, "Pending", attempt=1))
    assert kinds(look(make_job(status), seen(*pods, attempt=None))) == [CreateService]
    assert kinds(look(make_job(status), seen(*pods, attempt=0))) == [PointService]
    assert kinds(look(make_job(status), seen(*pods, attempt=1))) == []
