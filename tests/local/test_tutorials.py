"""Scripts as tutorials have them, on the CPU: they know nothing of a DDPJob, and train as one all the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_port

pytestmark = pytest.mark.local
TUTORIALS = Path(__file__).parents[1] / "fixtures" / "tutorials"
KILLED = """
import os, signal, sys
import fault_tolerant
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0

def after_step(*_):
    global steps
    steps += 1
    # both ranks have saved epoch 6, and neither can end epoch 7 without this one: no file is half written
    if steps == 30 and os.environ["RANK"] == "1" and os.environ["DDPJOB_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(after_step)
fault_tolerant.main(int(sys.argv[1]), int(sys.argv[2]))
"""
BOTH = """
import torch._dynamo  # once, and not in each of the six ranks that are forked
import forked
import spawned

if __name__ == "__main__":
    spawned.main()
    forked.train_multi_gpu()
"""


def test_a_script_with_a_snapshot_of_its_own_resumes_after_a_rank_was_killed(run_job: Any, tmp_path: Path) -> None:
    shutil.copy(TUTORIALS / "fault_tolerant.py", tmp_path)
    (tmp_path / "killed.py").write_text(KILLED)
    spec = {
        "nodes": 2,
        "entrypoint": {"script": str(tmp_path / "killed.py")},
        "args": ["60", "1"],
        "restart": {"backoff": {"initialSeconds": 0}},
    }
    run = run_job(spec, name="tutorial")
    assert run.end() == 0, run.text()
    text = run.text()
    assert "rank 1 was killed by SIGKILL" in text
    assert re.findall(r"Resuming training from snapshot at Epoch (\d+)", text) == ["6"]
    assert text.count("| [GPU0] Epoch 59 ") == 1
    assert re.search(r"^Succeeded: \d+ steps, restarts 1$", text, re.M), "its steps are observed"


def test_a_script_that_starts_its_ranks_itself_runs_in_a_job_with_one_rank(run_job: Any, tmp_path: Path) -> None:
    for name in ("spawned.py", "forked.py"):
        shutil.copy(TUTORIALS / name, tmp_path)
    (tmp_path / "both.py").write_text(BOTH)
    spec = {
        "entrypoint": {"script": str(tmp_path / "both.py")},
        "env": [{"name": "PORT", "value": str(free_port())}],
        "restart": {"maxRestarts": 0},
    }
    run = run_job(spec, name="tutorial", fresh=True)
    assert run.end() == 0, run.text()
    assert "Epoch 1: Train Loss: " in run.text()
    losses = re.findall(r"\[(?:ddp|allreduce|rs_ag)\] step 0005  loss (\S+)", run.text())
    assert len(losses) == 3
    assert len(set(losses)) == 1, "gradients that are averaged by hand are DDP's"
    assert (tmp_path / "checkpoint_epoch_0.pth").is_file()
    assert list((tmp_path / "runs" / "distributed_training").iterdir())


def test_the_smallest_script_runs_as_it_is_and_its_steps_are_seen(run_job: Any, tmp_path: Path) -> None:
    shutil.copy(TUTORIALS / "smallest.py", tmp_path)
    spec = {"procsPerNode": 2, "entrypoint": {"script": str(tmp_path / "smallest.py")}}
    run = run_job(spec, name="smallest", fresh=True)  # as a person starts it
    assert run.end() == 0, run.text()
    assert re.findall(r"Epoch (\d) \| Loss: \d+\.\d{4} \| cpu", run.text()) == ["0", "1", "2", "3", "4"]
    status = json.loads((run.shared / "logs" / "smallest" / "status.json").read_text())["status"]
    assert status["progress"]["step"] == 5
