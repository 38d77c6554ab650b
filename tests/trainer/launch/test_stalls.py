"""A rank that hangs, under the real torchrun: found, shown, killed."""

from __future__ import annotations

import os
import signal

import pytest
from tests.trainer.documented import message as documented


@pytest.mark.fault(31)
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


@pytest.mark.fault(31)
def test_a_rank_that_is_stopped_while_it_validates_has_no_more_time_than_in_a_step(start_pod):
    pod = start_pod(
        """
        import time, torch, torch.distributed as dist
        from ddp_trainer.contract.heartbeat import Heartbeat
        heartbeat = Heartbeat.from_env()
        dist.init_process_group("gloo")
        heartbeat.enter("train")
        for step in range(1, 10):
            heartbeat.step(step=step)
        heartbeat.enter("validate")
        dist.barrier()
        print("validates", flush=True)
        time.sleep(10)
        dist.barrier()
        time.sleep(10**6)
        """,
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_STALL_MIN_SECONDS="4",
        DDPJOB_STALL_MAX_SECONDS="1000",
    )
    pod.wait_for("validates")
    os.kill(pod.pids(2)[1], signal.SIGSTOP)
    assert pod.wait() == 1
    assert (pod.message["reason"], pod.message["rank"]) == ("Stalled", 1)
    assert "(allowed: 4 s)" in pod.message["message"]


# Ways to be at work for longer than the allowance of 4 s without a step: of the rank itself, a child or the network.
WORK = """
import subprocess, sys, tempfile, time

def computes():
    end = time.monotonic() + 7
    while time.monotonic() < end: pass

def computes_in_a_process_of_its_own():
    code = "import time; end = time.monotonic() + 7\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code])

def downloads():
    code = "import sys,time\\nwhile True: sys.stdout.buffer.write(bytes(1 << 15)); sys.stdout.flush(); time.sleep(0.2)"
    source, end = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE), time.monotonic() + 7
    while time.monotonic() < end: source.stdout.read(1 << 15)
    source.kill()

def prints():
    end = time.monotonic() + 7
    while time.monotonic() < end: print(".", flush=True); time.sleep(0.3)

def writes():
    file, end = tempfile.TemporaryFile(), time.monotonic() + 7
    while time.monotonic() < end: file.write(bytes(1 << 20)); time.sleep(0.3)

WORK = (computes, computes_in_a_process_of_its_own, downloads, prints, writes)
"""


def test_a_script_that_does_not_report_itself_is_not_stalled_while_it_works(start_pod):
    pod = start_pod(f"{WORK}\nfor work in WORK: work()", DDPJOB_STALL_MIN_SECONDS="1", DDPJOB_STALL_MAX_SECONDS="4")
    assert pod.wait() == 0, pod.log
    assert pod.message["reason"] == "Completed"


PREPARES = """
import os, pathlib
prepared = pathlib.Path(os.environ["DDPJOB_RUN_DIR"], "prepared")
if os.environ["RANK"] == "0":
    computes()
    prepared.touch()
while not prepared.exists():
    time.sleep(0.05)
"""


def test_ranks_that_look_for_what_one_prepares_before_they_train_are_not_stalled(start_pod):
    pod = start_pod(
        WORK + PREPARES,
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_STALL_MIN_SECONDS="2",
        DDPJOB_STALL_MAX_SECONDS="4",
    )
    assert pod.wait() == 0, pod.log
    assert pod.message["reason"] == "Completed"


ATTACHED = """
import os, subprocess, sys, tempfile, time, torch, torch.distributed as dist, ddp_trainer
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ddp_trainer.attach(model, optimizer)
{work}

for step in range(run.resume(), 20):
    if step >= 10 and dist.get_rank() == 0 and step - 10 < len(WORK):
        WORK[step - 10]()
    dist.barrier()
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    run.step_end(loss)
run.finish()
"""


def test_a_loop_that_attaches_is_not_stalled_while_a_rank_works_and_the_others_wait(start_pod):
    pod = start_pod(
        ATTACHED.format(work=WORK),
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_STALL_MIN_SECONDS="2",
        DDPJOB_STALL_MAX_SECONDS="4",
    )
    assert pod.wait() == 0, pod.log
    assert pod.message["reason"] == "Completed"


def test_a_loop_that_attaches_is_stalled_once_a_rank_does_nothing_and_the_others_wait(start_pod):
    pod = start_pod(
        ATTACHED.format(work="def work(): time.sleep(600)\nWORK = (work,)"),
        DDPJOB_PROCS_PER_NODE="2",
        DDPJOB_STALL_MIN_SECONDS="2",
        DDPJOB_STALL_MAX_SECONDS="4",
    )
    assert pod.wait() == 1
    assert (pod.message["reason"], pod.message["rank"]) == ("Stalled", 0)
    assert "Stack of rank 0: work (train.py:" in pod.message["message"]


def test_a_script_that_does_not_report_itself_is_stalled_once_it_does_nothing(start_pod):
    pod = start_pod(
        "import time\ndef waits():\n    time.sleep(600)\nwaits()",
        DDPJOB_STALL_MIN_SECONDS="1",
        DDPJOB_STALL_MAX_SECONDS="2",
    )
    assert pod.wait() == 1
    assert (pod.message["reason"], pod.message["rank"]) == ("Stalled", 0)
    assert "rank 0 stood in waits (train.py:3)" in pod.message["message"]


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
