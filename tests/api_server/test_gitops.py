"""What `kubectl wait` and GitOps tools (Argo CD, Flux) rely on: conditions and generations that follow the spec."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.api import API_VERSION

JOB = "ddpjob.training.ddpjob.io/digits"
MET = f"{JOB} condition met\n"


async def kubectl(cluster: Cluster, *arguments: str, stdin: str | None = None) -> str:
    """What it prints to standard output."""
    program = Path(sys.executable).parent / "kubectl"
    command = [str(program), "--kubeconfig", str(cluster.kubeconfig), "-n", cluster.namespace, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, text=True)
    print(done.stderr, file=sys.stderr)  # of a busy machine it has warnings, too
    return done.stdout


async def waited_for(cluster: Cluster, condition: str) -> str:
    patience = f"--timeout={PATIENCE_SECONDS:.0f}s"
    return await kubectl(cluster, "wait", f"--for=condition={condition}", "ddpjob/digits", patience)


async def test_kubectl_wait_takes_a_condition_for_met_after_an_edit(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.edit_job(restart={"maxRestarts": 4})
    assert await waited_for(cluster, "Running") == MET

    await cluster.edit_job(suspend=True)
    await cluster.phase_is("Suspended")
    await cluster.edit_job(activeDeadlineSeconds=3600)
    assert await waited_for(cluster, "Suspended") == MET

    await cluster.edit_job(suspend=False)
    again = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt=1)]
    await cluster.ends(*again)
    ended = await cluster.phase_is("Succeeded")
    await cluster.edit_job(cleanPodPolicy="All")
    assert await waited_for(cluster, "Complete") == MET
    after = await cluster.status()
    assert after.pop("observedGeneration") == (await cluster.job())["metadata"]["generation"]
    unchanged = {"observedGeneration", "conditions"}
    assert {name: value for name, value in after.items() if name not in unchanged} == {
        name: value for name, value in ended.items() if name not in unchanged
    }


async def test_a_job_that_is_applied_again_as_it_is_differs_in_nothing(cluster: Cluster, operator: Operator) -> None:
    """kubectl, and Argo CD with `ServerSideApply=true`, compare lists as a whole: a default in an item would be a
    difference for ever."""
    rules = [{"messagePattern": "Xid", "action": "ExcludeNode"}, {"exitCodes": [3], "action": "Fail"}]
    spec = {"nodes": 2, "restart": {"rules": rules}, "podTemplate": {"spec": {"schedulerName": "none"}}}
    job = {"apiVersion": API_VERSION, "kind": "DDPJob", "metadata": {"name": "digits"}, "spec": spec}
    assert await kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(job)) == f"{JOB} created\n"
    await cluster.gang_exists()
    assert await kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(job)) == f"{JOB} unchanged\n"
    await kubectl(cluster, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(job))
    assert (await cluster.job())["metadata"]["generation"] == 1
