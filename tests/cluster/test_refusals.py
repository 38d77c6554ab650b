"""What cannot work is refused when it is applied, in words that name the field, what is wrong and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.conftest import Operator
from tests.cluster.scenario import Scenario, digits_job

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"nodes": 0}, ("spec.nodes", "0", "greater than or equal to 1")),
    ({"nodes": 5000}, ("spec.nodes", "5000", "less than or equal to 1024")),
    ({"nodes": "two"}, ("spec.nodes", "type", "integer")),
    ({"procsPerNode": 65}, ("spec.procsPerNode", "65", "less than or equal to 64")),
    ({"snapshots": {"every": "soon"}}, ("spec.snapshots.every", "soon", "(steps|epochs|seconds)")),
    ({"snapshots": {"keep": 0}}, ("spec.snapshots.keep", "0", "greater than or equal to 1")),
    (
        {"shared": {"accessMode": "ReadOnly"}},
        ("spec.shared.accessMode", "ReadOnly", '"ReadWriteMany", "ReadWriteOnce"'),
    ),
    ({"shared": {"size": "ten"}}, ("spec.shared.size", "ten", "(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)")),
    ({"entrypoint": {"script": ""}}, ("spec.entrypoint.script", "at least 1")),
    ({"entrypoint": {"module": "a-b"}}, ("spec.entrypoint.module", "a-b")),
    ({"restart": {"maxRestarts": -1}}, ("spec.restart.maxRestarts", "-1", "greater than or equal to 0")),
    ({"env": [{"value": "1"}]}, ("spec.env", "name", "required")),
    ({"snapshot": {"every": "10steps"}}, ("unknown field", "snapshot")),
]


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=[" ".join(words[:2]) for _, words in REFUSED])
def test_kubectl_apply_refuses(operator: Operator, spec: dict[str, Any], words: tuple[str, ...]) -> None:
    done = operator.kubectl.apply(digits_job("refused", **spec), check=False)
    assert done.returncode != 0
    # kubectl puts some of it in its own words before the server sees it
    assert [word for word in words if word.lower() not in done.stderr.lower()] == [], done.stderr
    assert operator.kubectl.get("ddpjob", "refused") is None


CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"entrypoint": {"module": "a", "script": "/a.py"}},
        ("spec.entrypoint", "module", "script", "keep one of them"),
    ),
    ({"env": [{"name": "RANK", "value": "0"}]}, ("spec.env[0]", "reserved for the operator", "remove it")),
    ({"shared": {"claimName": "mine", "size": "1Gi"}}, ("spec.shared", "claimName", "size", "remove")),
]


@pytest.mark.parametrize(("spec", "words"), CONTRADICTIONS, ids=[words[0] for _, words in CONTRADICTIONS])
def test_a_contradiction_is_refused_by_the_server_or_at_once_by_the_operator(
    scenario: Scenario, spec: dict[str, Any], words: tuple[str, ...]
) -> None:
    """API servers check rules between fields from Kubernetes 1.25 on; before, the operator does."""
    by_server = scenario.kubectl.minor_version() >= 25
    done = scenario.kubectl.apply(digits_job(**spec), check=False)
    assert (done.returncode != 0) == by_server, done.stderr
    said = done.stderr
    if not by_server:
        status = scenario.wait_phase("Failed")
        said = next(condition["message"] for condition in status["conditions"] if condition["type"] == "Failed")
    assert [word for word in words if word not in said] == [], said
    assert scenario.history.of("pods") == []


@pytest.mark.parametrize(("gang", "install"), [("Coscheduling", "scheduler-plugins"), ("Volcano", "install Volcano")])
def test_a_scheduler_that_is_not_installed_is_said_with_the_way_out(
    scenario: Scenario, gang: str, install: str
) -> None:
    scenario.apply(scheduling={"gang": gang})

    def said() -> str | None:
        conditions = scenario.status.get("conditions") or []
        return next((item["message"] for item in conditions if item["reason"] == "PodGroupMissing"), None)

    message = scenario.history.wait(said, "the job says that there is no PodGroup")
    assert install in message
    assert f"remove scheduling.gang {gang}" in message
    assert scenario.history.of("pods") == []
