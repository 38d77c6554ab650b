"""A job that an older operator started goes on under this one, and under this CRD, as if nothing had happened."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster
from tests.api_server.history import recorded
from tests.api_server.server import CRD, CRDS
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.wire.jobs import parse_job

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNNING = sorted(FIXTURES.glob("running-*.json"))
WITHOUT_FINALIZERS = FIXTURES / "before-finalizers.json"
ENDS = {
    "running": (0, 0),
    "restarting": (1, 1),
    "waiting": (1, 1),
    "fetched": (0, 0),
    "suspended": (1, 0),
    "finished": (0, 0),
}
"""Attempt and restarts of each of its jobs at the end. One waits for its restart, and one was suspended: they were to
have another attempt.
"""


@pytest.fixture(params=RUNNING, ids=lambda path: path.stem)
def left_behind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The objects of a running job, as an older operator wrote them."""
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def test_an_object_of_an_older_operator_loads(left_behind: dict[str, Any]) -> None:
    job = parse_job(left_behind["job"])
    assert (job.status.phase, job.status.attempt, job.spec.ranks_per_node) == ("Running", 0, 1)


@pytest.mark.fault(18)
async def test_nothing_restarts_when_crd_and_operator_are_upgraded_under_a_running_job(
    cluster: Cluster, start_operator: StartOperator, left_behind: dict[str, Any]
) -> None:
    pods = await _recreate(cluster, left_behind)
    async with recorded(cluster) as history:
        await start_operator(RESYNC_SECONDS=1)

        async def looked_at_twice() -> bool:
            lists = [entry for entry in await cluster.asked() if (entry.verb, entry.resource) == ("list", "pods")]
            return len(lists) >= 3

        await eventually_async(looked_at_twice, "the new operator has looked at the job again and again")
        status = await cluster.status()
        assert (status["phase"], status["attempt"], status.get("restarts", 0)) == ("Running", 0, 0)
        assert not [item for item in status["conditions"] if item["type"] == "Degraded" and item["status"] == "True"]
        await cluster.ends(*pods)
        ended = await cluster.phase_is("Succeeded")
    assert (ended["attempt"], ended["restarts"], ended["disruptions"]) == (0, 0, 0)
    assert history.broken_rules() == []
    writes = [
        entry for entry in await cluster.cost() if entry.verb in ("create", "delete") and entry.resource == "pods"
    ]
    assert writes == []


@pytest.mark.fault(18)
async def test_jobs_in_every_phase_go_on_under_an_operator_that_holds_pods_by_finalizers(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    left = json.loads(WITHOUT_FINALIZERS.read_text())
    pods = await _recreate_all(cluster, left)
    before = await cluster.status("finished")
    await start_operator()
    await cluster.gang_exists(1, job="waiting")
    assert {name for name, uid in pods.items() if uid not in await _uids(cluster)} == set()
    await cluster.edit_job("suspended", suspend=False)
    for job, (attempt, _) in ENDS.items():
        if job != "finished":
            names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt, job=job)]
            await cluster.runs(*names)
            await cluster.phase_is("Running", job)
            await cluster.ends(*names)
            await cluster.phase_is("Succeeded", job)
    found = {name: await cluster.status(name) for name in ENDS}
    assert {name: (status["attempt"], status["restarts"]) for name, status in found.items()} == ENDS
    assert found["finished"] == before
    assert await _changed_pods(cluster, "delete") == []
    made = {f"{job}-1-{rank}" for job in ("waiting", "suspended") for rank in range(2)}
    assert set(await _changed_pods(cluster, "create")) == made


async def _uids(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await cluster.pods()}


async def _changed_pods(cluster: Cluster, verb: str) -> list[str]:
    return [entry.name for entry in await cluster.cost() if (entry.verb, entry.resource) == (verb, "pods")]


@pytest.mark.fault(18)
async def test_a_job_goes_on_when_its_crd_is_downgraded_and_upgraded_under_it(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """The older CRD lacks fields of spec and status that the job has; the server then prunes them from all it shows."""
    await start_operator(RESYNC_SECONDS=1)
    current = yaml.safe_load(CRD.read_text())
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}}, shutdownSeconds=20)
    pods = await _run(cluster, 0)
    try:
        await _install(cluster, _older(current))

        async def pruned() -> bool:
            return "shutdownSeconds" not in (await cluster.job())["spec"]

        await eventually_async(pruned, "the older CRD is in force")
        await cluster.ends(pods[1], code=1)  # its record is written by an operator that knows more than the CRD
        pods = await _run(cluster, 1)
    finally:
        await _install(cluster, current)
    await cluster.apply_job("later", shutdownSeconds=20)
    await cluster.gang_exists(job="later")
    await cluster.ends(*pods)
    ended = await cluster.phase_is("Succeeded")
    assert (ended["attempt"], ended["restarts"]) == (1, 1)


async def _run(cluster: Cluster, attempt: int) -> list[str]:
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    return pods


def _older(crd: dict[str, Any]) -> dict[str, Any]:
    """The CRD without some fields, as it was before they were added."""
    older = deepcopy(crd)
    fields = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    fields["spec"]["properties"]["shutdownSeconds"] = None  # what a merge patch takes away
    fields["spec"]["x-kubernetes-validations"] = None
    for field in ("goodput", "snapshot", "nodeFailures", "disruptions"):
        fields["status"]["properties"][field] = None
    return older


async def _install(cluster: Cluster, crd: dict[str, Any]) -> None:
    await cluster.client.merge_patch(f"{CRDS}/{crd['metadata']['name']}", "crds", {"spec": crd["spec"]})


async def _recreate(cluster: Cluster, old: dict[str, Any]) -> list[str]:
    """Put the objects into this cluster: the same but for what a server gives them. The names of the running pods."""
    document = deepcopy(old["job"])
    document["metadata"] = {"name": document["metadata"]["name"]}
    status = document.pop("status")
    made = await cluster.client.create(paths.jobs(cluster.namespace), "ddpjobs", document)
    uid = made["metadata"]["uid"]
    job_status = paths.job_status(cluster.namespace, "digits")
    await cluster.client.merge_patch(job_status, "ddpjobs/status", {"status": status})
    text = json.dumps(old).replace(old["job"]["metadata"]["uid"], uid).replace('"research"', f'"{cluster.namespace}"')
    mine = json.loads(text)
    await cluster.client.create(paths.services(cluster.namespace), "services", mine["service"])
    await cluster.client.create(paths.claims(cluster.namespace), "persistentvolumeclaims", mine["claim"])
    for pod in mine["pods"]:
        await cluster.client.create(paths.pods(cluster.namespace), "pods", pod)
    names = [pod["metadata"]["name"] for pod in mine["pods"]]
    await cluster.runs(*names)
    return names


async def _recreate_all(cluster: Cluster, old: dict[str, Any]) -> dict[str, str]:
    """The same for objects of several jobs, with what the nodes said of the pods. Returns the pods' uids by name."""
    text = json.dumps(old).replace('"research"', f'"{cluster.namespace}"')
    for job in old["jobs"]:
        name, document = job["metadata"]["name"], {key: job[key] for key in ("apiVersion", "kind", "spec")}
        document["metadata"] = {"name": name}
        made = await cluster.client.create(paths.jobs(cluster.namespace), "ddpjobs", document)
        status = {"status": job["status"]}
        await cluster.client.merge_patch(paths.job_status(cluster.namespace, name), "ddpjobs/status", status)
        text = text.replace(job["metadata"]["uid"], made["metadata"]["uid"])
    mine, uids = json.loads(text), {}
    for service in mine["services"]:
        await cluster.client.create(paths.services(cluster.namespace), "services", service)
    for claim in mine["claims"]:
        await cluster.client.create(paths.claims(cluster.namespace), "persistentvolumeclaims", claim)
    for pod in mine["pods"]:
        del pod["metadata"]["uid"]
        made = await cluster.client.create(paths.pods(cluster.namespace), "pods", pod)
        await cluster.report(made["metadata"]["name"], pod["status"])
        uids[made["metadata"]["name"]] = made["metadata"]["uid"]
    return uids
