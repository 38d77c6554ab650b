"""Where a job's time goes: each activity, and what a failure takes back."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW, ended, heard, in_phase, later, make_pod, make_report, seen

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.ledger.goodput import ACTIVITIES, seconds_of, with_goodput
from ddpjob_operator.core.values.changes import with_ledger
from ddpjob_operator.core.values.observed import InitializerView, Observed, PodPhase
from ddpjob_operator.core.values.trainer_report import TrainerReport

WAITS, PULLS = make_pod(0, "Pending"), make_pod(0, "Pending", scheduled=True)
RUNS = make_pod(0), make_pod(1)


def reported(phase: str = "train", **fields: Any) -> TrainerReport:
    return heard(phase=phase, **fields)


def ledger(activity: str, **fields: Any) -> Goodput:
    return Goodput(activity=activity, last_update_time=NOW, **fields)


def spent(status: DDPJobStatus) -> dict[str, float]:
    assert status.goodput is not None
    return {name: seconds for name, seconds in seconds_of(status.goodput).items() if seconds}


@pytest.mark.parametrize(
    ("phase", "observed", "activity"),
    [
        (None, Observed(), "queued"),
        (Phase.PENDING, Observed(), "queued"),
        (Phase.PENDING, Observed(initializer=InitializerView("i", "u", PodPhase.RUNNING)), "initializing"),
        (Phase.STARTING, seen(), "queued"),
        (Phase.STARTING, seen(WAITS, make_pod(1, "Pending", scheduled=True)), "queued"),
        (Phase.STARTING, seen(PULLS), "queued"),
        (Phase.STARTING, seen(PULLS, make_pod(1)), "pulling"),
        (Phase.RUNNING, seen(*RUNS), "rendezvous"),
        (Phase.RUNNING, seen(*RUNS, report=reported("requirements")), "rendezvous"),
        (Phase.RUNNING, seen(*RUNS, report=reported("load")), "rendezvous"),
        (Phase.RUNNING, seen(*RUNS, report=reported("first_step")), "first_step"),
        (Phase.RUNNING, seen(*RUNS, report=reported("done")), "unknown"),
        (Phase.RUNNING, seen(*RUNS, report=reported("train")), "training"),
        (Phase.RUNNING, seen(*RUNS, report=reported("validate")), "validating"),
        (Phase.RUNNING, seen(*RUNS, report=reported("save")), "saving"),
        (Phase.RUNNING, seen(*RUNS, report=reported("from the future")), "rendezvous"),
        (Phase.RUNNING, seen(*RUNS, report=reported("train", attempt=7)), "rendezvous"),
        (Phase.RESTARTING, seen(*RUNS), "recovering"),
        (Phase.RESTARTING, seen(WAITS), "queued"),
        (Phase.RESTARTING, seen(PULLS), "recovering"),
        (Phase.RESTARTING, seen(make_pod(0, attempt=7, deleting=True)), "recovering"),
        (Phase.RESTARTING, seen(), "queued"),
        (Phase.SUSPENDED, seen(), "suspended"),
    ],
)  # fmt: skip
def test_what_the_time_goes_into_follows_from_the_phase_the_pods_and_the_trainer(
    phase: Phase | None, observed: Observed, activity: str
) -> None:
    before = in_phase(Phase.PENDING, goodput=ledger("something else"))
    after = with_goodput(before, before.model_copy(update={"phase": phase}), observed, later(5))
    assert after.goodput is not None
    assert after.goodput.activity == activity


def test_the_clock_alone_moves_nothing() -> None:
    """A job at rest is not written to."""
    status = in_phase(Phase.RUNNING, goodput=ledger("training"))
    assert with_goodput(status, status, seen(*RUNS, report=reported()), later(3600)) is status


def test_the_nodes_of_a_script_whose_steps_cannot_be_seen_are_counted_each_minute() -> None:
    """It may run for days, in which nothing else is heard of it."""
    status = in_phase(Phase.RUNNING, goodput=ledger("unknown", unknown=5.0))
    observed = seen(*RUNS, report=reported("script", seconds={"script": 5.0}))
    assert with_goodput(status, status, observed, later(59)) is status
    once = with_goodput(status, status, observed, later(60))
    assert spent(once) == {"unknown": 65.0}
    assert with_goodput(once, once, observed, later(119)) is once
    assert spent(with_goodput(once, once, observed, later(120))) == {"unknown": 125.0}


def test_time_goes_to_the_activity_that_held() -> None:
    before = in_phase(Phase.STARTING, goodput=ledger("pulling", queued=2.0))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.RUNNING}), seen(*RUNS), later(7.25))
    assert spent(after) == {"queued": 2.0, "pulling": 7.25}


def test_a_job_begins_with_the_time_since_it_was_first_acted_on() -> None:
    before = DDPJobStatus()
    after = with_goodput(before, DDPJobStatus(phase=Phase.STARTING, start_time=later(-3)), seen(), NOW)
    assert spent(after) == {"queued": 3.0}


def test_what_the_trainer_tells_is_split_by_phase_and_the_rest_goes_to_the_activity_that_held() -> None:
    seconds = {"load": 1.0, "first_step": 2.0, "train": 5.0, "save": 0.5}
    before = in_phase(Phase.RUNNING, goodput=ledger("rendezvous"))
    after = before.model_copy(update={"progress": Progress(step=10)})
    once = with_goodput(before, after, seen(*RUNS, report=reported(seconds=seconds)), later(12))
    assert spent(once) == {"rendezvous": 4.5, "first_step": 2.0, "training": 5.0, "saving": 0.5}
    seconds = seconds | {"train": 14.0, "validate": 1.0}
    after = once.model_copy(update={"progress": Progress(step=20)})
    twice = with_goodput(once, after, seen(*RUNS, report=reported(seconds=seconds)), later(22))
    assert spent(twice) == spent(once) | {"training": 14.0, "validating": 1.0}
    assert twice.goodput is not None
    assert twice.goodput.ratio == round(14 / 22, 4)


def test_a_trainer_that_does_not_answer_for_a_while_is_not_at_its_rendezvous_again() -> None:
    before = in_phase(
        Phase.RUNNING, goodput=ledger("training", training=9.0), reported_seconds={"training": 9.0}, attempt=1
    )
    for report in (None, reported("train", attempt=0)):
        assert with_goodput(before, before, seen(*RUNS, report=report), later(30)) == before
    heard_again = seen(*RUNS, report=reported("validate", attempt=1, seconds={"train": 35.0, "validate": 4.0}))
    after = with_goodput(before, before.model_copy(update={"progress": Progress(step=1)}), heard_again, later(31))
    assert spent(after) == {"training": 36.0, "validating": 4.0}, "each second where the trainer had it"


def test_a_trainer_that_tells_of_more_time_than_there_was_gets_no_more() -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("training"))
    after = before.model_copy(update={"progress": Progress(step=10)})
    report = reported(seconds={"train": 1e9, "validate": float("nan"), "save": -5, "load": "x", "other": 3})
    assert spent(with_goodput(before, after, seen(*RUNS, report=report), later(4))) == {"training": 4.0}


def test_what_a_trainer_is_ahead_of_the_clock_is_counted_the_next_time() -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("rendezvous"))
    observed = seen(*RUNS, report=reported("load", seconds={"train": 5.0}))
    after = before.model_copy(update={"progress": Progress(step=1)})
    once = with_goodput(before, after, observed, later(3))
    assert spent(once) == {"training": 3.0}
    after = once.model_copy(update={"progress": Progress(step=2)})
    assert spent(with_goodput(once, after, observed, later(9))) == {"training": 5.0, "rendezvous": 4.0}


def test_the_time_until_the_end_of_the_pods_is_seen_is_no_training() -> None:
    """The trainer has reported each second of its training when it ended."""
    before = in_phase(Phase.RUNNING, goodput=ledger("training", training=4.0), reported_seconds={"training": 4.0})
    message = make_report("Completed", step=100, seconds={"train": 9.0})
    pods = (make_pod(0, "Succeeded", termination=ended(0, message)), make_pod(1, "Succeeded", termination=ended(0)))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.SUCCEEDED}), seen(*pods), later(6))
    assert spent(after) == {"training": 9.0, "unknown": 1.0}


@pytest.mark.parametrize(("code", "training"), [(0, {"training": 9.0, "unknown": 3.0}), (1, {"training": 12.0})])
def test_the_time_from_the_end_of_node_rank_0_to_that_of_the_others_is_no_training(
    code: int, training: dict[str, float]
) -> None:
    """Unless it failed, and a spare may go on in its place."""
    before = in_phase(Phase.RUNNING, goodput=ledger("training", training=4.0), reported_seconds={"training": 4.0})
    message = make_report("WorkerKilled" if code else "Completed", step=100, seconds={"train": 9.0})
    pods = make_pod(0, "Failed" if code else "Succeeded", termination=ended(code, message)), make_pod(1)
    running = before.model_copy(update={"progress": Progress(step=100)})
    after = with_goodput(before, running, seen(*pods), later(8))
    assert spent(after) == training


def test_a_step_under_way_when_the_trainer_was_asked_is_training_in_the_end() -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("unknown"))
    observed = seen(*RUNS, report=reported("train", step=2, seconds={"script": 3.0, "train": 1.5}))
    running = with_goodput(before, before.model_copy(update={"progress": Progress(step=2)}), observed, later(5))
    assert spent(running) == {"unknown": 3.5, "training": 1.5}, "half a second of a step is not reported yet"
    message = make_report("Completed", step=20, seconds={"script": 3.0, "train": 10.0, "done": 1.0})
    pods = (make_pod(0, "Succeeded", termination=ended(0, message)), make_pod(1, "Succeeded", termination=ended(0)))
    after = with_goodput(running, running.model_copy(update={"phase": Phase.SUCCEEDED}), seen(*pods), later(14))
    assert spent(after) == {"unknown": 4.0, "training": 10.0}


@pytest.mark.parametrize(
    ("ago", "training"), [(0, 4.0), (1.5, 5.5), (60, 9.0), (-60, 4.0)], ids=["new", "old", "clock behind", "ahead"]
)
def test_a_report_is_as_old_as_it_says_within_what_clocks_may_differ(ago: float, training: float) -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("rendezvous"))
    time = later(10 - ago).timestamp()
    observed = seen(*RUNS, report=reported("train", step=2, seconds={"script": 1.0, "train": 4.0}, time=time))
    after = with_goodput(before, before.model_copy(update={"progress": Progress(step=2)}), observed, later(10))
    assert spent(after) == (
        {"unknown": 1.0, "training": training} | ({"rendezvous": 9 - training} if training < 9 else {})
    )


def failed_at(step: int, kept: int | None, *, reason: str = "WorkerKilled", began: int = 0) -> DDPJobStatus:
    """A job of 100 s of training whose attempt ends at `step`, with a snapshot of step `kept`."""
    before = in_phase(
        Phase.RUNNING,
        goodput=ledger("training", training=100.0),
        reported_seconds={"training": 100.0},
        progress=Progress(step=step),
    )
    after = before.model_copy(
        update={
            "phase": Phase.RESTARTING,
            "attempt": 1,
            "last_failure": FailureStatus(attempt=0, time=NOW, reason=reason),
            "snapshot": None if kept is None else SnapshotStatus(step=kept, time=NOW),
        }
    )
    message = make_report(reason, step=step, resumedFromStep=began, seconds={"train": 100.0})
    observed = seen(make_pod(0, "Failed", termination=ended(1, message)), make_pod(1))
    return with_goodput(before, after, observed, later(10))


@pytest.mark.parametrize(
    ("step", "kept", "began", "training", "lost"),
    [
        (100, 80, 0, 80.0, 20),
        (100, 100, 0, 100.0, 0),
        (100, None, 0, 0.0, 100),
        (100, 80, 60, 50.0, 20),
        (100, 100, 100, 100.0, 0),
    ],
    ids=["a fifth", "nothing", "everything", "half of what this attempt did", "an attempt that took no step"],
)
def test_training_that_no_snapshot_kept_was_recovering(
    step: int, kept: int | None, began: int, training: float, lost: int
) -> None:
    over = failed_at(step, kept, began=began)
    assert spent(over) == {"training": 100.0, "recovering": 10.0}, "what is lost is known once the next one has resumed"
    assert over.internal.reported_seconds == {}
    assert over.goodput is not None
    after = resumed(over, kept or 0)
    assert after.goodput is not None
    recovering = 110 - training + (RESTART_SECONDS if over.internal.unresolved_steps else 0)
    assert spent(after) == ({"training": training} if training else {}) | {"recovering": recovering}
    assert (over.goodput.recomputed_steps, after.goodput.recomputed_steps) == (0, lost)
    assert after.internal.unresolved_steps is None


RESTART_SECONDS = 5.0


def resumed(over: DDPJobStatus, step: int | None, first: int | None = None) -> DDPJobStatus:
    """The next attempt reports that it has resumed from `step`."""
    report = reported(attempt=over.attempt, step=first if first is not None else step, resumedFromStep=step)
    progress = over.model_copy(update={"progress": Progress(step=report.step)})
    return with_goodput(over, progress, seen(*RUNS, report=report), later(10 + RESTART_SECONDS))


def test_a_snapshot_that_the_ranks_saved_when_they_left_loses_nothing() -> None:
    """It is not known yet when the attempt ends."""
    after = resumed(failed_at(100, 20), 100)
    assert after.goodput is not None
    assert after.goodput.recomputed_steps == 0
    assert spent(after) == {"training": 100.0, "recovering": 10.0 + RESTART_SECONDS}


@pytest.mark.parametrize("heard_of", [None, 60], ids=["no step was heard of", "an older step was heard of"])
def test_steps_are_lost_up_to_the_last_one_of_the_pod_that_failed(heard_of: int | None) -> None:
    """Node rank 0 still runs when the failure is seen, and was asked seconds ago."""
    before = in_phase(Phase.RUNNING, goodput=ledger("training"))
    message = make_report("WorkerKilled", step=100, resumedFromStep=40)
    pods = make_pod(0), make_pod(1, "Failed", termination=ended(1, message))
    over = before.model_copy(update={"phase": Phase.RESTARTING, "attempt": 1})
    over = with_goodput(before, over, seen(*pods, report=reported(step=heard_of)), later(10))
    after = resumed(over, 80)
    assert after.goodput is not None
    assert after.goodput.recomputed_steps == 20


def test_a_script_that_does_not_say_where_it_resumes_has_lost_what_no_snapshot_kept() -> None:
    after = resumed(failed_at(100, 80), None, first=1)
    assert after.goodput is not None
    assert after.goodput.recomputed_steps == 20


def test_an_attempt_that_ends_before_it_resumes_loses_nothing_of_its_own() -> None:
    first = failed_at(100, 80)
    over = first.model_copy(update={"attempt": 2})
    second = with_goodput(first, over, seen(make_pod(0, "Failed", attempt=1)), later(12))
    assert second.internal.unresolved_steps == first.internal.unresolved_steps
    third = resumed(second, 80)
    assert third.goodput is not None
    assert third.goodput.recomputed_steps == 20


def test_what_the_last_attempt_of_a_failed_job_has_trained_beyond_its_snapshot_is_lost() -> None:
    before = failed_at(100, 80)
    over = before.model_copy(update={"phase": Phase.FAILED})
    after = with_goodput(before, over, seen(), later(12))
    assert after.goodput is not None
    assert (after.goodput.recomputed_steps, after.internal.unresolved_steps) == (20, None)


def test_a_job_that_has_succeeded_has_lost_nothing_more() -> None:
    before = failed_at(100, 80)
    after = with_goodput(before, before.model_copy(update={"phase": Phase.SUCCEEDED}), seen(), later(12))
    assert after.goodput is not None
    assert (after.goodput.recomputed_steps, after.internal.unresolved_steps) == (0, None)


def test_the_silence_before_a_stall_was_found_counts_as_stalled() -> None:
    assert spent(failed_at(100, 100, reason="Stalled")) == {"training": 100.0, "stalled": 10.0}


def test_a_suspension_has_no_part_in_the_ratio() -> None:
    before = in_phase(Phase.SUSPENDED, goodput=ledger("suspended", training=30.0, queued=10.0))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.RESTARTING}), seen(), later(1000))
    assert after.goodput is not None
    assert (after.goodput.suspended, after.goodput.ratio) == (1000.0, 0.75)


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    before = in_phase(Phase.STARTING, goodput=ledger("pulling", queued=2.0))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.RUNNING}), seen(*RUNS), later(-3600))
    assert spent(after) == {"queued": 2.0}
    assert after.goodput is not None
    assert after.goodput.last_update_time == NOW


def test_every_activity_is_a_field_of_the_status_with_words_for_people() -> None:
    assert set(ACTIVITIES) == {name for name, field in Goodput.model_fields.items() if field.annotation is float}
    assert all(Goodput.model_fields[name].description for name in ACTIVITIES)


def test_the_ratio_is_unknown_while_no_step_of_a_script_can_be_seen() -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("unknown", queued=10.0))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.SUCCEEDED}), seen(), later(100))
    assert after.goodput is not None
    assert (after.goodput.unknown, after.goodput.ratio) == (100.0, None)


def test_the_ratio_of_a_script_whose_steps_were_seen_counts_the_time_before_the_first() -> None:
    before = in_phase(Phase.RUNNING, goodput=ledger("training", unknown=50.0))
    after = with_goodput(before, before.model_copy(update={"phase": Phase.SUCCEEDED}), seen(), later(50))
    assert after.goodput is not None
    assert after.goodput.ratio == 0.5


def test_steps_lost_are_never_more_than_a_status_can_carry() -> None:
    """A status with a larger number would be refused by the API server each time."""
    most = 2**63 - 1
    before = in_phase(Phase.RUNNING, attempt=0, goodput=ledger("training", recomputed_steps=most - 10))
    before = before.model_copy(update={"progress": Progress(step=most)})
    before = with_ledger(before, before.goodput or Goodput(), {"training": 5.0}, None)
    after = before.model_copy(update={"phase": Phase.FAILED})
    counted = with_goodput(before, after, seen(), later(60)).goodput
    assert counted is not None
    assert counted.recomputed_steps == most
