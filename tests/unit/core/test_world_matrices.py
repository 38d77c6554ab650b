"""Two matrices: a node that loses its power, under each policy; and each child that somebody deletes, in each phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import heard
from promises import check_history
from small_cluster import Cluster
from world import World

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.observed import Termination

GRACE = 40.0
"""Seconds until the control plane calls a silent node NotReady: Kubernetes' default, 50 since 1.32."""
LOOK_SECONDS = 5.0
LONGEST = {"exit": 20.0, "wait": GRACE + 20.0, "hang": GRACE + 40.0}
"""Until the gang runs again. A survivor that exits is news at once. Of ranks that say that they wait, a node that is
NotReady is lost after 10 s; of ranks that say nothing, after nodeLostSeconds, 30 s.
"""


@pytest.mark.fault(24)
@pytest.mark.parametrize("back", [5.0, None], ids=["back after 5 s", "never back"])
@pytest.mark.parametrize("elastic", [{}, {"elastic": {"minNodes": 1, "waitSeconds": 10}}], ids=["fixed", "elastic"])
@pytest.mark.parametrize(
    ("scope", "survivors"),
    [("Gang", "exit"), ("Gang", "wait"), ("Gang", "hang"), ("InPlace", "wait"), ("InPlace", "hang")],
)
def test_a_gang_runs_again_in_time_after_a_node_has_lost_its_power(
    scope: str, survivors: str, elastic: dict[str, Any], back: float | None
) -> None:
    world = World.start(nodes=2, restart={"scope": scope}, **elastic)
    world.settle()
    cluster = world.cluster
    lost, began = str(cluster.pods["digits-0-1"].node_name), cluster.now
    cluster.die(lost)
    if survivors == "exit":
        cluster.end("digits-0-0", 1, "PeerLost")
    until = max(LONGEST[survivors], GRACE) + LOOK_SECONDS  # whose fault it was shows once the node is NotReady
    while (seconds := (cluster.now - began).total_seconds()) <= until:
        if survivors == "wait" and world.status.attempt == 0:
            cluster.report = heard(phase="waiting", phaseSeconds=seconds, time=cluster.now.timestamp())
        if back is not None and seconds >= back and lost in cluster.silent:
            cluster.come_back(lost)
            forget(cluster, "digits-0-1")
        if back is None and seconds >= GRACE and lost not in cluster.not_ready:
            cluster.fall_silent(lost)
        a_moment(world)
        world.pass_time(LOOK_SECONDS)
    running = cond.find(world.status.conditions, cond.RUNNING)
    assert running is not None
    assert (world.status.phase, running.status) == (Phase.RUNNING, "True"), world.status
    assert (world.status.attempt, world.status.restarts, world.status.disruptions) == (1, 0, 1), "no fault of the job"
    assert (running.last_transition_time - began).total_seconds() <= LONGEST[survivors]
    assert world.finish().phase is Phase.SUCCEEDED
    check_history(cluster)


def forget(cluster: Cluster, name: str) -> None:
    """A kubelet comes back after a reboot, and its runtime does not know the container any more."""
    if name in cluster.pods and not cluster.pods[name].ended:
        cluster.end(name, 255)
        ended = replace(cluster.pods[name], termination=Termination(255, reason="Unknown"))
        cluster.pods[name] = ended


def a_moment(world: World) -> None:
    """What operator, scheduler and kubelets do at once."""
    for _ in range(20):
        before = len(world.cluster.history)
        world.look()
        for name in list(world.cluster.pods):
            if world.cluster.is_stopping(name):
                world.cluster.reap(name)
            elif world.cluster.can_run(name):
                world.cluster.run(name)
            if name in world.cluster.pods:
                world.cluster.hear(name)
        if len(world.cluster.history) == before:
            return


def delete_child(world: World, kind: str) -> None:
    if kind == "Service":
        world.cluster.service = world.operator.service = None
    elif kind == "claim":
        world.cluster.claim = False
    else:
        world.cluster.pod_groups.clear()


@pytest.mark.parametrize("phase", ["Starting", "Running", "Restarting", "Suspended"])
@pytest.mark.parametrize("kind", ["Service", "claim", "PodGroup"])
def test_a_child_that_is_deleted_in_any_phase_is_there_again_for_the_next_gang(kind: str, phase: str) -> None:
    world = World.start(nodes=2, scheduling={"gang": "Volcano"})
    world.look()
    if phase != "Starting":
        world.settle()
    if phase == "Restarting":
        world.cluster.end("digits-0-1", 1, "WorkerException")
        world.look()
    if phase == "Suspended":
        world.cluster.suspend(True)
        world.settle()
    assert world.status.phase == phase
    delete_child(world, kind)
    if phase == "Suspended":
        world.cluster.suspend(False)
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.cluster.lacks() == []
    world.cluster.end(f"digits-{world.status.attempt}-0", 137, "WorkerKilled")
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.finish().phase is Phase.SUCCEEDED
