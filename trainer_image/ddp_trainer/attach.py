"""Fault tolerance for a training loop of your own, in three lines:

    run = ddp_trainer.attach(model, optimizer, global_batch=64)      # + line 1
    for step in range(run.resume(), steps):
        ...
        optimizer.step()
        run.step_end(loss)                                           # + line 2
        if run.should_stop():                                        # + line 3
            break

The loop goes on after the newest snapshot, saves one as often as the job says, shows its progress in the
job's status and in Prometheus, and when its pod has to go, all ranks leave after the same step with a
snapshot. An exception that ends it leaves an emergency snapshot of its last finished step. Every rank makes
the same calls. `step_end` costs one small all-reduce and one small gather that nothing waits for.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ddp_trainer.contract.environment import parse_job, parse_rank
from ddp_trainer.contract.exit_codes import Preempted
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.process_end import await_gloo
from ddp_trainer.logs.runlog import RunLog, SnapshotReporter
from ddp_trainer.rank.failures import on_failure
from ddp_trainer.rank.observe import close_observer
from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.rank.stop_request import StopRequest, leave_as_preempted
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.session import Progress, Snapshots, Stateful


def attach(
    model: nn.Module,
    optimizer: Stateful,
    *,
    global_batch: int = 0,
    total_steps: int | None = None,
    changes_with_optimizer: Collection[str] = (),
    environ: Mapping[str, str] = os.environ,
    **states: Stateful,
) -> Attached:
    """Attach to a training loop. Call it after the process group is up and the model is where it will train.

    `global_batch` is the number of samples of one step on all ranks together, `total_steps` how many steps
    there are to be; both only for what is reported. Other states that must be restored, such as a
    scheduler, are passed by name: `scheduler=scheduler`. `changes_with_optimizer` names those of them, besides modules,
    optimizers and schedulers, that change only between `optimizer.step()` and `step_end`; with any other there is
    no emergency snapshot, since it might be of the middle of a step. Raises UserError for a name that is taken.

    A model's GPU becomes the current device of this process.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        # the step's all-reduce waits for its stream, and a snapshot holds its generator; a script that gives DDP its
        # device_ids trains without setting it
        torch.cuda.set_device(device)
    own = parse_rank(environ)
    if "ddp_trainer.rank.worker" not in sys.modules:
        atexit.register(await_gloo)  # under the launcher the worker ends the process
    return Attached(
        {"model": model, "optimizer": optimizer, **states},
        World(rank=own.rank, size=own.world_size, local_rank=own.local_rank, device=device),
        global_batch=global_batch,
        total_steps=total_steps,
        changes_with_optimizer=changes_with_optimizer,
        environ=environ,
    )


class Attached:
    """What `attach` gives: `step` and `samples` finished in the whole run, over all attempts."""

    def __init__(
        self,
        states: Mapping[str, Stateful],
        world: World,
        *,
        global_batch: int,
        total_steps: int | None,
        changes_with_optimizer: Collection[str],
        environ: Mapping[str, str],
    ) -> None:
        close_observer()  # from here on this object reports
        job = parse_job(environ, default_name="training")
        self.step = 0
        self.samples = 0
        self.epoch = 0
        self._global_batch = global_batch
        self._total_steps = total_steps
        self._world = world
        self._heartbeat = Heartbeat.from_env(environ)
        self._log = RunLog(job, world)
        self._log.losses.before_save = self._record_loss
        self._step_reduce = StepReduce(world)
        self._stop = StopRequest()
        self._stopping = False
        self._snapshots = Snapshots.of_job(
            {**states, "losses": self._log.losses},
            job,
            world,
            strategy="own",
            global_batch=global_batch,
            on_event=SnapshotReporter(self._heartbeat, self._log),
            changes_with_optimizer=("losses", *changes_with_optimizer),
        )

    def resume(self) -> int:
        """Load the newest snapshot, if there is one; how many steps are finished. Call it once, before the
        loop.
        """
        self._heartbeat.enter("load")
        manifest = self._snapshots.resume()
        if manifest is not None:
            self.step, self.epoch, self.samples = manifest.step, manifest.epoch, manifest.samples
        self._log.resumed(self.step)
        self._log.event("resumed" if self.step else "started", step=self.step, worldSize=self._world.size)
        self._heartbeat.resumed(self.step, self.samples)
        self._stop.listen()
        on_failure(self._emergency)
        self._heartbeat.enter("first_step")
        return self.step

    def step_end(self, loss: Tensor | float, *, epoch_end: bool = False) -> None:
        """Say that an optimizer step is done, with this rank's mean loss; saves a snapshot if it is time.

        Once all ranks agreed to stop, it has saved a snapshot, and `should_stop` says so. A loop that goes on
        nevertheless gets Preempted at the next call.
        """
        if self._stopping:
            raise Preempted(f"asked to stop; the snapshot of step {self.step} is saved")
        stop = self._agreed_to_stop()
        part = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)
        self.step += 1
        self.samples += self._global_batch
        self._step_reduce.start(part / self._world.size, step=self.step, epoch=self.epoch, stop=self._stop.raised)
        self.epoch += epoch_end
        self._heartbeat.enter("train")
        self._heartbeat.step(
            step=self.step,
            epoch=self.epoch,
            total_steps=self._total_steps,
            samples=self.samples,
            loss=self._log.losses.last_loss,
        )
        if stop:
            self._save_and_stop()
        else:
            self._snapshots.step_end(self._progress, epoch_end=epoch_end)

    def should_stop(self) -> bool:
        """Whether to leave the loop, the same on every rank. The snapshot is saved; the exit code will say
        preempted.
        """
        return self._stopping

    def finish(self, **metrics: float) -> None:
        """After the loop: save a last snapshot, unless it was left early, and report measured values, such as
        eval_accuracy=0.96.
        """
        if self._stopping:
            return
        self._save("final")
        self._heartbeat.metrics(**metrics)
        self._log.event("finished", step=self.step, **metrics)
        self._log.close()
        self._heartbeat.enter("done")

    @property
    def _progress(self) -> Progress:
        return Progress(step=self.step, epoch=self.epoch, samples=self.samples)

    def _agreed_to_stop(self) -> bool:
        self._record_loss()
        result = self._step_reduce.result()
        return result is not None and result.stop

    def _record_loss(self) -> None:
        result = self._step_reduce.result()
        if result is not None and result.step > self._log.losses.last_step:
            self._log.losses.append(step=result.step, epoch=result.epoch, loss=result.loss)

    def _emergency(self, error: Exception) -> None:
        """Save the last finished step, if the states are still those of it."""
        self._heartbeat.enter("save")
        self._snapshots.emergency(error)
        self._log.close()

    def _save_and_stop(self) -> None:
        self._save("preempted")
        self._log.event("preempted", step=self.step)
        self._log.close()
        self._stopping = True
        leave_as_preempted(self.step)

    def _save(self, kind: Literal["preempted", "final"]) -> None:
        self._record_loss()
        self._heartbeat.enter("save")
        saved = self._snapshots.save(self._progress, kind=kind, wait=True)
        self._snapshots.close()
        if not saved:
            raise RuntimeError(f"the {kind} snapshot of step {self.step} could not be saved; see the events before it")
