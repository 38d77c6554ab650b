"""A loss or weights that are NaN or infinite: what is done about it, by `spec.nonFiniteLossPolicy`.

    Warn        a line, an event and the status say so, once; training continues
    Stop        the run fails at once, without a restart and without a snapshot of that step
    Rollback    the next attempt resumes from the last snapshot that is known to be sound, and skips the batches of that
                step and of the one before it

Skipping follows PaLM (arXiv:2204.02311, section 5.1), which resumed before a spike of the loss and left out the batches
around it: the same batches bring about the same loss, and other batches after the same weights do not. The loss of a
step is NaN by its own batch, or by the update of the step before.

Losses are those that all ranks have reduced, so all ranks do the same after the same step. A step that a gradient
scaler skips has a finite loss: its gradients alone are not, and they change nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ddp_trainer.contract.exit_codes import LossNotFinite, RollBack
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.resuming import decided_by_first
from ddp_trainer.snapshots.trust import rollback
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence


class FiniteLosses:
    """Looks at each loss once. `ranks` and rank 0's `fence` are what rollbacks are agreed on and asked for with."""

    def __init__(
        self, policy: str, log: RunLog, heartbeat: Heartbeat, ranks: Ranks, fence: Callable[[], Fence | None]
    ) -> None:
        self.is_finite = True
        """Whether the last loss was."""
        self.rollbacks = 0
        """How often this job was rolled back."""
        self.skipped: frozenset[int] = frozenset()
        """Steps whose batches are left out since."""
        self._policy = policy
        self._log = log
        self._heartbeat = heartbeat
        self._ranks = ranks
        self._fence = fence

    def resumed(self) -> None:
        """Learn what this job was rolled back from, on all ranks alike. Raises SnapshotError where that cannot be read
        now: the same batches would be taken again.
        """
        if self._policy != "Rollback":
            return
        fence, asked, error = self._fence(), list[int](), None
        if fence is not None:
            try:
                with storage_awaited():
                    asked = rollback.asked(fence)[: rollback.MOST]
            except OSError as problem:
                error = SnapshotError(f"what this job was rolled back from cannot be read: {problem}. Check the volume")
        decided_by_first(self._ranks, None, error)
        self.rollbacks, *steps = self._ranks.numbers_from_first(len(asked), *asked, *[0] * (rollback.MOST - len(asked)))
        self.skipped = frozenset(skipped for step in steps for skipped in (step - 1, step) if skipped > 0)

    def seen(self, step: int, loss: float, gradient_norm: float = 0.0) -> None:
        """The loss of a step. Raises LossNotFinite or RollBack by the policy."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            if not self.is_finite:
                self.is_finite = True
                self._heartbeat.non_finite_loss(None)
                self._log.event("finite_loss", step=step)
                self._log.print_line(f"the loss of step {step} is finite again")
        elif math.isfinite(loss):
            what = f"gradient norm of step {step} is {gradient_norm}, so its loss will not be finite"
            self._not_finite(step, what, loss=loss, first=step)
        else:
            self._not_finite(step, f"loss of step {step} is {loss}", loss=loss, first=step)

    def validated(self, step: int, loss: float) -> None:
        """The loss of a validation with the weights after a step. Raises as `seen` does."""
        if not math.isfinite(loss):
            self._not_finite(step, f"loss of the validation after step {step} is {loss}", loss=loss, first=step + 1)

    def weights_are_not_finite(self, step: int) -> None:
        """A snapshot of a step would hold them. Raises as `seen` does."""
        self._not_finite(step, f"weights after step {step} are not finite", loss=math.nan, first=step + 1)

    def _not_finite(self, step: int, what: str, *, loss: float, first: int) -> None:
        """`first` is the first step that was computed with what is not finite."""
        is_new, self.is_finite = self.is_finite, False
        self._heartbeat.non_finite_loss(step)
        if is_new:
            self._log.event("non_finite_loss", step=step, loss=str(loss), policy=self._policy)
        if self._policy == "Stop":
            raise LossNotFinite(f"the {what}")
        if self._policy == "Rollback":
            self._go_back(first, what)
        if is_new:
            self._log.print_line(
                f"the {what}. Training continues (nonFiniteLossPolicy: Warn): lower the learning rate, clip gradients, "
                "or check the data"
            )

    def _go_back(self, step: int, what: str) -> None:
        if self.rollbacks >= rollback.MOST:
            raise LossNotFinite(f"the {what}, after {self.rollbacks} rollbacks, each without the batches before it")
        if not self._asked_to_go_back(step):
            raise LossNotFinite(f"the {what}, and the volume does not take the request to go back")
        skipped = f"step {step}" if step == 1 else f"steps {step - 1} and {step}"
        which = f"rollback {self.rollbacks + 1} of {rollback.MOST}"
        raise RollBack(f"the {what}: the next attempt resumes from a snapshot before it and skips {skipped} ({which})")

    def _asked_to_go_back(self, step: int) -> bool:
        """On all ranks alike: whether the next attempt will know that it is to go back to before `step`."""
        fence, is_asked = self._fence(), False
        if fence is not None:
            with contextlib.suppress(OSError), storage_awaited():
                rollback.ask(fence, step=step)
                is_asked = True
        (is_asked_by_first,) = self._ranks.numbers_from_first(int(is_asked))
        return bool(is_asked_by_first)


def are_finite(modules: Iterable[nn.Module]) -> bool:
    """Whether all parameters that are trained are, of those that this rank holds. Waits for the device. Buffers and
    parameters that are not trained may be infinite, as the mask of an attention is.
    """
    trained = (each for module in modules for each in module.parameters() if each.requires_grad)
    parameters = {id(parameter): parameter.detach() for parameter in trained}
    held = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in parameters.values()]
    # integers always are, and 8-bit floats have no minimum
    checked = [tensor for tensor in held if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()]
    # one pass over the memory; the minimum is NaN where anything is
    extremes = [value.to(checked[0].device, torch.float64) for tensor in checked for value in tensor.aminmax()]
    return not extremes or bool(torch.stack(extremes).isfinite().all())
