"""What is to be done about one failure: the job's own restart rules in order, and after them the defaults.

The defaults: exit codes 64 and 77 fail the job, because a retry would end the same way; a disruption, which is the
cluster's doing and says nothing about the program, restarts it for free; everything else restarts it and counts.
(As in podFailurePolicy of batch/v1, KEP-3329, the first rule that matches decides.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddpjob_operator.api.policies import Restart, RestartRule
from ddpjob_operator.core.failure.detect import (
    DEVICE_TAINTED,
    DISRUPTED,
    EXIT_FENCED,
    LEFT,
    OUT_OF_RESOURCE,
    PREEMPTED,
    STATUS_RESTORED,
    Failure,
    Retry,
)
from ddpjob_operator.core.failure.symptoms import found

DISRUPTIONS = frozenset(
    {
        PREEMPTED,  # by the scheduler for a pod of higher priority, or asked to stop and stopped in order (exit 143)
        LEFT,  # asked to stop, and left the ranks that recover live
        "Evicted",  # by the kubelet when a resource runs out
        "Drained",  # by the eviction API
        DISRUPTED,  # for another reason of the cluster's, or of Kueue's
        "NodeTainted",  # for a taint of its node, which ended it in order
        DEVICE_TAINTED,  # for a taint of a device that it has by a resource claim (KEP-5055)
        "NodeLost",  # the node is silent, or gone
        "NodeRebooted",  # the node is back, and does not know the containers that ran there
        "Preempting",  # by the kubelet for a critical pod
        "Terminated",  # the node shuts down
        "Shutdown",  # the same, of kubelets before 1.22
        "NodeShutdown",  # the node shuts down and admits no pod
        "NodeAffinity",  # the node's labels changed
        "OutOfcpu",  # the kubelet found the node to be full: the scheduler saw an older picture
        "OutOfmemory",
        "OutOfpods",
        OUT_OF_RESOURCE,
        "NodePorts",  # as full for a pod on the host's network: one that has just ended there still has the ports
        "VolumeAttachmentLimitExceeded",  # as full for a volume: kubelets since 1.33 refuse the pod (KEP-4876)
        STATUS_RESTORED,  # a backup of the cluster, which knows less than the volume
    }
)
"""Reasons that are the cluster's doing. Not PodDeleted: a person may delete a pod because of what it does.
One that never began is `DISRUPTED`.
"""


_FORMER_NAMES = {
    "Drained": ("Evicted",),
    "NodeTainted": ("Evicted",),
    DISRUPTED: ("Evicted",),
    "StorageLimitExceeded": ("Evicted",),
    "PodDeadlineExceeded": ("DeadlineExceeded",),
}
"""What rules may still know a reason by."""


class RuleAction(StrEnum):
    """`action` of a restart rule."""

    RESTART = "Restart"
    RESTART_AND_IGNORE_MAX_RESTARTS = "RestartAndIgnoreMaxRestarts"
    FAIL = "Fail"
    EXCLUDE_NODE = "ExcludeNode"


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a failure leads to, and what decided so."""

    action: RuleAction
    why: str
    """For people, as a clause of a sentence."""

    explicit: bool = False
    """Whether a rule of the job's own decided."""


def rule_on(policy: Restart, failure: Failure, *names: str) -> Ruling:
    """What `policy` says about `failure`. `names` are further names of its reason that a rule may know it by."""
    for index, rule in enumerate(policy.rules):
        matched = _matched(rule, failure, {failure.reason, *names, *_FORMER_NAMES.get(failure.reason, ())})
        if matched is not None:
            what = ", ".join(matched) or "any failure"
            return Ruling(RuleAction(rule.action), f"restart.rules[{index}] ({what}) says {rule.action}", explicit=True)
    if failure.retry is Retry.NEVER:
        why = (
            "another DDPJob of this name owns the checkpoint directory"
            if failure.exit_code == EXIT_FENCED
            else "a retry would fail in the same way"
        )
        return Ruling(RuleAction.FAIL, why)
    if failure.reason in DISRUPTIONS:
        return Ruling(RuleAction.RESTART_AND_IGNORE_MAX_RESTARTS, f"{failure.reason} is a disruption")
    return Ruling(RuleAction.RESTART, "")


def _matched(rule: RestartRule, failure: Failure, names: set[str]) -> list[str] | None:
    """What of a rule's conditions was met, for people; None unless all of them were."""
    pattern, reasons = rule.message_pattern, sorted(names.intersection(rule.reasons))
    conditions = (
        (bool(rule.exit_codes), failure.exit_code in rule.exit_codes, f"exit code {failure.exit_code}"),
        (bool(rule.reasons), bool(reasons), f"reason {', '.join(reasons)}"),
        (bool(rule.signals), failure.signal in rule.signals, f"signal {failure.signal}"),
        (pattern is not None, found(pattern or "", failure.message), f"message matches {pattern!r}"),
    )
    if any(asked and not met for asked, met, _ in conditions):
        return None
    return [said for asked, _, said in conditions if asked]
