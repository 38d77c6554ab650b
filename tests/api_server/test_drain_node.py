"""`ddpjob drain-node` against a real API server: a node is cordoned, and the pods of jobs on it are evicted."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
import yaml
from tests.api_server.harness import CLI_AGENT, REPOSITORY, Cluster, Object, Operator
from tests.api_server.test_follow import Answer, answer_to, ddpjob
from tests.support.command import beside, to_cluster
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

from ddpjob_operator.cli import completion
from ddpjob_operator.cli.drain_node import Draining
from ddpjob_operator.cli.main import app
from ddpjob_operator.cluster import paths
from ddpjob_operator.follow.draining import on_node

NODES = "/api/v1/nodes"
RBAC = "rbac.authorization.k8s.io/v1"
IN_PLACE = {"scope": "InPlace", "backoff": {"initialSeconds": 0}}


@pytest.fixture
async def node(cluster: Cluster) -> AsyncIterator[str]:
    """A Kubernetes node without a kubelet."""
    name = f"node-{cluster.namespace}"
    await cluster.client.create(NODES, "nodes", {"metadata": {"name": name}})
    yield name
    await cluster.client.delete(f"{NODES}/{name}", "nodes")


@pytest.fixture
async def gang(cluster: Cluster, operator: Operator, node: str) -> tuple[str, str]:
    """A job of which one pod runs on the node, and the other elsewhere; and a pod that only has its labels."""
    await cluster.apply_job(restart=IN_PLACE)
    here, elsewhere = await cluster.gang_exists()
    names: tuple[str, str] = here["metadata"]["name"], elsewhere["metadata"]["name"]
    await cluster.bound(names[0], node)
    await cluster.bound(names[1], "elsewhere")
    labels = {name: value for name, value in here["metadata"]["labels"].items() if not name.endswith("/uid")}
    container = {"name": "trainer", "image": "x"}
    bystander = {
        "metadata": {"name": "bystander", "labels": labels},
        "spec": {"containers": [container], "nodeName": node},
    }
    await cluster.client.create(paths.pods(cluster.namespace), "pods", bystander)
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    return names


async def drain(cluster: Cluster, node: str, *options: str) -> Answer:
    return await ddpjob(cluster, "drain-node", node, *options)


async def start(cluster: Cluster, node: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*beside(), "drain-node", node),
        env=to_cluster(cluster.kubeconfig),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> Answer:
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    return Answer(process.returncode, out.decode(), err.decode())


async def is_cordoned(cluster: Cluster, node: str) -> bool:
    found = await cluster.client.get(f"{NODES}/{node}", "nodes")
    return bool(found["spec"].get("unschedulable"))


async def deleting(cluster: Cluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in await cluster.pods() if "deletionTimestamp" in pod["metadata"]]


async def is_deleting(cluster: Cluster, pod: str) -> None:
    async def found() -> bool:
        return pod in await deleting(cluster)

    await eventually_async(found, f"{pod} is being deleted")


async def goes(cluster: Cluster, pod: str) -> None:
    """What the kubelet does with a pod that was evicted."""
    await cluster.ends(pod, code=143)
    await cluster.reap(pod)


async def evictions(cluster: Cluster) -> list[tuple[str, int]]:
    """The evictions that the command has asked for, with what the API server answered."""
    asked = await cluster.asked(CLI_AGENT)
    return [(entry.name, entry.code) for entry in asked if entry.resource == "pods/eviction"]


async def protected(cluster: Cluster) -> str:
    """The path of a PodDisruptionBudget that spares no pod of the gang, once it is counted."""
    version = "policy/v1" if await cluster.minor_version() >= 21 else "policy/v1beta1"
    budgets = f"/apis/{version}/namespaces/{cluster.namespace}/poddisruptionbudgets"
    selector = {"matchExpressions": [{"key": "training.ddpjob.io/uid", "operator": "Exists"}]}
    body = {"metadata": {"name": "whole"}, "spec": {"minAvailable": 2, "selector": selector}}
    await cluster.client.create(budgets, "poddisruptionbudgets", body)

    async def counted() -> bool:
        status = (await cluster.client.get(f"{budgets}/whole", "poddisruptionbudgets")).get("status") or {}
        return status.get("currentHealthy") == 2 and status.get("observedGeneration") == 1

    await eventually_async(counted, "the budget has been counted")
    return f"{budgets}/whole"


def role_of_the_page() -> list[Object]:
    """The rules of the ClusterRole that docs/operating.md shows."""
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/operating.md").read_text(), re.DOTALL)
    (found,) = (role for block in blocks if "kind: ClusterRole\n" in block and (role := yaml.safe_load(block)))
    rules: list[Object] = found["rules"]
    return rules


async def test_the_pods_of_jobs_on_the_node_are_evicted_and_no_others(
    cluster: Cluster, node: str, gang: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = gang
    follows = (
        f"{cluster.namespace}/digits: all ranks save a snapshot, and the gang restarts from it in place, with a new "
        "pod for node rank 0 (restart.scope InPlace)\n"
        f"1 other pod stays on {node}; kubectl drain is for those\n"
    )
    foretold = await drain(cluster, node, "--dry-run")
    assert foretold == (
        0,
        f"{node} would be cordoned\n{follows}1 pod would be evicted; nothing was changed (--dry-run)\n",
        "",
    )
    assert (await is_cordoned(cluster, node), await deleting(cluster), await evictions(cluster)) == (False, [], [])

    draining = asyncio.create_task(drain(cluster, node))
    await is_deleting(cluster, here)
    assert await is_cordoned(cluster, node)
    assert await deleting(cluster) == [here]
    await goes(cluster, here)
    done = await draining
    assert done == (
        0,
        f"{node} is cordoned\n{follows}no pod of a DDPJob is left on {node}\n"
        f"kubectl uncordon {node} takes it into service again\n",
        "ddpjob: waiting for 1 pod to end\n",
    )
    assert await evictions(cluster) == [(here, 201)]
    pods = {pod["metadata"]["name"]: pod for pod in await cluster.pods()}
    assert {"bystander", elsewhere} <= pods.keys()
    assert await deleting(cluster) == []

    again = await drain(cluster, node)
    assert (again.code, again.err) == (0, "")
    assert again.out.startswith(f"{node} is cordoned already\n1 other pod stays")
    assert f"no pod of a DDPJob is on {node}\n" in again.out

    monkeypatch.setattr(completion, "SECONDS_FOR_NAMES", PATIENCE_SECONDS)
    root = typer.main.get_command(app)
    offered = await asyncio.to_thread(completion.complete, root, ["drain-node", node[:-1]])
    assert offered == [completion.Candidate(node)]


async def test_an_eviction_that_a_budget_refuses_is_tried_again(
    cluster: Cluster, node: str, gang: tuple[str, str]
) -> None:
    here, _ = gang
    budget = await protected(cluster)
    answers: list[Answer] = []

    async def refused() -> Answer | None:
        """A command that the machine lets wait may have no answer yet when its time is up."""
        answers[:] = [await drain(cluster, node, "--timeout", "3s")]
        assert answers[0].code == 1, answers
        return None if "it was not asked yet" in answers[0].err else answers[0]

    late = await eventually_async(refused, "the eviction is refused", instead=lambda: answers)
    assert (
        f"error: 1 pod of a DDPJob is still on {node} after 3s\n  {cluster.namespace}/{here} is not evicted" in late.err
    )
    assert "disruption budget" in late.err.splitlines()[-1]
    assert late.out.endswith(
        f"{node} stays cordoned; the same command goes on; kubectl uncordon {node} takes it into service again\n"
    )
    assert await deleting(cluster) == []

    before = len(await evictions(cluster))
    process = await start(cluster, node)

    async def asked_again() -> bool:
        return len(await evictions(cluster)) > before

    await eventually_async(asked_again, "the eviction was asked for again")
    # what the command asked that gave up may have another answer: it did not wait for its last one
    assert {code for _, code in (await evictions(cluster))[before:]} == {429}
    await cluster.client.delete(budget, "poddisruptionbudgets")
    await is_deleting(cluster, here)
    await goes(cluster, here)
    done = await ended(process)
    assert done.code == 0, done
    *earlier, last = (await evictions(cluster))[before:]
    assert {code for _, code in earlier} <= {429, 500}, "500 to one that comes while the budget goes"
    assert last == (here, 201)


async def test_after_ctrl_c_a_second_run_waits_for_what_the_first_has_evicted(
    cluster: Cluster, node: str, gang: tuple[str, str]
) -> None:
    here, _ = gang
    process = await start(cluster, node)
    await is_deleting(cluster, here)
    process.send_signal(signal.SIGINT)
    stopped = await ended(process)
    assert stopped.code == 130, stopped
    assert stopped.out.endswith(
        f"{node} stays cordoned; evicted: {cluster.namespace}/{here}; the same command goes on; "
        f"kubectl uncordon {node} takes it into service again\n"
    )
    assert "Traceback" not in stopped.err

    late = await drain(cluster, node, "--timeout", "1s")
    assert late.code == 1, late
    assert f"{cluster.namespace}/digits: {here} ends already" in late.out
    assert re.search(rf"  {cluster.namespace}/{here} has until [\d:]+ UTC to end\n", late.err), late.err

    second = asyncio.create_task(drain(cluster, node))
    await goes(cluster, here)
    done = await second
    assert done.code == 0, done
    assert await evictions(cluster) == [(here, 201)], "once, by the first"


async def test_a_new_pod_that_has_the_name_of_the_one_that_was_seen_is_not_evicted(
    cluster: Cluster, node: str, gang: tuple[str, str]
) -> None:
    here, _ = gang
    (seen,) = [pod for pod in await cluster.pods() if pod["metadata"]["name"] == here]
    earlier = seen | {"metadata": seen["metadata"] | {"uid": "of-the-pod-before"}}
    draining = Draining(cluster.client, node)
    await draining.evict(on_node([earlier]).held)
    assert await deleting(cluster) == []
    await draining.evict(on_node([seen]).held)
    assert await deleting(cluster) == [here]


async def test_a_node_that_there_is_not_and_rights_that_are_missing_are_named_and_nothing_is_changed(
    cluster: Cluster, node: str, gang: tuple[str, str], tmp_path: Path
) -> None:
    assert await drain(cluster, "no-such-node") == (
        2,
        "",
        "error: there is no Kubernetes node no-such-node; kubectl get nodes lists them\n",
    )
    kubeconfig = await cluster.kubeconfig_of("drainer", tmp_path / "kubeconfig")
    role, binding = f"/apis/{RBAC}/clusterroles", f"/apis/{RBAC}/clusterrolebindings"
    name = f"drain-{cluster.namespace}"
    subject = {"kind": "ServiceAccount", "name": "drainer", "namespace": cluster.namespace}
    reference = {"apiGroup": RBAC.partition("/")[0], "kind": "ClusterRole", "name": name}
    await cluster.client.create(role, "clusterroles", {"metadata": {"name": name}, "rules": []})
    body = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
    await cluster.client.create(binding, "clusterrolebindings", body)

    async def drained(rules: list[Object], expected: str, *options: str) -> Answer:
        """With these rules, once the API server's authorizer has seen them."""
        await cluster.client.merge_patch(f"{role}/{name}", "clusterroles", {"rules": rules})
        found: list[Any] = []

        async def answered() -> Answer | None:
            with patch.dict(os.environ, {"KUBECONFIG": str(kubeconfig)}):
                found[:] = [await answer_to("drain-node", node, *options)]
            return found[0] if expected in found[0].out + found[0].err else None

        return await eventually_async(answered, expected, instead=lambda: found)

    rules = role_of_the_page()
    named = {
        "get nodes": [],
        "list pods in all namespaces": rules[:1],
        f"get ddpjobs in namespace {cluster.namespace}": rules[:2],
        f"create pods/eviction in namespace {cluster.namespace}": [*rules[:2], rules[3]],
        f"patch nodes and to create pods/eviction in namespace {cluster.namespace}": [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
            rules[1],
            rules[3],
        ],
    }
    for right, given in named.items():
        answer = await drained(given, f"error: you have no right to {right}; nothing was changed; docs/")
        assert (answer.code, answer.out) == (2, "")
    assert (await is_cordoned(cluster, node), await deleting(cluster)) == (False, [])
    try:
        allowed = await drained(rules, "nothing was changed (--dry-run)", "--dry-run")
        assert allowed.code == 0, allowed
    finally:
        await cluster.client.delete(f"{binding}/{name}", "clusterrolebindings")
        await cluster.client.delete(f"{role}/{name}", "clusterroles")
