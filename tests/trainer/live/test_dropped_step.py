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


class Counter:
    """A state of a program's own."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def of(**parts: Any) -> Recovery:
    """A recovery of nothing else."""
    others = ("membership", "place", "world", "attached", "regroup", "log", "heartbeat", "states")
    return Recovery(**dict.fromkeys(others), position=SimpleNamespace(steps=7), **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("boundary", [True, False], ids=["after a step", "first of a group"])
def test_a_step_that_is_taken_again_draws_the_same_numbers(boundary: bool) -> None:
    model = nn.BatchNorm1d(2)
    generators: Tensor | None = rng.capture() if boundary else None
    recovery = of(modules=lambda: (model,))
    recovery.begin_step(generators)
    first = drawn()
    model(torch.ones(3, 2))
    recovery._drop_unfinished_step()
    assert drawn() == first
    assert (float(model.running_mean[0]), int(model.num_batches_tracked)) == (0.0, 0)  # type: ignore[index]


def test_a_state_of_the_programs_own_is_put_back_however_often_the_step_is_taken() -> None:
    counter = Counter()
    counter.seen.append(6)
    recovery = of(modules=tuple, changing={"counter": counter})
    recovery.begin_step()
    for _ in range(2):
        counter.seen.append(7)
        recovery._drop_unfinished_step()
        assert counter.seen == [6]
