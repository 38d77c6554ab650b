"""Whether a failed gang is started again, and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import NOW, later, make_job
from hypothesis import example, given, settings
from hypothesis import strategies as st
from looks import at
from tests.support.examples import examples

from ddpjob_operator.api.status import DDPJobStatus, Progress, SnapshotStatus
from ddpjob_operator.core.failure.budget import CLOSE_FAILURES, CLOSE_SECONDS
from ddpjob_operator.core.failure.decide import (
    FAILURES_KEPT,
    KEPT_MESSAGE_LIMIT,
    STARTUP_SECONDS,
    GiveUp,
    RestartIn,
    decide,
    remember,
    with_clause,
)
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.ledger.progress import failure_status
from ddpjob_operator.core.values.trainer_report import TerminationReport

KILLED = Failure("WorkerKilled", "rank 1 was killed by SIGKILL", Retry.YES, signal="SIGKILL", step=120)
RAISED = Failure("WorkerException", "rank 0 raised ValueError after step 120: bad", Retry.YES, exit_code=1, step=120)
EVICTED = Failure("Evicted", "The node was low on resource: memory.", Retry.YES)


def unseen(seconds: float) -> Failure:
    """The same error after so many seconds in which no step was seen."""
    return replace(RAISED, step=None, report=TerminationReport(seconds={"script": seconds}))


def verdict(failure: Failure, status: DDPJobStatus | None = None, **policy: Any) -> RestartIn | GiveUp:
    return decide(at(make_job(status, restart=policy)), failure)


def restarted(failure: Failure, status: DDPJobStatus | None = None, **policy: Any) -> RestartIn:
    found = verdict(failure, status, **policy)
    assert isinstance(found, RestartIn), found
    return found


def after(failure: Failure, **fields: Any) -> DDPJobStatus:
    """The status that a failure left."""
    record = failure_status(DDPJobStatus(), failure, NOW)
    return DDPJobStatus(last_failure=record, failures=remember((), record), **fields)


def test_a_failure_counts_and_a_disruption_does_not() -> None:
    counted, free = restarted(KILLED), restarted(EVICTED)
    assert (counted.status.restarts, counted.status.restarts_since_progress, counted.status.disruptions) == (1, 1, 0)
    assert (free.status.restarts, free.status.restarts_since_progress, free.status.disruptions) == (0, 0, 1)


def test_after_progress_a_restart_is_immediate_and_the_budget_is_whole_again() -> None:
    snapshot = SnapshotStatus(step=200, time=NOW, verified=True)
    before = after(KILLED, restarts=7, restarts_since_progress=3, snapshot=snapshot)
    again = restarted(KILLED, before, maxRestarts=3)
    assert (again.seconds, again.status.restarts_since_progress, again.status.restarts) == (0.0, 1, 8)


def test_an_unverified_snapshot_refills_nothing() -> None:
    snapshot = SnapshotStatus(step=200, time=NOW, verified=False)
    before = after(KILLED, restarts=3, restarts_since_progress=3, snapshot=snapshot)
    assert isinstance(verdict(KILLED, before, maxRestarts=3), GiveUp)


@pytest.mark.parametrize(
    ("most", "used", "again"), [(10, 9, True), (10, 10, False), (10, 11, False), (0, 0, False), (1, 0, True)]
)
def test_the_budget_is_exactly_max_restarts(most: int, used: int, again: bool) -> None:
    found = verdict(KILLED, DDPJobStatus(restarts=used, restarts_since_progress=used), maxRestarts=most)
    assert isinstance(found, RestartIn) is again
    if isinstance(found, GiveUp):
        assert found.reason == "BackoffLimitExceeded"
        assert KILLED.message in found.message


@pytest.mark.parametrize("failure", [EVICTED, KILLED], ids=["a disruption", "what a rule calls free"])
def test_what_is_free_needs_no_budget(failure: Failure) -> None:
    policy = {"maxRestarts": 0, "rules": [{"reasons": ["WorkerKilled"], "action": "RestartAndIgnoreMaxRestarts"}]}
    assert restarted(failure, DDPJobStatus(restarts=99, restarts_since_progress=99), **policy).status.disruptions == 1


def test_restarts_that_are_free_wait_longer_each_time_as_well() -> None:
    status, waits = DDPJobStatus(), []
    for _ in range(4):
        found = restarted(EVICTED, status)
        status, waits = found.status, [*waits, found.seconds]
    assert all(later >= 1.3 * earlier for earlier, later in pairwise(waits)), waits


def test_with_a_window_old_restarts_do_not_count() -> None:
    times = (later(-700), later(-500), later(-10))
    before = DDPJobStatus(restarts=9, restarts_since_progress=9, restart_times=times)
    assert restarted(KILLED, before, maxRestarts=3, windowSeconds=600).status.restart_times == (*times[1:], NOW)
    found = verdict(KILLED, before, maxRestarts=2, windowSeconds=600)
    assert isinstance(found, GiveUp)
    assert found.message.startswith("all 2 restarts of the last 600 s are used; last failure: rank 1 was killed")


def test_what_makes_no_sense_to_retry_is_given_up_with_budget_left() -> None:
    found = verdict(Failure("ImportError", "no module named foo", Retry.NEVER, exit_code=64))
    assert found == GiveUp("ImportError", "no module named foo; a retry would fail in the same way")


def test_a_rule_that_fails_the_job_is_named() -> None:
    found = verdict(KILLED, rules=[{"signals": ["SIGKILL"], "action": "Fail"}])
    assert found == GiveUp("WorkerKilled", f"{KILLED.message}; restart.rules[0] (signal SIGKILL) says Fail")


@pytest.mark.parametrize(
    ("policy", "failure", "said"),
    [
        pytest.param({}, KILLED, "restart 1 of 10 without progress", id="a failure"),
        pytest.param(
            {"maxRestarts": 3, "windowSeconds": 600},
            KILLED,
            "restart 1 of 3 within 600 s without progress",
            id="window",
        ),
        pytest.param({}, EVICTED, "Evicted is a disruption; it does not count", id="a disruption"),
        pytest.param(
            {"rules": [{"action": "RestartAndIgnoreMaxRestarts"}]},
            KILLED,
            "restart.rules[0] (any failure) says RestartAndIgnoreMaxRestarts; it does not count",
            id="a rule",
        ),
        pytest.param(
            {"rules": [{"action": "Restart"}]},
            EVICTED,
            "restart.rules[0] (any failure) says Restart; restart 1 of 10 without progress",
            id="a rule that counts",
        ),
    ],
)
def test_what_decided_and_what_it_costs_is_said(policy: Any, failure: Failure, said: str) -> None:
    assert restarted(failure, **policy).explanation == said


def test_excluding_the_node_is_a_restart_that_counts() -> None:
    found = restarted(replace(KILLED, node_name="node-1"), rules=[{"action": "ExcludeNode"}])
    assert (found.status.excluded_nodes, found.status.restarts) == (("node-1",), 1)
    assert restarted(KILLED).status.excluded_nodes == ()


# The same again


@pytest.mark.parametrize(
    ("first", "second", "repeated"),
    [
        pytest.param(RAISED, RAISED, True, id="the same error at the same step"),
        pytest.param(RAISED, replace(RAISED, step=121), False, id="at another step"),
        pytest.param(RAISED, replace(RAISED, step=None), False, id="at a step that nobody knows"),
        pytest.param(replace(RAISED, step=None), replace(RAISED, step=None), False, id="twice at an unknown step"),
        pytest.param(unseen(5.0), unseen(5.0), True, id="twice before the first step"),
        pytest.param(unseen(5.0), unseen(601.0), False, id="twice without a step, after minutes"),
        pytest.param(RAISED, unseen(5.0), False, id="before the first step, after one that trained"),
        pytest.param(RAISED, replace(RAISED, message="rank 0 raised KeyError: bad"), False, id="another error"),
        pytest.param(RAISED, replace(RAISED, reason="OutOfMemory"), False, id="another reason"),
        pytest.param(
            RAISED,
            replace(RAISED, message="rank 3 raised ValueError after step 120: bad", node_rank=1),
            True,
            id="on another rank",
        ),
        pytest.param(
            replace(RAISED, message="CUDA error at 0x7f00beef: 12.5 MiB"),
            replace(RAISED, message="CUDA error at 0x7fffdead: 80 MiB"),
            False,
            id="12.5 is two numbers",
        ),
        pytest.param(
            replace(RAISED, message=f"{RAISED.message}\n  line 1"),
            replace(RAISED, message=f"{RAISED.message}\n  line 2 of another"),
            True,
            id="with another traceback",
        ),
        pytest.param(KILLED, KILLED, False, id="a kill comes from outside"),
        pytest.param(
            replace(KILLED, signal="SIGSEGV"), replace(KILLED, signal="SIGSEGV"), True, id="a crash comes from inside"
        ),
        pytest.param(EVICTED, EVICTED, False, id="a disruption is the cluster's doing"),
        pytest.param(
            replace(RAISED, reason="PeerLost"), replace(RAISED, reason="PeerLost"), False, id="a lost peer is no error"
        ),
    ],
)
def test_the_same_error_at_the_same_step_twice_is_the_last(first: Failure, second: Failure, repeated: bool) -> None:
    found = verdict(second, after(first))
    assert (isinstance(found, GiveUp) and found.reason == "RepeatedFailure") is repeated


def test_a_repeated_failure_names_the_attempt_before_and_a_way_out() -> None:
    found = verdict(RAISED, after(RAISED))
    assert isinstance(found, GiveUp)
    first = found.message.splitlines()[0]
    assert first.startswith("rank 0 raised ValueError after step 120: bad; attempt 0 failed with the same error")
    assert "step 120" in first
    assert "restart.rules" in first


@pytest.mark.parametrize(
    ("failure", "where"),
    [(RAISED, "at the same step 120"), (unseen(5.0), "before its first step")],
    ids=["at a step", "before any"],
)
def test_a_repeated_failure_says_where_and_what_to_do(failure: Failure, where: str) -> None:
    found = verdict(failure, after(failure))
    assert isinstance(found, GiveUp)
    assert found.message.endswith(
        f"attempt 0 failed with the same error {where}; fix the cause and apply the job again, or retry this failure "
        "with a rule in restart.rules"
    )


@pytest.mark.parametrize(("seconds", "repeated"), [(STARTUP_SECONDS, True), (STARTUP_SECONDS + 0.1, False)])
def test_steps_may_have_gone_unseen_after_the_time_that_a_start_takes(seconds: float, repeated: bool) -> None:
    found = verdict(unseen(seconds), after(unseen(seconds)))
    assert (isinstance(found, GiveUp) and found.reason == "RepeatedFailure") is repeated


@pytest.mark.parametrize(
    ("first", "repeated"),
    [
        pytest.param(KILLED, True, id="twice before a step, after an attempt that had reached one"),
        pytest.param(replace(KILLED, step=121), False, id="the attempt before had come less far"),
        pytest.param(None, False, id="nobody knows how far the attempt before had come"),
    ],
)
def test_a_job_that_has_trained_and_cannot_resume_is_not_tried_again_and_again(
    first: Failure | None, repeated: bool
) -> None:
    """The step that is on record of such a failure is the one that the attempt before it had reached."""
    status = DDPJobStatus(progress=Progress(step=120))
    for failure in (first, unseen(5.0)):
        if failure is not None:
            kept = remember(status.failures, failure_status(status, failure, NOW))
            status = status.model_copy(update={"failures": kept, "last_failure": kept[-1]})
    assert status.failures[-1].step == 120
    found = verdict(unseen(5.0), status)
    assert (isinstance(found, GiveUp) and found.reason == "RepeatedFailure") is repeated
    assert not repeated or "before its first step" in str(found)
    assert isinstance(verdict(unseen(STARTUP_SECONDS + 0.1), status), RestartIn), "steps may have gone unseen"


def test_running_out_of_memory_three_times_without_a_snapshot_ends_the_job_at_whatever_step() -> None:
    message = "rank 0 raised torch.OutOfMemoryError after step {}: CUDA out of memory"
    memory = [Failure("OutOfMemory", message.format(step), Retry.YES, exit_code=1, step=step) for step in (9, 40, 22)]
    status = DDPJobStatus()
    for failure in memory[:2]:
        found = restarted(failure, status)
        kept = remember(status.failures, failure_status(status, failure, NOW))
        status = found.status.model_copy(update={"failures": kept, "last_failure": kept[-1]})
    third = verdict(memory[2], status)
    assert isinstance(third, GiveUp)
    assert "3 attempts in a row ran out of memory without a new snapshot; use smaller batches" in third.message
    lowered = replace(memory[2], message="the next attempt starts with micro-batches of 4")
    assert isinstance(verdict(lowered, status), RestartIn), "the built-in trainer lowers them itself"
    saved = status.model_copy(update={"snapshot": SnapshotStatus(step=50, time=NOW, verified=True)})
    assert isinstance(verdict(memory[2], saved), RestartIn), "training has come further"
    assert isinstance(verdict(memory[2], status, rules=[{"action": "Restart"}]), RestartIn)


def test_without_any_restarts_the_setting_is_named() -> None:
    found = verdict(KILLED, maxRestarts=0)
    assert isinstance(found, GiveUp)
    assert found.message == "restart.maxRestarts is 0; last failure: rank 1 was killed by SIGKILL"


def test_another_failure_between_the_two_makes_them_no_repetition() -> None:
    record = after(RAISED).failures + after(KILLED).failures
    assert restarted(RAISED, DDPJobStatus(failures=record)).status.restarts == 1


@pytest.mark.parametrize("action", ["Restart", "RestartAndIgnoreMaxRestarts", "ExcludeNode"])
def test_a_rule_of_the_jobs_own_may_retry_it_nevertheless(action: str) -> None:
    assert isinstance(verdict(RAISED, after(RAISED), rules=[{"action": action}]), RestartIn)


def test_the_last_five_failures_are_kept_and_cut() -> None:
    kept: tuple[Any, ...] = ()
    for number in range(FAILURES_KEPT + 2):
        failure = replace(RAISED, message="m" * 4096, exit_code=number)
        kept = remember(kept, failure_status(DDPJobStatus(), failure, NOW).model_copy(update={"log_tail": "x" * 9000}))
    assert [failure.exit_code for failure in kept] == [2, 3, 4, 5, 6]
    assert {(len(failure.message), failure.log_tail) for failure in kept} == {(KEPT_MESSAGE_LIMIT, "")}


def test_an_error_that_was_cut_is_still_the_same_error() -> None:
    long = replace(RAISED, message="rank 0 raised " + "m" * 9000)
    found = verdict(replace(long, message=f"{long.message} and more"), after(long))
    assert isinstance(found, GiveUp)


def test_a_clause_goes_into_the_line_that_an_event_shows() -> None:
    assert with_clause("it broke\n  here", "so what") == "it broke; so what\n  here"
    assert with_clause("", "so what") == "; so what"


# Whatever happens


failures = st.builds(
    Failure,
    reason=st.sampled_from(("WorkerKilled", "WorkerException", "Evicted", "PeerLost", "PodDeleted", "OutOfMemory")),
    message=st.sampled_from(("rank 0 raised A", "rank 1 raised A", "rank 0 raised B")),
    retry=st.sampled_from((Retry.YES,) * 19 + (Retry.NEVER,)),
    exit_code=st.sampled_from((1, 3)),
    step=st.sampled_from((None, 10, 20)),
    signal=st.sampled_from((None, "SIGKILL", "SIGSEGV")),
)
rules = st.lists(
    st.fixed_dictionaries(
        {
            "action": st.sampled_from(("Restart", "RestartAndIgnoreMaxRestarts", "Fail", "ExcludeNode")),
            "exitCodes": st.just([3]),
        },
        optional={"reasons": st.just(["Evicted"]), "signals": st.just(["SIGKILL"])},
    ),
    max_size=2,
)


@settings(max_examples=examples(300), deadline=None)
@given(
    most=st.integers(0, 4),
    window=st.none() | st.just(100),
    given_rules=rules,
    story=st.lists(st.tuples(failures, st.sampled_from((0, 1, 60, 200)), st.none() | st.integers(5, 40)), max_size=25),
)
@example(  # the last snapshot comes after five failures within five minutes, and refills nothing
    most=4,
    window=100,
    given_rules=[],
    story=[
        (Failure("WorkerKilled", "rank 0 raised A", Retry.YES, exit_code=1), pause, snapshot)
        for pause, snapshot in ((0, None), (60, None), (60, None), (0, None), (0, None), (0, 5))
    ],
)
def test_the_counters_add_up_and_the_budget_is_never_exceeded(
    most: int, window: int | None, given_rules: list[Any], story: list[tuple[Failure, int, int | None]]
) -> None:
    policy = {"maxRestarts": most, "rules": given_rules} | ({"windowSeconds": window} if window else {})
    job, status, seconds = make_job(restart=policy), DDPJobStatus(), 0
    counted: list[int] = []  # when the restarts were that count, since progress was last made
    failed: list[int] = []  # when each failure was
    for attempt, (failure, pause, snapshot) in enumerate(story):
        seconds += pause
        if snapshot is not None and (status.snapshot is None or snapshot > status.snapshot.step):
            marks = (status.last_failure.step, status.last_failure.snapshot_step) if status.last_failure else ()
            status = status.model_copy(update={"snapshot": SnapshotStatus(step=snapshot, time=NOW, verified=True)})
            close = len(failed) >= CLOSE_FAILURES and seconds - failed[-CLOSE_FAILURES] < CLOSE_SECONDS
            counted = [] if all(mark is None or snapshot > mark for mark in marks) and not close else counted
        status = status.model_copy(update={"attempt": attempt})
        found, record = (
            decide(at(replace(job, status=status), seconds=seconds), failure),
            failure_status(status, failure, later(seconds)),
        )
        before, kept = status, status.failures
        within = [time for time in counted if window is None or time > seconds - window]
        if isinstance(found, GiveUp):
            if found.reason == "RepeatedFailure" and "in a row ran out of memory" in found.message:
                assert [one.reason for one in (*kept[-2:], record)] == ["OutOfMemory"] * 3
                assert len(counted) >= 2, "there was progress between them"
            elif found.reason == "RepeatedFailure":
                first, second = ((one.step, one.reason, one.message[-1]) for one in (kept[-1], record))
                assert first == second, "it is only the last if the one before it was the same"
            if found.reason == "BackoffLimitExceeded":
                assert len(within) == most, "it was given up with budget left"
            return
        status = found.status.model_copy(update={"last_failure": record, "failures": remember(kept, record)})
        steps = (status.restarts - before.restarts, status.disruptions - before.disruptions)
        assert sorted(steps) == [0, 1], "every new attempt is either a restart or a disruption"
        counted += [seconds] * steps[0]
        failed.append(seconds)
        assert status.restarts + status.disruptions == attempt + 1
        assert len(within) + steps[0] <= most or not steps[0], "the budget was exceeded"
        assert 0 <= found.seconds <= job.spec.restart.backoff.max_seconds
