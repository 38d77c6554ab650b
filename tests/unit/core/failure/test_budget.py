"""How many restarts a job may still use up, and how long it waits before the next one."""

from __future__ import annotations

import pytest
from builders import NOW, later
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.api.policies import Backoff, Restart
from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, SnapshotStatus
from ddpjob_operator.core.failure.budget import (
    CLOSE_SECONDS,
    backoff_seconds,
    disrupted,
    made_progress,
    refilled,
    spent,
    used_up,
)


def status(
    *, snapshot: int | None = None, struck: int | None = None, had: int | None = None, verified: bool = True
) -> DDPJobStatus:
    """A status whose newest snapshot is that of step `snapshot`, and whose last failure struck at `struck`."""
    before = FailureStatus(attempt=0, time=NOW, reason="WorkerKilled", step=struck, snapshot_step=had)
    return DDPJobStatus(
        snapshot=None if snapshot is None else SnapshotStatus(step=snapshot, time=NOW, verified=verified),
        last_failure=before,
    )


FIRST = DDPJobStatus(snapshot=SnapshotStatus(step=100, time=NOW, verified=True))


@pytest.mark.parametrize(
    ("before", "progress"),
    [
        pytest.param(DDPJobStatus(), False, id="no snapshot is no progress"),
        pytest.param(status(), False, id="no snapshot after a failure is no progress"),
        pytest.param(FIRST, True, id="a snapshot before any failure is progress"),
        pytest.param(status(snapshot=200, struck=150, had=100), True, id="a new snapshot ahead of the failure is"),
        pytest.param(status(snapshot=200, struck=150, had=100, verified=False), False, id="not if it is unverified"),
        pytest.param(status(snapshot=120, struck=150, had=100), False, id="a new snapshot behind the failure is none"),
        pytest.param(status(snapshot=150, struck=150, had=100), False, id="one of the step that failed is none"),
        pytest.param(status(snapshot=100, struck=150, had=100), False, id="the old snapshot is none"),
        pytest.param(status(snapshot=100, struck=0, had=100), False, id="failing before the first step makes none"),
        pytest.param(status(snapshot=100, had=100), False, id="a failure at an unknown step makes none"),
        pytest.param(status(snapshot=100), True, id="the first snapshot ever is progress"),
    ],
)
def test_progress_is_a_verified_snapshot_ahead_of_the_last_failure(before: DDPJobStatus, progress: bool) -> None:
    assert made_progress(before, NOW) is progress


@pytest.mark.parametrize(("apart", "progress"), [(1.0, False), (59.0, False), (60.0, True), (3600.0, True)])
def test_reported_progress_refills_nothing_while_failures_follow_each_other_closely(
    apart: float, progress: bool
) -> None:
    """A trainer that reports a newer snapshot each time would restart for ever, at once and for free."""
    before = status(snapshot=200, struck=150, had=100)
    assert before.last_failure is not None
    times = [later(-apart * ago) for ago in (5, 4, 3, 2, 1)]
    failures = tuple(before.last_failure.model_copy(update={"time": time}) for time in times)
    assert (5 * apart >= CLOSE_SECONDS) is progress
    assert made_progress(before.model_copy(update={"failures": failures}), NOW) is progress


@pytest.mark.parametrize(
    ("in_a_row", "seconds"),
    [(0, 1), (1, 2), (2, 4), (3, 8), (7, 128), (8, 256), (9, 300), (32, 300), (10_000, 300)],
)
def test_the_wait_doubles_up_to_its_maximum_give_or_take_a_fifth(in_a_row: int, seconds: int) -> None:
    waits = [backoff_seconds(Backoff(), in_a_row, f"uid/{attempt}") for attempt in range(50)]
    assert all(0.8 * seconds <= wait <= min(300, 1.2 * seconds) for wait in waits)
    assert max(waits) - min(waits) > 0.15 * seconds, "jobs that fell together do not come back together"


@pytest.mark.parametrize(
    ("initial", "longest", "in_a_row", "least", "most"),
    [
        pytest.param(0, 300, 5, 0, 0, id="an initial wait of nothing stays nothing"),
        pytest.param(10, 300, 2, 32, 48, id="the initial wait is what doubles"),
        pytest.param(5, 5, 3, 4, 5, id="a maximum equal to the initial wait is never passed"),
    ],
)
def test_the_wait_follows_the_policy(initial: int, longest: int, in_a_row: int, least: float, most: float) -> None:
    policy = Backoff(initial_seconds=initial, max_seconds=longest)
    assert least <= backoff_seconds(policy, in_a_row, "uid/3") <= most


def test_the_same_decision_taken_again_waits_as_long() -> None:
    assert backoff_seconds(Backoff(), 4, "uid/3") == backoff_seconds(Backoff(), 4, "uid/3")
    assert backoff_seconds(Backoff(), 4, "uid/3") != backoff_seconds(Backoff(), 4, "uid/4")


def test_without_a_window_every_restart_since_progress_counts_and_no_time_is_kept() -> None:
    policy = Restart(max_restarts=3)
    after = spent(policy, spent(policy, DDPJobStatus(), NOW), later(86_400))
    assert used_up(policy, after, later(90_000)) == 2
    assert (after.restarts, after.restarts_since_progress, after.restart_times) == (2, 2, ())


@pytest.mark.parametrize(
    ("ago", "counts"),
    [
        pytest.param(0, True, id="one of this moment counts"),
        pytest.param(599, True, id="one within the window counts"),
        pytest.param(600, False, id="one as old as the window does not"),
        pytest.param(-3600, True, id="one that lies ahead counts: the clock was set back"),
    ],
)
def test_with_a_window_only_what_lies_in_it_counts(ago: float, counts: bool) -> None:
    policy = Restart(max_restarts=3, window_seconds=600)
    before = DDPJobStatus(restarts=7, restarts_since_progress=7, restart_times=(later(-ago),))
    assert used_up(policy, before, NOW) == int(counts)
    assert spent(policy, before, NOW).restart_times == ((later(-ago), NOW) if counts else (NOW,))


def test_progress_refills_the_budget_and_forgets_no_restart() -> None:
    policy = Restart(max_restarts=3, window_seconds=600)
    after = refilled(disrupted(spent(policy, DDPJobStatus(), NOW)))
    assert used_up(policy, after, NOW) == used_up(Restart(), after, NOW) == 0
    assert (after.restarts, after.disruptions, after.disruptions_since_progress) == (1, 1, 0)


def test_a_disruption_costs_nothing() -> None:
    after = disrupted(DDPJobStatus(restarts=1, restarts_since_progress=1))
    assert (after.restarts, after.restarts_since_progress, used_up(Restart(), after, NOW)) == (1, 1, 1)
    assert (after.disruptions, after.disruptions_since_progress) == (1, 1)


@given(
    window=st.none() | st.integers(1, 1000),
    most=st.integers(1, 100),
    gaps=st.lists(st.floats(-2000, 2000), max_size=150),
)
def test_times_are_kept_for_no_more_restarts_than_the_budget_has(
    window: int | None, most: int, gaps: list[float]
) -> None:
    policy, after, seconds = Restart(max_restarts=most, window_seconds=window), DDPJobStatus(), 0.0
    for gap in gaps:
        seconds += gap
        if used_up(policy, after, later(seconds)) < most:
            after = spent(policy, after, later(seconds))
    assert len(after.restart_times) <= (most if window else 0)
