"""A step that is dropped leaves no trace: its batch, loaded again, and its forward pass draw the same numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.client.recovery import Recovery
from ddp_trainer.snapshots.codec import rng


def drawn() -> tuple[float, float, float]:
    """By a data set that draws from all three."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("boundary", [True, False], ids=["after a step", "first of a group"])
def test_a_step_that_is_taken_again_draws_the_same_numbers(boundary: bool) -> None:
    model = nn.BatchNorm1d(2)
    generators: Tensor | None = rng.capture() if boundary else None
    parts: dict[str, Any] = {"modules": lambda: (model,), "position": SimpleNamespace(steps=7)}
    others = dict.fromkeys(("membership", "place", "world", "attached", "regroup", "log", "heartbeat", "states"))
    recovery = Recovery(**parts, **others)  # type: ignore[arg-type]
    recovery.begin_step(generators)
    first = drawn()
    model(torch.ones(3, 2))
    recovery._drop_unfinished_step()
    assert drawn() == first
    assert (float(model.running_mean[0]), int(model.num_batches_tracked)) == (0.0, 0)  # type: ignore[index]
