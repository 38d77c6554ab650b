"""Fully sharded data parallel (FSDP2): each rank keeps one part of every weight, gradient and optimizer
state.

The whole of a layer is gathered just before it is needed and dropped after, so a model fits that no rank
could hold. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.sharded import ShardedOptimizer
from ddp_trainer.train.data import StepBatch
from ddp_trainer.train.strategies.base import Strategy

MIXED: Final = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
"""bf16 weights and activations; gradients are reduced in fp32, where small ones are not lost in the sum."""

WHOLE: Final = MIXED | {"bf16": dataclasses.replace(MIXED["bf16"], output_dtype=torch.float32)}
"""Of the whole model: what it gives is fp32, so that its loss is computed in fp32, as autocast does it."""


class FSDP(Strategy):
    """`fully_shard` over all ranks: every element of a ModuleList or Sequential gathers for itself, the rest
    together.
    """

    name = "fsdp"
    forward_is_collective = True
    module: FSDPModule  # type: ignore[assignment]

    def wrap(self, model: nn.Module) -> None:
        """Nothing is moved here: a whole model may fit on no device. `fully_shard` moves what it shards, with its
        buffers, layer by layer, and with the model what is left.
        """
        self.model = model
        self.compile_if_asked()
        mesh = self.mesh()
        policy = MIXED[self.precision.name]
        layers = _layers(self.model)
        for group in _trainable(self.model, layers):
            (first, one), *rest = group.items()
            other = next((name for name, parameter in rest if parameter.dtype != one.dtype), None)
            if other is not None:
                raise UserError(
                    f"--strategy {self.name} cannot shard the model of task {self.config.task!r}: {first} is "
                    f"{one.dtype} and {other} {group[other].dtype}, and trainable parameters that are gathered "
                    "together need one type. Give them one, make what has another a layer of its own in a ModuleList, "
                    "or use --strategy ddp"
                )
        try:
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            self.module = fully_shard(self.model, mesh=mesh, mp_policy=WHOLE[self.precision.name])
        except ValueError as error:  # such as a parameter without a dimension
            raise UserError(
                f"--strategy {self.name} cannot shard the model of task {self.config.task!r}: {error} Or use "
                "--strategy ddp"
            ) from error

    def mesh(self) -> DeviceMesh:
        """The ranks that hold one copy of the model."""
        return init_device_mesh(self.world.device.type, (self.world.size,))

    def stateful(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        states = {"model": self.model, "optimizer": ShardedOptimizer(self.model, optimizer)}
        return states, tuple(states)

    def probe_memory(self, batch: StepBatch, optimizer: torch.optim.Optimizer) -> bool:
        """Not possible: its forward pass needs all ranks, and one without memory would leave them waiting."""
        return True

    def forward_backward(self, batch: StepBatch) -> Tensor:
        self.share_statistics()
        return super().forward_backward(batch)

    @property
    def gradient_scale(self) -> float:
        # FSDP divides by the number of ranks, but the parts of a mean are to be summed.
        return float(self.world.size)

    def autocast(self) -> AbstractContextManager[Any]:
        # The policy casts; autocast would cast again.
        return nullcontext()

    def accumulation(self, *, final: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(final)
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        norm = super().clip(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _layers(model: nn.Module) -> list[nn.Module]:
    """What is repeated in a model, and big enough to be worth a message of its own: elements with parameters, each once
    however often the model uses it.

    Not one whose parameters another module holds too, such as the embedding that is also the output layer: sharded
    twice, they would be two. The whole model gathers those.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    holders = _holders(model)
    elements = {id(element): element for whole in lists for element in whole if _is_apart(element, holders)}
    inside = {id(part) for element in elements.values() for part in element.modules() if part is not element}
    return [element for number, element in elements.items() if number not in inside]


def _is_apart(element: nn.Module, holders: Counter[int]) -> bool:
    """Whether it has parameters, and no module outside holds one of them, nor a part of it."""
    inside = _holders(element)
    return _has_parameters(element) and all(holders[number] == count for number, count in inside.items())


def _holders(model: nn.Module) -> Counter[int]:
    """How many modules of the model hold each parameter of it, and each module with parameters: one without, such as an
    activation, may be part of all layers.
    """
    modules = [module for module in model.modules() if _has_parameters(module)]
    held = (part for module in modules for part in (*_own(module), *filter(_has_parameters, module.children())))
    return Counter(id(part) for part in held)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _trainable(model: nn.Module, layers: list[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """The trainable parameters that are gathered together, by name: of each layer, and of the rest of the model."""
    layer_of = {id(parameter): number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    groups: dict[int | None, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(layer_of.get(id(parameter)), {})[name] = parameter
    return list(groups.values())


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)
