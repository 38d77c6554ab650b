"""Pods that have a node and do not start, and whose status does not say why: what their events say instead.

A volume that cannot be mounted (a Secret that is missing, a server that does not answer) and a network that cannot be
set up leave a pod ContainerCreating without a word; only the kubelet's events tell. They are read for one pod of the
gang, after the time in which a pod usually starts, and again after ever longer waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.actions import ReadWarnings
from ddpjob_operator.core.model import PodPhase, PodView, Warned
from ddpjob_operator.core.trouble import TROUBLE_GRACE_SECONDS, starting_since

SHORTEST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 60.0

_WAITING = (Phase.PENDING, Phase.STARTING, Phase.RESTARTING)


def ask(
    status: DDPJobStatus, pods: tuple[PodView, ...], warnings: Mapping[str, Warned], now: datetime
) -> tuple[ReadWarnings, ...]:
    """Look into the events of the first pod that waits without a reason, if it is time to."""
    pod, due = _next(status, pods, warnings)
    return (ReadWarnings(pod.name, pod.uid),) if pod is not None and due is not None and due <= now else ()


def until_asked(
    status: DDPJobStatus, pods: tuple[PodView, ...], warnings: Mapping[str, Warned], now: datetime
) -> float | None:
    """Seconds until it is time to."""
    _, due = _next(status, pods, warnings)
    return None if due is None or due <= now else (due - now).total_seconds()


def _next(
    status: DDPJobStatus, pods: tuple[PodView, ...], warnings: Mapping[str, Warned]
) -> tuple[PodView | None, datetime | None]:
    since = starting_since(status)
    pod = next((pod for pod in pods if _is_unexplained(pod)), None)
    if since is None or pod is None or status.phase not in _WAITING:
        return None, None
    if (known := warnings.get(pod.uid)) is None:
        return pod, since + timedelta(seconds=TROUBLE_GRACE_SECONDS)
    waited = (known.at - since).total_seconds()
    wait = min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, waited))
    return pod, known.at + timedelta(seconds=wait)


def _is_unexplained(pod: PodView) -> bool:
    placed = pod.scheduled or pod.node_name is not None
    return pod.phase is PodPhase.PENDING and placed and not pod.reason and not pod.deleting
