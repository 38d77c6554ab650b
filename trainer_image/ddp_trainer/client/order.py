"""The order of the calls of a step, and an error where a resumed run would otherwise differ from an unbroken one.

    optimizer.step()            # each optimizer, once a step; or a gradient scaler that skips it
    scaler.update()
    scheduler.step()            # and whatever else belongs to the step: an average of the weights
    run.step_end(loss)          # the states are those of a finished step, and may be saved

From the third step on, a loop may leave the update out, as where its gradients are not finite.

What changes after `step_end` and before the next optimizer step is in no snapshot that this `step_end` has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.optim.swa_utils import AveragedModel

from ddp_trainer.client.states import inner_optimizer
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.boundary import before_update
from ddp_trainer.snapshots.codec.state import Stateful, unwrapped

ENOUGH: Final = 2
"""Updates in a row that show that there is one for each end of a step."""


class CallOrder:
    """Watches the states of a run between the end of a step and the next update."""

    def __init__(
        self,
        states: Mapping[str, Stateful],
        on_update: Callable[[], None] | None = None,
        *,
        end: str = "run.step_end()",
    ) -> None:
        """`on_update` is called before each update. `end` is what ends a step of the program, for messages."""
        self._on_update = on_update
        self._end = end
        self._marked = {name: value for name, value in states.items() if isinstance(value, LRScheduler | AveragedModel)}
        self._scalers = {name: value for name, value in states.items() if isinstance(value, GradScaler)}
        self._can_tell = any(isinstance(value, Optimizer | GradScaler) for value in states.values())
        self.inner = inner_optimizer(states)
        """What to say of an optimizer inside of another one that is no state; None where there is none."""
        self._has_updated = False
        self._updates_in_a_row = 0
        self._marks: Mapping[str, Any] | None = None
        # a scheduler knows the optimizer that a wrapper without that class hides
        hidden = [unwrapped(value.optimizer) for value in states.values() if isinstance(value, LRScheduler)]
        updating = {id(value): value for value in (*states.values(), *hidden)}
        if not any(isinstance(value, Optimizer | GradScaler) for value in updating.values()):
            self._marked = {}  # nothing tells when the next step begins
        for value in updating.values():
            before_update(value, self._updating)

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has made a step since the last step ended; true where nothing can tell."""
        return self._has_updated or not self._can_tell

    @property
    def may_skip(self) -> bool:
        """Whether a step may end without an update, as one whose gradients are not finite: two steps in a row had one,
        so the program does not end a step at each micro-batch.
        """
        return self._updates_in_a_row >= ENOUGH

    def resumes(self, step: int) -> None:
        """Training goes on after `step`: so far the run, in all its attempts, has had an update in each."""
        self._updates_in_a_row = max(self._updates_in_a_row, step)
        self.begins()

    def begins(self) -> None:
        """The states are those of a finished step; training goes on from them."""
        self._has_updated = False
        self._marks = {name: _mark(value) for name, value in self._marked.items()}

    def updates_nothing(self) -> None:
        """The step that ends next is one without an update."""
        self._updating()

    def step_ended(self, *, has_loss: bool) -> bool:
        """Whether there was an update since the last step ended. Raises UserError if there was none, and the program
        has not skipped it, or if what should have come before came after it.

        Before the end of a step without an update, a scheduler or an average may have moved: nothing tells whether that
        was in this step.
        """
        updated = self.has_updated
        may_skip = has_loss and self.may_skip
        if updated or not may_skip:
            self.check()
        for name, scaler in self._scalers.items():
            if any(state["stage"] is OptState.STEPPED for state in scaler._per_optimizer_states.values()):
                raise UserError(
                    f"run.step_end() was called before {name}.update(): a snapshot that it saves is without that, and "
                    f"a resumed run would differ. Call {name}.update() after {name}.step(optimizer) and before "
                    "run.step_end()"
                )
        if not updated and not may_skip:
            if self.inner is not None:  # which may have made the update, as in SAM's second_step()
                raise UserError(f"run.step_end() was called without a step() of an optimizer of the run: {self.inner}")
            raise UserError(
                "run.step_end() was called without an optimizer.step() since the last one: call it once a step, after "
                "optimizer.step(), not for each micro-batch. With a gradient scaler, which may skip the step, pass it "
                "as a state: attach(…, scaler=scaler). From the third step on, a loop may leave the update out and "
                "pass the loss"
            )
        if not self.may_skip:
            self._updates_in_a_row += updated
        self.begins()
        return updated

    @property
    def is_kept(self) -> bool:
        """Whether no state has changed since the last step ended, but for what came after the update of the next."""
        return self._changed() is None

    def check(self) -> None:
        """Raises UserError if a state has changed between the end of the last step and now."""
        if (name := self._changed()) is not None:
            call = "step" if isinstance(self._marked[name], LRScheduler) else "update_parameters"
            raise UserError(
                f"{name}.{call}() was called after {self._end}: a snapshot of that step is without it, and a "
                f"resumed run would differ. Call {name}.{call}() after optimizer.step() and before {self._end}"
            )

    def _changed(self) -> str | None:
        marks = self._marks or {}
        return next((name for name, mark in marks.items() if _mark(self._marked[name]) != mark), None)

    def _updating(self) -> None:
        self.check()
        self._marks = None
        self._has_updated = True
        if self._on_update is not None:
            self._on_update()


def _mark(value: Stateful) -> Any:
    """Something that differs after each change, read without waiting for a device."""
    if isinstance(value, AveragedModel):
        return value.n_averaged._version
    if isinstance(value, ChainedScheduler):
        return [_mark(part) for part in value._schedulers]
    return getattr(value, "last_epoch", None), getattr(value, "_step_count", 0)
