"""The volume at /mnt/shared: a claim of the job's own, or one that several jobs use and that each sees its part of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpjob_operator.api.pod import Initializer
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import pvc_name

VOLUME = "shared"
DATA_SETS = "datasets"
_CONTAINERS = ("containers", "initContainers")
_DATA_SETS_PATH = f"{SHARED_PATH}/{DATA_SETS}"
_SUB_PATHS = ("subPath", "subPathExpr")
_SOURCES = ("dataSource", "dataSourceRef")


def shared_volume(job: Job) -> Manifest:
    """The user's claim or the operator's."""
    claim = job.spec.shared.claim_name or pvc_name(job.name)
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}}


def shared_mount() -> Manifest:
    """The mount of that volume in a container."""
    return {"name": VOLUME, "mountPath": SHARED_PATH}


def confined(job: Job, spec: Manifest) -> Manifest:
    """The spec of a pod of `job` in which no container, of the podTemplate either, sees more of the claim than the job
    may: with `shared.scope: Job` every mount of it is below `jobs/<job>`, and its data sets are read-only.
    """
    if job.spec.shared.scope != "Job":
        return spec
    volumes = _volumes_of(job, spec)
    return spec | {
        kind: [_confined_container(item, volumes, _folder(job)) for item in spec[kind]]
        for kind in _CONTAINERS
        if kind in spec
    }


def paths_within(job: Job, spec: Manifest) -> Iterator[tuple[str, str]]:
    """Mounts of a confined pod that lead to a path within the folder of its job, as a field and that path.

    The kubelet follows links in such a path to anywhere in the claim, and the job chooses what is in its folder: a link
    to `../another` there would be a way to the folder of another job. The folder itself has no link that a job made.
    """
    if job.spec.shared.scope != "Job":
        return
    volumes = _volumes_of(job, spec)
    for kind in _CONTAINERS:
        for container in _objects(spec.get(kind)):
            for mount in _objects(container.get("volumeMounts")):
                given = next((name for name in _SUB_PATHS if mount.get(name)), "")
                path = str(mount.get(given) or "")
                if mount.get("name") in volumes and path.startswith(f"{_folder(job)}/"):
                    yield f"{kind}[{container.get('name')}].volumeMounts[{mount.get('mountPath')}].{given}", path


def other_claims(job: Job, spec: Manifest) -> dict[str, str]:
    """Volumes of a pod that are claims which `job` is not confined in, with the names of these."""
    own = job.spec.shared.claim_name or pvc_name(job.name)
    claims = {str(item.get("name")): _claim_of(item) for item in _objects(spec.get("volumes"))}
    return {name: claim for name, claim in claims.items() if claim is not None and claim != own}


def copied_claims(spec: Manifest) -> Iterator[str]:
    """Names of the volumes of a pod that Kubernetes makes as a copy of a claim, or of a snapshot of one."""
    for volume in _objects(spec.get("volumes")):
        found: Any = volume
        for field in ("ephemeral", "volumeClaimTemplate", "spec"):
            found = found.get(field) if isinstance(found, dict) else None
        if isinstance(found, dict) and any(found.get(field) for field in _SOURCES):
            yield str(volume.get("name"))


def source_claim(item: Initializer) -> str | None:
    """The claim that `pvc://claim/path` names."""
    kind, _, rest = (item.source or "").partition("://")
    return rest.partition("/")[0] if kind == "pvc" else None


def _folder(job: Job) -> str:
    return f"jobs/{job.name}"


def _volumes_of(job: Job, spec: Manifest) -> set[Any]:
    """Names of the volumes of a pod that are the claim which the job names."""
    claim = job.spec.shared.claim_name
    return {item.get("name") for item in _objects(spec.get("volumes")) if _claim_of(item) == claim}


def _confined_container(container: Manifest, volumes: set[Any], folder: str) -> Manifest:
    """A volume of the job's own at the path of the data sets takes their place: two mounts of one path are invalid."""
    mounts: list[Manifest] = []
    given = _objects(container.get("volumeMounts"))
    is_taken = any(str(mount.get("mountPath")).rstrip("/") == _DATA_SETS_PATH for mount in given)
    for mount in given:
        mounts.append(_below(mount, folder) if mount.get("name") in volumes else mount)
        if (mount.get("name"), mount.get("mountPath")) == (VOLUME, SHARED_PATH) and not is_taken:
            mounts.append({"name": VOLUME, "mountPath": _DATA_SETS_PATH, "subPath": DATA_SETS, "readOnly": True})
    return container | {"volumeMounts": mounts} if mounts else container


def _below(mount: Manifest, folder: str) -> Manifest:
    """The mount with its path within the claim below `folder`."""
    given = next((name for name in _SUB_PATHS if mount.get(name)), None)
    return mount | ({given: f"{folder}/{mount[given]}"} if given else {"subPath": folder})


def _claim_of(volume: Manifest) -> str | None:
    source = volume.get("persistentVolumeClaim")
    return source.get("claimName") if isinstance(source, dict) else None


def _objects(value: Any) -> list[Manifest]:
    return [item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict)]
