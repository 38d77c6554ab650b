"""How long a job may take: to start a gang, and in all.

A deadline that has passed fails the job, with a reason of its own. The plan is woken at the very moment of the next.
Stall limits are the trainer's to keep: they travel in each pod's environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.gang.startup_problems import starting_since
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport

ACTIVE = "DeadlineExceeded"
STARTUP = "StartupDeadlineExceeded"
REASONS = (ACTIVE, STARTUP)

REPORT_SECONDS = 30.0
"""How old a trainer's word may be that its ranks have not met; an older one says nothing of now."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a job fails, and for which reason."""

    at: datetime
    reason: str


def missed_deadline(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> Failure | None:
    """The deadline that a job has missed, as the failure that ends it.

    `pods` are those of the current attempt. A job that is suspended, or on its way there, misses none.
    """
    passed = [deadline for deadline in deadlines(job, observed, status, now) if deadline.at <= now]
    if not passed:
        return None
    first = min(passed, key=lambda deadline: deadline.at)
    if first.reason == ACTIVE:
        return Failure(ACTIVE, _too_long(job, status), Retry.NEVER)
    return Failure(STARTUP, _never_started(job, observed, status, pods), Retry.NEVER)


def seconds_to_next(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> float | None:
    """Seconds until the next deadline that has not passed yet."""
    left = [(deadline.at - now).total_seconds() for deadline in deadlines(job, observed, status, now)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def deadlines(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> tuple[Deadline, ...]:
    """Every deadline that the job is under, passed or not."""
    spec, found = job.spec, []
    if _is_active(status) and spec.active_deadline_seconds is not None and status.start_time is not None:
        allowed = timedelta(seconds=spec.active_deadline_seconds + status.suspended_seconds)
        found.append(Deadline(status.start_time + allowed, ACTIVE))
    since = _could_start_since(status)
    unmet = _ranks_have_not_met(observed.report, job.uid, status, now)
    if spec.startup_deadline_seconds is not None and since is not None and (unmet or _is_starting(status, observed)):
        found.append(Deadline(since + timedelta(seconds=spec.startup_deadline_seconds), STARTUP))
    return tuple(found)


def _is_active(status: DDPJobStatus) -> bool:
    return not status.is_final and status.phase is not Phase.SUSPENDED


def _could_start_since(status: DDPJobStatus) -> datetime | None:
    """A gang waits for the initializers, but their time is not its own."""
    since, fetched = starting_since(status), cond.find(status.conditions, cond.INITIALIZED)
    if since is None or fetched is None or fetched.status != "True":
        return since
    return max(since, fetched.last_transition_time)


def _is_starting(status: DDPJobStatus, observed: Observed) -> bool:
    """Pods have been waited for since; or what has to be there before them, such as the first pod that fetches data."""
    if status.phase is Phase.PENDING and (fetching := observed.initializer) is not None:
        return fetching.phase is PodPhase.PENDING and fetching.number == 0
    return status.phase in (Phase.PENDING, Phase.STARTING, Phase.RESTARTING)


def _ranks_have_not_met(report: TrainerReport | None, uid: str, status: DDPJobStatus, now: datetime) -> bool:
    """Whether every pod runs, and the trainer has just said that its ranks still wait for each other.

    One that cannot be asked, or whose clock is another, is taken to have started.
    """
    if status.phase is not Phase.RUNNING or report is None or report.phase != "rendezvous":
        return False
    recent = report.time is not None and abs(now.timestamp() - report.time) < REPORT_SECONDS
    return recent and report.is_of(uid, status.attempt)


def _too_long(job: Job, status: DDPJobStatus) -> str:
    step = status.progress.step if status.progress else None
    saved = status.snapshot.step if status.snapshot else None
    reached = "no step was trained" if step is None else f"training had reached step {step}"
    kept = "there is no snapshot" if saved is None else f"the snapshot of step {saved} is kept"
    return f"the job was active for {job.spec.active_deadline_seconds} s (activeDeadlineSeconds); {reached}, {kept}"


def _never_started(job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...]) -> str:
    limit = f"attempt {status.attempt} did not start within {job.spec.startup_deadline_seconds} s"
    return f"{limit} (startupDeadlineSeconds): {_last_trouble(job, observed, status, pods)}"


def _last_trouble(job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...]) -> str:
    degraded = cond.find(status.conditions, cond.DEGRADED)
    if degraded is not None and degraded.status == "True":
        return f"{degraded.reason}: {degraded.message}"
    if observed.problem is not None:
        return f"{observed.problem.reason}: {observed.problem.message}"
    if status.phase is Phase.RUNNING:
        return "all pods run, but their ranks have not met"
    running = sum(pod.running for pod in pods)
    waiting = [f"{pod.name}: {pod.message or pod.reason}" for pod in pods if pod.reason]
    total = status.nodes.total or job.spec.nodes
    return "; ".join([f"{running} of {total} pods run", *waiting])
