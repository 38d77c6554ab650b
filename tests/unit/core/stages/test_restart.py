"""The next attempt: its events, and when it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, later, make_job, make_pod, seen
from looks import SNAPSHOT, at

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase
from ddpjob_operator.core.gang.elastic import Resize
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.restart import Cause, next_attempt, resize, restart_of_edited, resume_attempt
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.look import Look


def a_look(attempt: int | None = 0) -> Look:
    """At a gang that runs; `attempt` is what the Service selects, None where there is no Service."""
    return at(make_job(in_phase(Phase.RUNNING)), seen(make_pod(0), make_pod(1), attempt=attempt))


def restarting(decided: Plan) -> str:
    found = cond.find(decided.status.conditions, cond.RESTARTING)
    assert found is not None
    return found.message


def test_a_restart_is_a_warning_with_the_first_line_of_its_cause() -> None:
    decided = next_attempt(a_look(), Cause("WorkerKilled", "rank 1 was killed\nits last words"))
    assert decided.events == (Event("Warning", "Restarting", "attempt 0 ended: rank 1 was killed; starting attempt 1"),)


def test_a_cause_without_words_is_named_by_its_reason() -> None:
    decided = next_attempt(a_look(), Cause("WorkerKilled"))
    assert decided.events[0].message == "attempt 0 ended: WorkerKilled; starting attempt 1"


def test_a_change_of_size_is_no_warning_and_says_the_new_size() -> None:
    decided = resize(a_look(), Resize(1, "ScaledDown", "node b is gone"))
    assert decided.events == (Event("Normal", "ScaledDown", "node b is gone; attempt 1 has 1"),)
    assert restarting(decided) == "attempt 0 ended: node b is gone"


def test_a_suspension_that_ends_is_no_warning() -> None:
    decided = resume_attempt(a_look())
    assert decided.events == (Event("Normal", "Resumed", "resumed after a suspension with attempt 1"),)
    assert restarting(decided) == "attempt 0 ended: resumed after a suspension"


@pytest.mark.parametrize(
    ("step", "begun", "left"),
    [
        pytest.param(99, -600, 0, id="progress since"),
        pytest.param(100, -600, 8, id="none since"),
        pytest.param(99, 0, 8, id="that of an attempt before"),
    ],
)
@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(resume_attempt, id="a suspension ends"),
        pytest.param(lambda look: resize(look, Resize(1, "ScaledDown", "node b is gone")), id="another size"),
        pytest.param(restart_of_edited, id="another spec"),
    ],
)
def test_progress_shortens_the_waits_of_an_attempt_that_follows_no_failure(
    begin: Callable[[Look], Plan | None], step: int, begun: float, left: int
) -> None:
    """The gang had to be tried eight times when it first began."""
    failure = FailureStatus(attempt=0, time=NOW, reason="WorkerKilled", message="", step=step)
    before = in_phase(
        Phase.RUNNING,
        attempt_start_time=later(begun),
        snapshot=SNAPSHOT,
        last_failure=failure,
        restarts_since_progress=8,
        disruptions_since_progress=8,
    )
    decided = begin(at(make_job(before, args=["--lr", "1"]), seen(make_pod(0))))
    assert decided is not None
    after = decided.status
    assert (after.attempt, after.restarts_since_progress, after.disruptions_since_progress) == (1, left, left)


@pytest.mark.parametrize(
    ("attempt", "delay", "again"),
    [
        pytest.param(0, 0.0, None, id="the events of what was made wake the plan"),
        pytest.param(None, 0.0, 0.0, id="without a Service there is more to make, at once"),
        pytest.param(0, 7.5, 7.5, id="after the wait"),
        pytest.param(None, 7.5, 7.5, id="not before it"),
    ],
)
def test_when_the_plan_looks_again(attempt: int | None, delay: float, again: float | None) -> None:
    assert next_attempt(a_look(attempt), Cause("WorkerKilled", delay=delay)).requeue_after == again


def test_a_forged_label_does_not_lead_to_an_attempt_whose_pods_are_not_recognised() -> None:
    forged = replace(make_pod(1, attempt=999_999_999), name="forged", uid="forged")
    decided = plan(make_job(in_phase(Phase.RUNNING)), seen(failed(0, 1), forged), NOW, DEFAULTS)
    assert decided.status.attempt == 1
    lost = plan(make_job(DDPJobStatus()), seen(make_pod(0), forged), NOW, DEFAULTS)
    assert lost.status.attempt == 0


@pytest.mark.parametrize(("phase", "restarts"), [(Phase.RUNNING, 0), (Phase.STARTING, 1)])
def test_a_node_that_is_restarted_costs_the_gang_that_ran_no_restart(phase: Phase, restarts: int) -> None:
    """Its kubelet refuses the pod while there is no device plugin; a pod that it refuses at first is another matter."""
    refused = make_pod(1, "Failed", reason="UnexpectedAdmissionError", message="no healthy devices present")
    job = make_job(in_phase(phase, spec_digests=digests(make_job(), DEFAULTS)))
    decided = plan(job, seen(make_pod(0), refused), NOW, DEFAULTS)
    assert (decided.status.attempt, decided.status.restarts) == (1, restarts)
