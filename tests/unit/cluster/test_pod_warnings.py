"""Which of a pod's events says why it does not start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.cluster.pod_warnings import warned
from ddpjob_operator.core.values.observed import PodWarning

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETUP = 'MountVolume.SetUp failed for volume "token" : secret "token" not found'
REFUSED = "Failed to schedule pod, node selector term with matchFields is not supported"
"""Of Karpenter (kubernetes-sigs/karpenter, pkg/controllers/provisioning)."""
PULLS = "Unable to retrieve some image pull secrets (regcred); attempting to pull the image may not succeed."
"""Of a kubelet, while it pulls the image of a public registry."""
AUDITED = "policy require-labels/check-team fail: validation error: label team is required"
"""Of Kyverno (NewResourceViolationEvent in pkg/event/events.go), of a pod that it has let in."""
LEFT_OUT = "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: a b"
"""Of a kubelet (pkg/kubelet/network/dns/dns.go)."""
WAITS = "Unable to attach or mount volumes: unmounted volumes=[token]: timed out waiting for the condition"


def event(message: str, reason: str = "FailedMount", ago: float = 5, **fields: Any) -> dict[str, Any]:
    time = (NOW - timedelta(seconds=ago)).isoformat().replace("+00:00", "Z")
    return {"reason": reason, "message": message, "lastTimestamp": time} | fields


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], PodWarning(NOW), id="none"),
        pytest.param([event(SETUP)], PodWarning(NOW, "FailedMount", SETUP), id="one"),
        pytest.param(
            [event(WAITS, ago=1), event(SETUP)], PodWarning(NOW, "FailedMount", SETUP), id="the one that says why"
        ),
        pytest.param([event(WAITS)], PodWarning(NOW, "FailedMount", WAITS), id="unless there is no other"),
        pytest.param([event("b"), event("a")], PodWarning(NOW, "FailedMount", "a"), id="the same one in any order"),
        pytest.param([event("0/2 nodes", "FailedScheduling")], PodWarning(NOW), id="what came before its node"),
        pytest.param([event(REFUSED, "FailedScheduling")], PodWarning(NOW, refuses_names=True), id="of an autoscaler"),
        pytest.param([event(PULLS, "FailedToRetrieveImagePullSecret")], PodWarning(NOW), id="a Secret less"),
        pytest.param([event(AUDITED, "PolicyViolation")], PodWarning(NOW), id="of a policy that audits"),
        pytest.param([event(LEFT_OUT, "DNSConfigForming")], PodWarning(NOW), id="of names that are left out"),
        pytest.param(
            [event(LEFT_OUT, "DNSConfigForming"), event(AUDITED, "PolicyViolation"), event(WAITS)],
            PodWarning(NOW, "FailedMount", WAITS),
            id="the one that is in the way",
        ),
        pytest.param([event(SETUP, ago=181)], PodWarning(NOW), id="one that is over"),
        pytest.param(
            [event(SETUP, lastTimestamp=None, series={"lastObservedTime": "2026-01-02T03:04:00.000000Z"})],
            PodWarning(NOW, "FailedMount", SETUP),
            id="one of a series",
        ),
        pytest.param([event(SETUP, lastTimestamp=None)], PodWarning(NOW, "FailedMount", SETUP), id="no time"),
        pytest.param([{"reason": "FailedMount"}], PodWarning(NOW, "FailedMount", ""), id="one without words"),
    ],
)
def test_the_warning_that_says_most(events: list[dict[str, Any]], expected: PodWarning) -> None:
    assert warned(events, NOW) == expected
