"""A script whose ranks are to recover live (`restart.scope: Live`) and that does not train with `attach_live`.

No torchrun knows all ranks then, so each process would train for itself: such a script is refused at its first process
group, its first optimizer step or its end, whatever comes first.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.after_import import after_import

NEEDED: Final = (
    "with restart.scope: Live, a script trains with run = ddp_trainer.attach_live(model, optimizer, global_batch=…) in "
    "place of init_process_group(), DistributedDataParallel and attach(), and takes its steps by run.train_step(batch, "
    "loss_of, update) (docs: Live recovery). For this script as it is, set restart.scope: InPlace"
)

_is_expected = False
_has_waited = False
_refusal: Any = None
"""The hook of torch, which `arrived` takes away."""


def expect() -> None:
    """Before the script of a rank that recovers live."""
    global _is_expected
    _is_expected = True
    after_import("torch.optim.optimizer", _refuse_steps)


def arrived() -> None:
    """The script has called `attach_live`."""
    global _is_expected
    _is_expected = False
    if _refusal is not None:
        _refusal.remove()


class WaitedForLost(Exception):
    """A rank was lost while the script waited for it by itself. No PeerLost: the other ranks go on without this one, so
    that its pod has to be replaced.
    """


def has_waited() -> None:
    """The script ends because a rank was lost, in a collective that is not the run's."""
    global _has_waited
    _has_waited = True


def explained(error: BaseException | None) -> BaseException | None:
    """What ends the script."""
    if not _has_waited or error is None:
        return error
    return WaitedForLost(
        "a connection was lost in loss_of(), in update() or between two steps, where the run cannot take a step again: "
        f"leave collectives out there, and catch what a storage or a database may raise ({error})"
    )


def missing() -> UserError | None:
    """What to say at the end of a script that has not."""
    return UserError(NEEDED) if _is_expected else None


def _refuse_steps() -> None:
    global _refusal
    if _is_expected:
        _refusal = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(_refuse)


def _refuse(*_: object) -> NoReturn:
    raise UserError(NEEDED)
