"""Whole jobs in a cluster in memory: what is promised holds for every order of events, crashes and clocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from promises import (
    check_final_is_final,
    check_history,
)
from small_cluster import NODES
from stories import events, happen, specs
from tests.support.examples import examples
from world import World

from ddpjob_operator.api.status import Phase


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, st.lists(events, max_size=40))
@example(
    {"nodes": 1, "restart": {"maxRestarts": 4}, "initializers": [{"name": "data", "script": "true", "path": "data"}]},
    [("look",), ("suspend", True), ("fetch", 0), ("delete fetcher",)],
)
@example(  # a try whose failure is on record, in a job that is older
    {"nodes": 1, "restart": {"maxRestarts": 4}, "initializers": [{"name": "data", "script": "true", "path": "data"}]},
    [("look",), ("fetch", 1), ("another operator starts from an old job",)],
)
@example(  # an operator that has just started replaces a pod while the others train on
    {"nodes": 2, "restart": {"maxRestarts": 4, "nodeLostSeconds": 0, "scope": "Live"}},
    [("look",), ("run all",), ("kill", 0), ("evict", 0)],
)
@example(  # a pod that vanishes again waits to be created, and the spec is edited meanwhile
    {"nodes": 2, "restart": {"maxRestarts": 4, "nodeLostSeconds": 0}},
    [("look",), ("delete", 1, 0), ("delete", 1, 0), ("save every", "5steps"), ("clock", 5.0)],
)
def test_every_promise_holds_whatever_happens_and_in_whatever_order(
    spec: dict[str, Any], story: list[tuple[object, ...]]
) -> None:
    world = World.start(**spec)
    for event in story:
        happen(world, event)
    world.finish()
    check_history(world.cluster)
    ended, calls = world.status, len(world.cluster.history)
    world.restart()
    world.look()
    assert world.status == ended
    assert len(world.cluster.history) == calls, "a job that is over costs nothing"


@settings(max_examples=examples(75), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25))
def test_a_job_that_is_suspended_gives_back_every_node_and_loses_no_budget(story: list[tuple[object, ...]]) -> None:
    world = World.start(nodes=2, restart={"maxRestarts": 4})
    for event in story:
        happen(world, event)
    world.operator.undisturbed()
    world.cluster.mend()
    world.look()
    world.cluster.suspend(True)
    world.look()
    spent = world.status.restarts
    world.settle()
    if world.status.phase in (Phase.SUCCEEDED, Phase.FAILED):
        return
    assert world.status.phase is Phase.SUSPENDED
    assert world.cluster.pods == {}
    assert world.finish().restarts == spent


@settings(max_examples=examples(75), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25), st.sampled_from(("activeDeadlineSeconds", "startupDeadlineSeconds")))
@example(  # pods that end while the watch stalls are deleted as pods that run
    [("look",), ("run all",), ("watch stalls",), ("end all",), ("clock", 120.0)], "activeDeadlineSeconds"
)
@example(  # a problem that comes and goes twice with the pod that has it
    [("look",), ("schedule", 1), ("clock", 5.0), ("delete", 1, 0), ("schedule", 1), ("run", 1)],
    "activeDeadlineSeconds",
)
def test_no_job_outlives_its_deadline_and_none_fails_before_it(story: list[tuple[object, ...]], which: str) -> None:
    limit = 100
    world = World.start(nodes=2, restart={"maxRestarts": 4}, **{which: limit})
    for event in story:
        happen(world, event)
    world.operator.undisturbed()
    for node in NODES:  # a pod that is being deleted ends with its node alone
        world.cluster.come_back(node)
    world.cluster.suspend(False)
    for _ in range(4):  # to its end, if it was being suspended, and into its next attempt
        world.look()
        for name in [name for name, pod in world.cluster.pods.items() if pod.deleting]:
            world.cluster.reap(name)
    if world.status.phase is Phase.RUNNING and which == "startupDeadlineSeconds":
        return
    world.pass_time(1e6)  # more than any story sets the clock back
    world.look()
    after = world.status
    assert after.phase in (Phase.SUCCEEDED, Phase.FAILED)
    failed = next((c for c in after.conditions if c.type == "Failed" and c.status == "True"), None)
    if failed is not None and failed.reason == "DeadlineExceeded":
        assert after.start_time is not None
        assert after.completion_time is not None
        assert (after.completion_time - after.start_time).total_seconds() >= limit + after.suspended_seconds
    check_history(world.cluster)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25))
@example(  # the watch does not tell of the deletion
    [("look",), ("run", 0), ("end", 0, (64, "UserError"), 0.0), ("watch of the job stalls",), ("clock", 120.0)]
)
def test_a_job_is_deleted_once_and_not_before_its_time_to_live_is_up(story: list[tuple[object, ...]]) -> None:
    ttl = 60
    world = World.start(nodes=2, restart={"maxRestarts": 4}, ttlSecondsAfterFinished=ttl)
    for event in story:
        happen(world, event)
    world.cluster.quota = None
    world.finish()
    world.pass_time(1e6)
    for _ in range(3):
        world.look()
    (deleted,) = world.cluster.deleted
    assert world.status.completion_time is not None
    assert (deleted - world.status.completion_time).total_seconds() >= ttl
    check_final_is_final(world.cluster)


@pytest.mark.fault(14)
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_by_an_hour_delays_no_restart_beyond_its_longest_wait(jump: float) -> None:
    world = World.start(nodes=2, restart={"backoff": {"initialSeconds": 10, "maxSeconds": 40}})
    world.look()
    for name in list(world.cluster.pods):
        world.cluster.run(name)
    world.look()
    world.cluster.end("digits-0-1", 1, "WorkerException")
    world.look()
    assert (world.status.phase, world.status.restarts) == (Phase.RESTARTING, 1)
    world.pass_time(jump)
    for _ in range(40):
        world.look()
        if {"digits-1-0", "digits-1-1"} <= world.cluster.pods.keys():
            break
        for name in [name for name, pod in world.cluster.pods.items() if pod.deleting]:
            world.cluster.reap(name)
        world.pass_time(1)
    else:
        raise AssertionError(f"no pods within 40 s: {world.status}")
    assert world.status.restarts == 1
