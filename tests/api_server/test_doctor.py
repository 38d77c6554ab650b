"""`ddpjob doctor` and `ddpjob debug` against a real API server: before a job runs, and after it has failed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.api_server.harness import CLI_AGENT, Cluster, Operator
from tests.support.command import COMMAND, to_cluster
from tests.support.terminal import all_shown
from tests.support.waiting import PATIENCE_SECONDS, eventually_async
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
HOOKS = f"{ADMISSION}/validatingwebhookconfigurations"
POLICIES_SINCE = 30


async def doctor(cluster: Cluster, kubeconfig: Path, *options: str) -> tuple[int | None, str]:
    with patch.dict(os.environ, KUBECONFIG=str(kubeconfig)):
        return await here("doctor", "-n", cluster.namespace, *options)


async def here(*command: str) -> tuple[int | None, str]:
    """Exit code and output of the command in this process, which costs a tenth of one of its own."""
    done = await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, app, command), PATIENCE_SECONDS)
    return done.exit_code, done.output


async def findings(cluster: Cluster, kubeconfig: Path) -> dict[str, dict[str, Any]]:
    code, out = await doctor(cluster, kubeconfig, "-o", "json")
    found = json.loads(out)
    assert (code, found["namespace"]) == (1, cluster.namespace)
    return {finding["check"]: finding for finding in found["findings"]}


async def forbid_pods(cluster: Cluster) -> None:
    """A quota without pods, once it is counted."""
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    body = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0", "requests.storage": "50Gi"}}}
    await cluster.client.create(path, "resourcequotas", body)

    async def counted() -> bool:
        found = await cluster.client.get(f"{path}/none", "resourcequotas")
        return bool((found.get("status") or {}).get("used"))

    await eventually_async(counted, "the quota has been counted")


async def fail_closed(cluster: Cluster) -> str:
    """A webhook for the pods of this namespace alone, with a Service that does not exist."""
    mark = {"doctor": cluster.namespace}
    await cluster.client.merge_patch(
        f"/api/v1/namespaces/{cluster.namespace}", "namespaces", {"metadata": {"labels": mark}}
    )
    hook = {
        "name": "pods.guard.example",
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": mark},
        "clientConfig": {"service": {"namespace": cluster.namespace, "name": "guard"}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }
    body = {"metadata": {"name": cluster.namespace}, "webhooks": [hook]}
    await cluster.client.create(HOOKS, "validatingwebhookconfigurations", body)
    return f"{HOOKS}/{cluster.namespace}"


async def test_what_would_stop_a_job_is_found_and_what_may_not_be_read_is_said(
    cluster: Cluster, operator: Operator, tmp_path: Path
) -> None:
    await forbid_pods(cluster)
    hook = await fail_closed(cluster)
    try:
        seen = await findings(cluster, cluster.kubeconfig)
    finally:
        await cluster.client.delete(hook, "validatingwebhookconfigurations")
    assert {check for check, finding in seen.items() if finding["level"] == "ok"} >= {
        "api", "rights", "operator", "pod security", "limits", "network", "clock",
    }  # fmt: skip
    assert "renewed" in seen["operator"]["message"]
    assert (seen["quota"]["level"], seen["storage"]["level"], seen["nodes"]["level"]) == ("problem",) * 3
    assert seen["quota"]["message"] == f"nothing is left of pods in namespace {cluster.namespace}"
    if await cluster.minor_version() >= 21:  # EndpointSlices
        assert seen["webhooks"]["level"] == "problem"
        assert f"the Service {cluster.namespace}/guard has no ready endpoint" in seen["webhooks"]["message"]

    assert seen["admission"]["level"] == "problem"
    assert seen["admission"]["message"].startswith("the pod of a job is refused: ")

    nobody = await cluster.kubeconfig_of("nobody", tmp_path / "nobody")
    hidden = await findings(cluster, nobody)
    assert hidden["api"]["level"] == "ok"
    assert hidden["rights"]["level"] == "problem"
    assert "you may not create ddpjobs" in hidden["rights"]["message"]
    unread = {check: finding["message"] for check, finding in hidden.items() if finding["level"] == "unknown"}
    assert unread["quota"] == "you have no right to list resourcequotas"
    assert unread["operator"] == "you have no right to list deployments"
    assert unread["admission"] == "you have no right to create ddpjobs"
    assert {
        "webhooks",
        "pod security",
        "limits",
        "storage",
        "nodes",
        "gpus",
        "image",
        "network",
        "mesh",
    } <= unread.keys()
    code, text = await doctor(cluster, nobody)
    assert code == 1
    assert "1 problem, 0 warnings, 12 unknown" in text.splitlines()[-1]


async def test_what_a_policy_says_of_a_job_is_known_before_one_is_sent(cluster: Cluster, operator: Operator) -> None:
    if (minor := await cluster.minor_version()) < POLICIES_SINCE:
        pytest.skip(f"Kubernetes 1.{minor} has no ValidatingAdmissionPolicy; 1.{POLICIES_SINCE} and newer have")
    name, here = cluster.namespace, {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    rule = {"apiGroups": ["training.ddpjob.io"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["*"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule], "namespaceSelector": here},
        "validations": [{"expression": "'team' in object.metadata.?labels.orValue({})", "message": "label the team"}],
    }
    bodies = {
        "validatingadmissionpolicies": policy,
        "validatingadmissionpolicybindings": {"policyName": name, "validationActions": ["Deny"]},
    }
    try:
        for kind, spec in bodies.items():
            await cluster.client.create(f"{ADMISSION}/{kind}", kind, {"metadata": {"name": name}, "spec": spec})

        async def admission() -> str:
            _, out = await doctor(cluster, cluster.kubeconfig, "-o", "json")
            found = {finding["check"]: finding["message"] for finding in json.loads(out)["findings"]}
            return found["admission"] if "is refused" in found["admission"] else ""

        said = await eventually_async(admission, "the policy is in force")
    finally:
        for kind in bodies:
            await cluster.client.delete(f"{ADMISSION}/{kind}/{name}", kind)
    assert said.startswith("a job is refused: ")
    assert "label the team" in said


async def debug_pods(cluster: Cluster) -> list[dict[str, Any]]:
    return [pod for pod in await cluster.pods() if pod["metadata"]["labels"].get("training.ddpjob.io/role") == "debug"]


async def debug_pod_starts(cluster: Cluster) -> dict[str, Any]:
    """The pod of `ddpjob debug`, once it runs at the address of a node of the gang."""
    (pod,) = await eventually_async(lambda: debug_pods(cluster), "a pod is there for the shell")
    await cluster.runs(pod["metadata"]["name"])
    return pod


async def gang_of_attempt(cluster: Cluster, attempt: int) -> list[str]:
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
    for pod in pods:
        await cluster.bound(pod, f"node-of-{pod}")
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    return pods


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in pod["spec"]["containers"][0]["env"]}


def node_of(pod: dict[str, Any]) -> str:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (field,) = affinity["nodeSelectorTerms"][0]["matchFields"]
    return str(field["values"][0])


async def test_a_shell_beside_a_job_is_no_part_of_it(cluster: Cluster, operator: Operator, tmp_path: Path) -> None:
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    of_job = ("debug", "digits", "-n", cluster.namespace)
    environment = to_cluster(cluster.kubeconfig)
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    await cluster.apply_job(
        restart={"maxRestarts": 1, "backoff": {"initialSeconds": 0}}, env=[{"name": "TOKEN", "valueFrom": secret}]
    )
    first = await gang_of_attempt(cluster, 0)
    code, refused = await here(*of_job)
    assert code == 2
    assert "no pod of digits has failed; kubectl exec -it" in refused

    # the failed pod is gone, and the next attempt runs
    await cluster.ends(first[1], code=1)
    await eventually_async(lambda: is_ending(cluster, first[0]), "the gang is deleted")
    await cluster.reap(first[0])
    second = await gang_of_attempt(cluster, 1)
    debugging = await asyncio.create_subprocess_exec(*COMMAND, *of_job, "--for", "5m", env=environment, **pipes)
    made = await debug_pod_starts(cluster)
    assert debugging.stdout is not None
    command = await asyncio.wait_for(debugging.stdout.readline(), PATIENCE_SECONDS)
    name = made["metadata"]["name"]
    assert command.decode() == f"kubectl exec -it -n {cluster.namespace} {name} -c trainer -- sh\n"
    assert (made["spec"]["activeDeadlineSeconds"], node_of(made)) == (300, "node-of-digits-0-1")
    assert (variables(made)["DDPJOB_ATTEMPT"], variables(made)["DDPJOB_NODE_RANK"]) == ("0", "1")
    assert variables(made)["TOKEN"] == secret

    # not even its failure is one of the job's: the operator sees it, while the command cannot delete the pod
    debugging.send_signal(signal.SIGSTOP)
    await cluster.ends(name, code=1)
    await cluster.ends(second[0], code=1)
    status = await cluster.phase_is("Failed")
    assert status["lastFailure"]["podName"] == second[0]
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert [pod["metadata"]["name"] for pod in await debug_pods(cluster)] == [name]
    debugging.send_signal(signal.SIGCONT)
    _, said = await asyncio.wait_for(debugging.communicate(), PATIENCE_SECONDS)
    assert debugging.returncode == 0, said
    assert "the pod itself is gone" in said.decode()
    assert await debug_pods(cluster) == []

    # the failed pod is there; on a terminal, with kubectl, a shell is opened
    asked = [entry.verb for entry in await cluster.asked(CLI_AGENT) if entry.name == name]
    assert set(asked) == {"create", "get", "delete"}
    assert [entry for entry in await cluster.asked() if entry.name == name] == [], "of the operator"
    assert asked.count("delete") == 1
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    kubectl.chmod(0o755)
    ours, theirs = os.openpty()
    on_terminal = await asyncio.create_subprocess_exec(
        *COMMAND,
        *of_job,
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    made = await debug_pod_starts(cluster)
    assert node_of(made) == "node-of-digits-1-0"
    assert await asyncio.wait_for(on_terminal.wait(), PATIENCE_SECONDS) == 7
    shown = all_shown(ours)
    assert f"exec -it -n {cluster.namespace} {made['metadata']['name']} -c trainer -- sh" in shown
    assert await debug_pods(cluster) == []


async def is_ending(cluster: Cluster, name: str) -> bool:
    return any(
        "deletionTimestamp" in pod["metadata"] for pod in await cluster.pods() if pod["metadata"]["name"] == name
    )
