"""When the next snapshot is due."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots import schedule
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.schedule import (
    MOST_STEPS,
    SaveInterval,
    SaveSchedule,
    TimedInterval,
    choose,
    steps_to_next_check,
)
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.values import Progress, SnapshotEvent

DAY = 24 * 3600.0


@pytest.mark.parametrize(
    ("stall", "save", "nodes", "observed", "failures", "seconds", "bound"),
    [
        # Young: sqrt(2 * 86400 * 1) = 415.7; with more nodes the job fails sooner
        (1.0, 2.0, 1, 0.0, 0, 415.69, None),
        (1.0, 2.0, 4, 0.0, 0, 207.85, None),
        (0.084, 1.8, 2, 0.0, 0, 85.19, None),
        # 23 failures in a day of one node: MTTF 2 h; and none in 7 days of two: 15 node days
        (1.0, 2.0, 1, DAY, 23, math.sqrt(2 * 7200), None),
        (1.0, 2.0, 2, 7 * DAY, 0, math.sqrt(2 * 15 * DAY / 2), None),
        # nothing to lose by saving often, but not more often than is useful
        (0.0001, 0.1, 1, 0.0, 0, 10.0, "shortest"),
        (100.0, 100.0, 1, 0.0, 0, 3600.0, "longest"),
        # so many failures that Young's interval would cost more than 3.5 % in stalls
        (1.0, 2.0, 64, DAY, 5000, 1 / 0.035, "overhead"),
        # a save that takes longer than the interval
        (0.1, 900.0, 8, 0.0, 0, 900.0, "save"),
        (0.0, 0.0, 1, 0.0, 0, 10.0, "shortest"),
    ],
)
def test_auto_interval(
    stall: float, save: float, nodes: int, observed: float, failures: int, seconds: float, bound: str | None
) -> None:
    chosen = choose(stall_seconds=stall, save_seconds=save, nodes=nodes, observed_seconds=observed, failures=failures)
    assert chosen.seconds == pytest.approx(seconds, rel=1e-3)
    assert chosen.bound == bound


def test_stalls_never_cost_more_than_the_cap() -> None:
    for stall in (0.001, 0.1, 1.0, 60.0, 300.0):
        for failures in (0, 10, 10_000):
            chosen = choose(stall_seconds=stall, save_seconds=0.0, nodes=8, observed_seconds=DAY, failures=failures)
            assert stall / chosen.seconds <= 0.035 + 1e-9


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("100steps", 100, "steps"),
        ("1step", 1, "steps"),
        ("2epochs", 2, "epochs"),
        ("60seconds", 60, "seconds"),
        ("auto", 60, "auto"),
    ],
)
def test_an_interval_is_a_number_and_its_unit(text: str, count: int, unit: str) -> None:
    assert SaveInterval.parse(text) == SaveInterval(count, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "0steps", "-1steps", "1.5epochs", "steps", "10", "10minutes", "1e3steps", "10steps;"]
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match="such as 100steps"):
        SaveInterval.parse(text)


@pytest.mark.parametrize(
    ("remaining", "pace", "steps"),
    [
        (60.0, 0.25, 120),
        (1.0, 0.25, 2),
        (0.75, 0.25, 3),
        (0.25, 0.25, 1),
        (0.1, 0.25, 1),
        (-5.0, 0.25, 1),
        (60.0, 0.0, 1),
        (60.0, 0.001, MOST_STEPS),
        (0.01, 90.0, 1),
    ],
)
def test_ranks_look_again_halfway(remaining: float, pace: float, steps: int) -> None:
    assert steps_to_next_check(remaining, pace) == steps


@pytest.mark.parametrize("pace", [0.001, 0.05, 0.7, 90.0])
def test_a_timed_interval_is_kept_within_a_step_or_two_and_costs_few_looks(pace: float) -> None:
    timetable = TimedInterval(60.0, step=0, now=0.0)
    saved, looks, next_look = [], 0, 1
    for step in range(1, 1 + int(max(600.0, 10 * pace) / pace)):
        if step < next_look:
            continue
        looks += 1
        due, next_look = timetable.look(step=step, now=step * pace)
        if due:
            timetable.saved(step * pace)
            saved.append(step * pace)
    gaps = [later - earlier for earlier, later in zip([0.0, *saved], saved, strict=False)]
    assert all(max(60.0, pace) - 1e-6 <= gap <= max(60.0, pace) + 2 * pace for gap in gaps)
    assert looks <= len(saved) * (math.log2(max(2.0, 60 / pace)) + 6) + step / MOST_STEPS


@pytest.mark.parametrize("every", ["60seconds", "auto"])
def test_an_interval_is_kept_where_steps_become_five_hundred_times_slower(
    every: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    due = SaveSchedule(SaveInterval.parse(every), Ranks(0, 1), tmp_path, nodes=1)
    due.start(0)
    saved = []
    for step in range(1, 1 + 1000 + 1000):
        clock.now += 0.002 if step <= 1000 else 1.0
        if due.after(Progress(step, 0, 0), epoch_end=False):
            saved.append(clock.now)
            due.saved(SnapshotEvent("saved", step, "", stall_seconds=0.001, save_seconds=1.0))
    gaps = [later - earlier for earlier, later in zip([0.0, *saved], saved, strict=False)]
    assert gaps[0] <= 60 + MOST_STEPS
    assert max(gaps[1:]) <= 62


def saves_in(schedule_: SaveSchedule, clock: SimpleNamespace, seconds: int) -> int:
    """With steps of a second."""
    saved = 0
    for _ in range(seconds):
        clock.now += 1.0
        saved += schedule_.after(Progress(int(clock.now), 0, 0), epoch_end=False)
    return saved


@pytest.mark.parametrize("loses_first", [False, True])
def test_an_interval_of_time_goes_on_where_ranks_come_and_go_more_often(
    loses_first: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    ranks = Ranks(0, 1)
    every = SaveInterval.parse("600seconds")
    due = SaveSchedule(every, ranks, tmp_path, nodes=2)
    due.start(0)
    saves = 0
    for _ in range(10):
        saves += saves_in(due, clock, 300)
        if loses_first:
            others, due = due, SaveSchedule(every, ranks, tmp_path, nodes=2)
            assert others._timetable is not None
            since = others._timetable.since_save(clock.now)
            monkeypatch.setattr(ranks, "values", lambda value, since=since: [value, since])
        due.go_on(int(clock.now))
    assert saves == 5


def test_a_rank_that_follows_knows_when_the_first_has_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `auto` the first rank alone knows the interval."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    ranks = Ranks(1, 1)
    follower = SaveSchedule(SaveInterval.parse("auto"), ranks, tmp_path, nodes=2)
    follower.start(0)
    for second, is_due in ((12, 1), (24, 1), (70, 0)):
        monkeypatch.setattr(ranks, "numbers_from_first", lambda _, look, is_due=is_due: (is_due, look))
        clock.now, follower._next_look = float(second), 0
        assert follower.after(Progress(second, 0, 0), epoch_end=False) is bool(is_due)
    assert follower._timetable is not None
    assert follower._timetable.since_save(clock.now) == 46.0


def test_auto_counts_no_attempt_of_an_earlier_job_of_the_name(tmp_path: Path) -> None:
    """As of one that runs every night."""
    for night in range(60):
        Fence.acquire(tmp_path, created=1 + night, attempt=0, uid=f"uid-{night}")
    due = SaveSchedule(SaveInterval.parse("auto"), Ranks(0, 1), tmp_path, nodes=1, uid="uid-59")
    due.start(0)
    chosen = due.saved(SnapshotEvent("saved", 1, "", stall_seconds=0.1, save_seconds=1.0)).interval
    assert chosen is not None
    assert chosen.failures == 0


def test_a_loop_that_never_says_that_an_epoch_has_ended_is_told_once_that_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    for says in (True, False):
        clock.now = 0.0
        due = SaveSchedule(SaveInterval.parse("2epochs"), Ranks(0, 1), tmp_path, nodes=1)
        due.start(0)
        saves_in(due, clock, 600)
        due.after(Progress(601, 1, 0), epoch_end=says)
        saves_in(due, clock, 3600)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (not says)
    assert "saved every 2epochs, and no step has ended an epoch for 30 minutes" in lines[0]


@pytest.mark.parametrize(
    ("begins", "each", "saved"),
    [
        (0, 1, [10, 20, 30, 40]),
        (19, 1, [20, 30, 40]),
        (20, 1, [30, 40]),
        (0, 2, [10, 20, 30, 40]),
        (3, 2, [11, 21, 31]),
        (0, 3, [12, 21, 30]),
    ],
)
def test_an_interval_of_steps_is_kept_where_a_batch_counts_several(
    begins: int, each: int, saved: list[int], tmp_path: Path
) -> None:
    """As of a GAN with Lightning, which counts the steps of all optimizers."""
    due = SaveSchedule(SaveInterval.parse("10steps"), Ranks(0, 1), tmp_path, nodes=1)
    due.start(begins)
    steps = range(begins + each, 41, each)
    assert [step for step in steps if due.after(Progress(step, 0, 0), epoch_end=False)] == saved


def test_auto_chooses_after_a_save_without_reading_the_volume(tmp_path: Path) -> None:
    for attempt in (0, 1, 2):
        (tmp_path / "job").mkdir(exist_ok=True)
        Fence.acquire(tmp_path / "job", created=1, attempt=attempt, uid="uid-1")
    due = SaveSchedule(SaveInterval.parse("auto"), Ranks(0, 1), tmp_path / "job", nodes=1)
    due.start(0)
    shutil.rmtree(tmp_path / "job")
    chosen = due.saved(SnapshotEvent("saved", 1, "", stall_seconds=0.1, save_seconds=1.0)).interval
    assert chosen is not None
    assert chosen.failures == 2
