"""`ddpjob why --shared` of a run of two nodes names the rank that the other one waits for, and why it is slow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Run
from tests.support.command import COMMAND
from tests.support.local_run import PACKAGES, environment

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
OWN_LOOP = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_trainer

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ddp_trainer.attach(model, optimizer)
for step in range(run.resume(), 100_000):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).mean()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    loss.backward()
    optimizer.step()
    run.step_end(loss)
    if run.should_stop():
        break
run.finish()
"""


def built_in(of: str) -> dict[str, Any]:
    return {
        "nodes": 2,
        "args": ["--task", "uneven_tasks:Uneven", "--task-options", f"of={of}", "--epochs", "5000"],
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(map(str, (*PACKAGES, HERE)))}],
    }


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("data", "longer for the data of a step than the median rank"),
        ("passes", "its own forward and backward passes take 1"),
        ("own loop", "its own forward and backward passes take 1"),
    ],
)
def test_the_rank_that_the_other_one_waits_for_is_named(run_job: Run, tmp_path: Path, case: str, reason: str) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP)
    own = {"nodes": 2, "entrypoint": {"script": str(tmp_path / "own.py")}}
    run = run_job(own if case == "own loop" else built_in(case))
    said: list[str] = []

    def why() -> bool:
        command = [*COMMAND, "why", "digits", "--shared", str(run.shared)]
        said.append(subprocess.run(command, env=environment(), capture_output=True, text=True).stdout)
        return "the others wait for rank 1 of pod digits-0-1: " in said[-1]

    run.until(why, "rank 1 is named")
    (line,) = (line for line in said[-1].splitlines() if "the others wait for" in line)
    assert reason in line, said[-1]
