"""What the status says of a loss that is not finite."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import ended, heard, in_phase, make_job, make_pod, seen
from looks import at, look

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.progress import warnings, with_report
from ddpjob_operator.core.values import conditions as cond

HEALTHY = in_phase(Phase.RUNNING)
SINCE_12 = {"step": 12, "steps": 3}


def after(status: DDPJobStatus, non_finite: Any, **reported: Any) -> DDPJobStatus:
    report = heard(**{"nonFiniteLoss": non_finite, "loss": None, **reported})
    return with_report(at(make_job(status), seen(report=report))).status


NOT_FINITE = after(HEALTHY, SINCE_12)


def test_it_is_a_condition_and_an_event_once() -> None:
    condition = cond.find(NOT_FINITE.conditions, cond.LOSS_NOT_FINITE)
    assert condition is not None
    said = (condition.status, condition.reason, condition.message)
    assert said == ("True", "NonFiniteLoss", "the loss is NaN or infinite since step 12")
    (event,) = warnings(HEALTHY, NOT_FINITE)
    assert (event.type, event.reason, event.message) == ("Warning", "LossNotFinite", condition.message)
    assert warnings(NOT_FINITE, after(NOT_FINITE, {"step": 12, "steps": 400})) == ()


def test_a_finite_loss_ends_it_and_an_attempt_without_one_does_not() -> None:
    assert cond.holds(after(NOT_FINITE, None).conditions, cond.LOSS_NOT_FINITE)
    assert not cond.holds(after(NOT_FINITE, None, loss=0.5).conditions, cond.LOSS_NOT_FINITE)


@pytest.mark.parametrize("found", [None, {}, [], "text", {"step": "12", "steps": 3}, {"step": 12}])
def test_anything_else_is_none(found: Any) -> None:
    assert not cond.holds(after(HEALTHY, found).conditions, cond.LOSS_NOT_FINITE)


def test_a_job_that_succeeds_like_that_says_so() -> None:
    """Also where it was over before its trainer was ever asked."""
    message = json.dumps({"version": 1, "outcome": "Succeeded", "reason": "Completed", "nonFiniteLoss": SINCE_12})
    pods = [make_pod(0, "Succeeded", termination=ended(0, message)), make_pod(1, "Succeeded", termination=ended(0))]
    decided = look(make_job(HEALTHY), seen(*pods))
    complete = cond.find(decided.status.conditions, cond.COMPLETE)
    assert complete is not None
    assert complete.message == "all 2 nodes finished; restarts: 0; the loss is NaN or infinite since step 12"
    assert {event.reason for event in decided.events} == {"Succeeded", "LossNotFinite"}
