"""Whole lives of a job in a cluster in memory: what is promised holds for every order of events, crashes and clocks."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promises import (
    check_attempt_on_record_first,
    check_counted_once,
    check_final_is_final,
    check_force_is_asked_for,
    check_history,
    check_no_flip_flop,
    check_nothing_is_created_while_suspended,
    check_one_live_pod_each,
    check_sizes,
)
from world import NODES, Cluster, Decide, World

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.model import (
    AssignPod,
    CreateClaim,
    CreatePod,
    CreateService,
    DeletePod,
    Job,
    Observed,
    Plan,
    PointService,
    ReadLog,
)

ENDINGS = (
    (0, "Completed"),
    (1, "WorkerException"),
    (1, "PeerLost"),
    (1, "RendezvousFailed"),
    (64, "UserError"),
    (77, "Fenced"),
    (137, ""),
    (143, "Preempted"),
)

events = st.one_of(
    st.tuples(st.just("look")),
    st.tuples(st.just("run"), st.integers(0, 9)),
    st.tuples(st.just("schedule"), st.integers(0, 9)),
    st.tuples(st.just("run all")),
    st.tuples(st.just("hear"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(ENDINGS), st.sampled_from((0.0, -3600.0, 3600.0))),
    st.tuples(st.just("end all")),
    st.tuples(st.just("evict"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(0, 9), st.sampled_from((0, 2, 60))),
    st.tuples(st.just("reap"), st.integers(0, 9)),
    st.tuples(st.just("clock"), st.sampled_from((0.1, 1.0, 5.0, 120.0, 3600.0, -3600.0))),
    st.tuples(st.just("kill"), st.integers(0, 6)),
    st.tuples(st.just("lose"), st.integers(0, 6)),
    st.tuples(st.just("watch stalls")),
    st.tuples(st.just("watch catches up")),
    st.tuples(st.just("edit"), st.sampled_from(("a", "b")), st.integers(1, 3)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("scale"), st.integers(1, 4)),
    st.tuples(st.just("capacity"), st.sampled_from((0, 1, 2, 3, None))),
    st.tuples(st.just("save")),
    st.tuples(st.just("silence"), st.sampled_from(NODES)),
    st.tuples(st.just("come back"), st.sampled_from(NODES)),
    st.tuples(st.just("quota"), st.sampled_from((0, 1, None))),
    st.tuples(st.just("fetch"), st.sampled_from((0, 1, 64))),
    st.tuples(st.just("delete fetcher")),
)

restarts = {"maxRestarts": st.just(4), "nodeLostSeconds": st.sampled_from((0, 4))}
force = {"forceDeleteLost": st.just(True)}
sizes = {"nodes": st.integers(1, 3)}
data = {"initializers": st.just([{"name": "data", "script": "true", "path": "data"}])}
gang = {"scheduling": st.fixed_dictionaries({"gang": st.just("Volcano")}, optional={"timeoutSeconds": st.just(20)})}
elastic = {"elastic": st.fixed_dictionaries({"minNodes": st.just(1), "waitSeconds": st.sampled_from((0, 6))})}
specs = st.one_of(
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts, optional=force)}, optional=elastic | data | gang
    ),
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts | {"scope": st.just("InPlace")}, optional=force)},
        optional=elastic | data | gang | {"spares": st.integers(1, 2)},
    ),
)


def happen(world: World, event: tuple[object, ...]) -> None:
    """One event, followed by the look at the job that it causes."""
    cluster, operator = world.cluster, world.operator
    names = sorted(cluster.pods)
    match event:
        case ("run", int(index)) if names:
            cluster.run(names[index % len(names)])
        case ("schedule", int(index)) if names:
            cluster.schedule(names[index % len(names)])
        case ("hear", int(index)) if names:
            cluster.hear(names[index % len(names)])
        case ("run all",):
            for name in names:
                cluster.run(name)
        case ("end", int(index), (int(code), str(reason)), float(skew)) if names:
            cluster.end(names[index % len(names)], code, reason, skew=skew)
        case ("evict", int(index)) if names:
            cluster.evict(names[index % len(names)])
        case ("end all",):
            for name in names:
                cluster.end(name, 0, "Completed")
        case ("delete", int(index), int(grace)) if names:
            cluster.delete(names[index % len(names)], grace)
        case ("reap", int(index)) if names:
            cluster.reap(names[index % len(names)])
        case ("clock", float(seconds)):
            world.pass_time(seconds)
        case ("kill", int(calls)):
            operator.kill_after = calls
        case ("lose", int(calls)):
            operator.lose_after = calls
        case ("watch stalls",):
            operator.pods = tuple(cluster.pods.values())
        case ("watch catches up",):
            operator.pods = None
        case ("edit", str(argument), int(nodes)):
            cluster.edit(args=[argument], nodes=nodes)
        case ("suspend", bool(suspended)):
            cluster.suspend(suspended)
        case ("scale", int(nodes)):
            cluster.edit(nodes=nodes)
        case ("capacity", pods):
            cluster.capacity = pods  # type: ignore[assignment]
        case ("save",):
            cluster.save()
        case ("silence", str(node)):
            cluster.fall_silent(node)
        case ("come back", str(node)):
            cluster.come_back(node)
        case ("fetch", int(code)):
            cluster.fetch(code)
        case ("delete fetcher",) if cluster.fetchers:
            cluster.delete_fetcher(max(cluster.fetchers))
        case ("quota", pods):
            cluster.quota = pods  # type: ignore[assignment]
    world.look()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, st.lists(events, max_size=40))
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


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25))
def test_a_job_that_is_suspended_gives_back_every_node_and_loses_no_budget(story: list[tuple[object, ...]]) -> None:
    world = World.start(nodes=2, restart={"maxRestarts": 4})
    for event in story:
        happen(world, event)
    world.operator.kill_after = world.operator.lose_after = world.operator.pods = None
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


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25), st.sampled_from(("activeDeadlineSeconds", "startupDeadlineSeconds")))
def test_no_job_outlives_its_deadline_and_none_fails_before_it(story: list[tuple[object, ...]], which: str) -> None:
    limit = 100
    world = World.start(nodes=2, restart={"maxRestarts": 4}, **{which: limit})
    for event in story:
        happen(world, event)
    world.operator.kill_after = world.operator.lose_after = world.operator.pods = None
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


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25))
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


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_job_that_succeeds_costs_one_create_a_pod_and_three_status_writes(nodes: int) -> None:
    world = World.start(nodes=nodes)
    assert world.finish().phase is Phase.SUCCEEDED
    calls = [type(entry) for entry in world.cluster.history]
    assert calls.count(CreatePod) == nodes
    assert calls.count(CreateService) == calls.count(CreateClaim) == 1
    assert [status.phase for status in world.cluster.statuses] == [Phase.STARTING, Phase.RUNNING, Phase.SUCCEEDED]
    assert len(calls) == nodes + 2 + 3


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_suspension_costs_a_delete_a_pod_and_two_status_writes(nodes: int) -> None:
    world = World.start(nodes=nodes)
    world.settle()
    before = len(world.cluster.history)
    world.cluster.suspend(True)
    world.settle()
    assert world.status.phase is Phase.SUSPENDED
    calls = [type(entry) for entry in world.cluster.history[before:]]
    assert calls == [DDPJobStatus, *[DeletePod] * nodes, DDPJobStatus]


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
    seen = Observed(tuple(world.cluster.pods.values()), world.cluster.service, claim_exists=True)
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
    assert (world.status.phase, world.status.restarts) == (Phase.STARTING, 0)
    assert held < 20, "ten minutes take a dozen tries, and what each of them makes is gone by the next look"
    assert world.status.attempt < 12
    world.cluster.quota = None
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.status.retry_at is None
    assert not any(condition.type == "Degraded" and condition.status == "True" for condition in world.status.conditions)
    check_history(world.cluster)


# Each promise is broken on purpose once, so that its check is known to be able to fail.


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
    smaller = decided.status.nodes.model_copy(update={"total": 1, "summary": "0/1"})
    return replace(decided, status=decided.status.model_copy(update={"nodes": smaller}))


def makes_a_new_pod_beside_each_that_lives_on(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    template = next((one for one in decided.actions if isinstance(one, CreatePod)), None)
    told = [one for one in decided.actions if isinstance(one, AssignPod)]
    if template is None:
        return decided
    extra = (replace(template, name=f"digits-{one.attempt}-{one.node_rank}", node_rank=one.node_rank) for one in told)
    return replace(decided, actions=(*decided.actions, *extra))


def takes_nodes_from_a_gang_that_starts(job: Job, *rest: Any) -> Plan:
    decided = policy.plan(job, *rest)
    made = [replace(one, node_rank=None) if isinstance(one, CreatePod) else one for one in decided.actions]
    return replace(decided, actions=tuple(made))


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
    world.cluster.end(sorted(world.cluster.pods)[0], 1, "WorkerException")
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
    with pytest.raises(AssertionError, match="was created while the job was suspended"):
        check_nothing_is_created_while_suspended(world.cluster)
