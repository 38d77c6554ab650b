"""Rules about a podTemplate and about names of variables. CEL cannot look into a field of unknown structure, so the
operator alone checks a template.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec

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
    """Whether an environment variable belongs to the operator or to torchrun."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def reserved_template_env(spec: DDPJobSpec) -> str | None:
    for index, container in enumerate(_objects(_template(spec), "containers")):
        for variable in _objects(container, "env"):
            if container.get("name") == "trainer" and is_reserved(str(variable.get("name"))):
                path = f"spec.podTemplate.spec.containers[{index}].env"
                return f"{path}: {variable.get('name')} is set by the operator; remove it"
    return None


def malformed_template(spec: DDPJobSpec) -> str | None:
    """What is merged item by item has to be lists of objects with the key that they are merged by."""
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
    """Terms of ours are added to what is required (`core.placement`), so that has to be where it belongs."""
    for place, kind in _AFFINITY.items():
        part: Any = template
        for name in place:
            part = part.get(name) if isinstance(part, dict) else None
        where = ".".join((path, *place))
        if part is not None and not isinstance(part, kind):
            return f"{where}: is not {'a list' if kind is list else 'an object'}; write it as in a pod"
        for index, term in enumerate(part if isinstance(part, list) else ()):
            if not isinstance(term, dict) or not isinstance(term.get("matchFields") or [], list):
                return f"{where}[{index}]: is not a term; write it as in a pod"
    return None


def _malformed_resources(container: dict[str, Any], path: str) -> str | None:
    """Defaults of the operator's go into them."""
    resources = container.get("resources")
    for kind in ("limits", "requests"):
        given = resources.get(kind) if isinstance(resources, dict) else resources
        if given is not None and not isinstance(given, dict):
            return f"{path}: has {kind} that are not an object; write them as in a pod"
    return None


def _malformed_list(parent: dict[str, Any], field: str, path: str, key: str) -> str | None:
    items = parent.get(field)
    if items is not None and not isinstance(items, list):
        return f"{path}.{field}: is not a list; write a list of objects, each with a {key}"
    for index, item in enumerate(items or ()):
        if not isinstance(item, dict) or not isinstance(item.get(key), str | int):
            return f"{path}.{field}[{index}]: has no {key}; give it one (`trainer` is the operator's own container)"
    return None


def _template(spec: DDPJobSpec) -> dict[str, Any]:
    return (spec.pod_template.spec if spec.pod_template else None) or {}


def _objects(parent: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """The objects of a list that nobody has checked."""
    items = parent.get(field)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
