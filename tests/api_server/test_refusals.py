"""When the API server says no, the status says so, the job is not failed, and it goes on when the reason has gone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError


async def degraded(cluster: Cluster, reason: str) -> dict[str, Any]:
    """Wait until the job is Degraded for that reason, and return the condition."""

    async def said() -> dict[str, Any] | None:
        for condition in (await cluster.status()).get("conditions") or []:
            if (condition["type"], condition["status"], condition["reason"]) == ("Degraded", "True", reason):
                return condition
        return None

    return await eventually_async(said, f"the job is Degraded: {reason}")


@pytest.mark.fault(20)
async def test_a_gang_that_a_quota_cuts_short_is_given_back_whole_and_tried_again(
    cluster: Cluster, operator: Operator
) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    await cluster.client.create(path, "resourcequotas", quota)

    async def counted() -> bool:
        return "hard" in ((await cluster.client.get(f"{path}/few", "resourcequotas")).get("status") or {})

    await eventually_async(counted, "the quota is in force")
    await cluster.apply_job(nodes=3)
    condition = await degraded(cluster, "QuotaExceeded")
    assert condition["message"].startswith("2 of 3 pods were released: the API server rejected Pod digits-0-")
    assert "exceeded quota: few" in condition["message"]

    async def nothing_is_held() -> bool:
        return not await cluster.pods()

    await eventually_async(nothing_is_held, "the pods that were made are gone")
    await cluster.client.merge_patch(f"{path}/few", "resourcequotas", {"spec": {"hard": {"pods": "9"}}})

    async def complete() -> list[str] | None:
        names = [pod["metadata"]["name"] for pod in await cluster.pods()]
        return names if len(names) == 3 else None

    await cluster.runs(*await eventually_async(complete, "the gang is complete"))
    status = await cluster.phase_is("Running")
    assert (status.get("restarts", 0), status.get("disruptions", 0)) == (0, 0)
    assert {item["type"]: item["status"] for item in status["conditions"]}["Degraded"] == "False"


@pytest.mark.fault(21)
async def test_a_pod_template_that_the_api_server_refuses_is_said_with_its_words(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(podTemplate={"spec": {"schedulerName": "none", "nodeSelector": {"a b": "c"}}})
    condition = await degraded(cluster, "Invalid")
    assert "nodeSelector" in condition["message"]


async def test_a_pod_of_that_name_that_is_somebody_elses_is_not_touched(cluster: Cluster, operator: Operator) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    foreign = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "digits-0-1"},
        "spec": {"schedulerName": "none", "containers": [{"name": "c", "image": "i"}]},
    }
    uid = (await cluster.client.create(path, "pods", foreign))["metadata"]["uid"]
    await cluster.apply_job()
    assert "digits-0-1" in (await degraded(cluster, "NameTaken"))["message"]
    assert (await cluster.client.get(f"{path}/digits-0-1", "pods"))["metadata"]["uid"] == uid
    await cluster.client.delete(f"{path}/digits-0-1", "pods")

    async def replaced() -> bool:
        pods = await cluster.pods()
        return len(pods) == 2 and all(pod["metadata"].get("ownerReferences") for pod in pods)

    await eventually_async(replaced, "the gang is complete")


async def test_pods_that_only_claim_to_belong_to_a_job_of_another_namespace_change_nothing(
    new_cluster: Any, cluster: Cluster, start_operator: Any
) -> None:
    other = await new_cluster()
    await start_operator(NAMESPACES=f"{cluster.namespace},{other.namespace}")
    job = await cluster.apply_job()
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    running = await cluster.phase_is("Running")
    labels = (await cluster.pods())[0]["metadata"]["labels"] | {"training.ddpjob.io/attempt": "7"}
    forged = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "forged", "labels": labels},
        "spec": {"schedulerName": "none", "containers": [{"name": "c", "image": "i"}]},
    }
    await other.client.create(f"/api/v1/namespaces/{other.namespace}/pods", "pods", forged)
    await other.ends("forged", code=1)
    # that a later pod runs comes through the same watch of pods, so by then the forged one has been seen too
    await other.apply_job("later", nodes=1)
    await other.gang_exists(nodes=1, job="later")
    await other.runs("later-0-0")
    await other.phase_is("Running", "later")
    assert labels["training.ddpjob.io/uid"] == job["metadata"]["uid"]
    assert await cluster.status() == running


async def test_the_client_knows_a_namespace_that_is_going_away(cluster: Cluster) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}"
    held = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "held", "finalizers": ["test.ddpjob.io/hold"]},
    }
    await cluster.client.create(f"{path}/configmaps", "configmaps", held)
    await cluster.client.delete(path, "namespaces")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
    with pytest.raises(ApiError) as refused:
        await cluster.client.create(f"{path}/configmaps", "configmaps", body)
    assert refused.value.namespace_terminating
    await cluster.client.merge_patch(f"{path}/configmaps/held", "configmaps", {"metadata": {"finalizers": None}})


@pytest.mark.fault(16)
async def test_a_namespace_that_is_deleted_goes_though_its_jobs_would_be_made_again(
    cluster: Cluster, operator: Operator
) -> None:
    """What it makes is refused from the first moment of the deletion, and it does not try again and again."""
    await cluster.apply_job()
    await cluster.gang_exists()
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["test.ddpjob.io/x"]}}
    path = f"/api/v1/namespaces/{cluster.namespace}"
    await cluster.client.create(f"{path}/configmaps", "configmaps", held)
    # the job stays for a moment without its pods, which its operator would replace anywhere else
    finalizer = {"metadata": {"finalizers": ["test.ddpjob.io/x"]}}
    await cluster.client.merge_patch(f"{paths.jobs(cluster.namespace)}/digits", "ddpjobs", finalizer)
    await cluster.client.delete(path, "namespaces")

    async def empty() -> bool:
        return not await cluster.pods()

    await eventually_async(empty, "the pods are gone")
    none = {"metadata": {"finalizers": None}}
    await cluster.client.merge_patch(f"{paths.jobs(cluster.namespace)}/digits", "ddpjobs", none)
    await cluster.client.merge_patch(f"{path}/configmaps/held", "configmaps", none)

    async def gone() -> bool:
        try:
            await cluster.client.get(path, "namespaces")
        except ApiError as error:
            return error.not_found
        return False

    await eventually_async(gone, "the namespace is gone")
    refused = [asked for asked in await cluster.cost() if asked.verb == "create" and asked.code == 403]
    assert len(refused) <= 6, refused  # two pods, as often as it looks while the namespace loses its objects


@pytest.mark.fault(21)
async def test_a_webhook_that_does_not_answer_is_a_condition_and_no_failure_of_training(
    cluster: Cluster, operator: Operator
) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}"
    labels = {"metadata": {"labels": {"test.ddpjob.io/namespace": cluster.namespace}}}
    await cluster.client.merge_patch(path, "namespaces", labels)
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    webhook = {
        "name": "silent.ddpjob.io",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "timeoutSeconds": 1,
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchLabels": labels["metadata"]["labels"]},
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    await cluster.client.create(
        hooks, "webhooks", kind | {"metadata": {"name": cluster.namespace}, "webhooks": [webhook]}
    )
    try:
        await admission_fails(cluster)
        await cluster.apply_job()
        condition = await degraded(cluster, "AdmissionFailed")
        assert "silent.ddpjob.io" in condition["message"]
    finally:
        await cluster.client.delete(f"{hooks}/{cluster.namespace}", "webhooks")
    await cluster.runs(*(pod["metadata"]["name"] for pod in await cluster.gang_exists()))
    status = await cluster.phase_is("Running")
    assert (status["attempt"], status.get("restarts", 0), status.get("disruptions", 0)) == (0, 0, 0)


async def admission_fails(cluster: Cluster) -> None:
    """Wait until the API server has heard of a webhook that refuses pods."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}}
    pod["spec"] = {"schedulerName": "none", "containers": [{"name": "c", "image": "i"}]}

    async def refused() -> bool:
        try:
            await cluster.client.create(paths.pods(cluster.namespace), "pods", pod)
        except ApiError as error:
            return error.status == 500
        await cluster.reap("probe")
        return False

    await eventually_async(refused, "the webhook is in force")


async def test_a_volume_that_goes_with_the_job_before_is_waited_for(cluster: Cluster, operator: Operator) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims/digits-shared"
    await cluster.apply_job(shared={"retain": False})
    await cluster.gang_exists()
    held = ["kubernetes.io/pvc-protection", "training.ddpjob.io/test"]
    await cluster.client.merge_patch(path, "persistentvolumeclaims", {"metadata": {"finalizers": held}})
    await cluster.delete_job()

    async def is_going() -> bool:
        claim = await cluster.client.get(path, "persistentvolumeclaims")
        return "deletionTimestamp" in claim["metadata"]

    await eventually_async(is_going, "the garbage collector has come to the claim")
    again = await cluster.apply_job(shared={"retain": False})
    assert "PersistentVolumeClaim digits-shared" in (await degraded(cluster, "NameTaken"))["message"]
    await cluster.client.merge_patch(path, "persistentvolumeclaims", {"metadata": {"finalizers": None}})
    await cluster.gang_exists(owner=again)
    claim = await cluster.client.get(path, "persistentvolumeclaims")
    assert [owner["uid"] for owner in claim["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]
