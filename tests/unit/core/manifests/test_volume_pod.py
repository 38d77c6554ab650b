"""The pod in which `ddpjob snapshots` reads a job's volume: restricted, read-only, and no pod of the gang."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from builders import make_job

from ddpjob_operator.cluster.cache import owner_of
from ddpjob_operator.core.manifests.pod_security import pod_security_violations
from ddpjob_operator.core.manifests.snapshot_pod import LONGEST_SECONDS, build_snapshot_pod
from ddpjob_operator.core.values.job import Manifest, PodSecurity


def pod(writes: bool = False, **spec: Any) -> Manifest:
    arguments = ("verify", "/mnt/shared/checkpoints/digits")
    return build_snapshot_pod(make_job(**spec), "trainer:1", arguments, writes=writes)


@pytest.mark.parametrize("version", ["1.25", kubernetes_validate.latest_version()])
def test_it_is_a_pod_of_the_restricted_profile_that_ends_by_itself(version: str) -> None:
    made = pod()
    kubernetes_validate.validate(made, version, strict=True)
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
