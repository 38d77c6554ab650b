"""The values that decisions are made from: a job, and what was seen of its children.

Nothing here knows Kubernetes' client, a clock or a file. `Observed` is filled in at the edge (`cluster/` from the API
server's watch, `local/` from this machine's processes), and `plan()` turns it into a `Plan` (`core/values/actions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.trainer_report import TrainerReport

NO_ATTEMPT = -1
"""The attempt of a pod whose labels name none."""


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
class InitFailure:
    """An init container that failed, of `podTemplate` or an injected one: the trainer is not started."""

    container: str
    exit_code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PodView:
    """What matters of a pod that the job controls. `attempt` and `node_rank` are what its labels say."""

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
    """Size of the gang by the pod's labels."""
    group: str = ""
    """The group in which its gang is admitted."""
    reserved: bool = False
    """Whether Kueue holds it to what its group was admitted with: a node of a topology, or a ProvisioningRequest."""
    let_go: bool = False
    """Whether Kueue still holds it back, and watches it no more: its group is finished."""
    sync: str = ""
    """Value of the label that `SyncPod` changes."""
    scheduled: bool = False
    """Whether it has been given a node (condition PodScheduled)."""
    not_ready_since: datetime | None = None
    """When a pod that runs was marked not ready, which only the node lifecycle controller does: its node is silent."""
    unacknowledged_since: datetime | None = None
    """When a pod that waits was bound to a node whose kubelet has not said a word about it since, by the clock that
    `plan` goes by.
    """
    created: datetime | None = None
    disruption: str = ""
    """Reason of the condition DisruptionTarget, or of one of Kueue's, on servers that have it."""
    disruption_message: str = ""
    deleting: bool = False
    held: bool = False
    """Whether the operator's finalizer keeps it visible until its end is on record."""
    gone_by: datetime | None = None
    """When the grace of a pod that is being deleted ends: `deletionTimestamp`, by the clock that `plan` goes by."""
    forced: bool = False
    """Whether it is being deleted without any grace: nothing but finalizers keeps it."""
    node_name: str | None = None
    pod_ip: str | None = None
    reason: str = ""
    """`status.reason` of the pod, such as Evicted, or of its last unmet condition or waiting container, such as
    ErrImagePull.
    """
    message: str = ""
    termination: Termination | None = None
    """How its trainer ended. A sidecar may go on."""
    end_seen: datetime | None = None
    """When that was first seen, by the clock that `plan` goes by; None where the trainer had ended before."""
    init_failure: InitFailure | None = None
    init_running: str = ""
    """The init container, or native sidecar that is not ready yet, which the trainer waits for while it runs."""
    began: bool = True
    """Whether a container of it was ever started, or made, but for init containers that are done."""
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
    def failed_to_begin(self) -> bool:
        """Whether it was over before a container of it was made, and the kubelet gives no reason. With one it may have
        run: the status of a pod that a kubelet evicts (until 1.21), or does not admit again after it was restarted, has
        no containers.
        """
        return self.phase is PodPhase.FAILED and not self.began and not self.reason

    @property
    def running(self) -> bool:
        """Whether its trainer runs."""
        return self.phase is PodPhase.RUNNING and not self.ended and self.termination is None

    def seen_after(self, earlier: PodView) -> PodView:
        """This later view of a pod. Its first final phase counts, and the first end of its trainer: a kubelet that has
        lost its records may report another one, or none.
        """
        if not earlier.phase.final or self.phase is earlier.phase:
            ended_before = earlier.termination is not None and self.termination != earlier.termination
            return replace(self, termination=earlier.termination) if ended_before else self
        return replace(
            self,
            phase=earlier.phase,
            exited=earlier.exited,
            termination=earlier.termination,
            disruption=earlier.disruption,
            disruption_message=earlier.disruption_message,
            reason=earlier.reason,
            message=earlier.message,
        )


@dataclass(frozen=True, slots=True)
class ServiceView:
    """The rendezvous Service: where node rank 0 is reached, and which attempt it selects."""

    host: str
    attempt: int
    port: int = 29500


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
    unacknowledged_since: datetime | None = None
    disruption: str = ""
    """Reason of the condition DisruptionTarget, as of a `PodView`."""
    disruption_message: str = ""
    deleting: bool = False
    gone_by: datetime | None = None
    forced: bool = False
    """Whether it is being deleted without any grace, as of a `PodView`."""
    reason: str = ""
    message: str = ""
    termination: Termination | None = None
    """How the first initializer that failed ended, or else the last one that has."""
    done: bool = False
    """Whether the last initializer has exited. A sidecar may go on."""
    exited: bool = False
    """Whether every main container has exited (see `PodView.exited`)."""

    @property
    def ended(self) -> bool:
        """Whether no container of it runs any more, or ever will."""
        return self.exited or self.phase.final

    @property
    def over(self) -> bool:
        """Whether no initializer of it runs any more, or ever will."""
        return self.done or self.ended

    @property
    def succeeded(self) -> bool:
        """Whether all initializers are done. A sidecar that goes on, or that failed, does not change that."""
        if self.done and self.termination is not None:
            return self.termination.exit_code == 0
        return self.phase is PodPhase.SUCCEEDED

    def as_pod(self, attempt: int) -> PodView:
        """What any pod has of this one, for decisions that are the same for all. How it ended is left out: of its
        containers those that are done say nothing.
        """
        return PodView(
            name=self.name,
            uid=self.uid,
            attempt=attempt,
            node_rank=None,
            phase=self.phase,
            scheduled=self.scheduled,
            node_name=self.node_name,
            not_ready_since=self.not_ready_since,
            unacknowledged_since=self.unacknowledged_since,
            deleting=self.deleting,
            gone_by=self.gone_by,
            forced=self.forced,
            reason=self.reason,
            message=self.message,
            exited=self.exited,
        )


@dataclass(frozen=True, slots=True)
class PodWarning:
    """What Kubernetes' events say of a pod: the last warning, if there was one, and when they were looked at."""

    at: datetime
    reason: str = ""
    message: str = ""
    refuses_names: bool = False
    """Whether an autoscaler adds no node for the pod, since its affinity names nodes to keep away from."""


@dataclass(frozen=True, slots=True)
class Creations:
    """How often a pod of one name was created, and when it was last."""

    count: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known of one job's children at one moment.

    `pvc_exists` is True once the claim is known to be there. `report` is the last answer of node rank 0, or
    of the pod that is asked in its place.
    """

    pods: tuple[PodView, ...] = ()
    service: ServiceView | None = None
    """As the last answer has it; None also where there is one that this process has not asked for yet."""
    service_exists: bool = False
    address: str = ""
    """What the Service has or had, as far as that is known: pods that run have it in their environment."""
    pvc_exists: bool = False
    report: TrainerReport | None = None
    silent_seconds: float = 0.0
    """For how long node rank 0 has left all questions unanswered; 0 while it answers."""
    problem: Problem | None = None
    children: frozenset[tuple[str, str]] = frozenset()
    """Kind and name of every child but pods that is known to exist."""
    pod_groups: frozenset[tuple[str, str]] = frozenset()
    """API version and name of each PodGroup among them."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Tails of logs that were read, by the uid of the pod; an empty one could not be read."""
    warnings: Mapping[str, PodWarning] = field(default_factory=dict)
    """What was found in the events of pods that wait without saying why, by their uid."""
    initializer: InitializerView | None = None
    """The pod that runs the initializers."""
    creations: Mapping[str, Creations] = field(default_factory=dict)
    """By name, of the pods that this process has created for the current attempt."""
    status_confirmed: bool = True
    """Whether this process has read or written the job since it began to lead. What a list or a watch has of it may be
    older than the last leader's last write.
    """
