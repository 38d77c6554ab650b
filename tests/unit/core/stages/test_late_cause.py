"""A node that was gone is found to be the cause although the next attempt has begun, and the restart is refunded."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from promises import check_history
from world import World

from ddpjob_operator.api.status import FailureStatus, Phase
from ddpjob_operator.core.values.observed import PodPhase, Termination


def node_dies(**restart: object) -> World:
    """The node of node rank 1 loses power, and node rank 0 its peer; nothing else is known yet."""
    world = World.start(nodes=2, restart={"maxRestarts": 3, "nodeLostSeconds": 10} | restart)
    world.settle()
    world.cluster.silent.add(world.cluster.pods["digits-0-1"].node_name or "")
    world.cluster.end("digits-0-0", 1, "PeerLost")
    return world


def wait(world: World, seconds: float) -> None:
    """Look as often as the operator wants to."""
    until = world.cluster.now.timestamp() + seconds
    while world.cluster.now.timestamp() < until:
        world.look()
        world.pass_time(min(1.0, world.operator.wait or 1.0))
    world.look()


def counted(world: World) -> tuple[str | None, int, int]:
    last = world.status.last_failure
    return (last.reason if last else None, world.status.restarts, world.status.disruptions)


def test_a_node_that_is_marked_after_a_deletion_that_it_does_not_confirm_is_lost() -> None:
    world = node_dies()
    wait(world, 38)
    assert counted(world) == ("PeerLost", 1, 0), "a kubelet that lives may take as long"
    world.cluster.fall_silent("node-1")
    world.look()
    assert counted(world) == ("NodeLost", 0, 1)
    last = world.status.last_failure
    assert last is not None
    assert last.message.startswith("node node-1 is NotReady since")
    assert "; at first this was PeerLost" in last.message
    assert (last.attempt, world.status.attempt, world.status.restarts_since_progress) == (0, 1, 0)
    assert [failure.reason for failure in world.status.failures] == ["NodeLost"]
    assert world.status.node_failures == {"node-1": 1}
    check_history(world.cluster)


def test_a_deletion_for_a_taint_that_nobody_confirms_shows_that_the_node_is_lost() -> None:
    """Of a pod that is not ready for another reason its node shows nothing else."""
    world = node_dies()
    wait(world, 38)
    world.cluster.pods["digits-0-1"] = replace(world.cluster.pods["digits-0-1"], disruption="DeletionByTaintManager")
    world.look()
    assert counted(world) == ("NodeLost", 0, 1)
    assert "node node-1 does not confirm the deletion" in (world.status.last_failure or FailureStatus()).message


def next_pods_are_bound(world: World) -> None:
    """Kubernetes does not know yet that the node is gone, and places a pod of the next attempt there."""
    world.cluster.reap("digits-0-0")
    wait(world, 1)
    world.cluster.schedule("digits-1-0", "node-0")
    world.cluster.run("digits-1-0")
    world.cluster.schedule("digits-1-1", "node-1")


def test_a_pod_on_a_node_that_confirms_no_deletion_is_not_waited_for() -> None:
    world = node_dies(nodeLostSeconds=30)
    wait(world, 7)
    next_pods_are_bound(world)
    wait(world, 12)
    assert (*counted(world), world.status.attempt) == ("NodeLost", 0, 2, 2)
    assert "has not begun to start it" in (world.status.last_failure or FailureStatus()).message
    check_history(world.cluster)


def test_a_restart_is_taken_back_before_another_one_is_counted() -> None:
    world = node_dies(nodeLostSeconds=30)
    wait(world, 7)
    next_pods_are_bound(world)
    world.pass_time(15)
    wait(world, 2)  # both are seen by the same look
    counts = [(status.attempt, status.restarts, status.disruptions) for status in world.cluster.statuses]
    assert [count for count, _ in groupby(counts)][-3:] == [(1, 1, 0), (1, 0, 1), (2, 0, 2)]
    refunded = [(status.attempt, status.internal.refunded_restarts) for status in world.cluster.statuses]
    assert [count for count, _ in groupby(refunded)][-3:] == [(1, None), (1, 1), (2, 1)], "it is kept on record"


def test_the_pods_that_follow_keep_away_from_that_node_until_it_answers() -> None:
    world = node_dies(nodeLostSeconds=30)
    wait(world, 7)
    next_pods_are_bound(world)
    wait(world, 15)
    following = ("digits-2-0", "digits-2-1")
    assert all(world.cluster.avoids[world.cluster.pods[name].uid] == {"node-1"} for name in following)
    world.cluster.capacity = 2  # there is room for one of them
    world.cluster.run("digits-2-0")
    world.cluster.reap("digits-1-0")  # node-0 answers
    wait(world, 60)
    assert world.status.attempt == 2, "no other node is free: it waits for one"
    world.cluster.come_back("node-1")
    world.cluster.capacity = None
    world.settle()
    assert (world.status.phase, world.status.attempt, world.status.restarts) == (Phase.RUNNING, 3, 0)
    check_history(world.cluster)


def test_a_node_that_confirms_the_deletion_gets_its_time() -> None:
    world = node_dies(nodeLostSeconds=30)
    wait(world, 7)
    next_pods_are_bound(world)
    world.cluster.silent.clear()
    world.cluster.reap("digits-0-1")
    wait(world, 15)
    assert (*counted(world), world.status.attempt) == ("PeerLost", 1, 0, 1)


def test_a_restarted_node_is_no_fault_of_the_job() -> None:
    world = node_dies()
    wait(world, 8)
    world.cluster.silent.clear()
    pod = world.cluster.pods["digits-0-1"]
    ended = Termination(255, reason="Unknown", finished_at=world.cluster.now)
    world.cluster.pods["digits-0-1"] = replace(pod, phase=PodPhase.FAILED, exited=True, termination=ended)
    world.look()
    assert counted(world) == ("NodeRebooted", 0, 1)
    assert world.status.node_failures == {}


def test_a_peer_that_was_lost_on_a_node_that_answers_is_charged() -> None:
    world = node_dies()
    world.cluster.silent.clear()
    wait(world, 8)
    world.cluster.reap("digits-0-1")
    wait(world, 60)
    assert counted(world) == ("PeerLost", 1, 0)


def test_what_a_rule_of_the_job_decided_is_not_refunded() -> None:
    world = node_dies(rules=[{"action": "Restart", "reasons": ["PeerLost"]}])
    wait(world, 20)
    world.cluster.fall_silent("node-1")
    world.look()
    assert counted(world) == ("NodeLost", 1, 0)


def test_a_job_is_not_given_up_for_a_peer_while_its_node_may_be_gone() -> None:
    world = node_dies(maxRestarts=0)
    wait(world, 40)
    assert world.status.phase is Phase.RUNNING
    world.cluster.fall_silent("node-1")
    wait(world, 11)
    assert (world.status.phase, *counted(world)) == (Phase.RESTARTING, "NodeLost", 0, 1)


@pytest.mark.parametrize("rules", [[], [{"action": "Fail", "reasons": ["PeerLost"]}]], ids=["the budget", "a rule"])
def test_a_job_is_given_up_for_a_peer_whose_node_answers(rules: list[object]) -> None:
    world = node_dies(maxRestarts=0, rules=rules)
    wait(world, 10 if rules else 61)
    assert (world.status.phase, *counted(world)) == (Phase.FAILED, "PeerLost", 0, 0)
