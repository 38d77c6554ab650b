"""What an administrator grants the jobs of each namespace: a YAML file, read once, into a frozen value.

```yaml
defaults:                          # what a job gets where it says nothing
  image: registry.example/trainer:2
  resources: {limits: {memory: 16Gi}}
bounds:                            # what it may ask for at most
  maxNodes: 16
  maxProcsPerNode: 8
  resources: {nvidia.com/gpu: 8, memory: 512Gi}     # of each pod
  podSecurity: baseline            # the Pod Security Standard of its pods: privileged, baseline (default), restricted
  hostNetwork: false               # whether placement.hostNetwork is allowed all the same
  serviceAccounts: [default]       # what its pods may name; without a list anything (`core.manifests.allow_lists`)
namespaces:                        # the same again, which wins for the jobs of that namespace
  students:
    bounds: {maxNodes: 2}
```

A namespace overrides single values: of defaults, of bounds, and of each resource. A file that cannot be right stops
the operator with one line that names the place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, ValidationError

from ddpjob_operator.api.base import APIModel
from ddpjob_operator.api.pod import Quantity, Whole
from ddpjob_operator.core.manifests.allow_lists import SETTINGS
from ddpjob_operator.core.values.job import Bounds, Defaults, NetworkAccess, Peer, PodSecurity
from ddpjob_operator.settings import NAMESPACE, BadSetting, Settings, in_cluster_namespace, own_namespace

Quantities = dict[str, Quantity | Whole]
Names = tuple[Annotated[str, Field(min_length=1, max_length=317)], ...]
OF_THE_CLUSTER = ("kube-system", "kube-public", "kube-node-lease")
"""Namespaces that are never served, besides the operator's own: a pod there could use accounts with the rights of the
control plane, or the operator's."""

GPU_SUFFIX = "/gpu"


class _Strict(APIModel):
    model_config = ConfigDict(extra="forbid")


class ResourceDefaults(_Strict):
    """Resources of a trainer container that mentions them nowhere."""

    requests: Quantities = Field(default_factory=dict)
    limits: Quantities = Field(default_factory=dict)


class JobDefaults(_Strict):
    """What a job gets where it says nothing."""

    image: Annotated[str, Field(min_length=1)] | None = None
    resources: ResourceDefaults = ResourceDefaults()


class JobBounds(_Strict):
    """What a job may ask for at most."""

    max_nodes: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_procs_per_node: Annotated[int, Field(strict=True, ge=1)] | None = None
    resources: Quantities = Field(default_factory=dict)
    pod_security: PodSecurity | None = None
    host_network: Annotated[bool, Field(strict=True)] | None = None
    service_accounts: Names | None = None
    priority_classes: Names | None = None
    schedulers: Names | None = None
    runtime_classes: Names | None = None
    volume_types: Names | None = None
    shared_scopes: Names | None = None
    annotations: Names | None = None
    tolerations: Names | None = None
    node_names: Names | None = None
    resource_claims: Names | None = None

    def allow_lists(self) -> dict[str, tuple[str, ...]]:
        """The lists that are given, by setting."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        return {name: tuple(given[name]) for name in SETTINGS if name in given}


class Grant(_Strict):
    """Defaults and bounds of some namespace, or of all."""

    defaults: JobDefaults = JobDefaults()
    bounds: JobBounds = JobBounds()


class Configuration(Grant):
    """The whole file."""

    namespaces: dict[str, Grant] = Field(default_factory=dict)


def load_defaults(settings: Settings) -> Callable[[str], Defaults]:
    """What holds for the jobs of a namespace, by its name.

    Raises:
        BadSetting: the file that the settings name cannot be read or used, or they name a namespace that is never
            served.
    """
    configuration = read(Path(settings.config)) if settings.config else Configuration()
    network = None
    if settings.network_policy != "off":
        isolated = settings.network_policy == "isolated"
        resolvers = tuple(map(_peer, settings.resolvers))
        network = NetworkAccess(
            own_namespace(), settings.scrapers, isolated, resolvers, settings.sources, settings.readers
        )
    known = {name: _defaults(settings, network, configuration, name) for name in configuration.namespaces}
    others = _defaults(settings, network, configuration, None)
    for name in (*OF_THE_CLUSTER, *filter(None, (in_cluster_namespace(),))):
        if name in settings.namespaces:
            raise BadSetting(
                f"DDPJOB_OPERATOR_NAMESPACES names {name}, but the namespaces of the cluster and the operator's own "
                "are never served: a job could use their service accounts; create jobs in another namespace"
            )
        given = known.get(name, others)
        known[name] = replace(given, bounds=replace(given.bounds, served=False))
    return lambda namespace: known.get(namespace, others)


def _peer(text: str) -> Peer:
    """A resolver as the settings have it."""
    namespace, _, label = text.partition("/")
    name, equals, value = label.partition("=")
    return Peer(namespace, {name: value}) if equals else Peer(network=text)


def read(file: Path) -> Configuration:
    """Read the file.

    Raises:
        BadSetting: it cannot be read, is no YAML, or says something that is not known or not allowed.
    """
    try:
        document = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise _bad(file, f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _bad(file, f"is no YAML: {' '.join(str(error).split())}") from None
    try:
        found = Configuration.model_validate(document)
    except ValidationError as error:
        raise _bad(file, _first_problem(error)) from None
    for name in found.namespaces:
        if not NAMESPACE.fullmatch(name):
            raise _bad(file, f"namespaces.{name}: is not the name of a namespace; correct it or remove it")
    for name, grant in (("", found), *found.namespaces.items()):
        _refuse_default_gpus(file, f"namespaces.{name}." if name else "", grant.defaults.resources)
    return found


def _refuse_default_gpus(file: Path, place: str, resources: ResourceDefaults) -> None:
    for kind, quantities in (("requests", resources.requests), ("limits", resources.limits)):
        for resource in quantities:
            if resource.endswith(GPU_SUFFIX):
                path = f"{place}defaults.resources.{kind}[{resource}]"
                raise _bad(file, f"{path}: a job asks for its GPUs itself, since its ranks follow them; remove it")


def _defaults(
    settings: Settings, network: NetworkAccess | None, configuration: Configuration, namespace: str | None
) -> Defaults:
    grants = [configuration] if namespace is None else [configuration, configuration.namespaces[namespace]]
    image, bounds = settings.trainer_image, Bounds()
    resources: dict[str, dict[str, Any]] = {}
    for grant in grants:
        image = grant.defaults.image or image
        given = grant.defaults.resources
        for kind, quantities in (("requests", given.requests), ("limits", given.limits)):
            if quantities:
                resources[kind] = resources.get(kind, {}) | quantities
        bounds = Bounds(
            max_nodes=grant.bounds.max_nodes or bounds.max_nodes,
            max_procs_per_node=grant.bounds.max_procs_per_node or bounds.max_procs_per_node,
            resources=dict(bounds.resources) | {name: str(most) for name, most in grant.bounds.resources.items()},
            pod_security=grant.bounds.pod_security or bounds.pod_security,
            host_network=bounds.host_network if grant.bounds.host_network is None else grant.bounds.host_network,
            allowed=dict(bounds.allowed) | grant.bounds.allow_lists(),
        )
    return Defaults(trainer_image=image, resources=resources, bounds=bounds, network=network)


def _first_problem(error: ValidationError) -> str:
    found = error.errors()[0]
    path = ".".join(str(part) for part in found["loc"] if part not in ("constrained-str", "constrained-int"))
    if found["type"] == "extra_forbidden" and path.endswith("bounds.hostAccess"):
        return f"{path}: is replaced by podSecurity (privileged, baseline, restricted) and hostNetwork; use them"
    if found["type"] == "extra_forbidden":
        return f"{path}: is not known here; correct its name or remove it"
    shown = repr(found["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"{path or 'the document'}: is {shown}, but: {found['msg']}"


def _bad(file: Path, what: str) -> BadSetting:
    return BadSetting(f"DDPJOB_OPERATOR_CONFIG {file}: {what}")
