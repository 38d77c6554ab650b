"""Writes what `ddpjob validate` checks a file against: the fields of a pod, and the flags of the built-in trainer.

`python docs/validate_tables.py` writes both tables; with `--check` it ends with 1 if one is out of date. The command
itself has neither Kubernetes' schemas nor the trainer at hand.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from ddpjob_operator.api import generated

ROOT = Path(__file__).parents[1]
SUBMIT = ROOT / "operator/ddpjob_operator/submit"
KUBERNETES = "v1.37.0"
_PREFIX = "io.k8s.api.core.v1."
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"


def pod_fields() -> dict[str, dict[str, Any]]:
    """Each type that a pod spec uses: its fields with their types, and which of them are required (`!`)."""
    import kubernetes_validate

    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"{KUBERNETES}-local"
    definitions = json.loads((schemas / "_definitions.json").read_text())["$defs"]
    found: dict[str, dict[str, Any]] = {}

    def visit(name: str) -> str:
        short = name.rpartition(".")[2]
        if short not in found and "properties" in definitions[name]:
            found[short] = {}
            required = definitions[name].get("required", [])
            for field, schema in sorted(definitions[name]["properties"].items()):
                found[short][field] = of(schema) + ("!" if field in required else "")
        return short if short in found else "any"

    def of(schema: dict[str, Any]) -> str:
        reference = schema.get("$ref", "").rpartition("/")[2]
        if reference in (_QUANTITY, _INT_OR_STRING):
            return "quantity" if reference == _QUANTITY else "int-or-string"
        if reference:
            return visit(reference) if definitions[reference].get("type", "object") != "string" else "string"
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next(one for one in kind if one != "null")
        if kind == "array":
            return f"[{of(schema['items'])}]"
        if kind == "object":
            values = schema.get("additionalProperties")
            return f"{{{of(values)}}}" if isinstance(values, dict) else "any"
        if schema.get("format") == "int-or-string" or "oneOf" in schema:
            return "int-or-string"
        return {"integer": "int", "number": "number", "boolean": "bool"}.get(str(kind), str(kind or "any"))

    visit(_PREFIX + "PodSpec")
    return dict(sorted(found.items()))


def trainer_flags() -> dict[str, Any]:
    """Flag → what it takes (int, float, bool, text, key=value, or its choices), the tasks, the default batch."""
    sys.path.insert(0, str(ROOT / "trainer_image"))
    from ddp_trainer.tasks import BUILT_IN
    from ddp_trainer.train.config import TrainConfig, flag
    from ddp_trainer.train.strategies import STRATEGIES

    hints = typing.get_type_hints(TrainConfig)
    flags: dict[str, Any] = {"--config": "text"}
    for field in dataclasses.fields(TrainConfig):
        flags[flag(field.name)] = _kind(hints[field.name])
    flags["--strategy"] = list(STRATEGIES)
    return {"flags": flags, "tasks": list(BUILT_IN), "globalBatch": TrainConfig().global_batch}


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return {int: "int", float: "float", bool: "bool", str: "text"}.get(hint, "key=value")


TABLES = {SUBMIT / "pod_fields.json": pod_fields, SUBMIT / "trainer_flags.json": trainer_flags}


def main(argv: list[str]) -> int:
    """Write the tables; with --check, only report whether they are up to date."""
    return generated.write({path: json.dumps(table(), indent=1) + "\n" for path, table in TABLES.items()}, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
