"""A rank that hangs, under the real torchrun: found, shown, killed."""

from __future__ import annotations

import os
import signal

import pytest
from tests.trainer.documented import message as documented

pytestmark = pytest.mark.trainer


def test_a_stopped_rank_is_found_by_its_silence_and_every_stack_is_saved(start_pod):
    pod = start_pod(
        """
        import os, time, torch, torch.distributed as dist
        from ddp_trainer.contract.heartbeat import Heartbeat
        heartbeat = Heartbeat.from_env()
        dist.init_process_group("gloo")
        heartbeat.enter("train")

        def wait_for_all():
            dist.all_reduce(torch.ones(1))

        for step in range(1, 10**6):
            time.sleep(0.01)
            wait_for_all()
            heartbeat.step(step=step)
            if step == 5:
                print("steps", flush=True)
        """,
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_STALL_MIN_SECONDS="4",
        DDPJOB_STALL_MAX_SECONDS="20",
    )
    pod.wait_for("steps")
    os.kill(pod.pids(2)[1], signal.SIGSTOP)
    assert pod.wait() == 1
    message = pod.message
    assert (message["outcome"], message["reason"], message["rank"]) == ("Failed", "Stalled", 1)
    assert documented("A rank hangs").search(message["message"]), message["message"]
    assert "rank 0 stood in wait_for_all (train.py:" in message["message"]
    stacks = (pod.shared / "logs" / "digits" / "stacks-attempt-0-node-0.txt").read_text()
    assert "==== rank 0 ====" in stacks
    assert stacks.count("most recent call first") >= 2, "the stopped rank must answer too, once it is continued"


def test_an_untouched_script_is_never_called_stalled(start_pod):
    pod = start_pod(
        "import time; print('silent', flush=True); time.sleep(3); print('done', flush=True)",
        DDPJOB_STALL_MIN_SECONDS="0.2",
        DDPJOB_STALL_MAX_SECONDS="0.5",
    )
    assert pod.wait() == 0, pod.log
    assert pod.message["reason"] == "Completed"


def test_survivors_that_nobody_wakes_are_killed_after_a_failure(start_pod):
    pod = start_pod(
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        """,
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_SHUTDOWN_SECONDS="600",
    )
    assert pod.wait() == 1
    assert pod.message["message"] == "rank 1 raised ValueError: first"
