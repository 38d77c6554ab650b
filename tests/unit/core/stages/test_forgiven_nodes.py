"""A node that the job keeps away from is used again after a day, also where a pod waits for it all the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, in_phase, later, make_job, make_pod, seen

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_exclusion import FORGIVEN_SECONDS
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import CreatePod, Plan
from ddpjob_operator.core.values.observed import PodView

DAY = FORGIVEN_SECONDS + 1


def look(*pods: PodView, seconds: float, scope: str = "Gang", status: DDPJobStatus | None = None, **spec: Any) -> Plan:
    spec = {"nodes": 2, "restart": {"scope": scope}} | spec
    started_with = digests(make_job(**spec), DEFAULTS)
    given = status or in_phase(Phase.RESTARTING, nodes=2, attempt=0, spec_digests=started_with, **EXCLUDED)
    return plan(make_job(given, **spec), seen(*pods), later(seconds), DEFAULTS)


EXCLUDED: dict[str, Any] = {
    "excluded_nodes": ("node-1",),
    "node_failures": {"node-1": 3},
    "node_failure_times": {"node-1": NOW},
}
WAITS = replace(make_pod(1, "Pending", scheduled=False), node_name=None, created=NOW)


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
def test_a_pod_that_waits_is_made_anew_once_the_node_is_forgiven(scope: str) -> None:
    before = look(make_pod(0), WAITS, seconds=DAY - 10, scope=scope)
    assert before.status.attempt == 0
    assert before.requeue_after is not None
    assert before.requeue_after <= 10
    after = look(make_pod(0), WAITS, seconds=DAY, scope=scope)
    assert (after.status.attempt, after.status.excluded_nodes, after.status.node_failures) == (1, (), {})
    assert (after.status.restarts or 0, after.status.disruptions or 0) == (0, 0)
    (event,) = after.events
    assert event.reason == "NodesForgiven"
    assert "node-1 may be used again" in event.message
    made = [action for action in after.actions if isinstance(action, CreatePod)]
    assert made
    assert not any("node-1" in str(action.manifest["spec"].get("affinity")) for action in made)


def test_a_gang_whose_pods_have_nodes_is_left_alone() -> None:
    pulls = make_pod(1, "Pending", scheduled=True)
    assert look(make_pod(0), pulls, seconds=DAY).status.attempt == 0


def test_a_node_that_a_rule_excluded_stays_excluded() -> None:
    started_with = digests(make_job(nodes=2, restart={"scope": "Gang"}), DEFAULTS)
    status = in_phase(Phase.RESTARTING, nodes=2, attempt=0, spec_digests=started_with, excluded_nodes=("node-1",))
    assert look(make_pod(0), WAITS, seconds=10 * DAY, status=status).status.attempt == 0
