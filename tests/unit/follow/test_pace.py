"""What `ddpjob why` says of the pace of a running job: each cause that is measured, and no more."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.follow.test_why import seen

from ddpjob_operator.core.ledger.ranks import PodThrottling, RankRow, Reports
from ddpjob_operator.core.values.trainer_report import LiveReport, Throttling
from ddpjob_operator.follow.pace import Pace, pace_of
from ddpjob_operator.follow.rank_reports import REFUSED
from ddpjob_operator.follow.why import why

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
RANK = RankRow(0, "digits-0-0", "gpu-1", "train", 120, 0.1, None, NOW)


def gang(*changes: dict[str, object], pods: tuple[PodThrottling, ...] = (), note: str = "") -> Reports:
    rows = [
        replace(RANK, rank=rank, pod=f"digits-0-{rank}", node=f"gpu-{rank + 1}", **change)  # type: ignore[arg-type]
        for rank, change in enumerate(changes)
    ]
    return Reports(tuple(rows), pods, note)


def throttling(pod: str, stopped: int) -> PodThrottling:
    return PodThrottling(pod, "gpu-1", Throttling(60.0, 600, stopped, 45.24))


DATA = {"data_seconds": 0.0, "passes_seconds": 0.02}


@pytest.mark.parametrize(
    ("reports", "pace"),
    [
        pytest.param(
            gang(DATA, DATA | {"passes_seconds": 0.09}),
            Pace(
                (
                    "2 ranks in train, step 120",
                    "the others wait for rank 1 of pod digits-0-1 on node gpu-2: "
                    "its own forward and backward passes take 90 ms, those of the median rank 20 ms",
                ),
                (),
                (
                    "Look for what else uses the node gpu-2, and for its clock speed; then for what the script does "
                    "there.",
                ),
            ),
            id="a rank whose own work is slow",
        ),
        pytest.param(
            gang(DATA, DATA | {"passes_seconds": 0.09}, pods=(throttling("digits-0-1", 380), throttling("a", 3))),
            Pace(
                (
                    "2 ranks in train, step 120",
                    "the others wait for rank 1 of pod digits-0-1 on node gpu-2: "
                    "its own forward and backward passes take 90 ms, those of the median rank 20 ms",
                ),
                (
                    "CPU limit: pod digits-0-1 on node gpu-1 ran into it in 63% of its scheduling periods of the last "
                    "1m00s, and was stopped for 45.2 s, added up over CPUs",
                ),
                ("Raise spec.resources.limits.cpu, or start fewer processes below it (procsPerNode, --workers).",),
            ),
            id="because its pod is throttled",
        ),
        pytest.param(
            gang({"data_seconds": 0.04}, {"data_seconds": 0.05, "step": 119}),
            Pace(
                (
                    "2 ranks in train, step 119 to 120",
                    "the others wait for rank 1 of pod digits-0-1 on node gpu-2: "
                    "it waits 10 ms longer for the data of a step than the median rank",
                ),
                ("data: the median rank waits 40 ms for it in a step of 100 ms",),
                (
                    "Load data with more processes (num_workers of the DataLoader, --workers of the built-in loop), or "
                    "from a faster volume.",
                ),
            ),
            id="data that comes late",
        ),
        pytest.param(gang(DATA, DATA), Pace(("2 ranks in train, step 120", "no rank stands out")), id="nothing"),
        pytest.param(
            gang({}, {}),
            Pace(
                (
                    "2 ranks in train, step 120",
                    "their steps take equally long, as those of ranks that meet in each step do, whichever of them is "
                    "slow",
                )
            ),
            id="step times alone prove nothing",
        ),
        pytest.param(
            gang({"data_seconds": 0.0}, {"data_seconds": 0.0}),
            Pace(
                (
                    "2 ranks in train, step 120",
                    "no rank waits longer for its data; their steps take equally long, as those of ranks that meet in "
                    "each step do, whichever of them is slow",
                )
            ),
            id="data that comes in time is not all that may be slow",
        ),
        pytest.param(
            gang({"step": None, "step_seconds": None, "phase": "first_step"}, note=REFUSED),
            Pace(("1 rank in first step", REFUSED)),
            id="before the first step, and a right is missing",
        ),
        pytest.param(Reports(), Pace(), id="no rank has said anything"),
    ],
)
def test_each_cause_is_said_with_its_place_and_what_to_do(reports: Reports, pace: Pace) -> None:
    assert pace_of(reports, NOW) == pace


@pytest.mark.parametrize(
    ("live", "line"),
    [
        (LiveReport(4, 4), "live recovery: 4 ranks of 4 train"),
        (
            LiveReport(3, 4, lost=2, left=1, joined=2, dropped_steps=2, last_seconds=0.2149),
            "live recovery: 3 ranks of 4 train; 2 lost, 1 left, 2 joined, the last in 0.21 s; 2 steps dropped",
        ),
        (
            LiveReport(1, 2, lost=1, dropped_steps=1, last_seconds=4.5),
            "live recovery: 1 rank of 2 trains; 1 lost, 0 left, 0 joined, the last in 4.50 s; 1 step dropped",
        ),
    ],
)
def test_what_live_recovery_has_cost_is_one_line(live: LiveReport, line: str) -> None:
    reports = replace(gang(DATA), live=live)
    assert pace_of(reports, NOW).ranks[1] == line
    assert line in why(replace(seen(phase="Running"), reports=reports)).text()


def test_ranks_without_progress_are_named_the_longest_first_and_no_more_than_a_few() -> None:
    changes = [{"time": NOW - timedelta(seconds=20 + rank), "phase": "validate"} for rank in range(6)]
    lines = pace_of(gang(*changes, {}, {"time": NOW - timedelta(seconds=60), "phase": "done"}), NOW).ranks
    assert lines[0] == "6 ranks in validate, step 120; 1 rank in train, step 120; 1 rank in done, step 120"
    assert lines[2] == "no progress for 25s: rank 5 of pod digits-0-5 on node gpu-6, validate after step 120"
    assert lines[5:] == ("no progress for 22s: rank 2 of pod digits-0-2 on node gpu-3, validate after step 120",
                         "and 2 more ranks")  # fmt: skip


def test_a_long_step_is_no_silence() -> None:
    slow = {"time": NOW - timedelta(seconds=60), "step_seconds": 7.0}
    assert not [line for line in pace_of(gang(slow, slow), NOW).ranks if line.startswith("no progress")]


@pytest.mark.parametrize("step", [None, 7])
def test_a_script_whose_steps_are_not_seen_is_not_silent(step: int | None) -> None:
    """Or no longer: what looks at them may have given up."""
    unseen = {"time": NOW - timedelta(minutes=25), "phase": "script", "step": step}
    assert not [line for line in pace_of(gang(unseen, unseen), NOW).ranks if line.startswith("no progress")]


def test_a_running_job_has_it_in_its_answer_and_one_that_waits_has_not() -> None:
    reports = gang(DATA, DATA | {"passes_seconds": 0.09}, pods=(throttling("digits-0-1", 380),))
    answer = why(replace(seen(phase="Running"), reports=reports))
    assert [section.title for section in answer.sections] == ["Ranks", "Slowed by", "What to do"]
    assert "the others wait for rank 1" in answer.text()
    assert not why(replace(seen(phase="Succeeded"), reports=reports)).sections
