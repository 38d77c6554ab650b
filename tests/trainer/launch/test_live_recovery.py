"""Ranks that recover live, under real launchers: one is killed, the others go on, and another joins in its place."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.trainer.launch.conftest import Pod, StartPod
from tests.trainer.live.live_tasks import FAILS_AT, HELD, SEEN
from tests.trainer.live.pods import PATH, events, live_environment

from ddp_trainer.contract import processes
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.snapshots.saving import EMERGENCY_SECONDS
from ddp_trainer.snapshots.trust.fence import Attempt

STEPS = 60
KILLED_AFTER = 10
ARGS = ("--task", "live_tasks:Slow", "--global-batch", "24", "--max-steps", str(STEPS), "--lr", "0.003")


def start(start_pod: StartPod, node_rank: int, shared: Path, *args: str, **env: str) -> Pod:
    return start_pod(
        "", argv=["--module", "ddp_trainer.train", "--", *ARGS, *args], **live_environment(node_rank, shared) | env
    )


def metrics(pod: Pod) -> dict[str, float]:
    """Without what takes several values, such as the bounds of a histogram: that of `kind` is in the name."""
    lines = pod.get("/metrics").decode().splitlines()
    found = (re.fullmatch(r'(ddpjob_train_\w+)\{ddpjob="digits"(?:,kind="(\w+)")?\} (\S+)', line) for line in lines)
    return {" ".join(filter(None, each.groups()[:2])): float(each[3]) for each in found if each}


def losses(shared: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_losses(shared / "logs" / "digits")}


def assert_went_on(shared: Path, unbroken: dict[int, float], last: int = STEPS) -> None:
    """To the `last` step, and from memory: losses are those of the `unbroken` run but for the order of sums, and one at
    most is missing.
    """
    assert not events(shared, "resumed"), "a snapshot was read"
    found = losses(shared)
    steps = sorted(found)
    assert steps[-1] == last
    assert len(steps) >= last - 1, "more than the loss that was under way is missing"
    assert all(later - earlier <= 2 for earlier, later in pairwise(steps))
    assert max(abs(found[step] - unbroken[step]) for step in steps) < 1e-5


@pytest.fixture(scope="module")
def unbroken_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of one rank that nothing happens to: the number of ranks changes no more than the order of sums."""
    directory = tmp_path_factory.mktemp("unbroken")
    shared = directory / "shared"
    argv = ["--module", "ddp_trainer.train", "--", *ARGS, "--strategy", "single", "--task-options", "seconds=0"]
    pod = Pod(directory, shared, argv, {"DDPJOB_SHARED": str(shared), "PYTHONPATH": PATH})
    try:
        assert pod.wait() == 0, pod.log
    finally:
        pod.end()
    return losses(shared)


@pytest.mark.parametrize("strategy", ["ddp", "manual_rs_ag"])
def test_the_others_take_the_next_step_and_a_new_rank_joins(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], strategy: str
) -> None:
    victim = 0  # which hosts the store, and writes
    shared = tmp_path / "shared"
    args = ("--strategy", strategy, "--task-options", "watched=true")
    pods = [start(start_pod, node_rank, shared, *args) for node_rank in range(3)]
    witness = pods[(victim + 1) % 3]
    eventually(lambda: (witness.status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    assert metrics(pods[0])["ddpjob_train_world_size"] == 3
    trained = witness.status()["seconds"]["train"]
    os.kill(pods[victim].pids()[victim], signal.SIGKILL)
    assert pods[victim].wait() == 1
    assert (pods[victim].message["reason"], pods[victim].message["rank"]) == ("WorkerKilled", victim)
    pods[victim] = start(start_pod, victim, shared, *args)
    recoveries = "ddpjob_train_live_recovery_seconds_count"
    eventually(lambda: metrics(pods[0]).get(f"{recoveries} joined"), "a step with the new rank")
    seen = metrics(pods[0])  # of a process that has begun after the loss
    answer = pods[0].status()
    live = answer["live"]
    (shared / SEEN).touch()
    assert [seen[f"{recoveries} {kind}"] for kind in ("lost", "left", "joined")] == [1, 0, 1]
    assert seen["ddpjob_train_steps_dropped_total"] in (0, 1)
    assert seen["ddpjob_train_world_size"] == live["ranks"] == 3
    assert live["last"]["kind"] == "joined"
    assert answer["resumedFromStep"] == 0, "where the attempt began, so that what it has trained is known"
    assert answer["seconds"]["train"] > trained, "seconds of the attempt, not of the new process"
    assert [pod.wait() for pod in pods] == [0, 0, 0]

    regrouped = events(shared, "regrouped")
    assert [event["worldSize"] for event in regrouped] == [2, 3]
    (recovered,) = events(shared, "recovered")
    (joined,) = events(shared, "joined")
    assert (recovered["worldSize"], joined["worldSize"], joined["seconds"]) == (2, 3, live["last"]["seconds"])
    assert seen["ddpjob_train_live_recovery_seconds_sum lost"] == recovered["seconds"]
    assert_went_on(shared, unbroken_losses)
    assert (shared / "checkpoints" / "digits" / f"step-{STEPS:012d}" / "manifest.json").exists()


def test_a_rank_that_stands_still_is_ended_by_its_own_pod_and_the_others_go_on(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float]
) -> None:
    options = ("--task-options", "ranks=1", "--task-options", "seconds=0.5")
    shared, args = tmp_path / "shared", ("--strategy", "ddp", *options)
    env = {"DDPJOB_NODES": "2", "DDPJOB_STALL_MIN_SECONDS": "10"}
    pods = [start(start_pod, node_rank, shared, *args, **env) for node_rank in range(2)]
    eventually(lambda: (pods[0].status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    os.kill(pods[1].pids()[1], signal.SIGSTOP)
    assert pods[1].wait() == 1
    assert (pods[1].message["reason"], pods[1].message["rank"]) == ("Stalled", 1)
    assert not list(shared.glob("logs/digits/stalls/*/verdict.json")), "a rank in its place would end as well"
    assert pods[0].wait() == 0, pods[0].log
    assert_went_on(shared, unbroken_losses)


# rank 0 hosts the store, and writes
@pytest.mark.parametrize(("left", "strategy"), [(0, "ddp"), (2, "manual_allreduce")])
def test_a_pod_that_is_asked_to_stop_leaves_after_a_step_and_the_others_go_on(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], left: int, strategy: str
) -> None:
    shared = tmp_path / "shared"
    pods = [start(start_pod, node_rank, shared, "--strategy", strategy) for node_rank in range(3)]
    eventually(lambda: (pods[left].status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    pods[left].process.send_signal(signal.SIGTERM)
    assert pods[left].wait() == 143
    assert pods[left].message["reason"] == "Left"
    pods[left] = start(start_pod, left, shared, "--strategy", strategy)
    assert [pod.wait() for pod in pods] == [0, 0, 0]

    assert len(events(shared, "rank_left")) == 1
    assert not events(shared, "peer_lost")
    assert not events(shared, "resumed"), "a snapshot was read"
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 3]
    assert [event["worldSize"] for event in events(shared, "recovered")] == [2]
    assert [event["worldSize"] for event in events(shared, "joined")] == [3]
    found = losses(shared)
    assert sorted(found) == list(range(1, STEPS + 1)), "a step was dropped, or its loss"
    assert max(abs(found[step] - unbroken_losses[step]) for step in found) < 1e-5


@pytest.mark.parametrize("killed", [0, 1])  # rank 0 hosts the store, and writes
def test_a_warm_spare_takes_the_place_of_a_lost_pod_in_the_same_attempt(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], place: Callable[..., None], killed: int
) -> None:
    shared, args = tmp_path / "shared", ("--strategy", "ddp", "--task-options", "ranks=2")
    place(tmp_path / "place", attempt=0, node_rank="none", nodes=2)
    spare = start(start_pod, 0, shared, *args, DDPJOB_NODES="2", DDPJOB_ASSIGNMENT_DIR=str(tmp_path / "place"))
    eventually(lambda: spare.status()["phase"] == "spare", "the spare waits")
    (warm,) = eventually(lambda: processes.descendants(spare.process.pid), "a torchrun is prepared")
    pods = [start(start_pod, node_rank, shared, *args, DDPJOB_NODES="2") for node_rank in range(2)]
    eventually(lambda: (pods[0].status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    os.kill(pods[killed].pids()[killed], signal.SIGKILL)
    assert pods[killed].wait() == 1
    place(tmp_path / "place", attempt=0, node_rank=killed, nodes=2)
    (rank,) = spare.pids().values()
    assert processes.alive(warm)
    assert rank in processes.descendants(warm), "torch was imported anew"
    assert [pods[1 - killed].wait(), spare.wait()] == [0, 0]

    assert (spare.message["attempt"], spare.message["nodeRank"]) == (0, killed)
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [1, 2]
    assert [event["worldSize"] for event in events(shared, "joined")] == [2]
    assert_went_on(shared, unbroken_losses)


def test_a_pod_that_still_runs_ends_once_a_spare_has_its_place(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], place: Callable[..., None]
) -> None:
    """Its node was lost for the control plane only."""
    options = ("--task-options", "ranks=2", "--task-options", "seconds=0.5")
    shared, args = tmp_path / "shared", ("--strategy", "ddp", *options)
    pods = [start(start_pod, node_rank, shared, *args, DDPJOB_NODES="2") for node_rank in range(2)]
    place(tmp_path / "place", attempt=0, node_rank="none", nodes=2)
    spare = start(start_pod, 0, shared, *args, DDPJOB_NODES="2", DDPJOB_ASSIGNMENT_DIR=str(tmp_path / "place"))
    eventually(lambda: (pods[0].status()["step"] or 0) >= 2, "training has begun")
    place(tmp_path / "place", attempt=0, node_rank=1, nodes=2)
    assert pods[1].wait() == 1
    assert "the others went on without this rank" in pods[1].log
    assert [pods[0].wait(), spare.wait()] == [0, 0]

    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2]
    assert not events(shared, "resumed"), "a snapshot was read"
    found = losses(shared)
    assert sorted(found) == list(range(1, STEPS + 1)), "a step was dropped, or its loss"
    assert max(abs(found[step] - unbroken_losses[step]) for step in found) < 1e-5


def test_a_spare_that_is_asked_to_stop_has_left(
    start_pod: StartPod, tmp_path: Path, place: Callable[..., None]
) -> None:
    """It may have been given a place a moment ago: its end must not say that all ranks were asked to stop."""
    place(tmp_path / "place", attempt=0, node_rank="none", nodes=3)
    spare = start(start_pod, 0, tmp_path / "shared", DDPJOB_ASSIGNMENT_DIR=str(tmp_path / "place"))
    eventually(lambda: spare.status()["phase"] == "spare", "the spare waits")
    spare.process.send_signal(signal.SIGTERM)
    assert spare.wait() == 143
    assert spare.message["reason"] == "Left"


def test_a_pod_that_is_asked_to_stop_before_it_trains_has_left(start_pod: StartPod, tmp_path: Path) -> None:
    """As a replacement that a node is drained of: the others train on, and another one takes its place."""
    pod = start(start_pod, 1, tmp_path / "shared")
    pod.pids()
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert pod.message["reason"] == "Left"


def test_a_pod_whose_step_outlasts_the_grace_period_has_left(start_pod: StartPod, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    args = ("--task-options", "ranks=1", "--task-options", f"killed_after={KILLED_AFTER}")
    env = {"DDPJOB_SHUTDOWN_SECONDS": "0.1", "DDPJOB_NODES": "2"}
    pods = [start(start_pod, node_rank, shared, *args, **env) for node_rank in range(2)]
    eventually((shared / HELD).exists, "a step has begun that does not end")
    pods[1].process.send_signal(signal.SIGTERM)
    assert pods[1].wait() == 143
    assert pods[1].message["reason"] == "Left"
    assert "1 ranks did not stop in time and were killed" in pods[1].message["message"]
    eventually(lambda: events(shared, "recovered"), "a step without it")


TWO_RANKS = {"DDPJOB_NODES": "2", "DDPJOB_PROCS_PER_NODE": "2"}


@pytest.mark.parametrize(("victim", "local_rank"), [(0, 1), (1, 0)])  # the first leaves rank 0, which hosts the store
def test_a_pod_whose_rank_is_lost_leaves_as_a_whole_and_all_ranks_of_the_new_one_join(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float], victim: int, local_rank: int
) -> None:
    shared, args = tmp_path / "shared", ("--strategy", "ddp", "--task-options", "ranks=4")
    pods = [start(start_pod, node_rank, shared, *args, **TWO_RANKS) for node_rank in range(2)]
    eventually(lambda: (pods[1].status()["step"] or 0) >= KILLED_AFTER, f"training has begun; log:\n{pods[1].log}")
    rank = 2 * victim + local_rank
    os.kill(pods[victim].pids(2)[rank], signal.SIGKILL)
    assert pods[victim].wait() == 1
    assert (pods[victim].message["reason"], pods[victim].message["rank"]) == ("WorkerKilled", rank)
    pods[victim] = start(start_pod, victim, shared, *args, **TWO_RANKS)
    assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.log for pod in pods)

    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 4], "a rank without its pod took part"
    assert [event["worldSize"] for event in events(shared, "joined")] == [4]
    assert_went_on(shared, unbroken_losses)
    assert (shared / "checkpoints" / "digits" / f"step-{STEPS:012d}" / "manifest.json").exists()


def test_a_pod_of_several_ranks_that_is_asked_to_stop_leaves_after_a_step(
    start_pod: StartPod, tmp_path: Path, unbroken_losses: dict[int, float]
) -> None:
    shared, args = tmp_path / "shared", ("--strategy", "manual_allreduce", "--task-options", "ranks=4")
    pods = [start(start_pod, node_rank, shared, *args, **TWO_RANKS) for node_rank in range(2)]
    eventually(lambda: (pods[1].status()["step"] or 0) >= KILLED_AFTER, f"training has begun; log:\n{pods[1].log}")
    pods[0].process.send_signal(signal.SIGTERM)
    assert pods[0].wait() == 143, pods[0].log
    assert pods[0].message["reason"] == "Left"
    pods[0] = start(start_pod, 0, shared, *args, **TWO_RANKS)
    assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.log for pod in pods)
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 4]
    assert not events(shared, "resumed"), "a snapshot was read"
    found = losses(shared)
    assert sorted(found) == list(range(1, STEPS + 1)), "a step was dropped, or its loss"
    assert max(abs(found[step] - unbroken_losses[step]) for step in found) < 1e-5


def test_pods_that_are_all_asked_to_stop_leave_a_snapshot_of_the_last_step(start_pod: StartPod, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    pods = [start(start_pod, node_rank, shared, "--task-options", "ranks=1") for node_rank in range(3)]
    eventually(lambda: (pods[0].status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    for pod in pods:  # one after the other: the first may have left when the last is asked
        pod.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert [pod.wait() for pod in pods] == [143, 143, 143]
    assert "Preempted" in [pod.message["reason"] for pod in pods]
    last = max(losses(shared))
    manifest = json.loads((shared / f"checkpoints/digits/step-{last:012d}/manifest.json").read_text())
    assert (manifest["step"], manifest["kind"]) == (last, "preempted")


def test_where_too_few_would_be_left_all_stop_and_save(start_pod: StartPod, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    pods = [start(start_pod, node_rank, shared, DDPJOB_ELASTIC_MIN_NODES="3") for node_rank in range(3)]
    eventually(lambda: (pods[0].status()["step"] or 0) >= KILLED_AFTER, "training has begun")
    pods[1].process.send_signal(signal.SIGTERM)
    assert [pod.wait() for pod in pods] == [143, 143, 143]
    assert [pod.message["reason"] for pod in pods] == ["Preempted"] * 3
    last = max(losses(shared))
    assert (shared / f"checkpoints/digits/step-{last:012d}/manifest.json").exists()


def test_a_pod_that_is_asked_to_stop_while_too_few_are_left_saves_first(start_pod: StartPod, tmp_path: Path) -> None:
    shared, two = tmp_path / "shared", {"DDPJOB_NODES": "2", "DDPJOB_ELASTIC_MIN_NODES": "2"}
    options = ("--task-options", "ranks=2", "--task-options", "seconds=1")
    pods = [start(start_pod, node_rank, shared, *options, **two) for node_rank in range(2)]
    eventually(lambda: (pods[0].status()["step"] or 0) >= 2, "training has begun")
    eventually(lambda: pods[0].status()["ranks"][0]["ageSeconds"] > 0.3, "a step has begun, and the last one is over")
    os.kill(pods[1].pids()[1], signal.SIGKILL)
    assert pods[1].wait() == 1
    eventually(lambda: pods[0].status()["phase"] == "rendezvous", "it waits for the replacement")
    pods[0].process.send_signal(signal.SIGTERM)
    assert pods[0].wait() == 143, pods[0].log
    message, last = pods[0].message, pods[0].message["step"]
    assert last >= 2
    assert message["reason"] == "Preempted"
    assert message["message"] == f"stopped by SIGTERM after step {last}; the snapshot of step {last} is saved"
    manifest = json.loads((shared / f"checkpoints/digits/step-{last:012d}/manifest.json").read_text())
    assert (manifest["step"], manifest["kind"]) == (last, "emergency")


def test_where_all_ranks_fail_alike_the_cause_is_on_record_and_the_last_step_saved(
    start_pod: StartPod, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    task = ("--task", "live_tasks:Failing")
    pods = [start(start_pod, node_rank, shared, *task, DDPJOB_NODES="2") for node_rank in range(2)]
    assert [pod.wait() for pod in pods] == [1, 1]
    assert "a label is out of range" in pods[0].message["message"]
    assert pods[0].message["reason"] == "WorkerException"
    last = FAILS_AT - 1
    manifest = json.loads((shared / f"checkpoints/digits/step-{last:012d}/manifest.json").read_text())
    assert (manifest["step"], manifest["kind"]) == (last, "emergency")


def test_the_others_do_not_wait_for_the_snapshot_of_a_rank_that_fails(start_pod: StartPod, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    task = ("--task", "live_tasks:Failing", "--task-options", "alone=true", "--task-options", "saving=1000")
    for node_rank in range(2):
        start(start_pod, node_rank, shared, *task, DDPJOB_NODES="2")
    written = shared / "logs/digits/events.jsonl"
    (recovered,) = eventually(lambda: written.exists() and events(shared, "recovered"), "a step without it")
    assert recovered["worldSize"] == 1
    assert recovered["seconds"] < EMERGENCY_SECONDS


def test_where_no_rank_with_the_state_is_left_one_pod_ends_and_the_other_waits(
    start_pod: StartPod, tmp_path: Path, place: Callable[..., None]
) -> None:
    shared = tmp_path / "shared"
    lost = tuple(Member(f"lost-{rank}", rank, 0, "127.0.0.1", free_port()) for rank in range(2))
    views = shared / "checkpoints" / "digits" / "views" / Attempt(1763704000, 0, "0b0c").name
    Register(views).propose(View(0, lost, lost[0].id, "127.0.0.1", 1))
    for rank in range(2):  # both places have new processes, however late one of these two pods starts
        Register(views).enter(Member(f"new-{rank}", rank, 0, "127.0.0.1", free_port()))
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
