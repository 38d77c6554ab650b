"""What `attach` gives to a training program: the calls, in their order, on every rank alike.

step = run.resume()                     once, before the loop: the states of the newest snapshot are loaded
optimizer.step(); scheduler.step()      a step …
run.step_end(loss)                      … ends, and may be saved
run.should_stop()                       after it: whether to leave the loop
run.finish()                            once, after the loop

run.phase("validate"), run.beat()       around and in what takes long and is no step
run.agreed_to_stop(), run.stop()        in it, to leave before its end
run.log(accuracy=0.9)                   values of the program's own, at any time
run.skipped_steps, run.skip_step()      batches to leave out, after a rollback
run.checkpoint(step), run.latest()      files of the program's own, at any time
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.client import finished_runs
from ddp_trainer.client.alike import AFTER_STEPS, sampled, unlike
from ddp_trainer.client.finite import FiniteLosses, are_finite
from ddp_trainer.client.order import CallOrder
from ddp_trainer.client.own_files import OwnFiles
from ddp_trainer.client.own_values import OwnValues, settings, whole
from ddp_trainer.client.states import LOSSES, States
from ddp_trainer.client.steps import PLOT_STEPS, Change, Steps
from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import LossNotFinite, Preempted, RollBack, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog, SnapshotReporter
from ddp_trainer.rank.data_waits import DataWaits
from ddp_trainer.rank.failures import not_on_failure
from ddp_trainer.rank.observe import ScriptObserver
from ddp_trainer.rank.pass_times import PassTimes
from ddp_trainer.rank.step_reduce import on_any_rank
from ddp_trainer.rank.stop_request import leave_as_preempted
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.ranks import Ranks, ShardRanks
from ddp_trainer.snapshots.session import Progress, Snapshots
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.names import LAST_STEP

PHASES: Final = ("load", "validate", "save")
"""What a program may say that it does between steps; each has the longest allowance of the stall detection."""


class Run:
    """A training run: `step`, `samples` and `epoch` finished, over all attempts. Made by `attach`, and by the built-in
    loop for itself.
    """

    _END_OF_STEP: ClassVar = "run.step_end()"
    _COMPARES: ClassVar = True
    """Whether ranks compare their optimizers, where a program may have any."""

    def __init__(
        self,
        states: States,
        world: World,
        job: JobEnvironment,
        heartbeat: Heartbeat,
        *,
        log: RunLog,
        observer: ScriptObserver | None = None,
        global_batch: int,
        total_steps: int | None,
        strategy: str = "own",
        plot_every: int = PLOT_STEPS,
        plotted: Callable[[], Mapping[str, float]] = dict,
        prints_steps: bool = False,
        has_epochs: bool = False,
        config: Mapping[str, Any] | None = None,
        has_newcomer: Callable[[], bool] = lambda: False,
        least: int | None = None,
        procs: int = 1,
        modules: Callable[[], Iterable[object]] = tuple,
        data_waits: DataWaits | None = None,
        check_view: Callable[[], None] | None = None,
        shard_ranks: ShardRanks | None = None,
    ) -> None:
        """`observer` is what reports steps; None where the run does so itself. Without states, the program saves.

        `strategy` names how ranks train together, for snapshots; `config` are the settings of the program; `modules`
        has what is called in a step, in its wrappers; `data_waits` is None where the program measures them itself. The
        rest is as in `Steps`.
        """
        self._global_batch = global_batch
        # without an operator, the time at which a job was created is that of each call
        self._key = job.log_dir, job.uid, job.attempt, bool(states.saved)
        self._world = world
        self._heartbeat = heartbeat
        self._observer = observer
        self._log = log
        self._code_sha256 = job.code_sha256
        self._config = None if config is None else settings(config)
        # a group of its own, where training uses NCCL
        needed = not states.saved or job.non_finite_loss == "Rollback"
        self._ranks = Ranks(world.rank, world.size if needed else 1)
        self._uses_ranks = needed
        self._losses = FiniteLosses(job.non_finite_loss, log, heartbeat, self._ranks, lambda: self._fence)
        given = (*states.live.values(), *states.saved.values())
        self._modules = [value for value in given if isinstance(value, nn.Module)]
        self._data_waits = data_waits or DataWaits()
        self._optimizer = next((value for value in states.live.values() if isinstance(value, Optimizer)), None)
        self._steps = Steps(
            world,
            log,
            heartbeat if observer is None else None,
            total_steps=total_steps,
            learning_rate=lambda: self._rate_of_update,
            observed_rate=lambda: None if observer is None else observer.samples_per_second,
            plot_every=plot_every,
            plotted=plotted,
            prints=prints_steps,
            has_epochs=has_epochs,
            losses=self._losses,
            passes=PassTimes(modules),
            data_waits=self._data_waits,
            has_newcomer=has_newcomer,
            least=least,
            procs=procs,
        )
        self._rate_of_update: float | None = None
        """The learning rate of the last update: a scheduler has moved on when its step ends."""
        self._stopping = False
        self._is_resumed = False
        self._batch_of_snapshot: int | None = None
        """The global batch of the run that has saved what this one resumed from."""
        self._is_failing = False
        self._updates_left_out = 0
        self._values = OwnValues()
        report = SnapshotReporter(heartbeat, log)
        self._snapshots: Snapshots | None = None
        if states.saved:
            self._snapshots = Snapshots.of_job(
                {**states.saved, LOSSES: log.losses},
                job,
                world,
                strategy=strategy,
                global_batch=global_batch,
                on_event=report,
                sharded=states.sharded,
                per_rank=states.per_rank,
                changes_with_optimizer=(LOSSES, *states.changes_with_optimizer),
                config=self._config,
                loss_is_finite=self._loss_is_finite,
                check_view=check_view,
                shard_ranks=shard_ranks,
            )
        compares = self._COMPARES and strategy == "own" and world.size > 1 and not states.sharded
        self._compared = {
            name: value
            for name, value in states.live.items()
            if compares and isinstance(value, Optimizer) and name not in states.per_rank
        }
        """Those whose states are to be compared on all ranks, until that is done."""
        self._steps_until_compared = self._next_comparison = AFTER_STEPS
        self._order = CallOrder(states.live, self._begin_update, end=self._END_OF_STEP)
        self._files = OwnFiles(
            job,
            world,
            self._ranks if self._snapshots is None else None,
            global_batch=global_batch,
            config=self._config,
            report=report,
        )

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._steps.step

    @step.setter
    def step(self, step: int) -> None:
        self._steps.step = step

    @property
    def samples(self) -> int:
        """Samples trained on by all ranks; 0 where `global_batch` is not known."""
        return self._steps.samples

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._steps.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._steps.epoch = epoch

    # The loop

    def resume(self) -> int:
        """How many steps are finished. Call it once, before the loop.

        With states, the newest snapshot is loaded into them. Without, it is the step of the newest checkpoint that
        verifies, which the program loads from `latest()`.
        """
        if self._is_resumed:
            raise UserError("run.resume() was called twice: call it once, before the loop")
        if self._observer is None:
            self._heartbeat.enter("load")
        snapshots = self._snapshots
        manifest = self._files.resume() if snapshots is None else snapshots.resume(self._heartbeat.beat)
        if manifest is not None:
            finished_runs.check_not_ended(self._key, manifest.step, self._steps.total_steps)
            steps = self._steps
            steps.step, steps.epoch, steps.samples = manifest.step, manifest.epoch, manifest.samples
            self._batch_of_snapshot = manifest.global_batch
            self._note_other_batch(manifest)
        self._files.begins(self.step)
        self._losses.resumed()
        self._is_resumed = True
        finished_runs.resumes(self._key, self)
        self._order.resumes(self.step)
        self._log.resumed(self.step)
        facts: dict[str, Any] = {"samples": self.samples, "worldSize": self._world.size}
        facts["totalSteps"] = self._steps.total_steps
        if self._config is not None:
            facts["config"] = self._config
        if self._code_sha256 is not None:
            facts["codeSha256"] = self._code_sha256
        if self._losses.rollbacks:
            facts["rollbacks"] = self._losses.rollbacks
        self._log.event("resumed" if self.step else "started", step=self.step, **facts)
        if self.step:
            self._log.print_line(f"resuming after step {self.step}{self._of_total}")
        if self._order.inner is not None:
            self._log.print_line(self._order.inner)
        self.listen()
        if self._observer is not None:
            self._observer.begins(step=self.step, total_steps=self._steps.total_steps, run_checks_loss=True)
        else:
            self._heartbeat.resumed(self.step, self.samples)
            self._heartbeat.enter("first_step")
        return self.step

    def _note_other_batch(self, manifest: Manifest) -> None:
        """Say so where steps are on other numbers of samples than before: a schedule, and a place in the data, count
        steps, and nothing fails.
        """
        before, now = manifest.global_batch, self._global_batch
        ranks, size = manifest.world_size, self._world.size
        if before == now and (now or ranks == size):
            return
        if before and now:
            what = f"the run before trained on {before} samples a step, this one trains on {now}:"
        elif ranks != size:
            what = (
                f"the run before had {ranks} ranks, this one has {size}: unless all together take as many samples a "
                "step as before,"
            )
        else:
            return
        self._log.event("batch_changed", step=manifest.step, globalBatch=[before, now], worldSize=[ranks, size])
        self._log.print_line(
            f"{what} the total of steps, learning-rate schedules and the place in an epoch, which count steps, do not "
            "fit. Keep the global batch the same with any number of ranks, for instance by gradient accumulation"
        )

    def join(self) -> None:
        """The process group is another one, and the world is that of it; before `resume` or `go_on`."""
        if self._uses_ranks:
            self._ranks.regroup(self._world.rank, self._world.size)
        if self._snapshots is not None:
            self._snapshots.join(self._world)
        self._log.regrouped()

    def go_on(self, progress: Progress, *, resumed_from: int) -> None:
        """In place of `resume`, where the states are those of a peer, or still there: no snapshot is read. The peers
        have resumed from step `resumed_from`: no step after it is lost.
        """
        assert self._snapshots is not None
        self._steps.regroup(progress)
        self._snapshots.go_on(progress)
        self._files.begins(self.step)
        self._order.resumes(self.step)
        self._log.resumed(self.step)
        self._log.event("regrouped", step=self.step, worldSize=self._world.size)
        if not self._is_resumed:
            self._is_resumed = True
            self.listen()
            self._heartbeat.resumed(self.step, self.samples, resumed_from=resumed_from)
            self._heartbeat.enter("first_step")

    def regroups(self) -> None:
        """Say that this rank waits for the next process group, and takes no step meanwhile."""
        self._heartbeat.enter("rendezvous")

    def record_loss(self) -> None:
        """Wait for the loss of the last step, before all ranks leave the process group."""
        self._steps.record_loss()

    def lost_group(self) -> None:
        """The process group is lost: take the loss of the last step if it has arrived."""
        self._steps.lost_group()

    def step_end(
        self,
        loss: Tensor | float | None = None,
        *,
        epoch_end: bool = False,
        samples: int | None = None,
        weight: float | None = None,
        gradient_norm: Tensor | float | None = None,
    ) -> None:
        """Say that an optimizer step is done, with this rank's mean loss if it is known; saves if it is time.

        Call it after `optimizer.step()`, and after whatever else the step changes, such as `scheduler.step()`. Once all
        ranks agreed to stop, it has saved a snapshot, and `should_stop` says so. A loop that goes on nevertheless gets
        Preempted at the next call. After the last of `total_steps` steps it neither saves nor stops: `finish` is next.

        A step that is not on `global_batch` samples says on how many, of all ranks together, with `samples`. Where
        ranks have different numbers of them, `weight` is this rank's share, 1 in the sum over all ranks; losses that
        are shares already have a weight of 1. With the norm of its gradients, as `clip_grad_norm_` returns it, a step
        that makes the weights NaN is known before a snapshot holds them; not with a gradient scaler, which skips it.

        From the third step on, a step may have left the update out, on all ranks alike, and passes its loss. Raises
        UserError where only some ranks have, when the next step ends.
        """
        self._check_resumed("step_end")
        if loss is None and self._observer is not None:
            loss = self._observer.last_loss
        self._end(loss, epoch_end=epoch_end, samples=samples, weight=weight, gradient_norm=gradient_norm)

    def skip_step(self, *, epoch_end: bool = False, samples: int | None = None) -> None:
        """In place of the update and of `step_end`, for a step of `skipped_steps`: its batch is left out, nothing
        changes, and it counts as a step.
        """
        self._check_resumed("skip_step")
        if self._observer is not None:
            self._observer.skipped()
        self._order.updates_nothing()
        self._heartbeat.skipped_steps("rollback")
        self._log.event("step_skipped", step=self.step + 1)
        self._log.print_line(f"step {self.step + 1} is skipped: the job was rolled back from it, or from the next one")
        self._end(None, epoch_end=epoch_end, samples=samples)

    def _end(
        self,
        loss: Tensor | float | None,
        *,
        epoch_end: bool,
        samples: int | None,
        weight: float | None = None,
        gradient_norm: Tensor | float | None = None,
    ) -> None:
        if self._stopping:
            raise Preempted(f"asked to stop; the run ends after step {self.step}")
        epoch_end = bool(epoch_end)  # NumPy's and a tensor's would be in the number of the epoch
        samples = self._global_batch if samples is None else whole("run.step_end", "samples", samples)
        has_updated = self._order.step_ended(has_loss=loss is not None)
        if not has_updated:
            gradient_norm = None  # the weights are what they were
            self._left_out_update()
        stop = self._steps.agreed_to_stop()
        self._steps.end(
            loss,
            weight=weight,
            samples=samples,
            epoch_end=epoch_end,
            gradient_norm=gradient_norm,
            has_drawn=self._snapshots is None or self._snapshots.has_drawn(),
            has_updated=has_updated,
        )
        is_last = self.step == self._steps.total_steps and self._snapshots is not None
        if stop and not is_last:
            self.stop()
        elif self._snapshots is not None:
            draws_nothing = None if self._steps.had_draws else self._steps.none_has_drawn
            self._snapshots.step_end(
                self._steps.progress, epoch_end=epoch_end, none_has_drawn=draws_nothing, may_save=not is_last
            )
            if self._compared and not is_last:
                self._compare()  # after what an emergency snapshot needs: a rank may be lost in it
        else:
            self._files.step_ended(self._steps.progress, epoch_end=epoch_end)

    def _compare(self) -> None:
        """After AFTER_STEPS steps, and again after twice as many while no optimizer has a state."""
        self._steps_until_compared -= 1
        if self._steps_until_compared:
            return
        assert self._snapshots is not None
        of_ranks = self._snapshots.of_all_ranks(sampled(self._compared))
        if not any(of_ranks):
            self._steps_until_compared = self._next_comparison
            self._next_comparison *= 2
            return
        self._compared = {}
        if (state := unlike(of_ranks)) is None:
            return
        self._log.event("states_differ", step=self.step, state=state)
        self._log.print_line(
            f"the ranks have different values in {state} (name, number of the parameter, what is kept of it): a "
            "snapshot holds those of rank 0, so a resumed run will differ. If each rank has a part of its own, as with "
            "an optimizer that divides its state among the ranks, save it with its own writer: attach() without a "
            "model, and run.checkpoint() (docs: Bring your script)"
        )

    def _left_out_update(self) -> None:
        if self._snapshots is not None:
            if self._snapshots.has_other_weights(self.step):
                raise UserError(
                    "run.step_end() was called without an optimizer.step() of the run's, and the weights have changed: "
                    "pass the optimizer that changes them by name, as in attach(…, second=optimizer)"
                )
            self._snapshots.begin_update()  # nobody else has said that a state may change
        self._heartbeat.skipped_steps("no_update")
        self._updates_left_out += 1
        if (count := self._updates_left_out) in (1, 10, 100, 1000):
            self._log.event("step_without_update", step=self.step + 1, steps=count)
            self._log.print_line(
                f"step {self.step + 1} has ended without an optimizer.step(), as {count} of this attempt did: its "
                "weights are those of the step before, and it counts as a step. If a gradient scaler skipped the "
                "update, pass it as a state: attach(…, scaler=scaler)"
            )

    def should_stop(self) -> bool:
        """Whether to leave the loop, the same on every rank; the exit code will say preempted. The snapshot is saved;
        a program that saves itself does so now.
        """
        return self._stopping

    def should_save(self) -> bool:
        """For a program that saves itself: whether the job's save interval, or a stop, asks for a checkpoint after this
        step, until there is one; the same on every rank. That it is the last step is for the program to know.
        """
        return self._files.should_save

    def finish(self, **metrics: float) -> None:
        """After the loop: save a last snapshot, unless it was left early, and report measured values, such as
        eval_accuracy=0.96.
        """
        self._check_resumed("finish")
        if self._snapshots is None:  # else it comes before the snapshot
            self.record_loss()
        if self._stopping:
            self._log.close()  # a program that saves itself has done so only now
            finished_runs.has_ended(self._key, None)
            return
        self.save_last()
        if (total := self._steps.total_steps) is not None and self.step < total:
            # a data loader that resumes at the end of an epoch may give nothing in the next one, and nothing fails
            self._log.print_line(
                f"the loop has ended after step {self.step} of {total}: unless it was meant to end early, it had fewer "
                "batches than total_steps counts"
            )
        self.log(metrics)
        self._steps.report_epoch()
        self._log.event("finished", step=self.step, samples=self.samples, **metrics)
        self._log.close()
        self._heartbeat.enter("done")
        finished_runs.has_ended(self._key, self.step)
        self._let_go()

    def _let_go(self) -> None:
        """All is saved, so an exception that comes later is none of this run's."""
        not_on_failure(self.emergency)

    def save_last(self) -> None:
        """Save the last snapshot, as `finish` does, before something long that comes first, such as a validation."""
        self._order.check()
        if self._snapshots is not None:
            self._save("final")

    def agreed_to_stop(self) -> bool:
        """In what is no step, such as after each batch of a validation, on every rank alike: whether a rank had been
        asked to stop at the call before. `stop` then saves.
        """
        return self._steps.agreed_between_steps()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM has come to this rank, whatever the others know of it."""
        return self._steps.is_asked_to_stop

    @property
    def change(self) -> Change:
        """With live recovery, after the end of a step or `agreed_to_stop`: what becomes of the process group now."""
        return self._steps.change

    def stop(self) -> None:
        """After the end of a step, on every rank alike: save it, and let `should_stop` say so."""
        if self._snapshots is not None:
            self._save("preempted")
        else:
            self._files.should_save = True
        self._log.event("preempted", step=self.step)
        if self._snapshots is not None:
            self._log.print_line(f"asked to stop: snapshot of step {self.step}{self._of_total} is saved")
            self._log.close()
        self._stopping = True
        leave_as_preempted(self.step)

    def generators_at_boundary(self) -> Tensor | None:
        """This rank's random number generators (`snapshots.codec.rng`) when the last step ended; None where that is not
        known.
        """
        return self._snapshots.generators_at_boundary() if self._snapshots is not None else None

    def await_others(self) -> None:
        """Wait, some seconds at most, for what an emergency snapshot needs of the other ranks: from then on none."""
        if self._snapshots is not None:
            self._snapshots.await_others()

    def emergency(self, error: Exception) -> None:
        """After an exception that ends training: save the last finished step, if the states are still those of it.
        `attach` has this called.
        """
        if self._snapshots is None or not self._is_resumed or not finished_runs.is_last(self._key, self):
            return
        self._heartbeat.enter("save")
        if isinstance(error, LossNotFinite | RollBack):
            self._snapshots.close()  # the one before, which is worth waiting for
            self._log.close()
            return
        if not self._order.is_kept:  # a scheduler has moved where no update announced it
            self._snapshots.begin_update()
        # what is known now has to do: the other ranks may be gone
        with contextlib.suppress(Exception):
            self._steps.record_loss()
        self._is_failing = True
        self._snapshots.emergency(error)
        self._log.close()

    def listen(self) -> None:
        """From now on SIGTERM asks all ranks to stop after a step, also where a library has put a handler of its own in
        place since `resume`.
        """
        self._steps.listen()

    # What is no step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a validation, a download or a save of the program's own: no step is due in it, and its time is shown.
        `name` is one of PHASES. In one that takes longer than half an hour, call `beat` now and then.
        """
        if name not in PHASES:
            raise UserError(f"run.phase({name!r}): the phases are {', '.join(PHASES)}")
        before = self._heartbeat.phase
        self._heartbeat.enter(name)
        self._steps.paused()
        try:
            with self._data_waits.left_out():
                yield
        finally:
            self._heartbeat.enter(before)
        self._steps.go_on()

    def beat(self) -> None:
        """Say that this rank is alive, for instance once a validation batch."""
        self._heartbeat.beat()

    def log(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Report values of the program's own: `run.log(accuracy=0.9)`, or in a dict, `run.log({"val/loss": 2.0})`.

        The last value of each is in the job's status and in Prometheus (`ddpjob_train_metric`), and all are in
        TensorBoard; rank 0's count. Names have up to 64 letters, digits and any of `_./-`; a run has up to 64.
        """
        numbers = self._values.accepted({**(values or {}), **named})
        if numbers:
            self._steps.measured(numbers)
            self._heartbeat.metrics(**numbers)
            self._log.scalars(self.step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    # Files of the program's own

    @contextmanager
    def checkpoint(self, step: int | None = None) -> Iterator[Path]:
        """A folder that the ranks write a checkpoint into, each what it has; `step` is the last one unless it is given.

        After the block the files are summed and synced, and the folder gets its name, at once and last. The newest
        `spec.snapshots.keep` stay. An exception in the block of any rank leaves no checkpoint: it reaches its own rank
        as it is, the others as SnapshotError. Raises FencedError if a newer attempt has taken over, and UserError for
        a step that has a checkpoint of this attempt.
        """
        at = self.step if step is None else int(step)
        if not 0 <= at <= LAST_STEP:
            raise UserError(
                f"run.checkpoint({step}): a step is a whole number from 0 to {LAST_STEP}; count optimizer steps, not "
                "tokens"
            )
        kind: Literal["preempted", "periodic"] = "preempted" if self._stopping else "periodic"
        progress = Progress(at, self.epoch, self.samples)
        finite = self._loss_is_finite()
        with self.phase("save"), self._files.writing(progress, kind=kind, loss_is_finite=finite) as folder:
            yield folder
        self._files.should_save = False

    def training_begins(self) -> None:
        """The program's library begins to train. Raises UserError where it has come to the end of a training of this
        job before, in this process: it would go on from a checkpoint of that, whatever the model.
        """
        finished_runs.check_trains_once(self._key)

    def epoch_ends(self) -> None:
        """An epoch has ended, and the end of its last step did not say so, since more batches followed. For a program
        that saves itself, on every rank alike.
        """
        self._steps.epoch += 1
        self._files.epoch_ended(self._steps.progress)

    def training_ends(self) -> None:
        """It has come to its end: record the loss of the last step."""
        self.record_loss()
        finished_runs.has_ended(self._key, self.step)

    def latest(self) -> Path | None:
        """The newest checkpoint whose every byte verifies, the same folder on every rank; None if there is none."""
        return self._files.latest()

    # A loss that is not finite

    @property
    def rollbacks(self) -> int:
        """How often this job was rolled back from a loss that is not finite, with the policy Rollback."""
        return self._losses.rollbacks

    @property
    def skipped_steps(self) -> frozenset[int]:
        """Steps whose batches are to be left out since, with `skip_step`: the same batches lead to the same loss."""
        return self._losses.skipped

    def rolled_back(self, rollbacks: int, skipped: Iterable[int]) -> None:
        """What `resume` would have found out, from a peer that did."""
        self._losses.rollbacks, self._losses.skipped = rollbacks, frozenset(skipped)

    def check_loss(self, loss: float) -> None:
        """A loss after this step that all ranks have alike, such as that of a validation: one that is not finite is
        handled as that of a step.
        """
        self._losses.validated(self.step, loss)

    @property
    def _of_total(self) -> str:
        total = self._steps.total_steps
        return "" if total is None else f" of {total}"

    @property
    def _fence(self) -> Fence | None:
        return self._snapshots.fence if self._snapshots is not None else self._files.fence

    def _loss_is_finite(self) -> bool:
        """For a snapshot of this step: the loss was, and the weights are. Raises as the policy says, on all ranks
        alike.
        """
        if self._is_failing:
            return self._losses.is_finite and are_finite(self._modules)
        self._steps.record_loss()
        if self._losses.is_finite and self._modules:
            (is_broken,) = on_any_rank(self._world, not are_finite(self._modules))
            if is_broken:
                self._losses.weights_are_not_finite(self.step)
        return self._losses.is_finite

    def _check_resumed(self, call: str) -> None:
        if not self._is_resumed:
            raise UserError(f"run.{call}() was called before run.resume(): call resume() once, before the loop")
        if self._snapshots is not None:
            finished_runs.check_is_last(self._key, self, call)

    def _begin_update(self) -> None:
        self._rate_of_update = self._learning_rate
        if self._snapshots is not None:
            self._snapshots.begin_update()

    @property
    def _learning_rate(self) -> float | None:
        """Of the first parameter group; None where a tensor has it, which may lie on a GPU."""
        rate = self._optimizer.param_groups[0].get("lr") if self._optimizer is not None else None
        return float(rate) if isinstance(rate, int | float) else None

    def _save(self, kind: Literal["preempted", "final"]) -> None:
        """Save and wait. Raises RuntimeError if the volume would not take it: then this was no orderly end."""
        assert self._snapshots is not None
        self._steps.record_loss()
        self._heartbeat.last_loss_is(self._log.losses.last_loss)
        self._heartbeat.enter("save")
        saved = self._snapshots.save(self._steps.progress, kind=kind, wait=True)
        self._snapshots.close()
        if not saved:
            problem = self._snapshots.problem() or "it was not written in time"
            raise RuntimeError(
                f"the {kind} snapshot of step {self.step} could not be saved: {problem}; when the run is started "
                "again, it goes on from the newest one that was"
            )
        if self._world.rank != 0:  # rank 0 has said so, but the kubelet may lose what its pod says at its end
            self._heartbeat.snapshot(self.step, time.time(), verified=True)
