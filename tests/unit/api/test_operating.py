"""docs/operating.md tells the truth: its YAML is valid, its reasons are ours, its samples are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.status import DDPJobStatus, Goodput
from ddpjob_operator.wire.jobs import parse_job

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operating.md").read_text()
CODE = "\n".join(path.read_text() for path in (ROOT / "operator/ddpjob_operator").rglob("*.py"))

BLOCKS = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "apiVersion:" not in block]
"""Parts of a spec; what has an apiVersion is an object of Kubernetes' own."""
WORDS = sorted(set(re.findall(r"`([A-Z][A-Za-z]+)`", PAGE)))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split(":")[0])
def test_each_yaml_is_a_valid_spec(block: str) -> None:
    spec = yaml.safe_load(block)
    job = parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": spec}, strict=True)
    assert set(spec) <= job.spec.model_dump(by_alias=True).keys()


@pytest.mark.parametrize("word", WORDS)
def test_each_phase_condition_and_reason_is_one_that_the_operator_knows(word: str) -> None:
    assert re.search(rf"\b{word}\b", CODE), f"{word} stands nowhere in the operator"


def test_every_sample_is_led_to() -> None:
    samples = {path.name for path in (ROOT / "manifests/samples").glob("*.yaml")} - {"ddpjob.yaml"}
    linked = set(re.findall(r"manifests/samples/([-a-z]+\.yaml)", PAGE))
    assert linked == samples


def test_every_field_of_the_status_that_is_named_exists() -> None:
    named = set(re.findall(r"`status\.([a-zA-Z]+)`", PAGE))
    assert named <= {str(field.alias) for field in DDPJobStatus.model_fields.values()}


def test_every_cause_of_the_ledger_is_named() -> None:
    causes = {str(field.alias) for field in Goodput.model_fields.values() if field.annotation is float}
    assert {cause for cause in causes if f"`{cause}`" not in PAGE} == set()
