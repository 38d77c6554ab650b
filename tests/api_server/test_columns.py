"""`kubectl get ddpjobs`: what its columns show from the creation of a job to its end."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster
from tests.support.waiting import eventually_async

COLUMNS = ["NAME", "PHASE", "NODES", "PROGRESS", "ETA", "ATTEMPT", "RESTARTS", "REASON", "AGE"]
WIDE = [*COLUMNS, "LOSS", "ACCURACY", "GOODPUT", "FAILURE", "FAILED-ON"]


async def shown(cluster: Cluster, *arguments: str) -> dict[str, str]:
    """The row of the job by column, without empty cells. kubectl aligns the columns with spaces."""
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [str(kubectl), "--kubeconfig", str(cluster.kubeconfig), "-n", cluster.namespace, "get", "ddp", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    header, row = done.stdout.splitlines()
    columns = list(re.finditer(r"\S+ *", header))
    cells = {column[0].strip(): row[column.start() : column.end()].strip() for column in columns[:-1]}
    cells[columns[-1][0]] = row[columns[-1].start() :].strip()
    assert list(cells) == (WIDE if "wide" in arguments else COLUMNS)
    return {name: cell for name, cell in cells.items() if cell and name not in ("NAME", "AGE")}


def report(uid: str, step: int, **known: Any) -> str:
    return json.dumps({"version": 1, "uid": uid, "attempt": 0, "nodeRank": 0, "phase": "train", "step": step} | known)


async def test_the_columns_show_what_is_known_and_nothing_else(
    cluster: Cluster, start_operator: StartOperator, trainer: tuple[str, list[str]]
) -> None:
    ip, answers = trainer
    job = await cluster.apply_job(nodes=2)
    uid = job["metadata"]["uid"]
    assert await shown(cluster) == {}, "no operator has seen it"

    await start_operator(POLL_SECONDS=0.1, PROGRESS_SECONDS=0)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    starting = {"PHASE": "Starting", "NODES": "0/2", "ATTEMPT": "0", "RESTARTS": "0"}
    assert await shown(cluster) == starting

    answers.append(report(uid, 7))
    for rank, pod in enumerate(pods):
        await cluster.bound(pod, f"machine-{rank}")
    await cluster.runs(*pods, ip=ip)

    async def progress(expected: str) -> dict[str, str] | None:
        found = await shown(cluster)
        return found if found.get("PROGRESS") == expected else None

    running = await eventually_async(lambda: progress("7"), "a step, of a total that is unknown")
    assert running == starting | {"PHASE": "Running", "NODES": "2/2", "PROGRESS": "7"}

    answers.append(report(uid, 412, totalSteps=1000, etaSeconds=200.4, loss=0.25, metrics={"eval_accuracy": 0.96}))
    running = await eventually_async(lambda: progress("412/1000"), "a step of a known total")
    assert running == starting | {"PHASE": "Running", "NODES": "2/2", "PROGRESS": "412/1000", "ETA": "3m20s"}
    wide = await shown(cluster, "-o", "wide")
    assert running.items() <= wide.items()
    assert (wide["LOSS"], wide["ACCURACY"]) == ("0.25", "0.96")
    assert 0 <= float(wide["GOODPUT"]) <= 1
    assert not wide.keys() & {"FAILURE", "FAILED-ON"}

    await cluster.ends(pods[1], code=1)
    await cluster.gang_exists(attempt=1)
    restarting = await shown(cluster)
    assert (restarting["PHASE"], restarting["ATTEMPT"], restarting["RESTARTS"]) == ("Restarting", "1", "1")
    assert (restarting["REASON"], restarting["PROGRESS"]) == ("Failed", "412/1000")
    assert "ETA" not in restarting, "a job that does not train has no estimated end"
    wide = await shown(cluster, "-o", "wide")
    assert (wide["FAILURE"], wide["FAILED-ON"]) == ("Failed", "machine-1")


async def test_a_finished_job_shows_why(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply_job(nodes=1)
    (pod,) = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=1)]
    await cluster.runs(pod)
    await cluster.ends(pod)
    await cluster.phase_is("Succeeded")
    assert await shown(cluster) == {
        "PHASE": "Succeeded", "NODES": "1/1", "ATTEMPT": "0", "RESTARTS": "0", "REASON": "Completed",
    }  # fmt: skip
