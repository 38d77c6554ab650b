"""Pairs of policies: deadlines, initializers, suspension, elastic size, restarts in place, a lost status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promises import (
    check_attempt_on_record_first,
    check_data_comes_first,
    check_final_is_final,
    check_force_is_asked_for,
    check_history,
    check_nothing_is_created_while_suspended,
    check_one_live_pod_each,
)
from stories import events, happen, losses, pairs
from tests.support.examples import examples
from world import World

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.values import conditions as cond

DEADLINES = {"DeadlineExceeded": "active_deadline_seconds", "StartupDeadlineExceeded": "startup_deadline_seconds"}


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, st.lists(events, max_size=30))
def test_every_promise_holds_for_every_pair_of_policies(spec: dict[str, Any], story: list[tuple[object, ...]]) -> None:
    world = World.start(**spec)
    for event in story:
        happen(world, event)
    world.finish()
    check_history(world.cluster)
    check_deadlines(world)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, st.lists(events | losses, max_size=30))
def test_a_job_whose_status_is_lost_comes_to_its_end_and_never_has_two_pods_for_one_rank(
    spec: dict[str, Any], story: list[tuple[object, ...]]
) -> None:
    world = World.start(**spec)
    for event in story:
        happen(world, event)
    ended = world.finish()
    assert ended.phase in (Phase.SUCCEEDED, Phase.FAILED)
    for check in (check_one_live_pod_each, check_final_is_final, check_force_is_asked_for,
                  check_nothing_is_created_while_suspended, check_attempt_on_record_first):  # fmt: skip
        check(world.cluster)
    if world.cluster.lost == 0:
        check_data_comes_first(world.cluster)


@pytest.mark.parametrize("elastic", [{}, {"elastic": {"minNodes": 1, "waitSeconds": 0}}], ids=["fixed", "elastic"])
@pytest.mark.parametrize("begun", [("look",), ("run all",)], ids=["its pods made", "its pods running"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_that_is_scaled_and_loses_its_status_comes_to_its_end(
    nodes: int, begun: tuple[object, ...], elastic: dict[str, Any]
) -> None:
    world = World.start(nodes=2, **elastic)
    for event in (("look",), begun, ("scale", nodes), ("lose the status",)):
        happen(world, event)
    assert world.finish().phase is Phase.SUCCEEDED
    check_one_live_pod_each(world.cluster)
    check_attempt_on_record_first(world.cluster)


def check_deadlines(world: World) -> None:
    """A job fails by a deadline that it has, and when that has passed; never while it is suspended."""
    before = DDPJobStatus()
    for status in world.cluster.statuses:
        failed = cond.find(status.conditions, cond.FAILED)
        if failed is not None and failed.status == "True" and (field := DEADLINES.get(failed.reason)):
            limit = getattr(world.cluster.job.spec, field)
            assert limit is not None, f"{failed.reason} without a limit"
            started = status.attempt_start_time or status.start_time
            begun = started if failed.reason == "StartupDeadlineExceeded" else status.start_time
            assert begun is not None
            assert status.completion_time is not None
            assert (status.completion_time - begun).total_seconds() >= limit, "it failed before its time"
            if before.phase is Phase.SUSPENDED:  # it was over before the last pod had ended
                suspended = cond.find(before.conditions, cond.SUSPENDED)
                assert suspended is not None
                active = (suspended.last_transition_time - begun).total_seconds() - before.suspended_seconds
                assert active >= limit, "a suspended job misses no deadline"
        before = status
