"""What the ranks exchange about snapshots: small tensors over gloo, never pickled objects.

Every method is a collective of all ranks in the same order; with one rank each is a plain function.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MESSAGE_BYTES = 1024
_PIECE = 256 << 20


@dataclass(frozen=True, slots=True)
class Gathering:
    """Tensors of all ranks on their way to rank 0."""

    _work: dist.Work | None
    _gathered: Tensor | None

    def wait(self, timeout: timedelta | None = None) -> Tensor | None:
        """Stacked [world size, n] on rank 0, once they are there; None on the others, once theirs is sent. Raises
        RuntimeError after `timeout`, or if a rank was lost on the way.
        """
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        return self._gathered


@dataclass(frozen=True, slots=True)
class Problems:
    """What all ranks have to complain of, on its way to every rank."""

    _work: dist.Work | None
    _everyone: Tensor

    def wait(self, timeout: timedelta | None = None) -> list[str | None]:
        """By rank; None where nothing. Raises RuntimeError after `timeout`, or if a rank was lost on the way."""
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        return [
            bytes(row[1:].numpy()).rstrip(b"\0").decode(errors="ignore") if bool(row[0]) else None
            for row in self._everyone
        ]


@dataclass(frozen=True, slots=True)
class ShardRanks:
    """The ranks that hold the shards of one copy of the model, where those of the job hold several. They are `size`,
    this is `rank`, and the copy that has the job's rank 0 is saved.
    """

    rank: int
    size: int
    new_group: Callable[[timedelta | None], dist.ProcessGroup]
    """A group of their own, with that timeout."""
    together: Callable[[], AbstractContextManager[None]]
    """Around collectives of all ranks, before one of these: where they fail on one of these, all raise."""


class Ranks:
    """The job's ranks, by a gloo group even where training uses NCCL: what they exchange is in host memory."""

    def __init__(self, rank: int, world_size: int, *, own_group: timedelta | None = None) -> None:
        """`own_group` asks for a group that nothing else uses, with that timeout, as a second thread needs."""
        self.rank = rank
        self.world_size = world_size
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            if not dist.is_initialized():
                raise RuntimeError("several ranks share a snapshot: call torch.distributed.init_process_group() first")
            if dist.get_world_size() != world_size or dist.get_rank() != rank:
                raise RuntimeError(
                    f"configured as rank {rank} of {world_size}, "
                    f"but torch.distributed says {dist.get_rank()} of {dist.get_world_size()}"
                )
            if own_group is not None:
                self.group = dist.new_group(backend="gloo", timeout=own_group)
            else:
                self.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    @classmethod
    def of_shards(cls, ranks: ShardRanks, timeout: timedelta | None = None) -> Ranks:
        """Those, by a group that nothing else uses."""
        own = cls(ranks.rank, 1)
        own.world_size, own.group = ranks.size, ranks.new_group(timeout)
        return own

    def regroup(self, rank: int, world_size: int) -> None:
        """The same in the process group that there is now."""
        self.rank, self.world_size = rank, world_size
        self.group = dist.group.WORLD if world_size > 1 else None

    def from_first(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's `value`, JSON, on every rank; the others pass None."""
        if self.group is None:
            assert value is not None
            return value
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device="cpu")
        dist.broadcast(size, group_src=0, group=self.group)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, group_src=0, group=self.group)
        received: dict[str, Any] = json.loads(bytes(data.numpy()))
        return received

    def numbers_from_first(self, *numbers: int) -> tuple[int, ...]:
        """Rank 0's whole numbers on every rank; the others pass as many of any."""
        values = torch.tensor(numbers, device="cpu")
        if self.group is not None:
            dist.broadcast(values, group_src=0, group=self.group)
        return tuple(values.tolist())

    def bytes_from_first(self, data: memoryview) -> None:
        """Fill `data`, of the same length everywhere, with rank 0's bytes."""
        if self.group is not None and data:
            for piece in torch.frombuffer(data, dtype=torch.uint8).split(_PIECE):  # type: ignore[no-untyped-call]
                dist.broadcast(piece, group_src=0, group=self.group)

    def begin_gather(self, tensor: Tensor) -> Gathering:
        """Send the 1-D tensors of all ranks to rank 0, without waiting. All have one length and type."""
        if self.group is None:
            return Gathering(None, tensor.unsqueeze(0))
        if self.rank != 0:
            return Gathering(dist.gather(tensor, group_dst=0, group=self.group, async_op=True), None)
        gathered = torch.empty(self.world_size, *tensor.shape, dtype=tensor.dtype, device="cpu")
        return Gathering(
            dist.gather(tensor, list(gathered.unbind()), group_dst=0, group=self.group, async_op=True), gathered
        )

    def problems(self, problem: str | None) -> list[str | None]:
        """What each rank has to complain of, by rank, on every rank; None where nothing."""
        return self.begin_problems(problem).wait()

    def begin_problems(self, problem: str | None) -> Problems:
        """The same without waiting for the other ranks."""
        text = (problem or "").encode()[:_MESSAGE_BYTES]
        mine = torch.zeros(1 + _MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        mine[0] = problem is not None
        mine[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else mine[1:1]
        everyone = torch.empty(self.world_size, mine.numel(), dtype=torch.uint8, device="cpu")
        if self.group is None:
            everyone[0] = mine
            return Problems(None, everyone)
        return Problems(dist.all_gather(list(everyone.unbind()), mine, group=self.group, async_op=True), everyone)

    def values(self, value: Any) -> list[Any]:
        """Each rank's `value`, JSON of any length, by rank, on every rank."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        dist.all_gather(list(sizes.split(1)), torch.tensor([mine.numel()], device="cpu"), group=self.group)  # type: ignore[no-untyped-call]
        everyone = torch.empty(self.world_size, int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded = torch.zeros(everyone.shape[1], dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        dist.all_gather(list(everyone.unbind()), padded, group=self.group)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(everyone, sizes.tolist(), strict=True)]
