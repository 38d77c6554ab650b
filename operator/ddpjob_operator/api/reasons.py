"""Every phase, condition, reason and event of a DDPJob, with its meaning.

docs/conditions.md is generated from these tables. A test compares them with the literals in the code, so that a new
reason needs a row here. Actions for failures come from `core.failure`, as in `status.lastFailure.advice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.api.status import Phase


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason. `of` names its conditions with their status; `action` is empty if nothing has to be done."""

    name: str
    of: str
    meaning: str
    action: str = ""


PHASES: dict[Phase, str] = {
    Phase.PENDING: "The job is accepted. The operator creates its objects and runs its initializers.",
    Phase.STARTING: "The job has not run yet: its pods are created, and not all of them are ready.",
    Phase.RUNNING: "All pods run, or have finished; with scope Live also while lost pods are replaced.",
    Phase.RESTARTING: "An attempt has ended. The next one waits for its backoff, or its pods are not all ready.",
    Phase.SUSPENDED: "The job is suspended. Its pods are gone, or do not confirm their end.",
    Phase.SUCCEEDED: "The job has succeeded. Final.",
    Phase.FAILED: "The job has failed. Final.",
}

CONDITIONS: dict[str, tuple[str, str]] = {
    "Initialized": ("All initializers have succeeded.", "Initializers are running or have failed."),
    "Scheduled": ("Every pod has a node.", "At least one pod has no node."),
    "Running": (
        "All pods run, or have finished; with scope Live also while lost pods are replaced.",
        "They do not, or the job has finished.",
    ),
    "Restarting": ("A new attempt is starting.", "No attempt is starting."),
    "Suspended": (
        "The job is suspended; its pods are gone, or do not confirm their end.",
        "It is not suspended, or its pods are terminating.",
    ),
    "Degraded": ("Something needs attention; the job continues or waits.", "Nothing needs attention."),
    "SnapshotsFailing": ("Three saves in a row have failed; training continues.", "A snapshot was saved again."),
    "ShutdownTooShort": (
        "Two steps and a snapshot take longer than a pod has to leave (spec.shutdownSeconds); training continues.",
        "A snapshot fits again.",
    ),
    "LossNotFinite": (
        "The loss is NaN or infinite; training continues (spec.nonFiniteLossPolicy).",
        "The loss is finite again.",
    ),
    "Complete": ("The job has succeeded.", "It has not."),
    "Failed": ("The job has failed.", "It has not."),
}
"""Type → meaning of True, meaning of False."""

STATES = (
    Reason("AllScheduled", "Scheduled=True", "Every pod has a node."),
    Reason("Scheduling", "Scheduled=False", "The scheduler has not assigned all pods to nodes yet."),
    Reason("DataReady", "Initialized=True", "All initializers have succeeded."),
    Reason("Initializing", "Initialized=False", "The initializer pod is running."),
    Reason(
        "InitializerFailed",
        "Initialized=False, Failed=True",
        "An initializer has failed. It is retried three times, unless a retry cannot help. Disruptions do not count.",
        "Read the message. Correct the source, the credentials or the script, and apply the job again.",
    ),
    Reason("GangRunning", "Running=True", "All pods of the attempt run, or have finished."),
    Reason(
        "KeptPodEnded",
        "Restarting=True",
        "With scope InPlace or Live: a reused pod had already ended. It is replaced.",
    ),
    Reason("ScaledUp", "Restarting=True", "The next attempt has more nodes."),
    Reason("ScaledDown", "Restarting=True", "The next attempt has fewer nodes."),
    Reason(
        "NodesForgiven",
        "Restarting=True",
        "A pod finds no node, and one that it keeps away from may be used again: it has not failed the job for a day, "
        "or confirms deletions again.",
    ),
    Reason(
        "NodesPreferred",
        "Restarting=True",
        "Karpenter (1.7 or newer) adds no node for a pod whose affinity excludes nodes by name. From here on the pods "
        "of the job only prefer other nodes. This does not count.",
        "Cordon or delete the nodes that are not to be used again.",
    ),
    Reason(
        "GroupClosed",
        "Restarting=True",
        "Pods of the attempt will not be admitted: Kueue finished its group before all of them were there, or a pod of "
        "a lost node has the place. All pods are replaced, in a group of their own. This does not count.",
    ),
    Reason("Resumed", "Restarting=True, Suspended=False", "The suspension is over."),
    Reason("Suspending", "Suspended=False", "Pods are saving a snapshot and terminating."),
    Reason("Suspended", "Suspended=True", "The job is suspended.", "Set spec.suspend to false to resume it."),
    Reason("AsExpected", "Degraded=False", "Nothing needs attention."),
    Reason(
        "FewerNodes",
        "Degraded=True",
        "An elastic job runs with fewer nodes than spec.nodes.",
        "It grows automatically when more nodes are available.",
    ),
    Reason(
        "SpecChanged",
        "Degraded=True, Restarting=True",
        "An immutable field was changed on a server without CEL. With Restarting=True, a field that pods are made "
        "from, or the operator's trainer image, changed while pods were missing; the next attempt is made from it.",
        "Degraded=True: revert the edit, or delete the job and apply it again.",
    ),
    Reason(
        "InvalidSpec",
        "Failed=True, Degraded=True",
        "The spec is invalid. A running job continues with the previous spec.",
        "Correct the fields that the message names. Failed=True: delete the job, then apply it again.",
    ),
    Reason(
        "BeyondBounds",
        "Failed=True, Degraded=True",
        "The job exceeds a bound of the administrator.",
        "Lower the value that the message names, or ask the administrator. Failed=True: delete the job, then apply it "
        "again.",
    ),
    Reason(
        "InternalError",
        "Degraded=True",
        "The operator failed on this job and retries.",
        "Report the error in the operator's log.",
    ),
    Reason(
        "GangTimeout",
        "Degraded=True",
        "Not all pods had a node within scheduling.timeoutSeconds, or ranks gave up waiting for pods that did not run "
        "within 10 minutes. The gang is retried, which costs no restart.",
        "Wait, lower nodes, or make the job elastic.",
    ),
    Reason(
        "SavesFail",
        "SnapshotsFailing=True",
        "Three saves in a row have failed.",
        "Read the message. Check free space, permissions and the storage server.",
    ),
    Reason(
        "SaveTakesLonger",
        "ShutdownTooShort=True",
        "A pod that is stopped would be killed before its snapshot is complete.",
        "Set spec.shutdownSeconds to the value in the message. It applies from the next attempt.",
    ),
    Reason(
        "NonFiniteLoss",
        "LossNotFinite=True",
        "The loss is NaN or infinite since the step in the message.",
        "Lower the learning rate, clip gradients, or check the data. Set spec.nonFiniteLossPolicy to Stop or Rollback.",
    ),
    Reason("FiniteLoss", "LossNotFinite=False", "The loss is finite again."),
    Reason("SaveFits", "ShutdownTooShort=False", "A snapshot fits again."),
    Reason("Saved", "SnapshotsFailing=False", "A snapshot was saved again."),
    Reason(
        "Completed",
        "Complete=True",
        "All nodes have succeeded (with scope Live, all that were left), or node rank 0 with successPolicy FirstNode.",
    ),
    Reason(
        "RepeatedFailure",
        "Failed=True",
        "The same error has occurred twice in a row at the same step, or before the first step, or the program has run "
        "out of memory three times in a row without a new snapshot.",
        "Fix the cause in status.lastFailure and apply the job again, or retry it with a rule in restart.rules.",
    ),
    Reason(
        "BackoffLimitExceeded",
        "Failed=True",
        "restart.maxRestarts restarts without progress have been used.",
        "Fix the cause in status.lastFailure. Apply the job again; it resumes from its last snapshot.",
    ),
    Reason("DeadlineExceeded", "Failed=True", "The job was active for activeDeadlineSeconds."),
    Reason("StartupDeadlineExceeded", "Failed=True", "An attempt did not start within startupDeadlineSeconds."),
)
"""Reasons of conditions that the operator sets by itself."""

_STARTUP = "Degraded=True, Scheduled=False"
STARTUP = (
    Reason("Unschedulable", _STARTUP, "The scheduler finds no node for a pod."),
    Reason("SchedulingGated", "Scheduled=False", "A queue holds the pods back.", "Wait for the queue."),
    Reason("NotScheduled", _STARTUP, "No scheduler has said anything about a pod for 30 s."),
    Reason("SchedulerError", _STARTUP, "The scheduler has met an error, such as a volume that was not made in time."),
    Reason("ErrImagePull", _STARTUP, "An image cannot be pulled. Includes ImagePullBackOff."),
    Reason("ErrImageNeverPull", _STARTUP, "The image is not on the node, and imagePullPolicy is Never."),
    Reason("InvalidImageName", _STARTUP, "The image name is invalid."),
    Reason("CreateContainerConfigError", _STARTUP, "A Secret or ConfigMap is missing, or the user is not allowed."),
    Reason("FailedMount", _STARTUP, "A volume cannot be mounted."),
    Reason("FailedAttachVolume", _STARTUP, "A volume cannot be attached to the node."),
    Reason("FailedCreatePodSandBox", _STARTUP, "The network of a pod cannot be set up."),
    Reason("QuotaExceeded", _STARTUP, "A ResourceQuota does not allow an object."),
    Reason(
        "AdmissionDenied",
        _STARTUP,
        "An admission webhook or policy has rejected an object, or changed the operator's labels.",
    ),
    Reason("AdmissionFailed", _STARTUP, "An admission webhook does not respond, or fails."),
    Reason("TooLarge", _STARTUP, "An object is larger than the API server accepts, or than etcd stores: 1.5 MiB."),
    Reason("Forbidden", _STARTUP, "The API server has rejected an object: Pod Security, RBAC, or a missing object."),
    Reason("Invalid", _STARTUP, "The API server finds an object invalid.", "Correct the field that the message names."),
    Reason(
        "NameTaken",
        _STARTUP,
        "An object of this name exists and does not belong to the job.",
        "Delete it, wait for its deletion, or rename the job.",
    ),
    Reason("NamespaceTerminating", _STARTUP, "The namespace is being deleted."),
    Reason("Rejected", _STARTUP, "The API server has rejected an object for another reason.", "Read the message."),
)
"""Reasons why pods do not start. Reasons of the scheduler, the kubelet and the API server are passed on unchanged, so
there may be others.
"""

FAILURES = (
    Reason("WorkerException", "", "The training program ended with an exception or an exit code."),
    Reason("WorkerKilled", "", "A signal terminated a rank."),
    Reason("OOMKilled", "", "The container exceeded its memory limit."),
    Reason("OutOfMemory", "", "The device, or the host, ran out of memory."),
    Reason("UserError", "", "Invalid arguments or settings (exit code 64). Not retried."),
    Reason("ImportError", "", "A Python module cannot be imported. Not retried."),
    Reason("Stalled", "", "A rank made no progress within its limit (see spec.stall)."),
    Reason("PeerLost", "", "A rank lost the connection to another rank, without another failure in the gang."),
    Reason("RendezvousFailed", "", "Not all ranks joined the process group in time."),
    Reason("LiveRecoveryFailed", "", "With scope Live: the ranks could not go on by themselves; the message says why."),
    Reason("CollectiveTimeout", "", "A collective timed out."),
    Reason("CollectiveMismatch", "", "Ranks called different collectives, or with different shapes."),
    Reason("RankFinishedEarly", "", "A rank had finished while another still waited for it in a collective."),
    Reason("Fenced", "", "A newer attempt or another job owns the checkpoint directory (exit code 77)."),
    Reason(
        "StatusRestored",
        "",
        "The volume knows a later attempt than the job's status, as after a restore of the cluster from a backup. "
        "A disruption.",
    ),
    Reason("Preempted", "", "A pod was preempted, or stopped by SIGTERM after a snapshot. A disruption."),
    Reason("Left", "", "With scope Live: a pod was stopped by SIGTERM, and the others go on. A disruption."),
    Reason("Evicted", "", "The kubelet evicted a pod because its node ran short of a resource. A disruption."),
    Reason("StorageLimitExceeded", "", "The kubelet evicted a pod that wrote more to its disk than its limit allows."),
    Reason("Drained", "", "A pod was evicted by the eviction API, as kubectl drain does. A disruption."),
    Reason("Disrupted", "", "The cluster, or Kueue, ended a pod, or it was deleted before it began. A disruption."),
    Reason("NodeTainted", "", "A pod ended in order, or was not admitted, for a taint of its node. A disruption."),
    Reason("DeviceTainted", "", "A pod was deleted for a taint of a device of its claim (DRA). A disruption."),
    Reason("NodeRebooted", "", "A node came back without the pods that ran there. A disruption."),
    Reason(
        "NodeLost",
        "",
        "A node was NotReady for restart.nodeLostSeconds (at once while the gang takes no step, or if it confirms no "
        "deletion), or is gone. A disruption.",
    ),
    Reason("Terminated", "", "The node is shutting down. A disruption."),
    Reason("Shutdown", "", "The node is shutting down (kubelets before 1.22). A disruption.", "Training resumes."),
    Reason("NodeShutdown", "", "The node is shutting down and admits no pods. A disruption.", "Training resumes."),
    Reason("NodeAffinity", "", "The labels of the node have changed. A disruption.", "Training resumes."),
    Reason("Preempting", "", "The kubelet preempted the pod for a critical pod. A disruption.", "Training resumes."),
    Reason("OutOfcpu", "", "The kubelet did not admit the pod: no free CPU. A disruption.", "Training resumes."),
    Reason("OutOfmemory", "", "The kubelet did not admit the pod: no free memory. A disruption.", "Training resumes."),
    Reason("OutOfpods", "", "The kubelet did not admit the pod: too many pods. A disruption.", "Training resumes."),
    Reason(
        "OutOfResource",
        "",
        "The kubelet did not admit the pod: no free GPU, or other resource that the message names. A disruption.",
        "Training resumes.",
    ),
    Reason("NodePorts", "", "The kubelet did not admit the pod: a port is taken. A disruption.", "Training resumes."),
    Reason(
        "VolumeAttachmentLimitExceeded",
        "",
        "The kubelet refused the pod: no further volume can be attached to the node. A disruption.",
        "Training resumes.",
    ),
    Reason("PodDeadlineExceeded", "", "A pod ran for its own activeDeadlineSeconds. Counts towards maxRestarts."),
    Reason("PodDeleted", "", "A pod was deleted. Counts towards maxRestarts."),
    Reason("InitContainerFailed", "", "An init container failed, of podTemplate or an injected one."),
    Reason("PodFailed", "", "A pod failed without a container status.", "Check the events of the pod and of its node."),
    Reason(
        "Failed", "", "A container failed for an unknown reason.", "Read the pod's log, in status.lastFailure.logTail."
    ),
    Reason("Error", "", "The kubelet's reason for an exit code other than 0; replaced by Failed.", "See Failed."),
    Reason("StartError", "", "The container runtime could not start the container."),
    Reason("ContainerCannotRun", "", "The container runtime could not start the container.", "See StartError."),
    Reason("RunContainerError", "", "The container runtime could not start the container.", "See StartError."),
    Reason(
        "UnexpectedAdmissionError", "", "The kubelet did not admit the pod.", "Check the device plugins of the node."
    ),
    Reason(
        "TopologyAffinityError",
        "",
        "The kubelet did not admit the pod: its CPUs and devices do not fit the NUMA nodes.",
        "Request no more than a NUMA node has, or change topologyManagerPolicy of the kubelet.",
    ),
    Reason("TrainerMissing", "", "The image does not contain the package ddp_trainer."),
    Reason("DiskFull", "", "The volume is full."),
    Reason("SharedMemoryFull", "", "The shared memory at /dev/shm is full."),
    Reason("ReadOnlyFileSystem", "", "A file was written to a read-only file system."),
    Reason("PermissionDenied", "", "A file is not accessible for the user of the container."),
    Reason("VolumeError", "", "I/O error of the volume."),
    Reason("DataCorrupted", "", "A file is corrupt."),
    Reason("UnsafeFile", "", "A file contains pickled objects and is not loaded."),
    Reason("DataWorkerDied", "", "A data loader worker died."),
    Reason("TooManyThreads", "", "The limit of threads or processes is reached."),
    Reason("TooManyOpenFiles", "", "The limit of open files is reached."),
    Reason("GPUFault", "", "A hardware fault of a GPU: ECC, NVLink or Xid."),
    Reason("GPUMissing", "", "No GPU is visible in the pod, or none can be used."),
    Reason("TooFewGPUs", "", "Ranks share a GPU, or ask for one that the node lacks."),
    Reason("NotDeterministic", "", "An operation has no deterministic kernel, and the program allows no other."),
    Reason("DriverMismatch", "", "The NVIDIA driver does not match the CUDA version."),
    Reason("CUDANotInImage", "", "PyTorch was built without CUDA, or not for the GPU of the node."),
    Reason("CUDAError", "", "A CUDA kernel failed."),
    Reason("NCCLError", "", "NCCL failed on this node."),
    Reason("AddressInUse", "", "A port is already in use."),
    Reason("NetworkError", "", "A server outside the job cannot be reached."),
    Reason("AccessDenied", "", "A download was denied."),
    Reason("ProcessGroupInit", "", "init_process_group was used incorrectly."),
    Reason("UnusedParameters", "", "DDP found parameters without a gradient."),
    Reason("LossNotFinite", "", "The loss is NaN or infinite."),
    Reason("FetchFailed", "", "An initializer could not download its source.", "Check the URL and the credentials."),
    Reason("VolumeFailed", "", "An initializer could not write to the volume.", "Check the volume."),
    Reason("Unknown", "", "In metrics: a restart without a recorded failure."),
)
"""Reasons of status.lastFailure, and of the conditions Restarting and Failed that follow from it."""

EVENTS = (
    Reason("Initializing", "Normal", "The initializer pod was created."),
    Reason("InitializerFailed", "Warning", "The initializer pod failed and is retried."),
    Reason("Starting", "Normal", "The pods of the first attempt are being created; with the digest of submitted code."),
    Reason("Running", "Normal", "All pods of an attempt run, or have finished."),
    Reason("Restarting", "Warning", "An attempt has ended; the next one starts."),
    Reason(
        "RecoveringLive",
        "Warning",
        "With scope Live: a pod was lost and is replaced, by a spare if one is ready; the others train on.",
    ),
    Reason("ScaledUp", "Normal", "The next attempt has more nodes."),
    Reason("ScaledDown", "Normal", "The next attempt has fewer nodes."),
    Reason("Degraded", "Warning", "Something is in the way of the job, with its reason; once for each reason."),
    Reason("GangReleased", "Warning", "An incomplete gang has released its nodes."),
    Reason("NodesForgiven", "Normal", "A pod finds no node, and one may be used again; a new attempt starts."),
    Reason("NodesPreferred", "Warning", "An autoscaler adds no node for pods that exclude nodes by name."),
    Reason("Suspending", "Normal", "All pods are being stopped after a snapshot."),
    Reason("Suspended", "Normal", "The job is suspended."),
    Reason("Resumed", "Normal", "A suspension is over; a new attempt starts."),
    Reason("SnapshotsFailing", "Warning", "Three saves in a row have failed."),
    Reason("ShutdownTooShort", "Warning", "Two steps and a snapshot take longer than a pod has to leave."),
    Reason(
        "CauseFound", "Normal", "A later sign shows that a node had ended the last attempt; its restart is refunded."
    ),
    Reason("LossNotFinite", "Warning", "The loss is NaN or infinite."),
    Reason(
        "ChildRestored",
        "Warning",
        "A Service, claim, NetworkPolicy or PodGroup was deleted; the operator created it again.",
    ),
    Reason("GraceShortened", "Warning", "A webhook or policy gives the pods less time to leave than the job asks for."),
    Reason("SnapshotCorrupt", "Warning", "A snapshot failed verification and was set aside."),
    Reason("InvalidSpec", "Warning", "The spec is invalid."),
    Reason("TooLarge", "Warning", "The spec is so large that the status cannot be saved beside it."),
    Reason(
        "Succeeded",
        "Normal, Warning",
        "The job has succeeded. Warning: work that a script had left was ended before it was done.",
    ),
    Reason("Failed", "Warning", "The job has failed; the message has the reason."),
)
"""Kubernetes Events of a DDPJob; `of` is their type."""
