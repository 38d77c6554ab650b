"""restart.scope InPlace on a real API server: survivors are relabelled, and only dead pods are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import NO_PROGRESS, Cluster, Object, Operator
from tests.api_server.history import recorded
from tests.api_server.proxy import Call, Fault, FaultProxy
from tests.api_server.test_restarts import KILLED, finish_attempt
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

from ddpjob_operator.runtime.login import log_in

LABELS = ("attempt", "node-rank", "nodes")
IN_PLACE = {"scope": "InPlace", "backoff": {"initialSeconds": 0}}


async def running_in_place(cluster: Cluster, nodes: int = 3, **spec: Any) -> list[Object]:
    """A job in place all of whose nodes run; its pods by node rank."""
    await cluster.apply_job(nodes=nodes, **{"restart": IN_PLACE} | spec)
    pods = await cluster.gang_exists(nodes=nodes)
    await cluster.runs(*(pod["metadata"]["name"] for pod in pods))
    await cluster.phase_is("Running")
    return pods


async def pods_are(cluster: Cluster, expected: dict[str, tuple[str, str, str]]) -> dict[str, Object]:
    """Wait until these pods, and no others, are there with their attempt, node rank and gang size."""

    async def reached() -> dict[str, Object] | None:
        pods = {pod["metadata"]["name"]: pod for pod in await cluster.pods()}
        return pods if {name: place_of(pod) for name, pod in pods.items()} == expected else None

    async def instead() -> str:
        return str({pod["metadata"]["name"]: place_of(pod) for pod in await cluster.pods()})

    try:
        return await eventually_async(reached, f"the pods are {expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}instead: {await instead()}") from None


def place_of(pod: Object) -> tuple[str, ...]:
    return tuple(pod["metadata"]["labels"].get(f"training.ddpjob.io/{label}", "") for label in LABELS)


async def test_what_died_is_replaced_and_the_others_are_relabelled_and_keep_their_pods(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(**NO_PROGRESS)
    async with recorded(cluster) as history:
        before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await running_in_place(cluster)}
        calls = len(await cluster.cost())
        await cluster.ends("digits-0-1", code=1, message=KILLED)
        places = {"digits-0-0": ("1", "0", "3"), "digits-1-1": ("1", "1", "3"), "digits-0-2": ("1", "2", "3")}
        after = await pods_are(cluster, places)
        assert all(after[name]["metadata"]["uid"] == before[name] for name in ("digits-0-0", "digits-0-2"))
        asked = Counter((entry.verb, entry.resource) for entry in (await cluster.cost())[calls:])
        assert {what: times for what, times in asked.items() if what[0] != "get"} == {
            ("patch", "ddpjobs/status"): 1,
            ("patch", "services"): 1,
            ("patch", "pods"): 3,  # two are relabelled, and the finalizer of one is removed
            ("delete", "pods"): 1,
            ("create", "pods"): 1,
        }
        await cluster.runs("digits-1-1")
        await cluster.phase_is("Running")
        await cluster.ends(*places, message={"version": 1, "attempt": 1, "outcome": "Succeeded", "reason": "Completed"})
        status = await cluster.phase_is("Succeeded")
    assert history.broken_rules() == []
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_the_loss_of_node_rank_0_moves_the_service_and_nobody_else(cluster: Cluster, operator: Operator) -> None:
    await running_in_place(cluster, nodes=2)
    await cluster.client.delete(f"/api/v1/namespaces/{cluster.namespace}/pods/digits-0-0", "pods")
    await pods_are(cluster, {"digits-1-0": ("1", "0", "2"), "digits-0-1": ("1", "1", "2")})
    selector = (await cluster.service())["spec"]["selector"]
    assert selector["training.ddpjob.io/attempt"] == "1"
    assert selector["training.ddpjob.io/node-rank"] == "0"


async def test_a_survivor_that_had_ended_in_its_old_attempt_is_replaced_and_not_counted(
    cluster: Cluster, operator: Operator
) -> None:
    async with recorded(cluster) as history:
        await running_in_place(cluster)
        await cluster.ends("digits-0-1", code=1, message=KILLED)
        await pods_are(
            cluster, {"digits-0-0": ("1", "0", "3"), "digits-1-1": ("1", "1", "3"), "digits-0-2": ("1", "2", "3")}
        )
        await cluster.runs("digits-1-1")
        await cluster.phase_is("Running")
        await cluster.ends("digits-0-2", code=1, message=KILLED | {"reason": "PeerLost", "attempt": 0})
        await pods_are(
            cluster, {"digits-0-0": ("1", "0", "3"), "digits-1-1": ("1", "1", "3"), "digits-1-2": ("1", "2", "3")}
        )
        await cluster.runs("digits-1-2")
        status = await cluster.phase_is("Running")
    assert history.broken_rules() == []
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_a_spare_takes_the_place_of_what_died(cluster: Cluster, operator: Operator) -> None:
    await running_in_place(cluster, nodes=2, spares=1)
    gang = {"digits-0-0": ("0", "0", "2"), "digits-0-1": ("0", "1", "2")}
    await pods_are(cluster, gang | {"digits-0-s0": ("0", "none", "2")})
    await cluster.runs("digits-0-s0")
    await cluster.ends("digits-0-0", code=1, message=KILLED)
    places = {"digits-0-s0": ("1", "0", "2"), "digits-0-1": ("1", "1", "2")}
    await pods_are(cluster, places | {"digits-1-s0": ("1", "none", "2")})
    status = await cluster.phase_is("Running")
    assert (status["attempt"], status["restarts"], status["internal"]["keptPods"]) == (
        1,
        1,
        {"digits-0-s0": 0, "digits-0-1": 1},
    )


@pytest.mark.parametrize("kind", ["PATCH pods", "POST pods"])
async def test_an_operator_that_dies_between_the_calls_leaves_nothing_half_done(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path, kind: str
) -> None:
    expected = {"digits-1-0": ("1", "0", "3"), "digits-0-1": ("1", "1", "3"), "digits-0-2": ("1", "2", "3")}
    broken, killed = asyncio.Event(), asyncio.Event()

    def strike(call: Call) -> Fault:
        return Fault.KILL_BEFORE if broken.is_set() and not killed.is_set() and call.kind == kind else Fault.PASS

    async with recorded(cluster) as history, FaultProxy(await log_in(), tmp_path, fault=strike) as proxy:
        operator = await start_operator(proxy.kubeconfig)

        async def kill() -> None:
            killed.set()
            await operator.kill()

        proxy.kill = kill
        await running_in_place(cluster)
        broken.set()
        await cluster.ends("digits-0-0", code=1, message=KILLED)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await killed.wait()
        await operator.kill()
        assert (await cluster.status())["attempt"] == 1
        assert {pod["metadata"]["name"]: place_of(pod) for pod in await cluster.pods()} != expected, "half done"
        await start_operator(proxy.kubeconfig)
        await pods_are(cluster, expected)
    assert history.broken_rules() == []
    assert (await cluster.status())["restarts"] == 1


async def test_a_gang_that_is_not_in_place_is_replaced_as_before(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await cluster.ends(names[1], code=1, message=KILLED)
    await finish_attempt(cluster, 1)
    deleted = [entry.name for entry in await cluster.cost() if (entry.verb, entry.resource) == ("delete", "pods")]
    assert sorted(deleted) == names, "both, where in place one would be kept"
