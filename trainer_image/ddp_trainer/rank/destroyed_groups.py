"""A process group that a script has destroyed is kept in memory until it has destroyed some more.

DistributedDataParallel may be the last that refers to a group: where a function makes the model, destroys the group and
returns. The destructor of its reducer (in C++) then waits for gloo's threads without releasing the interpreter, and a
thread that has yet to release a collective of the last backward pass needs the interpreter for that, since torch 2.13:
the rank hangs after its work is done (https://github.com/pytorch/pytorch/issues/56297). A group that is still referred
to is not destructed. Each one has threads and connections, so that not all can be kept; a thread of one that was
destroyed some groups ago has had its turn.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from typing import Any, Final

from ddp_trainer.rank.after_import import after_import

GROUPS: Final = "torch.distributed.distributed_c10d"
KEPT: Final = 16
"""Calls of destroy_process_group whose groups are kept; a script destroys few in a row."""
_kept: deque[list[Any]] = deque(maxlen=KEPT)


def keep_destroyed_groups() -> None:
    """From now on; call it in a rank before its script."""
    after_import(GROUPS, _install)


def _install() -> None:
    groups = sys.modules[GROUPS]
    destroy = groups.destroy_process_group

    @functools.wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        _kept.append(list(groups._world.pg_map))
        destroy(group)

    # `torch.distributed` takes the name over when it is imported, which is done where torch was there before
    for name in (GROUPS, "torch.distributed"):
        if hasattr(sys.modules[name], destroy.__name__):
            setattr(sys.modules[name], destroy.__name__, keep_and_destroy)
