"""Live recovery for a training loop of your own, as a script that runs alone, under torchrun and as a DDPJob:

    run = ddp_trainer.attach_live(model, optimizer, global_batch=48, total_steps=300)
    run.resume()

    def loss_of(share):                                 # indices of this rank's samples
        return F.cross_entropy(model(inputs[share]), targets[share])

    for batch in run.batches(len(inputs)):
        run.train_step(batch, loss_of, optimizer.step)
    run.finish()

The run makes the process group and averages the gradients, so the script has neither `init_process_group` nor
DistributedDataParallel. In a job with `restart.scope: Live`, a rank that is lost costs at most the step that it had a
part in (docs: Live recovery).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_trainer.client.attach import begun
from ddp_trainer.client.live_run import LiveRun
from ddp_trainer.client.recovery import membership_of
from ddp_trainer.client.states import is_sharded
from ddp_trainer.contract.environment import JobEnvironment, parse_job, parse_rank
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank import live_scripts
from ddp_trainer.rank.world import World, process_group
from ddp_trainer.snapshots.codec.state import Stateful

TIMEOUT_SECONDS: Final = 1800.0
"""Of collectives, as torch has it: a rank whose step takes longer than this is in error."""


def attach_live(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    global_batch: int,
    total_steps: int | None = None,
    changes_with_optimizer: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **states: Stateful,
) -> LiveRun:
    """Attach to a training loop whose ranks go on without one that is lost. Call it on the main thread, on CPUs, with
    the model itself, in place of `init_process_group`, `DistributedDataParallel` and `attach`.

    Model, optimizer and other states by name are those of `attach`: what a snapshot holds, and what a rank that joins
    gets from another. A state of your own that `loss_of` may change is put back where a step is dropped, unless
    `changes_with_optimizer` names it: it changes in `update` only. `global_batch` is the number of samples of one step
    on all ranks together: a rank computes at most its share of it at once, however many ranks are left.

    Raises UserError for what ranks cannot keep equal, and says what to do instead.
    """
    environ = os.environ if environ is None else environ
    job = parse_job(environ, default_name="training")
    live_scripts.arrived()
    given: dict[str, Stateful] = {"model": model, "optimizer": optimizer, **states}
    _check(given, job, global_batch)
    own = parse_rank(environ)
    world = World(rank=own.rank, size=own.world_size, local_rank=own.local_rank)
    membership, group = None, ExitStack()
    if job.live is not None:
        membership = membership_of(job, job.live, timeout_seconds=TIMEOUT_SECONDS)
        world.move(job.live.rank, 1)  # alone until it joins the others
    elif world.size > 1:
        group.enter_context(process_group(world, timeout_seconds=TIMEOUT_SECONDS))
    return begun(
        LiveRun,
        given,
        world,
        job,
        environ,
        per_rank={},
        changes_with_optimizer=changes_with_optimizer,
        global_batch=global_batch,
        total_steps=total_steps,
        config=config,
        membership=membership,
        group=group,
    )


def _check(given: Mapping[str, Stateful], job: JobEnvironment, global_batch: int) -> None:
    """Raises UserError."""
    if not isinstance(given["model"], nn.Module):
        raise UserError(f"attach_live(model, …): the model is a {type(given['model']).__name__}, no torch.nn.Module")
    if not isinstance(given["optimizer"], Optimizer):
        raise UserError(
            f"attach_live(model, optimizer): the optimizer is a {type(given['optimizer']).__name__}, no "
            "torch.optim.Optimizer, whose parameters the run reduces the gradients of"
        )
    modules = [value for value in given.values() if isinstance(value, nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    problems = {
        "makes the process group itself: leave out init_process_group(), and call attach_live() once": (
            dist.is_initialized()
        ),
        "averages the gradients itself: pass the model without DistributedDataParallel": any(
            isinstance(part, DistributedDataParallel | nn.DataParallel) for part in parts
        ),
        "works on CPUs only; on GPUs use attach() and restart.scope: InPlace": any(
            parameter.device.type != "cpu" for module in modules for parameter in module.parameters()
        ),
        "needs the whole model on each rank; for one that is sharded (FSDP2, DTensor) use attach()": any(
            is_sharded(module) for module in modules
        ),
        "does not scale gradients: use bf16, which needs no GradScaler": any(
            isinstance(value, GradScaler) for value in given.values()
        ),
        "cannot put back state of its own (get_extra_state) that a module has; use attach()": any(
            type(part).get_extra_state is not nn.Module.get_extra_state for part in parts
        ),
        "has to be called on the main thread, which then trains": threading.current_thread()
        is not threading.main_thread(),
        f"needs the samples of a step on all ranks together, and not global_batch={global_batch!r}": (
            isinstance(global_batch, str) or global_batch < 1
        ),
    }
    for what, is_problem in problems.items():
        if is_problem:
            raise UserError(f"attach_live() {what}")
