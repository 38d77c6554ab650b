"""Fault tolerance for a training loop of your own, in three lines:

    run = ddp_trainer.attach(model, optimizer, global_batch=64)      # + line 1
    for step in range(run.resume(), steps):
        ...
        optimizer.step()
        scheduler.step()
        run.step_end(loss)                                           # + line 2
        if run.should_stop():                                        # + line 3
            break
    run.finish()

The loop goes on after the newest snapshot, saves one as often as the job says, shows its progress in the job's status
and in Prometheus, and when its pod has to go, all ranks leave after the same step with a snapshot. An exception that
ends it leaves an emergency snapshot of its last finished step.

A script that saves with a library of its own attaches without a model, and writes into a folder that is summed, fenced
and renamed once it is whole:

    run = ddp_trainer.attach()
    folder = run.latest()                                            # the newest that verifies, or None
    ...
    with run.checkpoint(step) as folder:
        accelerator.save_state(folder)

Every rank makes the same calls (`run.Run` has them all, and their order). `step_end` costs one small all-reduce and one
small gather that nothing waits for. After the second step, the ranks compare a few values of the optimizers' states.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from ddp_trainer.client.own_values import whole
from ddp_trainer.client.run import Run
from ddp_trainer.client.states import prepared
from ddp_trainer.contract.environment import JobEnvironment, parse_job, parse_rank
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir
from ddp_trainer.contract.process_end import await_gloo
from ddp_trainer.contract.standard_error import say
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank import data_waits, live_scripts
from ddp_trainer.rank.failures import on_failure
from ddp_trainer.rank.observe import ScriptObserver, close_observer, observing
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.session import Stateful

R = TypeVar("R", bound=Run)


def attach(
    model: nn.Module | None = None,
    optimizer: Stateful | None = None,
    *,
    global_batch: int = 0,
    total_steps: int | None = None,
    per_rank: Mapping[str, Stateful] | None = None,
    changes_with_optimizer: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **states: Stateful,
) -> Run:
    """Attach to a training loop. Call it after the process group is up and the model is where it will train.

    With a model and its optimizer, the run saves and resumes them; other states that must be restored are passed by
    name: `scheduler=scheduler`, `scaler=scaler`, `ema=averaged_model`, a second model and its optimizer. Without any,
    the script saves with `Run.checkpoint`. Of states that are the same on all ranks, rank 0's is saved; `per_rank` has
    small ones of which each rank has its own, such as its data loader's. With another number of ranks, those begin
    anew.

    `global_batch` is the number of samples of one step on all ranks together, `total_steps` how many steps there are to
    be; both are reported, and `step_end` leaves the snapshot of the last one to `finish`. `changes_with_optimizer`
    names those states, besides modules, optimizers, schedulers and gradient scalers, that change only between
    `optimizer.step()` and `step_end`; with any other there is no emergency snapshot, since it might be of the middle of
    a step. `config`, such as `vars(arguments)`, is noted in the manifest of each snapshot, as JSON. `environ` is the
    process's own environment unless it is given.

    A model's GPU becomes the current device of this process. Raises UserError for what cannot be saved rightly, and
    says what to do instead.
    """
    environ = os.environ if environ is None else environ
    job = parse_job(environ, default_name="training")
    if job.live is not None:
        raise UserError(live_scripts.NEEDED)
    if (model is None) != (optimizer is None) or (model is None and (states or per_rank)):
        raise UserError(
            "attach() takes a model with its optimizer, and other states by name; or none of them, for a script that "
            "saves with run.checkpoint()"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise UserError(
            f"attach(model, optimizer): the model is a {type(model).__name__}, not a torch.nn.Module; pass other "
            "states by name, and save what is no state with run.checkpoint()"
        )
    device = _device(model, environ)
    if device.type == "cuda":
        # the step's all-reduce waits for its stream, and a snapshot holds its generator; a script that gives DDP its
        # device_ids trains without setting it
        torch.cuda.set_device(device)
    world = _world(environ, device)
    given = {} if model is None or optimizer is None else {"model": model, "optimizer": optimizer, **states}
    observer = observing() if model is None else None
    return begun(
        Run,
        given,
        world,
        job,
        environ,
        observer=observer,
        per_rank=per_rank or {},
        changes_with_optimizer=changes_with_optimizer,
        global_batch=global_batch,
        total_steps=total_steps,
        config=config,
    )


def begun(
    kind: Callable[..., R],
    given: Mapping[str, Stateful],
    world: World,
    job: JobEnvironment,
    environ: Mapping[str, str],
    *,
    observer: ScriptObserver | None = None,
    per_rank: Mapping[str, Stateful],
    changes_with_optimizer: Collection[str],
    global_batch: int,
    total_steps: int | None,
    **settings: Any,
) -> R:
    """The run of this process, which reports from here on. The rest is as in `Run`."""
    # the script may drop its wrapper, such as DDP, before it leaves the process group
    modules = [ref(value) for value in given.values() if isinstance(value, nn.Module)]
    saved = prepared(given, per_rank, changes_with_optimizer)
    if "ddp_trainer.rank.worker" not in sys.modules:
        atexit.register(await_gloo)  # under the launcher the worker ends the process
    if observer is None:
        close_observer()
    log = RunLog(job, world)
    _close_at_exit(log)
    run = kind(
        saved,
        world,
        job,
        observer.heartbeat if observer is not None else _heartbeat(environ, world),
        log=log,
        observer=observer,
        global_batch=whole("attach", "global_batch", global_batch),
        # -1, as of max_steps, says that there is no total
        total_steps=None if total_steps in (None, -1) else whole("attach", "total_steps", total_steps),
        modules=lambda: [module() for module in modules],
        data_waits=observer.data_waits if observer is not None else data_waits.attached(),
        **settings,
    )
    on_failure(run.emergency)
    return run


def _device(model: nn.Module | None, environ: Mapping[str, str]) -> torch.device:
    """Where the ranks reduce: where the model is, or on the GPU of this process where they can only do so there. NCCL
    takes no tensors of the host, and a model may be there between its steps (CPUOffloadPolicy). Ranks on other devices
    reduce on the host (`step_reduce`).
    """
    parameters = () if model is None else model.parameters()
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    if device.type == "cpu" and dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
        kinds = dist.distributed_c10d._device_capability()
        if ("cpu" not in kinds and "cuda" in kinds) or (model is None and "nccl" in backend):
            return _own_gpu(environ)
    return device


def _own_gpu(environ: Mapping[str, str]) -> torch.device:
    """The GPU of this process: the one that its process group is bound to, or the current device. That is the first one
    also where the script never set it and gives DDP its device_ids, which by custom are [LOCAL_RANK].
    """
    bound = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    if bound is not None and bound.type == "cuda":
        return bound
    current, local_rank = torch.cuda.current_device(), parse_rank(environ).local_rank
    is_unset = current == 0 and local_rank < torch.cuda.device_count()
    return torch.device("cuda", local_rank if is_unset else current)


def _world(environ: Mapping[str, str], device: torch.device) -> World:
    """This rank, as the process group has it. Raises UserError where the environment says otherwise."""
    own = parse_rank(environ)
    rank, size = own.rank, own.world_size
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if own.under_torchrun and (rank, size) != (own.rank, own.world_size):
            raise UserError(
                f"torchrun has started this process as rank {own.rank} of {own.world_size}, and its process group says "
                f"rank {rank} of {size}. A script that starts its own processes (torch.multiprocessing.spawn) runs "
                "under plain python; under torchrun, leave that out and call init_process_group() without rank and size"
            )
    elif size > 1:
        raise UserError(
            f"there are {size} ranks and no process group: call torch.distributed.init_process_group() before attach()"
        )
    if rank == 0 and size > 1 and own.keeps_store and own.max_restarts:
        say(
            "ddp_trainer: a restart by torchrun may hang, because torchrun keeps the addresses of ranks that have "
            "ended: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return World(rank=rank, size=size, local_rank=own.local_rank, device=device)


def _heartbeat(environ: Mapping[str, str], world: World) -> Heartbeat:
    run_dir = parse_rank(environ).run_dir
    directory = heartbeat_dir(run_dir) if run_dir else None
    return Heartbeat(directory, rank=world.rank, local_rank=world.local_rank, own_loop=True)


def _close_at_exit(log: RunLog) -> None:
    """A library that trains does not say when it is done, so nothing may call `finish`."""
    pid = os.getpid()
    atexit.register(lambda: log.close() if os.getpid() == pid else None)
