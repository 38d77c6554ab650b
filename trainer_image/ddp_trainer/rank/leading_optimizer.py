"""Which calls of `step()` are the steps of a training.

    lead = Lead()
    lead.is_rest_of_step(optimizer, passes)         # at each call: whether it belongs to a step that is counted
    lead.optimizer() is optimizer                   # its calls are the steps
    lead.goes_to(optimizer, step=step, led=led)     # else: whether the lead goes to it with this one

A script may have several optimizers, as a GAN has, or one for each parameter: steps are those of the one that has made
most, which leads. An optimizer may also be called for some of its parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from torch.optim import Optimizer

LAPSED_STEPS: Final = 64
"""Of one optimizer, without one of the leader between them: more than any that take turns, as those of a GAN."""

_NO_PART: Final[tuple[int, set[int]]] = -1, set()


class Lead:
    """The optimizer that leads, and what is known of the others. None is kept alive by it."""

    def __init__(self) -> None:
        self.optimizer: Callable[[], Optimizer | None] = _nobody
        """The one that has made most steps, as a weak reference."""
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Steps of the others."""
        self._alone: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        """Of the others: after which step of the leader they have stepped, and how often since."""
        self._parts: WeakKeyDictionary[Optimizer, tuple[int, set[int]]] = WeakKeyDictionary()
        """Of each optimizer: after how many backward passes it has begun its last step, and for which parameters: the
        first one of each group.
        """

    def begins(self) -> None:
        """Another training begins, with the optimizer that leads in it."""
        self.optimizer = _nobody
        self._steps.clear()
        self._alone.clear()

    def is_rest_of_step(self, optimizer: Optimizer, passes: int) -> bool:
        """Whether this call is for parameters that its last step was not yet for, with no backward pass since: ZeRO, as
        DeepSpeed has it, calls `step()` for each group of parameters, or each part of one, with the others taken out.
        `passes` are all backward passes so far.
        """
        groups = {id(group["params"][0]) for group in optimizer.param_groups if group["params"]}
        at, done = self._parts.get(optimizer, _NO_PART)
        if at == passes and groups and done.isdisjoint(groups):
            done |= groups
            return True
        self._parts[optimizer] = passes, groups
        return False

    def goes_to(self, optimizer: Optimizer, *, step: int, led: int) -> Literal["kept", "taken", "lapsed"]:
        """What becomes of the lead with this step of an optimizer that does not have it. "taken": it leads now, since
        it has made more steps, or the leader is gone. "lapsed": it leads now, since the leader has made no step for
        long, as where a script trains one model after another. "kept": it does not lead.
        `step` is the number of steps so far, `led` how many the leader has made.
        """
        leader, steps = self.optimizer(), self._steps.get(optimizer, 0) + 1
        at, alone = self._alone.get(optimizer, (step, 0))
        alone = alone + 1 if at == step else 1
        lapsed = alone > LAPSED_STEPS
        if leader is not None and steps <= led and not lapsed:
            self._steps[optimizer], self._alone[optimizer] = steps, (step, alone)
            return "kept"
        if leader is not None:
            self._steps[leader] = led
        self.optimizer = ref(optimizer)
        return "lapsed" if lapsed else "taken"


def _nobody() -> None:
    """The optimizer that leads before any has made a step."""
