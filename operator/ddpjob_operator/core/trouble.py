"""Why a gang that should be starting does not: in the words of the scheduler, the kubelet or the API server.

Many a pod is Unschedulable for a moment while its claim binds, so trouble has to last before it is worth a write.
"""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.advice import advice_for
from ddpjob_operator.core.model import PodPhase, PodView, Problem

TROUBLE_GRACE_SECONDS = 3.0

_SAME = {"ImagePullBackOff": "ErrImagePull"}
"""The kubelet tells of one trouble under two names by turns; saying each would be a write each time."""


def find_trouble(
    status: DDPJobStatus, pods: tuple[PodView, ...], problem: Problem | None, now: datetime
) -> Problem | None:
    """What keeps the gang from running, or None.

    At once where the API server refused, after a grace for pods that wait.
    """
    if problem is not None:
        return problem
    degraded = cond.find(status.conditions, cond.DEGRADED)
    known = degraded if degraded and degraded.status == "True" else None
    since = _waiting_since(status)
    if known is None and (since is None or (now - since).total_seconds() < TROUBLE_GRACE_SECONDS):
        return None
    for pod in pods:
        if pod.phase is PodPhase.PENDING and pod.reason:
            reason = _SAME.get(pod.reason, pod.reason)
            said = f"pod {pod.name}: "
            if known and reason != pod.reason and known.reason == reason and known.message.startswith(said):
                return Problem(known.reason, known.message)
            return _problem(reason, said + (pod.message or pod.reason))
    return None


def _problem(reason: str, said: str) -> Problem:
    advice = advice_for(reason)
    return Problem(reason, f"{said}. {advice}" if advice else said)


def _waiting_since(status: DDPJobStatus) -> datetime | None:
    restarting = cond.find(status.conditions, cond.RESTARTING)
    if restarting is not None and restarting.status == "True":
        return restarting.last_transition_time
    return status.start_time
