"""SIGTERM, and what must never be left behind."""

from __future__ import annotations

import os
import signal

import pytest
from tests.support.waiting import eventually

from ddp_trainer.contract import processes

SAVES_ON_SIGTERM = """
    import os, signal, subprocess, sys, time
    from ddp_trainer.contract.exit_codes import Preempted
    from ddp_trainer.contract.heartbeat import Heartbeat
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    heartbeat = Heartbeat.from_env()
    heartbeat.enter("train")
    heartbeat.step(step=42, total_steps=100)
    print("ready", os.environ["RANK"], flush=True)
    while not asked:
        time.sleep(0.01)
"""


def test_every_rank_sees_sigterm_once_even_if_one_leaves_long_before_the_other_has_saved(start_pod):
    pod = start_pod(
        SAVES_ON_SIGTERM
        + """
    if os.environ["RANK"] == "0":
        time.sleep(1.0)  # the save; rank 1 has left by now, and the launcher got a second SIGTERM
        print("signals", len(asked), flush=True)
        heartbeat.snapshot(42, time.time(), True)
    else:
        print("left", flush=True)
    raise Preempted("saved")
    """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    for rank in (0, 1):
        pod.wait_for(f"ready {rank}")
    pod.process.send_signal(signal.SIGTERM)
    pod.wait_for("left")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert "signals 1" in pod.log
    message = pod.message
    assert (message["outcome"], message["reason"], message["exitCode"]) == ("Preempted", "Preempted", 143)
    assert message["message"] == "stopped by SIGTERM after step 42; the snapshot of step 42 is saved"
    assert message["snapshot"]["step"] == 42


@pytest.mark.parametrize("how", ["sys.exit(143)", "sys.exit(0)"])
def test_a_script_that_handles_sigterm_itself_is_preempted_as_well(start_pod, how):
    pod = start_pod(f"{SAVES_ON_SIGTERM}\n    {how}\n")
    pod.wait_for("ready 0")
    pod.process.send_signal(signal.SIGINT)
    assert pod.wait() == 143
    assert pod.message["outcome"] == "Preempted"


def test_a_script_that_does_not_handle_sigterm_dies_of_it_and_is_preempted_without_a_snapshot(start_pod):
    pod = start_pod("import time; print('ready', flush=True); time.sleep(600)")
    pod.wait_for("ready")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert (pod.message["outcome"], pod.message["snapshot"]) == ("Preempted", None)


def test_ranks_that_do_not_leave_are_killed_when_the_time_is_up(start_pod):
    pod = start_pod(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
        DDPJOB_SHUTDOWN_SECONDS="1",
    )
    pod.wait_for("ready")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert "1 ranks did not stop in time and were killed" in pod.message["message"]


def test_a_pod_that_waits_for_its_peers_stops_at_once(start_pod):
    pod = start_pod("", DDPJOB_NODES="2", DDPJOB_SHUTDOWN_SECONDS="600")
    eventually(lambda: processes.children(pod.process.pid), "torchrun started")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert pod.message["message"] == "stopped by SIGTERM before any rank had started"


def test_no_process_outlives_a_launcher_that_is_killed(start_pod):
    pod = start_pod(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
        DDPJOB_PROCS_PER_NODE="2",
    )
    pod.pids(2)
    eventually(lambda: pod.log.count("ready") == 2, "both ranks ready")
    below = processes.descendants(pod.process.pid)
    assert len(below) == 3  # torchrun and two ranks
    pod.process.kill()
    eventually(lambda: not any(processes.alive(pid) for pid in below), "all processes gone")


def test_a_process_that_a_rank_left_behind_ends_with_the_pod(start_pod):
    pod = start_pod(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("child", child.pid, flush=True)
        """
    )
    assert pod.wait() == 0
    child = int(pod.log.split("child ")[1].split()[0])
    assert not processes.alive(child)


def test_zombies_are_reaped_while_the_pod_runs(start_pod):
    pod = start_pod(
        """
        import os, subprocess, time
        if os.fork() == 0:
            child = subprocess.Popen(["true"])  # outlived by nobody: its parent leaves it to process 1
            print("orphan", child.pid, flush=True)
            os._exit(0)
        os.wait()
        time.sleep(600)
        """
    )
    pod.wait_for("orphan ")
    orphan = int(pod.log.split("orphan ")[1].split()[0])
    eventually(lambda: processes.state(orphan) is None, "the orphan reaped")
    assert pod.process.poll() is None
    assert os.getpid() != orphan
