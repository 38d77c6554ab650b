"""On real nodes: a suspended job saves a snapshot, leaves no pod, and goes on from it to the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize
from tests.cluster.conftest import Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.scenario import NODES, SNAPSHOT_STEPS, STEPS, Scenario
from tests.support.command import ddpjob
from tests.support.waiting import eventually

from ddpjob import Job

HIT = STEPS // 3
"""The step from which on the job is suspended: far from both ends."""


def edit(scenario: Scenario, **spec: Any) -> None:
    scenario.kubectl.run("patch", "ddpjob", scenario.name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def test_a_suspended_job_resumes_where_it_was_to_the_same_bits_and_goes_when_its_time_is_up(
    scenario: Scenario, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # a snapshot that waits for a busy disk may take longer than the default, after which ranks are killed
    scenario.train(cleanPodPolicy="All", shutdownSeconds=120)
    scenario.wait_trained(HIT)
    edit(scenario, suspend=True)
    suspended = scenario.wait_phase("Suspended")
    # asked, because the record's two watches may lag each other; the last finalizer goes after the status is written
    eventually(lambda: scenario.kubectl.list("pods") == [], "no pod is left")
    assert (suspended["attempt"], suspended["restarts"]) == (0, 0)
    assert "lastFailure" not in suspended
    of_job = (scenario.name, "--namespace", scenario.kubectl.namespace)
    config, newest = scenario.kubectl.kubeconfig, str(suspended["snapshot"]["step"])
    oldest = str(SNAPSHOT_STEPS)
    listed = json.loads(ddpjob(config, "snapshots", "ls", *of_job, "--on-volume", "-o", "json").stdout)["snapshots"]
    steps = [found["step"] for found in listed]
    assert (steps[0], steps[-1]) == (int(newest), SNAPSHOT_STEPS)
    assert steps == sorted(set(steps), reverse=True)
    assert listed[0]["kind"] == "preempted"
    assert [found for found in listed if not found.get("bytes") or "problem" in found or found["setAside"]] == []
    assert f"{oldest.zfill(12)}: removed" in ddpjob(config, "snapshots", "rm", *of_job, "--step", oldest).stdout
    monkeypatch.setenv("KUBECONFIG", os.fspath(config))
    with Job.get(scenario.name, namespace=scenario.kubectl.namespace) as job:
        assert [(found.step, found.problem) for found in job.snapshots()] == [(step, None) for step in steps[:-1]]
    ddpjob(config, "snapshots", "restore", *of_job, "--step", newest)
    exported = ddpjob(config, "snapshots", "export", *of_job, "--to", os.fspath(tmp_path / "models"))
    files = [tmp_path / "models" / name for name in ("model.pt", "model.safetensors")]
    assert exported.stdout == f"step {newest}: wrote {files[0]} and {files[1]}\n"
    eventually(lambda: scenario.kubectl.list("pods") == [], "no pod that read the volume is left")

    edit(scenario, suspend=False)
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
    assert status["suspendedSeconds"] > 0
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []

    records = scenario.records()
    resumed = records.event("resumed", attempt=1)
    assert resumed, records.events
    step = int(resumed["step"])
    assert (records.snapshots[step]["kind"], records.snapshots[step]["attempt"]) == ("preempted", 0), records.events
    assert suspended["snapshot"]["step"] == step, "the status knows what the job will resume from"
    assert HIT <= step < STEPS
    assert weights_of(files[1]) == records.snapshots[step]["weights"], "the model that came is that of the snapshot"
    assert zipfile.is_zipfile(files[0]), "as torch.save writes"
    # not one step was trained twice
    assert {line["attempt"] for line in records.losses if line["step"] <= step} == {0}
    assert len(records.losses) == STEPS
    assert records.trajectory == unbroken.records.trajectory
    assert records.weights == unbroken.records.weights

    eventually(lambda: scenario.pods(attempt=1) == [], "no pod of the gang is left")
    early = ddpjob(config, "logs", *of_job, "--attempt", "0", "--rank", "1", "--tail", "1")
    assert [line.partition("]")[0] for line in early.stdout.splitlines()] == ["[rank 1"], early
    assert "a short-lived pod reads the logs from the volume" in early.stderr

    job = Job.get(scenario.name, namespace=scenario.kubectl.namespace)
    edit(scenario, ttlSecondsAfterFinished=0)
    scenario.history.wait(
        lambda: scenario.history.latest("ddpjobs", scenario.name) is None, "the job is deleted after its end"
    )
    kept = scenario.kubectl.get("pvc", f"{scenario.name}-shared")
    assert kept is not None
    assert "deletionTimestamp" not in kept["metadata"]
    late = ddpjob(config, "logs", *of_job).stdout.splitlines()
    assert f"[rank 0] finished after {STEPS} steps" in "\n".join(late)
    assert {line.partition("]")[0] for line in late} == {f"[rank {rank}" for rank in range(NODES)}
    with job:
        assert sorted(map(str, job.logs())) == sorted(late), "the client reads the same"


def weights_of(file: Path) -> str:
    """The digest of a model's tensors that `READ_VOLUME` takes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(deserialize(file.read_bytes())):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode() + bytes(tensor["data"]))
    return digest.hexdigest()
