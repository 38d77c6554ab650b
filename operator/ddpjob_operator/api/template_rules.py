"""Validation rules for `podTemplate`, which only the operator checks, and the names of environment variables that are
reserved. In `spec.env` CEL refuses these as well (`validation`).
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec, count_of, is_accelerator

RESERVED_ENV = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "POD_IP",
    "LD_PRELOAD",
)
RESERVED_ENV_PREFIXES = ("DDPJOB_", "TORCHELASTIC_", "PET_")

_RESTART_ALL = "RestartAllContainers"

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_AFFINITY: dict[tuple[str, ...], type] = {
    ("affinity",): dict,
    ("affinity", "podAffinity"): dict,
    ("affinity", "podAffinity", _REQUIRED): list,
    ("affinity", "podAntiAffinity"): dict,
    ("affinity", "podAntiAffinity", _REQUIRED): list,
    ("affinity", "nodeAffinity"): dict,
    ("affinity", "nodeAffinity", _REQUIRED): dict,
    ("affinity", "nodeAffinity", _REQUIRED, "nodeSelectorTerms"): list,
}


def is_reserved(name: str) -> bool:
    """Whether an environment variable is reserved for the operator or for torchrun."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def reserved_template_env(spec: DDPJobSpec) -> str | None:
    for index, container in enumerate(_objects(_template(spec), "containers")):
        for variable in _objects(container, "env"):
            if container.get("name") == "trainer" and is_reserved(str(variable.get("name"))):
                path = f"spec.podTemplate.spec.containers[{index}].env"
                return f"{path}: {variable.get('name')} is reserved for the operator; remove it"
    return None


def restarted_trainer(spec: DDPJobSpec) -> str | None:
    """Kubernetes 1.35 can restart a container of a pod that is not restarted (KEP-5307); the operator would not see it,
    and the other ranks would wait. A rule of any container can restart all of them (KEP-5532).
    """
    for index, container in enumerate(_objects(_template(spec), "containers")):
        for field in ("restartPolicy", "restartPolicyRules"):
            if container.get("name") == "trainer" and container.get(field) not in (None, [], "Never"):
                path = f"spec.podTemplate.spec.containers[{index}].{field}"
                return f"{path}: the operator restarts the ranks together; remove it, and use spec.restart"
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_objects(_template(spec), kind)):
            if any(rule.get("action") == _RESTART_ALL for rule in _objects(container, "restartPolicyRules")):
                path = f"spec.podTemplate.spec.{kind}[{index}].restartPolicyRules"
                return f"{path}: {_RESTART_ALL} would restart the ranks of one pod; remove it, and use spec.restart"
    return None


def accelerators_without_ranks(spec: DDPJobSpec) -> str | None:
    """Accelerators that `ranks_per_node` does not count: those of podTemplate, and those of other names than `/gpu`.
    All but one of them would be idle.
    """
    if spec.procs_per_node is not None or spec.gpus_per_node:
        return None
    given: list[tuple[str, Any]] = [("spec.resources", {"limits": spec.resources.limits} if spec.resources else None)]
    for index, container in enumerate(_objects(_template(spec), "containers")):
        if container.get("name") == "trainer":
            given.append((f"spec.podTemplate.spec.containers[{index}].resources", container.get("resources")))
    for path, resources in given:
        limits = resources.get("limits") if isinstance(resources, dict) else None
        for name, count in (limits if isinstance(limits, dict) else {}).items():
            if is_accelerator(str(name)) and count_of(count) > 1:
                return f"{path}.limits: {name}: {count} would have one rank; set spec.procsPerNode: {count}"
    return None


def taken_volume_name(spec: DDPJobSpec) -> str | None:
    """A volume is known by its name, and the operator's would take the place of the user's: `assignment` once a pod's
    place may change, which an edit of `restart.scope` can bring about at any time.
    """
    taken = {"shared": "the job's data", "assignment": "the pod's place in the gang"}
    for index, volume in enumerate(_objects(_template(spec), "volumes")):
        name = str(volume.get("name"))
        claim = volume.get("persistentVolumeClaim")
        is_same = isinstance(claim, dict) and claim.get("claimName") == spec.shared.claim_name is not None
        if name in taken and not (name == "shared" and is_same):
            path = f"spec.podTemplate.spec.volumes[{index}].name"
            return f"{path}: the operator's volume {name} has {taken[name]}; give this one another name, or remove it"
    return None


def deadline_of_pods(spec: DDPJobSpec) -> str | None:
    """The kubelet ends a pod at its deadline, and each attempt begins with new pods: the job would restart."""
    seconds = _template(spec).get("activeDeadlineSeconds")
    if seconds is None:
        return None
    path = "spec.podTemplate.spec.activeDeadlineSeconds"
    return f"{path}: {seconds} ends each pod, and the job restarts; remove it, and use spec.activeDeadlineSeconds"


def malformed_template(spec: DDPJobSpec) -> str | None:
    """Lists that are merged item by item must contain objects with their merge key."""
    template, path = _template(spec), "spec.podTemplate.spec"
    for field in ("containers", "initContainers", "volumes", "schedulingGates"):
        if problem := _malformed_list(template, field, path, "name"):
            return problem
    for index, container in enumerate(_objects(template, "containers")):
        for field, key in (("env", "name"), ("ports", "containerPort"), ("volumeMounts", "mountPath")):
            if problem := _malformed_list(container, field, f"{path}.containers[{index}]", key):
                return problem
        if problem := _malformed_resources(container, f"{path}.containers[{index}].resources"):
            return problem
    return _malformed_affinity(template, path)


def _malformed_affinity(template: dict[str, Any], path: str) -> str | None:
    """The operator adds terms to the required affinity, so the structure of that must be valid."""
    for place, kind in _AFFINITY.items():
        part: Any = template
        for name in place:
            part = part.get(name) if isinstance(part, dict) else None
        where = ".".join((path, *place))
        if part is not None and not isinstance(part, kind):
            return f"{where}: must be {'a list' if kind is list else 'an object'}, as in a pod"
        for index, term in enumerate(part if isinstance(part, list) else ()):
            if not isinstance(term, dict) or not isinstance(term.get("matchFields") or [], list):
                return f"{where}[{index}]: must be an affinity term, as in a pod"
    return None


def _malformed_resources(container: dict[str, Any], path: str) -> str | None:
    """The operator adds its default resources to them."""
    resources = container.get("resources")
    for kind in ("limits", "requests"):
        given = resources.get(kind) if isinstance(resources, dict) else resources
        if given is not None and not isinstance(given, dict):
            return f"{path}.{kind}: must be an object, as in a pod"
    return None


def _malformed_list(parent: dict[str, Any], field: str, path: str, key: str) -> str | None:
    items = parent.get(field)
    if items is not None and not isinstance(items, list):
        return f"{path}.{field}: must be a list of objects, each with a {key}"
    for index, item in enumerate(items or ()):
        if not isinstance(item, dict) or not isinstance(item.get(key), str | int):
            return f"{path}.{field}[{index}]: must have a {key}; `trainer` is the operator's container"
    return None


def _template(spec: DDPJobSpec) -> dict[str, Any]:
    return (spec.pod_template.spec if spec.pod_template else None) or {}


def _objects(parent: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """The objects in a list that has not been validated."""
    items = parent.get(field)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
