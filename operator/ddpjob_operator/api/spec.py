"""`spec` of a DDPJob: everything a user may ask for.

The CRD, `kubectl explain` and docs/api.md are generated from these models, so a field's docstring is written for the
person who types the YAML. Bounds that a schema can express stand here; rules between fields are in `rules.py`, once
for CEL and once for servers that have no CEL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel

Argument = Annotated[str, Field(max_length=4096)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$", max_length=32)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)]


class Entrypoint(APIModel):
    """What torchrun starts on every rank. Set `module` or `script`, not both."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=253)] | None = None
    """A Python module, run like `python -m`. Default: ddp_trainer.train, the built-in trainer."""

    script: Annotated[str, Field(pattern=r"^/", max_length=1024)] | None = None
    """The absolute path of a Python file in the image or below /mnt/shared."""


class EnvVar(APIModel):
    """One environment variable of the training processes, as in a pod."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256)]
    """The variable's name. RANK, WORLD_SIZE, MASTER_ADDR, LD_PRELOAD, TORCHELASTIC_* and DDPJOB_* belong to the
    operator.
    """

    value: Annotated[str, Field(max_length=32768)] | None = None
    """Its value, taken literally: `$(NAME)` is not expanded."""

    value_from: (
        Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None
    ) = None
    """A source as in a pod: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef."""


class Resources(APIModel):
    """Compute resources of each node's trainer container, as in a pod."""

    requests: Annotated[dict[str, Quantity | Whole], Field(max_length=32)] | None = None
    """What the scheduler reserves, such as cpu, memory, nvidia.com/gpu."""

    limits: Annotated[dict[str, Quantity | Whole], Field(max_length=32)] | None = None
    """What a node may use at most. A GPU goes here."""


class Shared(APIModel):
    """The volume at /mnt/shared of every node: data sets, snapshots and logs. Set `size` or `claimName`, not both."""

    size: Quantity | None = None
    """Size of the PersistentVolumeClaim that the operator creates, named `<job>-shared`. Default: 10Gi."""

    storage_class_name: ObjectName | None = None
    """Its storage class. Default: the cluster's default class."""

    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteMany for a gang on several machines; ReadWriteOnce where all pods share one machine."""

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim to use instead. It is never deleted by the operator."""

    retain: Annotated[bool, Field(strict=True)] = True
    """Keep the operator's claim when the job is deleted, so that a job of the same name resumes from its snapshots."""


class Snapshots(APIModel):
    """When training state is saved to /mnt/shared/checkpoints/<job>, and how many snapshots are kept."""

    every: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}(steps|epochs|seconds)$")] = "60seconds"
    """The interval: a number and its unit, such as `100steps`, `1epochs` or `60seconds`."""

    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """How many verified snapshots stay on the volume; older ones are removed after a newer one has been verified."""


class Backoff(APIModel):
    """How long to wait before a restart that follows a failure without progress.

    After progress a restart is immediate.
    """

    initial_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = 1
    """The first wait; it doubles with each further failure that brought no new snapshot."""

    max_seconds: Annotated[int, Field(strict=True, ge=0, le=86400)] = 300
    """The longest wait."""


class Restart(APIModel):
    """How often, and how patiently, a failed gang is started again."""

    max_restarts: Annotated[int, Field(strict=True, ge=0, le=10000)] = 10
    """Restarts that the job may use up before it is Failed. 0 means never restart."""

    backoff: Backoff = Backoff()
    """Waiting between restarts."""


class PodMetadata(APIModel):
    """Labels and annotations added to every pod; the operator's own labels win."""

    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)] | None = None
    """Extra labels, such as a team or a cost centre."""

    annotations: Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)] | None = None
    """Extra annotations."""


class PodTemplate(APIModel):
    """Merged into every pod of the gang: node selectors, tolerations, extra volumes, sidecars.

    What the operator sets wins.
    """

    metadata: PodMetadata | None = None
    """Extra labels and annotations."""

    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None = (
        None
    )
    """A pod spec. The container named `trainer` is merged into the operator's; lists with names are merged by name."""


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
    """Number of pods in the gang."""

    procs_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Ranks in each pod: one for each of its GPUs."""

    resources: Resources | None = None
    """Compute resources of each pod's trainer container."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = ()
    """Environment variables of the training processes."""

    shared: Shared = Shared()
    """The volume at /mnt/shared."""

    snapshots: Snapshots = Snapshots()
    """When training state is saved. May change while the job runs; it takes effect with the next attempt."""

    restart: Restart = Restart()
    """What happens after a failure. May change while the job runs."""

    pod_template: PodTemplate | None = None
    """Anything else a pod may need."""
