"""A loss that is NaN or infinite: what is done about it, by `spec.nonFiniteLossPolicy`.

    Warn        a line, an event and the status say so, once; training continues
    Stop        the run fails at once, without a restart and without a snapshot of that step
    Rollback    the next attempt resumes from the last snapshot that is known to be sound, with another data order

Losses are those that all ranks have reduced, so all ranks do the same after the same step. A step that a gradient
scaler skips has a finite loss: its gradients alone are not, and they change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ddp_trainer.contract.exit_codes import LossNotFinite, RollBack
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.snapshots.trust.rollback import MOST


class FiniteLosses:
    """Looks at each loss once. `roll_back` asks the next attempt to go back to before a step, on all ranks alike, and
    says whether it can.
    """

    def __init__(self, policy: str, log: RunLog, heartbeat: Heartbeat, roll_back: Callable[[int], bool]) -> None:
        self.is_finite = True
        """Whether the last loss was."""
        self.rollbacks = 0
        """How often this job was rolled back."""
        self._policy = policy
        self._log = log
        self._heartbeat = heartbeat
        self._roll_back = roll_back

    def seen(self, step: int, loss: float, gradient_norm: float = 0.0, *, of: str = "step") -> None:
        """The loss of a step, or `of` a validation after it. Raises LossNotFinite or RollBack by the policy."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            if not self.is_finite:
                self.is_finite = True
                self._heartbeat.non_finite_loss(None)
                self._log.event("finite_loss", step=step)
                self._log.print_line(f"the loss of {of} {step} is finite again")
            return
        what = f"loss of {of} {step} is {loss}"
        if math.isfinite(loss):
            what = f"gradient norm of {of} {step} is {gradient_norm}, so its loss will not be finite"
        is_new, self.is_finite = self.is_finite, False
        self._heartbeat.non_finite_loss(step)
        if is_new:
            self._log.event("non_finite_loss", step=step, loss=str(loss), policy=self._policy)
        if self._policy == "Stop":
            raise LossNotFinite(f"the {what}")
        if self._policy == "Rollback":
            # the states of a validation are those after the step
            self._go_back(step if of == "step" else step + 1, what)
        if is_new:
            self._log.print_line(
                f"the {what}. Training continues (nonFiniteLossPolicy: Warn): lower the learning rate, clip gradients, "
                "or check the data"
            )

    def _go_back(self, step: int, what: str) -> None:
        if self.rollbacks >= MOST:
            raise LossNotFinite(f"the {what}, after {self.rollbacks} rollbacks, each with another data order")
        if not self._roll_back(step):
            raise LossNotFinite(f"the {what}, and the volume does not take the request to go back")
        which = f"rollback {self.rollbacks + 1} of {MOST}"
        raise RollBack(f"the {what}: the next attempt resumes from a snapshot before it ({which})")
