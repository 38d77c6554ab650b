"""What `attach_live` gives to a training loop of your own: a `Run` whose ranks go on from memory when one is lost.

    for batch in run.batches(len(inputs)):              # global batches, as indices
        run.train_step(batch, loss_of, update)          # returns once that step is done
    run.finish()

All collectives of a step are the run's own, so it is the run that notices a lost rank. It puts back what the step has
changed, meets the other ranks again, and takes the same global batch with those that are left. How ranks meet and share
their states is in `recovery`, as for the built-in loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.client.gradients import waited
from ddp_trainer.client.passes import LossOf, SharedPasses
from ddp_trainer.client.recovery import Recovery
from ddp_trainer.client.run import Run
from ddp_trainer.client.states import LOSSES, States
from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import Preempted, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.outcomes import is_peer_lost
from ddp_trainer.contract.standard_error import say
from ddp_trainer.live.deciding import Excluded, Finished
from ddp_trainer.live.membership import Membership
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank import live_scripts
from ddp_trainer.rank.storage_waits import collectives, storage_awaited
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.boundary import before_update

POSITION: Final = "run.position"
"""Among the states that ranks share: no state of a program can have this name as a keyword."""


@dataclass(slots=True)
class Position:
    """Where the run stands. It moves on as soon as a step has changed the weights."""

    steps: int = 0
    epoch: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.epoch, self.samples = state["steps"], state["epoch"], state["samples"]

    def advance(self, samples: int, *, epoch_end: bool) -> None:
        """Count one step."""
        self.steps, self.epoch, self.samples = self.steps + 1, self.epoch + epoch_end, self.samples + samples


class LiveRun(Run):
    """A run that takes the steps itself, `train_step` by `train_step`. Made by `attach_live`.

    Outside of `restart.scope: Live` it does the same, and a lost rank ends it.
    """

    _END_OF_STEP: ClassVar = "the end of update()"
    _COMPARES: ClassVar = False

    def __init__(
        self,
        states: States,
        world: World,
        job: JobEnvironment,
        heartbeat: Heartbeat,
        *,
        log: RunLog,
        global_batch: int,
        membership: Membership | None,
        group: ExitStack,
        **settings: Any,
    ) -> None:
        """`membership` is that of this rank with live recovery; `group` is closed at the end of the run."""
        if membership is not None:
            settings |= {
                "has_newcomer": lambda: membership.has_newcomer,
                "least": membership.least,
                "procs": membership.procs,
                "check_view": membership.check_leads,
            }
        super().__init__(states, world, job, heartbeat, log=log, global_batch=global_batch, **settings)
        self._position = Position()
        self._membership = membership
        self._group = group
        self._trained = [value for value in states.live.values() if isinstance(value, nn.Module)]
        self._passes = SharedPasses(
            world,
            states.live.values(),
            # with fewer ranks there is not more memory in each
            micro_batch=-(-global_batch // (job.live.ranks if job.live is not None else world.size)),
            wait=membership.waited if membership is not None else waited,
        )
        self._epoch_ends_with: int | None = None
        """The step that ends an epoch of `batches`."""
        self._is_updating = False
        self._is_in_loss = False
        """Whether this rank is in `loss_of`, or an error has ended it: no collective of the run has failed."""
        self._is_own = False
        """Whether this rank is in a call of the run, or an error has ended one."""
        self._has_finished = False
        for value in states.live.values():
            before_update(value, self._check_updating)
        self._recovery: Recovery | None = None
        if membership is None or job.live is None:
            return
        # whatever the program does between the collectives here waits for no other rank
        self._outside = ExitStack()
        self._outside.enter_context(storage_awaited())
        self._recovery = Recovery(
            membership=membership,
            place=job.live,
            world=world,
            attached=self,
            position=self._position,
            modules=lambda: self._trained,
            regroup=lambda: None,
            log=log,
            heartbeat=heartbeat,
            states={**states.saved, LOSSES: log.losses, POSITION: self._position},
            changing={
                name: value
                for name, value in states.live.items()
                if not isinstance(value, nn.Module | Optimizer | LRScheduler)
                and name not in states.changes_with_optimizer
            },
        )

    @property
    def last_loss(self) -> float | None:
        """The mean loss over the global batch of the newest step whose loss is known: that before the last one."""
        return self._log.losses.last_loss

    # The loop

    def resume(self) -> int:
        """How many steps are finished. Call it once, before the loop: the states are now those of the newest snapshot,
        or of the ranks that train already. Without either all ranks have rank 0's weights.

        Ends the process with exit code 0 where training has come to its end before this rank could join.
        """
        if self._is_resumed:
            return super().resume()  # which says what is wrong
        self._is_own = True
        with collectives():
            if self._recovery is None:
                self._begin()
            elif not self._joined(self._recovery):
                self._begin()
                self._recovery.resumed()
        self._is_own = False
        return self.step

    def batches(self, samples: int, *, seed: int = 0, shuffle: bool = True) -> Iterator[Tensor]:
        """The global batches from the next step on, as indices of `samples` samples, each once an epoch: to the last of
        `total_steps`, or until all ranks agreed to stop. Each is for one `train_step`.
        """
        self._check_resumed("batches")
        if samples < 1:
            raise UserError(f"run.batches({samples}): there is no sample to train on")
        before = self._batch_of_snapshot
        if self.step and before and before != self._global_batch:  # 0 where it was not known
            raise UserError(
                f"the snapshot's run had global_batch={before}, this one has {self._global_batch}, so run.batches() "
                "would take samples of an epoch twice, or leave them out: go on with the one it had, take batches of "
                "your own, or train under another job name to start anew"
            )
        plan = BatchPlan(samples, self._global_batch, seed, shuffle=shuffle)
        if before and self.samples != plan.samples_of(self.step):
            self._note_other_data(plan)
        while not self._is_over:
            epoch, number = divmod(self.step, plan.steps_per_epoch)
            for batch in plan.batches(epoch, number * plan.global_batch):
                step = self.step
                self._epoch_ends_with = step + 1 if (step + 1) % plan.steps_per_epoch == 0 else None
                yield batch
                if self.step != step + 1:
                    raise UserError(
                        f"run.batches() gave the batch of step {step + 1}, and {self.step} steps are done when it is "
                        "asked for the next one: call run.train_step() with each batch once"
                    )
                if self._is_over:
                    return

    def _note_other_data(self, plan: BatchPlan) -> None:
        """Say so where the run before took other batches: nothing fails, as a program may have some of its own."""
        expected = plan.samples_of(self.step)
        self._log.event("data_changed", step=self.step, samples=[self.samples, expected])
        self._log.print_line(
            f"the run before trained on {self.samples} samples in {self.step} steps; with run.batches({plan.samples}) "
            f"they would have been {expected}. If the data set is another one, samples of an epoch are taken twice or "
            "left out: go on with the one it had, or train under another job name to start anew"
        )

    def train_step(
        self,
        batch: Tensor | Sequence[int],
        loss_of: LossOf,
        update: Callable[[], object],
        *,
        epoch_end: bool = False,
    ) -> None:
        """Take one step on the samples with the indices `batch`, of all ranks together: the same on every rank.

        `loss_of(share)` computes the mean loss of some of them. It is called with this rank's share, in pieces where
        ranks are missing, and once more where a rank is lost meanwhile; its result is weighted and differentiated here.
        Then `update()` is called once, with the gradient of the mean loss over `batch`: `optimizer.step`, or a function
        that also clips, and moves schedulers and averages on. Neither may need another rank.

        On return this step is done, also where only other ranks have come to its end: then their states are here, and
        `update` was not called. After a stop that all ranks agreed on, `should_stop` says so. Raises UserError for what
        would make ranks differ.
        """
        self._check_resumed("train_step")
        if self._stopping:
            raise Preempted(f"asked to stop; the run ends after step {self.step}")
        self._check_no_error("train_step")
        indices = _indices(batch)
        epoch_end = epoch_end or self._epoch_ends_with == self.step + 1
        done = self._position.steps + 1
        self._is_own = True
        while self._position.steps < done:
            self._try(lambda: self._take_step(indices, loss_of, update, epoch_end=epoch_end))
        self._is_own = False

    def finish(self, **metrics: float) -> None:
        """After the loop: as `Run.finish`. Then the ranks leave their process group."""
        self._check_resumed("finish")
        self._check_no_error("finish")
        self._is_own = True
        while not self._has_finished:
            self._try(lambda: self._finish(metrics), is_step=False)
        if self._membership is None:
            self._group.close()
        elif self._stopping:
            self._membership.stop()
        else:
            with collectives():
                self._membership.close()

    def emergency(self, error: Exception) -> None:
        """As `Run.emergency`; the other ranks do not wait for it."""
        if isinstance(error, Finished | Excluded):
            return  # the volume is that of the others
        if self._recovery is not None:
            if is_peer_lost(error) and (self._is_updating or self._is_in_loss or not self._is_own):
                live_scripts.has_waited()
            self._recovery.failed(error)
        super().emergency(error)

    # What belongs to loops that take their steps themselves

    def step_end(self, *_: Any, **__: Any) -> NoReturn:
        """Part of `train_step`."""
        raise UserError("run.step_end() is part of run.train_step(): leave it out")

    def skip_step(self, *_: Any, **__: Any) -> NoReturn:
        """Part of `train_step`."""
        raise UserError("run.skip_step() is part of run.train_step(), which leaves out skipped steps: leave it out")

    def agreed_to_stop(self) -> NoReturn:
        """There is no vote between steps."""
        raise UserError(
            "run.agreed_to_stop() is a vote between steps, in which a rank may be lost: leave it out; a stop waits for "
            "the end of the next step"
        )

    def checkpoint(self, step: int | None = None) -> NoReturn:
        """Not with live recovery."""
        raise UserError("run.checkpoint() needs all ranks between two steps: pass what is to be saved to attach_live()")

    # A step, and what else all ranks do

    @property
    def _is_over(self) -> bool:
        return self._stopping or (self._steps.total_steps is not None and self.step >= self._steps.total_steps)

    def _joined(self, recovery: Recovery) -> bool:
        """Whether the states are now those of ranks that train."""
        self._heartbeat.enter("rendezvous")
        try:
            return recovery.join()
        except Finished as end:
            self._others_have_finished(end)

    def _others_have_finished(self, end: Finished) -> NoReturn:
        say(f"ddp_trainer: {end}")
        self._heartbeat.enter("done")
        raise SystemExit(0) from None

    def _begin(self) -> None:
        """From the newest snapshot; without one, equal on all ranks."""
        super().resume()
        self._position.steps, self._position.epoch, self._position.samples = self.step, self.epoch, self.samples
        if not self.step:
            self._passes.equal_at_first()

    def _finish(self, metrics: Mapping[str, float]) -> None:
        with collectives():
            if not self._stopping:  # on which all ranks have agreed
                self._passes.check_all_leave(self.step)
            super().finish(**metrics)
        self._has_finished = True

    def _let_go(self) -> None:
        """Not yet: the ranks have still to leave their process group."""

    def _try(self, action: Callable[[], None], *, is_step: bool = True) -> None:
        """Do it, and form the next group where a rank is lost meanwhile, or ranks join or leave after a step."""
        recovery = self._recovery
        if recovery is None:
            action()
            return
        try:
            action()
            with collectives():
                if not is_step or self._is_over or not recovery.leaves_group():
                    return
        except RuntimeError as error:
            if self._is_updating or self._is_in_loss or not is_peer_lost(error):
                raise
            recovery.lost(error)
        try:
            with collectives():
                recovery.go_on()
        except Finished as end:
            self._others_have_finished(end)

    def _take_step(self, batch: Tensor, loss_of: LossOf, update: Callable[[], object], *, epoch_end: bool) -> None:
        if self._recovery is not None:
            self._recovery.begin_step()
        if self.step + 1 in self.skipped_steps:
            self._position.advance(len(batch), epoch_end=epoch_end)
            with collectives():
                super().skip_step(samples=len(batch), epoch_end=epoch_end)
            return

        def loss_of_script(share: Tensor) -> Tensor:
            self._is_in_loss = True
            loss = loss_of(share)
            self._is_in_loss = False
            return loss

        loss = self._passes.gradient(batch, loss_of_script, self.step + 1, epoch_end=epoch_end)
        self._is_updating = True
        with self._passes.updating():
            update()
        if not self._order.has_updated and not self._order.may_skip:
            raise UserError("update() has called no optimizer.step(): pass optimizer.step, or a function that calls it")
        self._position.advance(len(batch), epoch_end=epoch_end)
        self._is_updating = False
        with collectives():
            super().step_end(loss, weight=1.0, samples=len(batch), epoch_end=epoch_end)
        if self._recovery is not None:
            self._recovery.end_step()

    def _check_no_error(self, call: str) -> None:
        """Raises UserError where an error has ended a step: the other ranks are in the middle of its collectives, and
        those of the next call would be taken for them.
        """
        if self._is_updating:
            raise UserError("an error has ended update(), so the weights are not those of any step: let the run end")
        if self._is_own and not self._has_finished:
            raise UserError(
                f"run.{call}() was called after an error in a call of the run that the script has caught, or within "
                "one: the other ranks are in the middle of it. Let the error end this rank; what loss_of tolerates, "
                "such as a sample that cannot be read, it catches itself"
            )

    def _check_updating(self) -> None:
        if not self._is_updating:
            raise UserError(
                "optimizer.step() was called outside of update(): pass it to run.train_step(batch, loss_of, update), "
                "which calls it when the gradient of all ranks is there"
            )


def _indices(batch: Tensor | Sequence[int]) -> Tensor:
    """As int64 on the CPU. Raises UserError for what are no indices."""
    try:
        found = torch.as_tensor(batch, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, device="cpu")
    if found.dim() != 1 or not len(found) or found.is_floating_point() or found.dtype is torch.bool:
        raise UserError(
            "run.train_step(batch, …): the batch has the indices of its samples, whole numbers in one dimension and at "
            "least one, of all ranks together; loss_of gets those of this rank"
        )
    return found.to(torch.int64)
