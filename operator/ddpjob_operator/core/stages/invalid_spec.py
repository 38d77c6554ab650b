"""What to tell the author of a job that cannot be run as written, where the API server let it through."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import Problem

INVALID = "InvalidSpec"


def refuse(obj: Mapping[str, Any], problems: tuple[str, ...], now: datetime) -> Plan:
    """Failed, with every problem in the condition's message, and nothing is created.

    A job that already has a gang keeps it: an edit that cannot be understood is no reason to stop training. Where the
    spec before the edit is known the job goes on by that (`not_followed`).
    """
    status = DDPJobStatus.model_validate(obj.get("status") or {})
    if status.is_final:
        return Plan(status)
    generation = (obj.get("metadata") or {}).get("generation", 1)
    message = "; ".join(problems)
    if status.phase not in (None, Phase.PENDING):
        degraded = cond.set_condition(
            status.conditions, cond.DEGRADED, True, INVALID, message, now=now, generation=generation
        )
        return Plan(status.model_copy(update={"conditions": degraded}))
    after = status.model_copy(
        update={
            "phase": Phase.FAILED,
            "completion_time": now,
            "observed_generation": generation,
            "conditions": cond.set_condition(
                status.conditions, cond.FAILED, True, INVALID, message, now=now, generation=generation
            ),
            "last_failure": FailureStatus(
                attempt=status.attempt,
                time=now,
                reason=INVALID,
                message=message,
                advice="Correct the spec and apply the job again.",
            ),
        }
    )
    return Plan(after, events=(Event("Warning", INVALID, message),))


def not_followed(problems: tuple[str, ...]) -> Problem:
    """What to say of an edit that cannot be understood, while the job goes on by the spec that it had before."""
    return Problem(INVALID, f"{'; '.join(problems)}; until this is corrected the job goes on as before the edit")


def broken(status: DDPJobStatus, error: Exception, generation: int, now: datetime) -> Plan:
    """What to say of a job that the operator cannot decide about: a mistake of its own."""
    message = f"the operator failed on this job ({type(error).__name__}: {error}); its log has the rest"
    conditions = cond.set_condition(
        status.conditions, cond.DEGRADED, True, "InternalError", message, now=now, generation=generation
    )
    return Plan(status.model_copy(update={"conditions": conditions}))
