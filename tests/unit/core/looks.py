"""One look at a job, and what was decided."""

from __future__ import annotations

from builders import (
    DEFAULTS,
    NOW,
    in_phase,
    later,
    make_pod,
    seen,
)

from ddpjob_operator.api.status import DDPJobStatus, Phase, SnapshotStatus
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreatePod, DeletePod, Plan
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Observed

RUNNING = in_phase(Phase.RUNNING)
STARTING = in_phase(Phase.STARTING)
GANG = (make_pod(0), make_pod(1))
SNAPSHOT = SnapshotStatus(step=100, time=NOW, verified=True)


def at(job: Job, observed: Observed | None = None, seconds: float = 0.0, defaults: Defaults = DEFAULTS) -> Look:
    """A look at a job, `seconds` after NOW."""
    return Look(job, observed if observed is not None else seen(), later(seconds), defaults, job.status)


def admitted(job: Job, defaults: Defaults = DEFAULTS) -> Admitted:
    """A job that is within the bounds of `defaults`."""
    found = admit(job, defaults)
    assert isinstance(found, Admitted), found.problems
    return found


def look(job: Job, observed: Observed, seconds: float = 0.0) -> Plan:
    return plan(job, observed, later(seconds), DEFAULTS)


def created(decided: Plan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, CreatePod)]


def deleted(decided: Plan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, DeletePod)]


def kinds(decided: Plan) -> list[type]:
    return [type(action) for action in decided.actions]


def condition(status: DDPJobStatus, type_: str) -> tuple[str, str] | None:
    found = cond.find(status.conditions, type_)
    return (found.status, found.reason) if found else None
