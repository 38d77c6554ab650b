"""Where a script goes on that resumes by itself: the steps that its optimizer has counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank.observe import close_observer, observe
from ddp_trainer.rank.optimizer_steps import steps_of

Optimizers = type[torch.optim.Optimizer]


def _take_steps(optimizer: torch.optim.Optimizer, model: torch.nn.Module, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def _resumed(kind: Optimizers, after: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer, as a script has them that has loaded what it saved after so many steps."""
    model = torch.nn.Linear(3, 1)
    saved = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    _take_steps(saved, model, after)
    loaded = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    loaded.load_state_dict(saved.state_dict())
    return model, loaded


def _beat_after(tmp_path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    heartbeat_dir(tmp_path).mkdir()
    heartbeat = Heartbeat(heartbeat_dir(tmp_path))
    observe(heartbeat, world_size=2)
    try:
        _take_steps(optimizer, model, steps)
        heartbeat.flush()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path)
    return beat


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_script_that_resumes_goes_on_counting(tmp_path: Path, kind: Optimizers) -> None:
    beat = _beat_after(tmp_path, *_resumed(kind, after=50), steps=3)
    assert (beat["step"], beat["resumedFromStep"], beat["counters"]["steps"]) == (53, 50, 3)


@pytest.mark.parametrize(
    ("kind", "after"), [(torch.optim.SGD, 50), (torch.optim.Adam, 0)], ids=["SGD does not count", "a new run"]
)
def test_without_a_count_steps_are_those_of_the_process(tmp_path: Path, kind: Optimizers, after: int) -> None:
    beat = _beat_after(tmp_path, *_resumed(kind, after), steps=3)
    assert (beat["step"], beat["resumedFromStep"], beat["counters"]["steps"]) == (3, None, 3)


def test_a_parameter_without_a_gradient_does_not_hide_the_others() -> None:
    late, model = torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam([late, *model.parameters()])
    _take_steps(optimizer, model, 4)
    late.grad = torch.ones(1)
    _take_steps(optimizer, model, 0)
    optimizer.step()
    assert steps_of(optimizer) == 5


def test_counts_of_groups_and_plain_numbers_are_taken() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.01)
    optimizer.param_groups[0]["step"] = 7  # as apex has it
    assert steps_of(optimizer) == 7
    optimizer.param_groups[0]["step"] = "often"
    assert steps_of(optimizer) is None
