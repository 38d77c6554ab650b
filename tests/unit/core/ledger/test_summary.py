"""The columns of kubectl get, from the rest of the status."""

from __future__ import annotations

import pytest
from builders import NOW
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.api.status import Condition, DDPJobStatus, NodeCount, Phase, Progress, Summary
from ddpjob_operator.core.ledger.summary import duration, with_summary


def summary(**status: object) -> Summary:
    return with_summary(DDPJobStatus.model_validate(status)).summary or Summary()


def condition(type_: str, reason: str, status: str = "True") -> Condition:
    return Condition(type=type_, status=status, reason=reason, last_transition_time=NOW)


def test_a_status_of_which_nothing_is_known_has_no_summary() -> None:
    assert with_summary(DDPJobStatus()).summary is None


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress(step=412, total_steps=1000), "412/1000"),
        (Progress(step=412), "412"),
        (Progress(step=0, total_steps=1000), "0/1000"),
        (Progress(total_steps=1000), None),
        (None, None),
    ],
    ids=["total known", "total unknown", "no step yet", "step unknown", "no report"],
)
def test_progress_shows_what_is_known(progress: Progress | None, shown: str | None) -> None:
    assert summary(progress=progress).progress == shown


def test_nodes_are_ready_of_needed() -> None:
    assert summary(nodes=NodeCount(ready=1, total=2)).nodes == "1/2"
    assert summary(nodes=NodeCount()).nodes is None, "the number of nodes has not been decided"


@pytest.mark.parametrize("phase", Phase)
def test_only_a_running_job_has_an_eta(phase: Phase) -> None:
    shown = summary(phase=phase, progress=Progress(step=1, remaining_seconds=200)).eta
    assert shown == ("3m20s" if phase is Phase.RUNNING else None)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"), (-5, "0s"), (119, "119s"), (120, "2m"), (200, "3m20s"), (599, "9m59s"), (600, "10m"),
        (10799, "179m"), (10800, "3h"), (12000, "3h20m"), (28800, "8h"), (172799, "47h"), (172800, "2d"),
        (180000, "2d2h"), (691200, "8d"),
    ],
)  # fmt: skip
def test_a_duration_reads_as_in_the_column_age(seconds: int, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("phase", "conditions", "reason"),
    [
        ("Succeeded", [condition("Complete", "Completed"), condition("Degraded", "FewerNodes", "False")], "Completed"),
        ("Failed", [condition("Failed", "RepeatedFailure")], "RepeatedFailure"),
        ("Restarting", [condition("Restarting", "WorkerKilled")], "WorkerKilled"),
        (
            "Restarting",
            [condition("Restarting", "WorkerKilled"), condition("Degraded", "Unschedulable")],
            "Unschedulable",
        ),
        ("Suspended", [condition("Suspended", "Suspended")], "Suspended"),
        ("Pending", [condition("Initialized", "Fetching", "False")], "Fetching"),
        ("Starting", [condition("Scheduled", "SchedulingGated", "False")], "SchedulingGated"),
        ("Running", [condition("Running", "GangRunning")], None),
        ("Running", [condition("SnapshotsFailing", "SavesFail")], "SavesFail"),
        ("Running", [condition("Degraded", "AsExpected", "False")], None),
    ],
)
def test_the_reason_is_that_of_the_condition_that_explains_the_phase(
    phase: str, conditions: list[Condition], reason: str | None
) -> None:
    assert summary(phase=phase, conditions=tuple(conditions)).reason == reason


@given(st.builds(Progress, step=st.none() | st.integers(0, 10**6), remaining_seconds=st.none() | st.integers(0, 10**9)))
def test_the_summary_of_a_summarised_status_is_the_same(progress: Progress) -> None:
    once = with_summary(DDPJobStatus(phase=Phase.RUNNING, progress=progress))
    assert with_summary(once) == once
