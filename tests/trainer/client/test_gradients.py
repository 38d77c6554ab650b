"""What ranks that hold the whole model share."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked
from torch import nn

from ddp_trainer.client.gradients import persistent_buffers

HERE = Path(__file__).parent


@pytest.mark.processes
def test_tensors_of_any_layout_and_type_get_the_values_of_rank_0(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2] / "trainer_image"), "OMP_NUM_THREADS": "1"}
    command = forked.command(2, str(HERE / "odd_tensors.py"), str(tmp_path))
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first["between"] == [1, 3, 5, 7]
    assert second.pop("between") == [11, 13, 15, 17]
    assert second == {name: value for name, value in first.items() if name != "between"}


def test_persistent_buffers_are_those_of_the_state_dict_each_once() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Sequential(norm), nn.Linear(2, 2))
    model.register_buffer("mask", torch.ones(2), persistent=False)
    model.register_buffer("nothing", None)
    model.register_buffer("scale", torch.ones(2))
    found = list(persistent_buffers(model))
    assert {id(buffer) for buffer in found} == {
        id(buffer) for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    assert len(found) == 4
