"""A gang that is admitted as a whole: its group is there before its pods, and who is to read it can."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.api_server.kueue import PodGroups, has_ended
from tests.api_server.server import ApiServer, install_crd, remove_crd
from tests.api_server.test_refusals import degraded
from tests.api_server.test_restarts import KILLED
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.manifests.pod_group import COSCHEDULING, VOLCANO
from ddpjob_operator.core.values.names import LABEL_ATTEMPT

TEMPLATE = {"spec": {"schedulerName": "none"}}
VERSIONS = {"Coscheduling": COSCHEDULING, "Volcano": VOLCANO}


def definition(api_version: str) -> dict[str, Any]:
    """A PodGroup as its scheduler would install it, as far as an API server has to know."""
    group, version = api_version.split("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}},
            ],
        },
    }


@pytest.fixture(scope="module")
def schedulers(api_server: ApiServer) -> Iterator[None]:
    """The kinds of both schedulers, installed for as long as these tests run."""
    for version in VERSIONS.values():
        asyncio.run(install_crd(api_server.kubeconfig, definition(version)))
    yield
    for version in VERSIONS.values():
        asyncio.run(remove_crd(api_server.kubeconfig, definition(version)))


async def test_a_scheduler_that_is_not_installed_is_said_with_the_way_out(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(scheduling={"gang": "Volcano"}, podTemplate=TEMPLATE)
    condition = await degraded(cluster, "PodGroupMissing")
    assert "install Volcano, or remove scheduling.gang" in condition["message"]
    assert await cluster.pods() == []


@pytest.mark.parametrize("gang", VERSIONS)
async def test_a_gang_has_its_group_before_its_pods_and_pays_one_call_for_it(
    schedulers: None, cluster: Cluster, operator: Operator, gang: str
) -> None:
    job = await cluster.apply_job(nodes=3, scheduling={"gang": gang}, podTemplate=TEMPLATE)
    pods = await cluster.gang_exists(nodes=3)
    collection, resource = paths.children(VERSIONS[gang], "PodGroup", cluster.namespace)
    (group,), _ = await cluster.client.list(collection, resource)
    assert group["spec"]["minMember"] == 3
    assert [owner["uid"] for owner in group["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    oldest = min(int(pod["metadata"]["resourceVersion"]) for pod in pods)
    assert int(group["metadata"]["resourceVersion"]) < oldest
    for pod in pods:
        given = pod["metadata"]["labels"] | pod["metadata"].get("annotations", {})
        theirs = {value for name, value in given.items() if name.endswith(("/pod-group", "/group-name"))}
        assert theirs == {group["metadata"]["name"]}
    cost = [(entry.verb, entry.resource) for entry in await cluster.cost()]
    assert cost.count(("create", "podgroups")) == 1
    assert ("get", "podgroups") not in cost


@pytest.mark.parametrize("gang", VERSIONS)
async def test_a_gang_that_is_over_leaves_no_group_behind_and_the_next_has_its_own(
    schedulers: None, cluster: Cluster, operator: Operator, gang: str
) -> None:
    collection, resource = paths.children(VERSIONS[gang], "PodGroup", cluster.namespace)

    async def groups(*attempts: int) -> None:
        """Wait until there are the groups of these attempts and no others."""

        async def so() -> bool:
            found, _ = await cluster.client.list(collection, resource)
            return sorted(item["metadata"]["name"].rpartition("-")[2] for item in found) == [str(n) for n in attempts]

        await eventually_async(so, f"there are the groups of {attempts}")

    async with recorded(cluster) as history:
        restart = {"backoff": {"initialSeconds": 0}}
        await cluster.apply_job(scheduling={"gang": gang}, podTemplate=TEMPLATE, restart=restart)
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        await cluster.ends(pods[1], code=1, message=KILLED)
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt=1)]
        await groups(1)
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        await cluster.edit_job(suspend=True)
        await cluster.phase_is("Suspended")
        await groups()
        await cluster.edit_job(suspend=False)
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt=2)]
        await groups(2)
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        await cluster.ends(pods[0], code=64, message={"version": 1, "outcome": "Failed", "reason": "UserError"})
        await cluster.phase_is("Failed")
        await groups()
    assert history.broken_rules() == []
    events, _ = await cluster.client.list(f"/api/v1/namespaces/{cluster.namespace}/events", "events")
    assert "ChildRestored" not in {event["reason"] for event in events}


async def test_a_queue_gets_pods_that_say_how_many_they_are(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(scheduling={"gang": "Kueue", "queue": "research"}, podTemplate=TEMPLATE)
    for pod in await cluster.gang_exists():
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "research"
        assert re.fullmatch("digits-[0-9a-f]{8}-0", labels["kueue.x-k8s.io/pod-group-name"])
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "2"


@pytest.mark.parametrize(
    ("scope", "second"), [("Gang", ["digits-1-0", "digits-1-1"]), ("InPlace", ["digits-0-0", "digits-1-1"])]
)
async def test_a_gang_that_is_over_gives_its_quota_back_and_another_is_admitted(
    cluster: Cluster, operator: Operator, scope: str, second: list[str]
) -> None:
    spec: dict[str, Any] = {"scheduling": {"gang": "Kueue", "queue": "research"}, "podTemplate": TEMPLATE}
    spec["restart"] = {"scope": scope, "backoff": {"initialSeconds": 0}}
    async with PodGroups(cluster) as queue:

        async def admitted(*names: str) -> None:
            """Wait until the pods of the current attempt, which are these if they are named, may be scheduled, as the
            only group that is open; they run then.
            """
            gang: list[str] = []

            async def done() -> bool:
                attempt = str((await cluster.status()).get("attempt", 0))
                pods = [pod for pod in await cluster.pods() if pod["metadata"]["labels"][LABEL_ATTEMPT] == attempt]
                gang[:] = [pod["metadata"]["name"] for pod in pods]
                whole = set(gang) == set(names) if names else len(gang) == 2 and not any(map(has_ended, pods))
                return whole and {pod["metadata"]["uid"] for pod in pods} <= queue.admitted and len(queue.open) == 1

            await eventually_async(done, f"{names} are admitted, as the one group that is open", instead=lambda: gang)
            await cluster.runs(*gang)
            await cluster.phase_is("Running")

        async def given_back() -> bool:
            return await cluster.pods() == [] and not queue.open

        await cluster.apply_job(**spec)
        await admitted("digits-0-0", "digits-0-1")
        await cluster.ends("digits-0-1", code=1, message=KILLED)
        await admitted(*second)
        await cluster.edit_job(suspend=True)
        await eventually_async(given_back, "a job that is suspended holds no quota, and no pod")
        await cluster.edit_job(suspend=False)
        await admitted("digits-2-0", "digits-2-1")
        await cluster.ends("digits-2-0", "digits-2-1", code=1, message=KILLED)
        await admitted()
        assert (await cluster.status())["attempt"] > 2
        assert queue.excess == []
        await cluster.delete_job()
        await eventually_async(given_back, "a job that is deleted holds no quota, and no pod")
        await cluster.apply_job(**spec)
        await admitted("digits-0-0", "digits-0-1")


async def test_a_new_pod_joins_the_group_of_the_others_when_the_one_that_was_deleted_has_ended(
    cluster: Cluster, operator: Operator
) -> None:
    queue: dict[str, Any] = {"scheduling": {"gang": "Kueue", "queue": "research"}, "podTemplate": TEMPLATE}
    restart = {"scope": "InPlace", "backoff": {"initialSeconds": 0}}
    async with PodGroups(cluster) as groups:
        await cluster.apply_job(**queue | {"nodes": 3, "restart": restart})
        first = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.gang_exists(nodes=3)}

        async def admitted(*names: str) -> bool:
            there = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()}
            return set(there) == set(names) and set(there.values()) <= groups.admitted

        await eventually_async(lambda: admitted(*first), "all three are admitted")
        await cluster.runs(*first)
        await cluster.phase_is("Running")
        await cluster.client.delete(f"{paths.pods(cluster.namespace)}/digits-0-1", "pods")
        after = ("digits-0-0", "digits-0-2", "digits-1-1")
        await eventually_async(lambda: admitted(*after), "the new one is admitted beside those that stay")
        assert len(groups.open) == 1
        assert groups.excess == []
        await cluster.runs("digits-1-1")
        await cluster.phase_is("Running")


@pytest.mark.fault(27)
async def test_a_gang_that_gets_only_some_of_its_nodes_in_time_gives_them_back(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(nodes=3, scheduling={"timeoutSeconds": 2})
    first, *_ = await cluster.gang_exists(nodes=3)
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": None}
    await cluster.report(first["metadata"]["name"], {"conditions": [placed]})
    condition = await degraded(cluster, "GangTimeout")
    assert "after 2 s 1 of 3 pods had a node" in condition["message"]
    await cluster.gang_exists(attempt=1, nodes=3)

    async def given_back() -> bool:
        return {pod["metadata"]["labels"]["training.ddpjob.io/attempt"] for pod in await cluster.pods()} == {"1"}

    await eventually_async(given_back, "only pods of attempt 1 are left")
    assert (await cluster.status()).get("restarts", 0) == 0
