"""One DDPJob, and what the operator's configuration says for the jobs of its namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus

Manifest = dict[str, Any]
"""A Kubernetes object as plain JSON, ready for the wire."""

SHOWN_DIGEST = 12
"""Characters of a digest in messages and labels."""


def in_words(count: int, thing: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def few(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """The first of them, and how many more there are: a gang may have a thousand pods."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{separator.join(items[:most])}{more}"


@dataclass(frozen=True, slots=True)
class Job:
    """One DDPJob, parsed once at the edge."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    spec: DDPJobSpec
    status: DDPJobStatus
    deleting: bool = False
    rejected_edit: Problem | None = None
    """An edit that the operator does not follow."""
    owner: str = ""
    """Who answers for it, as its author says."""

    @property
    def ranks(self) -> int:
        """Ranks of the whole gang."""
        return self.spec.nodes * self.spec.ranks_per_node

    @property
    def code_digest(self) -> str | None:
        """Of the submitted code, if there is any."""
        return self.spec.code.sha256 if self.spec.code is not None else None

    @property
    def size_in_words(self) -> str:
        """Such as `2 nodes x 1 rank = 2 ranks`."""
        nodes, ranks = self.spec.nodes, self.spec.ranks_per_node
        return f"{in_words(nodes, 'node')} x {in_words(ranks, 'rank')} = {in_words(self.ranks, 'rank')}"


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods with these labels in a namespace, or a network."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    """In CIDR notation; the pods if it is empty."""


CLUSTER_DNS = Peer("kube-system", {"k8s-app": "kube-dns"})
"""CoreDNS has the label of its predecessor in every usual installation."""


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """Who may reach the pods of a job, besides each other."""

    operator_namespace: str
    """Where the operator's own pods are, which ask for progress."""
    scrapers: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespaces that metrics are scraped from; none means that no other namespace may."""
    isolated: bool = False
    """Let pods reach nothing but each other and the resolvers, and initializers nothing but those and the sources."""
    resolvers: tuple[Peer, ...] = (CLUSTER_DNS,)
    """The cluster's DNS servers."""
    sources: tuple[str, ...] = ()
    """Networks (CIDR) that initializers of isolated jobs may reach."""
    readers: tuple[str, ...] = ()
    """Networks (CIDR) that may read the status and metrics of pods."""


class PodSecurity(StrEnum):
    """A profile of the Pod Security Standards, each of which includes the one before it."""

    PRIVILEGED = "privileged"
    BASELINE = "baseline"
    RESTRICTED = "restricted"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that one job may ask for; None, or no entry, is as much as it likes."""

    max_nodes: int | None = None
    """Pods of a gang, spares included."""
    max_procs_per_node: int | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    """Of each resource, what one pod may use."""
    pod_security: PodSecurity = PodSecurity.BASELINE
    host_network: bool = False
    """Allow the node's network and its ports, which some RDMA fabrics need, whatever the profile says."""
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What pods may name of the cluster, by setting (`manifests.allow_lists`). Without a list anything goes."""
    served: bool = True
    """Whether jobs of the namespace are run at all."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator's configuration says for the jobs of one namespace: what they get where they say nothing, and
    what they may ask for at most.
    """

    trainer_image: str = "localhost/ddpjob-trainer:0.1.0-cpu"
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Requests and limits of each resource that a container of the trainer, or an initializer, does not mention."""
    bounds: Bounds = Bounds()
    network: NetworkAccess | None = None
    """Whether, and how, a job's pods are closed to the network. None leaves that to the cluster."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The API server refused a child of the job: quota, admission, a name taken by another owner."""

    reason: str
    message: str

    @property
    def final(self) -> bool:
        """Whether no creation for this job can ever succeed."""
        return self.reason == NAMESPACE_TERMINATING


ADMISSION_DENIED = "AdmissionDenied"
ADMISSION_FAILED = "AdmissionFailed"
"""A problem's reason where an admission webhook did not answer: it says nothing about the object, and soon passes."""

QUOTA_EXCEEDED = "QuotaExceeded"
"""A problem's reason where a ResourceQuota has no room. It passes when others leave, which nothing announces."""

TOO_LARGE = "TooLarge"
"""A problem's reason where an object is larger than the API server takes, or etcd stores."""

NAMESPACE_TERMINATING = "NamespaceTerminating"
"""A problem's reason where the namespace is being deleted, which cannot be taken back, or is gone."""

NAME_TAKEN = "NameTaken"
"""A problem's reason where another owner's object has the name. It passes by itself when that owner is being deleted:
a job that is applied again finds the pods of the deleted one still saving.
"""
