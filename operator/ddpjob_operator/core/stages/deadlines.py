"""How long a job may take: to start a gang, and in all.

A deadline that has passed fails the job, with a reason of its own. The plan is woken at the very moment of the next.
Stall limits are the trainer's to keep: they travel in each pod's environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.gang.members import awaits_data, members, starting_since
from ddpjob_operator.core.ledger.goodput import AT_WORK
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodPhase, PodView

ACTIVE = "DeadlineExceeded"
STARTUP = "StartupDeadlineExceeded"
REASONS = (ACTIVE, STARTUP)

REPORT_SECONDS = 30.0
"""How old a report may be by which the ranks have not met; an older one says nothing of now."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a job fails, and for which reason."""

    at: datetime
    reason: str


def missed_deadline(look: Look) -> Failure | None:
    """The deadline that a job has missed, as the failure that ends it.

    A job that is suspended, or on its way there, misses none.
    """
    passed = [deadline for deadline in deadlines(look) if deadline.at <= look.now]
    if not passed:
        return None
    first = min(passed, key=lambda deadline: deadline.at)
    message = _too_long(look) if first.reason == ACTIVE else _never_started(look)
    return Failure(first.reason, message, Retry.NEVER)


def seconds_to_next(look: Look) -> float | None:
    """Seconds until the next deadline that has not passed yet."""
    left = [look.seconds_until(deadline.at) for deadline in deadlines(look)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def deadlines(look: Look) -> tuple[Deadline, ...]:
    """Every deadline that the job is under, passed or not."""
    spec, status, found = look.job.spec, look.status, list[Deadline]()
    if status.is_final or status.phase is Phase.SUSPENDED:
        return ()
    if spec.active_deadline_seconds is not None and status.start_time is not None:
        allowed = timedelta(seconds=spec.active_deadline_seconds + status.suspended_seconds)
        found.append(Deadline(status.start_time + allowed, ACTIVE))
    if spec.startup_deadline_seconds is not None and (_is_starting(look) or _ranks_have_not_met(look)):
        since = _could_start_since(look)
        if since is not None:
            found.append(Deadline(since + timedelta(seconds=spec.startup_deadline_seconds), STARTUP))
    return tuple(found)


def _could_start_since(look: Look) -> datetime | None:
    """A gang waits for the initializers, but their time is not its own."""
    since, fetched = starting_since(look), cond.find(look.status.conditions, cond.INITIALIZED)
    if since is None or fetched is None or fetched.status != "True":
        return since
    return max(since, fetched.last_transition_time)


def _is_starting(look: Look) -> bool:
    """Pods have been waited for since; or what has to be there before them, such as the first pod that fetches data."""
    phase, fetching = look.status.phase, look.observed.initializer
    if phase is Phase.PENDING and fetching is not None:
        return fetching.phase is PodPhase.PENDING and fetching.number == 0
    if phase is Phase.PENDING and awaits_data(look) and cond.find(look.status.conditions, cond.INITIALIZED) is not None:
        return False  # between two tries of an initializer there is no pod
    return phase in (Phase.PENDING, Phase.STARTING, Phase.RESTARTING)


def _ranks_have_not_met(look: Look) -> bool:
    """Whether every pod runs, and the trainer has just reported that its ranks still wait for each other.

    One that cannot be asked, or whose clock is another, is taken to have started. So is one that has trained in this
    attempt: with live recovery its ranks meet again after each loss, and a new node rank 0 waits to join.
    """
    report = look.observed.report
    if look.status.phase is not Phase.RUNNING or report is None or report.phase != "rendezvous":
        return False
    if report.step is not None or any(look.status.internal.reported_seconds.get(name) for name in AT_WORK):
        return False
    recent = report.time is not None and abs(look.now.timestamp() - report.time) < REPORT_SECONDS
    return recent and report.is_of(look.job.uid, look.status.attempt)


def _too_long(look: Look) -> str:
    status, limit = look.status, look.job.spec.active_deadline_seconds
    step = status.progress.step if status.progress else None
    saved = status.snapshot.step if status.snapshot else None
    reached = "no step was completed" if step is None else f"training had reached step {step}"
    kept = "there is no snapshot" if saved is None else f"the snapshot of step {saved} is kept"
    return f"the job was active for {limit} s (activeDeadlineSeconds); {reached}, {kept}"


def _never_started(look: Look) -> str:
    limit = f"attempt {look.status.attempt} did not start within {look.job.spec.startup_deadline_seconds} s"
    return f"{limit} (startupDeadlineSeconds): {_last_problem(look)}"


def _last_problem(look: Look) -> str:
    degraded = cond.find(look.status.conditions, cond.DEGRADED)
    if degraded is not None and degraded.status == "True":
        return f"{degraded.reason}: {degraded.message}"
    if look.observed.problem is not None:
        return f"{look.observed.problem.reason}: {look.observed.problem.message}"
    if look.status.phase is Phase.RUNNING:
        return "all pods run, but their ranks have not met"
    pods = members(look)
    running = sum(pod.running for pod in pods)
    waiting = [f"{pod.name}: {said}" for pod in pods if (said := _waits_for(pod))]
    total = look.status.nodes.total or look.job.spec.nodes
    return "; ".join([f"{running} of {total} pods run", *waiting])


def _waits_for(pod: PodView) -> str:
    running = f"its init container {pod.init_running} runs" if pod.init_running else ""
    return pod.message or pod.reason or running
