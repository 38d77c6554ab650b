"""What the API server makes of a podTemplate: junk is pruned, wrong types are refused, null removes a default."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.names import LABEL_MANAGED_BY, MANAGED_BY
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in, open_session

DEEP = "1,000 levels"


async def create(collection: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create an object that Python itself could not encode."""
    levels = 1000
    text = json.dumps(body).replace(json.dumps(DEEP), '{"f:a":' * levels + "{}" + "}" * levels)
    login = await log_in()
    async with open_session(login) as session:
        headers = {"Content-Type": "application/json"}
        async with session.post(login.server + collection, data=text, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 201, answer
            return answer


async def test_what_a_pod_does_not_have_is_pruned(cluster: Cluster) -> None:
    template = {"schedulerName": "none", "junk": DEEP, "volumes": [{"name": "a", "emptyDir": {"junk": DEEP}}]}
    env = [{"name": "A", "valueFrom": {"junk": DEEP, "fieldRef": {"fieldPath": "metadata.uid"}}}]
    job = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "digits"},
        "spec": {"podTemplate": {"spec": template}, "env": env},
    }
    spec = (await create(paths.jobs(cluster.namespace), job))["spec"]
    assert spec["podTemplate"]["spec"] == {"schedulerName": "none", "volumes": [{"name": "a", "emptyDir": {}}]}
    assert spec["env"] == [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"volumes": "all"}, "volumes"),
        ({"containers": {"name": "trainer"}}, "containers"),
        ({"containers": [{"image": "nameless"}]}, "containers"),
        ({"nodeSelector": {"gpu": 1}}, "nodeSelector"),
        ({"hostNetwork": "yes"}, "hostNetwork"),
        ({"tolerations": [[]]}, "tolerations"),
        ({"containers": [{"name": "trainer", "resources": {"limits": {"memory": "much"}}}]}, "resources"),
    ],
)
async def test_a_wrong_type_is_refused(cluster: Cluster, template: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError, match=rf"spec\.podTemplate\.spec\.{field}|podTemplate.*{field}") as refused:
        await cluster.apply_job(podTemplate={"spec": template})
    assert refused.value.status in (400, 422)


async def test_a_null_removes_what_the_operator_would_set(cluster: Cluster, operator: Operator) -> None:
    template = {"schedulerName": "none", "topologySpreadConstraints": None, "enableServiceLinks": None}
    await cluster.apply_job(podTemplate={"spec": template | {"securityContext": {"fsGroup": None}}})
    pod = (await cluster.gang_exists())[0]["spec"]
    assert "fsGroup" not in pod["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]


async def test_a_pod_of_any_depth_stops_no_job(cluster: Cluster, start_operator: StartOperator) -> None:
    """Managed fields have no schema: 1,000 levels of them are valid."""
    watching = await start_operator()
    entry = {
        "manager": "hostile",
        "operation": "Update",
        "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": DEEP,
    }
    metadata = {
        "name": "deep",
        "labels": {LABEL_MANAGED_BY: MANAGED_BY},
        "managedFields": [entry],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"schedulerName": "none", "containers": [{"name": "a", "image": "a"}]},
    }
    created = await create(paths.pods(cluster.namespace), pod)
    assert created["metadata"]["managedFields"], "the API server has dropped what this test is about"
    await cluster.apply_job("seen-by-watch")
    await cluster.gang_exists(job="seen-by-watch")
    await watching.kill()
    await start_operator()
    await cluster.apply_job("seen-by-list")
    await cluster.gang_exists(job="seen-by-list")
