"""The CRD: structural, documented, and what the models say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from ddpjob_operator.api.crd import crd, main, rendered, structural
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus

MANIFEST = Path(__file__).parents[3] / "manifests/crd/ddpjobs.training.ddpjob.io.yaml"
ROOT = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC, STATUS = ROOT["properties"]["spec"], ROOT["properties"]["status"]

OF_KUBERNETES = (".podTemplate.spec", ".valueFrom")
MOST_BYTES = 262_144
"""Of all annotations of an object together (Kubernetes' validation of ObjectMeta)."""

Node = tuple[str, dict[str, Any]]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[Node]:
    """Every node but those of Kubernetes' own types, which have no descriptions."""
    yield path, schema
    if path.endswith(OF_KUBERNETES):
        return
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from nodes(schema[below], f"{path}[]")


def values(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from values(item)


def test_the_files_are_what_the_models_say() -> None:
    assert MANIFEST.read_text() == rendered()
    assert main(["--check"]) == 0


def test_the_yaml_is_the_object() -> None:
    assert yaml.load(rendered(), yaml.CSafeLoader) == crd()


@pytest.mark.parametrize(
    ("path", "schema"), list(nodes(ROOT)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_node_is_structural(path: str, schema: dict[str, Any]) -> None:
    is_structural(schema)
    assert "nullable" not in schema


def every(schema: dict[str, Any], path: str) -> Iterator[Node]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from every(field, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from every(schema[below], f"{path}[]")


def test_every_node_of_kubernetes_types_is_structural() -> None:
    inner = [pair for path, schema in nodes(ROOT) if path.endswith(OF_KUBERNETES) for pair in every(schema, path)]
    assert len(inner) > 1000
    for path, schema in inner:
        is_structural(schema)
        assert "x-kubernetes-preserve-unknown-fields" not in schema, path
        assert "required" not in schema or set(schema["required"]) <= set(schema["properties"]), path


def is_structural(schema: dict[str, Any]) -> None:
    """KEP-1693: a type everywhere (int-or-string is one), no references, no alternatives at this level."""
    if schema.get("x-kubernetes-int-or-string"):
        assert "type" not in schema
    else:
        assert schema["type"] in ("object", "array", "string", "integer", "number", "boolean")
    assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const", "definitions"} & schema.keys()
    assert not {"properties", "additionalProperties"} <= schema.keys(), "they exclude each other"
    assert schema.get("type") != "array" or "items" in schema


def test_it_fits_into_the_annotation_of_a_client_side_apply() -> None:
    assert len(json.dumps(crd(), separators=(",", ":"))) < MOST_BYTES // 2


def test_a_template_need_not_have_what_a_pod_must() -> None:
    template = SPEC["properties"]["podTemplate"]["properties"]["spec"]
    assert "required" not in template
    assert template["properties"]["containers"]["items"]["required"] == ["name"]


def test_nothing_in_it_is_null() -> None:
    assert None not in [value for value in values(crd()) if not isinstance(value, dict | list)]


@pytest.mark.parametrize(
    ("path", "schema"), list(nodes(SPEC, "spec")), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_field_of_a_spec_is_documented_and_bounded(path: str, schema: dict[str, Any]) -> None:
    if not path.endswith("[]"):
        assert schema.get("description", "").endswith("."), "kubectl explain has nothing to say"
    match schema.get("type"):
        case "integer":
            assert {"minimum", "maximum"} <= schema.keys()
        case "string":
            assert schema.keys() & {"maxLength", "enum", "pattern"}
        case "array":
            assert "maxItems" in schema
        case "object" if "additionalProperties" in schema:
            assert "maxProperties" in schema


@pytest.mark.parametrize(
    ("path", "schema"), list(nodes(STATUS, "status")), ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_server_adds_defaults_to_a_status(path: str, schema: dict[str, Any]) -> None:
    assert "default" not in schema
    assert path.endswith("[]") or schema.get("description")


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def test_no_server_adds_defaults_to_a_restart_rule() -> None:
    """Clients compare lists as a whole: `kubectl apply`, and Argo CD with `ServerSideApply=true`, would find a
    difference in the same YAML."""
    fields = SPEC["properties"]["restart"]["properties"]["rules"]["items"]["properties"]
    assert [name for name, field in fields.items() if "default" in field] == []


def test_what_a_server_adds_to_items_of_lists_is_on_the_page_for_gitops() -> None:
    """Argo CD with `ServerSideApply=true` compares lists as a whole, and shows a job that lacks it as OutOfSync."""
    assert [path for path, node in nodes(SPEC) if "[]" in path and "default" in node] == [".initializers[].env"]
    page = (MANIFEST.parents[2] / "docs/operating.md").read_text()
    assert "`env: []`" in page.partition("\n### GitOps\n")[2].partition("\n### ")[0]


def test_the_servers_defaults_are_the_models() -> None:
    plain = without_nulls(DDPJobSpec().model_dump(mode="json", by_alias=True))
    assert {name: field["default"] for name, field in SPEC["properties"].items() if "default" in field} == plain


def test_the_columns_are_those_that_a_person_looks_for() -> None:
    columns = crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert wide == ["Loss", "Accuracy", "Goodput", "Failure", "Failed-On"]
    assert shown == ["Phase", "Nodes", "Progress", "ETA", "Attempt", "Restarts", "Reason", "Age"]


@pytest.mark.parametrize(
    "column", crd()["spec"]["versions"][0]["additionalPrinterColumns"], ids=lambda column: column["name"]
)
def test_each_column_shows_a_field_of_its_type(column: dict[str, Any]) -> None:
    if column["jsonPath"].startswith(".metadata."):
        assert column["type"] == "date"
        return
    schema = ROOT
    for part in column["jsonPath"].strip(".").split("."):
        schema = schema["additionalProperties"] if "additionalProperties" in schema else schema["properties"][part]
    assert schema["type"] == column["type"]


def test_status_and_scale_are_subresources() -> None:
    subresources = crd()["spec"]["versions"][0]["subresources"]
    assert subresources["status"] == {}
    assert subresources["scale"] == {
        "specReplicasPath": ".spec.nodes",
        "statusReplicasPath": ".status.nodes.total",
        "labelSelectorPath": ".status.selector",
    }


def test_what_has_no_structural_schema_is_refused_when_it_is_generated() -> None:
    class Either(BaseModel):
        field: int | list[int]

    with pytest.raises(TypeError, match="no structural schema"):
        structural(Either)


def test_a_status_that_was_written_reads_back_as_it_was() -> None:
    assert DDPJobStatus.model_validate(DDPJobStatus().model_dump(mode="json", by_alias=True)) == DDPJobStatus()


def test_a_file_that_is_out_of_date_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddpjob_operator.api.crd.rendered", lambda: "another")
    assert main(["--check"]) == 1
    assert "run `make generate`" in capsys.readouterr().err
