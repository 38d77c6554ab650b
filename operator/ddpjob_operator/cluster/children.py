"""Which of a job's Service, claim, NetworkPolicies and PodGroup are known to exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpjob_operator.core.manifests.pod_group import COSCHEDULING, VOLCANO


class Kind(NamedTuple):
    """A kind of objects that a job owns; pods are not among them."""

    api_version: str
    name: str


SERVICE = Kind("v1", "Service")
CLAIM = Kind("v1", "PersistentVolumeClaim")
POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy")
POD_GROUP = "PodGroup"
KINDS = (SERVICE, CLAIM, POLICY, Kind(COSCHEDULING, POD_GROUP), Kind(VOLCANO, POD_GROUP))


class Child(NamedTuple):
    """One object, in the namespace of its job."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name}"


@dataclass(slots=True)
class Children:
    """Those of one job, each with the resourceVersion at which it was there: an older deletion was of an earlier object
    of that name."""

    versions: dict[Child, int] = field(default_factory=dict)
    lost: set[Child] = field(default_factory=set)
    """What was there, and was found to be gone."""
    address: str = ""
    """Of the Service, also once it is gone: pods that run have it in their environment."""

    def put(self, child: Child, obj: Mapping[str, Any]) -> None:
        """Take in that it exists."""
        version = int(obj["metadata"]["resourceVersion"])
        if version >= self.versions.get(child, 0):
            self.versions[child] = version
            self.lost.discard(child)
            if child.kind == SERVICE:
                self.address = (obj.get("spec") or {}).get("clusterIP") or self.address

    def drop(self, child: Child, version: int) -> bool:
        """Take in that it was gone at `version`; whether that was news."""
        known = self.versions.get(child)
        if known is None or known > version:
            return False
        del self.versions[child]
        self.lost.add(child)
        return True

    def has(self, kind: Kind) -> bool:
        return any(child.kind == kind for child in self.versions)

    def forget(self, child: Child) -> None:
        """Take in that it was deleted on purpose."""
        self.versions.pop(child, None)
        self.lost.discard(child)

    @property
    def pod_groups(self) -> frozenset[tuple[str, str]]:
        """API version and name of each."""
        found = (child for child in self.versions if child.kind.name == POD_GROUP)
        return frozenset((child.kind.api_version, child.name) for child in found)

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """Kind and name of each."""
        return frozenset((child.kind.name, child.name) for child in self.versions)
