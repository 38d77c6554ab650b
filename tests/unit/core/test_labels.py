"""Labels are hints: what becomes of pods whose labels the status does not account for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import NOW, UID, in_phase, make_job, make_pod, seen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from looks import GANG, RUNNING, STARTING, created, deleted, look
from promises import check_attempt_on_record_first, check_final_is_final, check_force_is_asked_for
from small_cluster import Cluster
from stories import events, forgeries, happen, specs
from tests.support.examples import examples
from world import World

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.values.observed import NO_ATTEMPT

FORGED = replace(make_pod(1), attempt=11)
BARE = replace(make_pod(1), attempt=NO_ATTEMPT, node_rank=None)


def test_one_forged_attempt_costs_one_restart_and_no_job() -> None:
    decided = look(make_job(RUNNING, restart={"maxRestarts": 3}), seen(make_pod(0), FORGED))
    assert (decided.status.phase, decided.status.restarts) == (Phase.RESTARTING, 1)
    assert sorted(deleted(decided)) == ["digits-0-0", "digits-0-1"]


def test_the_next_attempt_is_greater_than_that_of_any_pod() -> None:
    """A pod that read its attempt from a forged label may have claimed the volume for it."""
    assert look(make_job(RUNNING), seen(make_pod(0), FORGED)).status.attempt == 12


@pytest.mark.parametrize(
    "stray",
    [BARE, replace(BARE, name="else"), make_pod(7), make_pod(1, attempt=3), replace(make_pod(1), name="else", uid="e")],
    ids=["no labels", "no labels, another name", "a rank beyond the size", "a newer attempt", "the same rank again"],
)
@pytest.mark.parametrize(
    "status",
    [STARTING, RUNNING, in_phase(Phase.SUSPENDED), in_phase(Phase.FAILED, completion_time=NOW)],
    ids=lambda status: status.phase,
)
def test_a_pod_that_the_status_does_not_account_for_is_deleted_in_every_phase(status: Any, stray: Any) -> None:
    stray = replace(stray, uid="stray", name=stray.name if stray.name == "else" else "stray")
    job = make_job(status, suspend=status.phase is Phase.SUSPENDED)
    pods = GANG if status.phase in (Phase.STARTING, Phase.RUNNING) else ()
    decided = look(job, seen(*pods, stray))
    assert deleted(decided) == [stray.name]
    assert decided.status.restarts == 0


def test_nothing_is_done_about_pods_newer_than_the_status_before_that_is_known_to_be_current() -> None:
    """What was seen of the job may be older than what was seen of its pods: they may be the gang of today."""
    newer = tuple(replace(pod, attempt=1) for pod in GANG)
    for status in (STARTING, RUNNING, in_phase(Phase.SUSPENDED)):
        assert look(make_job(status), seen(*newer)).confirm_first
    assert not look(make_job(STARTING), seen(*GANG)).confirm_first


def test_a_process_that_has_only_seen_a_job_in_a_list_confirms_its_status_before_it_touches_pods() -> None:
    """Unless it writes the status before: that is refused if it is old."""
    listed = replace(seen(GANG[0]), status_confirmed=False)
    assert look(make_job(STARTING), listed).actions
    assert look(make_job(STARTING), listed).confirm_first
    assert not look(make_job(STARTING), seen(GANG[0])).confirm_first
    begun = look(make_job(), listed)
    assert (begun.status_first, begun.confirm_first) == (True, False)
    without_service = look(make_job(), replace(listed, pods=(), service=None))
    assert without_service.actions
    assert not without_service.confirm_first, "what is created twice is created once"


def test_an_operator_with_an_old_picture_of_the_job_leaves_its_new_gang_alone() -> None:
    world = World.start(nodes=2)
    world.settle()
    old = (world.cluster.job, world.cluster.version)
    world.cluster.end("digits-0-0", 1, "WorkerException")
    world.settle()
    assert (world.status.phase, world.status.attempt) == (Phase.RUNNING, 1)
    before = len(world.cluster.history)
    world.restart()
    world.operator.job = old
    world.look()
    assert world.cluster.history[before:] == []


def test_an_attempt_is_taken_from_labels_only_where_none_is_on_record() -> None:
    pods = seen(*(make_pod(rank, attempt=3) for rank in (0, 1)), attempt=3)
    assert look(make_job(), pods).status.attempt == 3
    for phase in (Phase.PENDING, Phase.STARTING):
        assert look(make_job(in_phase(phase)), pods).status.attempt == 0


def test_an_attempt_that_was_taken_from_labels_is_on_record_before_anything_is_done() -> None:
    decided = look(make_job(), seen(make_pod(0, attempt=3), attempt=3))
    assert decided.status_first
    assert created(decided) == ["digits-3-1"]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, st.lists(events | forgeries, max_size=25))
@example(
    spec={"nodes": 1, "restart": {"maxRestarts": 4, "scope": "InPlace"}, "spares": 1},
    story=[("look",), ("label", 0, 0, None)],
)
def test_a_job_comes_to_its_end_whatever_somebody_does_to_its_labels(
    spec: dict[str, Any], story: list[tuple[object, ...]]
) -> None:
    world = World.start(**spec)
    for event in story:
        happen(world, event)
    assert world.finish().phase in (Phase.SUCCEEDED, Phase.FAILED)
    for check in (check_final_is_final, check_force_is_asked_for, check_attempt_on_record_first):
        check(world.cluster)
    assert_no_strays(world.cluster)


def assert_no_strays(cluster: Cluster) -> None:
    """What runs on after the job is over is what `cleanPodPolicy` keeps: nothing."""
    assert [pod.name for pod in cluster.pods.values() if not pod.ended] == []
    assert cluster.job.uid == UID
