"""A script whose model is destructed after its process group was destroyed comes to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.train.volume import Volume


@pytest.mark.processes
def test_a_model_may_outlive_its_process_group_with_a_collective_under_way(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("returns_early.py"))
    done = Volume(tmp_path).train(2, "-m", "ddp_trainer.rank.worker", "script", script)
    # not by line: a newline is a write of its own where output is not buffered
    assert (done.returncode, done.stdout.count("returned")) == (0, 2), done.stderr
