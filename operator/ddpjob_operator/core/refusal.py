"""What to tell the author of a job that cannot be run as written, where the API server let it through."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.model import Event, Plan


def refuse(obj: Mapping[str, Any], problems: tuple[str, ...], now: datetime) -> Plan:
    """Failed, with every problem in the condition's message, and nothing is created.

    A job that already has a gang keeps it: an edit that cannot be understood is no reason to stop training.
    """
    status = DDPJobStatus.model_validate(obj.get("status") or {})
    if status.phase is not None and status.phase.final:
        return Plan(status)
    generation = (obj.get("metadata") or {}).get("generation", 1)
    message = "; ".join(problems)
    if status.phase not in (None, Phase.PENDING):
        degraded = cond.set_condition(
            status.conditions, cond.DEGRADED, True, "InvalidSpec", message, now=now, generation=generation
        )
        return Plan(status.model_copy(update={"conditions": degraded}))
    after = status.model_copy(
        update={
            "phase": Phase.FAILED,
            "completion_time": now,
            "observed_generation": generation,
            "conditions": cond.set_condition(
                status.conditions, cond.FAILED, True, "InvalidSpec", message, now=now, generation=generation
            ),
            "last_failure": FailureStatus(
                attempt=status.attempt,
                time=now,
                reason="InvalidSpec",
                message=message,
                advice="Correct the spec and apply the job again.",
            ),
        }
    )
    return Plan(after, events=(Event("Warning", "InvalidSpec", message),))
