"""The pod in which `ddpjob snapshots` and `ddpjob logs` read a job's volume: restricted, and no pod of the gang."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_job
from tests.support import kubernetes_schemas

from ddpjob_operator.cluster.owners import owner_of
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_security import pod_security_violations
from ddpjob_operator.core.manifests.pods import build_pvc
from ddpjob_operator.core.manifests.volume_pod import (
    LONGEST_SECONDS,
    VolumeCommand,
    build_claim_pod,
    build_volume_pod,
)
from ddpjob_operator.core.values.job import Defaults, Manifest, PodSecurity


def pod(writes: bool = False, loads: bool = False, **spec: Any) -> Manifest:
    arguments = ("verify", "/mnt/shared/checkpoints/digits")
    command = VolumeCommand("snapshots", "ddp_trainer.snapshots", arguments, writes=writes, loads=loads)
    return build_volume_pod(make_job(**spec), "trainer:1", command)


def of_a_claim(**annotations: str) -> Manifest:
    """Whose job is gone."""
    noted = {f"training.ddpjob.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    claim = {"metadata": {"name": "digits-shared", "namespace": "ml", "uid": "c", "annotations": noted}}
    return build_claim_pod(
        claim, "trainer:1", VolumeCommand("logs", "ddp_trainer.logs.pods", ("/mnt/shared", "digits"))
    )


@pytest.mark.parametrize("version", ["1.25", kubernetes_schemas.latest_version()])
@pytest.mark.parametrize("made", [pod(), of_a_claim()], ids=["job", "claim"])
def test_it_is_a_pod_of_the_restricted_profile_that_ends_by_itself(made: Manifest, version: str) -> None:
    kubernetes_schemas.validate(made, version, strict=True)
    assert list(pod_security_violations(made, PodSecurity.RESTRICTED)) == []
    assert made["spec"]["activeDeadlineSeconds"] == LONGEST_SECONDS
    assert made["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("writes", [False, True])
def test_the_volume_is_read_only_unless_something_is_removed(writes: bool) -> None:
    container = pod(writes, shared={"claimName": "mine"})["spec"]["containers"][0]
    mount = next(item for item in container["volumeMounts"] if item["name"] == "shared")
    assert mount == {"name": "shared", "mountPath": "/mnt/shared", "readOnly": not writes}


def test_the_operator_does_not_take_it_for_a_pod_of_the_gang_and_it_goes_with_the_job() -> None:
    made = pod()
    assert owner_of(made) is None
    assert set(made["metadata"]["labels"]) == {"training.ddpjob.io/role"}
    assert [owner["name"] for owner in made["metadata"]["ownerReferences"]] == ["digits"]


def test_webhooks_and_policies_see_what_the_pod_template_says_to_them_and_no_queue_does() -> None:
    """Such as to keep a proxy out, to mount a bucket, or whose cost it is. Without them it may not be taken at all."""
    labels = {"sidecar.istio.io/inject": "false", "team": "a", "kueue.x-k8s.io/queue-name": "gpus"}
    annotations = {"linkerd.io/inject": "disabled", "gke-gcsfuse/volumes": "true"}
    made = pod(podTemplate={"metadata": {"labels": labels, "annotations": annotations}})
    mine = {"training.ddpjob.io/role": "snapshots", "sidecar.istio.io/inject": "false", "team": "a"}
    assert made["metadata"]["labels"] == mine
    assert made["metadata"]["annotations"] == annotations
    assert owner_of(made) is None


def test_it_joins_none_of_the_networks_of_the_ranks() -> None:
    """Of the devices of one it has none, and those of another are in use by the pods that train."""
    networks = {"k8s.v1.cni.cncf.io/networks": "ib", "networking.gke.io/interfaces": "[]"}
    made = pod(podTemplate={"metadata": {"annotations": networks | {"gke-gcsfuse/volumes": "true"}}})
    assert made["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert "annotations" not in pod(podTemplate={"metadata": {"annotations": networks}})["metadata"]


def test_it_is_no_member_of_a_gang_of_yunikorn() -> None:
    """YuniKorn would reserve the nodes of the whole gang for it, and bind it once it has them."""
    gang = {"yunikorn.apache.org/task-groups": "[]", "yunikorn.apache.org/task-group-name": "nodes"}
    labels = {"applicationId": "digits", "queue": "root.ml"}
    made = pod(podTemplate={"metadata": {"labels": labels, "annotations": gang | {"team": "a"}}})["metadata"]
    assert made["labels"] == {"training.ddpjob.io/role": "snapshots", "queue": "root.ml"}
    assert made["annotations"] == {"team": "a"}
    without_a_gang = pod(podTemplate={"metadata": {"labels": labels}})["metadata"]["labels"]
    assert without_a_gang["applicationId"] == "digits", "a policy may ask for it"


def test_it_is_placed_as_the_gang_may_be_and_takes_no_gpu() -> None:
    template = {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"fsGroup": 1000},
        "schedulerName": "volcano",
        "priorityClassName": "high",
    }
    made = pod(podTemplate={"spec": template}, resources={"limits": {"nvidia.com/gpu": 8}})["spec"]
    assert made["nodeSelector"] == {"pool": "gpu"}
    assert made["tolerations"] == [{"operator": "Exists"}]
    assert made["imagePullSecrets"] == [{"name": "registry"}]
    assert made["securityContext"]["fsGroup"] == 1000
    assert made["securityContext"]["runAsNonRoot"] is True
    assert "schedulerName" not in made
    assert "priorityClassName" not in made
    assert "nvidia.com/gpu" not in made["containers"][0]["resources"]["limits"]


def test_of_a_job_that_is_gone_it_has_the_claim_alone_and_goes_with_it() -> None:
    made = of_a_claim()
    volume = made["spec"]["volumes"][0]
    assert volume == {"name": "shared", "persistentVolumeClaim": {"claimName": "digits-shared"}}
    assert made["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is True
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("PersistentVolumeClaim", "c", False)
    assert made["metadata"]["labels"] == {"training.ddpjob.io/role": "logs"}


@pytest.mark.parametrize(
    ("loads", "given", "memory"),
    [
        (False, {"memory": "64Gi"}, "1Gi"),
        (True, {"memory": "64Gi"}, "64Gi"),
        (True, {"memory": "256Mi"}, "1Gi"),
        (True, {"cpu": "2"}, None),
    ],
)
def test_a_pod_that_loads_a_snapshot_may_use_the_memory_of_one_that_trains(
    loads: bool, given: dict[str, str], memory: str | None
) -> None:
    resources = pod(loads=loads, resources={"limits": given})["spec"]["containers"][0]["resources"]
    assert resources["limits"].get("memory") == memory
    assert resources["requests"]["memory"] == "256Mi"


NO_USER = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}


@pytest.mark.parametrize(
    ("context", "user"),
    [
        (NO_USER, (None, None, None)),
        (None, (None, None, None)),
        ({"runAsUser": 1000, "fsGroup": 2000}, (1000, 65532, 2000)),
        ({"sysctls": []}, (65532, 65532, 65532)),
    ],
    ids=["the namespace's range", "no context", "own", "nothing of users"],
)
def test_the_volume_of_a_job_that_is_gone_is_read_as_its_pods_wrote_it(
    context: dict[str, Any] | None, user: tuple[int | None, ...]
) -> None:
    job = make_job(podTemplate={"spec": {"securityContext": context}})
    claim = build_pvc(Admitted(job, Defaults()))
    assert claim is not None
    claim["metadata"]["uid"] = "c"
    made = build_claim_pod(claim, "trainer:1", VolumeCommand("logs", "ddp_trainer.logs.pods", ()))
    found = made["spec"]["securityContext"]
    assert tuple(found.get(name) for name in NO_USER) == user
    assert found["runAsNonRoot"] is True
    assert list(pod_security_violations(made, PodSecurity.RESTRICTED)) == []


@pytest.mark.parametrize("noted", ["{", "[]", "7", '{"runAsUser": 0}', '{"runAsUser": true}', '{"privileged": true}'])
def test_a_claim_makes_nobody_root(noted: str) -> None:
    assert of_a_claim(run_as=noted) == of_a_claim()


def test_what_a_webhook_injects_has_the_account_of_the_job() -> None:
    """It is injected by the podTemplate's annotations; Vault's injector refuses a pod without a token."""
    account = {"automountServiceAccountToken": True, "serviceAccountName": "trainer"}
    assert pod(podTemplate={"spec": account})["spec"].items() >= account.items()
    assert pod()["spec"]["automountServiceAccountToken"] is False


def test_it_has_no_annotation_for_a_container_that_it_has_not() -> None:
    of_container = "container.apparmor.security.beta.kubernetes.io/"
    given = {f"{of_container}trainer": "unconfined", "a": "b"}
    assert pod(podTemplate={"metadata": {"annotations": given}})["metadata"]["annotations"] == {"a": "b"}
