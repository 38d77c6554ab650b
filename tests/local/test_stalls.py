"""A gang of nodes that hangs: the rank that holds it up is named, with its own stack, whichever pod reports it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from tests.support import forked_run
from tests.support.local_run import new_job

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.local.volume import open_shared

pytestmark = pytest.mark.local

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

CASE, GUILTY = sys.argv[1], int(sys.argv[2])

def average(loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size()

def read_a_broken_file():
    time.sleep(600)

def train(batches):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(batches):
        if CASE == "sleeps" and batch == 10 and dist.get_rank() == GUILTY:
            read_a_broken_file()
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (CASE == "skips" and batch == 10 and dist.get_rank() == GUILTY):
            average(loss.detach())
        if batch % 5 == 0:
            save_together()

def save_together():
    dist.barrier()

dist.init_process_group("gloo")
fewer = CASE == "has fewer batches" and dist.get_rank() == GUILTY
train(12 if fewer else 40)
values = torch.zeros(3)
dist.broadcast(values, src=0)
"""


def run(folder: Path, nodes: int, case: str, guilty: int) -> DDPJobStatus:
    shared = open_shared(folder / "shared")
    (shared / "train.py").write_text(textwrap.dedent(SCRIPT))
    spec = {
        "nodes": nodes,
        "entrypoint": {"script": "/mnt/shared/train.py"},
        "args": [case, str(guilty)],
        "stall": {"minSeconds": 1, "maxSeconds": 4},
        "restart": {"maxRestarts": 0},
    }
    return forked_run.outcome(new_job("hangs", spec), shared).status


@pytest.mark.parametrize(
    ("nodes", "case", "guilty", "step", "place"),
    [
        (3, "sleeps", 2, 10, "read_a_broken_file (train.py) < train (train.py)"),
        (4, "skips", 1, 11, "save_together (train.py) < train (train.py)"),
        (4, "has fewer batches", 3, 12, "<module> (train.py)"),
    ],
)
def test_the_rank_that_holds_up_the_other_nodes_is_named(
    tmp_path: Path, nodes: int, case: str, guilty: int, step: int, place: str
) -> None:
    status = run(tmp_path, nodes, case, guilty)
    failure = status.last_failure
    assert status.phase is Phase.FAILED
    assert failure is not None
    assert (failure.reason, failure.rank, failure.node_rank) == ("Stalled", guilty, guilty), failure.message
    assert re.match(f"rank {guilty} (made no progress|holds up the others)", failure.message), failure.message
    assert f"rank {guilty} in train after step {step}, silent for" in failure.message, failure.message
    assert f"Stack of rank {guilty}: {place}" in re.sub(r":\d+\)", ")", failure.message)
    stacks = tmp_path / "shared" / "logs" / "hangs"
    text = (stacks / "stacks-attempt-0.txt").read_text()
    assert [f"==== rank {rank} ====\nThread" in text.replace("Current t", "T") for rank in range(nodes)] == [
        True
    ] * nodes, text
