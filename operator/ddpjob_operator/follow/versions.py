"""Which versions of the operator a cluster has, from their Deployments."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.follow.doctor.operator import OPERATOR_LABEL, is_operator
from ddpjob_operator.follow.table import printable
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.paths import collection

_VERSION = "app.kubernetes.io/version"


@dataclass(frozen=True, slots=True)
class OperatorVersion:
    """Of one Deployment: a cluster has several with shards, or with an operator a namespace."""

    version: str
    namespace: str
    name: str
    image: str


async def operator_versions(client: Client) -> list[OperatorVersion]:
    """Of every operator that the cluster has.

    Raises:
        ApiError: the cluster does not answer, or the caller may not list Deployments.
    """
    path = collection("apps/v1", "deployments", None)
    items, _ = await client.list(path, "deployments", labelSelector=OPERATOR_LABEL)
    return [version_of(item) for item in items if is_operator(item)]


def version_of(deployment: Json) -> OperatorVersion:
    """That of its label, which Helm writes; else the tag of its image."""
    metadata = deployment["metadata"]
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    image = str(next((item.get("image") for item in containers), None) or "")
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    version = (metadata.get("labels") or {}).get(_VERSION) or tag or "unknown"
    return OperatorVersion(printable(str(version)), metadata["namespace"], metadata["name"], printable(image))
