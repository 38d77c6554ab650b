"""A rank's own passes as DDP measures them: what it does itself is in them, what it waits for others is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.rank.pass_times import FIRST_STEPS, STEPS_BETWEEN, PassTimes
from ddp_trainer.rank.world import World, process_group

OWN, OTHERS = 0.03, 0.2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with process_group(World(), timeout_seconds=30):
        yield


class Slow(nn.Module):
    """Takes its time in the forward pass."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), *((part,) if part else ()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(OWN)
        return self.parts(batch)


def step(module: nn.Module, loss_seconds: float = 0.0) -> None:
    loss = module(torch.ones(2, 4)).sum()
    time.sleep(loss_seconds)
    loss.backward()


def measured(
    module: nn.Module, steps: int = FIRST_STEPS, loss_seconds: float = 0.0, walls: list[float] | None = None
) -> list[float]:
    """Seconds of the passes. `walls` gets those of whole steps: a busy machine makes both longer."""
    passes, found = PassTimes(lambda: (object(), module)), []
    for _ in range(steps):
        began = time.perf_counter()
        step(module, loss_seconds)
        if walls is not None:
            walls.append(time.perf_counter() - began)
        found.append(passes.after_step())
    return [seconds for seconds in found if seconds is not None]


# without types: DDP compares them, and here they would be text
def late(starts, bucket):
    """A reduction for which the other ranks are late. `starts` gets the seconds that it took to start: the others are
    on their way in them, and the pass is not over yet.
    """
    began = time.perf_counter()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(OTHERS, done.set_result, (bucket.buffer(),)).start()
    starts.append(time.perf_counter() - began)
    return done


def test_what_a_rank_does_itself_is_measured_and_its_wait_for_the_others_is_not() -> None:
    walls: list[float] = []
    starts: list[float] = []
    module = DistributedDataParallel(Slow())
    module.register_comm_hook(starts, late)
    found = measured(module, steps=4, loss_seconds=OWN, walls=walls)
    assert min(walls) >= OTHERS, "the steps are as long as the others make them"
    assert len(found) >= 2
    assert min(found) >= 2 * OWN, found
    assert min(found) < OTHERS, found
    assert max(found) <= max(walls) - OTHERS + max(starts), (found, walls, starts)


def test_a_measurement_is_given_once_and_most_steps_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    module = DistributedDataParallel(nn.Linear(4, 4))
    asked = []
    answer = module._get_ddp_logging_data
    monkeypatch.setattr(module, "_get_ddp_logging_data", lambda: asked.append(1) or answer())
    found = measured(module, steps=FIRST_STEPS + 4 * STEPS_BETWEEN)
    assert len(asked) == FIRST_STEPS + 4
    assert 10 <= len(found) <= 12, "each of the first ten, and each hundredth"


def test_a_forward_pass_in_which_ranks_meet_is_left_out() -> None:
    walls: list[float] = []
    with_buffers = measured(DistributedDataParallel(Slow(nn.BatchNorm1d(4))), walls=walls)
    assert with_buffers
    assert min(with_buffers) < OWN, "DDP broadcasts the buffers in it"
    assert max(with_buffers) <= max(walls) - OWN, (with_buffers, walls)
    module = DistributedDataParallel(nn.Linear(4, 4))
    module.add_module("norm", nn.SyncBatchNorm(4))
    assert measured(module) == []


def test_without_ddp_or_what_it_measures_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(nn.Linear(4, 4)) == []
    monkeypatch.delattr(DistributedDataParallel, "_get_ddp_logging_data")
    assert measured(DistributedDataParallel(nn.Linear(4, 4))) == []
