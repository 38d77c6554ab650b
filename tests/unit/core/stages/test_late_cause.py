"""A node that was gone is found to be the cause although the next attempt has begun, and the restart is refunded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from promises import check_history
from world import World

from ddpjob_operator.api.status import Phase
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


def test_a_deletion_that_nobody_confirms_shows_that_the_node_is_lost() -> None:
    world = node_dies()
    wait(world, 8)
    assert counted(world) == ("PeerLost", 1, 0)
    wait(world, 12)
    assert counted(world) == ("NodeLost", 0, 1)
    last = world.status.last_failure
    assert last is not None
    assert last.message.startswith(
        "node node-1 does not confirm the deletion of pod digits-0-1; at first this was Peer"
    )
    assert (last.attempt, world.status.attempt, world.status.restarts_since_progress) == (0, 1, 0)
    assert [failure.reason for failure in world.status.failures] == ["NodeLost"]
    assert world.status.node_failures == {"node-1": 1}
    check_history(world.cluster)


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
