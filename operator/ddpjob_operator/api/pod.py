"""Parts of `spec` that describe a pod: what it runs, its resources and volume, and where it is scheduled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ddpjob_operator.api.base import OF_KUBERNETES, APIModel

Argument = Annotated[str, Field(max_length=4096)]
Whole = Annotated[int, Field(strict=True, ge=0)]
LONGEST_QUANTITY = 32
Quantity = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$", max_length=LONGEST_QUANTITY)
]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)]
MOST_CODE_PARTS = 8
"""ConfigMaps of one folder. Each holds at most 1 MiB."""

LabelKey = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"),
    Field(max_length=317),
]


class Entrypoint(APIModel):
    """What torchrun starts on every rank. Set `module` or `script`, not both."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=253)] | None = None
    """Python module, run like `python -m`. Default: ddp_trainer.train, the built-in trainer."""

    script: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Python file: an absolute path in the image or below /mnt/shared, or, with `code`, a path in that folder."""


class Code(APIModel):
    """Folder with the program, as `ddpjob submit` packs and uploads it. Each pod checks the digest, and the ranks work
    in a copy of the folder.
    """

    config_maps: Annotated[tuple[ObjectName, ...], Field(min_length=1, max_length=MOST_CODE_PARTS)]
    """Names of the ConfigMaps that hold the packed folder in their key `files.tar.gz`. `ddpjob submit` creates them."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 digest of the folder: of the list of its files with mode, SHA-256 digest and path."""

    requirements: Annotated[str, Field(pattern=r"^[^/\s][^\\]*$", max_length=1024)] | None = None
    """Path of a pip requirements file in the folder. The packages are installed once, into the shared volume, beside
    those of the image; PyTorch stays the image's.
    """


class EnvVar(APIModel):
    """An environment variable, as in a pod."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256)]
    """Name of the variable. In spec.env, RANK, WORLD_SIZE, MASTER_ADDR, LD_PRELOAD, TORCHELASTIC_* and DDPJOB_* are
    reserved for the operator.
    """

    value: Annotated[str, Field(max_length=32768)] | None = None
    """Literal value. `$(NAME)` is not expanded."""

    value_from: Annotated[dict[str, Any], Field(json_schema_extra={OF_KUBERNETES: "EnvVarSource"})] | None = None
    """Source of the value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef."""


class Resources(APIModel):
    """Compute resources of the trainer container in each pod."""

    requests: Annotated[dict[str, Quantity | Whole], Field(max_length=32)] | None = None
    """Resources that the scheduler reserves, such as cpu, memory and nvidia.com/gpu."""

    limits: Annotated[dict[str, Quantity | Whole], Field(max_length=32)] | None = None
    """Maximum resources that the container may use. Request GPUs here."""


class Shared(APIModel):
    """Volume that is mounted at /mnt/shared in every pod, for data sets, snapshots and logs. Set `size` or `claimName`,
    not both.
    """

    size: Quantity | None = None
    """Size of the PersistentVolumeClaim that the operator creates, named `<job>-shared`. Default: 10Gi."""

    storage_class_name: ObjectName | None = None
    """StorageClass of that claim. Default: the cluster's default StorageClass."""

    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Access mode of that claim. Use ReadWriteOnce only if all pods run on one node."""

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim to use instead. The operator never deletes it."""

    scope: Literal["Claim", "Job"] | None = None
    """How much of an existing claim the pods see. Claim, the default: all of it. Job: its folder `jobs/<job>` as
    /mnt/shared, and its folder `datasets`, read-only, as /mnt/shared/datasets. Requires `claimName`.
    """

    retain: Annotated[bool, Field(strict=True)] = True
    """Keep the claim when the job is deleted. A new job of the same name then resumes from its snapshots."""


class Initializer(APIModel):
    """A download or a script that prepares the shared volume before training starts. It runs once per job: later
    attempts reuse the verified result. Set `source` or `script`, not both.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$", max_length=40)]
    """Name of the initializer in logs and in the status, such as `dataset`."""

    source: Annotated[str, Field(pattern=r"^(https?|s3|hf|pvc)://.+", max_length=2048)] | None = None
    """URL to copy from: https://…, s3://bucket/prefix, hf://datasets/owner/name, or pvc://claim/path."""

    script: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """Shell script. Its working directory is /mnt/shared."""

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][-A-Za-z0-9_./]*$", max_length=512)]
    """Path of the result below /mnt/shared, such as `datasets/digits`."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Expected SHA-256 checksum, if the result is a single file. A result with another checksum is rejected."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Environment variables of this initializer only. Pass credentials from a Secret with valueFrom."""


class Placement(APIModel):
    """Scheduling constraints of the pods, in addition to those in podTemplate."""

    topology_key: LabelKey | None = None
    """Run all pods in one topology domain, given by a node label such as topology.kubernetes.io/zone."""

    one_pod_per_node: Annotated[bool, Field(strict=True)] = False
    """Require that each pod runs on a different node. If false, pods are spread over nodes where possible."""

    host_network: Annotated[bool, Field(strict=True)] = False
    """Use the network namespace of the node, which some RDMA fabrics require. Implies onePodPerNode."""

    shm_size: Quantity | None = None
    """Size limit of /dev/shm, the shared memory of DataLoader workers and NCCL. Default: the pod's
    memory limit, or the memory of its node.
    """


class PodMetadata(APIModel):
    """Labels and annotations that are added to every pod. They cannot override the operator's labels."""

    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)] | None = None
    """Labels to add, such as a team or a cost centre."""

    annotations: Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)] | None = None
    """Annotations to add."""


class PodTemplate(APIModel):
    """Pod template that is merged into every pod: node selectors, tolerations, volumes, sidecar containers. Fields that
    the operator sets take precedence.
    """

    metadata: PodMetadata | None = None
    """Labels and annotations to add."""

    spec: Annotated[dict[str, Any], Field(json_schema_extra={OF_KUBERNETES: "PodSpec"})] | None = None
    """Pod spec. The container named `trainer` is merged into the operator's container. Lists of named items are merged
    by name.
    """
