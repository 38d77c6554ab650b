"""The values that decisions end in: a `Plan` of actions, which the edge carries out (`cluster/apply.py`,
`local/children.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.job import Manifest


@dataclass(frozen=True, slots=True)
class CreatePVC:
    """Create the PersistentVolumeClaim unless it exists."""

    manifest: Manifest
    only_own: bool = False
    """Whether one that exists counts only if it was made for a job of this name."""


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create the rendezvous Service; its address comes back in `Observed.service`."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class PointService:
    """Make the Service select node rank 0 of `attempt`."""

    name: str
    attempt: int
    selector: dict[str, str]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create one node of the gang, or (node rank None) a pod that waits.

    AlreadyExists with our uid and attempt is success.
    """

    name: str
    attempt: int
    node_rank: int | None
    manifest: Manifest
    whole: bool = False
    """Whether a bound counts on the resources of the pod as a whole, so that the API server has to keep them."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod (uid precondition). NotFound is success."""

    name: str
    uid: str
    grace_seconds: int | None
    """How long its trainer may take to end. None: as long as the pod itself says, enough for a snapshot."""
    unless_changed: bool = False
    """Only as it was last seen: a pod that has ended since is kept for its log."""
    release: bool = True
    """Whether to release it, too. False: how it ends is still to be put on record."""


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Remove the finalizer of exactly this pod: its end is on record, or of no interest. NotFound is success."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class AssignPod:
    """Give a kept pod its attempt, node rank and gang size, by a patch of its labels."""

    name: str
    uid: str
    attempt: int
    node_rank: int
    nodes: int


@dataclass(frozen=True, slots=True)
class SyncPod:
    """Have the kubelet show a kept pod its labels again, by a patch of another label."""

    name: str
    uid: str
    sync: str


@dataclass(frozen=True, slots=True)
class CreateChild:
    """Create an object of another kind unless it exists: a NetworkPolicy, a PodGroup, the initializers' pod."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class DeletePodGroup:
    """Delete a PodGroup, whose name is that of this job and attempt alone. NotFound is success."""

    api_version: str
    name: str


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read the tail of a pod's log into `Observed.logs`; what cannot be read is read as empty."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ReadWarnings:
    """Look into a pod's events for what its status does not say, into `Observed.warnings`."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the DDPJob itself, its children with it."""

    uid: str


Action = (
    CreatePVC
    | CreateService
    | PointService
    | CreatePod
    | DeletePod
    | ReleasePod
    | AssignPod
    | SyncPod
    | CreateChild
    | DeletePodGroup
    | ReadLog
    | ReadWarnings
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class Event:
    """One Kubernetes Event about the job; `type` is Normal or Warning."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    The edge writes `status` first, guarded by the job's resourceVersion, whenever `status_first` is set (a new
    attempt must be on record before any of its pods exists), and otherwise after the actions. An unchanged status is
    never written. With `confirm_first` the status may be older than the one on the API server: the edge reads the job
    before anything else, and decides anew if what it had was old. `actions` of one plan are independent of each other
    and may run at once. Look at the job again after `requeue_after` seconds, or on the next event.
    """

    status: DDPJobStatus
    actions: tuple[Action, ...] = ()
    status_first: bool = False
    confirm_first: bool = False
    requeue_after: float | None = None
    events: tuple[Event, ...] = field(default=())


def creates(action: Action) -> bool:
    """Whether it asks for an object that is not there."""
    return isinstance(action, CreatePVC | CreateService | CreatePod | CreateChild)


def depends_on_status(action: Action) -> bool:
    """Whether an action on an old status does harm. To read, or to create what exists already, does none."""
    match action:
        case CreatePVC() | CreateService() | ReadLog() | ReadWarnings():
            return False
        case CreateChild(manifest):
            return bool(manifest["kind"] == "Pod")
        case _:
            return True


def soonest(*waits: float | None) -> float | None:
    """The shortest of some waits in seconds; None is no wait at all."""
    return min((wait for wait in waits if wait is not None), default=None)
