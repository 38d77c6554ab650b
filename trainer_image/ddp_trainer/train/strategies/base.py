"""One interface for all ways to share an optimizer step.

After `forward_backward` every parameter's gradient is that of the mean loss over the global batch, on every
rank, whatever the world size, the micro-batches or a last batch that is not full. That is what lets
strategies be compared loss by loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ddp_trainer.client.gradients import from_first, persistent_buffers
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.tasks import Task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import MicroBatch, StepBatch
from ddp_trainer.train.memory import is_out_of_memory, needs_backward
from ddp_trainer.train.optim import state_to_come
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.randomness import (
    deterministic_backward,
    give_up_fused_attention,
    lacks_deterministic_kernel,
    random_numbers_kept,
)

if TYPE_CHECKING:
    from ddp_trainer.live.membership import Membership
    from ddp_trainer.live.pod_group import PodGroup


class Strategy:
    """A way to share a step, and the plain way where nothing is overridden.

    `wrap` must come first. `model` is the model itself, whose state a snapshot holds; `module` is what is
    called.
    """

    name: ClassVar[str]
    forward_is_collective: ClassVar[bool] = False
    """Whether a forward pass is a collective, so that each rank must make as many as the others."""
    preallocates_grads: ClassVar[bool] = False
    """Whether `wrap` sets memory aside for gradients, instead of the first backward pass."""
    model: nn.Module
    module: nn.Module

    def __init__(self, config: TrainConfig, world: World, task: Task, precision: Precision) -> None:
        self.config = config
        self.world = world
        self.task = task
        self.precision = precision

    @property
    def data_world(self) -> World:
        """Whose share of each batch this rank loads: its own, unless several ranks work on the same samples."""
        return self.world

    def wrap(self, model: nn.Module) -> None:
        """Place the model on the device and make it one of many. The optimizer is built from `parameters()`
        after this.
        """
        self.model = model.to(self.world.device)
        self.compile_if_asked()
        self.module = self.model

    def recover(self, membership: Membership, pod: PodGroup | None) -> None:
        """Before `wrap`, with live recovery; `pod` where the ranks of a pod hold something together."""

    def regroup(self) -> None:
        """The process group is another one. The model and the optimizer stay."""

    def compile_if_asked(self) -> None:
        if self.config.compile:
            # in place, so that the names in the state dict stay
            self.model.compile()

    @property
    def local_module(self) -> nn.Module:
        """What is called where this rank must meet no other."""
        return self.model

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()

    def shards(self, optimizer: torch.optim.Optimizer) -> Stateful | None:
        """What each rank of a pod has of its own, for a rank of the same place in another pod; None where all ranks
        hold the same.
        """
        return None

    def stateful(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """What a snapshot saves of model and optimizer, by name, and which of these no rank holds whole."""
        return {"model": self.model, "optimizer": optimizer}, ()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass and its loss."""
        return self.precision.autocast()

    def probe_memory(self, batch: StepBatch, optimizer: torch.optim.Optimizer) -> bool:
        """Take one micro-batch forward and backward without any other rank; whether there was memory for it, beside
        what the first step leaves for the later ones.

        Leaves nothing behind: no gradient, no changed buffer, no random number drawn. Not possible with
        SyncBatchNorm, which gathers from all ranks: one without memory would leave them waiting. Of a model that only
        `backward()` can recompute, it is the forward pass that is tried.
        """
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()):
            return True
        with self._undone():
            try:
                try:
                    self._local_pass(batch, optimizer)
                except RuntimeError as error:
                    if not lacks_deterministic_kernel(error):
                        raise
                    give_up_fused_attention(error)
                    self._local_pass(batch, optimizer)
            except Exception as error:
                if needs_backward(error):
                    return True
                if not is_out_of_memory(error):
                    raise
                return False
            return True

    def _local_pass(self, batch: StepBatch, optimizer: torch.optim.Optimizer) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        accumulated = len(batch.micro_batches) > 1 and not self.preallocates_grads
        copies = state_to_come(optimizer) + accumulated
        # never written, only held while the pass lasts
        to_come = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
        with self.autocast():
            micro_batch = batch.micro_batches[0].batch
            loss = self.task.loss(self.local_module(self.task.inputs(micro_batch)), micro_batch)
        # not backward(): DDP counts whatever reaches a parameter's own gradient, and with a static graph
        # expects as much in every step, or reduces nothing and says nothing
        with deterministic_backward():
            torch.autograd.grad(loss, trained, allow_unused=True)
        del to_come

    def warm_up(self, batch: StepBatch) -> None:
        """Called once with the first batch, before any step: let the strategy build what it builds at run time."""

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Around passes through the model that are no training."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with random_numbers_kept():
            yield
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, saved in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        if self.world.device.type == "cuda":
            # What an allocation that failed has left in the cache is of no use in smaller pieces.
            torch.cuda.empty_cache()

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Accumulate the gradient of one step and give this rank's part of its mean loss: the parts of all
        ranks sum up to it.

        A float64 scalar on the device. Nothing here waits for the device.
        """
        parts = []
        last = len(batch.micro_batches) - 1
        for number, micro_batch in enumerate(batch.micro_batches):
            with self.accumulation(final=number == last):
                parts.append(self.micro_step(micro_batch, batch.total))
        self.reduce_gradients()
        return functools.reduce(torch.add, parts)

    def micro_step(self, micro_batch: MicroBatch, total: int) -> Tensor:
        """Forward and backward of one micro-batch; its part of the mean loss over the `total` samples of the
        step.
        """
        with self.autocast():
            output = self.module(self.task.inputs(micro_batch.batch))
            loss = self.task.loss(output, micro_batch.batch)
        weight = micro_batch.count / total
        scale = weight * self.gradient_scale
        with deterministic_backward():
            torch.autograd.backward(self.precision.scaled(loss if scale == 1.0 else loss * scale))
        return loss.detach().double() * weight

    @property
    def gradient_scale(self) -> float:
        """What the loss is multiplied with for what the reduction divides by."""
        return 1.0

    def accumulation(self, *, final: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch; ranks need to meet in the final one only."""
        return nullcontext()

    def share_statistics(self) -> None:
        """Take over rank 0's running statistics, as DDP does before each step: they are those of the snapshot."""
        if self.world.size > 1:
            from_first(persistent_buffers(self.model))

    def reduce_gradients(self) -> None:
        """After the last backward pass: make every rank's gradient the sum of all."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradient to `max_norm` where its norm is more; the norm before."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def predict(self, batch: Any) -> Any:
        """The model's output for a batch, called without gradients; no rank waits for another."""
        with self.autocast():
            return self.local_module(self.task.inputs(batch))


class Single(Strategy):
    """Nothing is shared, so nothing is overridden."""

    name = "single"
