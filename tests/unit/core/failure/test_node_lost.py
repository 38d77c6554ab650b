"""A node that falls silent: when it counts as lost, what follows, and what is never done without being asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, heard, in_phase, later, make_job, make_pod, seen

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import DDPJobStatus, Phase, SnapshotStatus
from ddpjob_operator.core.failure.detect import SETTLE_SECONDS, Failure, Retry
from ddpjob_operator.core.failure.node_lost import (
    STRANDED_SECONDS,
    Patience,
    force_deletions,
    is_lost,
    lost_nodes,
    stranded,
    until_lost,
)
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.running import SILENT_LOOK_SECONDS
from ddpjob_operator.core.values.actions import CreatePod, DeletePod, Plan, ReleasePod
from ddpjob_operator.core.values.observed import Observed, PodView

POLICY = Restart(node_lost_seconds=30)


def silent(node_rank: int, since: float, **fields: Any) -> PodView:
    """A pod whose node fell silent so many seconds after NOW."""
    return make_pod(node_rank, not_ready_since=later(since), **fields)


@pytest.mark.parametrize(
    ("pod", "seconds", "lost", "left"),
    [
        pytest.param(make_pod(), 30, False, None, id="its node answers"),
        pytest.param(silent(0, -29), 30, False, 1.0, id="silent for a second too few"),
        pytest.param(silent(0, -30), 30, True, None, id="silent for long enough"),
        pytest.param(silent(0, 0), 0, True, None, id="no patience at all"),
        pytest.param(silent(0, 60), 30, False, 90.0, id="another clock is ahead"),
    ],
)
def test_a_node_is_lost_once_it_was_silent_for_the_time_that_the_policy_gives_it(
    pod: PodView, seconds: int, lost: bool, left: float | None
) -> None:
    assert is_lost(pod, Patience(seconds), NOW) is lost
    assert until_lost([make_pod(1), pod], Patience(seconds), NOW) == left


def test_the_failure_names_node_and_pod_and_that_what_still_runs_there_is_harmless() -> None:
    assert lost_nodes([make_pod(0), silent(1, -31)], Patience(30), NOW) == (
        Failure(
            "NodeLost",
            "node node-1 is NotReady since 03:03:34 UTC; pod digits-0-1 may still be running, but cannot write "
            "snapshots once the next attempt starts",
            Retry.YES,
            pod_name="digits-0-1",
            node_name="node-1",
            node_rank=1,
            time=later(-31),
        ),
    )


@pytest.mark.parametrize("deleting", [False, True])
def test_a_pod_is_taken_off_by_force_only_where_the_policy_says_so(deleting: bool) -> None:
    pods = [make_pod(0), silent(1, -31, deleting=deleting), silent(2, -1)]
    assert force_deletions(pods, POLICY, NOW) == ()
    forced = force_deletions(pods, Restart(node_lost_seconds=30, force_delete_lost_pods=True), NOW)
    assert forced == (DeletePod("digits-0-1", "pod-0-1", 0),)
    going = [silent(1, -31, deleting=True, forced=True)]
    assert force_deletions(going, Restart(node_lost_seconds=30, force_delete_lost_pods=True), NOW) == ()


WAITING = {"phase": "waiting", "phaseSeconds": 61.0}


@pytest.mark.parametrize(
    ("report", "pods", "found"),
    [
        pytest.param(WAITING, [make_pod(0), make_pod(1)], True, id="nobody ended, and nobody trains"),
        pytest.param(WAITING | {"phaseSeconds": 59.0}, [make_pod(0), make_pod(1)], False, id="its cause may yet show"),
        pytest.param(WAITING | {"attempt": 1}, [make_pod(0), make_pod(1)], False, id="the report of another attempt"),
        pytest.param(WAITING | {"phase": "train"}, [make_pod(0), make_pod(1)], False, id="it trains"),
        pytest.param(WAITING | {"phaseSeconds": None}, [make_pod(0)], False, id="it does not say for how long"),
        pytest.param(None, [make_pod(0), make_pod(1)], False, id="no report"),
        pytest.param(WAITING, [make_pod(0), silent(1, -5)], False, id="a node that fell silent is the better reason"),
        pytest.param(WAITING, [make_pod(0), failed(1, 137)], False, id="a pod that ended is the better reason"),
        pytest.param(WAITING, [make_pod(0), make_pod(1, deleting=True)], False, id="a pod that goes is, too"),
    ],
)
def test_a_gang_that_waits_without_a_cause_is_given_another_attempt(
    report: dict[str, Any] | None, pods: list[PodView], found: bool
) -> None:
    assert [failure.reason for failure in stranded(pods, 0, report and heard(**report))] == (
        ["PeerLost"] if found else []
    )


@pytest.mark.parametrize(
    ("pods", "pod", "node"),
    [
        pytest.param([make_pod(1), make_pod(0)], "digits-0-0", "node-0", id="it names node rank 0"),
        pytest.param([make_pod(1)], None, None, id="which is not seen"),
    ],
)
def test_a_gang_that_waits_has_lost_a_peer_of_node_rank_0(
    pods: list[PodView], pod: str | None, node: str | None
) -> None:
    message = "node rank 0 lost its peers 60 s ago, but all pods of the gang still exist"
    assert stranded(pods, 0, heard(**WAITING | {"phaseSeconds": STRANDED_SECONDS})) == (
        Failure("PeerLost", message, Retry.YES, pod_name=pod, node_name=node, node_rank=0),
    )


# What the plan makes of it


def look(status: DDPJobStatus, observed: Observed, seconds: float = 0.0, **restart: Any) -> Plan:
    return plan(make_job(status, restart=restart), observed, later(seconds), DEFAULTS)


def running(**restart: Any) -> DDPJobStatus:
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    return in_phase(Phase.RUNNING, snapshot=snapshot, spec_digests=digests(make_job(restart=restart), DEFAULTS))


def deletions(decided: Plan) -> list[tuple[str, int | None]]:
    return [(action.name, action.grace_seconds) for action in decided.actions if isinstance(action, DeletePod)]


def test_a_silent_node_is_looked_at_again_when_its_time_is_over() -> None:
    decided = look(running(), seen(make_pod(0), silent(1, 0)), 10)
    assert (decided.actions, decided.requeue_after, decided.status.phase) == ((), SILENT_LOOK_SECONDS, Phase.RUNNING)


def rank(age: float, step_seconds: float = 0.5) -> dict[str, Any]:
    return {"ranks": [{"rank": 0, "phase": "train", "ageSeconds": age, "stepSeconds": step_seconds}]}


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
@pytest.mark.parametrize(
    ("report", "lost"),
    [
        pytest.param({"phase": "train"} | rank(12.0), True, id="its ranks wait in a collective"),
        pytest.param({"phase": "train"} | rank(8.0), False, id="for a moment only"),
        pytest.param({"phase": "train"} | rank(12.0, step_seconds=5.0), False, id="its steps take long"),
        pytest.param({"phase": "train"} | rank(51.0, step_seconds=5.0), True, id="not as long as this one"),
        pytest.param({"phase": "validate"} | rank(60.0), False, id="it does something that is no step"),
        pytest.param({"phase": "waiting", "phaseSeconds": 12.0}, True, id="they have lost a peer, and wait"),
        pytest.param({"phase": "train", "time": NOW.timestamp() - 60} | rank(0.1), False, id="the report is old"),
        pytest.param({"phase": "train", "time": NOW.timestamp()} | rank(0.1), False, id="it trains"),
        pytest.param({"phase": "train", "attempt": 3} | rank(60.0), False, id="the report is of another attempt"),
    ],
)
def test_a_silent_node_is_lost_at_once_where_the_gang_stands_still(
    scope: str, report: dict[str, Any], lost: bool
) -> None:
    pods = seen(make_pod(0), silent(1, 0), report=heard(**report))
    decided = look(running(scope=scope), pods, 1, scope=scope)
    assert decided.status.attempt == int(lost)
    if lost:
        assert decided.status.last_failure is not None
        assert (decided.status.last_failure.reason, decided.status.last_failure.node_name) == ("NodeLost", "node-1")
        assert decided.status.internal.kept_pods == ({"digits-0-0": 0} if scope == "InPlace" else {})


@pytest.mark.parametrize(("seconds", "lost"), [(0.0, False), (9.0, False), (10.0, True)])
def test_a_silent_node_is_lost_at_once_where_node_rank_0_does_not_answer_either(seconds: float, lost: bool) -> None:
    """A report that is old is no sign: of many trainers each is seldom asked, and clocks of nodes may be wrong."""
    trains = heard(phase="train", time=NOW.timestamp() - 60, **rank(0.1))
    pods = replace(seen(make_pod(0), silent(1, 0), report=trains), silent_seconds=seconds)
    assert look(running(), pods, 1).status.attempt == int(lost)


def test_a_gang_that_stands_still_on_nodes_that_answer_is_left_alone() -> None:
    standing = heard(phase="train", **rank(60.0))
    assert look(running(), seen(make_pod(0), make_pod(1), report=standing), 1).status.attempt == 0


def test_the_next_attempt_does_not_wait_for_the_pod_of_a_lost_node() -> None:
    decided = look(running(), seen(make_pod(0), silent(1, 0)), 30)
    assert (decided.status.phase, decided.status.attempt) == (Phase.RESTARTING, 1)
    assert decided.status.last_failure is not None
    assert (decided.status.last_failure.reason, decided.status.last_failure.node_name) == ("NodeLost", "node-1")
    made = [action.name for action in decided.actions if isinstance(action, CreatePod)]
    assert made == ["digits-1-0", "digits-1-1"]
    assert deletions(decided) == [("digits-0-0", 2), ("digits-0-1", 2)]
    stuck = silent(1, 0, deleting=True, gone_by=later(32))
    again = look(decided.status, seen(stuck, make_pod(0, attempt=1), make_pod(1, attempt=1), attempt=1), 31)
    assert (again.actions, again.status.phase) == ((), Phase.RUNNING)


def test_with_force_delete_the_pod_of_a_lost_node_goes_at_once_and_one_that_was_going_too() -> None:
    decided = look(running(), seen(make_pod(0), silent(1, 0)), 30, forceDeleteLostPods=True)
    assert deletions(decided) == [("digits-0-1", 0), ("digits-0-0", 2)]
    stuck = silent(1, 0, deleting=True, gone_by=later(32))
    again = look(decided.status, seen(stuck, make_pod(0, attempt=1), attempt=1), 31, forceDeleteLostPods=True)
    assert deletions(again) == [("digits-0-1", 0)]


@pytest.mark.parametrize("over", [False, True])
def test_a_pod_that_another_finalizer_holds_is_deleted_by_force_once_and_released(over: bool) -> None:
    """Else the plan would never come to rest, and the status would not be written."""
    lost = look(running(), seen(make_pod(0), silent(1, 0)), 30, forceDeleteLostPods=True).status
    status = in_phase(Phase.FAILED, attempt=1, completion_time=later(31)) if over else lost
    going = silent(1, 0, deleting=True, gone_by=later(31), forced=True, held=True)
    kept, policy = make_pod(0, "Failed" if over else "Running", attempt=1), {"forceDeleteLostPods": True}
    first = look(status, seen(going, kept, attempt=1), 32, **policy)
    assert (deletions(first), ReleasePod(going.name, going.uid) in first.actions) == ([], True)
    again = look(first.status, seen(replace(going, held=False), kept, attempt=1), 32, **policy)
    assert [action for action in again.actions if isinstance(action, DeletePod | ReleasePod)] == []


def test_in_place_the_others_live_on() -> None:
    scope = {"scope": "InPlace"}
    decided = look(running(**scope), seen(make_pod(0), silent(1, 0)), 30, **scope)
    assert decided.status.internal.kept_pods == {"digits-0-0": 0}
    assert deletions(decided) == [("digits-0-1", 2)]


def test_a_rank_that_lost_its_peer_is_no_cause_beside_a_lost_node() -> None:
    pods = (failed(0, 1, "PeerLost", ago=40), silent(1, -31))
    after = look(running(), seen(*pods)).status
    assert after.last_failure is not None
    assert after.last_failure.reason == "NodeLost"


def test_a_gang_that_waits_for_nothing_starts_anew() -> None:
    after = look(running(), seen(make_pod(0), make_pod(1), report=heard(**WAITING))).status
    assert after.attempt == 1
    assert after.last_failure is not None
    assert "all pods of the gang still exist" in after.last_failure.message


def unseen(node_rank: int, since: float) -> PodView:
    """A pod that was bound so many seconds after NOW to a node that has not seen it."""
    return make_pod(node_rank, "Pending", scheduled=True, unacknowledged_since=later(since))


@pytest.mark.parametrize(("since", "lost", "left"), [(-39, False, 1.0), (-40, True, None), (0, False, 40.0)])
def test_a_node_that_never_sees_a_pod_that_was_bound_to_it_is_lost(
    since: float, lost: bool, left: float | None
) -> None:
    assert is_lost(unseen(0, since), Patience(30), NOW) is lost
    assert until_lost([unseen(0, since)], Patience(30), NOW) == left


PULLING = make_pod(
    1,
    "Pending",
    scheduled=True,
    deleting=True,
    gone_by=later(-SETTLE_SECONDS),
    disruption="DeletionByTaintManager",
)
"""A pod whose node died while it pulled the image: it was not ready before either, but the taint deletes it."""


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
@pytest.mark.parametrize(
    ("pod", "said"),
    [(unseen(1, -45), "has not begun to start it"), (PULLING, "deleted")],
    ids=["bound and never started", "pulling its image"],
)
@pytest.mark.parametrize("elastic", [{}, {"elastic": {"minNodes": 1}}], ids=["of a fixed size", "elastic"])
def test_a_gang_does_not_wait_for_a_pod_on_a_dead_node(
    elastic: dict[str, Any], pod: PodView, said: str, phase: Phase
) -> None:
    """The restart after a power loss may be bound to the dead node before anybody knows that it is dead."""
    job = make_job(in_phase(phase, attempt_start_time=later(-50)), **elastic)
    after = plan(job, seen(make_pod(0), pod), NOW, DEFAULTS).status
    assert (after.attempt, after.restarts, after.disruptions) == (1, 0, 1)
    assert after.nodes.total == 2, "another machine may be free"
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.last_failure.node_name) == ("NodeLost", "node-1")
    assert said in after.last_failure.message


def test_a_job_that_is_over_gives_up_its_pods_on_lost_nodes_too() -> None:
    over = in_phase(Phase.FAILED, completion_time=NOW)
    zombie, kept = silent(0, -31, deleting=True), make_pod(1, "Failed")
    forced = make_job(over, restart={"nodeLostSeconds": 30, "forceDeleteLostPods": True})
    assert plan(forced, seen(zombie, kept), NOW, DEFAULTS).actions == (DeletePod("digits-0-0", "pod-0-0", 0),)
    assert plan(make_job(over), seen(zombie, kept), NOW, DEFAULTS).actions == ()
    waits = plan(forced, seen(silent(0, -20, deleting=True)), NOW, DEFAULTS)
    assert (waits.actions, waits.requeue_after) == ((), 10.0)
