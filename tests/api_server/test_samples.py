"""Each sample is taken by a real API server as it stands, and leads to what its first line says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.wire.jobs import parse_job

FOLDER = Path(__file__).parents[2] / "manifests/samples"
SAMPLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

PHASES = {"suspended": "Suspended", "data": "Pending"}
"""Where a job comes to while no pod of its runs; all others are Starting."""

PODS = {"elastic": 4, "deadlines": 1, "suspended": 0, "coscheduling": 0, "data": 1}
"""How many pods are created then; two for the others. Of `data` it is the one that fetches."""


def sample(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return document


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_a_valid_job_and_says_what_it_is_for(name: str) -> None:
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")
    assert parse_job(sample(name), strict=True).spec.managed_by is None


async def test_every_sample_leads_to_its_pods_or_to_a_condition_that_says_why_not(
    cluster: Cluster, operator: Operator
) -> None:
    for name in SAMPLES:
        await cluster.client.create(paths.jobs(cluster.namespace), "ddpjobs", sample(name))
    jobs = {name: sample(name)["metadata"]["name"] for name in SAMPLES}

    async def pods() -> dict[str, int]:
        owners = [pod["metadata"]["labels"]["training.ddpjob.io/job"] for pod in await cluster.pods()]
        return {name: owners.count(job) for name, job in jobs.items()}

    async def settled() -> bool:
        found = await pods()
        return found == {name: PODS.get(name, 2) for name in SAMPLES}

    try:
        await eventually_async(settled, "every sample has its pods")
    except AssertionError:
        pytest.fail(f"pods by sample: {await pods()}")
    for name in SAMPLES:
        if name != "coscheduling":
            await cluster.phase_is(PHASES.get(name, "Starting"), jobs[name])
    missing = await cluster.condition("Degraded", "PodGroupMissing", "coscheduling")
    assert "install" in missing["message"]
