"""What pods see of a claim that several jobs use."""

from __future__ import annotations

from typing import Any

import pytest
from builders import DEFAULTS, make_job

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.manifests.volume_pod import VolumeCommand, build_volume_pod
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.observed import ServiceView

TEAM = {"claimName": "team", "scope": "Job"}
OWN = ("/mnt/shared", "jobs/digits", False)
DATA_SETS = ("/mnt/shared/datasets", "datasets", True)


def job(**spec: Any) -> Job:
    return make_job(shared=TEAM, **spec)


def gang_pod(job: Job) -> Manifest:
    return build_pod(Admitted(job, DEFAULTS), Place(0, 0, ServiceView("10.0.0.1", 0)))["spec"]


def mounts(container: Manifest, volume: str = "shared") -> list[tuple[str, str | None, bool]]:
    found = [mount for mount in container["volumeMounts"] if mount["name"] == volume]
    return [(mount["mountPath"], mount.get("subPath"), mount.get("readOnly", False)) for mount in found]


def test_a_job_sees_its_own_folder_and_the_data_sets_without_a_right_to_change_them() -> None:
    assert job().name == "digits"
    (trainer,) = gang_pod(job())["containers"]
    assert mounts(trainer) == [OWN, DATA_SETS]
    pod = build_initializer(
        Admitted(job(initializers=[{"name": n, "path": n, "script": "true"} for n in ("a", "b")]), DEFAULTS), 0
    )
    for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
        assert mounts(container) == [OWN, DATA_SETS]
    (looks,) = build_volume_pod(job(), "image", VolumeCommand("logs", "module", ()))["spec"]["containers"]
    assert mounts(looks) == [("/mnt/shared", "jobs/digits", True), DATA_SETS]


def test_without_the_scope_it_sees_all_of_the_claim() -> None:
    for shared in ({}, {"claimName": "team"}, {"claimName": "team", "scope": "Claim"}):
        (trainer,) = gang_pod(make_job(shared=shared))["containers"]
        assert mounts(trainer) == [("/mnt/shared", None, False)]


def test_no_mount_of_the_pod_template_leads_out_of_the_folder() -> None:
    """Neither one of our volume in a sidecar, nor one of the same claim by another name."""
    template = {
        "volumes": [{"name": "all", "persistentVolumeClaim": {"claimName": "team"}}, {"name": "own", "emptyDir": {}}],
        "initContainers": [{"name": "first", "volumeMounts": [{"name": "all", "mountPath": "/all"}]}],
        "containers": [
            {
                "name": "sidecar",
                "volumeMounts": [
                    {"name": "shared", "mountPath": "/logs", "subPath": "logs"},
                    {"name": "all", "mountPath": "/by-pod", "subPathExpr": "$(POD)"},
                    {"name": "own", "mountPath": "/own"},
                ],
            }
        ],
    }
    spec = gang_pod(job(podTemplate={"spec": template}))
    (first,), sidecar = spec["initContainers"], next(item for item in spec["containers"] if item["name"] == "sidecar")
    assert first["volumeMounts"] == [{"name": "all", "mountPath": "/all", "subPath": "jobs/digits"}]
    assert sidecar["volumeMounts"] == [
        {"name": "shared", "mountPath": "/logs", "subPath": "jobs/digits/logs"},
        {"name": "all", "mountPath": "/by-pod", "subPathExpr": "jobs/digits/$(POD)"},
        {"name": "own", "mountPath": "/own"},
    ]


@pytest.mark.parametrize("path", ["/mnt/shared/datasets", "/mnt/shared/datasets/"])
@pytest.mark.parametrize("volume", ["own", "shared"])
def test_a_volume_at_the_path_of_the_data_sets_takes_their_place(volume: str, path: str) -> None:
    """The API server refuses a container with two mounts of one path. Of the claim it is below the job's folder."""
    mount = {"name": volume, "mountPath": path, "readOnly": True}
    template = {
        "volumes": [{"name": "own", "emptyDir": {}}],
        "containers": [{"name": "trainer", "volumeMounts": [mount]}],
    }
    (trainer,) = gang_pod(job(podTemplate={"spec": template}))["containers"]
    at_data_sets = [item for item in trainer["volumeMounts"] if item["mountPath"].rstrip("/") == "/mnt/shared/datasets"]
    assert at_data_sets == [mount | ({"subPath": "jobs/digits"} if volume == "shared" else {})]
    assert OWN in mounts(trainer)
