"""Whether a failed gang is started again, and when.

A restart rule of the job's own decides first. Otherwise the same error at the same step for the second time in a row
ends the job: whatever is tried again from the same snapshot gets there again. So does running out of memory for the
third time in a row without progress, at whatever step: batches may come in another order. What is left is restarted,
within the budget if it counts: at once after progress, and after a growing wait without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus
from ddpjob_operator.core.failure.budget import (
    allowance,
    backoff_seconds,
    disrupted,
    made_progress,
    refilled,
    spent,
    used_up,
)
from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.failure.node_exclusion import blame_node, newly_excluded
from ddpjob_operator.core.failure.restart_rules import RuleAction, rule_on
from ddpjob_operator.core.values.changes import shortened
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.look import Look

FAILURES_KEPT = 5
KEPT_MESSAGE_LIMIT = 1024

STARTUP_SECONDS = 600
"""How long a script may run without a step that is seen, and still count as not having trained."""

OUT_OF_MEMORY_LIMIT = 3
"""Times in a row that a program may run out of memory without progress, if it does not change its batches itself."""

_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class RestartIn:
    """Start the next attempt after so many seconds. `status` has it counted, and knows which nodes to keep away from;
    `explanation` says why, for people.
    """

    reason: str
    seconds: float
    status: DDPJobStatus
    explanation: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job is Failed, and why."""

    reason: str
    message: str


def decide(look: Look, failure: Failure) -> RestartIn | GiveUp:
    """What to do after `failure`, given the status before it."""
    job, status, now = look.job, look.status, look.now
    policy, diagnosis = job.spec.restart, diagnose(failure)
    ruling = rule_on(policy, failure, diagnosis.reason)
    if ruling.action is RuleAction.FAIL:
        return GiveUp(diagnosis.reason, with_clause(failure.message, ruling.why))
    if not ruling.explicit and (before := _same_before(status, failure)) is not None:
        return GiveUp("RepeatedFailure", with_clause(failure.message, _repeated(failure, before)))
    progress = made_progress(status, now)
    if not ruling.explicit and not progress and _runs_out_of_memory(status, failure):
        return GiveUp("RepeatedFailure", with_clause(failure.message, _OUT_OF_MEMORY))
    status = refilled(status) if progress else status
    free = ruling.action is RuleAction.RESTART_AND_IGNORE_MAX_RESTARTS
    used = used_up(policy, status, now)
    if not free and used >= policy.max_restarts:
        return GiveUp("BackoffLimitExceeded", f"{_nothing_left(job)}; last failure: {failure.message}")
    in_a_row = status.restarts_since_progress + status.disruptions_since_progress
    key = f"{job.uid}/{status.attempt}"
    exclude = ruling.action is RuleAction.EXCLUDE_NODE
    after = disrupted(status) if free else spent(policy, status, now)
    after = blame_node(look.with_status(after), failure, exclude=exclude)
    cost = "it does not count" if free else f"restart {used + 1} of {allowance(policy)}"
    return RestartIn(
        reason=diagnosis.reason,
        seconds=0.0 if progress else backoff_seconds(policy.backoff, in_a_row, key),
        status=after,
        explanation="; ".join(clause for clause in (ruling.why, cost, newly_excluded(status, after)) if clause),
    )


def with_clause(message: str, clause: str) -> str:
    """`message` with a clause after its first line, which is all that an event shows of it."""
    first, newline, rest = message.partition("\n")
    return f"{first}; {clause}{newline}{rest}"


def remember(failures: tuple[FailureStatus, ...], failure: FailureStatus) -> tuple[FailureStatus, ...]:
    """The last few failures, short enough for a status to carry them all."""
    return (*failures, shortened(failure, KEPT_MESSAGE_LIMIT))[-FAILURES_KEPT:]


def signature(reason: str, message: str) -> str:
    """What makes two failures the same error: reason and first line, whatever rank, address or size they name."""
    first = message[:KEPT_MESSAGE_LIMIT].partition("\n")[0]
    return f"{reason}: {_VARIABLE.sub('#', first)}"


def _same_before(status: DDPJobStatus, failure: Failure) -> FailureStatus | None:
    """The last failure, if it was the same error at the same step, and one that the program brings about itself.

    No step is the same step if the trainer soon ended without one. After a longer time, steps may have gone unseen.
    """
    diagnosis = diagnose(failure)
    before = status.failures[-1] if status.failures else None
    if before is None or not diagnosis.deterministic:
        return None
    if before.step != failure.step and not (failure.step is None and _took_no_step(status)):
        return None
    if failure.step is None and not _ended_soon(failure):
        return None
    same = signature(before.reason, before.message) == signature(diagnosis.reason, failure.message)
    return before if same else None


def _took_no_step(status: DDPJobStatus) -> bool:
    """Whether the last failure came before a step too, though one is on record: the one that an earlier attempt had
    reached. None has gone beyond it since the failure before that one.
    """
    if status.progress is None or len(status.failures) < 2:
        return False
    earlier, before = status.failures[-2:]
    return earlier.step == before.step == status.progress.step


def _runs_out_of_memory(status: DDPJobStatus, failure: Failure) -> bool:
    """Whether this attempt and those before it did, as many as may without progress."""
    diagnosis, others = diagnose(failure), OUT_OF_MEMORY_LIMIT - 1
    if diagnosis.reason != "OutOfMemory" or not diagnosis.deterministic or status.restarts_since_progress < others:
        return False
    return [before.reason for before in status.failures[-others:]] == ["OutOfMemory"] * others


_OUT_OF_MEMORY = (
    f"{OUT_OF_MEMORY_LIMIT} attempts in a row ran out of memory without a new snapshot; use smaller batches and apply "
    "the job again, or retry this failure with a rule in restart.rules"
)


def _ended_soon(failure: Failure) -> bool:
    """Whether the trainer is known to have ended within STARTUP_SECONDS."""
    seconds = failure.report.seconds if failure.report else {}
    return bool(seconds) and sum(seconds.values()) <= STARTUP_SECONDS


def _repeated(failure: Failure, before: FailureStatus) -> str:
    where = "before its first step" if failure.step is None else f"at the same step {failure.step}"
    return (
        f"attempt {before.attempt} failed with the same error {where}; "
        "fix the cause and apply the job again, or retry this failure with a rule in restart.rules"
    )


def _nothing_left(job: Job) -> str:
    policy = job.spec.restart
    if not policy.max_restarts:
        return "restart.maxRestarts is 0"
    within = f" of the last {policy.window_seconds} s" if policy.window_seconds is not None else ""
    return f"all {policy.max_restarts} restarts{within} are used"
