"""How each pod ended is on record before the pod may vanish, whoever deletes it and whoever looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import heard, in_phase, make_job, make_pod, seen, succeeded
from looks import look
from promises import check_history
from world import World

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.values.actions import Plan, ReleasePod
from ddpjob_operator.core.values.observed import PodPhase


def running(**spec: object) -> World:
    world = World.start(restart={"maxRestarts": 0}, **spec)
    world.settle()
    assert world.status.phase is Phase.RUNNING
    return world


def collect(world: World, name: str) -> None:
    """Somebody deletes a pod, and its kubelet, or the garbage collector of pods, is done with it."""
    world.cluster.delete(name, None)
    world.cluster.reap(name)


def released(decided: Plan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, ReleasePod)]


@pytest.mark.parametrize("away", [False, True], ids=["watching", "away"])
def test_a_node_that_is_done_may_be_collected_while_others_work(away: bool) -> None:
    world = running(nodes=2)
    world.cluster.end("digits-0-1", 0, "Completed")
    if not away:
        world.look()
    collect(world, "digits-0-1")
    if away:
        world.restart()
    world.settle()
    assert "digits-0-1" not in world.cluster.pods, "its node may be drained"
    assert (world.status.phase, world.status.internal.succeeded_nodes) == (Phase.RUNNING, (1,))
    assert world.status.nodes.ready == 2
    world.restart()
    world.cluster.end("digits-0-0", 0, "Completed")
    world.settle()
    assert (world.status.phase, world.status.restarts) == (Phase.SUCCEEDED, 0)
    check_history(world.cluster)


def test_what_a_drained_node_said_at_its_end_is_not_overwritten_by_its_older_report() -> None:
    job = make_job(in_phase(Phase.RUNNING))
    report = heard(step=390, metrics={"eval_accuracy": 0.9})
    ended = look(job, seen(succeeded(0, deleting=True), make_pod(1), report=report)).status
    after = look(make_job(ended), seen(make_pod(1), report=report)).status
    for status in (ended, after):
        assert status.progress is not None
        assert (status.progress.step, status.progress.metrics) == (400, {"eval_accuracy": 0.97})


def test_a_gang_that_succeeds_and_is_collected_while_the_operator_is_away_has_succeeded() -> None:
    world = running(nodes=2)
    for name in list(world.cluster.pods):
        world.cluster.end(name, 0, "Completed")
        collect(world, name)
    world.restart()
    world.settle()
    assert (world.status.phase, world.status.progress and world.status.progress.step) == (Phase.SUCCEEDED, 10)
    assert world.cluster.pods == {}


def test_rank_0_that_is_done_and_collected_first_has_its_figures_on_record() -> None:
    world = running(nodes=2)
    world.cluster.end("digits-0-0", 0, "Completed")
    collect(world, "digits-0-0")
    world.restart()
    world.settle()
    assert (world.status.progress and world.status.progress.step, world.cluster.pods.keys()) == (10, {"digits-0-1"})


def test_a_drain_that_nobody_saw_is_a_disruption() -> None:
    """With a budget of none the job would fail."""
    world = running(nodes=2)
    world.cluster.pods["digits-0-1"] = replace(world.cluster.pods["digits-0-1"], disruption="EvictionByEvictionAPI")
    collect(world, "digits-0-1")
    world.restart()
    world.settle()
    assert (world.status.phase, world.status.restarts, world.status.disruptions) == (Phase.RUNNING, 0, 1)
    check_history(world.cluster)


def test_an_eviction_that_nobody_saw_is_a_disruption() -> None:
    """The kubelet of 1.20 replaces the status of the pod, and its containers with it."""
    world = running(nodes=2)
    evicted = replace(world.cluster.pods["digits-0-1"], phase=PodPhase.FAILED, reason="Evicted", began=False)
    world.cluster.pods["digits-0-1"] = evicted
    collect(world, "digits-0-1")
    world.restart()
    world.settle()
    assert (world.status.phase, world.status.restarts, world.status.disruptions) == (Phase.RUNNING, 0, 1)
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == "Evicted"


def test_an_error_that_nobody_saw_is_told() -> None:
    world = running(nodes=2)
    world.cluster.end("digits-0-1", 64, "UserError")
    collect(world, "digits-0-1")
    world.restart()
    world.settle()
    assert world.status.last_failure is not None
    assert (world.status.last_failure.reason, world.status.last_failure.exit_code) == ("UserError", 64)


def test_a_new_attempt_begins_with_no_node_done() -> None:
    world = World.start(nodes=2)
    world.settle()
    world.cluster.end("digits-0-1", 0, "Completed")
    collect(world, "digits-0-1")
    world.settle()
    world.cluster.end("digits-0-0", 1, "WorkerException")
    world.settle()
    assert (world.status.attempt, world.status.internal.succeeded_nodes) == (1, ())
    assert sorted(name for name in world.cluster.pods if name.startswith("digits-1")) == ["digits-1-0", "digits-1-1"]
    check_history(world.cluster)


HELD = {"held": True}
GOING = {"held": True, "deleting": True}


@pytest.mark.parametrize(
    ("phase", "pods", "names"),
    [
        (Phase.RUNNING, (make_pod(0, **HELD), make_pod(1, **HELD)), []),
        (Phase.RUNNING, (make_pod(0, **HELD), make_pod(1, **GOING)), []),
        (Phase.RUNNING, (make_pod(0, **HELD), succeeded(1, **HELD)), []),
        (Phase.RUNNING, (make_pod(0, **HELD), succeeded(1, **GOING)), ["digits-0-1"]),
        (Phase.RUNNING, (make_pod(0, **HELD), make_pod(1, **HELD), make_pod(7, **GOING)), ["digits-0-7"]),
        (Phase.STARTING, (make_pod(0, "Pending", **HELD), make_pod(1, "Pending", **GOING)), ["digits-0-1"]),
        (Phase.SUCCEEDED, (succeeded(0, **HELD), succeeded(1, **HELD)), ["digits-0-0", "digits-0-1"]),
        (Phase.SUSPENDED, (make_pod(0, **GOING),), ["digits-0-0"]),
        (Phase.RUNNING, (make_pod(0), succeeded(1, deleting=True)), []),
    ],
    ids=["runs", "stops", "done", "done and going", "surplus", "never began", "job is over", "suspended", "older pods"],
)
def test_a_pod_is_released_when_its_end_decides_nothing_more(
    phase: Phase, pods: tuple[object, ...], names: list[str]
) -> None:
    assert released(look(make_job(in_phase(phase)), seen(*pods))) == names


def test_the_pods_of_a_job_that_is_deleted_are_released() -> None:
    pods = make_pod(0, **HELD), make_pod(1, **GOING)
    decided = look(make_job(in_phase(Phase.RUNNING), deleting=True), seen(*pods))
    assert released(decided) == ["digits-0-0", "digits-0-1"]


def test_the_success_is_written_before_the_pod_is_released() -> None:
    decided = look(make_job(in_phase(Phase.RUNNING)), seen(make_pod(0, **HELD), succeeded(1, **GOING)))
    assert (decided.status_first, decided.status.internal.succeeded_nodes) == (True, (1,))


def test_a_pod_that_is_deleted_before_it_began_is_released_and_costs_nothing() -> None:
    status = in_phase(Phase.STARTING)
    gone = make_pod(1, "Failed", began=False, held=True, deleting=True, disruption="EvictionByEvictionAPI")
    decided = look(make_job(status), seen(make_pod(0, "Pending", scheduled=True), gone))
    assert (decided.status.attempt, decided.status.disruptions) == (0, 0)
    assert released(decided) == ["digits-0-1"]
