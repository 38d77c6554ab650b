"""`forceDeleteLostPods` where no gang runs: pods on a lost node of a suspended job, of the initializers and of an
attempt that is over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import in_phase, later, make_job, make_pod, seen
from looks import look

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import DeletePod, Plan
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, PodView
from ddpjob_operator.wire.pods import parse_initializer

FORCE = {"nodeLostSeconds": 30, "forceDeleteLostPods": True}
DATA: dict[str, Any] = {"initializers": [{"name": "data", "source": "https://example.com/x", "path": "datasets/x"}]}
FETCHER = InitializerView("digits-init-0", "init-0", PodPhase.RUNNING, node_name="node-1")
SUSPENDED = look(make_job(in_phase(Phase.RUNNING), suspend=True), seen()).status


def graces(decided: Plan) -> list[tuple[str, int | None]]:
    return [(action.name, action.grace_seconds) for action in decided.actions if isinstance(action, DeletePod)]


def silent(seconds: float, **fields: Any) -> PodView:
    return make_pod(0, not_ready_since=later(-seconds), **fields)


def suspending(pod: PodView | None = None, **restart: Any) -> Plan:
    job = make_job(in_phase(Phase.RUNNING), suspend=True, restart=restart)
    return look(job, seen(*([pod] if pod else [make_pod(0), make_pod(1)])))


@pytest.mark.parametrize(
    ("pod", "restart", "expected"),
    [
        (silent(40), FORCE, [("digits-0-0", 0)]),
        (silent(40, deleting=True, gone_by=later(60)), FORCE, [("digits-0-0", 0)]),
        (silent(40, deleting=True, gone_by=later(60), forced=True), FORCE, []),
        (silent(20), FORCE, [("digits-0-0", None)]),
        (silent(40), {}, [("digits-0-0", None)]),
    ],
    ids=["lost", "lost, and asked to stop", "by force already", "not yet lost", "not asked for"],
)
def test_a_pod_that_stops_on_a_lost_node_is_deleted_by_force(
    pod: PodView, restart: dict[str, Any], expected: list[tuple[str, int | None]]
) -> None:
    assert graces(suspending(pod, **restart)) == expected


def test_the_look_at_which_it_counts_as_lost_is_not_missed() -> None:
    assert suspending(silent(20, deleting=True, gone_by=later(60)), **FORCE).requeue_after == 10


@pytest.mark.parametrize("status", [SUSPENDED, suspending().status], ids=["suspended", "about to be"])
@pytest.mark.parametrize(("silent_for", "forced"), [(40.0, True), (20.0, False)])
def test_a_pod_that_a_suspended_job_has_given_up_is_deleted_by_force_too(
    status: DDPJobStatus, silent_for: float, forced: bool
) -> None:
    stuck = silent(silent_for, deleting=True, gone_by=later(-15))
    decided = look(make_job(status, suspend=True, restart=FORCE), seen(stuck))
    assert decided.status.phase is Phase.SUSPENDED
    assert graces(decided) == ([("digits-0-0", 0)] if forced else [])
    assert decided.requeue_after == (None if forced else 10)


def test_that_a_pod_may_still_run_is_on_record_before_it_is_deleted_by_force() -> None:
    """Nothing shows it afterwards."""
    given_up = silent(40, deleting=True, gone_by=later(-15))
    decided = look(make_job(suspending().status, suspend=True, restart=FORCE), seen(given_up))
    assert graces(decided) == [("digits-0-0", 0)]
    assert decided.status_first
    found = cond.find(decided.status.conditions, cond.SUSPENDED)
    assert found is not None
    assert "may still run: digits-0-0 on " in found.message


@pytest.mark.parametrize(("restart", "grace"), [(FORCE, 0), ({}, None)])
@pytest.mark.parametrize("deleting", [False, True])
def test_so_is_that_of_the_initializers_of_a_suspended_job(
    restart: dict[str, Any], grace: int | None, deleting: bool
) -> None:
    lost = replace(FETCHER, not_ready_since=later(-40), deleting=deleting, gone_by=later(-15) if deleting else None)
    decided = look(make_job(in_phase(Phase.PENDING), suspend=True, restart=restart, **DATA), seen(initializer=lost))
    assert graces(decided) == ([] if deleting and grace is None else [("digits-init-0", grace)])


@pytest.mark.parametrize("forced", [False, True])
def test_initializers_on_a_lost_node_give_back_their_claim_before_the_next_try(forced: bool) -> None:
    """A claim that one node at a time can use is that node's until its pod is gone."""
    job = make_job(in_phase(Phase.PENDING), restart={"forceDeleteLostPods": forced}, **DATA)
    lost = replace(FETCHER, not_ready_since=later(-100))
    counted = look(job, seen(initializer=lost)).status
    assert counted.internal.initializer_disruptions == 1
    going = seen(initializer=replace(lost, deleting=True, gone_by=later(0)))
    assert graces(look(replace(job, status=counted), going)) == ([("digits-init-0", 0)] if forced else [])


def test_initializers_of_a_job_that_is_over_are_deleted_by_force_too() -> None:
    job = make_job(in_phase(Phase.FAILED, completion_time=later(0)), restart=FORCE, **DATA)
    going = replace(FETCHER, deleting=True, gone_by=later(-15))
    waiting = look(job, seen(initializer=replace(going, not_ready_since=later(-20))))
    assert (graces(waiting), waiting.requeue_after) == ([], 10)
    assert graces(look(job, seen(initializer=replace(going, not_ready_since=later(-40))))) == [("digits-init-0", 0)]


@pytest.mark.parametrize("gone_by", [-1, -15], ids=["just asked to stop", "does not confirm it"])
def test_a_backoff_is_interrupted_when_a_pod_of_the_attempt_before_counts_as_lost(gone_by: float) -> None:
    status = in_phase(Phase.RESTARTING, attempt=1, attempt_start_time=later(-1), restart_at=later(280))
    old = silent(2, deleting=True, gone_by=later(gone_by))
    decided = look(make_job(status, restart=FORCE), seen(old, attempt=1))
    assert (graces(decided), decided.requeue_after) == ([], 28)


def test_a_deletion_by_force_is_read_from_the_pod_of_the_initializers() -> None:
    labels = {"training.ddpjob.io/role": "initializer", "training.ddpjob.io/attempt": "0"}
    for grace, forced in ((0, True), (30, False)):
        metadata = {"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": grace, "labels": labels}
        view = parse_initializer({"metadata": metadata})
        assert view is not None
        assert view.forced is forced
