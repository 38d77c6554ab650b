"""`spec` of a DDPJob: everything a user may ask for.

The CRD, `kubectl explain` and docs/api.md are generated from these models, so a field's docstring is written for the
person who types the YAML. Bounds that a schema can express stand here; rules between fields are in `rules.py`, once
for CEL and once for servers that have no CEL.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel
from ddpjob_operator.api.pod import (
    Argument,
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
"""What `managedBy` says when this operator is meant."""


class DDPJobSpec(APIModel):
    """A fault-tolerant PyTorch DistributedDataParallel run: `nodes` pods, each with `procsPerNode` ranks under
    torchrun.
    """

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The trainer image: PyTorch and the package ddp_trainer.

    Default: the image that the operator was configured with.
    """

    entrypoint: Entrypoint = Entrypoint()
    """What runs on every rank. Default: the built-in trainer."""

    args: Annotated[tuple[Argument, ...], Field(max_length=256)] = ()
    """Arguments of the training script, one list item each; no shell reads them."""

    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Number of pods in the gang. May change while the job runs if it is elastic; `kubectl scale` changes it too."""

    elastic: Elastic | None = None
    """Let the gang run with fewer nodes than `nodes` when not all can be scheduled."""

    procs_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] | None = None
    """Ranks in each pod. Default: its GPU limit, or 1."""

    resources: Resources | None = None
    """Compute resources of each pod's trainer container."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = ()
    """Environment variables of the training processes."""

    shared: Shared = Shared()
    """The volume at /mnt/shared."""

    initializers: Annotated[tuple[Initializer, ...], Field(max_length=16)] = ()
    """Data sets and models to fetch onto the volume, in order, before the gang starts."""

    snapshots: Snapshots = Snapshots()
    """When training state is saved. May change while the job runs; it takes effect with the next attempt."""

    restart: Restart = Restart()
    """What happens after a failure. May change while the job runs."""

    stall: Stall = Stall()
    """When a rank counts as stalled. May change while the job runs; it takes effect with the next attempt."""

    spares: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """Pods that wait, warm, to take the place of one that is lost. Only with restart.scope InPlace."""

    success_policy: Literal["AllNodes", "FirstNode"] = "AllNodes"
    """When the job has Succeeded: all nodes have, or node rank 0 has."""

    suspend: Annotated[bool, Field(strict=True)] = False
    """Save a snapshot, stop, and release the nodes. Set back to false to resume. May change at any time."""

    active_deadline_seconds: PositiveSeconds | None = None
    """Fail the job when it has been active this long, suspensions left out. May change while the job runs."""

    startup_deadline_seconds: PositiveSeconds | None = None
    """Fail the job when a gang has not started this long after it was created: queue, image pulls and rendezvous
    together. May change while the job runs.
    """

    ttl_seconds_after_finished: Seconds | None = None
    """Delete the job this long after it has finished. Default: never. May change at any time."""

    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted when the job has finished: none, those still running, or all. A missed
    deadline stops running pods regardless. May change at any time.
    """

    scheduling: Scheduling = Scheduling()
    """How the gang gets its nodes."""

    placement: Placement = Placement()
    """Where its pods may run."""

    managed_by: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The controller that runs this job. Default: this operator; with another name here it leaves the job alone."""

    pod_template: PodTemplate | None = None
    """Anything else a pod may need."""

    @property
    def ranks_per_node(self) -> int:
        """`procsPerNode`, or else one rank for each GPU of the limit, or one."""
        if self.procs_per_node is not None:
            return self.procs_per_node
        limits = (self.resources.limits if self.resources else None) or {}
        gpus = [str(count) for name, count in limits.items() if name.endswith("/gpu")]
        return max(1, sum(int(count) for count in gpus if count.isdigit()))
