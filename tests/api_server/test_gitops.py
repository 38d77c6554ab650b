"""What `kubectl wait` and GitOps tools (Argo CD, Flux) rely on: conditions and generations that follow the spec."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.api_server.harness import Cluster, Operator


async def kubectl(cluster: Cluster, *arguments: str, stdin: str | None = None) -> str:
    """What it prints, errors included."""
    program = Path(sys.executable).parent / "kubectl"
    command = [str(program), "--kubeconfig", str(cluster.kubeconfig), "-n", cluster.namespace, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, text=True)
    return done.stdout + done.stderr


async def is_met(cluster: Cluster, condition: str) -> bool:
    said = await kubectl(cluster, "wait", f"--for=condition={condition}", "ddpjob/digits", "--timeout=20s")
    return said == "ddpjob.training.ddpjob.io/digits condition met\n"


async def test_kubectl_wait_takes_a_condition_for_met_after_an_edit(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.edit_job(restart={"maxRestarts": 4})
    assert await is_met(cluster, "Running")

    await cluster.edit_job(suspend=True)
    await cluster.phase_is("Suspended")
    await cluster.edit_job(activeDeadlineSeconds=3600)
    assert await is_met(cluster, "Suspended")

    await cluster.edit_job(suspend=False)
    again = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt=1)]
    await cluster.ends(*again)
    ended = await cluster.phase_is("Succeeded")
    await cluster.edit_job(cleanPodPolicy="All")
    assert await is_met(cluster, "Complete")
    after = await cluster.status()
    assert after.pop("observedGeneration") == (await cluster.job())["metadata"]["generation"]
    unchanged = {"observedGeneration", "conditions"}
    assert {name: value for name, value in after.items() if name not in unchanged} == {
        name: value for name, value in ended.items() if name not in unchanged
    }
