"""Ranks that recover live, under real launchers: one is killed, the others go on, and another joins in its place."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.trainer.launch.conftest import Pod, StartPod

from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.snapshots.trust.fence import Attempt

STEPS = 60
KILLED_AFTER = 10
TASKS = Path(__file__).parent.parent / "live"
ARGS = ("--task", "live_tasks:Slow", "--global-batch", "24", "--max-steps", str(STEPS), "--lr", "0.003")


def start(start_pod: StartPod, node_rank: int, shared: Path, **env: str) -> Pod:
    environment = {
        "DDPJOB_UID": "0b0c",
        "DDPJOB_SHARED": str(shared),
        "DDPJOB_NODES": "3",
        "DDPJOB_NODE_RANK": str(node_rank),
        "DDPJOB_LIVE": "true",
        "DDPJOB_SNAPSHOT_EVERY": "1000steps",
        "DDPJOB_STALL_MIN_SECONDS": "300",  # steps wait for a new rank
        "PYTHONPATH": os.pathsep.join([str(TASKS.parents[2] / "trainer_image"), str(TASKS)]),
    }
    return start_pod("", argv=["--module", "ddp_trainer.train", "--", *ARGS], **environment | env)


def events(shared: Path, kind: str) -> list[dict[str, Any]]:
    lines = (shared / "logs" / "digits" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def losses(shared: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_losses(shared / "logs" / "digits")}


@pytest.fixture(scope="module")
def unbroken_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of one rank that nothing happens to: the number of ranks changes no more than the order of sums."""
    directory = tmp_path_factory.mktemp("unbroken")
    shared = directory / "shared"
    argv = ["--module", "ddp_trainer.train", "--", *ARGS, "--strategy", "single", "--task-options", "seconds=0"]
    path = os.pathsep.join([str(TASKS.parents[2] / "trainer_image"), str(TASKS)])
    pod = Pod(directory, shared, argv, {"DDPJOB_SHARED": str(shared), "PYTHONPATH": path})
    try:
        assert pod.wait() == 0, pod.log
    finally:
        pod.end()
    return losses(shared)


def test_the_others_take_the_next_step_and_a_new_rank_joins(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float]
) -> None:
    victim = 0  # which hosts the store, and writes
    shared = tmp_path / "shared"
    pods = [start(start_pod, node_rank, shared) for node_rank in range(3)]
    witness = pods[(victim + 1) % 3]
    eventually(lambda: (witness.status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    os.kill(pods[victim].pids()[victim], signal.SIGKILL)
    assert pods[victim].wait() == 1
    assert (pods[victim].message["reason"], pods[victim].message["rank"]) == ("WorkerKilled", victim)
    pods[victim] = start(start_pod, victim, shared)
    assert [pod.wait() for pod in pods] == [0, 0, 0]

    regrouped = events(shared, "regrouped")
    assert [event["worldSize"] for event in regrouped] == [2, 3]
    assert not events(shared, "resumed"), "a snapshot was read"
    found = losses(shared)
    steps = sorted(found)
    assert steps[-1] == STEPS
    assert len(steps) >= STEPS - 1, "more than the loss that was under way is missing"
    assert all(later - earlier <= 2 for earlier, later in pairwise(steps))
    assert max(abs(found[step] - unbroken_losses[step]) for step in steps) < 1e-5
    assert (shared / "checkpoints" / "digits" / f"step-{STEPS:012d}" / "manifest.json").exists()


def test_where_no_rank_with_the_state_is_left_one_pod_ends_and_the_other_waits(
    start_pod: StartPod, tmp_path: Path, place: Callable[..., None]
) -> None:
    shared = tmp_path / "shared"
    lost = tuple(Member(f"lost-{rank}", rank, 0, "127.0.0.1", free_port()) for rank in range(2))
    views = shared / "checkpoints" / "digits" / "views" / Attempt(1763704000, 0, "0b0c").name
    Register(views).propose(View(0, lost, lost[0].id, "127.0.0.1", 1))
    pods = []
    for rank in range(2):
        place(tmp_path / f"place{rank}", attempt=0, node_rank=rank, nodes=2)
        pods.append(
            start(start_pod, rank, shared, DDPJOB_NODES="2", DDPJOB_ASSIGNMENT_DIR=str(tmp_path / f"place{rank}"))
        )
    eventually(lambda: any(pod.process.poll() is not None for pod in pods), "a pod has ended")
    ended, waits = sorted(pods, key=lambda pod: pod.process.poll() is None)
    assert ended.wait() == 1
    assert ended.message["reason"] == "LiveRecoveryFailed"
    assert "no rank that has the state answers" in ended.message["message"]
    eventually(lambda: waits.status()["phase"] == "waiting", "the other pod waits for the next attempt")
