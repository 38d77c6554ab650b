"""docs/api.md, generated from the models: `python -m ddpjob_operator.api.docs [--check]`.

It lists what `kubectl explain` shows on one page: every field with its type, default, bounds and description.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from ddpjob_operator.api import API_VERSION, KIND, generated
from ddpjob_operator.api.crd import Schema, crd
from ddpjob_operator.api.immutable import IMMUTABLE_ADVICE, IMMUTABLE_FIELDS
from ddpjob_operator.api.template_rules import RESERVED_ENV, RESERVED_ENV_PREFIXES
from ddpjob_operator.api.validation import BETWEEN_FIELDS

PAGE = generated.ROOT / "docs/api.md"

_BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)


def rendered() -> str:
    """The page as Markdown."""
    root = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    reserved = ", ".join(f"`{name}`" for name in (*RESERVED_ENV, *(f"{prefix}*" for prefix in RESERVED_ENV_PREFIXES)))
    parts = [
        f"# {KIND}, `{API_VERSION}`",
        "Generated from the models by `make generate`; do not edit. `kubectl explain ddpjob.spec` shows the same text.",
        "All fields of `spec` are optional. [Operating](operating.md) shows examples for each policy, "
        "[conditions](conditions.md) lists phases, conditions, reasons and events.",
        "## spec",
        *_tables("spec", root["spec"]),
        "## Validation rules between fields",
        "The API server checks these rules from Kubernetes 1.25 on (CEL); the operator checks them on every version. "
        "A spec that violates one is rejected with its message:",
        "\n".join(f"- `{_path(rule.path)}`: “{rule.message}”" for rule in BETWEEN_FIELDS if rule.cel),
        f"Reserved environment variables: {reserved}.",
        "## Immutable fields",
        f"{', '.join(f'`{name}`' for name in IMMUTABLE_FIELDS)} are immutable: {IMMUTABLE_ADVICE}. "
        "`nodes` can be changed if the job is elastic. "
        "Changes of other fields take effect at once, or with the next attempt if the description says so.",
        "## status",
        *_tables("status", root["status"]),
    ]
    return "\n\n".join(parts) + "\n"


def _path(parts: tuple[str, ...]) -> str:
    return "spec" + "".join(part if part == "[]" else f".{part}" for part in parts)


def _tables(path: str, schema: Schema) -> Iterator[str]:
    """One table for an object, then one for each object in it."""
    yield f"### {path}" if "." in path else schema.get("description", "")
    if "." in path and schema.get("description"):
        yield schema["description"]
    rows = ["| Field | Type | Default | |", "|---|---|---|---|"]
    rows += [_row(name, field, name in schema.get("required", ())) for name, field in schema["properties"].items()]
    yield "\n".join(rows)
    for name, field in schema["properties"].items():
        inner, suffix = (field["items"], "[]") if field.get("type") == "array" else (field, "")
        if any("description" in item for item in inner.get("properties", {}).values()):  # Kubernetes' own have none
            yield from _tables(f"{path}.{name}{suffix}", inner)


def _row(name: str, field: Schema, required: bool) -> str:
    default = field.get("default")
    shown = "required" if required else "" if default in (None, {}, [], "") else f"`{json.dumps(default)}`"
    if isinstance(default, dict):
        shown = ""
    words = [field.get("description", "")]
    words += [
        f"({_range(field.get(low), field.get(high))}{unit})"
        for low, high, unit in _BOUNDS
        if {low, high} & field.keys()
    ]
    return f"| `{name}` | {_type(field)} | {shown} | {' '.join(words)} |".replace("  ", " ")


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"at most {high}" if low is None else f"at least {low}"
    return f"{low} to {high}"


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if field.get("format") == "date-time":
        return "time"
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map of {_type(field['additionalProperties'])}"
    return str(field.get("type", "object"))


def main(argv: list[str]) -> int:
    """Write the page; with --check, only say whether it is up to date."""
    return generated.write({PAGE: rendered()}, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
