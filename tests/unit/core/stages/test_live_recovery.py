"""restart.scope Live, one look at a time: a lost pod is replaced in the attempt, where the others go on without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, ended, failed, in_phase, later, make_job, make_pod, make_report, seen, succeeded

from ddpjob_operator.api.status import DDPJobStatus, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import CreatePod, DeletePod, Plan
from ddpjob_operator.core.values.observed import PodView

SPEC: dict[str, Any] = {"nodes": 3, "restart": {"scope": "Live"}}


def running(**fields: Any) -> DDPJobStatus:
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    started_with = digests(make_job(**SPEC), DEFAULTS)
    return in_phase(Phase.RUNNING, nodes=3, **{"snapshot": snapshot, "spec_digests": started_with} | fields)


def look(status: DDPJobStatus, pods: list[PodView], seconds: float = 0.0, **spec: Any) -> Plan:
    return plan(make_job(status, **SPEC | spec), seen(*pods), later(seconds), DEFAULTS)


def done(decided: Plan) -> set[str]:
    words = {CreatePod: "create", DeletePod: "delete"}
    return {f"{words[type(action)]} {action.name}" for action in decided.actions}  # type: ignore[index,union-attr]


def new(node_rank: int, phase: str = "Running") -> PodView:
    """The pod that takes the place of a lost one: the same name, another uid."""
    return replace(make_pod(node_rank, phase), uid=f"new-{node_rank}")


@pytest.mark.parametrize("dead", [0, 2])
def test_a_lost_pod_is_replaced_within_the_attempt(dead: int) -> None:
    pods = [failed(rank, 1, "WorkerKilled") if rank == dead else make_pod(rank) for rank in range(3)]
    first = look(running(), pods)
    assert first.status_first
    assert (first.status.attempt, first.status.phase, first.status.restarts) == (0, Phase.RUNNING, 1)
    assert done(first) == {f"delete digits-0-{dead}"}

    without = [pod for pod in pods if pod.node_rank != dead]
    second = look(first.status, without)
    assert done(second) == {f"create digits-0-{dead}"}
    starting = look(second.status, [*without, new(dead, "Pending")])
    assert (done(starting), starting.status.phase, starting.status.nodes.ready) == (set(), Phase.RUNNING, 2)
    third = look(starting.status, [*without, new(dead)])
    assert (done(third), third.status.restarts, third.status.nodes.ready) == (set(), 1, 3)
    assert third.status.internal.lost_pods == {}


def test_a_deleted_pod_that_is_gone_is_replaced_as_well() -> None:
    first = look(running(), [make_pod(0), make_pod(2)])
    assert (first.status.attempt, first.status.internal.lost_pods) == (0, {"missing-1": 1})
    assert done(look(first.status, [make_pod(0), make_pod(2)])) == {"create digits-0-1"}


@pytest.mark.parametrize(
    ("given", "reason"), [({"disruption": "EvictionByEvictionAPI"}, "Drained"), ({}, "PodDeleted")]
)
def test_a_pod_that_leaves_when_it_is_asked_to_stop_is_replaced_once(given: dict[str, Any], reason: str) -> None:
    others = [make_pod(0), make_pod(2)]
    leaving = make_pod(1, deleting=True, gone_by=later(60), **given)
    asked = look(running(), [*others, leaving])
    assert done(asked) == set(), "it has time to leave"
    left = look(asked.status, [*others, failed(1, 143, "Left", deleting=True, **given)], seconds=1)
    gone = look(left.status, others, seconds=2)
    assert done(gone) == {"create digits-0-1"}
    there = look(gone.status, [*others, new(1)], seconds=3).status
    assert (there.attempt, there.live_recoveries, there.nodes.ready) == (0, 1, 3)
    assert there.last_failure is not None
    assert there.last_failure.reason == reason
    assert ((there.disruptions or 0), (there.restarts or 0)) == ((1, 0) if given else (0, 1))


def test_a_new_pod_that_does_not_reach_the_others_is_replaced_alone() -> None:
    first = look(running(), [make_pod(0), failed(1, 1, "WorkerKilled"), make_pod(2)])
    there = look(first.status, [make_pod(0), new(1), make_pod(2)], seconds=1)
    cut_off = replace(failed(1, 1, "WorkerException"), uid="new-1")
    again = look(there.status, [make_pod(0), cut_off, make_pod(2)], seconds=30)
    assert (again.status.attempt, again.status.restarts) == (0, 2)
    assert again.status.internal.lost_pods == {"new-1": 1}
    alone = look(there.status, [failed(0, 1, "WorkerException"), cut_off, failed(2, 1, "WorkerException")], seconds=30)
    assert alone.status.attempt == 1, "none is left with the state"


def test_a_job_does_not_fail_for_a_place_whose_pods_do_not_reach_the_others() -> None:
    """The same error before the first step, again and again; but the others train."""
    words = "rank 1 raised Unreached: this pod reaches none of the 2 ranks of view 0, such as 10.0.0.3: check whether …"
    said = make_report(message=words, seconds={"startup": 12.0}, time=later(20).timestamp())
    others, status = [make_pod(0), make_pod(2)], running()
    for time in range(4):
        cut_off = replace(make_pod(1, "Failed", termination=ended(1, said)), uid=f"new-{time}")
        status = look(status, [*others, cut_off], seconds=30 + time).status
        there = replace(make_pod(1), uid=f"new-{time + 1}")
        status = look(status, [*others, there], seconds=30 + time).status
    assert (status.phase, status.attempt, status.restarts) == (Phase.RUNNING, 0, 4)


def test_a_second_loss_before_the_replacement_runs_is_replaced_too() -> None:
    first = look(running(), [make_pod(0), failed(1, 1, "WorkerKilled"), make_pod(2)])
    second = look(first.status, [make_pod(0), new(1, "Pending"), failed(2, 1, "WorkerKilled")])
    assert (second.status.attempt, second.status.restarts) == (0, 2)
    assert sorted(second.status.internal.lost_pods.values()) == [1, 2]


def test_two_pods_lost_at_once_are_one_restart() -> None:
    decided = look(running(), [failed(0, 1, "WorkerKilled"), failed(1, 1, "WorkerKilled"), make_pod(2)])
    assert (decided.status.attempt, decided.status.restarts, decided.status.live_recoveries) == (0, 1, 1)
    assert sorted(decided.status.internal.lost_pods.values()) == [0, 1]


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        (
            [failed(0, 1, "WorkerKilled"), failed(1, 1, "PeerLost"), make_pod(2)],
            "the ranks of pod digits-0-1 did not go on (PeerLost)",
        ),
        ([failed(rank, 1, "WorkerKilled") for rank in range(3)], "no other pod of the gang runs"),
        ([failed(0, 143, "Preempted"), make_pod(1), make_pod(2)], "all ranks were asked to stop"),
        (
            [make_pod(0), failed(1, 143, "Preempted", disruption="EvictionByEvictionAPI", deleting=True), make_pod(2)],
            "all ranks were asked to stop",
        ),
        (
            [failed(0, 143, "Left", deleting=True), failed(1, 143, "Preempted", deleting=True), make_pod(2)],
            "all ranks were asked to stop",
        ),
        ([failed(0, 1, "LiveRecoveryFailed"), make_pod(1), make_pod(2)], "the ranks gave it up"),
    ],
)
def test_where_the_others_cannot_go_on_the_next_attempt_begins_in_place(pods: list[PodView], why: str) -> None:
    decided = look(running(), pods)
    assert (decided.status.attempt, decided.status.live_recoveries) == (1, None)
    assert set(decided.status.internal.kept_pods) == {pod.name for pod in pods if pod.running}
    (event,) = decided.events
    assert event.reason == "Restarting"
    assert f"no live recovery: {why}" in event.message
    restarting = next(one for one in decided.status.conditions if one.type == "Restarting")
    assert why in restarting.message


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
def test_other_scopes_know_nothing_of_it(scope: str) -> None:
    decided = look(running(), [failed(0, 1, "WorkerKilled"), make_pod(1), make_pod(2)], restart={"scope": scope})
    assert (decided.status.attempt, decided.status.internal.lost_pods) == (1, {})
    assert "live" not in decided.events[0].message


def test_fewer_than_min_nodes_are_left_to_wait_for_the_replacement() -> None:
    spec: dict[str, Any] = {"elastic": {"minNodes": 3}}
    status = running(spec_digests=digests(make_job(**SPEC | spec), DEFAULTS))
    decided = look(status, [failed(0, 1, "WorkerKilled"), make_pod(1), make_pod(2)], **spec)
    assert (decided.status.attempt, decided.status.internal.lost_pods) == (0, {"pod-0-0": 0})


def test_what_is_on_record_of_the_attempt_stays_when_a_pod_is_replaced() -> None:
    before = running(node_seconds={"training": 5.0}, gpu_seconds={"training": 1.0}, reported_seconds={"load": 2.0})
    after = look(before, [failed(0, 1, "WorkerKilled"), make_pod(1), make_pod(2)]).status.internal
    assert (after.gpu_seconds, after.reported_seconds) == ({"training": 1.0}, {"load": 2.0})
    assert after.node_seconds["training"] >= 5.0


def test_a_secret_in_the_message_of_a_lost_pod_is_masked() -> None:
    env = [{"name": "API_TOKEN", "value": "hunter2hunter2"}]
    status = running(spec_digests=digests(make_job(**SPEC | {"env": env}), DEFAULTS))
    pods = [failed(0, 1, "WorkerException", message="hunter2hunter2 refused"), make_pod(1), make_pod(2)]
    decided = look(status, pods, env=env)
    assert decided.status.attempt == 0
    assert decided.status.last_failure is not None
    assert "hunter2" not in decided.status.last_failure.message + decided.events[0].message


def test_an_error_of_the_user_ends_the_job() -> None:
    assert look(running(), [failed(0, 64, "UserError"), make_pod(1), make_pod(2)]).status.phase is Phase.FAILED


def test_losses_count_against_the_budget() -> None:
    spec = {"restart": {"scope": "Live", "maxRestarts": 1}}
    spent = running(restarts=1, restarts_since_progress=1, snapshot=None)
    decided = look(spent, [failed(0, 1, "WorkerKilled"), make_pod(1), make_pod(2)], **spec)
    assert decided.status.phase is Phase.FAILED


def test_the_job_succeeds_although_a_pod_was_replaced() -> None:
    first = look(running(), [make_pod(0), failed(1, 1, "WorkerKilled"), make_pod(2)])
    ended = [succeeded(0), replace(succeeded(1), uid="new-1"), succeeded(2)]
    assert look(first.status, ended).status.phase is Phase.SUCCEEDED


LOST = replace(make_pod(1), not_ready_since=later(-60))
"""A pod on a lost node, whose name is not free."""


@pytest.mark.parametrize("policy", ["AllNodes", "FirstNode"])
@pytest.mark.parametrize("place", [[LOST], [], [new(1, "Pending")]], ids=["its name is taken", "empty", "waits"])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_job_succeeds_once_all_that_are_left_are_done(policy: str, place: list[PodView], lost: int) -> None:
    status = running(lost_pods={f"pod-0-{lost}": lost})
    there = [replace(pod, name=f"digits-0-{lost}", uid=pod.uid[:-1] + f"{lost}", node_rank=lost) for pod in place]
    others = [succeeded(rank) for rank in range(3) if rank != lost]
    decided = look(status, [*others, *there], successPolicy=policy)
    assert decided.status.phase is Phase.SUCCEEDED
    first = policy == "FirstNode" and lost != 0
    who = "node rank 0" if first else "the 2 of 3 nodes that were left"
    assert [event.message for event in decided.events] == [f"{who} finished; restarts: 0"]


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([succeeded(0), make_pod(2)], id="another one trains on"),
        pytest.param([succeeded(0), new(1), succeeded(2)], id="the replacement runs, and ends by itself"),
        pytest.param([succeeded(0)], id="one that was not lost is not there"),
        pytest.param([make_pod(0), make_pod(2)], id="none is done"),
    ],
)
def test_a_lost_place_alone_is_no_success(pods: list[PodView]) -> None:
    assert look(running(lost_pods={"missing-1": 1}), pods).status.phase is not Phase.SUCCEEDED


def test_a_lost_pod_that_is_still_there_counts_once() -> None:
    pods = [make_pod(0), failed(1, 1, "WorkerKilled"), make_pod(2)]
    first = look(running(), pods)
    again = look(first.status, pods)
    assert (again.status.attempt, again.status.restarts) == (0, 1)
    assert done(again) == {"delete digits-0-1"}


def test_no_pod_is_created_while_the_lost_one_has_its_name() -> None:
    """That of a lost node may be Terminating for minutes."""
    first = look(running(), [make_pod(0), failed(1, 1, "WorkerKilled"), make_pod(2)])
    going = replace(failed(1, 1, "WorkerKilled"), deleting=True)
    assert done(look(first.status, [make_pod(0), going, make_pod(2)])) == set()


def test_a_job_has_come_as_far_as_the_ranks_that_went_on_where_node_rank_0_came_too_late_to_join() -> None:
    late = make_pod(0, "Succeeded", termination=ended(0, make_report("Completed", outcome="Succeeded")))
    decided = look(running(progress=Progress(step=28)), [late, succeeded(1), succeeded(2)])
    assert (decided.status.phase, decided.status.progress and decided.status.progress.step) == (Phase.SUCCEEDED, 400)


def test_a_job_has_come_as_far_as_the_ranks_that_went_on_where_the_last_one_was_left_behind() -> None:
    """Found to be stalled when the others had finished: no other pod runs, and another attempt begins."""
    behind = make_pod(1, "Failed", termination=ended(1, make_report("Stalled", step=29)))
    decided = look(running(progress=Progress(step=399)), [succeeded(0), behind, succeeded(2)])
    assert (decided.status.attempt, decided.status.progress and decided.status.progress.step) == (1, 400)
    assert decided.status.last_failure is not None
    assert decided.status.last_failure.step == 29
