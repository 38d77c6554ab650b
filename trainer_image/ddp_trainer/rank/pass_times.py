"""How long this rank's own forward and backward passes take, as DistributedDataParallel measures them.

Ranks meet in each gradient reduction, so the steps of all take as long as those of the slowest: times from step to step
do not show whose work is slow. DDP times its own passes in the first ten steps and in every hundredth, up to the last
gradient and not the wait for the other ranks, on a GPU with events of its stream. Here that is only read.

    passes = PassTimes(lambda: (module,))
    ...
    seconds = passes.after_step()   # in each step, on the thread that trains; None where DDP has measured nothing new
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIRST_STEPS: Final = 12
"""So many steps are asked about one by one: DDP measures its first ten iterations."""
STEPS_BETWEEN: Final = 50
"""Then it is asked so rarely: it measures each hundredth, and an answer takes a tenth of a millisecond."""


class PassTimes:
    """`modules` are those among which the DDP module is, if there is one; asked again each time, since it may change.

    With gradient accumulation it is the last micro-batch, in which ranks meet. What holds a collective itself is left
    out: of a model with buffers that DDP makes equal, the forward pass; with SyncBatchNorm, all of it.
    """

    def __init__(self, modules: Callable[[], Iterable[object]]) -> None:
        self._modules = modules
        self._steps = 0
        self._seen: tuple[int, int] | None = None
        self._judged: tuple[nn.Module | None, bool] = (None, False)

    def after_step(self) -> float | None:
        """Seconds of the passes that DDP measured since the last call, if any."""
        self._steps += 1
        if self._steps > FIRST_STEPS and self._steps % STEPS_BETWEEN:
            return None
        module = next(filter(None, map(_ddp, self._modules())), None)
        measured = getattr(module, "_get_ddp_logging_data", None)  # torch may change it
        if module is None or measured is None or self._has_collectives(module):
            return None
        found = measured()
        at = (id(module), found.get("iteration", 0))
        if at == self._seen:
            return None
        self._seen = at
        forward, backward = found.get("forward_compute_time", 0), found.get("backward_compute_time", 0)
        if min(forward, backward) <= 0:
            return None
        return float(backward if module.will_sync_module_buffers() else forward + backward) / 1e9

    def _has_collectives(self, module: nn.Module) -> bool:
        if self._judged[0] is not module:
            self._judged = module, any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        return self._judged[1]


def _ddp(value: object) -> Any:
    """The DDP module that it is; None if it is none. What is read of one has no types."""
    inner = getattr(value, "_orig_mod", value)  # of torch.compile
    return inner if isinstance(inner, DistributedDataParallel) else None
