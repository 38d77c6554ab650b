"""With live recovery: which votes on a stop make pods leave alone, and which make all ranks save and stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_trainer.client.steps import Change, Steps
from ddp_trainer.rank.step_reduce import StepResult
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.values import Progress


def steps(size: int, *, least: int, procs: int) -> Steps:
    log: Any = SimpleNamespace(losses=SimpleNamespace())
    unused: Any = None
    return Steps(
        World(size=size),
        log,
        None,
        total_steps=None,
        learning_rate=lambda: None,
        losses=unused,
        passes=unused,
        data_waits=unused,
        least=least,
        procs=procs,
    )


def vote(stopping: int, *, is_stopping: bool = False) -> StepResult:
    return StepResult(1, 0, 0.5, stopping, is_stopping)


@pytest.mark.parametrize(
    ("size", "least", "procs", "votes", "found"),
    [
        (3, 1, 1, [1], [Change.LEFT]),
        (3, 1, 1, [3], ["stop"]),
        # of each of two pods one rank has the signal at the first vote, and both at the next
        (4, 2, 2, [2, 4], [Change.NONE, "stop"]),
        (6, 4, 2, [1, 2, 2], [Change.NONE, Change.NONE, Change.LEFT]),
        (6, 4, 2, [2, 2], [Change.NONE, Change.LEFT]),
        (4, 4, 2, [1], ["stop"]),
    ],
)
def test_pods_leave_alone_once_all_of_their_ranks_are_known_to_and_only_if_enough_are_left(
    size: int, least: int, procs: int, votes: list[int], found: list[Any]
) -> None:
    run = steps(size, least=least, procs=procs)
    assert ["stop" if run._agreed(vote(stopping)) else run.change for stopping in votes] == found


def test_a_rank_that_was_asked_to_stop_is_the_one_that_leaves() -> None:
    run = steps(6, least=2, procs=2)
    for _ in range(2):
        assert not run._agreed(vote(2, is_stopping=True))
    assert run.change is Change.LEAVES


def test_what_an_earlier_group_has_voted_does_not_count_in_the_next() -> None:
    run = steps(6, least=2, procs=2)
    run._agreed(vote(2))
    run.regroup(Progress(1, 0, 8))
    assert not run._agreed(vote(2))
    assert run.change is Change.NONE


def test_a_new_pod_joins_where_no_rank_is_asked_to_stop() -> None:
    run = steps(4, least=2, procs=2)
    assert not run._agreed(StepResult(1, 0, 0.5, 0, False, joining=True))
    assert run.change is Change.JOINED
