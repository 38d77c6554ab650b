"""The parts of a spec that say what a pod of the gang is: what it runs, with what, and where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel

Argument = Annotated[str, Field(max_length=4096)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$", max_length=32)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)]
LabelKey = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"),
    Field(max_length=317),
]


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


class Initializer(APIModel):
    """Something to put on the volume before training starts. Done once: later attempts find it there, verified.

    Set `source` or `script`, not both.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$", max_length=40)]
    """What it is called in logs and in status, such as `dataset`."""

    source: Annotated[str, Field(pattern=r"^(https?|s3|hf|pvc)://.+", max_length=2048)] | None = None
    """Where to copy from: https://…, s3://bucket/prefix, hf://datasets/owner/name, or pvc://claim/path."""

    script: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """A shell script of your own, run with /mnt/shared as its folder."""

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][-A-Za-z0-9_./]*$", max_length=512)]
    """Where the result lies, below /mnt/shared, such as `datasets/digits`."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Checksum of a single file; a result that differs is refused."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Environment of this initializer alone: its credentials, from a Secret with valueFrom."""


class Placement(APIModel):
    """Where the pods of the gang may run, in addition to what podTemplate says."""

    topology_key: LabelKey | None = None
    """Keep the whole gang in one domain of this node label, such as topology.kubernetes.io/zone or a rack's."""

    one_pod_per_node: Annotated[bool, Field(strict=True)] = False
    """Never put two pods of the gang on one node. Without it they are spread where that is possible."""

    host_network: Annotated[bool, Field(strict=True)] = False
    """Use the node's network, as some RDMA fabrics need it. It implies onePodPerNode."""

    shm_size: Quantity | None = None
    """Limit of /dev/shm, a memory-backed folder for DataLoader workers and NCCL. Default: half of the node's memory."""


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
