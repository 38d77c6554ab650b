"""`spec` of a DDPJob: the fields that users set.

The CRD, `kubectl explain` and docs/api.md are generated from these models, so docstrings of fields are user
documentation. Bounds of single fields are here. Rules between fields are in `validation.py`, in CEL and in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel
from ddpjob_operator.api.pod import (
    LONGEST_QUANTITY,
    Argument,
    Code,
    Entrypoint,
    EnvVar,
    Initializer,
    Placement,
    PodTemplate,
    Resources,
    Shared,
)
from ddpjob_operator.api.policies import Elastic, PositiveSeconds, Restart, Scheduling, Seconds, Snapshots, Stall

CONTROLLER_NAME = "training.ddpjob.io/operator"
"""Value of `managedBy` for this operator."""
OWNER_ANNOTATION = "training.ddpjob.io/owner"
"""Who answers for a job, such as a team or an e-mail address. It is in metrics and notifications."""
LONGEST_OWNER = 64
"""Characters of it that are shown."""

BUILT_IN_MODULE = "ddp_trainer.train"
"""The program of a job that names none."""

SHUTDOWN_SECONDS = 45
LEAVE_SECONDS = 15
"""Of a pod's grace period, what is left when its ranks have been killed: its launcher says how it ended."""


class DDPJobSpec(APIModel):
    """Specification of a training job: `nodes` pods, each with `procsPerNode` ranks that torchrun starts."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Container image with PyTorch and the package ddp_trainer. Default: the operator's default image."""

    entrypoint: Entrypoint = Entrypoint()
    """Program that every rank runs. Default: the built-in trainer."""

    code: Code | None = None
    """Folder with the program, which `ddpjob submit` uploads. Default: the program is in the image or on the volume."""

    args: Annotated[tuple[Argument, ...], Field(max_length=256)] = ()
    """Arguments of the program, one list item each. No shell interprets them."""

    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Number of pods. Can be changed while the job runs if the job is elastic, also with `kubectl scale`."""

    elastic: Elastic | None = None
    """Allow training with fewer than `nodes` nodes when not all can be scheduled."""

    procs_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] | None = None
    """Number of ranks in each pod. Default: the GPU limit of the pod, or 1."""

    resources: Resources | None = None
    """Compute resources of the trainer container in each pod."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = ()
    """Environment variables of the training processes."""

    shared: Shared = Shared()
    """Volume that is mounted at /mnt/shared in every pod."""

    initializers: Annotated[tuple[Initializer, ...], Field(max_length=16)] = ()
    """Downloads and scripts that prepare the shared volume, in order, before training starts."""

    snapshots: Snapshots = Snapshots()
    """When the training state is saved. Can be changed while the job runs, with effect from the next attempt."""

    restart: Restart = Restart()
    """What happens after a failure. Can be changed while the job runs."""

    stall: Stall = Stall()
    """Stall detection: a rank without progress for ten times its step time is killed, and the job is restarted. Can be
    changed while the job runs, with effect from the next attempt.
    """

    observe_script: Annotated[bool, Field(strict=True)] = True
    """Report steps, loss, learning rate and samples of a training script that does not report them itself, through
    hooks in torch. Has no effect on the built-in trainer or on scripts that call ddp_trainer.attach. Can be changed
    while the job runs, with effect from the next attempt.
    """

    shutdown_seconds: Annotated[int, Field(strict=True, ge=1, le=86400)] | None = None
    """Seconds that the ranks of a pod have to save a snapshot and exit after SIGTERM, before they are killed. The
    termination grace period of the pods is at least 15 seconds longer. Default: 45, or 15 less than
    terminationGracePeriodSeconds in podTemplate. Can be changed while the job runs, with effect from the next attempt.
    """

    non_finite_loss_policy: Literal["Warn", "Stop", "Rollback"] = "Warn"
    """What to do when the training loss is NaN or infinite. Warn sets the condition LossNotFinite and continues. Stop
    fails the job at once. Rollback restarts it from the last snapshot before that step and skips the batches of that
    step and of the one before, up to three times, then stops; a script without snapshots of ddp_trainer is stopped. Can
    be changed while the job runs, with effect from the next attempt.
    """

    spares: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """Number of running standby pods that replace failed pods. Requires restart.scope InPlace or Live."""

    success_policy: Literal["AllNodes", "FirstNode"] = "AllNodes"
    """The job succeeds when all nodes have succeeded (AllNodes), or when node rank 0 has (FirstNode). With
    restart.scope Live, it also does when all nodes that were left have.
    """

    suspend: Annotated[bool, Field(strict=True)] = False
    """Save a snapshot, stop all pods and release the nodes. Set to false to resume. Can be changed at any time."""

    active_deadline_seconds: PositiveSeconds | None = None
    """Seconds after which an unfinished job fails. Time while suspended is not counted. Can be changed while the job
    runs.
    """

    startup_deadline_seconds: PositiveSeconds | None = None
    """Seconds after which the job fails if an attempt has not started training: queueing, image pulls and rendezvous
    together. Can be changed while the job runs.
    """

    ttl_seconds_after_finished: Seconds | None = None
    """Seconds after which a finished job is deleted. Default: never. Can be changed at any time."""

    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Pods to delete when the job has finished: none, those still running, or all. After a missed deadline, running
    pods are always deleted. Can be changed at any time.
    """

    scheduling: Scheduling = Scheduling()
    """Gang scheduling, queue and priority."""

    placement: Placement = Placement()
    """Scheduling constraints of the pods."""

    managed_by: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Name of the controller that manages this job. Default: this operator. The operator ignores jobs with another
    name here.
    """

    pod_template: PodTemplate | None = None
    """Pod template that is merged into every pod, for fields that the spec does not have."""

    @property
    def is_built_in(self) -> bool:
        """Whether the built-in trainer runs, which saves and resumes in any case. A program of one's own may not."""
        return self.entrypoint.script is None and self.entrypoint.module in (None, BUILT_IN_MODULE)

    @property
    def shutdown_limit(self) -> int:
        """`shutdownSeconds`, or what a grace period in podTemplate leaves for it, or the default."""
        if self.shutdown_seconds is not None:
            return self.shutdown_seconds
        grace = _grace_of(self.pod_template)
        return SHUTDOWN_SECONDS if grace is None else max(1, grace - LEAVE_SECONDS)

    @property
    def grace_seconds(self) -> int:
        """The pods' termination grace period: the launcher needs a part of it after its ranks have gone."""
        grace = _grace_of(self.pod_template)
        if grace is not None and self.shutdown_seconds is None:
            return grace
        return max(grace or 0, self.shutdown_limit + LEAVE_SECONDS)

    @property
    def ranks_per_node(self) -> int:
        """`procsPerNode`, or one rank per GPU in the limits, or one."""
        return self.procs_per_node if self.procs_per_node is not None else max(1, self.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs in `resources.limits`, of whatever vendor: those that have a rank each."""
        return gpus_in((self.resources.limits if self.resources else None) or {})

    @property
    def trainer_templates(self) -> tuple[Mapping[str, Any], ...]:
        """What podTemplate has of the trainer container, validated no further than its schema goes. Of several with
        its name each is merged into the container.
        """
        found = ((self.pod_template.spec if self.pod_template else None) or {}).get("containers")
        named = (each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()
        return tuple(each for each in named if each.get("name") == "trainer")

    @property
    def accelerators_per_node(self) -> int:
        """GPUs and the like that a pod holds, whatever runs on them: those of its trainer container as it is made."""
        limits: dict[str, object] = {}
        for template in self.trainer_templates:
            resources = template.get("resources")
            given = resources.get("limits") if isinstance(resources, dict) else None
            limits |= given if isinstance(given, dict) else {}
        limits |= (self.resources.limits if self.resources else None) or {}
        return sum(count_of(quantity) for name, quantity in limits.items() if is_accelerator(str(name)))


def gpus_in(limits: Mapping[str, object]) -> int:
    """GPUs in the limits of a container, of whatever vendor."""
    return sum(count_of(quantity) for name, quantity in limits.items() if name.endswith("/gpu"))


def is_accelerator(resource: str) -> bool:
    """Whether each unit of a resource is a device for a rank of its own."""
    return resource.endswith("/gpu") or resource in ("gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi")


def count_of(quantity: object) -> int:
    """A whole quantity as a number, and 0 for any other; also for one of thousands of digits, of which Python makes no
    number: an API server bounds the form of a quantity, and not its length.
    """
    text = str(quantity)
    return int(text) if text.isdecimal() and len(text) <= LONGEST_QUANTITY else 0


def _grace_of(template: PodTemplate | None) -> int | None:
    given = ((template.spec if template else None) or {}).get("terminationGracePeriodSeconds")
    return given if isinstance(given, int) and given >= 0 else None
