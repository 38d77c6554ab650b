"""Each action against a real API server: what it does there, and what it does when it is carried out twice or late.
And children that somebody deletes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster
from tests.support.waiting import eventually_async

from ddpjob_operator.api import GROUP
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.apply import Applier
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.actions import (
    Action,
    AssignPod,
    CreateChild,
    CreatePod,
    DeleteJob,
    DeletePod,
    ReadLog,
    ReleasePod,
    SyncPod,
)
from ddpjob_operator.core.values.job import Defaults, Job, Problem
from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.core.values.observed import PodView, ServiceView
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_job

POLICY = ("networking.k8s.io/v1", "NetworkPolicy")
FOREIGN = "0b0c0d0e-0000-4000-8000-00000000000f"


class Actor:
    """One operator's hands: an applier with a cache of its own."""

    def __init__(self, cluster: Cluster, job: dict[str, Any]) -> None:
        self.cache = Cache()
        self.cache.put_job(job)
        self.job: Job = parse_job(job)
        self._applier = Applier(cluster.client, self.cache)

    async def do(self, action: Action) -> Problem | None:
        refusal = await self._applier.carry_out(self.job, [action])
        return refusal.problem if refusal else None

    async def make_pod(self, node_rank: int = 0) -> PodView:
        manifest = build_pod(Admitted(self.job, Defaults()), Place(0, node_rank, ServiceView("10.96.0.7", 0)))
        assert await self.do(CreatePod(manifest["metadata"]["name"], 0, node_rank, manifest)) is None
        return next(pod for pod in self.pods if pod.name == manifest["metadata"]["name"])

    @property
    def owner(self) -> Owner:
        return Owner(self.job.namespace, self.job.uid)

    @property
    def pods(self) -> tuple[PodView, ...]:
        return self.cache.observed(self.owner).pods


@pytest.fixture
async def job(cluster: Cluster) -> dict[str, Any]:
    """A job that no operator looks at."""
    return await cluster.apply_job(restart={"scope": "InPlace"})


async def test_a_pod_gets_its_new_place_by_its_labels(cluster: Cluster, job: dict[str, Any]) -> None:
    actor = Actor(cluster, job)
    pod = await actor.make_pod(node_rank=1)
    for _ in range(2):  # the second time there is nothing to change
        assert await actor.do(AssignPod(pod.name, pod.uid, attempt=3, node_rank=0, nodes=5)) is None
    (seen,) = actor.pods
    assert (seen.attempt, seen.node_rank, seen.nodes) == (3, 0, 5)
    (found,) = await cluster.pods()
    assert found["metadata"]["labels"].items() >= {
        f"{GROUP}/attempt": "3", f"{GROUP}/node-rank": "0", f"{GROUP}/nodes": "5", f"{GROUP}/uid": actor.job.uid,
    }.items()  # fmt: skip


async def test_a_kubelet_is_to_show_a_pod_its_place_again(cluster: Cluster, job: dict[str, Any]) -> None:
    actor = Actor(cluster, job)
    pod = await actor.make_pod(node_rank=1)
    before = (await cluster.pods())[0]["metadata"]
    assert await actor.do(SyncPod(pod.name, pod.uid, "0-1")) is None
    after = (await cluster.pods())[0]["metadata"]
    assert after["labels"] == before["labels"] | {f"{GROUP}/sync": "0-1"}
    assert [seen.sync for seen in actor.pods] == ["0-1"]
    assert await Actor(cluster, job).do(SyncPod(pod.name, FOREIGN, "0-2")) is None, "another pod has the name now"
    assert (await cluster.pods())[0]["metadata"]["resourceVersion"] == after["resourceVersion"]


async def test_another_pod_of_that_name_is_not_relabelled_and_the_one_that_is_gone_is_forgotten(
    cluster: Cluster, job: dict[str, Any]
) -> None:
    actor = Actor(cluster, job)
    pod = await actor.make_pod()
    other = Actor(cluster, job)
    assert await other.do(AssignPod(pod.name, FOREIGN, 3, 1, 2)) is None
    assert [seen.uid for seen in other.pods] == [pod.uid], "it has learnt which pod has the name"
    assert (await cluster.pods())[0]["metadata"]["labels"][f"{GROUP}/attempt"] == "0"
    assert await Actor(cluster, job).do(DeletePod(pod.name, pod.uid, 0)) is None
    assert await actor.do(AssignPod(pod.name, pod.uid, 3, 1, 2)) is None
    assert actor.pods == ()


def policy(job: Job, *, owned: bool = True) -> CreateChild:
    owners = [Admitted(job, Defaults()).owner_reference()] if owned else []
    metadata = {"name": "digits", "namespace": job.namespace, "ownerReferences": owners}
    manifest = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata}
    return CreateChild(manifest | {"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}})


async def test_a_child_of_any_kind_is_made_once_by_whoever_comes_first(cluster: Cluster, job: dict[str, Any]) -> None:
    for actor in (Actor(cluster, job), Actor(cluster, job)):
        assert await actor.do(policy(actor.job)) is None
        assert actor.cache.observed(actor.owner).children == {("NetworkPolicy", "digits")}


async def test_a_child_of_somebody_else_is_left_alone(cluster: Cluster, job: dict[str, Any]) -> None:
    actor = Actor(cluster, job)
    collection, resource = paths.children("networking.k8s.io/v1", "NetworkPolicy", cluster.namespace)
    await cluster.client.create(collection, resource, policy(actor.job, owned=False).manifest)
    problem = await actor.do(policy(actor.job))
    assert problem is not None
    assert (problem.reason, "NetworkPolicy digits already exists" in problem.message) == ("NameTaken", True)
    assert actor.cache.observed(actor.owner).children == frozenset()


async def test_a_kind_that_is_not_installed_is_named_with_what_to_install(
    cluster: Cluster, job: dict[str, Any]
) -> None:
    actor = Actor(cluster, job)
    manifest = {"apiVersion": f"absent.{GROUP}/v1", "kind": "PodGroup", "metadata": {"name": "digits"}}
    problem = await actor.do(CreateChild(manifest))
    assert problem is not None
    assert problem.reason == "PodGroupMissing"
    assert f"knows no PodGroup of absent.{GROUP}/v1: install" in problem.message


async def test_the_log_of_a_pod_without_a_node_is_read_as_empty(cluster: Cluster, job: dict[str, Any]) -> None:
    actor = Actor(cluster, job)
    pod = await actor.make_pod()
    assert await actor.do(ReadLog(pod.name, pod.uid)) is None
    assert actor.cache.observed(actor.owner).logs == {pod.uid: ""}


async def test_a_pod_of_a_lost_node_is_removed_at_once_only_without_grace(
    cluster: Cluster, job: dict[str, Any]
) -> None:
    actor = Actor(cluster, job)
    pod = await actor.make_pod()
    binding = {"apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": "lost"}}
    path = f"{paths.pods(cluster.namespace)}/{pod.name}/binding"
    await cluster.client.create(path, "pods/binding", binding | {"metadata": {"name": pod.name}})
    await actor.do(DeletePod(pod.name, pod.uid, 2))
    assert [seen["metadata"]["deletionGracePeriodSeconds"] for seen in await cluster.pods()] == [2]
    assert [seen.deleting for seen in actor.pods] == [True]
    await actor.do(DeletePod(pod.name, pod.uid, 0))
    assert await cluster.pods() == []


async def test_a_pod_is_released_as_often_as_may_be_and_keeps_the_finalizers_of_others(
    cluster: Cluster, job: dict[str, Any]
) -> None:
    actor, theirs = Actor(cluster, job), "example.com/theirs"
    pod = await actor.make_pod()
    path = f"{paths.pods(cluster.namespace)}/{pod.name}"
    for others in ([], [theirs]):
        await cluster.client.merge_patch(path, "pods", {"metadata": {"finalizers": [FINALIZER, *others]}})
        for _ in range(2):
            assert await actor.do(ReleasePod(pod.name, pod.uid)) is None
            assert await cluster.finalizers() == others
    assert await actor.do(ReleasePod(pod.name, FOREIGN)) is None
    await cluster.client.merge_patch(path, "pods", {"metadata": {"finalizers": None}})


async def test_a_job_is_deleted_by_its_uid_and_known_to_be_gone(cluster: Cluster, job: dict[str, Any]) -> None:
    actor, key = Actor(cluster, job), Key(cluster.namespace, "digits")
    await actor.do(DeleteJob(FOREIGN))
    assert (await cluster.job())["metadata"]["uid"] == actor.job.uid
    assert actor.cache.job(key) is not None
    for _ in range(2):
        assert await actor.do(DeleteJob(actor.job.uid)) is None
        assert actor.cache.job(key) is None
    with pytest.raises(ApiError) as missing:
        await cluster.job()
    assert missing.value.not_found


async def test_a_job_that_a_finalizer_holds_is_known_to_be_deleted(cluster: Cluster, job: dict[str, Any]) -> None:
    path = f"{paths.jobs(cluster.namespace)}/digits"
    finalizers = {"metadata": {"finalizers": ["test.ddpjob.io/hold"]}}
    actor = Actor(cluster, await cluster.client.merge_patch(path, "ddpjobs", finalizers))
    assert await actor.do(DeleteJob(actor.job.uid)) is None
    seen = actor.cache.job(Key(cluster.namespace, "digits"))
    assert seen is not None
    assert "deletionTimestamp" in seen["metadata"]
    await cluster.client.merge_patch(path, "ddpjobs", {"metadata": {"finalizers": None}})

    async def gone() -> bool:
        try:
            await cluster.job()
        except ApiError as error:
            return error.not_found
        return False

    await eventually_async(gone, "the job is gone")


async def children(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """By resource, what the job has besides its pods."""
    collections = [
        (paths.services(cluster.namespace), "services"),
        (paths.claims(cluster.namespace), "persistentvolumeclaims"),
        paths.children(*POLICY, cluster.namespace),
    ]
    found = {}
    for path, resource in collections:
        items, _ = await cluster.client.list(path, resource, labelSelector=f"{GROUP}/job=digits")
        if items:
            (found[resource],) = items
    return found


async def deleted(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Delete them all, and wait until other ones are there."""
    before = await children(cluster)
    assert len(before) == 3
    for resource, path in (
        ("services", paths.services(cluster.namespace)),
        ("persistentvolumeclaims", paths.claims(cluster.namespace)),
        ("networkpolicies", paths.children(*POLICY, cluster.namespace)[0]),
    ):
        await cluster.client.delete(f"{path}/{before[resource]['metadata']['name']}", resource)
    uids = {item["metadata"]["uid"] for item in before.values()}

    async def restored() -> dict[str, dict[str, Any]] | None:
        now = await children(cluster)
        return now if len(now) == 3 and not uids & {item["metadata"]["uid"] for item in now.values()} else None

    after = await eventually_async(restored, "what was deleted is created again")
    assert after["services"]["spec"]["clusterIP"] == before["services"]["spec"]["clusterIP"]
    assert after["services"]["spec"]["selector"] == before["services"]["spec"]["selector"]
    return after


async def test_what_somebody_deletes_while_a_job_runs_is_created_again_for_one_call_each(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator(NETWORK_POLICY="ingress")
    await cluster.apply_job()
    pods = await cluster.gang_exists()
    await cluster.runs(*(pod["metadata"]["name"] for pod in pods))
    await cluster.phase_is("Running")
    await deleted(cluster)
    events = f"/api/v1/namespaces/{cluster.namespace}/events"

    async def reported() -> set[str]:
        found, _ = await cluster.client.list(events, "events")
        said = {event["message"] for event in found if event["reason"] == "ChildRestored"}
        return said if len(said) == 3 else set()

    said = await eventually_async(reported, "each is reported as an event")
    assert any("its volume is new and has no snapshot" in message for message in said)

    assert await first.stop() == 0
    before = Counter(map(str, await cluster.cost()))
    await start_operator(NETWORK_POLICY="ingress")
    await deleted(cluster)
    cost = Counter(map(str, await cluster.cost())) - before
    assert set(cost.elements()) == {
        "create services digits-rdzv -> 201",
        "create persistentvolumeclaims digits-shared -> 201",
        "create networkpolicies digits -> 201",
    }, "another operator has asked for nothing but what it had to create"
    assert cost.total() == 3
    assert await cluster.gang_exists() == await cluster.pods(), "no pod was touched"


async def test_a_gang_that_starts_gets_back_what_somebody_deletes(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(NETWORK_POLICY="ingress")
    await cluster.apply_job()
    await cluster.gang_exists()
    await deleted(cluster)
    assert (await cluster.status())["phase"] == "Starting"


async def test_a_claim_that_loses_our_label_while_a_gang_starts_is_used_and_looked_for_once(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """Its watch says DELETED, although it is there."""
    await start_operator()
    await cluster.apply_job()
    pods = await cluster.gang_exists()
    before = Counter(map(str, await cluster.cost()))
    path = f"{paths.claims(cluster.namespace)}/digits-shared"
    labels = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}}
    await cluster.client.merge_patch(path, "persistentvolumeclaims", labels)

    async def looked_for() -> bool:
        return "get persistentvolumeclaims digits-shared -> 200" in map(str, await cluster.cost())

    await eventually_async(looked_for, "the operator asks whether the claim is there")
    await cluster.runs(*(pod["metadata"]["name"] for pod in pods))
    await cluster.phase_is("Running")
    cost = Counter(map(str, await cluster.cost())) - before
    assert cost["create persistentvolumeclaims digits-shared -> 409"] == 1
    assert cost["get persistentvolumeclaims digits-shared -> 200"] == 1
