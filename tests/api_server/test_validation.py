"""Who refuses a wrong spec: the API server, where it enforces CEL, and otherwise the operator, in the status."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator

from ddpjob_operator.runtime.errors import ApiError


async def failure(cluster: Cluster, name: str = "digits") -> tuple[str, str]:
    """Reason and message with which the operator has failed a job."""
    status = await cluster.phase_is("Failed", name)
    failed = next(item for item in status["conditions"] if item["type"] == "Failed")
    return failed["reason"], failed["message"]


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"env": [{"name": "RANK", "value": "0"}]}, "reserved for the operator; remove it"),
        ({"env": [{"name": "MASTER_ADDR", "value": "x"}]}, "reserved for the operator; remove it"),
        ({"env": [{"name": "LD_PRELOAD", "value": "/x.so"}]}, "reserved for the operator; remove it"),
        ({"entrypoint": {"module": "a", "script": "/b.py"}}, "set; keep one of them"),
        ({"elastic": {"minNodes": 3}}, "minNodes"),
        ({"elastic": {"minNodes": 1}, "args": ["--strategy", "pipeline"]}, "same number of ranks only; remove elastic"),
        ({"restart": {"scope": "Live"}, "args": ["--strategy=fsdp"]}, "use --strategy hsdp, or scope InPlace"),
        ({"args": ["--strategy=hsdp"]}, "or use --strategy fsdp"),
    ],
)
async def test_a_spec_that_breaks_a_rule_between_fields_is_refused(
    cluster: Cluster, operator: Operator, spec: dict[str, Any], words: str
) -> None:
    if await cluster.enforces_cel():
        with pytest.raises(ApiError, match=words) as refused:
            await cluster.apply_job(**spec)
        assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    else:
        await cluster.apply_job(**spec)
        reason, message = await failure(cluster)
        assert reason == "InvalidSpec"
        assert words in message
    assert await cluster.pods() == []


async def test_a_spec_that_cel_cannot_judge_is_refused_by_the_operator(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"rules": [{"messagePattern": "(", "action": "Fail"}]})
    reason, message = await failure(cluster)
    assert reason == "InvalidSpec"
    assert "spec.restart.rules[0].messagePattern" in message
    assert await cluster.pods() == []


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("made_with", "edit", "field"),
    [
        ({"args": ["--task=digits"]}, {"args": ["--task=other"]}, "args"),
        ({}, {"image": "registry.example/other:1"}, "image"),
        ({"resources": {"limits": {"cpu": "1"}}}, {"resources": None}, "resources"),
        ({}, {"nodes": 3}, "nodes"),
    ],
    ids=["changed", "added", "removed", "nodes"],
)
async def test_an_immutable_field_does_not_change_while_the_job_runs(
    cluster: Cluster, operator: Operator, made_with: dict[str, Any], edit: dict[str, Any], field: str
) -> None:
    await cluster.apply_job(**made_with)
    pods = await cluster.gang_exists()
    await cluster.runs(*(pod["metadata"]["name"] for pod in pods))
    await cluster.phase_is("Running")
    before = (await cluster.job())["spec"]
    if await cluster.enforces_cel():
        with pytest.raises(ApiError, match=f"spec.{field} is immutable: delete the job and apply it again") as refused:
            await cluster.edit_job(**edit)
        assert (refused.value.status, refused.value.reason) == (422, "Invalid")
        assert (await cluster.job())["spec"] == before
    else:
        await cluster.edit_job(**edit)
        degraded = await cluster.condition("Degraded", "SpecChanged")
        assert degraded["message"].startswith(f"spec.{field} changed while the job runs")
    assert [pod["metadata"]["uid"] for pod in await cluster.pods()] == [pod["metadata"]["uid"] for pod in pods]


async def test_a_field_that_may_change_is_accepted_beside_the_rules(cluster: Cluster, operator: Operator) -> None:
    job = await cluster.apply_job(elastic={"minNodes": 1}, restart={"maxRestarts": 3})
    await cluster.gang_exists()
    edited = await cluster.edit_job(
        nodes=3, restart={"maxRestarts": 4}, snapshots={"keep": 2}, activeDeadlineSeconds=60
    )
    assert edited["metadata"]["generation"] > job["metadata"]["generation"]


async def test_default_pods_are_allowed_where_the_restricted_profile_is_enforced(
    cluster: Cluster, operator: Operator
) -> None:
    await enforce_restricted(cluster)
    await cluster.apply_job(spares=1, restart={"scope": "InPlace"})
    await cluster.gang_exists()


async def test_pods_that_the_restricted_profile_forbids_are_refused_with_its_words(
    cluster: Cluster, operator: Operator
) -> None:
    await enforce_restricted(cluster)
    await cluster.apply_job(podTemplate={"spec": {"schedulerName": "none", "securityContext": {"runAsNonRoot": False}}})
    # admission of Pod Security profiles is on by default since 1.23
    if await cluster.minor_version() < 23:
        await cluster.gang_exists()
        return
    degraded = await cluster.condition("Degraded", "Forbidden")
    assert "violates PodSecurity" in degraded["message"]
    assert "runAsNonRoot != true" in degraded["message"]
    assert "Change podTemplate's securityContext, or the Pod Security level of the namespace." in degraded["message"]
    assert await cluster.pods() == []


async def enforce_restricted(cluster: Cluster) -> None:
    """The namespace enforces the restricted Pod Security profile, on servers that have it."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{cluster.namespace}"
    await cluster.client.merge_patch(path, "namespaces", {"metadata": {"labels": labels}})


HUGE = 2**63 - 1
KIB = "x" * 1024


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"nodes": -1}, "spec.nodes"),
        ({"nodes": 0}, "spec.nodes"),
        ({"nodes": HUGE}, "spec.nodes"),
        ({"procsPerNode": HUGE}, "spec.procsPerNode"),
        ({"spares": -1}, "spec.spares"),
        ({"restart": {"maxRestarts": HUGE}}, "spec.restart.maxRestarts"),
        ({"activeDeadlineSeconds": -1}, "spec.activeDeadlineSeconds"),
        ({"snapshots": {"keep": -1}}, "spec.snapshots.keep"),
        ({"env": [{"name": "A", "value": KIB * 300}]}, "spec.env"),
        ({"env": [{"name": f"A{number}", "value": KIB} for number in range(300)]}, "spec.env"),
        ({"args": [KIB * 300]}, "spec.args"),
        ({"restart": {"rules": [{"action": "Fail"}] * 33}}, "spec.restart.rules"),
        (
            {"restart": {"rules": [{"action": "Fail", "messagePattern": "x" * 513}]}},
            "spec.restart.rules.messagePattern",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_counts_and_texts_beyond_all_bounds_are_refused_by_the_schema(
    cluster: Cluster, spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await cluster.apply_job(**spec)
    assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    assert field in re.sub(r"\[\d+\]", "", refused.value.message)  # newer API servers name the item, too
    with pytest.raises(ApiError) as missing:
        await cluster.job()
    assert missing.value.not_found
