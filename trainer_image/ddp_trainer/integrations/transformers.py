"""Hugging Face's Trainer: verified checkpoints, a stop that saves first, and the exit code of a preempted rank.

    from ddp_trainer.integrations.transformers import DDPJobCallback

    callback = DDPJobCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest())

Whatever the Trainer saves is copied into the job's checkpoints, by the file system itself where it can: a link would
change with the Trainer's file, which it writes again when it saves the same step again. It saves as its own arguments
say and, besides, as often as `spec.snapshots.every`: of what it saves for the job alone, only the copy stays.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback, __version__

from ddp_trainer.client.attach import attach
from ddp_trainer.client.run import Run
from ddp_trainer.contract.exit_codes import Preempted, UserError
from ddp_trainer.contract.standard_error import say

BATCH: Final = "ddpjob-step-batch"
"""A file of ours in the checkpoint, with the samples of a step."""
OLD_BATCH: Final = "ddpjob-global-batch"
"""Of earlier versions, which took a batch that ranks divide among them for that of each."""
NO_COPY: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
"""Where copy_file_range(2) does not work."""
FOLLOWS_BATCH: Final = tuple(map(int, __version__.split(".")[:2])) < (5, 3)
"""Whether a Trainer that resumes takes the batch of its checkpoint, whatever its arguments, as up to about 5.1."""


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Make it after the TrainingArguments, which start the process group."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._saved: set[int] = set()
        """Steps that have a checkpoint of this training."""
        self._left: set[int] = set()
        """And those of one before in this process, whose batch has not fitted into memory."""
        self._noted: tuple[int, Path] | None = None
        """Step and folder of what the Trainer has saved, and is not taken over yet."""
        self._is_for_job = False
        """Whether only the job has asked for what the Trainer saves next, or has saved last."""
        self._is_due = False
        """Whether the job has asked for one that the Trainer has not saved yet."""
        self._is_in_epoch = False
        """Whether the last step did not end one, as far as the Trainer knew."""
        self._resumes_from: Path | None = None
        """The checkpoint that `latest` has given."""
        self._batch = 0
        """Samples of a step, of all ranks together."""

    @property
    def run(self) -> Run:
        """The run of this process, for `log` and the like."""
        if self._run is None:
            self._run = attach()
            self._run.resume()
        return self._run

    def latest(self) -> str | None:
        """The newest checkpoint that verifies, as `resume_from_checkpoint` takes it; None for a new run."""
        self._resumes_from = self.run.latest()
        return None if self._resumes_from is None else str(self._resumes_from)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training goes on after `state.global_step`."""
        self.run.training_begins()
        if args.save_only_model:
            raise UserError("save_only_model=True saves nothing to resume from: leave it out of the TrainingArguments")
        # After a resume the state is that of the checkpoint. The Trainer follows the batch in it only where it looks
        # for one that fits into memory, and then it is in the state of a new run, too. An older one always does.
        follows = FOLLOWS_BATCH or args.auto_find_batch_size
        of_device = (follows and state.train_batch_size) or args.train_batch_size
        is_split = args.accelerator_config.split_batches
        self._batch = of_device * args.gradient_accumulation_steps * (1 if is_split else args.world_size)
        if self._resumes_from is not None and state.global_step and args.max_steps <= 0:
            noted = self._resumes_from / BATCH
            _check_batch(noted if noted.exists() or is_split else noted.with_name(OLD_BATCH), self._batch)
        self._is_due = self._is_in_epoch = False
        self._noted = None
        self._left, self._saved = self._left | self._saved, set()
        if self._left and args.process_index == 0:
            say(
                f"training begins again after step {state.global_step}, on {self._batch} samples a step: the "
                f"checkpoints of this attempt up to step {max(self._left)} stay as they are, and their steps are not "
                "saved again"
            )
        self.run.step = state.global_step
        self.run.listen()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over what the Trainer has saved at the end of the epoch before."""
        self._take_over(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """And after the step before."""
        self._take_over(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop where the job asks for it."""
        epoch = float(state.epoch or 0)  # with this step, so whole after the last one of an epoch
        is_end = epoch > 0 and epoch.is_integer()
        self.run.epoch = int(epoch) - is_end
        self.run.step_end(epoch_end=is_end)
        self._is_in_epoch = not is_end
        # With save_strategy="best" the Trainer decides anew after an evaluation: then the next step makes up for it.
        self._is_due = self._is_due or self.run.should_save()
        # After the last step of an epoch the Trainer may save of its own accord, and a second time is one too many.
        self._ask_to_save(control, self._is_due and not is_end and state.global_step not in self._left)
        control.should_training_stop = control.should_training_stop or self.run.should_stop()
        self._save_at_a_stop(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what was due after the last step, once."""
        self._is_for_job = self._is_for_job and not control.should_save  # it keeps what it would save a second time
        self._take_over(args, state)
        if self._is_in_epoch and not control.should_training_stop:  # of a data set without a length
            self._is_in_epoch = False
            self.run.epoch_ends()
        # A step that is saved is not due any more, and the next one makes up for nothing.
        is_saved = state.global_step in self._saved
        self._is_due = (self._is_due or self.run.should_save()) and not is_saved
        control.should_save = control.should_save and not is_saved
        self._ask_to_save(control, self._is_due and state.global_step not in self._left)
        if self._is_in_epoch and self.run.should_stop():
            # The Trainer comes here when it leaves an epoch, too, and eval_strategy="epoch" would evaluate for as long
            # as a pod may have to leave. At the end of one it has to: the next attempt begins after that.
            control.should_evaluate = False
        self._save_at_a_stop(args, control)

    def _ask_to_save(self, control: Any, is_due: bool) -> None:
        # After an evaluation another callback may ask for the same save, which this one would not see.
        self._is_for_job = is_due and not control.should_save and not control.should_evaluate
        control.should_save = control.should_save or is_due

    def _save_at_a_stop(self, args: Any, control: Any) -> None:
        """With save_strategy="best" the Trainer decides anew after an evaluation, and forgets that it was to save."""
        if self.run.should_stop() and args.save_strategy == "best":
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has saved. Callbacks behind this one may still add files of theirs, such as an adapter."""
        self._is_due = False
        if state.global_step not in self._saved | self._left:
            self._noted = state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take over what was saved last: after the log of the end, save_total_limit=1 may remove it."""
        if "train_runtime" in (logs or {}):
            self._take_over(args, state)

    def _take_over(self, args: Any, state: Any) -> None:
        """Make a checkpoint of what the Trainer has saved, and all callbacks have added to."""
        if self._noted is None:
            return
        (step, source), self._noted = self._noted, None
        with self.run.checkpoint(step) as folder:
            # All ranks are here, so all have saved. One of each node, as the folder may be the node's own.
            if args.local_process_index == 0:
                _copy_all(source, folder)
            if args.process_index == 0:
                (folder / BATCH).write_text(str(self._batch))
        self._saved.add(step)
        is_left_over = self._is_for_job and not _is_of_use(source, args, state)
        if args.local_process_index == 0 and (args.save_strategy == "no" or is_left_over):
            # The job has its copy, and the Trainer never removes its own without save_total_limit.
            shutil.rmtree(source, ignore_errors=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the last loss; after a stop, leave as preempted instead of going on to what follows the training."""
        self._take_over(args, state)
        if self.run.should_stop():
            self.run.finish()
            raise Preempted(f"asked to stop; the checkpoint of step {state.global_step} is saved")
        self.run.training_ends()


def _check_batch(noted: Path, now: int) -> None:
    """Raises UserError for a run of so many epochs that goes on with another batch: the Trainer takes the steps that
    are done for as many of its own, so it would leave samples out, or even train no more and succeed, or take them
    twice.
    """
    try:
        before = int(noted.read_text())
    except FileNotFoundError:  # an earlier version has saved it
        return
    if before != now:
        raise UserError(
            f"the checkpoint's run trained on {before} samples a step, all ranks together, and this one would on "
            f"{now}: the Trainer counts steps, so it would leave samples of its epochs out or take them twice, with "
            "another learning-rate schedule. Keep the number with any number of ranks (WORLD_SIZE), by "
            "per_device_train_batch_size or gradient_accumulation_steps; or set max_steps, or train under another job "
            "name to start anew"
        )


def _is_of_use(source: Path, args: Any, state: Any) -> bool:
    """Whether the Trainer may load it as its best, still push it, or has removed an older one of its own for it."""
    is_best = Path(state.best_model_checkpoint or "") == source
    return is_best or args.push_to_hub or (args.save_total_limit or 0) > 0


def _copy_all(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise UserError(
            f"{source} is gone before the job has its copy: a callback that removes it in on_save has to do so "
            "later, as in the next on_step_end"
        )
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
            continue
        try:
            _copy(path, place)
        except FileExistsError:
            continue  # from another node, which sees the same folder


def _copy(path: Path, place: Path) -> None:
    with path.open("rb") as source, place.open("xb") as target:
        try:
            while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in NO_COPY:
                raise
            shutil.copyfileobj(source, target, 4 << 20)
