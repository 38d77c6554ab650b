"""restart.scope InPlace, one look at a time: dead pods are replaced, the others assigned to the next attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    DEFAULTS,
    NOW,
    UID,
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

from ddpjob_operator.api.status import DDPJobStatus, Phase, SnapshotStatus
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import AssignPod, CreatePod, DeletePod, Plan, PointService, SyncPod
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.names import group_name
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView

SPEC: dict[str, Any] = {"nodes": 3, "restart": {"scope": "InPlace"}}


def running(**fields: Any) -> DDPJobStatus:
    """A job of three nodes that has made progress, so that a restart is immediate."""
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    started_with = digests(make_job(**SPEC), DEFAULTS)
    return in_phase(Phase.RUNNING, nodes=3, **{"snapshot": snapshot, "spec_digests": started_with} | fields)


def in_place(status: DDPJobStatus, **spec: Any) -> Job:
    return make_job(status, **SPEC | spec)


def look(job: Job, observed: Observed, seconds: float = 0.0, defaults: Defaults = DEFAULTS) -> Plan:
    return plan(job, observed, later(seconds), defaults)


def done(decided: Plan) -> set[str]:
    """The actions in one word each."""
    words = set()
    for action in decided.actions:
        match action:
            case AssignPod(name, _, attempt, node_rank, nodes):
                words.add(f"{name} is {attempt}/{node_rank} of {nodes}")
            case CreatePod(name):
                words.add(f"create {name}")
            case DeletePod(name):
                words.add(f"delete {name}")
            case PointService(attempt=attempt):
                words.add(f"point at {attempt}")
            case _:
                words.add(repr(action))
    return words


def assigned(node_rank: int, attempt: int = 1, **fields: Any) -> PodView:
    """A pod of attempt 0 that was assigned to a later one."""
    return replace(make_pod(node_rank, attempt=attempt, **fields), name=f"digits-0-{node_rank}")


@pytest.mark.parametrize("dead", [0, 1])
def test_only_what_died_is_replaced(dead: int) -> None:
    pods = [failed(rank, 137) if rank == dead else make_pod(rank) for rank in range(3)]
    decided = look(in_place(running()), seen(*pods))
    assert decided.status_first
    assert (decided.status.attempt, decided.status.restarts, decided.status.attempt_start_time) == (1, 1, NOW)
    assert decided.status.internal.kept_pods == {f"digits-0-{rank}": rank for rank in range(3) if rank != dead}
    survivors = {f"digits-0-{rank} is 1/{rank} of 3" for rank in range(3) if rank != dead}
    assert done(decided) == survivors | {f"delete digits-0-{dead}", f"create digits-1-{dead}", "point at 1"}


KUEUE: dict[str, Any] = {"scheduling": {"gang": "Kueue", "queue": "research"}}


def groups(decided: Plan) -> dict[str, str]:
    """Kueue's group of each pod that is to be created."""
    labels = {
        action.name: action.manifest["metadata"]["labels"] for action in decided.actions if type(action) is CreatePod
    }
    return {name: found["kueue.x-k8s.io/pod-group-name"] for name, found in labels.items()}


def queued(**spec: Any) -> Job:
    """A job that runs, admitted by Kueue."""
    made_from = digests(make_job(**SPEC | KUEUE | spec), DEFAULTS)
    return in_place(running(spec_digests=made_from), **KUEUE | spec)


def test_what_died_is_replaced_in_the_group_of_the_others_also_by_an_operator_that_starts_in_between() -> None:
    pods = (make_pod(0, group="theirs"), failed(1, 137, group="theirs"), make_pod(2, group="theirs"))
    first = look(queued(), seen(*pods))
    assert groups(first) == {"digits-1-1": "theirs"}
    told = (assigned(0, group="theirs"), assigned(2, group="theirs"))
    assert groups(look(in_place(first.status, **KUEUE), seen(*told, attempt=1))) == {"digits-1-1": "theirs"}


def test_a_group_of_kueue_of_which_no_pod_runs_is_finished_so_the_next_attempt_is_another_one() -> None:
    """A spare is of no group, and the group of an attempt waits until all its pods are there: none is kept."""
    warm = PodView("digits-0-s0", "spare", 0, None, PodPhase.RUNNING, ready=True)
    pods = [failed(rank, 137, group="theirs") for rank in range(3)]
    decided = look(queued(spares=1), seen(*pods, warm))
    assert decided.status.internal.kept_pods == {}
    assert set(groups(decided)) == {f"digits-1-{rank}" for rank in range(3)}
    assert set(groups(decided).values()) == {group_name("digits", UID, 1)}
    lost = make_pod(1, group="theirs", not_ready_since=later(-60))
    with_room = look(queued(nodes=2, spares=1), seen(make_pod(0, group="theirs"), lost, warm))
    assert with_room.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-s0": 1}, "no pod has to join the group"
    one_runs = [make_pod(0, group="theirs"), *pods[1:]]
    decided = look(queued(spares=1), seen(*one_runs, warm))
    assert decided.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-s0": 1}
    assert groups(decided) == {"digits-1-2": "theirs"}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"not_ready_since": later(-60)}, id="its node is lost"),
        pytest.param({"deleting": True, "gone_by": later(-60)}, id="its node does not confirm its deletion"),
        pytest.param({"phase": "Succeeded", "termination": ended(0)}, id="it succeeded"),
    ],
)
def test_a_pod_that_will_not_fail_keeps_its_place_in_the_group_so_that_nothing_is_reused(other: dict[str, Any]) -> None:
    pods = [make_pod(0), make_pod(1, **{"scheduled": True} | other), failed(2, 137)]
    pods = [replace(pod, group="theirs") for pod in pods]
    assert look(queued(), seen(*pods)).status.internal.kept_pods == {}


def test_a_new_pod_joins_the_group_when_the_one_that_it_replaces_has_failed() -> None:
    """Kueue would delete it, as one more than the group wants. A kubelet says that a container has ended before it says
    that the pod has failed.
    """
    exited = make_pod(1, exited=True, termination=ended(137), group="theirs")
    pods = [make_pod(0, group="theirs"), exited, make_pod(2, group="theirs")]
    first = look(queued(), seen(*pods))
    assert first.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-2": 2}
    assert groups(first) == {}
    job = replace(queued(), status=first.status)
    after = [assigned(0, group="theirs"), replace(exited, deleting=True), assigned(2, group="theirs")]
    assert groups(look(job, seen(*after, attempt=1))) == {}
    after[1] = replace(after[1], phase=PodPhase.FAILED)
    assert groups(look(job, seen(*after, attempt=1))) == {"digits-1-1": "theirs"}


def test_a_group_that_is_finished_before_the_new_pod_is_there_is_left_for_another_without_counting() -> None:
    pods = [make_pod(0, group="theirs"), *(failed(rank, 137, group="theirs") for rank in (1, 2))]
    first = look(queued(), seen(*pods))
    assert first.status.internal.kept_pods == {"digits-0-0": 0}
    dead = failed(0, 137, "WorkerException", ago=1, group="theirs")
    said = make_report("WorkerException", attempt=0)
    dead = replace(dead, termination=ended(1, said, ago=1))
    decided = look(replace(queued(), status=first.status), seen(dead, *pods[1:], attempt=0), 1)
    assert (decided.status.attempt, decided.status.restarts) == (2, first.status.restarts)
    decided = look(replace(queued(), status=decided.status), seen(attempt=0), 3)
    assert set(groups(decided).values()) == {group_name("digits", UID, 2)}
    assert len(groups(decided)) == 3
    assert "GroupClosed" in {item.reason for item in decided.status.conditions}


@pytest.mark.parametrize("scope", ["InPlace", "Gang"])
def test_pods_that_kueue_lets_go_and_never_admits_are_made_anew_in_another_group(scope: str) -> None:
    status = in_phase(Phase.STARTING, nodes=3, spec_digests=digests(make_job(**SPEC | KUEUE), DEFAULTS), restarts=0)
    job = in_place(status, **KUEUE, restart={"scope": scope})
    waiting = [make_pod(rank, "Pending", group="theirs") for rank in range(3)]
    assert look(job, seen(*waiting)).status.attempt == 0
    decided = look(job, seen(*(replace(pod, let_go=True) for pod in waiting)))
    assert (decided.status.attempt, decided.status.restarts) == (1, 0)
    assert groups(decided) == {}, "not at once, again and again"
    decided = look(replace(job, status=decided.status), seen(), 2)
    assert set(groups(decided).values()) == {group_name("digits", UID, 1)}


def test_a_pod_that_is_gone_is_replaced_and_the_others_live_on() -> None:
    decided = look(in_place(running()), seen(make_pod(1), make_pod(2)))
    assert done(decided) == {"digits-0-1 is 1/1 of 3", "digits-0-2 is 1/2 of 3", "create digits-1-0", "point at 1"}


def test_an_operator_that_died_after_the_status_was_written_does_the_same_once_more() -> None:
    pods = (make_pod(0), failed(1, 137), make_pod(2))
    first = look(in_place(running()), seen(*pods))
    again = look(in_place(first.status), seen(*pods))
    assert done(again) == done(first)
    assert again.status == first.status


def test_whoever_has_been_told_is_not_told_again() -> None:
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    decided = look(in_place(status), seen(assigned(0), make_pod(2), make_pod(1, "Pending", attempt=1), attempt=1))
    assert done(decided) == {"digits-0-2 is 1/2 of 3"}
    assert decided.status.phase is Phase.RESTARTING


def test_the_gang_runs_again_once_the_new_pod_does() -> None:
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    decided = look(in_place(status), seen(assigned(0), make_pod(1, attempt=1), assigned(2), attempt=1))
    assert (decided.actions, decided.status.phase, decided.status.nodes.ready) == ((), Phase.RUNNING, 3)
    again = look(
        in_place(decided.status), seen(failed(0, 137, attempt=1), make_pod(1, attempt=1), assigned(2), attempt=1)
    )
    assert again.status.internal.kept_pods == {"digits-1-1": 1, "digits-0-2": 2}, "pods of any age are kept"


def begun(**report: Any) -> tuple[Job, Observed]:
    """Attempt 1 of a gang of which two pods were kept, and what node rank 0 says of it."""
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    pods = (assigned(0), make_pod(1, attempt=1), assigned(2))
    status = look(in_place(status), seen(*pods, attempt=1)).status
    return in_place(status), seen(*pods, attempt=1, report=heard(**report) if report else None)


@pytest.mark.parametrize(
    ("after", "sync", "wait"), [(2.9, "", 0.1), (3.1, "1-1", 4.9), (8.1, "1-2", 11.9), (21, "1-3", None)]
)
@pytest.mark.parametrize(
    "report",
    [
        pytest.param({}, id="nothing is heard"),
        pytest.param({"attempt": 0, "phase": "waiting"}, id="node rank 0 does not know either"),
        pytest.param({"attempt": 1, "phase": "rendezvous"}, id="node rank 0 waits for the others"),
    ],
)
def test_kubelets_are_to_show_kept_pods_their_place_again_while_the_ranks_have_not_met(
    after: float, sync: str, wait: float | None, report: dict[str, Any]
) -> None:
    job, observed = begun(**report)
    decided = look(job, observed, after)
    kept = ("digits-0-0", "digits-0-2")
    wanted = [SyncPod(name, pod_uid(observed, name), sync) for name in kept] if sync else []
    assert [action for action in decided.actions if isinstance(action, SyncPod)] == wanted
    assert decided.requeue_after == (None if wait is None else pytest.approx(wait))
    shown = replace(observed, pods=tuple(replace(pod, sync=sync) for pod in observed.pods))
    assert done(look(job, shown, after)) == set(), "once each"


@pytest.mark.parametrize(
    ("report", "after"),
    [
        pytest.param({"attempt": 1, "phase": "first_step"}, 5, id="the ranks have met"),
        pytest.param({}, 100, id="kubelets have synced all pods meanwhile"),
    ],
)
def test_kubelets_are_left_alone_where_pods_know_their_place(report: dict[str, Any], after: float) -> None:
    job, observed = begun(**report)
    assert done(look(job, observed, after)) == set()


def pod_uid(observed: Observed, name: str) -> str:
    return next(pod.uid for pod in observed.pods if pod.name == name)


def test_survivors_are_left_in_peace_during_a_backoff() -> None:
    status = running(snapshot=None)
    pods = (make_pod(0), failed(1, 137), make_pod(2))
    decided = look(in_place(status), seen(*pods))
    assert done(decided) == {"delete digits-0-1"}
    assert decided.status.restart_at is not None
    waiting = in_place(decided.status)
    assert done(look(waiting, seen(make_pod(0), make_pod(2)), 0.1)) == set()
    due = look(waiting, seen(make_pod(0), make_pod(2)), 10)
    assert done(due) == {"digits-0-0 is 1/0 of 3", "digits-0-2 is 1/2 of 3", "create digits-1-1", "point at 1"}


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(failed(2, 1, "PeerLost"), id="it ended"),
        pytest.param(make_pod(2, deleting=True, gone_by=later(60)), id="somebody deletes it"),
        pytest.param(None, id="it is gone"),
    ],
)
def test_a_survivor_that_is_lost_before_it_was_told_is_replaced_as_well(late: PodView | None) -> None:
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    pods = (assigned(0), make_pod(1, attempt=1), *([late] if late else []))
    decided = look(in_place(status), seen(*pods, attempt=1))
    removed = {"delete digits-0-2"} if late and not late.deleting else set()
    assert done(decided) == {"create digits-1-2"} | removed
    assert decided.status.restarts == 1


@pytest.mark.parametrize("phase", [Phase.RESTARTING, Phase.RUNNING])
@pytest.mark.parametrize("exit_code", [0, 1, 64, 143])
def test_a_kept_pod_that_ended_before_it_heard_is_replaced_and_not_counted(phase: Phase, exit_code: int) -> None:
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    status = status.model_copy(update={"phase": phase})
    message = make_report("PeerLost", attempt=0)
    end = replace(failed(2, exit_code, "PeerLost").termination, message=message)  # type: ignore[type-var]
    dead = assigned(2, phase="Failed", termination=end)
    decided = look(in_place(status), seen(assigned(0), make_pod(1, attempt=1), dead, attempt=1))
    assert done(decided) == {"create digits-1-2", "delete digits-0-2"}
    after = decided.status
    assert (after.phase, after.attempt, after.restarts) == (Phase.RESTARTING, 1, 1)
    assert decided.status_first or phase is Phase.RESTARTING
    new = make_pod(2, "Pending", attempt=1)
    pods = (assigned(0), make_pod(1, attempt=1), dead, new)
    assert done(look(in_place(after), seen(*pods, attempt=1))) == {"delete digits-0-2"}
    pods = (assigned(0), make_pod(1, attempt=1), make_pod(2, attempt=1))
    assert look(in_place(after), seen(*pods, attempt=1)).status.phase is Phase.RUNNING


def test_the_end_of_a_kept_pod_in_its_new_life_is_a_failure() -> None:
    status = look(in_place(running()), seen(make_pod(0), failed(1, 137), make_pod(2))).status
    status = status.model_copy(update={"phase": Phase.RUNNING})
    message = make_report("WorkerException", attempt=1)
    end = replace(failed(2, 1, "x", ago=-5).termination, message=message)  # type: ignore[type-var]
    pods = (assigned(0), make_pod(1, attempt=1), assigned(2, phase="Failed", termination=end))
    after = look(in_place(status), seen(*pods, attempt=1), 10).status
    assert (after.attempt, after.restarts) == (2, 2)


@pytest.mark.parametrize(
    ("spec", "defaults"),
    [
        pytest.param({"args": ["--lr", "1"]}, DEFAULTS, id="a frozen field, on a server that lets it change"),
        pytest.param({"snapshots": {"every": "5steps"}}, DEFAULTS, id="what takes effect with the next attempt"),
        pytest.param({"nodes": 2}, DEFAULTS, id="another size of a gang that is not elastic"),
        pytest.param({}, Defaults(trainer_image="registry.example/trainer:2"), id="an operator with another image"),
    ],
)
def test_pods_made_from_another_spec_are_never_kept(spec: dict[str, Any], defaults: Defaults) -> None:
    decided = look(in_place(running(), **spec), seen(make_pod(0), failed(1, 137), make_pod(2)), defaults=defaults)
    assert decided.status.internal.kept_pods == {}
    assert not any(isinstance(action, AssignPod) for action in decided.actions)
    assert {"delete digits-0-0", "delete digits-0-2"} <= done(decided)


def test_pods_are_kept_that_an_operator_with_fewer_fields_has_made() -> None:
    """Version 0.1.0 has no `code`, and no digest of it."""
    started_with = digests(make_job(**SPEC), DEFAULTS)
    del started_with["code"]
    pods = seen(make_pod(0), failed(1, 137), make_pod(2))
    decided = look(in_place(running(spec_digests=started_with)), pods)
    assert decided.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-2": 2}
    code = {"configMaps": ["ddpjob-code-1"], "sha256": "0" * 64}
    with_code = look(in_place(running(spec_digests=started_with), code=code), pods)
    assert with_code.status.internal.kept_pods == {}


def test_pods_that_cannot_be_told_are_not_kept_when_the_scope_is_edited() -> None:
    started_with = digests(make_job(nodes=3), DEFAULTS)
    decided = look(in_place(running(spec_digests=started_with)), seen(make_pod(0), failed(1, 137), make_pod(2)))
    assert decided.status.internal.kept_pods == {}
    kept_from_then_on = look(
        in_place(decided.status.model_copy(update={"phase": Phase.RUNNING})),
        seen(make_pod(0, attempt=1), failed(1, 137, attempt=1), make_pod(2, attempt=1), attempt=1),
    )
    assert kept_from_then_on.status.internal.kept_pods == {"digits-1-0": 0, "digits-1-2": 2}


def test_a_whole_gang_that_ended_is_replaced_as_a_whole() -> None:
    pods = [failed(rank, 143, "Preempted", ago=20) for rank in range(3)]
    decided = look(in_place(running()), seen(*pods))
    assert decided.status.internal.kept_pods == {}
    assert {"create digits-1-0", "create digits-1-1", "create digits-1-2"} <= done(decided)


def test_scope_gang_keeps_nobody() -> None:
    decided = look(make_job(in_phase(Phase.RUNNING), nodes=2), seen(make_pod(0), failed(1, 137)))
    assert decided.status.internal.kept_pods == {}


def test_a_job_in_place_ends_like_any_other() -> None:
    status = running(attempt=1, kept_pods={"digits-0-0": 0, "digits-0-2": 2})
    pods = [replace(succeeded(rank), attempt=1, name=f"digits-0-{rank}") for rank in range(3)]
    finished = [replace(pod, termination=replace(pod.termination, message=_of_attempt(1))) for pod in pods]  # type: ignore[type-var]
    after = look(in_place(status), seen(*finished, attempt=1)).status
    assert (after.phase, cond.holds(after.conditions, cond.COMPLETE)) == (Phase.SUCCEEDED, True)


def _of_attempt(attempt: int) -> str:
    return make_report("Completed", outcome="Succeeded", step=400, attempt=attempt)


@pytest.mark.parametrize(
    "edit",
    [
        {"shutdownSeconds": 300},
        {"observeScript": False},
        {"nonFiniteLossPolicy": "Stop"},
        {"snapshots": {"keep": 9}},
        {"stall": {"minSeconds": 31}},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_no_pod_is_kept_that_does_not_know_a_new_setting_of_its_trainer(edit: dict[str, Any]) -> None:
    edited = in_place(running(), **edit)
    decided = look(edited, seen(make_pod(0), failed(1, 137), make_pod(2)))
    assert decided.status.internal.kept_pods == {}


@pytest.mark.parametrize(("reserved", "attempt"), [(True, 2), (False, 1)])
def test_a_new_pod_that_kueue_holds_to_a_node_that_is_gone_is_no_reason_to_wait_for_ever(
    reserved: bool, attempt: int
) -> None:
    drained = failed(1, 143, group="theirs", disruption="EvictionByEvictionAPI")
    first = look(queued(), seen(make_pod(0, group="theirs"), drained, make_pod(2, group="theirs")))
    assert groups(first) == {"digits-1-1": "theirs"}
    fields: dict[str, Any] = {"group": "theirs", "reason": "Unschedulable", "created": NOW, "reserved": reserved}
    waits = replace(make_pod(1, "Pending", attempt=1, **fields), node_name=None)
    pods = (assigned(0, group="theirs"), waits, assigned(2, group="theirs"))
    job = replace(queued(), status=first.status)
    assert look(job, seen(*pods, attempt=1), 59).status.attempt == 1
    after = look(job, seen(*pods, attempt=1), 61).status
    assert (after.attempt, after.restarts) == (attempt, first.status.restarts)
    assert (after.internal.kept_pods == {}) == reserved
