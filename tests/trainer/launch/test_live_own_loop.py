"""A script with `attach_live` under real launchers: its ranks die, and the others go on from memory."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.trainer.launch.conftest import Pod, StartPod
from tests.trainer.live.pods import HERE, PATH, events, live_environment
from tests.trainer.live.random_faults import (
    History,
    histories,
    losses_of,
    split_brain,
    wrong_snapshot,
    wrong_steps,
)
from tests.trainer.live.recorded_task import HISTORY

STEPS = 60
KILLED_AFTER = 10
SCRIPT = ("--script", str(HERE / "own_script.py"), "--", "--steps", str(STEPS))
UNBROKEN = ("--ranks", "1", "--seconds", "0")
NEEDED = "ddp_trainer.attach_live(model, optimizer, global_batch"

StartRank = Callable[..., Pod]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "history").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def start(start_pod: StartPod, shared: Path) -> StartRank:
    """`start(node_rank, *arguments, **environment)` starts a pod of three whose ranks recover live."""

    def start(node_rank: int, *args: str, argv: tuple[str, ...] = SCRIPT, **env: str) -> Pod:
        environment = live_environment(node_rank, shared) | {HISTORY: str(shared.parent / "history")}
        return start_pod("", argv=[*argv, *args], **environment | env)

    return start


@dataclass(frozen=True)
class Unbroken:
    """One rank that nothing happens to, in a job without live recovery."""

    losses: dict[int, float]
    history: list[History]
    average: float


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "history").mkdir()
    environment = {"DDPJOB_SHARED": str(folder / "shared"), "PYTHONPATH": PATH, HISTORY: str(folder / "history")}
    pod = Pod(folder, folder / "shared", [*SCRIPT, *UNBROKEN], environment)
    try:
        assert pod.wait() == 0, pod.log
    finally:
        pod.end()
    (average,) = averages(folder / "history")
    return Unbroken(losses_of(folder / "shared"), histories(folder / "history"), average)


def averages(folder: Path) -> list[float]:
    """The sum of the averaged weights on each rank that came to the end: a state that the script has passed by name."""
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return [line["average"] for line in lines if "average" in line]


def has_begun(pod: Pod) -> None:
    eventually(lambda: (pod.status()["step"] or 0) >= KILLED_AFTER, f"training has begun; log:\n{pod.log}")


def check(shared: Path, unbroken: Unbroken, *, missing: int, ranks: int = 3) -> None:
    """Each step was on its samples, each once, with its learning rate; ranks went on from one state; losses are those
    of the unbroken run but for the order of sums, and of at most `missing` steps unknown; the last step is saved.
    """
    done = histories(shared.parent / "history")
    assert split_brain([one.steps for one in done]) == []
    assert list(wrong_steps(done, unbroken.history)) == []
    assert list(wrong_snapshot(shared, done, STEPS)) == []
    found = losses_of(shared)
    steps = sorted(found)
    assert steps[-1] == STEPS
    assert len(steps) >= STEPS - missing
    assert all(later - earlier <= 2 for earlier, later in pairwise(steps))
    assert max(abs(found[step] - unbroken.losses[step]) for step in steps) < 1e-5
    assert averages(shared.parent / "history") == pytest.approx([unbroken.average] * ranks, abs=1e-3)


@pytest.mark.parametrize("victim", [0, 2])  # rank 0 hosts the store, and writes
def test_the_others_take_the_step_again_and_a_new_rank_joins(
    start: StartRank, shared: Path, unbroken: Unbroken, victim: int
) -> None:
    pods = [start(node_rank) for node_rank in range(3)]
    has_begun(pods[1])
    os.kill(pods[victim].pids()[victim], signal.SIGKILL)
    assert pods[victim].wait() == 1
    assert pods[victim].message["reason"] == "WorkerKilled"
    pods[victim] = start(victim)
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 3]
    assert not events(shared, "resumed"), "a snapshot was read"
    check(shared, unbroken, missing=1)


def test_with_several_ranks_in_a_pod_it_is_replaced_as_a_whole(
    start: StartRank, shared: Path, unbroken: Unbroken
) -> None:
    pair = {"DDPJOB_NODES": "2", "DDPJOB_PROCS_PER_NODE": "2"}
    pods = [start(node_rank, "--ranks", "4", **pair) for node_rank in range(2)]
    has_begun(pods[1])
    os.kill(pods[0].pids(2)[1], signal.SIGKILL)
    assert pods[0].wait() == 1
    assert (pods[0].message["reason"], pods[0].message["rank"]) == ("WorkerKilled", 1)
    pods[0] = start(0, "--ranks", "4", **pair)
    assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.log for pod in pods)
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [2, 4]
    assert not events(shared, "resumed"), "a snapshot was read"
    check(shared, unbroken, missing=1, ranks=4)


def test_with_too_few_ranks_the_others_wait_for_the_new_one(start: StartRank, shared: Path, unbroken: Unbroken) -> None:
    least = {"DDPJOB_ELASTIC_MIN_NODES": "3"}
    pods = [start(node_rank, **least) for node_rank in range(3)]
    has_begun(pods[1])
    os.kill(pods[1].pids()[1], signal.SIGKILL)
    assert pods[1].wait() == 1
    eventually(lambda: events(shared, "peer_lost"), "the others notice")
    pods[1] = start(1, **least)
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [3]
    assert not events(shared, "resumed"), "a snapshot was read"
    check(shared, unbroken, missing=1)


def test_a_pod_that_is_asked_to_stop_leaves_after_a_step(start: StartRank, shared: Path, unbroken: Unbroken) -> None:
    pods = [start(node_rank) for node_rank in range(3)]
    has_begun(pods[0])
    pods[0].process.send_signal(signal.SIGTERM)
    assert pods[0].wait() == 143
    assert pods[0].message["reason"] == "Left"
    pods[0] = start(0)
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert not events(shared, "peer_lost")
    check(shared, unbroken, missing=0)


def test_pods_that_are_all_asked_to_stop_save_and_the_next_attempt_goes_on(
    start: StartRank, shared: Path, unbroken: Unbroken
) -> None:
    least = {"DDPJOB_ELASTIC_MIN_NODES": "3"}
    pods = [start(node_rank, **least) for node_rank in range(3)]
    has_begun(pods[0])
    pods[1].process.send_signal(signal.SIGTERM)
    assert [pod.wait() for pod in pods] == [143, 143, 143], "\n".join(pod.log for pod in pods)
    assert [pod.message["reason"] for pod in pods] == ["Preempted"] * 3
    stopped = max(losses_of(shared))
    pods = [start(node_rank, DDPJOB_ATTEMPT="1") for node_rank in range(3)]
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert [event["step"] for event in events(shared, "resumed")] == [stopped]
    check(shared, unbroken, missing=0)


def test_without_live_recovery_the_ranks_of_one_torchrun_train_alike(
    start: StartRank, shared: Path, unbroken: Unbroken
) -> None:
    pod = start(0, "--ranks", "2", DDPJOB_LIVE="false", DDPJOB_NODES="1", DDPJOB_PROCS_PER_NODE="2")
    assert pod.wait() == 0, pod.log
    check(shared, unbroken, missing=0, ranks=2)


def test_a_rank_that_joins_with_another_batch_is_an_error_on_all(start: StartRank) -> None:
    pods = [start(node_rank, "--own-batches") for node_rank in range(3)]
    has_begun(pods[1])
    os.kill(pods[2].pids()[2], signal.SIGKILL)
    assert pods[2].wait() == 1
    pods[2] = start(2, "--own-batches")
    codes = [pod.wait() for pod in pods]
    assert 64 in codes, "\n".join(pod.log for pod in pods)
    assert all(code != 0 for code in codes)
    said = [pod.message["message"] for pod, code in zip(pods, codes, strict=True) if code == 64]
    assert "is not the same on all ranks" in said[0]


DIFFERS = """
    import os, torch, ddp_trainer
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ddp_trainer.attach_live(model, optimizer, global_batch=2, total_steps=8)
    run.resume()
    for batch in run.batches(2):
        if run.step == 4 and os.environ["RANK"] == "1":
            {}
        run.train_step(batch, lambda share: model(torch.ones(len(share), 1)).mean(), optimizer.step)
    run.finish()
"""


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("model[0].requires_grad_(False)", "in step 5 the ranks do not train the same parameters"),
        ("break", "some ranks call run.finish(), and others run.train_step()"),
    ],
)
def test_what_one_rank_alone_does_is_an_error(start: StartRank, shared: Path, differs: str, message: str) -> None:
    """Its collectives would be taken for others, and all would wait."""
    script = shared.parent / "train.py"
    script.write_text(textwrap.dedent(DIFFERS.format(differs)))
    pair = {"DDPJOB_LIVE": "false", "DDPJOB_NODES": "1", "DDPJOB_PROCS_PER_NODE": "2"}
    pod = start(0, argv=("--script", str(script)), **pair)
    assert pod.wait() == 64, pod.log
    assert message in pod.message["message"]


WAITS_BETWEEN_STEPS = """
    import os, time, torch, ddp_trainer
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ddp_trainer.attach_live(model, optimizer, global_batch=2)
    run.resume()
    for batch in run.batches(2):
        run.train_step(batch, lambda share: model(torch.ones(len(share), 1)).mean(), optimizer.step)
        if run.step == 3:
            print("between two steps", flush=True)
            if os.environ["DDPJOB_NODE_RANK"] == "1":
                time.sleep(1000)
            torch.distributed.barrier()
"""


def test_a_rank_that_waits_for_a_lost_one_by_itself_ends_so_that_it_is_replaced(start: StartRank, shared: Path) -> None:
    script = shared.parent / "train.py"
    script.write_text(textwrap.dedent(WAITS_BETWEEN_STEPS))
    pods = [start(rank, argv=("--script", str(script)), DDPJOB_NODES="2") for rank in range(2)]
    for pod in pods:
        pod.wait_for("between two steps")
    os.kill(pods[1].pids()[1], signal.SIGKILL)
    assert pods[0].wait() == 1, pods[0].log
    assert pods[0].message["reason"] == "WorkerException", "with PeerLost it would wait for the next attempt"
    assert "leave collectives out there" in pods[0].message["message"]


FAILS_ON_ONE_RANK = """
    import os, torch, ddp_trainer
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ddp_trainer.attach_live(model, optimizer, global_batch=2, total_steps=8)
    run.resume()

    def loss_of(share):
        assert run.step < 4 or os.environ["DDPJOB_NODE_RANK"] == "1", "a label is out of range"
        return model(torch.ones(len(share), 1)).mean()

    for batch in run.batches(2):
        run.train_step(batch, loss_of, optimizer.step)
    run.finish()
"""


def test_a_rank_that_fails_by_itself_ends_with_its_error_and_the_others_go_on(start: StartRank, shared: Path) -> None:
    script = shared.parent / "train.py"
    script.write_text(textwrap.dedent(FAILS_ON_ONE_RANK))
    pods = [start(rank, argv=("--script", str(script)), DDPJOB_NODES="2") for rank in range(2)]
    assert [pod.wait() for pod in pods] == [1, 0], "\n".join(pod.log for pod in pods)
    assert "a label is out of range" in pods[0].message["message"]
    assert [event["worldSize"] for event in events(shared, "regrouped")] == [1]
    assert max(losses_of(shared)) == 8


TRAINS_ALONE = """
    import torch
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (weight + 1).square().sum().backward()
    optimizer.step()
    print("a step is done")
"""
MAKES_A_GROUP = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("a group is there")
"""
ATTACHES = """
    import torch
    import ddp_trainer
    model = torch.nn.Linear(1, 1)
    run = ddp_trainer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    print("a run is there")
"""


@pytest.mark.parametrize("script", [TRAINS_ALONE, MAKES_A_GROUP, ATTACHES, "print('done')"])
def test_a_script_that_does_not_recover_live_is_refused(
    start_pod: StartPod, start: StartRank, shared: Path, script: str
) -> None:
    (shared.parent / "train.py").write_text(textwrap.dedent(script))
    pod = start(0, argv=("--script", str(shared.parent / "train.py")))
    assert pod.wait() == 64, pod.log
    assert pod.message["reason"] == "UserError"
    assert NEEDED in pod.message["message"]
    assert "is done" not in pod.log
    assert "is there" not in pod.log
