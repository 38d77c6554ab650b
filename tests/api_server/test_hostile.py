"""A tenant who writes the worst objects that the API server takes, beside one whose job has to go on."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest
from tests.api_server.conftest import NewCluster, StartOperator
from tests.api_server.fleet import peak_bytes
from tests.api_server.harness import Cluster, Operator

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.names import LABEL_ATTEMPT, LABEL_MANAGED_BY, LABEL_NODE_RANK, LABEL_UID, MANAGED_BY
from ddpjob_operator.runtime.errors import ApiError

MEASURED = (sys.executable, "-m", "tests.api_server.processor_lag")
LONGEST_TURN = 2.5
"""As a multiple of what it takes to decode six large objects; 0.9 to 1.2 was seen, for a list of them."""
MOST_BYTES = 256 * 2**20
"""Half of what the chart allows; 140 MiB were seen."""
COUNT = 6
TOO_MANY = [{"name": f"c{number}", "image": "a"} for number in range(20_000)]
WIDE_CLASSES = [{"action": "Fail", "messagePattern": r"(\pL|\pN|\pS){300}" + "x" * number} for number in range(32)]
BACKTRACKING = [{"action": "Fail", "messagePattern": "(a*)*b|(a|aa)+$" * 30} for _ in range(32)]

WORST: dict[str, dict[str, Any]] = {
    "containers without number": {"podTemplate": {"spec": {"schedulerName": "none", "containers": TOO_MANY}}},
    "classes of characters": {"restart": {"rules": WIDE_CLASSES}},
    "patterns for a backtracking engine": {"restart": {"rules": BACKTRACKING}},
    "long arguments": {"args": ["x" * 4096] * 256},
    "long values": {"env": [{"name": f"A{number}", "value": "x" * 4000} for number in range(256)]},
}


@pytest.mark.parametrize("kind", WORST)
async def test_the_job_of_another_tenant_goes_on(
    new_cluster: NewCluster, cluster: Cluster, start_operator: StartOperator, kind: str
) -> None:
    hostile, other = cluster, await new_cluster()
    served = {"NAMESPACES": f"{hostile.namespace},{other.namespace}"}
    operator = await start_operator(command=MEASURED, **served)
    results = await asyncio.gather(
        *(hostile.apply_job(f"worst-{number}", **WORST[kind]) for number in range(COUNT)), return_exceptions=True
    )
    assert all(isinstance(result, dict | ApiError) for result in results)
    await goes_on(other, "beside-the-watch")
    await holds_up_nobody(operator)
    await operator.kill()
    operator = await start_operator(command=MEASURED, **served)
    await goes_on(other, "beside-the-list")
    await holds_up_nobody(operator)


async def test_pods_with_forged_labels_hold_up_nobody(
    new_cluster: NewCluster, cluster: Cluster, start_operator: StartOperator
) -> None:
    hostile, other = cluster, await new_cluster()
    for number, (attempt, rank) in enumerate([("9" * 63, "0"), ("0", "9" * 63), ("", ""), ("1.1", "x"), ("1e3", "00")]):
        labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_ATTEMPT: attempt, LABEL_NODE_RANK: rank, LABEL_UID: f"u{number}"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"forged-{number}", "labels": labels},
            "spec": {"schedulerName": "none", "containers": [{"name": "trainer", "image": "a"}]},
        }
        await hostile.client.create(paths.pods(hostile.namespace), "pods", pod)
    operator = await start_operator(NAMESPACES=f"{hostile.namespace},{other.namespace}")
    await goes_on(other, "beside-the-list")
    for number in range(5):
        await hostile.report(f"forged-{number}", {"phase": "Failed", "message": "x" * 10_000, "reason": "y" * 1000})
    await goes_on(other, "beside-the-watch")
    assert operator.process is not None
    assert operator.process.returncode is None


async def goes_on(tenant: Cluster, name: str) -> None:
    """A job of an ordinary tenant gets its pods and runs."""
    await tenant.apply_job(name)
    pods = await tenant.gang_exists(job=name)
    await tenant.runs(*(pod["metadata"]["name"] for pod in pods))
    await tenant.phase_is("Running", name)


async def holds_up_nobody(operator: Operator) -> None:
    """No turn of its loop took long, and no object much memory, in its whole life."""
    measured = re.search(r"^test_longest_turn (\S+)$", await operator.metrics(), re.MULTILINE)
    assert measured
    assert 0 < float(measured[1]) <= LONGEST_TURN
    assert peak_bytes(operator) <= MOST_BYTES
