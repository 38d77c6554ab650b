"""What `fully_shard` is asked for: seen on the model itself, in a process group of one rank."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.tasks import Task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Loader
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies.fsdp import FSDP


class Regression(Task):
    """Sums of numbers, with targets in fp32."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def train_dataset(self) -> TensorDataset:
        inputs = torch.arange(96.0).reshape(24, 4) / 96
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(output, batch[1])


def wrapped(world: World, model: nn.Module, precision: str) -> FSDP:
    config = TrainConfig(strategy="fsdp", precision=precision)
    strategy = FSDP(config, world, Regression(), Precision(precision, world.device))
    strategy.wrap(model)
    return strategy


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_and_its_gradient_are_in_fp32(group: World, precision: str) -> None:
    task = Regression()
    strategy = wrapped(group, task.model(), precision)
    (batch,) = Loader(task.train_dataset(), BatchPlan(samples=24, global_batch=24), group).epoch(0)
    strategy.forward_backward(batch)
    assert strategy.predict(batch.micro_batches[0].batch).dtype is torch.float32
    assert {parameter.grad.dtype for parameter in strategy.parameters()} == {torch.float32}


class UsedTwice(nn.Sequential):
    """One layer in two places."""

    def __init__(self) -> None:
        layer = nn.Linear(4, 4)
        super().__init__(layer, nn.ReLU(), layer, nn.Linear(4, 1))


class Tied(nn.Sequential):
    """Two layers with one weight, and one of its own between them."""

    def __init__(self) -> None:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        super().__init__(first, nn.Linear(4, 4), last, nn.Linear(4, 1))


class Shared(nn.Sequential):
    """A layer that is also a part of another."""

    def __init__(self) -> None:
        layer = nn.Linear(4, 4)
        super().__init__(layer, nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"part": layer})["part"]), nn.Linear(4, 1))


@pytest.mark.parametrize("kind", [UsedTwice, Tied, Shared])
def test_layers_that_share_a_parameter_have_its_gradient_of_both(group: World, kind: type[nn.Sequential]) -> None:
    plain = kind()
    strategy = wrapped(group, model := deepcopy(plain), "fp32")
    assert isinstance(model[-1], FSDPModule)
    task = Regression()
    (batch,) = Loader(task.train_dataset(), BatchPlan(samples=24, global_batch=24), group).epoch(0)
    strategy.forward_backward(batch)
    task.loss(plain(batch.micro_batches[0].batch[0]), batch.micro_batches[0].batch).backward()
    wanted = dict(plain.named_parameters())
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name].grad, atol=1e-6), name


@pytest.mark.parametrize("part", [nn.ReLU(), nn.BatchNorm1d(4, affine=False)])
def test_layers_that_share_a_part_without_parameters_gather_each_for_itself(group: World, part: nn.Module) -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), part), nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0)))
    plain[1].insert(0, plain[0][1])
    strategy = wrapped(group, model := deepcopy(plain), "fp32")
    assert [isinstance(layer, FSDPModule) for layer in model] == [True, True]
    task = Regression()
    (batch,) = Loader(task.train_dataset(), BatchPlan(samples=24, global_batch=24), group).epoch(0)
    strategy.forward_backward(batch)
    task.loss(plain(batch.micro_batches[0].batch[0]), batch.micro_batches[0].batch).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad.full_tensor(), wanted[name].grad, atol=1e-6), name


class Scaled(nn.Linear):
    """With a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))


def test_a_model_that_cannot_be_sharded_is_refused_by_name(group: World) -> None:
    with pytest.raises(
        UserError, match=r"--strategy fsdp cannot shard the model .*scalar.* scale .*use --strategy ddp"
    ):
        wrapped(group, Scaled(), "fp32")


def test_trainable_parameters_of_two_types_that_are_gathered_together_are_refused_by_name(group: World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[1].bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(UserError, match=r"1\.weight is torch.float32 and 1\.bias torch.float64.*--strategy ddp"):
        wrapped(group, model, "fp32")
    model[1].bias.requires_grad_(False)
    wrapped(group, model, "fp32")


class NeverWhole(nn.Sequential):
    """A model too large to be moved as a whole."""

    def _apply(self, fn, recurse=True):
        raise AssertionError("it was moved as a whole")


def test_a_model_that_fits_on_no_device_is_moved_layer_by_layer(group: World) -> None:
    strategy = wrapped(group, NeverWhole(nn.Linear(4, 8), nn.Linear(8, 1)), "fp32")
    assert len(list(strategy.parameters())) == 4
