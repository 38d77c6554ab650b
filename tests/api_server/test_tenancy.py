"""What an administrator grants: bounds and defaults by namespace, in an operator that serves two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.api_server.conftest import NewCluster, StartOperator
from tests.api_server.harness import Cluster, Operator

from ddpjob_operator.settings import EXIT_BAD_SETTING


def granting(folder: Path, document: dict[str, Any]) -> Path:
    file = folder / "tenancy.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


async def test_bounds_and_defaults_are_those_of_the_jobs_namespace(
    new_cluster: NewCluster, cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    students, research = cluster, await new_cluster()
    file = granting(
        tmp_path,
        {
            "defaults": {"image": "registry.example/trainer:2", "resources": {"limits": {"memory": "1Gi"}}},
            "bounds": {"resources": {"nvidia.com/gpu": 8}},
            "namespaces": {students.namespace: {"bounds": {"maxNodes": 2, "resources": {"nvidia.com/gpu": 1}}}},
        },
    )
    await start_operator(CONFIG=file, NAMESPACES=f"{students.namespace},{research.namespace}")
    eight = {"limits": {"nvidia.com/gpu": 8}}
    for where in (students, research):
        await where.apply_job(nodes=3, resources=eight)
    refused = await students.phase_is("Failed")
    (condition,) = (item for item in refused["conditions"] if item["type"] == "Failed")
    assert condition["reason"] == "BeyondBounds"
    where = f"that this cluster's administrator allows in namespace {students.namespace}"
    assert condition["message"] == (
        f"spec.nodes: 3 is more than the 2 {where}; use fewer; "
        f"spec.resources.limits[nvidia.com/gpu]: a pod uses 8, more than the 1 {where}; use less"
    )
    assert await students.pods() == []
    for pod in await research.gang_exists(nodes=3):
        (trainer,) = pod["spec"]["containers"]
        assert trainer["image"] == "registry.example/trainer:2"
        assert trainer["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "8"}


async def test_a_job_that_was_refused_costs_one_write(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    await start_operator(CONFIG=granting(tmp_path, {"bounds": {"maxNodes": 1}}))
    await cluster.apply_job(nodes=2)
    await cluster.phase_is("Failed")
    assert [(entry.verb, entry.resource) for entry in await cluster.cost()] == [("patch", "ddpjobs/status")]


async def test_an_operator_with_a_file_that_cannot_be_right_does_not_start(
    start_operator: StartOperator, tmp_path: Path
) -> None:
    file = granting(tmp_path, {"bounds": {"maxNodes": "many"}})
    operator = await start_operator(ready=False, CONFIG=file)
    assert operator.process is not None
    assert await operator.process.wait() == EXIT_BAD_SETTING
    (line,) = operator.log.read_text().splitlines()
    assert line.startswith(f"ddpjob-operator: DDPJOB_OPERATOR_CONFIG {file}: bounds.maxNodes: is 'many'")


async def test_a_job_that_runs_is_not_stopped_by_a_bound_that_comes_later(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    first = await start_operator()
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await first.kill()
    await start_operator(CONFIG=granting(tmp_path, {"bounds": {"maxNodes": 1}}))
    await cluster.ends(names[0], code=1)
    await cluster.gang_exists(attempt=1)
    assert (await cluster.status())["phase"] == "Restarting"


async def test_a_job_that_reaches_into_its_node_is_refused_before_anything_is_made(
    cluster: Cluster, operator: Operator
) -> None:
    volumes = [{"name": "root", "hostPath": {"path": "/"}}]
    await cluster.apply_job(podTemplate={"spec": {"schedulerName": "none", "volumes": volumes, "hostPID": True}})
    refused = await cluster.phase_is("Failed")
    (condition,) = (item for item in refused["conditions"] if item["type"] == "Failed")
    assert condition["reason"] == "BeyondBounds"
    assert condition["message"].startswith("spec.podTemplate.spec.hostPID: True (Host Namespaces) breaks")
    assert "spec.podTemplate.spec.volumes[root].hostPath: {'path': '/'} (HostPath Volumes)" in condition["message"]
    assert [(entry.verb, entry.resource) for entry in await cluster.cost()] == [("patch", "ddpjobs/status")]
