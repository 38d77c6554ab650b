"""`ddpjob submit` and `ddpjob.DDPJob`: from an edited line on this machine to its output on two nodes."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.scenario import NODES, Scenario
from tests.support.command import beside, to_cluster
from tests.support.waiting import CLUSTER_SECONDS, eventually
from tests.support.wheels import wheel

from ddpjob import ApiError, DDPJob, Job, JobFailed
from ddpjob_operator.api.status import DDPJobStatus, Goodput

SCRIPT = """
import sys
import torch.distributed as dist
from pkg.model import layers
import greeting
dist.init_process_group("gloo")
with open("config.txt") as config:
    print("rank", dist.get_rank(), "layers", layers, "config", config.read(), "arguments", sys.argv[1:], flush=True)
with open(f"seen-{dist.get_rank()}.txt", "a") as seen:
    seen.write(f"{layers} ")
with open(f"seen-{dist.get_rank()}.txt") as seen:
    print("seen", seen.read().strip(), greeting.TEXT, flush=True)
dist.destroy_process_group()
"""


def ddpjob(scenario: Scenario, folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # nodes of a test cluster share the cores of one machine
    return subprocess.run(
        [*beside(), command, "-n", scenario.kubectl.namespace, *arguments],
        cwd=folder,
        env=to_cluster(scenario.kubectl.kubeconfig) | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def test_an_edited_line_runs_on_two_nodes(scenario: Scenario, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "config.txt").write_text("a")
    (folder / "pkg" / "model.py").write_text("layers = 2")
    wheel(folder / "wheels")
    (folder / "requirements.txt").write_text("--no-index\n./wheels/greeting-1.0-py3-none-any.whl\n")
    options = ("train.py", "--nodes", str(NODES), "-e", "OMP_NUM_THREADS", "--requirements", "requirements.txt")
    first = ddpjob(scenario, folder, "submit", *options, "--", "--lr", "3e-4")
    assert first.returncode == 0, first.stdout
    for rank in range(NODES):
        line = f"[rank {rank}] rank {rank} layers 2 config a arguments ['--lr', '3e-4']"
        assert line in first.stdout, first.stdout
    assert "[rank 0] ddpjob: installed 1 package of requirements.txt" in first.stdout, first.stdout

    (folder / "pkg" / "model.py").write_text("layers = 3")
    second = ddpjob(scenario, folder, "submit", *options)
    assert second.returncode == 0, second.stdout
    assert "in place of the one that was Succeeded" in second.stdout
    assert "[rank 0] seen 2 3 hello from greeting" in second.stdout, (
        "what a script writes with a relative path is kept on the volume"
    )

    back = ddpjob(scenario, folder, "code", "train", "--to", os.fspath(tmp_path / "back"))
    assert back.returncode == 0, back.stdout
    assert (tmp_path / "back" / "pkg" / "model.py").read_text() == "layers = 3"

    (folder / "train.py").write_text("raise SystemExit('wrong flag')")
    failed = ddpjob(scenario, folder, "submit", *options)
    assert failed.returncode == 1, failed.stdout
    assert "train: Failed" in failed.stdout
    assert "wrong flag" in failed.stdout


LOOP = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
rank, address = dist.get_rank(), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
store = dist.TCPStore(*address, dist.get_world_size(), is_master=rank == 0)  # as some frameworks make one
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began, stepped = None, []
for inputs, targets in DataLoader(TensorDataset(torch.ones(80, 4), torch.ones(80, 1)), batch_size=2):
    began = began or time.time()
    time.sleep(0.5)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    stepped.append(time.time())
print("trained for", time.time() - began, "s", flush=True)
steps = [after - before for before, after in zip(stepped, stepped[1:])]
print("steps took", min(steps), "to", max(steps), "s", flush=True)
dist.destroy_process_group()
"""
ACTIVITIES = {name for name, field in Goodput.model_fields.items() if field.annotation is float}


def test_a_script_that_knows_nothing_of_ddpjob_is_seen(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    done = ddpjob(scenario, tmp_path, "submit", "train.py", "--nodes", str(NODES), "-e", "OMP_NUM_THREADS")
    assert done.returncode == 0, done.stdout
    stopwatch = float(re.search(r"\[rank 0\] trained for (\S+) s", done.stdout)[1])
    status = json.loads(scenario.kubectl.run("get", "ddpjob", "train", "-o", "json").stdout)["status"]
    progress = status["progress"]
    assert progress["step"] == 40
    assert 0 <= progress["loss"] < 10
    # an average of steps: how long they take is the machine's matter
    shortest, longest = map(float, re.search(r"\[rank 0\] steps took (\S+) to (\S+) s", done.stdout).groups())
    assert 0.9 * 2 * NODES / longest <= progress["samplesPerSecond"] <= 1.1 * 2 * NODES / shortest
    goodput = DDPJobStatus.model_validate(status).goodput
    seconds = sum(getattr(goodput, name) for name in ACTIVITIES)
    assert goodput.ratio * seconds == pytest.approx(stopwatch, rel=0.05)


MODULE = """
import torch.distributed as dist

def train(layers, fails=False):
    dist.init_process_group("gloo")
    print(f"<b>{layers}</b> layers on rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()
    if fails:
        raise ValueError("no such layer")
"""


def test_a_function_is_submitted_and_followed_from_python(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", os.fspath(scenario.kubectl.kubeconfig))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "functions_of_a_test.py").write_text(MODULE)
    train = importlib.import_module("functions_of_a_test").train
    job = DDPJob(function=train, kwargs={"layers": 2}, nodes=NODES, env={"OMP_NUM_THREADS": "1"}, folder=tmp_path)
    with job.submit(namespace=scenario.kubectl.namespace) as submitted:
        lines = {str(line) for line in submitted.logs(grep="layers")}
        assert lines == {f"[rank {rank}] <b>2</b> layers on rank {rank} of {NODES}" for rank in range(NODES)}
        assert submitted.wait(CLUSTER_SECONDS).phase == "Succeeded"
        assert "<td>Succeeded</td>" in submitted._repr_html_()

    wrong = replace(job, kwargs={"layers": 2, "fails": True}, spec={"restart": {"maxRestarts": 0}})
    with wrong.submit(namespace=scenario.kubectl.namespace) as submitted:
        with pytest.raises(JobFailed, match="ValueError: no such layer") as failure:
            submitted.wait(CLUSTER_SECONDS)
        assert failure.value.status.phase == "Failed"
        with pytest.raises(ApiError, match="cannot be changed any more"):
            submitted.suspend()
        submitted.cancel()
    with pytest.raises(ApiError, match="there is no DDPJob train"):
        Job.get("train", namespace=scenario.kubectl.namespace)


BUSY = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    began = time.process_time()
    while time.process_time() < began + 0.1:
        pass
"""
LIMITED = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: limited}
spec:
  nodes: 1
  code: {path: .}
  entrypoint: {script: train.py}
  resources: {limits: {cpu: 500m}}
"""


def test_a_pod_that_its_cpu_limit_stops_is_said_to_be_slowed_by_it(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BUSY)
    (tmp_path / "job.yaml").write_text(LIMITED)
    submitted = ddpjob(scenario, tmp_path, "submit", "job.yaml", "-d")
    assert submitted.returncode == 0, submitted.stdout

    said = r"CPU limit: pod limited-0-0 .*ran into it in \d+% .*, and was stopped for \d+\.\d s"
    eventually(
        lambda: re.search(said, ddpjob(scenario, tmp_path, "why", "limited").stdout),
        "the CPU limit is named as what slows the job",
        CLUSTER_SECONDS,
    )
