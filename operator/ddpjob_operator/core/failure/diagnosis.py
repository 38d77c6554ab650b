"""The diagnosis of a failure by its reason: advice, whether it is deterministic, and whether the node is suspect.

A deterministic failure repeats at the same step, so the second one fails the job. A failure that the node may have
caused counts towards restart.excludeNodeAfter. Failures of the network or the volume, and deletions, are neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.failure.raised import advice_on_exception
from ddpjob_operator.core.failure.symptoms import recognise

ADVICE: dict[str, str] = {
    "OOMKilled": "The container exceeded its memory limit: raise resources.limits.memory, or reduce the batch size.",
    "OutOfMemory": "The device ran out of memory: reduce the micro-batch, use bf16, or shard the model.",
    "ImportError": "A module is missing from the image: add it with --requirements (spec.code.requirements) or to an "
    "image of your own, or correct the import.",
    "UserError": "Correct the arguments or the script and apply the job again. A retry would fail in the same way.",
    "Fenced": "Another job uses the same checkpoint directory: use another job name or another volume.",
    "StatusRestored": "The next attempt begins after the one on the volume, and resumes from the last snapshot.",
    "DiskFull": "The volume at /mnt/shared is full: delete files, lower snapshots.keep, or expand the claim.",
    "LossNotFinite": "The loss is NaN or infinite: lower the learning rate, clip gradients, prefer bf16 to fp16, check "
    "the data. Apply the job again to go on from its last snapshot with a finite loss.",
    "Stalled": "A rank made no progress. Stacks are in /mnt/shared/logs. Look for a collective that some ranks skip.",
    "WorkerKilled": "A signal terminated the process. If no one sent it, check the memory of the pod and of its node.",
    "WorkerException": "The training program failed. The message has its last lines, the pod's log has all of them.",
    "PeerLost": "The connection to another rank was lost: check the network and the other pods of this attempt.",
    "RendezvousFailed": "Not all ranks joined in time: check that pods can reach each other on port 29500.",
    "LiveRecoveryFailed": "The next attempt starts in place from the last snapshot. If it recurs, use scope InPlace.",
    "StartError": "The container did not start: check that the image contains python and the package ddp_trainer.",
    "InitContainerFailed": "The trainer was not started: read the log of that container. One that podTemplate does not "
    "have was injected by a webhook, such as a service mesh's: ask its administrator.",
    "PodDeleted": "The pod was deleted. Training resumes from the last snapshot.",
    "Evicted": "The node ran out of a resource: set resources.requests to the actual usage of the job.",
    "StorageLimitExceeded": "The pod wrote too much to its node's disk: write to /mnt/shared, or raise "
    "resources.limits.ephemeral-storage or the sizeLimit of the volume.",
    "Preempted": "The pod was preempted, or asked to stop. Training resumes from the last snapshot.",
    "Left": "The pod was stopped. The other ranks train on, and another pod takes its place.",
    "Drained": "The node is drained for maintenance. Training resumes on other nodes from the last snapshot.",
    "Disrupted": "The cluster, or a queue, ended the pod. Training resumes from the last snapshot. Of Kueue, kubectl "
    "describe workload says more.",
    "NodeTainted": "The node has a taint that the pod does not tolerate: see kubectl describe node.",
    "DeviceTainted": "A GPU, or other device, of the pod has a taint: see the ResourceSlices of the node. Training "
    "resumes with other devices from the last snapshot.",
    "NodeRebooted": "The node was restarted, or its container runtime. If nobody did, check its power and kernel log.",
    "NodeLost": "The node does not respond: check its kubelet, network and power.",
    "Terminated": "The node is shutting down. Training resumes on other nodes from the last snapshot.",
    "ErrImagePull": "The image cannot be pulled: check its name, its tag and imagePullSecrets.",
    "CreateContainerConfigError": "The container cannot be created: check the Secrets and ConfigMaps in env.",
    "Unschedulable": "No node fits the pod: check its resources, node selector, tolerations and claims.",
    "DeadlineExceeded": "Apply the job again with a longer activeDeadlineSeconds. It resumes from its snapshot.",
    "PodDeadlineExceeded": "The pod has activeDeadlineSeconds: remove it from podTemplate, or from the policy of the "
    "cluster that adds it, and set spec.activeDeadlineSeconds.",
    "BeyondBounds": "Lower the value that the message names, or ask the administrator. Then delete the job and apply "
    "it again.",
    "StartupDeadlineExceeded": "Fix the cause, or raise startupDeadlineSeconds. Then apply the job again.",
}
"""Advice by reason, one or two sentences each."""

DETERMINISTIC = frozenset(
    {
        "AccessDenied",
        "CUDAError",
        "CUDANotInImage",
        "CollectiveMismatch",
        "DataCorrupted",
        "ImportError",
        "LossNotFinite",
        "NotDeterministic",
        "OOMKilled",
        "OutOfMemory",
        "PermissionDenied",
        "ProcessGroupInit",
        "RankFinishedEarly",
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
"""Reasons that are caused by the program, its data or its settings: a retry from the same snapshot fails again."""

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
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "WorkerKilled",
    }
)
"""Reasons that the node may have caused. Failed and PodFailed are included: their cause is unknown."""

FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
"""Signals that come from outside the program. The others are crashes."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the reason and the message of a failure imply."""

    reason: str
    advice: str
    deterministic: bool
    node_suspect: bool


def advice_for(reason: str) -> str:
    """The suggested action for `reason`; empty if there is none."""
    return ADVICE.get(reason, "")


def diagnose(failure: Failure, resumes_after: int | None = None) -> Diagnosis:
    """The diagnosis of `failure`.

    `resumes_after` is for the advice: the step of the snapshot that the job, applied again, resumes from, or None.
    """
    exception = failure.report.exception if failure.report else ""
    symptom = recognise(failure.reason, f"{failure.message}\n{exception}" if exception else failure.message)
    reason = (symptom.reason if symptom else "") or failure.reason
    moved = reason != "Stalled" or bool(failure.step)  # before the first step, a slow environment is as likely
    advice = symptom.advice if symptom else ""
    if not advice and reason == "WorkerException" and failure.report:
        advice = advice_on_exception(failure.report, resumes_after)
    crashed = reason == "WorkerKilled" and failure.signal is not None and failure.signal not in FROM_OUTSIDE
    return Diagnosis(
        reason,
        advice or advice_for(reason),
        deterministic=(crashed or reason in DETERMINISTIC) and moved and not (symptom and symptom.changes),
        node_suspect=reason in NODE_SUSPECT,
    )
