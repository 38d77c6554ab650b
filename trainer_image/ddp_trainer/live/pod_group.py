"""The ranks of one pod among themselves, for what they hold together: process groups that live as long as the pod.

A group of torch ends with the default one, as that of a view does. These are made without it (torch 2.13).

What ranks of a pod hold together, such as the shards of a model, keeps them in step: where one of them leaves a view,
all do. So what may fail because another pod is lost is done `together`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FileStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from ddp_trainer.contract.outcomes import is_peer_lost

JOIN_TIMEOUT: Final = timedelta(seconds=600)
"""How long the ranks of a pod wait for each other at first."""


class ViewLost(RuntimeError):
    """A rank of this pod has lost a rank of another one, and all ranks of the pod know it."""


def all_of(completed: int, size: int) -> bool:
    """Whether the ranks of a pod go on in their view: all `size` of them have completed what they did in it."""
    return completed == size


def any_of(completed: int, size: int) -> bool:
    """The same after a collective that ends on one rank only if each had all that it needs before: one is enough."""
    return completed > 0


class PodGroup:
    """Rank `rank` of the `size` ranks of this pod. They meet at the file `meeting`, which is new with the pod. `leave`
    makes the collectives of the view fail, so that no other rank waits in them for this one.
    """

    def __init__(
        self, rank: int, size: int, meeting: Path, *, leave: Callable[[], None], timeout_seconds: float
    ) -> None:
        self.rank, self.size = rank, size
        self._leave = leave
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = FileStore(str(meeting), size)
        self._store.set_timeout(JOIN_TIMEOUT)
        self._groups: list[ProcessGroup] = []
        self.shards = self.new_group()
        """For the shards of the model."""
        self._agreement = self.new_group()
        self.mesh = DeviceMesh("cpu", torch.arange(size, device="cpu"), _init_backend=False, _rank=rank)
        self.mesh._dim_group_names = [self.shards.group_name]
        self.mesh._pg_registry[self.shards.group_name] = self.shards

    def new_group(self, timeout: timedelta | None = None) -> ProcessGroup:
        """One more, on all ranks alike."""
        name = GroupName(f"pod-{len(self._groups)}")
        store = PrefixStore(name, self._store)
        group = ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        gloo = ProcessGroupGloo(store, self.rank, self.size, timeout or self._timeout)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        group._set_group_name(name)
        group._set_group_desc(name)
        _register_process_group(name, group)
        self._groups.append(group)
        return group

    def known_in(self, first: int) -> None:
        """Let torch know these groups beside those of a view, in which this pod has the ranks from `first` on."""
        world = dist.distributed_c10d._world
        for group in self._groups:
            # not in `pg_names`: torch aborts those that are, with the default group
            world.pg_map[group] = ("gloo", self._store)
            world.pg_group_ranks[group] = {first + rank: rank for rank in range(self.size)}
            with suppress(RuntimeError):
                _unregister_process_group(group.group_name)
            _register_process_group(group.group_name, group)

    @contextmanager
    def together(self, agreed: Callable[[int, int], bool] = all_of) -> Iterator[None]:
        """Around collectives of a view, with no collective of this pod between them. Raises ViewLost on all ranks of
        the pod where some have lost another pod in it, unless they have `agreed` nevertheless; another error of one
        rank as it is.
        """
        lost: RuntimeError | None = None
        try:
            yield
        except ViewLost:
            raise
        except RuntimeError as error:
            if not is_peer_lost(error):
                raise
            lost = error
            self._leave()
        if not agreed(self._count(lost is None), self.size):
            raise ViewLost(str(lost or "Connection closed by peer, seen by another rank of this pod")) from lost

    def _count(self, flag: bool) -> int:
        """The ranks of this pod that have the flag. Raises RuntimeError where one has ended."""
        flags = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(flags, group=self._agreement)
        return int(flags)
