"""Rules between fields of a spec, each stated twice: in CEL for API servers from 1.25, in Python for everything else.

`BETWEEN_FIELDS` hold for every spec. `FROZEN` fields must not change once the job exists, because a gang whose pods
were made from two specs never finishes a rendezvous; CEL refuses the edit, and the operator notices it by digest
where CEL is not to be had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec, EnvVar

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

FROZEN = ("image", "entrypoint", "args", "nodes", "procsPerNode", "resources", "env", "shared", "podTemplate")
FROZEN_MESSAGE = (
    "cannot change once the job exists: delete the job and apply it again; "
    "with shared.retain it resumes from its last snapshot"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `path` is where its CEL stands in the schema below `spec`; `problem` returns a message or None.

    Without `cel` the operator alone checks it: CEL cannot look into a field of unknown structure.
    """

    path: tuple[str, ...]
    cel: str
    message: str
    problem: Callable[[DDPJobSpec], str | None]


def _both_entrypoints(spec: DDPJobSpec) -> str | None:
    module, script = spec.entrypoint.module, spec.entrypoint.script
    if module is None or script is None:
        return None
    return f"spec.entrypoint: both module {module!r} and script {script!r} are set; keep one of them"


def _both_volumes(spec: DDPJobSpec) -> str | None:
    claim = spec.shared.claim_name
    if claim is None:
        return None
    clash = "size" if spec.shared.size else "storageClassName" if spec.shared.storage_class_name else None
    return clash and (
        f"spec.shared: claimName {claim!r} names an existing volume, so {clash} has no meaning; remove one of them"
    )


def is_reserved(name: str) -> bool:
    """Whether an environment variable belongs to the operator or to torchrun."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _reserved_env(spec: DDPJobSpec) -> str | None:
    for index, variable in enumerate(spec.env):
        if is_reserved(variable.name):
            return f"spec.env[{index}].name: {variable.name} is set by the operator; remove it"
    return None


def _reserved_template_env(spec: DDPJobSpec) -> str | None:
    for index, container in enumerate(_objects(_template(spec), "containers")):
        for variable in _objects(container, "env"):
            if container.get("name") == "trainer" and is_reserved(str(variable.get("name"))):
                path = f"spec.podTemplate.spec.containers[{index}].env"
                return f"{path}: {variable.get('name')} is set by the operator; remove it"
    return None


def _malformed_template(spec: DDPJobSpec) -> str | None:
    """What is merged item by item has to be lists of objects with the key that they are merged by."""
    template, path = _template(spec), "spec.podTemplate.spec"
    for field in ("containers", "initContainers", "volumes"):
        if problem := _malformed_list(template, field, path, "name"):
            return problem
    for index, container in enumerate(_objects(template, "containers")):
        for field, key in (("env", "name"), ("ports", "containerPort"), ("volumeMounts", "mountPath")):
            if problem := _malformed_list(container, field, f"{path}.containers[{index}]", key):
                return problem
    return None


def _malformed_list(parent: dict[str, Any], field: str, path: str, key: str) -> str | None:
    items = parent.get(field)
    if items is not None and not isinstance(items, list):
        return f"{path}.{field}: is not a list; write a list of objects, each with a {key}"
    for index, item in enumerate(items or ()):
        if not isinstance(item, dict) or not isinstance(item.get(key), str | int):
            return f"{path}.{field}[{index}]: has no {key}; give it one (the container `trainer` is ours to be changed)"
    return None


def _template(spec: DDPJobSpec) -> dict[str, Any]:
    return (spec.pod_template.spec if spec.pod_template else None) or {}


def _objects(parent: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """The objects of a list that nobody has checked."""
    items = parent.get(field)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _two_values(spec: DDPJobSpec) -> str | None:
    def clash(variable: EnvVar) -> bool:
        return variable.value is not None and variable.value_from is not None

    for index, variable in enumerate(spec.env):
        if clash(variable):
            return f"spec.env[{index}]: {variable.name} has both value and valueFrom; keep one of them"
    return None


def _backoff_order(spec: DDPJobSpec) -> str | None:
    backoff = spec.restart.backoff
    if backoff.initial_seconds <= backoff.max_seconds:
        return None
    return (
        f"spec.restart.backoff: initialSeconds {backoff.initial_seconds} is more than maxSeconds "
        f"{backoff.max_seconds}; raise maxSeconds or lower initialSeconds"
    )


_RESERVED_CEL = " || ".join(
    [
        f"self.name in [{', '.join(repr(name) for name in RESERVED_ENV)}]",
        *(f"self.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES),
    ]
)

BETWEEN_FIELDS: tuple[Rule, ...] = (
    Rule(
        ("entrypoint",),
        "!(has(self.module) && has(self.script))",
        "module and script are both set; keep one of them",
        _both_entrypoints,
    ),
    Rule(
        ("shared",),
        "!has(self.claimName) || !(has(self.size) || has(self.storageClassName))",
        "claimName names an existing volume, so size and storageClassName have no meaning; remove them or claimName",
        _both_volumes,
    ),
    Rule(
        ("env", "[]"),
        f"!({_RESERVED_CEL})",
        "this variable is set by the operator; remove it",
        _reserved_env,
    ),
    Rule(
        ("env", "[]"),
        "!(has(self.value) && has(self.valueFrom))",
        "both value and valueFrom are set; keep one of them",
        _two_values,
    ),
    Rule(
        ("restart", "backoff"),
        "self.initialSeconds <= self.maxSeconds",
        "initialSeconds is more than maxSeconds; raise maxSeconds or lower initialSeconds",
        _backoff_order,
    ),
    Rule(("podTemplate",), "", "", _malformed_template),
    Rule(("podTemplate",), "", "", _reserved_template_env),
)


def problems(spec: DDPJobSpec) -> tuple[str, ...]:
    """Every rule between fields that `spec` breaks, as messages that name the field, the value and the fix."""
    return tuple(message for rule in BETWEEN_FIELDS if (message := rule.problem(spec)))


def frozen_digests(spec: DDPJobSpec) -> dict[str, str]:
    """A short digest of each frozen field, to notice an edit on a server without CEL.

    Defaults are left out: an operator that knows more fields than the last one finds the same digests.
    """
    wire = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return {
        field: hashlib.sha256(json.dumps(wire.get(field), sort_keys=True).encode()).hexdigest()[:12] for field in FROZEN
    }
