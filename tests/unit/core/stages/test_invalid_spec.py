"""A spec that cannot be run as written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import NOW, in_phase, make_job, make_pod, seen
from looks import GANG, condition, look

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.stages.invalid_spec import (
    plan_internal_error,
    plan_invalid_spec,
    unparsable_edit,
)
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Plan
from ddpjob_operator.core.values.observed import InitializerView, Observed, PodPhase

PROBLEMS = ("spec.nodes: 0 is too small; use 1 or more", "spec.args[0]: 7 is not text; write it in quotes")


def refused(phase: Phase | None, problems: tuple[str, ...] = PROBLEMS) -> Plan:
    return plan_invalid_spec(in_phase(phase) if phase else DDPJobStatus(), problems, NOW, 4)


@pytest.mark.parametrize("phase", [None, Phase.PENDING])
def test_a_job_that_has_no_gang_fails_with_every_problem_in_its_status(phase: Phase | None) -> None:
    decided = refused(phase)
    after = decided.status
    assert (after.phase, after.completion_time, after.observed_generation) == (Phase.FAILED, NOW, 4)
    failed = cond.find(after.conditions, cond.FAILED)
    assert failed is not None
    assert (failed.reason, failed.message) == ("InvalidSpec", "; ".join(PROBLEMS))
    assert after.last_failure is not None
    # a phase that is final stays, whatever is applied
    assert "delete the job and apply it again" in after.last_failure.advice
    assert decided.actions == ()
    assert [event.reason for event in decided.events] == ["InvalidSpec"]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.RESTARTING])
def test_a_gang_that_is_there_goes_on(phase: Phase) -> None:
    decided = refused(phase)
    assert decided.status.phase is phase
    assert cond.holds(decided.status.conditions, cond.DEGRADED)
    assert decided.actions == ()


def test_a_job_that_fetches_its_data_goes_on() -> None:
    """Its pod would be left running, and no edit starts a job again that has ended."""
    decided = plan_invalid_spec(FETCHING, PROBLEMS, NOW, 4)
    assert decided.status.phase is Phase.PENDING
    assert degraded(decided) == ("True", "InvalidSpec")
    assert (decided.actions, [event.reason for event in decided.events]) == ((), [])


EDIT = unparsable_edit(("spec.restart.rules[0].messagePattern: '(' is no pattern",))
INITIALIZERS = ({"name": "data", "source": "https://example.com/x", "path": "datasets/x"},)
FETCHER = InitializerView("digits-init-0", "init-0", PodPhase.RUNNING)
FETCHING = look(make_job(initializers=INITIALIZERS), seen(initializer=FETCHER)).status
SUSPENDED = look(make_job(in_phase(Phase.RUNNING), suspend=True), seen()).status
SUSPENDING = look(make_job(in_phase(Phase.RUNNING), suspend=True), seen(*GANG)).status


def degraded(decided: Plan) -> tuple[str, str] | None:
    return condition(decided.status, cond.DEGRADED)


@pytest.mark.parametrize(
    ("status", "spec", "observed"),
    [
        pytest.param(SUSPENDED, {"suspend": True}, seen(), id="suspended"),
        pytest.param(SUSPENDED, {"suspend": True}, seen(make_pod(0)), id="suspended, and a pod shows up"),
        pytest.param(SUSPENDING, {"suspend": True}, seen(*GANG), id="its pods stop"),
        pytest.param(SUSPENDING, {"suspend": True}, seen(), id="its pods have stopped"),
        pytest.param(FETCHING, {"initializers": INITIALIZERS}, seen(initializer=FETCHER), id="fetches its data"),
        pytest.param(FETCHING, {"initializers": INITIALIZERS}, seen(), id="about to fetch it"),
    ],
)
def test_an_edit_that_cannot_be_parsed_is_reported_until_it_is_repaired(
    status: DDPJobStatus, spec: dict[str, Any], observed: Observed
) -> None:
    decided = look(replace(make_job(status, **spec), rejected_edit=EDIT), observed)
    assert degraded(decided) == ("True", "InvalidSpec")
    assert "Degraded" in [event.reason for event in decided.events]
    assert degraded(look(make_job(decided.status, **spec), observed)) == ("False", "AsExpected")


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_that_is_over_is_not_touched(phase: Phase) -> None:
    assert refused(phase).status == in_phase(phase)


def test_any_number_of_problems_fits_into_a_status() -> None:
    assert refused(None, PROBLEMS * 5000).status.phase is Phase.FAILED


def test_a_mistake_of_the_operators_own_is_said_and_nothing_else_changes() -> None:
    status = in_phase(Phase.RUNNING)
    decided = plan_internal_error(status, KeyError("nodes"), NOW, 4)
    degraded = cond.find(decided.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason, degraded.observed_generation) == ("True", "InternalError", 4)
    assert "KeyError: 'nodes'" in degraded.message
    assert (decided.status.phase, decided.actions) == (Phase.RUNNING, ())
