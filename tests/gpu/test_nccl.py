"""Two pods with NCCL between them: what the loss of one looks like to the other, and other numbers of ranks."""

from __future__ import annotations

import pytest
from tests.gpu.conftest import ROOT, Done, Train

from ddpjob_operator.api.status import Phase

TWO = {
    "nodes": 2,
    "args": ["--task", "digits", "--epochs", "8", "--timeout-seconds", "60"],
    "env": [{"name": "NCCL_DEBUG", "value": "VERSION"}],
}
HANGS = """
import os, signal
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(400):
    if os.environ["DDPJOB_ATTEMPT"] == "0" and dist.get_rank() == 1 and step == 100:
        {fault}
    loss = model(torch.ones(4, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
dist.destroy_process_group()
"""
FAULTS = {
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "waits for something else": "import time; time.sleep(600)",
}


@pytest.fixture(scope="module")
def whole(train: Train) -> Done:
    return train(TWO)


def test_two_pods_meet_over_nccl(whole: Done) -> None:
    assert (whole.status.phase, whole.status.restarts) == (Phase.SUCCEEDED, 0)
    assert "NCCL version" in whole.output()
    assert len(whole.losses()) == 8 * 23


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
def test_a_killed_rank_is_blamed_and_its_peer_is_not(train: Train, whole: Done, scope: str) -> None:
    killed = train({**TWO, "restart": {"scope": scope, "backoff": {"initialSeconds": 0}}}, chaos="kill-rank@50%")
    failure = killed.status.last_failure
    assert (killed.status.phase, killed.status.restarts) == (Phase.SUCCEEDED, 1), killed.output()
    assert failure is not None
    assert (failure.reason, failure.rank) == ("WorkerKilled", 1), failure
    assert killed.losses() == whole.losses()
    assert killed.final_files() == whole.final_files()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_rank_that_holds_up_the_other_is_named_and_the_job_goes_on(train: Train, fault: str) -> None:
    stall = {"minSeconds": 5, "maxSeconds": 30}
    done = train({"nodes": 2, "stall": stall}, script=HANGS.format(fault=fault))
    failure = done.status.last_failure
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 1), done.output()
    assert failure is not None
    assert (failure.reason, failure.rank) == ("Stalled", 1), failure


def test_a_sharded_run_goes_on_with_one_rank_and_with_two_again(train: Train) -> None:
    arguments = ["--strategy", "fsdp", "--task", "tiny_lm", "--global-batch", "6", "--max-steps"]
    first = train({"nodes": 2, "args": [*arguments, "10"]}, name="sharded")
    second = train({"args": [*arguments, "20"]}, name="sharded", after=first)
    third = train({"nodes": 2, "args": [*arguments, "30"]}, name="sharded", after=second)
    assert third.status.phase is Phase.SUCCEEDED
    assert [event["step"] for event in third.events("resumed")] == [10, 20]
    assert sorted(third.losses()) == list(range(1, 31))


def test_a_sharded_loop_of_ones_own_resumes_with_a_head_that_had_no_gradient(train: Train) -> None:
    script = (ROOT / "tests/trainer/client/own_fsdp2.py").read_text()
    script = script.replace('("gloo")', '("nccl")\ntorch.set_default_device("cuda:0")').replace(
        "torch.Generator()", 'torch.Generator("cuda")'
    )
    spec = {"nodes": 2, "snapshots": {"every": "2steps"}}
    whole = train(spec, script=script)
    broken = train(
        spec, script=script.replace('os.environ.get("DIES_AT", "0")', '5 if os.environ["DDPJOB_ATTEMPT"] == "0" else 0')
    )
    assert (whole.status.phase, broken.status.phase) == (Phase.SUCCEEDED, Phase.SUCCEEDED), broken.output()
    assert broken.status.restarts == 1
    assert broken.losses() == whole.losses()


def test_the_doctor_finds_two_pods_with_nccl_well(train: Train) -> None:
    done = train({"nodes": 2, "entrypoint": {"module": "ddp_trainer.doctor"}})
    assert done.status.phase is Phase.SUCCEEDED, done.output()
    assert "nccl" in done.output().lower()
