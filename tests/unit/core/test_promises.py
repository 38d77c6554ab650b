"""Each promise is broken on purpose once, so that its check is known to be able to fail."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from promises import (
    check_attempt_on_record_first,
    check_begun_once,
    check_counted_once,
    check_final_is_final,
    check_force_is_asked_for,
    check_no_flip_flop,
    check_nothing_is_created_while_suspended,
    check_one_live_pod_each,
    check_sizes,
)
from small_cluster import Cluster
from world import Decide, World

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.values.actions import AssignPod, CreatePod, DeletePod, Plan
from ddpjob_operator.core.values.job import Job


def counts_twice(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    if decided.status.phase is not Phase.RESTARTING or not decided.status_first:
        return decided
    return replace(decided, status=decided.status.model_copy(update={"restarts": decided.status.restarts + 1}))


def names_pods_at_random(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    renamed = (
        replace(action, name=f"{action.name}-{uuid.uuid4()}") if isinstance(action, CreatePod) else action
        for action in decided.actions
    )
    return replace(decided, actions=tuple(renamed))


def acts_before_it_writes(job: Job, *rest: Any) -> Plan:
    return replace(policy.plan(job, *rest), status_first=False)


def forgets_the_end(job: Job, *rest: Any) -> Plan:
    if job.status.phase is Phase.FAILED:
        job = replace(job, status=job.status.model_copy(update={"phase": Phase.STARTING}))
    return policy.plan(job, *rest)


def starts_while_suspended(job: Job, *rest: Any) -> Plan:
    if job.status.phase is Phase.SUSPENDED:
        job = replace(job, status=job.status.model_copy(update={"phase": Phase.STARTING}))
    return policy.plan(replace(job, spec=job.spec.model_copy(update={"suspend": not job.status.phase})), *rest)


def changes_its_mind(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    if decided.actions or decided.status.phase is not Phase.RUNNING:
        return decided
    turned = 7 if job.status.observed_generation != 7 else 1
    return replace(decided, status=decided.status.model_copy(update={"observed_generation": turned}))


def deletes_by_force(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    forced = (replace(one, grace_seconds=0) if isinstance(one, DeletePod) else one for one in decided.actions)
    return replace(decided, actions=tuple(forced))


def shrinks_a_gang_that_is_not_elastic(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    if decided.status.attempt == 0:
        return decided
    smaller = decided.status.nodes.model_copy(update={"total": 1})
    return replace(decided, status=decided.status.model_copy(update={"nodes": smaller}))


def makes_a_new_pod_beside_each_that_lives_on(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    template = next((one for one in decided.actions if isinstance(one, CreatePod)), None)
    assigned = [one for one in decided.actions if isinstance(one, AssignPod)]
    if template is None:
        return decided
    extra = (
        replace(template, name=f"digits-{one.attempt}-{one.node_rank}", node_rank=one.node_rank) for one in assigned
    )
    return replace(decided, actions=(*decided.actions, *extra))


def takes_nodes_from_a_gang_that_starts(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    made = [replace(one, node_rank=None) if isinstance(one, CreatePod) else one for one in decided.actions]
    return replace(decided, actions=tuple(made))


def creates_again_what_has_failed(job: Job, observed: Any, *rest: Any) -> Plan:
    failed = [pod for pod in observed.pods if pod.termination is not None]
    decided = policy.plan(job, observed, *rest)
    begun = [action for action in decided.actions if isinstance(action, CreatePod)]
    again = [
        replace(begun[0], name=f"{pod.name}-again", attempt=pod.attempt, node_rank=pod.node_rank)
        for pod in failed
        if begun
    ]
    return replace(decided, actions=(*decided.actions, *again))


def _story(world: World) -> Cluster:
    """A lost answer while the watch stalls, a dead operator, a pod that fails; then an attempt with a user error."""
    world.operator.pods, world.operator.lose_after = (), 3
    world.look()
    world.look()
    world.operator.kill_after = 0
    for _ in range(3):
        world.look()
    for name in list(world.cluster.pods):
        world.cluster.run(name)
    for _ in range(6):
        world.look()
    for name in sorted(world.cluster.pods)[:1]:
        world.cluster.end(name, 1, "WorkerException")
    for _ in range(4):
        world.look()
        world.pass_time(1)
    for name in list(world.cluster.pods):
        world.cluster.run(name)
        world.cluster.end(name, 64, "UserError")
    for _ in range(4):
        world.look()
        world.pass_time(1)
    return world.cluster


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (counts_twice, check_counted_once),
        (names_pods_at_random, check_one_live_pod_each),
        (acts_before_it_writes, check_attempt_on_record_first),
        (forgets_the_end, check_final_is_final),
        (changes_its_mind, check_no_flip_flop),
        (deletes_by_force, check_force_is_asked_for),
        (shrinks_a_gang_that_is_not_elastic, check_sizes),
        (makes_a_new_pod_beside_each_that_lives_on, check_one_live_pod_each),
        (creates_again_what_has_failed, check_begun_once),
        (takes_nodes_from_a_gang_that_starts, check_attempt_on_record_first),
    ],
    ids=lambda value: value.__name__,
)
def test_each_promise_is_seen_to_be_broken_by_a_seeded_bug(bug: Decide, check: Callable[[Cluster], None]) -> None:
    in_place = {"restart": {"scope": "InPlace", "backoff": {"initialSeconds": 0}}}
    spec = in_place if bug is makes_a_new_pod_beside_each_that_lives_on else {}
    check(_story(World.start(**spec)))
    cluster = Cluster(World.start(**spec).cluster.job)
    with pytest.raises(AssertionError) as broken:
        check(_broken_story(cluster, bug))
    assert str(broken.value) != ""


def _broken_story(cluster: Cluster, bug: Decide) -> Cluster:
    world = World(cluster, bug)
    try:
        return _story(world)
    except AssertionError as error:
        if "did not come to rest" not in str(error):
            raise
        return cluster


def test_a_pod_that_is_created_during_a_suspension_is_seen() -> None:
    world = World.start(starts_while_suspended, suspend=True)
    for _ in range(3):
        world.look()
    with pytest.raises(AssertionError, match="was created while resumed after a suspension"):
        check_nothing_is_created_while_suspended(world.cluster)
