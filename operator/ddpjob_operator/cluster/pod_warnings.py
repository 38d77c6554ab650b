"""What Kubernetes' events say of a pod whose status says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from ddpjob_operator.core.values.observed import PodWarning
from ddpjob_operator.runtime.client import Json
from ddpjob_operator.wire.objects import parse_time

FRESH_SECONDS = 180.0
"""A kubelet repeats itself at least every two minutes; what is older is over."""

_BEFORE_THE_NODE = ("FailedScheduling",)
_STARTS_NEVERTHELESS = ("DNSConfigForming", "FailedToRetrieveImagePullSecret", "PolicyViolation")
"""Warnings that keep no pod from starting: of the kubelet about names that it leaves out of /etc/resolv.conf and about
a Secret that the pull may do without (one that fails is in the pod's status), of Kyverno about a policy that audits.
"""
_REFUSES_NAMES = "matchFields is not supported"
"""Karpenter's words (`validateNodeSelectorTerm` in pkg/controllers/provisioning/provisioner.go)."""
_ONLY_THAT_IT_WAITS = "Unable to attach or mount volumes"


def selector(uid: str) -> str:
    """The warnings about one pod, as a field selector."""
    return f"involvedObject.uid={uid},type=Warning"


def warned(events: Iterable[Json], now: datetime) -> PodWarning:
    """The warning that says most, and the same one however often and in which order they come."""
    fresh = sorted(
        (str(event.get("message") or ""), str(event.get("reason") or "")) for event in events if _is_fresh(event, now)
    )
    refuses_names = any(_REFUSES_NAMES in message for message, _ in fresh)
    passing = (*_BEFORE_THE_NODE, *_STARTS_NEVERTHELESS)
    of_node = [(message, reason) for message, reason in fresh if reason not in passing]
    if not of_node:
        return PodWarning(now, refuses_names=refuses_names)
    message, reason = min(of_node, key=lambda found: _ONLY_THAT_IT_WAITS in found[0])
    return PodWarning(now, reason, message.strip(), refuses_names)


def _is_fresh(event: Json, now: datetime) -> bool:
    series = event.get("series") or {}
    stamp = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    time = parse_time(stamp)
    return time is None or now - time < timedelta(seconds=FRESH_SECONDS)
