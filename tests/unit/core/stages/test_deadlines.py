"""Deadlines: when a job fails for having taken too long, what it says then, and when to look again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, ended, heard, in_phase, later, make_job, make_pod, seen, succeeded
from looks import at, look

from ddpjob_operator.api.status import DDPJobStatus, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.failure.detect import Retry
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.deadlines import ACTIVE, STARTUP, deadlines, missed_deadline, seconds_to_next
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreatePod, DeletePod, Plan
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import InitializerView, Observed, PodPhase

GANG = (make_pod(0), make_pod(1))
NO_IMAGE = make_pod(1, "Pending", reason="ErrImagePull", message="not found")


def begun(phase: Phase, ago: float, **fields: Any) -> DDPJobStatus:
    """The status of a job that began `ago` seconds before NOW."""
    return in_phase(phase, start_time=later(-ago), **fields)


def failure(decided: Plan) -> tuple[str, str] | None:
    found = cond.find(decided.status.conditions, cond.FAILED)
    return (found.reason, found.message) if found and found.status == "True" else None


def reason(decided: Plan) -> str | None:
    found = failure(decided)
    return found[0] if found else None


def conditions(*held: str, ago: float = 0.0) -> tuple[Any, ...]:
    return tuple(
        condition
        for type_ in held
        for condition in cond.set_condition((), cond.Update(type_, True, "X", ""), later(-ago), 1)
    )


# The active deadline


@pytest.mark.parametrize(
    ("status", "missed"),
    [
        pytest.param(begun(Phase.RUNNING, 99.9), False, id="not yet"),
        pytest.param(begun(Phase.RUNNING, 100), True, id="to the second"),
        pytest.param(begun(Phase.STARTING, 100), True, id="a gang that starts is active"),
        pytest.param(begun(Phase.RESTARTING, 100, attempt=1, restart_at=later(60)), True, id="so is one that waits"),
        pytest.param(begun(Phase.RUNNING, 159.9, suspended_seconds=60.0), False, id="suspensions are left out"),
        pytest.param(begun(Phase.RUNNING, 160, suspended_seconds=60.0), True, id="and nothing else is"),
        pytest.param(DDPJobStatus(), False, id="a job that has not begun"),
    ],
)
def test_a_job_that_is_active_for_too_long_fails(status: DDPJobStatus, missed: bool) -> None:
    pods = GANG if status.attempt == 0 and status.phase is not None else ()
    decided = look(make_job(status, activeDeadlineSeconds=100), seen(*pods))
    assert (reason(decided) == "DeadlineExceeded") is missed


def test_it_says_how_far_training_has_come_and_what_is_kept() -> None:
    status = begun(
        Phase.RUNNING,
        100,
        progress=Progress(step=120),
        snapshot=SnapshotStatus(step=100, time=NOW, verified=True),
    )
    decided = look(make_job(status, activeDeadlineSeconds=100), seen(*GANG))
    said = failure(decided)
    assert said is not None
    assert "active for 100 s (activeDeadlineSeconds)" in said[1]
    assert "training had reached step 120, the snapshot of step 100 is kept" in said[1]
    last = decided.status.last_failure
    assert last is not None
    assert (last.reason, last.step, last.snapshot_step) == ("DeadlineExceeded", 120, 100)
    assert (decided.status.phase, decided.status.restarts) == (Phase.FAILED, 0)
    assert decided.status_first


def test_its_pods_have_the_time_to_save_a_snapshot_even_if_the_operator_dies_between() -> None:
    decided = look(make_job(begun(Phase.RUNNING, 100), activeDeadlineSeconds=100), seen(*GANG))
    graces = [action.grace_seconds for action in decided.actions if isinstance(action, DeletePod)]
    assert graces == [None, None]
    again = look(make_job(decided.status, activeDeadlineSeconds=100), seen(*GANG))
    assert [action.grace_seconds for action in again.actions if isinstance(action, DeletePod)] == graces


def test_a_gang_that_is_done_at_the_very_moment_has_succeeded() -> None:
    decided = look(make_job(begun(Phase.RUNNING, 100), activeDeadlineSeconds=100), seen(succeeded(0), succeeded(1)))
    assert decided.status.phase is Phase.SUCCEEDED


def test_a_suspended_job_misses_no_deadline_and_is_not_woken_for_one() -> None:
    status = begun(Phase.SUSPENDED, 1000, conditions=conditions(cond.SUSPENDED, ago=10))
    decided = look(make_job(status, suspend=True, activeDeadlineSeconds=100, startupDeadlineSeconds=1), seen())
    assert (decided.status.phase, decided.requeue_after) == (Phase.SUSPENDED, None)


def test_a_job_that_is_being_suspended_misses_no_deadline() -> None:
    status = look(make_job(begun(Phase.RUNNING, 99), suspend=True), seen(*GANG)).status
    decided = look(make_job(status, suspend=True, activeDeadlineSeconds=100), seen(*GANG), 60)
    assert decided.status.phase is Phase.RUNNING


def test_the_time_of_a_suspension_does_not_count() -> None:
    status = begun(Phase.SUSPENDED, 90, attempt=0, conditions=conditions(cond.SUSPENDED, ago=80))
    resumed = look(make_job(status, activeDeadlineSeconds=60), seen()).status
    assert resumed.phase is Phase.RESTARTING
    gang = (make_pod(0, attempt=1), make_pod(1, attempt=1))
    assert look(make_job(resumed, activeDeadlineSeconds=60), seen(*gang, attempt=1), 49.9).status.phase is Phase.RUNNING
    assert reason(look(make_job(resumed, activeDeadlineSeconds=60), seen(*gang, attempt=1), 50)) == "DeadlineExceeded"


# The startup deadline


@pytest.mark.parametrize(
    ("attempt_ago", "data_ago", "missed"),
    [
        pytest.param(99.9, 5000, False, id="the data were ready long before this attempt"),
        pytest.param(100, 5000, True, id="which is over in its own time"),
        pytest.param(5000, 99.9, False, id="the data have just come"),
        pytest.param(5000, 100, True, id="and a gang has its time from then on"),
    ],
)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
def test_a_gang_has_its_startup_time_from_its_attempt_or_from_its_data_whichever_is_later(
    phase: Phase, attempt_ago: float, data_ago: float, missed: bool
) -> None:
    ready = conditions(cond.INITIALIZED, ago=data_ago)
    status = begun(phase, 9000, attempt=1, attempt_start_time=later(-attempt_ago), conditions=ready)
    initializers = [{"name": "data", "script": "true", "path": "data"}]
    job = make_job(status, startupDeadlineSeconds=100, initializers=initializers)
    decided = look(job, seen(make_pod(0, attempt=1), make_pod(1, "Pending", attempt=1), attempt=1))
    assert (reason(decided) == "StartupDeadlineExceeded") is missed


@pytest.mark.parametrize(
    ("status", "missed"),
    [
        pytest.param(begun(Phase.STARTING, 99.9), False, id="not yet"),
        pytest.param(begun(Phase.STARTING, 100), True, id="to the second"),
        pytest.param(begun(Phase.PENDING, 100), True, id="a Service or claim that is refused"),
        pytest.param(begun(Phase.RUNNING, 100), False, id="a gang that runs has started"),
        pytest.param(
            begun(Phase.RESTARTING, 1000, attempt_start_time=later(-99.9)), False, id="each attempt has its own"
        ),
        pytest.param(begun(Phase.RESTARTING, 1000, attempt_start_time=later(-100)), True, id="which ends too"),
        pytest.param(
            begun(Phase.RESTARTING, 1000, attempt_start_time=later(-300), restart_at=later(-99.9)),
            False,
            id="the backoff before an attempt is left out",
        ),
        pytest.param(
            begun(Phase.RESTARTING, 1000, attempt_start_time=later(-300), restart_at=later(-100)),
            True,
            id="but no more",
        ),
        pytest.param(
            begun(Phase.RESTARTING, 1000, attempt_start_time=later(-300), restart_at=later(10)),
            False,
            id="during a backoff",
        ),
    ],
)
def test_a_gang_that_does_not_start_fails_the_job(status: DDPJobStatus, missed: bool) -> None:
    decided = look(make_job(status, startupDeadlineSeconds=100), seen(make_pod(0), make_pod(1, "Pending")))
    assert (reason(decided) == "StartupDeadlineExceeded") is missed
    assert not missed or not [action for action in decided.actions if isinstance(action, CreatePod)]


@pytest.mark.parametrize(
    ("status", "observed", "words"),
    [
        pytest.param(
            begun(Phase.STARTING, 100, conditions=conditions(cond.DEGRADED)),
            seen(make_pod(0)),
            "X: ",
            id="the trouble that is in the status",
        ),
        pytest.param(
            begun(Phase.STARTING, 100),
            seen(problem=Problem("QuotaExceeded", "exceeded quota: pods")),
            "QuotaExceeded: exceeded quota: pods",
            id="what the API server refused",
        ),
        pytest.param(
            begun(Phase.STARTING, 100),
            seen(make_pod(0), NO_IMAGE),
            "1 of 2 pods run; digits-0-1: not found",
            id="what a pod waits for",
        ),
        pytest.param(begun(Phase.STARTING, 100), seen(make_pod(0)), "1 of 2 pods run", id="nothing in particular"),
        pytest.param(
            begun(Phase.STARTING, 100, nodes=3),
            seen(make_pod(0)),
            "1 of 3 pods run",
            id="of as many as this attempt has",
        ),
    ],
)
def test_it_says_what_was_in_the_way(status: DDPJobStatus, observed: Observed, words: str) -> None:
    said = failure(look(make_job(status, startupDeadlineSeconds=100), observed))
    assert said is not None
    assert "attempt 0 did not start within 100 s (startupDeadlineSeconds)" in said[1]
    assert words in said[1]


@pytest.mark.parametrize(
    ("report", "missed"),
    [
        pytest.param({"phase": "rendezvous"}, True, id="the ranks have not met"),
        pytest.param({"phase": "init"}, False, id="they have"),
        pytest.param({"phase": "rendezvous", "time": later(-31).timestamp()}, False, id="said long ago"),
        pytest.param({"phase": "rendezvous", "time": later(-30).timestamp()}, False, id="said 30 s ago"),
        pytest.param({"phase": "rendezvous", "time": None}, False, id="said nobody knows when"),
        pytest.param({"phase": "rendezvous", "attempt": 1}, False, id="said of another attempt"),
        pytest.param({"phase": "rendezvous", "uid": "other"}, False, id="said of another job"),
        pytest.param(None, False, id="nobody can ask"),
    ],
)
def test_rendezvous_is_a_part_of_starting(report: dict[str, Any] | None, missed: bool) -> None:
    reported = report and heard(**{"time": NOW.timestamp()} | report)
    decided = look(make_job(begun(Phase.RUNNING, 100), startupDeadlineSeconds=100), seen(*GANG, report=reported))
    assert (reason(decided) == "StartupDeadlineExceeded") is missed
    assert not missed or str(failure(decided)).endswith(": all pods run, but their ranks have not met')")


@pytest.mark.parametrize(
    ("step", "reported", "missed"),
    [
        pytest.param(None, {"rendezvous": 9.0}, True, id="they have not met yet"),
        pytest.param(118, {"rendezvous": 9.0}, False, id="a rank that trained waits for the next group"),
        pytest.param(None, {"first_step": 1.0, "training": 80.0}, False, id="a new node rank 0 waits to join"),
    ],
)
def test_ranks_that_meet_again_after_a_live_recovery_have_started(
    step: int | None, reported: dict[str, float], missed: bool
) -> None:
    """The job would fail hours after its start, for a rank that was lost."""
    spec: dict[str, Any] = {"startupDeadlineSeconds": 100, "restart": {"scope": "Live"}}
    report = heard(phase="rendezvous", time=NOW.timestamp(), step=step)
    status = begun(Phase.RUNNING, 7200, spec=spec, reported_seconds=reported)
    decided = look(make_job(status, **spec), seen(*GANG, report=report))
    assert (reason(decided) == "StartupDeadlineExceeded") is missed


def test_a_backoff_does_not_count_while_the_ranks_meet() -> None:
    status = begun(Phase.RESTARTING, 1000, attempt=1, attempt_start_time=later(-200), restart_at=later(-50))
    gang = (make_pod(0, attempt=1), make_pod(1, attempt=1))
    running = look(make_job(status, startupDeadlineSeconds=100), seen(*gang, attempt=1)).status
    assert running.phase is Phase.RUNNING
    for seconds, missed in ((49.9, False), (50, True)):
        report = heard(attempt=1, phase="rendezvous", time=later(seconds).timestamp())
        job = make_job(running, startupDeadlineSeconds=100)
        decided = look(job, seen(*gang, attempt=1, report=report), seconds)
        assert (reason(decided) == "StartupDeadlineExceeded") is missed


def test_the_time_of_an_initializer_does_not_count_between_two_tries() -> None:
    spec = {"startupDeadlineSeconds": 100, "initializers": [{"name": "data", "script": "true", "path": "data"}]}
    status = begun(Phase.PENDING, 90)
    pod = InitializerView("digits-init-0", "u", PodPhase.RUNNING, scheduled=True)
    status = look(make_job(status, **spec), seen(initializer=pod)).status
    pod = replace(pod, phase=PodPhase.FAILED, termination=ended(1, ago=-20))
    failed_once = look(make_job(status, **spec), seen(initializer=pod), 20).status
    assert failed_once.initializer_failures == 1
    for known in (status, failed_once):  # its pod may vanish as well
        assert reason(look(make_job(known, **spec), seen(), 21)) is None


def test_of_two_deadlines_the_one_that_passed_first_is_the_reason() -> None:
    job = make_job(begun(Phase.STARTING, 500), activeDeadlineSeconds=200, startupDeadlineSeconds=100)
    assert reason(look(job, seen())) == "StartupDeadlineExceeded"
    job = make_job(begun(Phase.STARTING, 500), activeDeadlineSeconds=100, startupDeadlineSeconds=200)
    assert reason(look(job, seen())) == "DeadlineExceeded"


def test_a_job_that_was_created_suspended_starts_its_startup_deadline_when_it_is_resumed() -> None:
    status = plan(make_job(suspend=True), seen(attempt=None), later(-1000), DEFAULTS).status
    resumed = look(make_job(status, startupDeadlineSeconds=100), seen())
    assert (resumed.status.phase, resumed.requeue_after) == (Phase.STARTING, 3.0)
    waiting = seen(make_pod(0, "Pending"), make_pod(1, "Pending"))
    assert look(make_job(resumed.status, startupDeadlineSeconds=100), waiting, 99.9).status.phase is Phase.STARTING
    assert look(make_job(resumed.status, startupDeadlineSeconds=100), waiting, 100).status.phase is Phase.FAILED


# Waking


@pytest.mark.parametrize(
    ("spec", "status", "wait"),
    [
        pytest.param({"activeDeadlineSeconds": 100}, begun(Phase.RUNNING, 30), 70.0, id="at the active deadline"),
        pytest.param({"startupDeadlineSeconds": 100}, begun(Phase.RUNNING, 30), None, id="a gang that runs has none"),
        pytest.param({}, begun(Phase.RUNNING, 30), None, id="no deadline"),
        pytest.param(
            {"startupDeadlineSeconds": 32}, begun(Phase.STARTING, 30, attempt_start_time=later(-30)), 2.0,
            id="at the startup deadline",
        ),
        pytest.param(
            {"activeDeadlineSeconds": 31, "startupDeadlineSeconds": 32}, begun(Phase.STARTING, 30), 1.0,
            id="at the first of two",
        ),
    ],
)  # fmt: skip
def test_the_job_is_looked_at_again_at_the_very_moment(
    spec: dict[str, int], status: DDPJobStatus, wait: float | None
) -> None:
    pods = GANG if status.phase is Phase.RUNNING else (make_pod(0, "Pending"), make_pod(1, "Pending"))
    assert look(make_job(status, **spec), seen(*pods)).requeue_after == wait


def test_an_edit_of_a_deadline_takes_effect_at_once() -> None:
    status = begun(Phase.RUNNING, 100)
    assert look(make_job(status, activeDeadlineSeconds=200), seen(*GANG)).requeue_after == 100
    assert reason(look(make_job(status, activeDeadlineSeconds=100), seen(*GANG))) == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "no step was completed, there is no snapshot"),
        ({"progress": Progress(step=7)}, "training had reached step 7, there is no snapshot"),
        (
            {"progress": Progress(step=7), "snapshot": SnapshotStatus(step=5, time=NOW, verified=True)},
            "training had reached step 7, the snapshot of step 5 is kept",
        ),
    ],
    ids=["nothing", "steps", "steps and a snapshot"],
)
def test_the_active_deadline_says_what_there_is(fields: dict[str, Any], said: str) -> None:
    decided = look(make_job(begun(Phase.RUNNING, 100, **fields), activeDeadlineSeconds=100), seen(*GANG))
    assert failure(decided) == ("DeadlineExceeded", f"the job was active for 100 s (activeDeadlineSeconds); {said}")


# One at a time


BOTH = {"activeDeadlineSeconds": 100, "startupDeadlineSeconds": 50}


def under(status: DDPJobStatus, **fields: Any) -> set[str]:
    return {deadline.reason for deadline in deadlines(at(make_job(status, **BOTH), seen(**fields)))}


@pytest.mark.parametrize(
    ("phase", "pod", "starts"),
    [
        pytest.param(Phase.PENDING, None, True, id="before any pod"),
        pytest.param(Phase.PENDING, ("Pending", 0), True, id="the first pod that fetches data waits for a node"),
        pytest.param(Phase.PENDING, ("Running", 0), False, id="it fetches"),
        pytest.param(Phase.PENDING, ("Pending", 1), False, id="its second try waits"),
        pytest.param(Phase.PENDING, ("Running", 1), False, id="its second try fetches"),
        pytest.param(Phase.STARTING, ("Running", 0), True, id="the gang starts while it is still there"),
        pytest.param(Phase.RUNNING, None, False, id="the gang runs"),
    ],
)
def test_what_has_to_start_within_the_startup_deadline(phase: Phase, pod: tuple[str, int] | None, starts: bool) -> None:
    fetching = InitializerView("digits-init", "init", PodPhase(pod[0]), pod[1]) if pod else None
    assert under(begun(phase, 10), initializer=fetching) == ({ACTIVE, STARTUP} if starts else {ACTIVE})


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED])
def test_a_job_that_is_over_or_suspended_is_under_no_deadline(phase: Phase) -> None:
    assert under(begun(phase, 10)) == set()


def test_a_deadline_is_missed_at_its_very_moment_and_waited_for_no_more() -> None:
    now = at(make_job(begun(Phase.RUNNING, 100), **BOTH), seen(*GANG))
    missed = missed_deadline(now)
    assert missed is not None
    assert (missed.reason, missed.retry) == (ACTIVE, Retry.NEVER)
    assert seconds_to_next(now) is None
