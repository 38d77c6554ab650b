"""`ddpjob why --shared` of a run of two nodes names the rank that the other one waits for, and why it is slow."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Run, Started
from tests.support.command import ddpjob
from tests.support.local_run import PACKAGES

pytestmark = pytest.mark.local

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


UNTOUCHED = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        if dist.get_rank() in {LATE}:
            time.sleep(0.05)
        return torch.ones(4)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Samples(), batch_size=2):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
"""


def script(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    return {"nodes": 2, "entrypoint": {"script": str(path)}}


def built_in(of: str) -> dict[str, Any]:
    return {
        "nodes": 2,
        "args": ["--task", "uneven_tasks:Uneven", "--task-options", f"of={of}", "--epochs", "5000"],
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(map(str, (*PACKAGES, HERE)))}],
    }


def said_once(run: Started, pattern: str) -> str:
    """What `ddpjob why` says of the run as soon as `pattern` is in it, with a time of a tenth of a second or more: on a
    busy machine a sleep takes longer.
    """
    said = [""]

    def why() -> bool:
        said.append(ddpjob(None, "why", "digits", "--shared", str(run.shared), check=False).stdout)
        found = re.search(pattern.replace("TIME", r"([\d.]+) (m?s)\b"), said[-1])
        return found is not None and float(found[1]) >= {"ms": 100, "s": 0.1}[found[2]]

    try:
        run.until(why, f"{pattern!r} in what why says")
    except AssertionError as error:
        error.add_note(said[-1])
        raise
    return said[-1]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("data", "it waits TIME longer for the data of a step than the median rank"),
        ("passes", "its own forward and backward passes take TIME, those of the median rank"),
        ("own loop", "its own forward and backward passes take TIME, those of the median rank"),
        ("untouched", "it waits TIME longer for the data of a step than the median rank"),
    ],
    ids=["data", "passes", "own loop", "untouched"],
)
def test_the_rank_that_the_other_one_waits_for_is_named(run_job: Run, tmp_path: Path, case: str, reason: str) -> None:
    own = {"own loop": OWN_LOOP, "untouched": UNTOUCHED.replace("{LATE}", "(1,)")}.get(case)
    run = run_job(built_in(case) if own is None else script(tmp_path / "own.py", own))
    said = said_once(run, f"the others wait for rank 1 of pod digits-0-1: {reason}")
    assert said.count("the others wait for") == 1, said


def test_an_untouched_script_whose_data_comes_late_on_all_ranks_is_told_what_to_do(
    run_job: Run, tmp_path: Path
) -> None:
    run = run_job(script(tmp_path / "own.py", UNTOUCHED.replace("{LATE}", "(0, 1)")))
    said = said_once(run, "data: the median rank waits TIME")
    assert "num_workers of the DataLoader" in said
