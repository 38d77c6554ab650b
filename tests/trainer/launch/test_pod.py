"""One pod over several attempts, under the real launcher and torchrun: in place, as a spare, in a gang that grows."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.trainer.train.volume import Volume

from ddp_trainer.contract import processes
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence
from ddp_trainer.launch.pod import AfterAttempt, after_attempt
from ddp_trainer.launch.supervisor import (
    AGENT_SECONDS,
    EXIT_BARRIER_SECONDS,
    FINISHED_AGENT_SECONDS,
    HANGING_SECONDS,
    SUPERSEDED_AGENT_SECONDS,
    SURVIVOR_SECONDS,
    AttemptResult,
    hanging,
    torchrun_seconds,
)

HERE = Path(__file__).parent
LOOP = HERE.parent / "train"
TRAINER = HERE.parents[2] / "trainer_image"
# Rank 1 is killed between the two backward passes of its 17th step; a snapshot every 7.
STRUCK = (
    *("--task", "seeded_tasks:Struck", "--max-steps", "40", "--micro-batch", "20", "--warmup-steps", "5"),
    *("--task-options", "signal_name=SIGKILL", "--task-options", "rank=1", "--task-options", "call=34"),
)
LOSES_ITS_PEER = """
    import os
    print("attempt", *(os.environ[f"DDPJOB_{name}"] for name in ("ATTEMPT", "NODE_RANK", "NODES")), flush=True)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
"""

# Asks between two steps whether to stop, which a rank that waits for its peer for ever never does.
STEPS = """
    import signal, time, torch, torch.distributed as dist
    from ddp_trainer.contract.heartbeat import Heartbeat
    signal.signal(signal.SIGTERM, lambda *_: None)
    heartbeat = Heartbeat.from_env()
    dist.init_process_group("gloo")
    heartbeat.enter("train")
    for step in range(1, 21 if dist.get_world_size() == 1 else 10**6):
        dist.all_reduce(torch.ones(1))
        heartbeat.step(step=step)
        time.sleep(0.02)
    heartbeat.enter("done")
    dist.destroy_process_group()
"""


def result(reason: str, code: int = 1, *, superseded: bool = False, stuck: bool = False) -> AttemptResult:
    return AttemptResult(
        ExitCause(code, reason, ""), ExitEvidence(wall=0.0, procs=1), superseded=superseded, stuck=stuck
    )


@pytest.mark.parametrize(
    ("ended", "stopped", "stays", "then"),
    [
        pytest.param(result("Completed", 0), False, True, AfterAttempt.EXIT, id="done"),
        pytest.param(result("PeerLost"), False, True, AfterAttempt.WAIT, id="a peer is lost"),
        pytest.param(result("RendezvousFailed"), False, True, AfterAttempt.WAIT, id="a peer never came"),
        pytest.param(result("PeerLost"), False, False, AfterAttempt.EXIT, id="a pod whose place never changes"),
        pytest.param(result("PeerLost"), True, True, AfterAttempt.EXIT, id="SIGTERM came as well"),
        pytest.param(
            result("PeerLost", stuck=True), False, True, AfterAttempt.EXIT, id="a peer is lost, and a process hangs on"
        ),
        pytest.param(result("WorkerKilled"), False, True, AfterAttempt.EXIT, id="its own rank died"),
        pytest.param(result("Stalled"), False, True, AfterAttempt.EXIT, id="its own rank hung"),
        pytest.param(result("UserError", 64), False, True, AfterAttempt.EXIT, id="a wrong argument"),
        pytest.param(result("Fenced", 77), False, True, AfterAttempt.EXIT, id="a newer attempt that it is no part of"),
        pytest.param(
            result("Preempted", 143, superseded=True), False, True, AfterAttempt.BEGIN, id="made way for the next"
        ),
        pytest.param(
            result("Preempted", 143, superseded=True), True, True, AfterAttempt.EXIT, id="made way, and has to go"
        ),
        pytest.param(
            result("PeerLost", superseded=True), False, True, AfterAttempt.BEGIN, id="lost its peer meanwhile"
        ),
        pytest.param(
            result("Completed", 0, superseded=True),
            False,
            True,
            AfterAttempt.BEGIN,
            id="finished, but the gang did not",
        ),
        pytest.param(
            result("DiskFull", superseded=True), False, True, AfterAttempt.EXIT, id="failed by itself meanwhile"
        ),
        pytest.param(result("Preempted", 143), False, True, AfterAttempt.WAIT, id="left with a peer that was asked to"),
        pytest.param(result("Preempted", 143), True, True, AfterAttempt.EXIT, id="was asked to leave"),
    ],
)
def test_what_follows_an_attempt(ended: AttemptResult, stopped: bool, stays: bool, then: AfterAttempt) -> None:
    assert after_attempt(ended, stopped=stopped, stays=stays) is then


@pytest.mark.parametrize(
    ("phase", "silent", "slowest", "hangs"),
    [
        ("train", HANGING_SECONDS - 1, 0.1, False),
        ("train", HANGING_SECONDS + 1, 0.1, True),
        ("train", 2.9 * 20.0, 20.0, False),
        ("train", 3.1 * 20.0, 20.0, True),
        ("validate", SURVIVOR_SECONDS - 1, 0.1, False),
        ("validate", SURVIVOR_SECONDS + 1, 0.1, True),
        ("rendezvous", SURVIVOR_SECONDS + 1, None, True),
        ("save", 1000.0, 0.1, False),
    ],
)
def test_a_rank_that_should_leave_hangs_if_it_neither_steps_nor_saves(phase, silent, slowest, hangs):
    heartbeat = {"pid": 7, "phase": phase, "time": 100.0, "stepSecondsP99": slowest}
    assert bool(hanging([heartbeat], asked_at=50.0, now=100.0 + silent)) == hangs
    assert hanging([heartbeat], asked_at=100.0 + silent, now=100.0 + silent) == set()


@pytest.mark.parametrize(
    ("exit_codes", "hosts_store", "asked", "superseded", "seconds"),
    [
        pytest.param([0, 0], True, False, False, EXIT_BARRIER_SECONDS, id="ranks of other nodes may still train"),
        pytest.param([0, 0], False, False, False, FINISHED_AGENT_SECONDS, id="another node has the store"),
        pytest.param([0, 0], True, True, False, AGENT_SECONDS, id="asked to stop"),
        pytest.param([143, 143], True, False, False, AGENT_SECONDS, id="all ranks agreed to leave"),
        pytest.param([1, 0], True, False, False, AGENT_SECONDS, id="a rank failed"),
        pytest.param([None, 0], True, False, False, AGENT_SECONDS, id="a rank without an outcome"),
        pytest.param([0, 0], True, False, True, SUPERSEDED_AGENT_SECONDS, id="the next attempt waits"),
    ],
)
def test_torchrun_waits_for_other_nodes_only_where_they_may_still_need_it(
    exit_codes, hosts_store, asked, superseded, seconds
):
    assert torchrun_seconds(exit_codes, hosts_store=hosts_store, asked=asked, superseded=superseded) == seconds


def test_a_survivor_and_a_spare_go_on_in_their_pods_to_the_same_bits(start_pod, place, tmp_path):
    unbroken = Volume(tmp_path / "unbroken").trained(2, *STRUCK, DDPJOB_ATTEMPT="1")
    gang = {"DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port()), "PYTHONPATH": f"{TRAINER}:{LOOP}"}
    gang |= {"DDPJOB_SNAPSHOT_EVERY": "7steps"}
    folders = [place(tmp_path / f"place-{rank}", attempt=0, node_rank=rank, nodes=2) for rank in (0, 1, "none")]
    argv = ["--module", "ddp_trainer.train", "--", *STRUCK]
    survivor, victim, spare = (
        start_pod("", argv=argv, DDPJOB_ASSIGNMENT_DIR=str(folder), **gang) for folder in folders
    )

    assert victim.wait() == 1, victim.log
    assert (victim.message["reason"], victim.message["attempt"]) == ("WorkerKilled", 0)
    eventually(lambda: survivor.status()["phase"] == "waiting", "the survivor waits")
    seen = survivor.status()
    assert (seen["attempt"], seen["ranks"], seen["ended"]["reason"]) == (0, [], "PeerLost")
    assert seen["step"] >= 14
    ready = eventually(lambda: processes.children(survivor.process.pid), "a torchrun is prepared")
    eventually(lambda: spare.status()["phase"] == "spare", "the spare waits")

    place(folders[0], attempt=1, node_rank=0, nodes=2)
    place(folders[2], attempt=1, node_rank=1, nodes=2)
    eventually(lambda: survivor.status()["ranks"], "ranks of the next attempt")
    assert processes.children(survivor.process.pid) == ready
    assert [survivor.wait(), spare.wait()] == [0, 0], survivor.log + spare.log
    assert [(pod.message["attempt"], pod.message["nodeRank"]) for pod in (survivor, spare)] == [(1, 0), (1, 1)]
    resumed = Volume(tmp_path, "digits")
    assert [event["step"] for event in resumed.events("resumed")] >= [14]
    resumed.assert_same_end(unbroken)


def trained_steps(page: bytes) -> float | None:
    """The steps on a page of metrics; None on the page of a pod without node rank 0."""
    found = re.search(rb"^ddpjob_train_steps_total\{.*\} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else None


def test_a_gang_grows_and_shrinks_without_losing_a_step_at_a_constant_global_batch(start_pod, place, tmp_path):
    gang = {"DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port()), "PYTHONPATH": f"{TRAINER}:{HERE}"}
    gang |= {"DDPJOB_SNAPSHOT_EVERY": "1000steps"}
    argv = ["--module", "ddp_trainer.train", "--", "--task", "paced_tasks:Paced", "--epochs", "3"]
    first = place(tmp_path / "first", attempt=0, node_rank=0, nodes=1)
    second = place(tmp_path / "second", attempt=0, node_rank="none", nodes=1)
    stays, comes = (start_pod("", argv=argv, DDPJOB_ASSIGNMENT_DIR=str(folder), **gang) for folder in (first, second))
    eventually(lambda: (stays.status()["step"] or 0) >= 3, "three steps alone")

    for rank, folder in enumerate((first, second)):
        place(folder, attempt=1, node_rank=rank, nodes=2)
    eventually(lambda: stays.status()["attempt"] == 1, "the next attempt")
    eventually(lambda: comes.status()["ranks"] and (comes.status()["step"] or 0) >= 6, "some steps of two")
    eventually(lambda: (trained_steps(stays.get("/metrics")) or 0) >= 6, "node rank 0 has reported these steps")
    together = stays.status()
    assert (together["worldSize"], together["ended"]) == (2, None)
    assert trained_steps(comes.get("/metrics")) is None, "node rank 0 alone counts the steps of the run"

    comes.process.send_signal(signal.SIGTERM)
    assert comes.wait() == 143, comes.log
    eventually(lambda: stays.status()["phase"] == "waiting", "the ranks of the one that stays leave with it")
    assert stays.status()["ended"]["reason"] == "Preempted"
    place(first, attempt=2, node_rank=0, nodes=1)
    assert stays.wait() == 0, stays.log
    volume = Volume(tmp_path, "digits")
    assert (comes.message["reason"], comes.message["step"]) == ("Preempted", volume.events("preempted")[1]["step"])
    begun = sorted([*volume.events("started"), *volume.events("resumed")], key=lambda event: event["attempt"])
    assert [event["worldSize"] for event in begun] == [1, 2, 1]
    assert [event["step"] for event in begun] == [0, *(event["step"] for event in volume.events("preempted"))]
    assert list(volume.losses()) == list(range(1, 70))
    assert (volume.newest_manifest()["samples"], volume.newest_manifest()["globalBatch"]) == (3 * 1437, 64)


def test_a_node_that_fell_silent_does_not_hold_up_the_one_that_goes_on_without_it(start_pod, place, tmp_path):
    gang = {"DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port()), "DDPJOB_SHUTDOWN_SECONDS": "600"}
    folders = [place(tmp_path / f"place-{rank}", attempt=0, node_rank=rank, nodes=2) for rank in (0, 1)]
    goes_on, silent = (start_pod(STEPS, DDPJOB_ASSIGNMENT_DIR=str(folder), **gang) for folder in folders)
    eventually(lambda: (goes_on.status()["step"] or 0) >= 5, "some steps of two")
    processes.send([silent.process.pid, *processes.descendants(silent.process.pid)], signal.SIGSTOP)
    place(folders[0], attempt=1, node_rank=0, nodes=1)
    assert goes_on.wait() == 0, goes_on.log
    assert (goes_on.message["attempt"], goes_on.message["step"]) == (1, 20)
    assert "1 ranks did not stop in time and were killed" in goes_on.log


def test_a_pod_that_lost_its_peer_waits_for_a_later_attempt_and_for_nothing_else(start_pod, place, tmp_path):
    folder = place(tmp_path / "place", attempt=2, node_rank=0, nodes=1)
    pod = start_pod(
        LOSES_ITS_PEER, DDPJOB_ASSIGNMENT_DIR=str(folder), DDPJOB_NODE_RANK="none", DDPJOB_SHUTDOWN_SECONDS="600"
    )
    eventually(lambda: pod.status()["phase"] == "waiting", "the pod waits")
    place(folder, attempt=5, node_rank=7, nodes=2)
    pod.wait_for(f"the assignment changes nothing: {folder}/node-rank is '7': it must be a whole number from 0 to 1")
    place(folder, attempt=1, node_rank=0, nodes=1)
    place(folder, attempt=2, node_rank=0, nodes=1)
    place(folder, attempt=4, node_rank=0, nodes=1)
    eventually(lambda: pod.status()["attempt"] == 4 and pod.status()["phase"] == "waiting", "it waits again")
    assert re.findall("^attempt .*", pod.log, re.MULTILINE) == ["attempt 2 0 1", "attempt 4 0 1"]

    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    message = pod.message
    assert (message["outcome"], message["reason"], message["attempt"]) == ("Preempted", "Preempted", 4)
    assert message["message"].startswith("stopped by SIGTERM while it waited for a later attempt; rank 0 raised")


def test_a_pod_that_nobody_gives_a_place_ends_of_what_it_would_have_ended_of(start_pod, place, tmp_path):
    folder = place(tmp_path / "place", attempt=0, node_rank=0, nodes=1)
    pod = start_pod(LOSES_ITS_PEER, DDPJOB_ASSIGNMENT_DIR=str(folder), DDPJOB_REASSIGN_SECONDS="0.3")
    assert pod.wait() == 1
    assert pod.message["reason"] == "PeerLost"
    assert pod.message["message"].endswith("this pod was given no place in a later attempt within 0.3 s")


def test_a_pod_that_waits_for_its_peers_makes_way_for_a_later_attempt_at_once(start_pod, place, tmp_path):
    folder = place(tmp_path / "place", attempt=0, node_rank=1, nodes=2)
    pod = start_pod("print('alone')", DDPJOB_ASSIGNMENT_DIR=str(folder), DDPJOB_SHUTDOWN_SECONDS="600")
    eventually(lambda: processes.children(pod.process.pid), "torchrun started")
    place(folder, attempt=1, node_rank=0, nodes=1)
    assert pod.wait() == 0, pod.log
    assert (pod.message["attempt"], pod.message["nodeRank"]) == (1, 0)
    assert "alone" in pod.log


def test_a_spare_ends_at_once_when_it_is_asked_to(start_pod, place, tmp_path):
    folder = place(tmp_path / "place", attempt=3, node_rank="none", nodes=2)
    pod = start_pod("", DDPJOB_ASSIGNMENT_DIR=str(folder), DDPJOB_SHUTDOWN_SECONDS="600")
    eventually(lambda: pod.status()["phase"] == "spare", "the spare waits")
    below = eventually(lambda: processes.children(pod.process.pid), "a torchrun is prepared")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert (pod.message["reason"], pod.message["nodeRank"], pod.message["attempt"]) == ("Preempted", None, 3)
    eventually(lambda: not any(processes.alive(pid) for pid in below), "nothing is left")


def test_a_pod_that_starts_with_no_place_at_all_is_the_configurations_error(start_pod, tmp_path):
    pod = start_pod("", DDPJOB_ASSIGNMENT_DIR=str(tmp_path / "nowhere"))
    assert pod.wait() == 64
    assert "nowhere lacks the file attempt" in pod.message["message"]
