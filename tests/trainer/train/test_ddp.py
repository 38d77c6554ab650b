"""What DistributedDataParallel is asked for: seen on the module itself, in a process group of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.rank.world import World
from ddp_trainer.tasks import load_task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Loader
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies.ddp import DDP

TASK = load_task("toy_linear", {"samples": 24})


def wrapped(world: World, **settings: Any) -> DDP:
    strategy = DDP(TrainConfig(**settings), world, TASK, Precision("fp32", world.device))
    strategy.wrap(TASK.model())
    return strategy


@pytest.mark.parametrize("static", [False, True])
def test_gradients_live_in_the_buckets_that_are_reduced_once_a_step(group: World, static: bool) -> None:
    strategy = wrapped(group, static_graph=static)
    buckets: list[torch.Tensor] = []

    # without types: DDP compares them, and here they would be text
    def reduce(state, bucket):
        buckets.append(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    strategy.module.register_comm_hook(None, reduce)
    (batch,) = Loader(TASK.train_dataset(), BatchPlan(samples=24, global_batch=24), group, micro_batch=8).epoch(0)
    assert len(batch.micro_batches) == 3
    strategy.warm_up(batch)
    buckets.clear()
    strategy.forward_backward(batch)
    assert len(buckets) == 1, "the ranks meet once a step, whatever the number of micro-batches"
    storage = buckets[0].untyped_storage().data_ptr()
    assert {parameter.grad.untyped_storage().data_ptr() for parameter in strategy.parameters()} == {storage}


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_the_options_reach_ddp(group: World, option: str) -> None:
    assert getattr(wrapped(group, **{option: True}).module, option) is True
    assert getattr(wrapped(group).module, option) is False


class Gathering(nn.SyncBatchNorm):
    """Batch normalisation that meets the other ranks, on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it met the other ranks")


def test_a_model_that_meets_other_ranks_in_its_forward_pass_is_not_rehearsed(group: World) -> None:
    strategy = wrapped(group)
    strategy.model.norm = Gathering(1)
    strategy.model.register_forward_hook(lambda model, inputs, output: model.norm(output))
    (batch,) = Loader(TASK.train_dataset(), BatchPlan(samples=24, global_batch=24), group).epoch(0)
    assert strategy.probe_memory(batch, torch.optim.SGD(strategy.parameters())) is True


@pytest.mark.parametrize("name", ["static-graph", "unused-ddp"])
def test_a_step_with_these_options_is_the_step_without(run, difference, name: str) -> None:
    assert difference(run(2, name).losses(), run(2, f"{name}-reference").losses()) < 1e-6
