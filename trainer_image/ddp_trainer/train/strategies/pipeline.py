"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through the ranks one
after another.

GPipe runs all forward passes, then all backward passes. 1F1B alternates them once the pipeline is full, so a
rank keeps the activations of as many micro-batches as there are stages, not of all. Both compute the same.
https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.sharded import ShardedOptimizer
from ddp_trainer.train.data import StepBatch, by_part, join, select
from ddp_trainer.train.randomness import deterministic_backward
from ddp_trainer.train.strategies.base import Strategy

SCHEDULES: Final = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline(Strategy):
    """One stage a rank. Every rank loads the whole batch: the first uses its inputs, the last its targets."""

    name = "pipeline"

    @property
    def data_world(self) -> World:
        return World(rank=0, size=1, local_rank=self.world.local_rank, device=self.world.device)

    def wrap(self, model: nn.Module) -> None:
        """Keep this rank's layers under their names in the whole model."""
        shared = shared_names(model)
        self.model = self.task.stage(model, self.world.rank, self.world.size).to(self.world.device)
        check_whole(shared, self.model)
        if self.precision.name != "fp32":
            # Around the forward pass only: the schedule runs forward and backward in one call.
            self.model.forward = self.precision.autocast()(self.model.forward)  # type: ignore[operator]
        self.module = self.model
        self._is_first = self.world.rank == 0
        self._is_last = self.world.rank == self.world.size - 1
        batch = self.config.global_batch
        # settled before this, for memory may not allow what was asked (`memory.starting_micro_batch`)
        assert self.config.micro_batch is not None
        self._micro_batches = -(-batch // self.config.micro_batch)
        self._size = -(-batch // self._micro_batches)
        schedule = SCHEDULES[self.config.pipeline_schedule]
        # The parts of a mean are summed, so gradients must not be divided by their number.
        self._schedule = schedule(self._stage(), self._micro_batches, loss_fn=self._loss, scale_grads=False)
        self._forward = ScheduleGPipe(self._stage(), 1)
        self._forward_size: int | None = None

    def stateful(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        states = {"model": self.model, "optimizer": ShardedOptimizer(self.model, optimizer)}
        return states, tuple(states)

    def probe_memory(self, batch: StepBatch, optimizer: torch.optim.Optimizer) -> bool:
        """Not possible: a stage without memory would leave the others waiting."""
        return True

    def warm_up(self, batch: StepBatch) -> None:
        """Let the stages learn the shapes that travel between them, for which they run a forward pass more."""
        with self._undone():
            self.forward_backward(batch)

    def share_statistics(self) -> None:
        """Not needed: each rank has those of its own layers, which see all samples."""

    def forward_backward(self, batch: StepBatch) -> Tensor:
        self._total = batch.total
        # A schedule wants every step of one shape, so a last batch that is not full is filled up with repeats
        # that the loss leaves out.
        self._batch = filled_up(join([part.batch for part in batch.micro_batches]), self._micro_batches * self._size)
        losses: list[Tensor] = []
        inputs = (self.task.inputs(self._batch),) if self._is_first else ()
        with deterministic_backward():
            if self._is_last:
                places = torch.arange(self._micro_batches * self._size, device="cpu")
                self._schedule.step(*inputs, target=places, losses=losses, return_outputs=False)
            else:
                self._schedule.step(*inputs)
        parts = [loss.detach().double() for loss in losses]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.world.device)

    def _loss(self, output: Any, places: Tensor) -> Tensor:
        """This micro-batch's part of the step's mean loss; `places` are those of its samples in the filled-up
        batch.
        """
        start = int(places[0])
        count = max(0, min(len(places), self._total - start))
        if count == 0:
            nothing: Tensor = select(output, slice(0, 1)).float().sum() * 0.0
            return nothing
        with self.autocast():
            loss = self.task.loss(select(output, slice(0, count)), select(self._batch, slice(start, start + count)))
        part: Tensor = loss * (count / self._total)
        return part

    def clip(self, max_norm: float) -> Tensor:
        """By the norm of the whole model's gradient, of which each stage has a part."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).square() if gradients else torch.zeros((), device="cpu")
        squared = squared.to(self.world.device)
        dist.all_reduce(squared)
        norm = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def predict(self, batch: Any) -> Any:
        """The output on the last stage, None on the others; all of them must call it with the same batch."""
        inputs = self.task.inputs(batch)
        count = len(inputs)
        if self._forward_size is None:
            # the first is the largest
            self._forward_size = count
        arguments = (filled_up(inputs, self._forward_size),) if self._is_first else ()
        output = self._forward.step(*arguments)
        return select(output, slice(0, count)) if self._is_last else None

    def _stage(self) -> PipelineStage:
        return PipelineStage(self.model, self.world.rank, self.world.size, self.world.device)


def shared_names(model: nn.Module) -> list[set[str]]:
    """All names of each parameter that has several, as that of an embedding that is also the output layer."""
    names: defaultdict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    return [each for each in names.values() if len(each) > 1]


def check_whole(shared: Iterable[set[str]], stage: nn.Module) -> None:
    """Raises UserError where this stage has one of the names of a parameter and another stage the others: each would
    train one of its own, with a part of the gradient.
    """
    kept = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
    for names in shared:
        if kept & names and names - kept:
            raise UserError(
                f"--strategy pipeline: {' and '.join(sorted(names))} are one parameter, which would be in several "
                "stages and become another one in each: use --strategy ddp or fsdp, or keep the layers that share it "
                "in one stage (stage() of the task)"
            )


def filled_up(batch: Any, samples: int) -> Any:
    """The batch with its first sample repeated at the end until there are so many."""

    def filled(part: Tensor) -> Tensor:
        lacking = samples - len(part)
        return torch.cat([part, part[:1].expand(lacking, *part.shape[1:])]) if lacking > 0 else part

    return by_part(filled, batch)
