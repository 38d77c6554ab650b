"""Kubernetes' own types inside a DDPJob, as structural schemas without descriptions.

With them the API server prunes what a pod does not have and refuses wrong types when a job is applied. Without
descriptions, since the whole CRD has to fit into an annotation for a client-side `kubectl apply`: 262,144 bytes.

The types come from Kubernetes' OpenAPI document, in the development dependency `kubernetes-validate`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

KUBERNETES = "v1.37.0"
"""A field that is younger than the cluster passes this schema, and the pod is created without it."""

QUANTITY_PATTERN = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

_CORE = "io.k8s.api.core.v1."
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_NOT_OF_A_TEMPLATE = {"PodSpec": ("ephemeralContainers",)}
_OF_A_TEMPLATE = ("labels", "annotations")
_MERGED = ("PodSpec",)
"""Types of which a template has any part, since it is merged over the operator's own."""


@cache
def _definitions() -> dict[str, Schema]:
    import kubernetes_validate  # type: ignore[import-untyped]  # not there at run time

    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"{KUBERNETES}-local"
    found: dict[str, Schema] = json.loads((schemas / "_definitions.json").read_text())["$defs"]
    return found


def schema_of(kind: str) -> Schema:
    """The schema of a type of core/v1, such as PodSpec. An optional field may be null, which removes a default."""
    return _structural({"$ref": f"#/$defs/{_CORE}{kind}"})


def _structural(node: Schema) -> Schema:
    name = node.get("$ref", "").removeprefix("#/$defs/")
    if name == _QUANTITY:
        return {"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN}
    if name == _INT_OR_STRING:
        return {"x-kubernetes-int-or-string": True}
    node = _definitions()[name] if name else node
    given = node.get("type", "object")
    kind = given if isinstance(given, str) else next(item for item in given if item != "null")
    if kind == "object":
        return {"type": kind} | _object(name, node)
    if kind == "array":
        return {"type": kind, "items": _structural(node["items"])}
    return {"type": kind} | ({"format": node["format"]} if "format" in node else {})


def _object(name: str, node: Schema) -> Schema:
    if isinstance(node.get("additionalProperties"), dict):
        return {"additionalProperties": _structural(node["additionalProperties"])}
    short = name.removeprefix(_CORE)
    required = () if short in _MERGED else node.get("required", ())
    fields = {
        field: _structural(of) | ({} if field in required else {"nullable": True})
        for field, of in node["properties"].items()
        if field not in _NOT_OF_A_TEMPLATE.get(short, ()) and (name != _METADATA or field in _OF_A_TEMPLATE)
    }
    return {"properties": fields} | ({"required": sorted(required)} if required else {})
