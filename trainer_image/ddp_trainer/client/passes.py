"""Forward and backward passes of ranks that share a global batch and hold the whole model each (`live_run`).

A loss is a function of indices. It gets this rank's share of the batch, in micro-batches; each is weighted by its
number of samples, so that the sum over all ranks is the mean over the batch, whatever the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from ddp_trainer.client.batches import micro_batches
from ddp_trainer.client.gradients import (
    Wait,
    from_first,
    persistent_buffers,
    shared_gradients,
    started,
    sum_gradients,
)
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec.state import Stateful

LossOf = Callable[[Tensor], Tensor]
"""The mean loss of the samples with these indices, int64 [n], with its graph."""


class SharedPasses:
    """Of the modules among `states`, whose optimizers are among them. `micro_batch` is how many samples a rank takes
    through them at once, `wait` waits for a collective.
    """

    def __init__(self, world: World, states: Iterable[Stateful], *, micro_batch: int, wait: Wait) -> None:
        values = list(states)
        self._world = world
        self._modules = [value for value in values if isinstance(value, nn.Module)]
        self._optimizers = [value for value in values if isinstance(value, Optimizer)]
        self._micro_batch = micro_batch
        self._wait = wait

    def equal_at_first(self) -> None:
        """Start from rank 0's weights, whatever the other ranks have drawn."""
        if self._world.size > 1:
            for module in self._modules:
                from_first(module.state_dict().values(), self._wait)

    @property
    def _parameters(self) -> list[Tensor]:
        """What the optimizers change, each once; asked again each time, since a program may add some."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())

    @property
    def _differentiated(self) -> list[Tensor]:
        """These, and what the modules have besides: an update may look at the gradients of all, as one that clips by
        their norm does.
        """
        others = [parameter for module in self._modules for parameter in module.parameters()]
        return list({id(parameter): parameter for parameter in (*self._parameters, *others)}.values())

    def gradient(self, batch: Tensor, loss_of: LossOf, step: int, *, epoch_end: bool) -> Tensor:
        """Bring the gradient of the mean loss over `batch` to all ranks; this rank's part of that loss, float64.

        Raises UserError where `loss_of` returns no loss, and on all ranks where the batch or `step` of one differs.
        """
        parameters = self._differentiated
        for parameter in parameters:
            parameter.grad = None
        if self._world.size == 1:
            return self._local_gradient(batch, loss_of, parameters)
        compared = _Compared(step, batch, epoch_end, parameters)
        # Running statistics are rank 0's, as under DDP: they are what the snapshot holds.
        for module in self._modules:
            if not isinstance(module, AveragedModel):
                from_first(persistent_buffers(module), self._wait)
        loss = self._local_gradient(batch, loss_of, parameters)
        compared.check(self._wait)
        sum_gradients(shared_gradients(parameters, self._world.device, self._wait), self._wait)
        return loss

    def check_all_leave(self, steps: int) -> None:
        """Where a loop ends. Raises UserError on all ranks where others take a step."""
        if self._world.size > 1:
            _Compared(steps, torch.empty(0, dtype=torch.int64, device="cpu"), False, (), is_step=False).check(
                self._wait
            )

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update. Raises UserError where an optimizer is about to use gradients of this rank alone."""
        hook, scaled_step = register_optimizer_step_pre_hook(self._check_optimizer), GradScaler.step
        GradScaler.step = _refuse_scaler  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            GradScaler.step = scaled_step  # type: ignore[method-assign]
            hook.remove()

    def _check_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = type(optimizer).__name__
        if any(value is not None for value in (*args[1:2], kwargs.get("closure"))):
            raise UserError(
                f"{own}.step() was called with a closure, which computes a gradient of this rank alone: pass none; an "
                "optimizer that needs one, such as LBFGS, has no step that ranks could share"
            )
        if all(optimizer is not known for known in self._optimizers):
            known = {id(parameter) for parameter in self._parameters}  # one in another has the same parameters
            if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
                raise UserError(
                    f"update() has called step() of an optimizer ({own}) that the run does not know, so its gradients "
                    "are those of this rank alone: pass it by name, as in attach_live(…, second=optimizer)"
                )

    def _local_gradient(self, batch: Tensor, loss_of: LossOf, parameters: Sequence[Tensor]) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device="cpu")
        cuts = micro_batches(batch, self._world.rank, self._world.size, self._micro_batch)
        for indices, count in cuts:
            if count:  # else the batch is smaller than the number of ranks
                loss += _part(loss_of, indices, count / len(batch), parameters)
        return loss


def _part(loss_of: LossOf, indices: Tensor, weight: float, parameters: Sequence[Tensor]) -> Tensor:
    # set aside what the micro-batches before have added: zero_grad() in loss_of would take it away
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss = loss_of(indices)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "loss_of(share) returns the mean loss of its samples, a tensor of one number with its graph: not "
            "loss.item(), and not under torch.no_grad()"
        )
    if any(parameter.grad is not None for parameter in parameters):
        raise UserError("loss_of(share) has called backward(): leave that out, the run does it with the loss")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    torch.autograd.backward(loss.reshape(()) * weight)
    return loss.detach().double().reshape(()) * weight


def _refuse_scaler(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """In place of `GradScaler.step`."""
    if scaler.is_enabled():
        raise UserError(
            "update() has called step() of a GradScaler. A rank that joins later has another scale, so its gradients "
            "would count for more, or for less, than those of the others: leave it out and use bf16, which needs none"
        )
    return optimizer.step(*args, **kwargs)


class _Compared:
    """Whether all ranks take the same step on the same batch. The answer is on its way while they compute."""

    def __init__(
        self, step: int, batch: Tensor, epoch_end: bool, parameters: Iterable[Tensor], *, is_step: bool = True
    ) -> None:
        """Without `is_step`, a rank has left the loop after `step`."""
        self._step = step
        data = batch.contiguous().numpy().tobytes()
        taken = zlib.crc32(data, zlib.crc32(repr((step, len(batch), epoch_end)).encode()))
        trained = zlib.crc32(bytes(parameter.requires_grad for parameter in parameters))
        own = [taken, -taken, trained, -trained, int(is_step), -int(is_step)]
        self._greatest = torch.tensor(own, dtype=torch.int64, device="cpu")
        self._work = started(dist.all_reduce(self._greatest, op=dist.ReduceOp.MAX, async_op=True))

    def check(self, wait: Wait) -> None:
        """Raises UserError on all ranks where one differs."""
        wait(self._work)
        batch, other_batch, trained, other_trained, some_step, other_step = self._greatest.tolist()
        if some_step != -other_step:
            raise UserError(
                f"at step {self._step} some ranks call run.finish(), and others run.train_step(): leave the loop on "
                "all ranks after the same step. Decide that by run.step or run.last_loss, which are the same on all, "
                "not by a clock or by what one rank has found"
            )
        if batch != -other_batch:
            raise UserError(
                f"the batch of step {self._step} is not the same on all ranks. A rank that joins goes on with the step "
                "of the others: take the batches of run.batches(), or derive them from run.step alone, not from a "
                "random number generator or an iterator that begins with the process"
            )
        if trained != -other_trained:
            raise UserError(
                f"in step {self._step} the ranks do not train the same parameters. A rank that joins has not seen what "
                "the others did before: derive requires_grad, and the groups of an optimizer, from run.step in each "
                "step, as in layer.requires_grad_(run.step >= 1000)"
            )
