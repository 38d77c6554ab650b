"""What the decision makes of an edited spec: a gang is made from one spec, whatever is changed meanwhile."""

from __future__ import annotations

import pytest
from builders import (
    NOW,
    failed,
    in_phase,
    make_job,
    make_pod,
    seen,
)
from looks import GANG, RUNNING, SNAPSHOT, condition, created, deleted, look
from world import World

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreatePod
from ddpjob_operator.core.values.job import Job


def edited(status: DDPJobStatus, **spec: object) -> Job:
    return make_job(status, generation=2, **spec)


@pytest.mark.fault(17)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
@pytest.mark.parametrize("pods", [(), (make_pod(0, "Pending"),)], ids=["no pod is there", "one pod is there"])
def test_an_incomplete_gang_is_not_completed_from_another_spec(phase: Phase, pods: tuple[object, ...]) -> None:
    decided = look(edited(in_phase(phase), nodes=3), seen(*pods))  # type: ignore[arg-type]
    after = decided.status
    assert (after.attempt, after.restarts, after.nodes.total) == (1, 0, 3)
    assert decided.status_first
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert deleted(decided) == (["digits-0-0"] if pods else [])


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING])
def test_a_complete_gang_goes_on_as_it_was_started(phase: Phase, nodes: int) -> None:
    decided = look(edited(in_phase(phase), nodes=nodes), seen(*GANG))
    assert decided.actions == ()
    assert decided.status.phase is Phase.RUNNING
    assert decided.status.nodes == NodeCount(ready=2, total=2)
    assert condition(decided.status, cond.DEGRADED) == ("True", "SpecChanged")


@pytest.mark.fault(17)
def test_the_next_attempt_uses_the_new_spec_throughout() -> None:
    decided = look(
        edited(RUNNING.model_copy(update={"snapshot": SNAPSHOT}), nodes=3), seen(make_pod(0), failed(1, 137))
    )
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert condition(decided.status, cond.DEGRADED) is None
    assert look(edited(decided.status, nodes=3), seen(attempt=1)).status.phase is Phase.RESTARTING


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.RESTARTING])
def test_an_elastic_gang_that_has_shrunk_goes_on_without_a_record_of_its_spec(phase: Phase) -> None:
    """Another version may have kept it elsewhere."""
    status = in_phase(phase, nodes=2, spec_digests=None, attempt_start_time=NOW)
    decided = look(make_job(status, nodes=3, elastic={"minNodes": 1}), seen(*GANG))
    assert (decided.status.phase, decided.status.attempt, decided.status.restarts) == (Phase.RUNNING, 0, 0)
    assert decided.status.nodes == NodeCount(ready=2, total=2)
    assert deleted(decided) == []


def test_an_edit_that_is_taken_back_leaves_nothing_behind() -> None:
    degraded = look(edited(RUNNING, args=["--x"]), seen(*GANG)).status
    after = look(make_job(degraded, generation=3), seen(*GANG)).status
    assert condition(after, cond.DEGRADED) == ("False", "AsExpected")
    assert after.observed_generation == 3


def test_what_may_change_while_running_disturbs_nothing() -> None:
    job = edited(RUNNING, restart={"maxRestarts": 99}, snapshots={"every": "5steps"})
    decided = look(job, seen(*GANG))
    assert decided.actions == ()
    assert decided.status.conditions == ()
    assert decided.status.observed_generation == 2


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED])
def test_every_condition_is_of_the_generation_that_was_looked_at(phase: Phase) -> None:
    """`kubectl wait` and Flux take none for met that is older."""
    held = cond.Update(cond.SCHEDULED, True, "AllScheduled")
    before = in_phase(phase, conditions=cond.set_condition((), held, NOW, 1))
    job = edited(before, suspend=phase is Phase.SUSPENDED, restart={"maxRestarts": 99})
    decided = look(job, seen(*GANG) if phase is Phase.RUNNING else seen())
    assert {item.observed_generation for item in decided.status.conditions} == {2}
    assert (decided.status.phase, decided.status.observed_generation, decided.actions) == (phase, 2, ())


OFTENER = {"snapshots": {"every": "5steps"}}
"""An edit that the API allows while a job runs, and that pods know of by their environment."""


def environments(world: World) -> dict[str, tuple[str | None, str | None]]:
    """By the name of each pod that was created, when it saves, and whether its ranks recover by themselves."""
    found = {}
    for entry in world.cluster.history:
        if isinstance(entry, CreatePod):
            given = {item["name"]: item.get("value") for item in entry.manifest["spec"]["containers"][0]["env"]}
            found[entry.name] = given["DDPJOB_SNAPSHOT_EVERY"], given.get("DDPJOB_LIVE")
    return found


@pytest.mark.fault(17)
def test_a_pod_that_vanished_is_not_created_with_other_snapshots_than_the_rest_of_its_gang() -> None:
    world = World.start()
    world.look()
    world.cluster.delete("digits-0-1", 0)
    world.cluster.edit(**OFTENER)
    world.settle()
    assert (world.status.phase, world.status.attempt, world.status.restarts) == (Phase.RUNNING, 1, 0)
    made = environments(world)
    assert {made[f"digits-0-{rank}"] for rank in range(2)} == {("60seconds", None)}
    assert {made[f"digits-1-{rank}"] for rank in range(2)} == {("5steps", None)}


def test_an_edit_does_not_cut_the_wait_before_a_restart_short() -> None:
    world = World.start(restart={"backoff": {"initialSeconds": 100}})
    world.settle()
    world.cluster.end("digits-0-1", 1, "WorkerException")
    world.look()
    due = world.status.restart_at
    assert due is not None
    world.pass_time(10)
    world.cluster.edit(**OFTENER)
    world.look()
    assert (world.status.attempt, world.status.restart_at, world.status.restarts) == (2, due, 1)
    assert not [name for name in world.cluster.pods if name.startswith("digits-2")]


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("scope", "edit"),
    [("Live", OFTENER), ("Gang", {"restart": {"scope": "Live"}}), ("InPlace", {"restart": {"scope": "Live"}})],
)
def test_no_pod_joins_ranks_that_train_on_after_an_edit(scope: str, edit: dict[str, object]) -> None:
    world = World.start(nodes=3, restart={"scope": scope})
    world.settle()
    world.cluster.edit(**edit)
    world.settle()
    world.cluster.end("digits-0-1", 137, "")
    world.settle()
    assert (world.status.phase, world.status.attempt, world.status.restarts) == (Phase.RUNNING, 1, 1)
    assert world.status.live_recoveries is None
    made = environments(world)
    assert sum(pod.attempt == 1 for pod in world.cluster.pods.values()) == 3
    assert len({made[name] for name, pod in world.cluster.pods.items() if pod.attempt == 1}) == 1


def test_a_place_that_is_empty_when_the_spec_is_edited_is_filled_by_the_next_attempt() -> None:
    world = World.start(nodes=3, restart={"scope": "Live"})
    world.settle()
    world.cluster.fall_silent(str(world.cluster.pods["digits-0-1"].node_name))  # whose name is not free yet
    world.pass_time(60)
    world.look()
    assert world.status.live_recoveries == 1
    world.cluster.edit(**OFTENER)
    world.settle()
    assert (world.status.phase, world.status.attempt, world.status.restarts) == (Phase.RUNNING, 1, 0)
    assert set(environments(world).values()) == {("60seconds", "true"), ("5steps", "true")}
    assert sum(pod.running and not pod.deleting for pod in world.cluster.pods.values()) == 3


@pytest.mark.parametrize("elastic", [None, {"minNodes": 1}], ids=["fixed", "elastic"])
def test_no_spare_is_made_from_an_edit_that_is_taken_back(elastic: dict[str, int] | None) -> None:
    world = World.start(restart={"scope": "InPlace"}, spares=1, **({"elastic": elastic} if elastic else {}))
    world.settle()
    world.cluster.edit(**OFTENER)
    world.cluster.delete("digits-0-s0", 0)
    world.settle()
    world.cluster.edit(snapshots={})
    world.settle()
    assert set(environments(world).values()) == {("60seconds", None)}
    assert sorted(world.cluster.pods) == ["digits-0-0", "digits-0-1", "digits-0-s0"]
