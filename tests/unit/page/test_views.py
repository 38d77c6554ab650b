"""What the pages say of a job: rows, filters, attempts, activities and failures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.api.status import Goodput
from ddpjob_operator.core.ledger.ranks import RankRow, Reports
from ddpjob_operator.follow.why import Answer, Section
from ddpjob_operator.page.charts import StepChart
from ddpjob_operator.page.job_view import Figure, job_view
from ddpjob_operator.page.list_view import Filter, list_view, row_of, size_in_words
from ddpjob_operator.page.timeline import attempts_of, shares, timeline
from ddpjob_operator.page.values import STOPPED, Course, Detail, EventRow, JobRecord, LossPoint, SnapshotRow
from ddpjob_operator.wire.jobs import parse_status

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


def ago(**time: float) -> str:
    return (NOW - timedelta(**time)).isoformat()


def failure(attempt: int, minutes_ago: float, **more: Any) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "time": ago(minutes=minutes_ago),
        "reason": "WorkerKilled",
        "podName": f"digits-{attempt}-1",
    } | more


def job(
    name: str = "digits", namespace: str = "team", phase: str = "Running", minutes: float = 60, **status: Any
) -> JobRecord:
    given = parse_status({"phase": phase if phase != STOPPED else "Running"} | status)
    return JobRecord(namespace, name, f"uid of {name}", NOW - timedelta(minutes=minutes), phase, given, 2, 4)


def test_the_newest_job_is_the_first() -> None:
    view = list_view([job("old", minutes=90), job("new", minutes=1), job("also-new", minutes=1)], Filter(), NOW)
    assert [row.name for row in view.rows] == ["also-new", "new", "old"]


def test_phases_are_counted_for_those_who_choose_one() -> None:
    jobs = [job("a"), job("b", phase="Failed"), job("c", phase="Failed", namespace="other")]
    view = list_view(jobs, Filter(phase="Failed", namespace="team"), NOW)
    assert [row.name for row in view.rows] == ["b"]
    assert [(choice.label, choice.count, choice.chosen) for choice in view.choices] == [
        ("All", 2, False), ("Running", 1, False), ("Failed", 1, True)
    ]  # fmt: skip
    assert view.choices[1].href == "/?phase=Running&namespace=team"
    assert view.namespaces == ("other", "team")


def test_a_phase_that_no_job_is_in_any_more_stays_a_choice() -> None:
    view = list_view([job("a")], Filter(phase="Failed"), NOW)
    assert [(choice.label, choice.count) for choice in view.choices] == [("All", 1), ("Running", 1), ("Failed", 0)]


def test_a_row_says_how_far_a_job_is() -> None:
    progress = {"step": 250, "totalSteps": 1000, "loss": 0.123456, "eta": (NOW + timedelta(minutes=5)).isoformat()}
    row = row_of(job(progress=progress, nodes={"ready": 1, "total": 2}, restarts=3), NOW)
    assert (row.percent, row.eta, row.loss, row.nodes, row.restarts, row.age) == (25, "5m", "0.1235", "1/2", 3, "60m")


def test_a_run_that_was_stopped_has_no_node_that_is_ready() -> None:
    assert row_of(job(phase=STOPPED, nodes={"ready": 2, "total": 2}), NOW).nodes == "2"


def test_what_is_unknown_is_empty_and_no_zero() -> None:
    row = row_of(job(phase="Pending", progress={"loss": float("nan")}), NOW)
    assert (row.percent, row.step, row.eta, row.loss, row.reason) == (None, None, "", "", "")


def test_a_link_holds_any_name() -> None:
    assert row_of(job('a/b"<', "n s"), NOW).href == "/jobs/n%20s/a%2Fb%22%3C"


def test_attempts_follow_one_another_from_failure_to_failure() -> None:
    found = attempts_of(
        job(
            attempt=2,
            startTime=ago(minutes=30),
            attemptStartTime=ago(minutes=10),
            failures=[failure(0, 20), failure(1, 10)],
        ),
        {},
    )
    minutes = [((NOW - a.start).seconds // 60, (NOW - a.end).seconds // 60 if a.end else None) for a in found]
    assert minutes == [(30, 20), (20, 10), (10, None)]
    assert [a.outcome for a in found] == ["WorkerKilled", "WorkerKilled", "Running"]


def minutes_of(record: JobRecord, began: dict[int, datetime]) -> dict[int, tuple[float, float]]:
    """How many minutes ago each attempt has begun and ended."""
    return {
        found.number: ((NOW - found.start) / timedelta(minutes=1), (NOW - (found.end or NOW)) / timedelta(minutes=1))
        for found in attempts_of(record, began)
    }


def test_an_attempt_begins_with_the_one_before_it_and_no_earlier() -> None:
    """The status has the newest failures only, and none of an attempt that was suspended."""
    times = {"startTime": ago(minutes=900), "attemptStartTime": ago(minutes=5)}
    failures = [failure(3, 40), failure(4, 30), failure(6, 10)]
    record = job(attempt=7, failures=failures, **times)
    assert minutes_of(record, {}) == {3: (40, 40), 4: (40, 30), 6: (10, 10), 7: (5, 0)}
    began = {3: NOW - timedelta(minutes=50), 6: NOW - timedelta(minutes=15)}
    assert minutes_of(record, began) == {3: (50, 40), 4: (40, 30), 6: (15, 10), 7: (5, 0)}


def test_the_start_of_an_attempt_is_the_same_once_it_has_failed() -> None:
    """Its fencing token is written later, by its first rank."""
    times = {"startTime": ago(minutes=30), "attemptStartTime": ago(minutes=20)}
    began = {0: NOW - timedelta(minutes=28), 1: NOW - timedelta(minutes=16)}
    runs = minutes_of(job(attempt=1, failures=[failure(0, 20)], **times), began)
    failed = minutes_of(job(attempt=2, failures=[failure(0, 20), failure(1, 5)], **times), began)
    assert (runs[1], failed[1]) == ((20, 0), (20, 5))


def test_an_attempt_that_survived_losses_goes_on_and_has_them_as_marks() -> None:
    failures = [failure(0, 25), failure(0, 20), failure(1, 5)]
    times = {"startTime": ago(minutes=30), "attemptStartTime": ago(minutes=20)}
    found = attempts_of(job(attempt=1, failures=failures, **times), {})
    assert [(a.number, a.outcome, len(a.losses)) for a in found] == [(0, "WorkerKilled", 1), (1, "Running", 1)]
    drawn = timeline(found, NOW, 1000)
    assert drawn is not None
    assert all(bar.x < loss < bar.x + bar.width for bar in drawn.bars for loss in bar.losses)
    assert "live recoveries: 1" in drawn.bars[1].title


def test_a_run_that_was_stopped_ends_where_its_time_was_last_counted() -> None:
    given = {"startTime": ago(minutes=30), "attemptStartTime": ago(minutes=30)}
    (found,) = attempts_of(job(phase=STOPPED, goodput={"lastUpdateTime": ago(minutes=25)}, **given), {})
    assert found.end == NOW - timedelta(minutes=25)


def test_a_job_that_failed_ends_its_timeline_with_the_reason() -> None:
    status = {"startTime": ago(minutes=30), "completionTime": ago(minutes=20), "failures": [failure(0, 20)]}
    found = attempts_of(job(phase="Failed", **status), {})
    assert [(a.outcome, a.tone) for a in found] == [("WorkerKilled", "bad")]


def test_a_timeline_of_many_attempts_shows_the_newest() -> None:
    began = {number: NOW - timedelta(minutes=100 - number) for number in range(40)}
    drawn = timeline(attempts_of(job(attempt=39), began), NOW, 1000)
    assert drawn is not None
    assert (len(drawn.bars), drawn.bars[-1].attempt.number, drawn.earlier) == (12, 39, 28)
    assert all(bar.x + bar.width <= drawn.right + 3 for bar in drawn.bars)


def test_a_label_is_in_its_bar_or_beside_it_or_left_out() -> None:
    given = {"startTime": ago(minutes=30), "attemptStartTime": ago(minutes=1)}
    found = attempts_of(job(attempt=2, failures=[failure(0, 20), failure(1, 1)], **given), {})
    wide, narrow = timeline(found, NOW, 1000), timeline(found, NOW, 240)
    assert wide is not None
    assert narrow is not None
    assert [bar.anchor for bar in wide.bars] == ["inside", "inside", "end"]
    assert [bar.anchor for bar in narrow.bars] == ["", "", "end"]


def test_activities_add_up_to_the_whole_and_leave_out_what_took_no_time() -> None:
    found = shares(Goodput(training=75, queued=24.5, saving=0.5))
    assert [(share.label, share.words, share.percent) for share in found] == [
        ("Training", "1m15s", "75%"), ("Saving snapshots", "0.5s", "< 1%"), ("Queued", "24s", "24%")
    ]  # fmt: skip
    assert found[-1].x + found[-1].width == pytest.approx(1000)
    assert shares(Goodput()) == ()
    assert shares(None) == ()


def detail(record: JobRecord, *sections: Section, **more: Any) -> Detail:
    return Detail(record, Answer(f"{record.name}: Running for 5m00s", sections), NOW, **more)


def test_the_page_begins_with_the_answer_and_what_to_do() -> None:
    view = job_view(
        detail(job(), Section("Cause", ("it broke",)), Section("Time", ("…",)), Section("What to do", ("mend it",)))
    )
    assert (view.headline, view.todo) == ("Running for 5m00s", ("mend it",))
    assert view.sections == (("Cause", ("it broke",)),)


@pytest.mark.parametrize(("phase", "tone"), [("Running", "running"), ("Succeeded", "good")])
def test_what_a_job_complains_of_is_marked_as_such(phase: str, tone: str) -> None:
    view = job_view(detail(job(phase=phase), Section("Needs attention", ("NonFiniteLoss: since step 12",))))
    assert (view.row.tone, view.answer_tone) == (tone, "waiting")
    assert view.sections == (("Needs attention", ("NonFiniteLoss: since step 12",)),)


def test_the_figure_and_the_caption_of_the_chart_have_the_same_loss() -> None:
    """The status has that of the step before, while a job trains."""
    course = Course(kept=tuple(LossPoint(step, loss, 0) for step, loss in ((918, 0.002), (919, 0.0008), (920, 0.001))))
    view = job_view(detail(job(progress={"step": 920, "loss": 0.0008}), course=course))
    (figure,) = (each for each in view.figures if each.title == "Loss")
    assert (figure.value, figure.detail) == ("0.001", "at step 920")
    assert view.chart is not None
    assert isinstance(view.chart.wide, StepChart)
    assert "to 0.001 at step 920; the least is 0.0008 at step 919." in view.chart.wide.summary


def test_a_loss_that_only_the_status_has_is_said_to_be_of_no_certain_step() -> None:
    view = job_view(detail(job(progress={"step": 920, "loss": 0.0008})))
    assert Figure("Loss", "0.0008", detail="as last reported") in view.figures


@pytest.mark.parametrize("phase", ["Running", "Suspended", "Restarting", "Failed"])
def test_a_throughput_is_shown_of_a_job_that_runs(phase: str) -> None:
    view = job_view(detail(job(phase=phase, progress={"step": 920, "samplesPerSecond": 812.5})))
    assert ("Throughput" in [each.title for each in view.figures]) == (phase == "Running")


@pytest.mark.parametrize(
    ("phase", "nodes", "ranks"),
    [("Running", "1/1", "4 ranks"), ("Succeeded", "2", "8 ranks"), (STOPPED, "2", "8 ranks")],
)
def test_an_elastic_job_has_the_ranks_of_its_size_now(phase: str, nodes: str, ranks: str) -> None:
    view = job_view(detail(job(phase=phase, nodes={"ready": 1, "total": 1})))
    (figure,) = (each for each in view.figures if each.title == "Nodes")
    assert (figure.value, figure.detail) == (nodes, ranks)


def test_the_slowest_rank_is_shown_with_the_table_of_ranks_and_what_slows_all_with_the_answer() -> None:
    reports = Reports((RankRow(0, step_seconds=0.1, data_seconds=0.0), RankRow(1, step_seconds=0.1, data_seconds=0.05)))
    sections = (Section("Ranks", ("the others wait for rank 1",)), Section("Slowed by", ("CPU limit: pod digits-0-1",)))
    view = job_view(detail(job(), *sections, reports=reports))
    assert view.sections == (("Slowed by", ("CPU limit: pod digits-0-1",)),)
    assert [row.rank for row in view.ranks.rows if row.slow] == [1]


def test_a_traceback_is_shown_once_with_its_failure() -> None:
    lines = ("ImportError: a module is missing", "rank 0 raised it", "Traceback:", "  File", "rank 0 of pod digits-0-0")
    view = job_view(detail(job(), Section("Cause", lines)))
    assert view.sections == (("Cause", (lines[0], lines[1], lines[-1])),)


def test_failures_are_shown_newest_first_and_the_last_one_in_full() -> None:
    last = failure(1, 5, message="short")
    whole = last | {
        "message": "short\nand the traceback",
        "rank": 3,
        "step": 340,
        "snapshotStep": 300,
        "signal": "SIGKILL",
    }
    found = job_view(detail(job(failures=[failure(0, 20), last], lastFailure=whole))).failures
    assert [item.message for item in found] == ["short\nand the traceback", ""]
    assert found[0].place == "attempt 1 · rank 3 · digits-1-1 · step 340 · SIGKILL"
    assert found[0].lost == "40 steps after the snapshot of step 300"
    assert found[0].when == "5m ago"


def test_a_snapshot_is_said_to_be_verified_only_if_it_is_known() -> None:
    snapshots = (SnapshotRow(400, NOW, "periodic", 1, 2_500_000), SnapshotRow(300, NOW))
    found = job_view(detail(job(snapshot={"step": 400, "time": ago(minutes=1), "verified": True}), snapshots=snapshots))
    assert [(item.state, item.size) for item in found.snapshots] == [("newest, verified", "2.5 MB"), ("", "")]


def test_events_are_newest_first_and_bounded() -> None:
    events = tuple(EventRow(NOW - timedelta(seconds=500 - n), False, "", f"E{n}", "") for n in range(300))
    view = job_view(detail(job(), events=events))
    assert (view.events[0].reason, len(view.events), view.more_events) == ("E299", 200, 100)


def test_a_job_that_has_ended_is_looked_at_less_often() -> None:
    assert (job_view(detail(job())).seconds, job_view(detail(job(phase="Succeeded"))).seconds) == (2, 10)


@pytest.mark.parametrize(
    ("count", "text"), [(None, ""), (999, "999 B"), (1_840_000, "1.84 MB"), (999_600, "1 MB"), (3e15, "3000 TB")]
)
def test_sizes_are_in_words(count: int | None, text: str) -> None:
    assert size_in_words(count) == text
