"""Pods whose ranks hold the model together and recover live, under real launchers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.support.waiting import eventually
from tests.trainer.launch.conftest import Pod, StartPod
from tests.trainer.launch.test_live_recovery import KILLED_AFTER, assert_went_on, losses
from tests.trainer.live.pods import PATH, events, live_environment

from ddp_trainer.train.live import SHARDS_SINCE

pytestmark = pytest.mark.skipif(torch.__version__ < SHARDS_SINCE, reason=f"needs PyTorch {SHARDS_SINCE}")

STEPS = 60
AFTER = 5
"""Steps of a later attempt."""
ARGS = ("--task", "live_tasks:Slow", "--global-batch", "24", "--max-steps", str(STEPS), "--lr", "0.003")
CLIPPED = ("--clip-norm", "0.5")


def start(start_pod: StartPod, node_rank: int, shared: Path, *args: str, nodes: int = 2, **env: str) -> Pod:
    argv = ["--module", "ddp_trainer.train", "--", *ARGS, *CLIPPED, *args]
    several = {"DDPJOB_NODES": str(nodes), "DDPJOB_PROCS_PER_NODE": "2"}
    return start_pod("", argv=argv, **live_environment(node_rank, shared) | several | env)


@pytest.fixture(scope="module")
def unbroken_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of one rank that holds the whole model, and that nothing happens to."""
    directory = tmp_path_factory.mktemp("unbroken")
    shared = directory / "shared"
    options = ("--strategy", "single", "--max-steps", str(STEPS + AFTER), "--task-options", "seconds=0")
    argv = ["--module", "ddp_trainer.train", "--", *ARGS, *CLIPPED, *options]
    pod = Pod(directory, shared, argv, {"DDPJOB_SHARED": str(shared), "PYTHONPATH": PATH})
    try:
        assert pod.wait() == 0, pod.log
    finally:
        pod.end()
    return losses(shared)


@pytest.mark.parametrize(("victim", "local_rank", "resumed_by"), [(0, 1, "hsdp"), (1, 0, "fsdp")])
def test_the_other_pod_takes_the_next_step_and_a_new_one_gets_each_shard(
    start_pod: StartPod,
    tmp_path: Path,
    unbroken_losses: dict[int, float],
    victim: int,
    local_rank: int,
    resumed_by: str,
) -> None:
    shared = tmp_path / "shared"
    args = ("--strategy", "hsdp", "--task-options", "ranks=4")
    often = {"DDPJOB_SNAPSHOT_EVERY": "4steps"}
    pods = [start(start_pod, node_rank, shared, *args, **often) for node_rank in range(2)]
    eventually(lambda: (pods[1].status()["step"] or 0) >= KILLED_AFTER, f"training has begun; log:\n{pods[1].log}")
    os.kill(pods[victim].pids(2)[2 * victim + local_rank], signal.SIGKILL)
    assert pods[victim].wait() == 1
    assert pods[victim].message["reason"] == "WorkerKilled"
    pods[victim] = start(start_pod, victim, shared, *args, **often)
    assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.log for pod in pods)

    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 4]
    assert_went_on(shared, unbroken_losses, STEPS)

    manifest = json.loads((shared / f"checkpoints/digits/step-{STEPS:012d}/manifest.json").read_text())
    assert (manifest["worldSize"], manifest["strategy"]) == (2, "hsdp"), "the pod with rank 0 saves"
    rest = ("--strategy", resumed_by, "--max-steps", str(STEPS + AFTER), "--task-options", "ranks=0")
    nodes, live = (2, "true") if resumed_by == "hsdp" else (1, "false")
    later = {"DDPJOB_ATTEMPT": "1", "DDPJOB_LIVE": live}
    pods = [start(start_pod, node_rank, shared, *rest, nodes=nodes, **later) for node_rank in range(nodes)]
    assert [pod.wait() for pod in pods] == [0] * nodes, "\n".join(pod.log for pod in pods)
    assert [event["step"] for event in events(shared, "resumed")] == [STEPS]
    found = losses(shared)
    assert sorted(found)[-AFTER:] == list(range(STEPS + 1, STEPS + AFTER + 1))
    assert max(abs(found[step] - unbroken_losses[step]) for step in found) < 1e-5


@pytest.mark.parametrize("torn", ["sum", "meet", "share"])
def test_a_step_that_is_torn_between_local_ranks_is_taken_by_whole_pods_or_by_none(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], torn: str
) -> None:
    shared = tmp_path / "shared"
    last = 20  # twice torn_task.TORN_AT
    task = ("--task", "torn_task:Torn", "--task-options", f"torn={torn}")
    args = ("--strategy", "hsdp", *task, "--max-steps", str(last))
    pods = [start(start_pod, node_rank, shared, *args) for node_rank in range(2)]
    assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.log for pod in pods)

    assert [event["worldSize"] for event in events(shared, "regrouped")] == [4]
    assert_went_on(shared, unbroken_losses, last)


def test_a_pod_that_is_asked_to_stop_leaves_and_the_last_ones_save(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float]
) -> None:
    shared = tmp_path / "shared"
    args = ("--strategy", "hsdp", "--task-options", "ranks=2")
    pods = [start(start_pod, node_rank, shared, *args) for node_rank in range(2)]
    eventually(lambda: (pods[1].status()["step"] or 0) >= KILLED_AFTER, f"training has begun; log:\n{pods[1].log}")
    pods[0].process.send_signal(signal.SIGTERM)
    assert pods[0].wait() == 143, pods[0].log
    assert pods[0].message["reason"] == "Left"
    pods[1].process.send_signal(signal.SIGTERM)
    assert pods[1].wait() == 143, pods[1].log
    assert pods[1].message["reason"] == "Preempted"
    found = losses(shared)
    manifest = json.loads((shared / f"checkpoints/digits/step-{max(found):012d}/manifest.json").read_text())
    assert manifest["kind"] == "preempted"
    assert max(abs(found[step] - unbroken_losses[step]) for step in found) < 1e-5


def test_a_model_that_is_sharded_over_pods_is_refused(start_pod: StartPod, tmp_path: Path) -> None:
    pod = start(start_pod, 0, tmp_path / "shared", "--strategy", "fsdp")
    assert pod.wait() == 64, pod.log
    assert pod.message["reason"] == "UserError"
    assert "--strategy fsdp" in pod.message["message"]
    assert "use --strategy hsdp" in pod.message["message"]
