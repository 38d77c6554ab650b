"""`ddpjob doctor` against a real API server, by an administrator and by an account without rights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.api_server.harness import Cluster, Operator
from tests.support.command import COMMAND, to_cluster
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


async def doctor(cluster: Cluster, kubeconfig: Path, *options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "doctor", "-n", cluster.namespace, *options),
        env=to_cluster(kubeconfig),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    return process.returncode, out.decode()


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

    nobody = await cluster.kubeconfig_of("nobody", tmp_path / "nobody")
    hidden = await findings(cluster, nobody)
    assert hidden["api"]["level"] == "ok"
    assert hidden["rights"]["level"] == "problem"
    assert "you may not create ddpjobs" in hidden["rights"]["message"]
    unread = {check: finding["message"] for check, finding in hidden.items() if finding["level"] == "unknown"}
    assert unread["quota"] == "you have no right to list resourcequotas"
    assert unread["operator"] == "you have no right to list deployments"
    assert {"webhooks", "pod security", "limits", "storage", "nodes", "gpus", "image", "network"} <= unread.keys()
    code, text = await doctor(cluster, nobody)
    assert code == 1
    assert "1 problem, 0 warnings, 10 unknown" in text.splitlines()[-1]
