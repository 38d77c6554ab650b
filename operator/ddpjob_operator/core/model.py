"""The values that decisions are made from: a job, and what was seen of its children.

Nothing here knows Kubernetes' client, a clock or a file. `Observed` is filled in at the edge (`cluster/` from the API
server's watch, `local/` from this machine's processes), and `plan()` turns it into a `Plan` (`core/actions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.report import TrainerReport

Manifest = dict[str, Any]
"""A Kubernetes object as plain JSON, ready for the wire."""


def _of(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


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
    refused: Problem | None = None
    """An edit that the operator does not follow."""

    @property
    def ranks(self) -> int:
        """Ranks of the whole gang."""
        return self.spec.nodes * self.spec.ranks_per_node

    @property
    def size_in_words(self) -> str:
        """Such as `2 nodes x 1 rank = 2 ranks`."""
        nodes, ranks = self.spec.nodes, self.spec.ranks_per_node
        return f"{_of(nodes, 'node')} x {_of(ranks, 'rank')} = {_of(self.ranks, 'rank')}"


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """Who may reach the pods of a job, besides each other."""

    operator_namespace: str
    """Where the operator's own pods are, which ask for progress."""
    scrapers: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespaces that metrics are scraped from; none means that nobody else may."""
    isolated: bool = False
    """Let pods reach nothing but each other and DNS."""


class HostAccess(StrEnum):
    """What a pod may have of its node besides the place to run."""

    NONE = "None"
    NETWORK = "Network"
    """The node's network, which some RDMA fabrics need."""
    ALL = "All"
    """Its files and processes too."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that one job may ask for; None, or no entry, is as much as it likes."""

    max_nodes: int | None = None
    """Pods of a gang, spares included."""
    max_procs_per_node: int | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    """Of each resource, what one pod may use."""
    host_access: HostAccess = HostAccess.NETWORK


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator's configuration says for the jobs of one namespace: what they get where they say nothing, and
    what they may ask for at most.
    """

    trainer_image: str = "localhost/ddpjob-trainer:0.1.0-cpu"
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Requests and limits of a trainer container that mentions neither."""
    bounds: Bounds = Bounds()
    network: NetworkAccess | None = None
    """Whether, and how, a job's pods are closed to the network. None leaves that to the cluster."""


class PodPhase(StrEnum):
    """`status.phase` of a pod (Kubernetes API, PodPhase)."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def final(self) -> bool:
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True, slots=True)
class Termination:
    """How the trainer container ended: its exit code and the text of its termination message."""

    exit_code: int
    signal: int | None = None
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """What matters of a pod that carries the job's uid label."""

    name: str
    uid: str
    attempt: int
    node_rank: int | None
    """None for a spare: a pod that waits for a node rank."""
    phase: PodPhase
    ready: bool = False
    ready_since: datetime | None = None
    """When it became ready, while it is."""
    nodes: int | None = None
    """Size of the gang that the pod was last told of."""
    scheduled: bool = False
    """Whether it has been given a node (condition PodScheduled)."""
    not_ready_since: datetime | None = None
    """When a pod that runs was marked not ready, which only the node lifecycle controller does: its node is silent."""
    disruption: str = ""
    """Reason of the condition DisruptionTarget, on servers that have it."""
    deleting: bool = False
    gone_by: datetime | None = None
    """`deletionTimestamp`: when the grace of a pod that is being deleted ends."""
    node_name: str | None = None
    pod_ip: str | None = None
    reason: str = ""
    """`status.reason` of the pod, such as Evicted, or of its last unmet condition or waiting container, such as
    ErrImagePull.
    """
    message: str = ""
    termination: Termination | None = None
    """How its trainer ended. A sidecar may go on."""
    exited: bool = False
    """Whether every container has exited. Since Kubernetes 1.27 a kubelet reports that while the phase is still
    Running; the phase follows a moment later.
    """

    @property
    def placed(self) -> bool:
        """Whether it has a node, or had one."""
        return self.scheduled or self.phase is not PodPhase.PENDING

    @property
    def ended(self) -> bool:
        """Whether no container of it runs any more, or ever will."""
        return self.exited or self.phase.final

    @property
    def running(self) -> bool:
        """Whether its trainer runs."""
        return self.phase is PodPhase.RUNNING and not self.ended and self.termination is None


@dataclass(frozen=True, slots=True)
class ServiceView:
    """The rendezvous Service: where node rank 0 is reached, and which attempt it selects."""

    host: str
    attempt: int
    port: int = 29500


@dataclass(frozen=True, slots=True)
class Problem:
    """The API server refused a child of the job: quota, admission, a name taken by another owner."""

    reason: str
    message: str


NAME_TAKEN = "NameTaken"
"""A problem's reason where another owner's object has the name. It passes by itself when that owner is being deleted:
a job that is applied again finds the pods of its former life still saving.
"""


@dataclass(frozen=True, slots=True)
class InitializerView:
    """The pod that fetches data sets before the gang starts."""

    name: str
    uid: str
    phase: PodPhase
    number: int = 0
    """How often it was tried before."""
    step: str = ""
    """The initializer that failed, or the last one that ended."""
    scheduled: bool = False
    node_name: str | None = None
    not_ready_since: datetime | None = None
    deleting: bool = False
    gone_by: datetime | None = None
    reason: str = ""
    message: str = ""
    termination: Termination | None = None
    """How the first initializer that failed ended, or else the last one that has."""
    exited: bool = False
    """Whether its main container, which is the last initializer, has exited (see `PodView.exited`)."""

    @property
    def ended(self) -> bool:
        return self.exited or self.phase.final

    @property
    def succeeded(self) -> bool:
        """Whether all initializers are done."""
        done = self.exited and self.termination is not None and self.termination.exit_code == 0
        return done or self.phase is PodPhase.SUCCEEDED


@dataclass(frozen=True, slots=True)
class Warned:
    """What Kubernetes' events say of a pod: the last warning, if there was one, and when they were looked at."""

    at: datetime
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known of one job's children at one moment.

    `claim_exists` is True once the claim is known to be there. `report` is the last answer of node rank 0.
    """

    pods: tuple[PodView, ...] = ()
    service: ServiceView | None = None
    claim_exists: bool = False
    report: TrainerReport | None = None
    problem: Problem | None = None
    children: frozenset[tuple[str, str]] = frozenset()
    """Kind and name of every other child that is known to exist: NetworkPolicy, PodGroup."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Tails of logs that were read, by the uid of the pod; an empty one could not be read."""
    warnings: Mapping[str, Warned] = field(default_factory=dict)
    """What was found in the events of pods that wait without saying why, by their uid."""
    initializer: InitializerView | None = None
    """The pod that runs the initializers."""
