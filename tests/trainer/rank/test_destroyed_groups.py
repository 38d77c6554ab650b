"""A script whose model is destructed after its process group was destroyed comes to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.train.volume import Volume

ROOT = Path(__file__).parents[3]


@pytest.mark.processes
def test_a_model_may_outlive_its_process_group_with_a_collective_under_way(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("returns_early.py"))
    done = Volume(tmp_path).train(2, "-m", "ddp_trainer.rank.worker", "script", script)
    # not by line: a newline is a write of its own where output is not buffered
    assert (done.returncode, done.stdout.count("returned")) == (0, 2), done.stderr


MANY = """
import os, sys
import torch.distributed as dist
from ddp_trainer.rank.destroyed_groups import keep_destroyed_groups

keep_destroyed_groups()
from ddp_trainer.rank.destroyed_groups import _kept
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
threads, files = [], []
for _ in range(60):
    dist.destroy_process_group(dist.new_group())
    threads.append(len(os.listdir("/proc/self/task")))
    files.append(len(os.listdir("/proc/self/fd")))
first = dist.new_group()
dist.destroy_process_group(first)
dist.destroy_process_group()
# a thread may be about to end; each group has three
has_grown = threads[-1] >= threads[30] + 3 or files[-1] != files[30]
print(any(first in kept for kept in _kept) and not has_grown, threads, files)
"""


@pytest.mark.processes
def test_a_script_may_make_and_destroy_any_number_of_groups(tmp_path: Path) -> None:
    own = {**os.environ, "PYTHONPATH": str(ROOT / "trainer_image")}
    ended = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path / "store")],
        env=own,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.stdout.startswith("True"), ended.stdout + ended.stderr
