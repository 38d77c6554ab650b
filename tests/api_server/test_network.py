"""The NetworkPolicy of a job on a real API server. Whether it is enforced is up to the cluster's network."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError


async def policy(cluster: Cluster, name: str = "digits") -> dict[str, Any] | None:
    collection, resource = paths.children("networking.k8s.io/v1", "NetworkPolicy", cluster.namespace)
    try:
        return await cluster.client.get(f"{collection}/{name}", resource)
    except ApiError as error:
        if not error.not_found:
            raise
        return None


async def test_a_job_is_closed_before_its_first_pod_exists_for_one_more_call(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(NETWORK_POLICY="ingress", SCRAPERS="kubernetes.io/metadata.name=monitoring")
    job = await cluster.apply_job()
    pods = await cluster.gang_exists()
    found = await policy(cluster)
    assert found is not None
    assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert int(found["metadata"]["resourceVersion"]) < min(int(pod["metadata"]["resourceVersion"]) for pod in pods)
    assert found["spec"]["podSelector"]["matchLabels"].items() <= pods[0]["metadata"]["labels"].items()
    cost = Counter((entry.verb, entry.resource) for entry in await cluster.cost())
    assert cost["create", "networkpolicies"] == 1
    assert not [what for what in cost if what[0] == "get"]


async def test_an_operator_that_is_not_asked_to_makes_none(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    await cluster.gang_exists()
    assert await policy(cluster) is None


async def test_the_policy_goes_with_its_job(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator(NETWORK_POLICY="isolated")
    await cluster.apply_job()
    await cluster.gang_exists()
    found = await policy(cluster)
    assert found is not None
    assert found["spec"]["policyTypes"] == ["Ingress", "Egress"]
    await cluster.delete_job()

    async def gone() -> bool:
        return await policy(cluster) is None

    await eventually_async(gone, "the garbage collector has removed the policy")


async def test_an_operator_that_starts_anew_finds_the_policy_that_is_there(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator(NETWORK_POLICY="ingress")
    # a group that cannot be made holds the job where its policy is there and its pods are not
    await cluster.apply_job(scheduling={"gang": "Volcano"})

    async def made() -> bool:
        return await policy(cluster) is not None

    await eventually_async(made, "the policy exists")
    await first.kill()
    before, asked = await policy(cluster), Counter(map(str, await cluster.asked()))
    await start_operator(NETWORK_POLICY="ingress")

    async def looked_again() -> Counter[str] | None:
        new = Counter(map(str, await cluster.asked())) - asked
        return new if any("create podgroups" in entry for entry in new) else None

    new = await eventually_async(looked_again, "the new operator tries to create the group")
    assert [entry for entry in new if "networkpolicies" in entry] == ["list networkpolicies  -> 200"]
    assert await policy(cluster) == before
