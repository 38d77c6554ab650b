"""What a job costs in calls, and that each of these calls can be the last before a crash."""

from __future__ import annotations

import pytest
from builders import DEFAULTS
from promises import (
    check_history,
)
from world import World

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.values.actions import (
    CreatePod,
    CreatePVC,
    CreateService,
    DeletePod,
    PointService,
    ReadLog,
    ReleasePod,
)
from ddpjob_operator.core.values.observed import Observed


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_job_that_succeeds_costs_two_calls_a_pod_and_three_status_writes(nodes: int) -> None:
    world = World.start(nodes=nodes)
    assert world.finish().phase is Phase.SUCCEEDED
    calls = [type(entry) for entry in world.cluster.history]
    assert calls.count(CreatePod) == nodes
    assert calls.count(CreateService) == calls.count(CreatePVC) == 1
    assert [status.phase for status in world.cluster.statuses] == [Phase.STARTING, Phase.RUNNING, Phase.SUCCEEDED]
    assert calls.count(ReleasePod) == nodes
    assert len(calls) == 2 * nodes + 2 + 3


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_suspension_costs_two_calls_a_pod_and_two_status_writes(nodes: int) -> None:
    world = World.start(nodes=nodes)
    world.settle()
    before = len(world.cluster.history)
    world.cluster.suspend(True)
    world.settle()
    assert world.status.phase is Phase.SUSPENDED
    calls = [type(entry) for entry in world.cluster.history[before:]]
    assert calls == [DDPJobStatus, *[DeletePod] * nodes, *[ReleasePod] * nodes, DDPJobStatus]


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_gang_restart_costs_two_calls_a_pod_and_two_more(nodes: int) -> None:
    world = World.start(nodes=nodes, restart={"backoff": {"initialSeconds": 0, "maxSeconds": 0}})
    world.settle()
    assert world.status.phase is Phase.RUNNING
    before = len(world.cluster.history)
    world.cluster.end("digits-0-0", 1, "WorkerException")
    world.look()
    # reading the log of the pod that failed changes nothing
    calls = [type(entry) for entry in world.cluster.history[before:] if not isinstance(entry, ReadLog)]
    assert calls[0] is DDPJobStatus, "the attempt is on record before anything is done"
    assert calls.count(DeletePod) == calls.count(CreatePod) == nodes
    assert calls.count(PointService) == 1
    assert len(calls) == 2 * nodes + 2
    world.settle()
    assert (world.status.phase, world.status.attempt, world.status.restarts) == (Phase.RUNNING, 1, 1)


@pytest.mark.parametrize("lose", [False, True], ids=["killed before the call", "the answer is lost"])
@pytest.mark.parametrize("call", range(18))
def test_a_restart_goes_on_where_it_stopped_after_every_single_call(call: int, lose: bool) -> None:
    world = World.start(nodes=3)
    if lose:
        world.operator.lose_after = call
    else:
        world.operator.kill_after = call
    crashed = 0
    for _ in range(3):
        before = world.operator
        world.look()
        crashed += world.operator is not before
    for name in list(world.cluster.pods):
        world.cluster.run(name)
    world.look()
    world.cluster.end("digits-0-1", 1, "WorkerException")
    for _ in range(3):
        world.look()
        world.pass_time(2)
    world.restart()
    ended = world.finish()
    check_history(world.cluster)
    assert (ended.phase, ended.attempt, ended.restarts) == (Phase.SUCCEEDED, 1, 1)


def test_an_operator_that_knows_no_service_still_points_it_at_a_gang_that_is_complete() -> None:
    world = World.start(nodes=2, restart={"backoff": {"initialSeconds": 0}})
    world.settle()
    world.cluster.end("digits-0-0", 1, "WorkerException")
    world.operator.kill_after = 2  # the log is read and the status is written, nothing else
    world.look()
    for name in ("digits-1-0", "digits-1-1"):  # all pods were made, and then the process died before the patch
        world.cluster.apply(_creation(world, name))
    world.settle()
    assert world.cluster.service is not None
    assert world.cluster.service.attempt == 1


def _creation(world: World, name: str) -> CreatePod:
    seen = Observed(tuple(world.cluster.pods.values()), world.cluster.service, pvc_exists=True)
    decided = policy.plan(world.cluster.job, seen, world.cluster.now, DEFAULTS)
    return next(action for action in decided.actions if isinstance(action, CreatePod) and action.name == name)


def test_a_quota_that_ends_at_the_third_of_eight_pods_gives_the_gang_back_and_tries_again_ever_more_rarely() -> None:
    world = World.start(nodes=8)
    world.cluster.quota = 3
    held = 0
    for _ in range(200):
        world.look()
        held += bool(world.cluster.pods)
        world.pass_time(3)
    (degraded,) = (condition for condition in world.status.conditions if condition.type == "Degraded")
    assert (degraded.reason, degraded.status) == ("QuotaExceeded", "True")
    assert (world.status.phase, world.status.restarts, world.status.disruptions) == (Phase.STARTING, 0, 0)
    assert held < 20, "what a try makes is gone by the next look"
    assert 13 <= world.status.attempt <= 18, "six tries in the first minute, then one a minute: room may come any time"
    world.cluster.quota = None
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.status.retry_at is None
    assert not any(condition.type == "Degraded" and condition.status == "True" for condition in world.status.conditions)
    check_history(world.cluster)
