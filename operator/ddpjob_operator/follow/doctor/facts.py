"""What the API server has of a cluster and a namespace, as far as the caller may read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from ddpjob_operator.core.manifests.bounds import amount, is_gpu
from ddpjob_operator.wire.objects import Object, parse_time

NO_SCHEDULE = ("NoSchedule", "NoExecute")
"""Effects of taints that keep pods off a node."""

_SAID_OTHERWISE = tuple(f"node.kubernetes.io/{name}" for name in ("not-ready", "unreachable", "unschedulable"))
"""Taints of nodes that are not ready, or cordoned."""

_GPU_DRIVERS = ("gpu.", "gaudi.")
"""How the names of DRA drivers of GPUs begin, such as gpu.nvidia.com."""
_GPU_LABELS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
"""What Node Feature Discovery, or NVIDIA's GPU operator, puts on nodes with the hardware."""


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be read, and why."""

    why: str
    fix: str = ""


class Right(NamedTuple):
    """One permission in the namespace, as in a Role."""

    verb: str
    group: str
    resource: str
    subresource: str = ""

    def __str__(self) -> str:
        name = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {name}"


@dataclass(frozen=True, slots=True)
class NodeView:
    """What matters of a Kubernetes node."""

    name: str
    ready: bool
    cordoned: bool
    taints: tuple[str, ...]
    """Those that keep pods off it although it is ready and not cordoned, such as `nvidia.com/gpu:NoSchedule`."""
    allocatable: Mapping[str, Decimal]
    heartbeat: datetime | None
    """By the node's own clock."""
    images: tuple[str, ...] = ()
    """Names of images that its kubelet lists: by default the 50 largest."""
    has_gpu_hardware: bool = False
    """By its labels; False also where nothing looks for hardware."""

    @property
    def usable(self) -> bool:
        """Whether it takes pods without tolerations."""
        return self.ready and not self.cordoned and not self.taints

    @property
    def gpus(self) -> Mapping[str, Decimal]:
        """By resource, those that a device plugin offers."""
        return {name: count for name, count in self.allocatable.items() if is_gpu(name) and count > 0}


class Claimable(NamedTuple):
    """Devices of a node, or of several, that pods claim (DRA): a ResourceSlice."""

    driver: str
    node: str | None

    @property
    def are_gpus(self) -> bool:
        return self.driver.startswith(_GPU_DRIVERS)


@dataclass(frozen=True, slots=True)
class Hook:
    """An admission webhook of the cluster that fails closed."""

    name: str
    rules: tuple[Object, ...]
    namespace_selector: Object
    object_selector: Object
    service: tuple[str, str] | None
    """Namespace and name of its Service; None for one that is reached by a URL."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks are made from. `Unread` stands for what could not be read."""

    namespace: str
    local_time: datetime
    server_time: datetime | None
    """The clock of the API server, to the second; None if its answers lack it."""
    versions: tuple[str, ...]
    """Versions of the DDPJob API that are served; none without the CRD."""
    access: Mapping[Right, bool] | Unread
    space: Object | Unread | None
    """The namespace; None if there is none of this name."""
    deployments: tuple[Object, ...] | Unread
    """Of the operator, in all namespaces."""
    leases: tuple[Object, ...] | Unread
    """Of the operator."""
    jobs: tuple[Object, ...] | Unread
    """DDPJobs of the namespace."""
    classes: tuple[Object, ...] | Unread
    """StorageClasses."""
    nodes: tuple[NodeView, ...] | Unread
    claimable: tuple[Claimable, ...] | Unread
    node_pools: tuple[str, ...] | Unread
    """NodePools of Karpenter, which also EKS Auto Mode and AKS's node auto-provisioning are: nodes come for pods."""
    quotas: tuple[Object, ...] | Unread
    limits: tuple[Object, ...] | Unread
    """LimitRanges."""
    policies: tuple[Object, ...] | Unread
    """NetworkPolicies."""
    hooks: tuple[Hook, ...] | Unread
    endpoints: Mapping[tuple[str, str], int | Unread]
    """Ready endpoints of the Services of those hooks that see the objects of a job."""
    failed_pulls: tuple[str, ...] | Unread
    """Messages of events of the namespace about images that could not be pulled."""
    refusals: Mapping[str, str | Unread]
    """By resource, what the API server said against a dry run of `admission`; empty if it would have created it."""

    @property
    def space_labels(self) -> Mapping[str, str] | None:
        """Labels of the namespace; None if they could not be read."""
        if self.space is None or isinstance(self.space, Unread):
            return None
        found: Mapping[str, str] = self.space["metadata"].get("labels") or {}
        return found


def parse_slice(obj: Object) -> Claimable:
    """A ResourceSlice as `Claimable`."""
    spec = obj.get("spec") or {}
    return Claimable(str(spec.get("driver") or ""), spec.get("nodeName"))


def parse_node(obj: Object) -> NodeView:
    """A Node as a `NodeView`."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    ready: Object = next((item for item in status.get("conditions") or () if item.get("type") == "Ready"), {})
    taints = [item for item in spec.get("taints") or () if item.get("effect") in NO_SCHEDULE]
    return NodeView(
        name=metadata["name"],
        ready=ready.get("status") == "True",
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            f"{item['key']}{'=' + item['value'] if item.get('value') else ''}:{item['effect']}"
            for item in taints
            if item["key"] not in _SAID_OTHERWISE
        ),
        allocatable={name: amount(value) for name, value in (status.get("allocatable") or {}).items()},
        heartbeat=parse_time(ready.get("lastHeartbeatTime")),
        images=tuple(name for image in status.get("images") or () for name in image.get("names") or ()),
        has_gpu_hardware=any(labels.get(label) == "true" for label in _GPU_LABELS),
    )


def parse_hooks(configuration: Object) -> list[Hook]:
    """The webhooks of a Mutating- or ValidatingWebhookConfiguration that fail closed."""
    return [
        Hook(
            name=hook["name"],
            rules=tuple(hook.get("rules") or ()),
            namespace_selector=hook.get("namespaceSelector") or {},
            object_selector=hook.get("objectSelector") or {},
            service=_service(hook.get("clientConfig") or {}),
        )
        for hook in configuration.get("webhooks") or ()
        if hook.get("failurePolicy", "Fail") == "Fail"
    ]


def _service(client: Object) -> tuple[str, str] | None:
    service = client.get("service")
    return (service["namespace"], service["name"]) if service else None
