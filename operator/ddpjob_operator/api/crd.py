"""The CustomResourceDefinition, generated from the models: `python -m ddpjob_operator.api.crd [--check]`.

Pydantic's JSON schema is converted to a structural OpenAPI schema (KEP-1693: no `$ref`, no `title`, a `type` at every
level). Servers without CEL drop `x-kubernetes-validations` when they store the object.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml
from pydantic import BaseModel

from ddpjob_operator.api import API_VERSION, GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION, generated
from ddpjob_operator.api.base import OF_KUBERNETES
from ddpjob_operator.api.immutable import IMMUTABLE_FIELDS, IMMUTABLE_MESSAGE
from ddpjob_operator.api.pod_schema import schema_of
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.api.validation import BETWEEN_FIELDS

Schema = dict[str, Any]

PATHS = (
    generated.ROOT / "manifests/crd/ddpjobs.training.ddpjob.io.yaml",  # Kustomize
    generated.ROOT / "charts/ddpjob-operator/files/crd.yaml",  # Helm
)

PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
    {"name": "Nodes", "type": "string", "jsonPath": ".status.summary.nodes"},
    {"name": "Progress", "type": "string", "jsonPath": ".status.summary.progress"},
    {"name": "ETA", "type": "string", "jsonPath": ".status.summary.eta"},
    {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt"},
    {"name": "Restarts", "type": "integer", "jsonPath": ".status.restarts"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.summary.reason"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Loss", "type": "number", "jsonPath": ".status.progress.loss", "priority": 1},
    {
        "name": "Accuracy",
        "type": "number",
        "jsonPath": ".status.progress.metrics.eval_accuracy",
        "priority": 1,
    },
    {"name": "Goodput", "type": "number", "jsonPath": ".status.goodput.ratio", "priority": 1},
    {"name": "Failure", "type": "string", "jsonPath": ".status.lastFailure.reason", "priority": 1},
    {"name": "Failed-On", "type": "string", "jsonPath": ".status.lastFailure.nodeName", "priority": 1},
)

_KEPT = (
    "type",
    "format",
    "description",
    "enum",
    "pattern",
    "default",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "x-kubernetes-int-or-string",
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition as an object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/name": "ddpjob-operator"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.nodes",
                            "statusReplicasPath": ".status.nodes.total",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [dict(column) for column in PRINTER_COLUMNS],
                }
            ],
        },
    }


def _root() -> Schema:
    spec = structural(DDPJobSpec)
    rules = _at(spec, ("restart", "rules"))
    rules["items"] = _without_defaults(rules["items"])  # what clients compare as a whole differs with each of them;
    # those of initializers stay, in which a job that is stored with them could not be applied again: they are immutable
    for rule in (rule for rule in BETWEEN_FIELDS if rule.cel):
        _at(spec, rule.path).setdefault("x-kubernetes-validations", []).append(
            {"rule": rule.cel, "message": rule.message}
        )
    spec.setdefault("x-kubernetes-validations", []).append(
        {
            "rule": "has(self.elastic) || self.nodes == oldSelf.nodes",
            "message": f"spec.nodes {IMMUTABLE_MESSAGE}; only elastic jobs can be scaled",
        }
    )
    for name in (name for name in IMMUTABLE_FIELDS if name != "nodes"):
        spec["properties"][name].setdefault("x-kubernetes-validations", []).append(
            {"rule": "self == oldSelf", "message": f"spec.{name} {IMMUTABLE_MESSAGE}"}
        )
        if "default" not in spec["properties"][name]:
            # a transition rule of a field is not evaluated when the field is added or removed
            spec.setdefault("x-kubernetes-validations", []).append(
                {
                    "rule": f"has(self.{name}) == has(oldSelf.{name})",
                    "message": f"spec.{name} {IMMUTABLE_MESSAGE}",
                }
            )
    return {
        "type": "object",
        "description": f"{KIND} is a fault-tolerant distributed PyTorch training job ({API_VERSION}).",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _without_defaults(structural(DDPJobStatus)),
        },
    }


def _at(schema: Schema, path: tuple[str, ...]) -> Schema:
    for part in path:
        schema = schema["items"] if part == "[]" else schema["properties"][part]
    return schema


def structural(model: type[BaseModel]) -> Schema:
    """`model` as a structural schema."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(document, document.get("$defs", {}))


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        node = _one_of_a_kind(node, definitions)
    if kind := node.get(OF_KUBERNETES):
        return schema_of(kind) | {"description": " ".join(node["description"].split())}
    schema = {key: node[key] for key in _KEPT if key in node and not (key == "default" and node[key] is None)}
    if isinstance(schema.get("default"), dict):
        schema["default"] = _without_nulls(schema["default"])
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if node.get("type") == "object" and "properties" in node:
        schema["properties"] = {key: _structural(value, definitions) for key, value in node["properties"].items()}
        if node.get("required"):
            schema["required"] = list(node["required"])
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(node["additionalProperties"], definitions)
    if "items" in node:
        schema["items"] = _structural(node["items"], definitions)
    return schema


def _one_of_a_kind(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """`X | None` is anyOf in Pydantic and an optional field here. A number or a quantity is int-or-string."""
    options = [option for option in node["anyOf"] if option.get("type") != "null"]
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    if len(options) == 1:
        return {**_resolved(options[0], definitions), **rest}
    if {option.get("type") for option in options} == {"string", "integer"}:
        text = next(option for option in options if option["type"] == "string")
        return {"x-kubernetes-int-or-string": True, "pattern": text["pattern"], **rest}
    raise TypeError(f"no structural schema for {node}")


def _resolved(node: Schema, definitions: dict[str, Schema]) -> Schema:
    return definitions[node["$ref"].removeprefix("#/$defs/")] if "$ref" in node else node


def _without_defaults(schema: Schema) -> Schema:
    """Remove defaults, so that the API server never fills in fields that nobody wrote."""
    nested = {key: _without_defaults(value) for key, value in schema.get("properties", {}).items()}
    kept = {key: value for key, value in schema.items() if key != "default"}
    if nested:
        kept["properties"] = nested
    if "items" in kept:
        kept["items"] = _without_defaults(kept["items"])
    return kept


def _without_nulls(value: Any) -> Any:
    """A default for the API server, which wants absent fields, not null ones."""
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def rendered() -> str:
    """The CRD as YAML, with a header comment."""
    head = "# Generated from operator/ddpjob_operator/api by `make generate`; do not edit.\n"
    return head + yaml.safe_dump(crd(), sort_keys=False, width=120)


def main(argv: list[str]) -> int:
    """Write the CRD for Kustomize and for Helm; with `--check`, only report whether the files are up to date."""
    text = rendered()
    return generated.write(dict.fromkeys(PATHS, text), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
