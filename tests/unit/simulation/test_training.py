"""Which steps are finished, and which snapshot is the newest, at any moment of a stretch."""

from __future__ import annotations

import pytest
from tests.simulation.training import Stretch

STRETCH = Stretch(begin=100.0, first=40, step_seconds=2.0, every=3, since=1, stall_seconds=1.0, save_seconds=4.0)


@pytest.mark.parametrize(
    ("now", "finished", "snapshot", "stalls"),
    [
        (99.0, 40, None, 0),
        (101.9, 40, None, 0),
        (102.0, 41, None, 0),
        (104.0, 42, None, 0),
        (105.0, 42, None, 1),
        (106.9, 42, None, 1),
        (107.0, 43, None, 1),
        (108.9, 43, None, 1),
        (109.0, 44, 42, 1),
        (111.0, 45, 42, 1),
        (112.0, 45, 42, 2),
        (116.0, 47, 45, 2),
    ],
)
def test_a_stretch(now: float, finished: int, snapshot: int | None, stalls: int) -> None:
    assert (STRETCH.finished(now), STRETCH.newest_snapshot(now), STRETCH.stalls(now)) == (finished, snapshot, stalls)


def test_steps_since_the_last_snapshot_go_on_where_the_stretch_before_ended() -> None:
    assert [STRETCH.since_snapshot(now) for now in (100.0, 102.0, 104.0, 107.0, 111.0)] == [1, 2, 0, 1, 0]


def test_it_is_what_a_loop_counts() -> None:
    """Against a plain loop, with times that are no whole numbers."""
    stretch = Stretch(begin=0.0, first=0, step_seconds=0.7, every=4, since=0, stall_seconds=0.3, save_seconds=1.1)
    now, ends, verified = 0.0, [], []
    for step in range(1, 200):
        now += 0.7
        ends.append(now)
        if step % 4 == 0:
            now += 0.3
            verified.append((now + 1.1, step))
    for tick in range(1, 1200):
        moment = tick * 0.11371
        assert stretch.finished(moment) == sum(end <= moment for end in ends)
        assert stretch.newest_snapshot(moment) == max((step for at, step in verified if at <= moment), default=None)
