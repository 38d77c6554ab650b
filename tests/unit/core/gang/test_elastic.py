"""When an elastic gang changes its size, to which, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, later, make_job, make_pod, seen, succeeded
from looks import at, condition

from ddpjob_operator.api.status import DDPJobStatus, Phase, SnapshotStatus
from ddpjob_operator.core.gang.elastic import SCALED_DOWN, SCALED_UP, Resize, next_size, until_resized, wanted_resize
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import AssignPod, CreatePod, DeletePod, Plan, PointService
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed, PodView

ELASTIC: dict[str, Any] = {"minNodes": 1, "waitSeconds": 30}


def job(status: DDPJobStatus, nodes: int = 3, **spec: Any) -> Job:
    return make_job(status, **{"nodes": nodes, "elastic": ELASTIC} | spec)


def started(phase: Phase, total: int = 3, **fields: Any) -> DDPJobStatus:
    """A gang of `total` nodes that was decided on at NOW; spec.nodes is 3."""
    made_from = digests(make_job(nodes=3, elastic=ELASTIC), DEFAULTS)
    return in_phase(phase, nodes=total, **{"spec_digests": made_from, "attempt_start_time": NOW} | fields)


def waiting(index: int = 0, ready: float | None = 0.0, attempt: int = 0, **fields: Any) -> PodView:
    """A pod that waits for a node rank, ready so many seconds after NOW."""
    since: datetime | None = None if ready is None else later(ready)
    pod = make_pod(0, "Pending" if since is None else "Running", attempt, ready=since is not None, ready_since=since)
    return replace(pod, name=f"digits-{attempt}-s{index}", uid=f"spare-{index}", node_rank=None, **fields)


def placed(*ranks: int) -> list[PodView]:
    return [make_pod(rank, "Pending", scheduled=True) for rank in ranks]


def snapshot(seconds: float) -> SnapshotStatus:
    return SnapshotStatus(step=100, time=later(seconds), verified=True)


# Fewer


@pytest.mark.parametrize(
    ("pods", "seconds", "size"),
    [
        pytest.param([*placed(0, 1), make_pod(2, "Pending")], 29, None, id="the third may still come"),
        pytest.param([*placed(0, 1), make_pod(2, "Pending")], 30, 2, id="it does not come in time"),
        pytest.param([make_pod(0), *placed(1)], 30, 2, id="one could not even be made"),
        pytest.param(placed(0, 1, 2), 300, None, id="all have nodes: what they wait for is an image"),
        pytest.param([make_pod(0, "Pending")], 300, None, id="not even the fewest"),
        pytest.param([make_pod(0), make_pod(1, not_ready_since=NOW), make_pod(2)], 30, 2, id="a node that is silent"),
        pytest.param([make_pod(0), make_pod(1, deleting=True), make_pod(2)], 30, 2, id="a pod that goes"),
    ],
)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
def test_a_gang_that_starts_makes_do_with_what_there_is_after_the_wait(
    phase: Phase, pods: list[PodView], seconds: float, size: int | None
) -> None:
    status = started(phase)
    change = wanted_resize(at(job(status), seen(*pods), seconds))
    assert (change and (change.size, change.reason)) == (size and (size, SCALED_DOWN))


@pytest.mark.parametrize("field", ["restart_at", "retry_at"])
def test_the_wait_begins_when_nodes_are_asked_for(field: str) -> None:
    status = started(Phase.RESTARTING, **{field: later(60)})
    pods = tuple(placed(0))
    assert wanted_resize(at(job(status), seen(*pods), 89)) is None
    assert wanted_resize(at(job(status), seen(*pods), 90)) is not None


def test_the_wait_begins_once_the_pods_before_have_saved() -> None:
    """Until then the attempt has none."""
    status = started(Phase.RESTARTING)
    pods = [*placed(0), *(make_pod(rank, "Pending", created=later(40)) for rank in (1, 2))]
    assert wanted_resize(at(job(status), seen(*pods), 69)) is None
    assert until_resized(at(job(status), seen(*pods), 69)) == 1
    assert wanted_resize(at(job(status), seen(*pods), 70)) == Resize(
        1, SCALED_DOWN, "only 1 of 3 nodes were scheduled within 30 s"
    )


def test_a_gang_is_never_shrunk_while_the_scheduler_may_still_be_at_it() -> None:
    status = started(Phase.STARTING)
    at_once = job(status, elastic={"minNodes": 1, "waitSeconds": 0})
    assert wanted_resize(at(at_once, seen(*placed(0)), 1)) is None
    assert wanted_resize(at(at_once, seen(*placed(0)), 2)) is not None


def test_a_gang_that_is_not_elastic_never_changes_its_size() -> None:
    status = in_phase(Phase.STARTING, nodes=3, attempt_start_time=NOW)
    assert wanted_resize(at(make_job(status, nodes=3), seen(*placed(0)), 900)) is None
    assert next_size(at(make_job(status, nodes=3))) == 3


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING])
def test_a_size_that_is_lowered_in_the_spec_takes_effect_at_once(phase: Phase) -> None:
    status = started(phase)
    change = wanted_resize(at(job(status, nodes=2)))
    assert change == Resize(2, SCALED_DOWN, "spec.nodes was changed from 3 to 2")


@pytest.mark.parametrize("field", ["restart_at", "retry_at"])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING, Phase.RUNNING])
def test_a_wait_beyond_any_backoff_is_of_a_clock_that_was_set_back(phase: Phase, field: str) -> None:
    """The end of the last wait stays on record while the gang runs."""
    status = started(phase, **{field: later(3600)})
    lowered = wanted_resize(at(job(status, nodes=2)))
    assert lowered == Resize(2, SCALED_DOWN, "spec.nodes was changed from 3 to 2")
    shrunk = wanted_resize(at(job(status), seen(*placed(0, 1)), 30))
    assert (shrunk and shrunk.size) == (None if phase is Phase.RUNNING else 2)


@pytest.mark.parametrize(("phase", "waits"), [(Phase.RESTARTING, True), (Phase.RUNNING, False)])
def test_a_gang_that_waits_for_its_restart_is_not_resized(phase: Phase, waits: bool) -> None:
    status = started(phase, restart_at=later(60))
    assert (wanted_resize(at(job(status, nodes=2))) is None) is waits


# More


@pytest.mark.parametrize(
    ("pods", "saved", "seconds", "size"),
    [
        pytest.param([waiting(ready=None)], 10, 99, None, id="it has no node"),
        pytest.param([waiting()], None, 29, None, id="it is ready, and no snapshot is"),
        pytest.param([waiting()], -1, 29, None, id="the snapshot is older"),
        pytest.param([waiting()], 10, 11, 2, id="a snapshot was saved since"),
        pytest.param([waiting()], None, 30, 2, id="no snapshot for as long as a gang waits for a node"),
        pytest.param([waiting(0), waiting(1, ready=20)], 10, 21, 2, id="one at a boundary, one not yet"),
        pytest.param([waiting(0), waiting(1), waiting(2)], 10, 11, 3, id="no more than were asked for"),
        pytest.param([waiting(deleting=True)], 10, 11, None, id="it goes"),
        pytest.param([waiting(ready=0.0, not_ready_since=NOW)], 10, 11, None, id="its node fell silent"),
    ],
)
def test_a_running_gang_grows_where_a_snapshot_has_just_been_saved(
    pods: list[PodView], saved: float | None, seconds: float, size: int | None
) -> None:
    pods = [replace(pod, ready=False) if pod.not_ready_since else pod for pod in pods]
    status = started(Phase.RUNNING, total=1, snapshot=None if saved is None else snapshot(saved))
    change = wanted_resize(at(job(status), seen(make_pod(0), *pods), seconds))
    assert (change and (change.size, change.reason)) == (size and (size, SCALED_UP))


@pytest.mark.parametrize(
    ("pods", "gone"),
    [
        pytest.param([make_pod(0), succeeded(1)], (), id="its pod is there"),
        pytest.param([make_pod(0)], (1,), id="its pod is gone"),
    ],
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_gang_of_which_a_node_is_done_keeps_its_size(pods: list[PodView], gone: tuple[int, ...], nodes: int) -> None:
    """The spare got the node that the pod gave back, while the other one still uploads what was trained."""
    status = started(Phase.RUNNING, total=2, snapshot=snapshot(10), succeeded_nodes=gone)
    assert wanted_resize(at(job(status, nodes), seen(*pods, waiting()), 99)) is None


def test_the_plan_looks_again_when_a_wait_is_over() -> None:
    status = started(Phase.RUNNING, total=1)
    assert until_resized(at(job(status), seen(waiting(), waiting(1, ready=5)), 10)) == 20
    assert until_resized(at(job(status), seen(waiting(ready=None)), 10)) is None
    assert until_resized(at(job(started(Phase.STARTING)), seen(), 10)) == 20
    assert until_resized(at(job(started(Phase.RUNNING)), seen(waiting()), 10)) is None


@pytest.mark.parametrize(
    ("phase", "total", "pods", "size"),
    [
        pytest.param(Phase.RUNNING, 3, [], 3, id="a full gang fails"),
        pytest.param(Phase.RUNNING, 1, [], 1, id="a small one does not wait for what it could not have before"),
        pytest.param(Phase.RUNNING, 1, [waiting()], 2, id="and takes in who has come since"),
        pytest.param(Phase.RUNNING, 3, [waiting()], 3, id="but no more than were asked for"),
        pytest.param(Phase.SUSPENDED, 1, [], 3, id="after a suspension everything is tried anew"),
    ],
)
def test_an_attempt_after_a_failure_has_the_nodes_that_can_be_had(
    phase: Phase, total: int, pods: list[PodView], size: int
) -> None:
    status = started(phase, total)
    assert next_size(at(job(status), seen(*pods))) == size


# What the plan makes of it


def look(status: DDPJobStatus, observed: Observed, seconds: float = 0.0, **spec: Any) -> Plan:
    return plan(job(status, **spec), observed, later(seconds), DEFAULTS)


def done(decided: Plan) -> list[str]:
    words = []
    for action in decided.actions:
        match action:
            case AssignPod(name, _, attempt, node_rank, nodes):
                words.append(f"{name} is {attempt}/{node_rank} of {nodes}")
            case CreatePod(name):
                words.append(f"create {name}")
            case DeletePod(name, _, grace):
                words.append(f"delete {name} in {grace}")
            case PointService(attempt=attempt):
                words.append(f"point at {attempt}")
    return sorted(words)


def test_a_smaller_gang_costs_no_restart_and_its_pods_know_its_size() -> None:
    decided = look(started(Phase.STARTING), seen(*placed(0, 1), make_pod(2, "Pending")), 30)
    after = decided.status
    assert (after.attempt, after.restarts, after.disruptions, after.nodes.total) == (1, 0, 1, 2)
    assert condition(after, cond.RESTARTING) == ("True", SCALED_DOWN)
    assert [(event.type, event.reason) for event in decided.events] == [("Normal", SCALED_DOWN)]
    created = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert [action.name for action in created] == ["digits-1-0", "digits-1-1"]
    for action in created:
        env = {item["name"]: item.get("value") for item in action.manifest["spec"]["containers"][0]["env"]}
        assert env["DDPJOB_NODES"] == "2"


def test_while_it_is_small_a_node_is_asked_for_and_people_are_told() -> None:
    status = started(Phase.RUNNING, total=2)
    decided = look(status, seen(make_pod(0), make_pod(1)))
    assert done(decided) == ["create digits-0-s0"]
    assert condition(decided.status, cond.DEGRADED) == ("True", "FewerNodes")
    assert done(look(decided.status, seen(make_pod(0), make_pod(1), waiting(ready=None)))) == []


def test_a_gang_that_is_replaced_to_grow_may_save_before_the_next_takes_the_volume() -> None:
    status = started(Phase.RUNNING, total=1, snapshot=snapshot(10))
    decided = look(status, seen(make_pod(0), waiting()), 11, nodes=2)
    assert (decided.status.attempt, decided.status.restarts, decided.status.disruptions) == (1, 0, 1)
    assert done(decided) == ["delete digits-0-0 in None", "delete digits-0-s0 in None"]
    assert decided.requeue_after == 0.5
    saving = make_pod(0, deleting=True, gone_by=later(71))
    assert done(look(decided.status, seen(saving), 12, nodes=2)) == []
    due = ["create digits-1-0", "create digits-1-1", "point at 1"]
    assert done(look(decided.status, seen(), 13, nodes=2)) == due
    assert done(look(decided.status, seen(saving), 74, nodes=2)) == due, "nobody waits for a stuck pod for ever"
    lost = replace(saving, not_ready_since=later(12))
    assert done(look(decided.status, seen(lost), 13, nodes=2)) == due, "nor for one whose node is silent"


def test_the_grace_is_the_pods_own_even_if_the_operator_died_in_between() -> None:
    status = started(Phase.RUNNING, total=1, snapshot=snapshot(10))
    decided = look(status, seen(make_pod(0), waiting()), 11, nodes=2)
    again = look(decided.status, seen(make_pod(0), waiting()), 12, nodes=2)
    assert done(again) == done(decided)


def in_place(total: int, **fields: Any) -> DDPJobStatus:
    made_from = digests(make_job(**IN_PLACE), DEFAULTS)
    return started(Phase.RUNNING, total, spec_digests=made_from, **fields)


IN_PLACE: dict[str, Any] = {"nodes": 2, "elastic": ELASTIC, "restart": {"scope": "InPlace"}}


def test_in_place_nobody_is_replaced_to_grow() -> None:
    status = in_place(1, snapshot=snapshot(10))
    decided = look(status, seen(make_pod(0), waiting()), 11, **IN_PLACE)
    assert done(decided) == ["digits-0-0 is 1/0 of 2", "digits-0-s0 is 1/1 of 2", "point at 1"]
    assert decided.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-s0": 1}


def test_in_place_the_pods_beyond_a_smaller_gang_go_after_a_snapshot() -> None:
    decided = look(in_place(2), seen(make_pod(0), make_pod(1)), 11, **IN_PLACE | {"nodes": 1})
    assert done(decided) == ["delete digits-0-1 in None", "digits-0-0 is 1/0 of 1", "point at 1"]


def test_in_place_a_lost_node_is_waited_for_and_then_done_without() -> None:
    status = in_place(2, snapshot=snapshot(-1))
    decided = look(status, seen(make_pod(0), make_pod(1, not_ready_since=later(-30))), 0, **IN_PLACE)
    assert (decided.status.nodes.total, decided.status.internal.kept_pods) == (2, {"digits-0-0": 0})
    survivor, new = replace(make_pod(0, attempt=1), name="digits-0-0"), make_pod(1, "Pending", attempt=1)
    again = look(decided.status, seen(survivor, new, attempt=1), 30, **IN_PLACE)
    assert (again.status.nodes.total, again.status.internal.kept_pods) == (1, {"digits-0-0": 0})
    assert done(again) == ["delete digits-1-1 in None", "digits-0-0 is 2/0 of 1", "point at 2"]


@pytest.mark.parametrize(
    ("silent", "size"), [pytest.param(None, None, id="all have nodes"), pytest.param(NOW, 2, id="a node is silent")]
)
def test_pods_that_have_yet_to_be_assigned_have_nodes(silent: datetime | None, size: int | None) -> None:
    """The operator wrote which pods it keeps, and was away until the wait was over."""
    kept = {f"digits-0-{rank}": rank for rank in range(3)}
    status = started(Phase.RESTARTING, attempt=1, kept_pods=kept)
    joined = [replace(make_pod(rank), attempt=1) for rank in (0, 1)]
    look_late = at(job(status), seen(*joined, make_pod(2, not_ready_since=silent), attempt=1), 99)
    change = wanted_resize(look_late)
    assert (change and change.size) == size


def test_a_failure_of_a_small_gang_does_not_wait_for_nodes_again() -> None:
    status = started(Phase.RUNNING, total=2, snapshot=snapshot(0))
    decided = look(status, seen(make_pod(0), failed(1, 137), waiting(ready=None)))
    assert decided.status.nodes.total == 2
    assert "create digits-1-2" not in done(decided)
    assert "delete digits-0-s0 in 2" in done(decided), "it would take the node that the gang needs"


@pytest.mark.parametrize(("nodes", "attempt"), [(2, 2), (3, 1)], ids=["a smaller gang", "a full one"])
def test_the_ranks_of_a_smaller_gang_get_no_other_beside_them_where_the_status_was_lost(
    nodes: int, attempt: int
) -> None:
    """They have met without it, and the spec is all that says how many there should be."""
    pods = [replace(make_pod(rank, attempt=1), nodes=nodes) for rank in (0, 1)]
    spare = replace(waiting(attempt=1), nodes=nodes)
    first = look(DDPJobStatus(), seen(*pods, spare, attempt=1))
    assert (first.status.attempt, first.status.restarts) == (attempt, attempt)
    made = {action.name for action in first.actions if isinstance(action, CreatePod)}
    assert made == ({"digits-1-2"} if attempt == 1 else {f"digits-2-{rank}" for rank in range(3)})


def test_a_smaller_gang_whose_first_node_is_done_is_not_trained_again_where_the_status_was_lost() -> None:
    pods = [replace(succeeded(rank), attempt=1, name=f"digits-1-{rank}", nodes=2) for rank in (0, 1)]
    job = make_job(DDPJobStatus(), nodes=3, elastic=ELASTIC, successPolicy="FirstNode")
    first = plan(job, seen(*pods, attempt=1), NOW, DEFAULTS)
    assert (first.status.attempt, first.status.restarts) == (1, 1)


def test_an_autoscaler_finds_the_pods_and_the_size() -> None:
    begun = plan(make_job(nodes=3, elastic=ELASTIC), seen(), NOW, DEFAULTS).status
    assert begun.selector == f"training.ddpjob.io/uid={make_job().uid}"
    assert begun.nodes.total == 3
    resized_to = look(started(Phase.RUNNING), seen(make_pod(0), make_pod(1), make_pod(2)), nodes=2).status
    assert (resized_to.selector, resized_to.nodes.total) == (begun.selector, 2)
