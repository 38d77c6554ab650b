"""What a failure's cause means, as data: what to do about it, and whom it speaks against.

Two questions hang on whom. A failure that the program brings about itself comes again at the same step, so that a
second one is the last. A failure that a node may have brought about is remembered against that node. The rest - the
network, the volume, a person - speaks against neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.failure.symptoms import recognise

ADVICE: dict[str, str] = {
    "OOMKilled": "The container used more memory than its limit: raise it, or lower the batch size.",
    "OutOfMemory": "The device ran out of memory: lower the micro-batch, use bf16, or shard the model.",
    "ImportError": "A module is missing from the image: install it there, or correct the import.",
    "UserError": "Correct the job's arguments and apply it again; it would fail the same way on a retry.",
    "Fenced": "Another job writes to the same checkpoints folder: give this job another name or another volume.",
    "DiskFull": "The volume at /mnt/shared is full: remove old files, lower snapshots.keep, or enlarge the claim.",
    "Stalled": "A rank stood still; its stack is below /mnt/shared/logs. Look for a collective that some ranks skip.",
    "WorkerKilled": "A signal ended the process. If nobody sent it, look at the memory of the pod and of its node.",
    "WorkerException": "The training script raised; its last lines are in the message, all of them in the pod's log.",
    "PeerLost": "The connection to another rank broke: look at the network, and at the other pods of this attempt.",
    "RendezvousFailed": "Not all nodes met in time: check that pods can reach each other on port 29500.",
    "StartError": "The container did not start: check that the image has python and the package ddp_trainer.",
    "PodDeleted": "Somebody or something deleted the pod; training goes on from the last snapshot.",
    "Evicted": "The node ran short of a resource: set resources.requests to what the job really uses.",
    "Preempted": "The pod was asked to stop and saved a snapshot; training goes on from it.",
    "NodeLost": "The node fell silent: look at its kubelet, its network and its power.",
    "Terminated": "The node is being shut down; training goes on elsewhere from the last snapshot.",
    "ErrImagePull": "The image cannot be pulled: check its name and tag, and imagePullSecrets.",
    "CreateContainerConfigError": "The container cannot be made: check the Secrets and ConfigMaps that env refers to.",
    "Unschedulable": "No node fits the pod: check its resources, node selector, tolerations and volume claim.",
    "DeadlineExceeded": "Apply it again with a longer activeDeadlineSeconds; it resumes from its last snapshot.",
    "StartupDeadlineExceeded": "Fix what kept it from starting, or raise startupDeadlineSeconds; then apply it again.",
}
"""One sentence a reason."""

DETERMINISTIC = frozenset(
    {
        "AccessDenied",
        "CUDAError",
        "CUDANotInImage",
        "DataCorrupted",
        "ImportError",
        "LossNotFinite",
        "OOMKilled",
        "OutOfMemory",
        "PermissionDenied",
        "ProcessGroupInit",
        "ReadOnlyFileSystem",
        "SharedMemoryFull",
        "Stalled",
        "TooFewGPUs",
        "TooManyOpenFiles",
        "TooManyThreads",
        "TrainerMissing",
        "UnsafeFile",
        "UnusedParameters",
        "UserError",
        "WorkerException",
    }
)
"""Reasons that the program, its data or its settings bring about: from the same state it gets there again."""

NODE_SUSPECT = frozenset(
    {
        "CUDAError",
        "ContainerCannotRun",
        "DriverMismatch",
        "Evicted",
        "Failed",
        "GPUFault",
        "GPUMissing",
        "NCCLError",
        "NodeLost",
        "PodFailed",
        "Stalled",
        "StartError",
        "UnexpectedAdmissionError",
        "WorkerKilled",
    }
)
"""Reasons that may be the node's doing. Failed and PodFailed are included: their cause is unknown."""

FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
"""Signals that a program does not bring upon itself. The others are crashes of its own."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a failure by its reason and its message."""

    reason: str
    advice: str
    deterministic: bool
    node_suspect: bool


def advice_for(reason: str) -> str:
    """One sentence of what to do about `reason`; empty if there is nothing useful to say."""
    return ADVICE.get(reason, "")


def diagnose(failure: Failure) -> Diagnosis:
    """What `failure` means."""
    exception = failure.report.exception if failure.report else ""
    symptom = recognise(failure.reason, f"{failure.message}\n{exception}" if exception else failure.message)
    reason = (symptom.reason if symptom else "") or failure.reason
    moved = reason != "Stalled" or bool(failure.step)  # before the first step, what is slow may be the surroundings
    crashed = reason == "WorkerKilled" and failure.signal is not None and failure.signal not in FROM_OUTSIDE
    return Diagnosis(
        reason,
        (symptom.advice if symptom else "") or advice_for(reason),
        deterministic=(crashed or reason in DETERMINISTIC) and moved and not (symptom and symptom.changes),
        node_suspect=reason in NODE_SUSPECT,
    )
