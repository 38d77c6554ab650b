"""restart.scope Live with spares, one look at a time: a spare takes the place of a lost pod within the attempt."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from builders import DEFAULTS, NOW, ended, failed, heard, in_phase, later, make_job, make_pod, make_report, seen

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase, SnapshotStatus
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import AssignPod, CreatePod, DeletePod, Plan, SyncPod
from ddpjob_operator.core.values.observed import PodView

SPEC: dict[str, Any] = {"nodes": 3, "spares": 1, "restart": {"scope": "Live"}}


def running(spec: dict[str, Any] = SPEC, **fields: Any) -> DDPJobStatus:
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    started_with = digests(make_job(**spec), DEFAULTS)
    return in_phase(Phase.RUNNING, nodes=3, **{"snapshot": snapshot, "spec_digests": started_with} | fields)


def spare(index: int = 0, phase: str = "Running", **fields: Any) -> PodView:
    ready = phase == "Running"
    pod = make_pod(7, phase, **{"ready": ready, "ready_since": NOW if ready else None} | fields)
    return replace(pod, name=f"digits-0-s{index}", uid=f"spare-{index}", node_rank=None)


def placed(pod: PodView, node_rank: int) -> PodView:
    return replace(pod, node_rank=node_rank, nodes=3)


def killed(node_rank: int) -> PodView:
    return failed(node_rank, 1, "WorkerKilled")


def look(status: DDPJobStatus, pods: list[PodView], seconds: float = 0.0, **spec: Any) -> Plan:
    return plan(make_job(status, **SPEC | spec), seen(*pods), later(seconds), DEFAULTS)


def done(decided: Plan) -> set[str]:
    found = set()
    for action in decided.actions:
        match action:
            case CreatePod(name):
                found.add(f"create {name}")
            case DeletePod(name):
                found.add(f"delete {name}")
            case AssignPod(name, _, attempt, node_rank, nodes):
                found.add(f"{name} is {attempt}/{node_rank} of {nodes}")
            case SyncPod(name):
                found.add(f"sync {name}")
    return found


@pytest.mark.parametrize("dead", [0, 2])
def test_a_spare_takes_the_place_of_a_lost_pod_and_another_one_is_made(dead: int) -> None:
    others = [make_pod(rank) for rank in range(3) if rank != dead]
    first = look(running(), [*others, killed(dead), spare()])
    assert first.status_first, "which spare it is must be on record before a label says so"
    assert first.status.internal.kept_pods == {"digits-0-s0": dead}
    assert done(first) == {f"delete digits-0-{dead}"}
    (event,) = first.events
    assert event.reason == "RecoveringLive"
    assert event.message.endswith(
        f"the other ranks of attempt 0 go on; spare digits-0-s0 takes the place of node rank {dead}"
    )

    second = look(first.status, [*others, spare()])
    assert done(second) == {f"digits-0-s0 is 0/{dead} of 3"}
    assert second.status.nodes.spares == 0
    third = look(second.status, [*others, placed(spare(), dead)])
    assert done(third) == {"create digits-0-s1"}
    status = third.status
    assert (status.attempt, status.phase, status.nodes.ready) == (0, Phase.RUNNING, 3)
    assert (status.restarts, status.live_recoveries, status.internal.lost_pods) == (1, 1, {})
    assert done(look(status, [*others, placed(spare(), dead), spare(1)])) == set()


def test_a_spare_takes_a_place_although_the_lost_pod_is_still_there() -> None:
    """That of a lost node may be Terminating for minutes, and have its old labels."""
    gone = make_pod(0, not_ready_since=later(-300))
    first = look(running(), [gone, make_pod(1), make_pod(2), spare()])
    going = replace(gone, deleting=True, gone_by=later(60))
    second = look(first.status, [going, make_pod(1), make_pod(2), spare()])
    assert done(second) == {"digits-0-s0 is 0/0 of 3"}
    third = look(second.status, [going, make_pod(1), make_pod(2), placed(spare(), 0)], seconds=100)
    assert done(third) == {"create digits-0-s1"}
    assert (third.status.attempt, third.status.live_recoveries, third.status.nodes.ready) == (0, 1, 3)


def test_a_spare_that_ends_before_it_has_its_place_is_no_second_loss() -> None:
    first = look(running(), [make_pod(0), killed(1), make_pod(2), spare()])
    second = look(first.status, [make_pod(0), make_pod(2), spare(phase="Failed", termination=ended(1))])
    assert done(second) == {"create digits-0-1", "delete digits-0-s0"}
    third = look(second.status, [make_pod(0), replace(make_pod(1), uid="new-1"), make_pod(2)])
    assert done(third) == {"create digits-0-s1"}, "whose name is on record has a node rank"
    assert (third.status.attempt, third.status.live_recoveries) == (0, 1)


def test_a_spare_that_dies_in_its_place_is_a_loss_of_its_own() -> None:
    first = look(running(), [make_pod(0), killed(1), make_pod(2), spare()])
    ended_there = placed(spare(phase="Failed", termination=ended(1, make_report("WorkerKilled"))), 1)
    second = look(first.status, [make_pod(0), ended_there, make_pod(2), spare(1)])
    assert (second.status.live_recoveries, second.status.internal.kept_pods) == (2, {"digits-0-s1": 1})
    assert done(second) == {"delete digits-0-s0"}
    third = look(second.status, [make_pod(0), make_pod(2), spare(1)])
    assert done(third) == {"digits-0-s1 is 0/1 of 3"}


def test_a_spare_that_is_stopped_while_it_gets_its_place_does_not_end_the_attempt() -> None:
    first = look(running(), [make_pod(0), killed(1), make_pod(2), spare()])
    stopped = placed(spare(phase="Failed", termination=ended(143, make_report("Left")), deleting=True), 1)
    second = look(first.status, [make_pod(0), stopped, make_pod(2)])
    assert (second.status.attempt, second.status.live_recoveries) == (0, 2)


def test_of_two_lost_pods_one_gets_the_spare_and_the_other_is_created() -> None:
    first = look(running(), [killed(0), killed(1), make_pod(2), spare()])
    assert (first.status.live_recoveries, first.status.internal.kept_pods) == (1, {"digits-0-s0": 0})
    assert first.events[0].message.endswith("; spare digits-0-s0 takes the place of node rank 0, and 1 pod is created")
    second = look(first.status, [make_pod(2), spare()])
    assert done(second) == {"digits-0-s0 is 0/0 of 3", "create digits-0-1"}
    pods = [placed(spare(), 0), replace(make_pod(1, "Pending"), uid="new-1"), make_pod(2)]
    third = look(second.status, pods)
    assert done(third) == set(), "a spare must not take the node that the gang waits for"
    fourth = look(third.status, [placed(spare(), 0), replace(make_pod(1), uid="new-1"), make_pod(2)])
    assert done(fourth) == {"create digits-0-s1"}


def test_a_spare_without_a_node_makes_way_for_the_pod_that_is_created() -> None:
    waits = replace(spare(phase="Pending"), node_name=None)
    first = look(running(), [make_pod(0), killed(1), make_pod(2), waits])
    assert first.status.internal.kept_pods == {}
    assert first.events[0].message.endswith("go on; the pod is replaced")
    assert done(look(first.status, [make_pod(0), make_pod(2), waits])) == {"create digits-0-1", "delete digits-0-s0"}


@pytest.mark.parametrize(
    ("spares", "taken"),
    [
        pytest.param([spare(0, ready=False), spare(1)], "digits-0-s1", id="one that is ready goes first"),
        pytest.param([spare(0, "Pending", scheduled=True)], "digits-0-s0", id="one that starts is better than none"),
        pytest.param([spare(0, not_ready_since=later(-300)), spare(1)], "digits-0-s1", id="its node is lost"),
        pytest.param([spare(0, deleting=True), spare(1)], "digits-0-s1", id="it is going"),
        pytest.param([replace(spare(0), node_name="bad"), spare(1)], "digits-0-s1", id="its node failed the job"),
    ],
)
def test_the_best_spare_goes_first(spares: list[PodView], taken: str) -> None:
    spec = SPEC | {"spares": 2}
    status = running(spec, excluded_nodes=("bad",))
    decided = look(status, [make_pod(0), killed(1), make_pod(2), *spares], spares=2)
    assert decided.status.internal.kept_pods == {taken: 1}


def test_an_operator_that_starts_between_goes_on_from_what_is_on_record() -> None:
    """All that it knows is the status and the pods; the label may have been patched or not."""
    recorded = look(running(), [make_pod(0), killed(1), make_pod(2), spare()]).status
    recorded = DDPJobStatus.model_validate_json(recorded.model_dump_json(by_alias=True, exclude_none=True))
    for at in (spare(), placed(spare(), 1)):
        decided = look(recorded, [make_pod(0), make_pod(2), at, spare(1)])
        assert done(decided) == (set() if at.node_rank == 1 else {"digits-0-s0 is 0/1 of 3"})
        assert (decided.status.attempt, decided.status.live_recoveries) == (0, 1)


def test_a_pod_of_the_gang_that_somebody_labels_a_spare_takes_no_place() -> None:
    """Its name is to be free for the pod that is missing."""
    forged = replace(make_pod(1, ready=True), node_rank=None)
    decided = look(running(), [make_pod(0), forged, make_pod(2)])
    assert decided.status.internal.kept_pods == {}
    assert done(decided) == {"delete digits-0-1"}


def test_a_suspension_deletes_the_spare_that_has_a_place_as_well() -> None:
    recorded = look(running(), [make_pod(0), killed(1), make_pod(2), spare()]).status
    asked = look(recorded, [make_pod(0), make_pod(2), spare()], suspend=True)
    stopped = look(asked.status, [make_pod(0), make_pod(2), spare()], suspend=True)
    names = done(asked) | done(stopped)
    assert names == {"delete digits-0-0", "delete digits-0-2", "delete digits-0-s0"}
    assert stopped.status.restarts == 1


def test_where_the_others_cannot_go_on_the_spare_joins_the_next_attempt() -> None:
    recorded = look(running(), [make_pod(0), killed(1), make_pod(2), spare()]).status
    decided = look(recorded, [failed(0, 1, "LiveRecoveryFailed"), make_pod(2), spare()])
    assert decided.status.attempt == 1
    assert decided.status.internal.kept_pods == {"digits-0-s0": 0, "digits-0-2": 2}


def test_a_gang_smaller_than_its_spec_gives_its_growing_room_to_the_lost_place_first() -> None:
    """With minNodes 2 of 4 nodes, three train, and one pod waits for the gang to grow."""
    spec: dict[str, Any] = {"nodes": 4, "spares": 0, "elastic": {"minNodes": 2, "waitSeconds": 0}}
    status = running(SPEC | spec)
    first = look(status, [make_pod(0), killed(1), make_pod(2), spare()], **spec)
    assert (first.status.attempt, first.status.internal.kept_pods) == (0, {"digits-0-s0": 1})
    second = look(first.status, [make_pod(0), make_pod(2), spare()], seconds=60, **spec)
    assert second.status.attempt == 0, "the gang does not grow by the pod that completes it"
    assert done(second) == {"digits-0-s0 is 0/1 of 3"}


@pytest.mark.parametrize(("ranks", "synced"), [(2, {"sync digits-0-s0"}), (3, set())])
def test_the_kubelet_is_asked_again_to_show_a_spare_its_place_until_its_rank_trains(
    ranks: int, synced: set[str]
) -> None:
    failure = FailureStatus(attempt=0, time=later(100), reason="WorkerKilled", message="")
    kept, lost = {"digits-0-s0": 1}, {"pod-0-1": 1}
    status = running(kept_pods=kept, lost_pods=lost, live_recoveries=1, last_failure=failure, attempt_start_time=NOW)
    live = {"ranks": ranks, "recoveries": {"lost": 1, "left": 0, "joined": 0}, "droppedSteps": 0}
    report = heard(phase="train", step=10, worldSize=3, live=live)
    pods = [make_pod(0), placed(spare(), 1), make_pod(2), spare(1)]

    def at(moment: datetime) -> set[str]:
        return done(plan(make_job(status, **SPEC), seen(*pods, report=report), moment, DEFAULTS))

    assert at(later(101)) == set()
    assert at(later(104)) == synced
