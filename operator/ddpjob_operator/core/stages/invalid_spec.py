"""A job whose spec cannot be parsed, where the API server let it through; and a job that the operator fails on."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.transitions import INVALID_SPEC, observed, refuse_spec, report_internal_error
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import Problem


def plan_invalid_spec(status: DDPJobStatus, problems: tuple[str, ...], now: datetime, generation: int) -> Plan:
    """Failed, with every problem in the condition's message, and nothing is created.

    A job that already has a gang keeps it, and one that fetches its data goes on: an edit that cannot be parsed is no
    reason to stop them. Where the spec before the edit is known the job goes on by that (`unparsable_edit`), and
    without restart rules that alone cannot be read where it is not (`broken_rules`).
    """
    if status.is_final:
        return Plan(status)
    message = "; ".join(problems)
    after = observed(refuse_spec(status, message, now, generation), generation)
    failed = (Event("Warning", INVALID_SPEC, message),) if after.phase is Phase.FAILED else ()
    return Plan(after, events=failed)


def unparsable_edit(problems: tuple[str, ...]) -> Problem:
    """An edit that cannot be parsed, while the job goes on by the spec that it had before."""
    return Problem(INVALID_SPEC, f"{'; '.join(problems)}; the job goes on with the previous spec")


def broken_rules(problems: tuple[str, ...]) -> Problem:
    """Restart rules that cannot be read, of a job whose spec before them is not known."""
    return Problem(INVALID_SPEC, f"{'; '.join(problems)}; the job goes on without rules that cannot be read")


def plan_internal_error(status: DDPJobStatus, error: Exception, now: datetime, generation: int) -> Plan:
    """The operator itself failed on this job, which its status says too."""
    message = f"internal error of the operator ({type(error).__name__}: {error}); see its log"
    return Plan(report_internal_error(status, message, now, generation))
