"""Pods that are not created at once: a webhook that fails now and then, and pods that vanish as soon as they exist."""

from __future__ import annotations

import random

import pytest
from promises import check_begun_once
from small_cluster import Cluster
from world import World

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.values.actions import CreateChild, CreatePod

DATA = {"initializers": [{"name": "data", "script": "true", "path": "data"}]}


def creates(cluster: Cluster) -> int:
    return sum(isinstance(entry, CreatePod) for entry in cluster.history)


@pytest.mark.parametrize("seed", range(4))
def test_a_gang_of_256_starts_on_its_first_attempt_where_one_create_in_a_hundred_fails(seed: int) -> None:
    world = World.start(nodes=256)
    drawn = random.Random(seed)
    world.cluster.hiccup = lambda: drawn.random() < 0.01
    looks = 0
    while len(world.cluster.pods) < 256:
        world.look()
        looks += 1
        assert looks < 10, f"only {len(world.cluster.pods)} pods after {looks} looks"
    for name in list(world.cluster.pods):
        world.cluster.run(name)
    world.look()
    assert (world.status.phase, world.status.attempt, world.status.disruptions) == (Phase.RUNNING, 0, 0)
    assert creates(world.cluster) <= 256 + 10


@pytest.mark.fault(19)
def test_pods_that_vanish_before_they_run_are_created_after_growing_waits() -> None:
    world = World.start(nodes=2)
    began = world.cluster.now
    for _ in range(20):
        world.look()
        while world.operator.wait is not None and not world.cluster.pods:
            world.pass_time(world.operator.wait)
            world.look()
        for name in list(world.cluster.pods):
            world.cluster.delete(name, 0)
    assert (world.cluster.now - began).total_seconds() > 600
    assert creates(world.cluster) == 40
    assert world.status.restarts == 0


def test_one_that_vanishes_once_is_back_at_once() -> None:
    world = World.start(nodes=2)
    world.look()
    world.cluster.delete("digits-0-1", 0)
    world.look()
    assert sorted(world.cluster.pods) == ["digits-0-0", "digits-0-1"]


@pytest.mark.parametrize("grace", [0, 30], ids=["by force", "with grace"])
@pytest.mark.parametrize("attempt", [0, 1], ids=["Starting", "Restarting"])
def test_a_pod_that_has_begun_is_never_created_again_in_its_attempt(attempt: int, grace: int) -> None:
    """It may still run somewhere, and the volume cannot tell it from a second one of that attempt and node rank."""
    world = World.start(nodes=2, restart={"backoff": {"initialSeconds": 0}})
    world.look()
    if attempt:
        world.settle()
        world.cluster.end("digits-0-1", 1, "WorkerException")
        world.look()
    name = f"digits-{attempt}-0"
    world.cluster.run(name)
    world.look()
    world.cluster.delete(name, grace)
    world.look()
    world.restart()
    if grace:
        world.cluster.reap(name)
    world.settle()
    assert (world.status.phase, world.status.attempt) == (Phase.RUNNING, attempt + 1)
    check_begun_once(world.cluster)


def test_an_initializer_that_vanishes_is_created_after_growing_waits() -> None:
    world = World.start(nodes=1, **DATA)
    began = world.cluster.now
    for _ in range(20):
        world.look()
        while world.operator.wait is not None and not world.cluster.fetchers:
            world.pass_time(world.operator.wait)
            world.look()
        for name, pod in list(world.cluster.fetchers.items()):
            world.cluster.delete_fetcher(name, uid=pod.uid)
            world.cluster.fetchers.pop(name, None)
    assert (world.cluster.now - began).total_seconds() > 600
    made = [entry for entry in world.cluster.history if isinstance(entry, CreateChild)]
    assert len(made) == 20
