"""Which samples each step of the built-in loop trains on (`client.batches`), as tensors on the device of a rank.

Where a run stands in its data is counted in samples of the whole run, never of a rank, so it means the same for any
number of ranks: what was trained on stays trained on when the world grows, shrinks or dies in the middle of an epoch.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from ddp_trainer.client.batches import BatchPlan, micro_batches
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.rank.world import World


@dataclass(slots=True)
class Cursor:
    """Where a run stands in its data: `samples` trained on in all, of which `offset` in this epoch. A
    Stateful of the snapshot.
    """

    plan: BatchPlan
    epoch: int = 0
    offset: int = 0

    @property
    def samples(self) -> int:
        return self.epoch * self.plan.samples_per_epoch + self.offset

    @property
    def steps(self) -> int:
        """Optimizer steps that led here."""
        return self.epoch * self.plan.steps_per_epoch + -(-self.offset // self.plan.global_batch)

    def advance(self, count: int) -> bool:
        """Count one global batch; True when it ended an epoch."""
        self.offset += count
        if self.offset < self.plan.samples_per_epoch:
            return False
        self.epoch, self.offset = self.epoch + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "samples": plan.samples,
            "global_batch": plan.global_batch,
            "seed": plan.seed,
            "keep_last": plan.keep_last,
            "shuffle": plan.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the snapshot stood. Raises UserError when this run orders its data in another way."""
        own = self.state_dict()
        state = {"shuffle": True, **state}  # which older images do not save
        flags = {
            "samples": "--task",
            "global_batch": "--global-batch",
            "seed": "--seed",
            "keep_last": "--last-batch",
            "shuffle": "--shuffle",
        }
        for key, name in flags.items():
            if state[key] != own[key]:
                what = {"samples": "trained on a data set of", "keep_last": "kept the last batch:"}.get(
                    key, f"had {name}"
                )
                raise UserError(
                    f"the snapshot's run {what} {state[key]}, this one has {own[key]} ({name}), so its "
                    "position in the data means nothing here: go on with the settings it had, or train under "
                    "another job name to start anew"
                )
        self.epoch, self.offset = state["epoch"], state["offset"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank takes through the model at once. `count` of its samples count; 0 for a rank that has no
    share left.
    """

    batch: Any
    count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's part of one optimizer step, of `total` samples on all ranks together."""

    micro_batches: tuple[MicroBatch, ...]
    total: int


_Step = tuple[list[tuple[Tensor, int]], int]
"""The samples of each micro-batch of a rank, with their count; the samples of the step on all ranks."""


def recut(batch: StepBatch, world_size: int, micro_batch: int) -> StepBatch:
    """The same step in smaller micro-batches, exactly as `micro_batches` would have cut them.

    Where those that there are cannot be joined, each is cut for itself. That may be more of them on one rank than on
    another, which is no matter to a strategy that can rehearse: it meets the other ranks in the last one only.
    """
    number = number_of_cuts(batch.total, world_size, micro_batch)
    if number <= len(batch.micro_batches):
        return batch
    taken = [part for part in batch.micro_batches if part.count]
    if not taken:
        return StepBatch(batch.micro_batches[:1] * number, batch.total)
    try:
        whole = MicroBatch(join([part.batch for part in taken]), sum(part.count for part in taken))
    except RuntimeError:  # a `collate` that pads has made each as long as its own longest sample
        pieces = [piece for part in taken for piece in _pieces(part, -(-part.count // micro_batch))]
    else:
        pieces = _pieces(whole, number)
    return StepBatch(tuple(pieces), batch.total)


def number_of_cuts(total: int, world_size: int, micro_batch: int) -> int:
    """In how many micro-batches each rank takes its share of a step, as the largest share asks for."""
    largest = -(-total // world_size)
    return -(-largest // micro_batch)


def _pieces(part: MicroBatch, number: int) -> list[MicroBatch]:
    cuts = torch.tensor_split(torch.arange(part.count, device="cpu"), number)
    return [
        MicroBatch(select(part.batch, slice(int(cut[0]), int(cut[-1]) + 1)), len(cut))
        if len(cut)
        else MicroBatch(select(part.batch, slice(0, 1)), 0)
        for cut in cuts
    ]


def select(batch: Any, samples: slice) -> Any:
    """Those samples of a batch."""
    return by_part(lambda part: part[samples], batch)


def join(batches: list[Any]) -> Any:
    """One batch of several of the same form."""

    def joined(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else [sample for part in parts for sample in part]

    return by_part(joined, *batches)


def by_part(make: Callable[..., Any], *batches: Any) -> Any:
    """A batch of the same form as `batches`, each part of it made of that part of each of them."""
    first = batches[0]
    if isinstance(first, tuple | list):
        parts = [by_part(make, *same) for same in zip(*batches, strict=True)]
        # a named tuple is built from its fields, which default_collate keeps
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, dict):
        return {key: by_part(make, *(batch[key] for batch in batches)) for key in first}
    return make(*batches)


class Loader:
    """Brings the samples of each step to the device, with or without processes that load ahead."""

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        world: World,
        *,
        micro_batch: int | None = None,
        collate: Any = None,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._world = world
        self._micro_batch = micro_batch
        self._limit: int | None = None
        self._collate = collate or default_collate
        self._processes = None
        if workers:
            from ddp_trainer.train.data_workers import WorkerPool

            self._processes = WorkerPool(
                dataset, seed=plan.seed, collate=self._collate, workers=workers, prefetch=prefetch, world=world
            )

    def take_at_most(self, limit: int | None) -> None:
        """From the next `epoch` on, no micro-batch has more samples."""
        self._limit = limit

    def epoch(self, epoch: int, offset: int = 0) -> Iterator[StepBatch]:
        """This rank's part of each step of an epoch, from its sample `offset` on."""
        micro_batch = min(filter(None, (self._micro_batch, self._limit)), default=None)
        steps = _steps(self._plan, self._world, micro_batch, epoch, offset)
        if self._processes is not None:
            yield from self._loaded_ahead(steps, epoch)
            return
        for cuts, total in steps:
            loaded = ((fetch(self._dataset, indices, self._collate), count) for indices, count in cuts)
            parts = (MicroBatch(to_device(batch, self._world.device), count) for batch, count in loaded)
            yield StepBatch(tuple(parts), total)

    def _loaded_ahead(self, steps: Iterator[_Step], epoch: int) -> Iterator[StepBatch]:
        assert self._processes is not None
        # an epoch may have millions of steps: only those that the workers load ahead are held at a time
        planned, requested = tee(steps)
        loaded = self._processes.load((epoch, indices) for cuts, _ in requested for indices, _ in cuts)
        for cuts, total in planned:
            parts = (MicroBatch(to_device(next(loaded), self._world.device), count) for _, count in cuts)
            yield StepBatch(tuple(parts), total)


def _steps(plan: BatchPlan, world: World, micro_batch: int | None, epoch: int, offset: int) -> Iterator[_Step]:
    """The steps of an epoch. No method of Loader: its workers ask for them, so the two would be a cycle
    (see `data_workers._Requests`).
    """
    rank, size = world.rank, world.size
    for batch in plan.batches(epoch, offset):
        yield micro_batches(batch, rank, size, micro_batch), len(batch)


@storage_awaited()
def fetch(dataset: Dataset[Any], indices: Tensor, collate: Any = default_collate) -> Any:
    """The batch of these samples. Data sets that are tensors and no more are indexed at once, not sample by sample."""
    if collate is default_collate and _is_tensors(dataset):
        return tuple(tensor[indices] for tensor in dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    samples = many(indices.tolist()) if many else [dataset[index] for index in indices.tolist()]
    return collate(samples)


class DataSetLost(Exception):
    """The data set has lost a connection of its own. No RuntimeError: those may say that a rank was lost."""

    def __init__(self, words: RuntimeError) -> None:
        super().__init__(
            "a connection was lost where samples are read, and no rank meets another there: catch in the data set what "
            f"a storage or a database may raise, and read again ({words})"
        )


def is_of_samples(error: BaseException) -> bool:
    """Whether it was raised where samples are read, by the data set or by what makes a batch of them."""
    own = inspect.unwrap(fetch).__code__
    return any(frame.f_code is own for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_tensors(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Whether its samples are those of its tensors: a class derived from TensorDataset may change them."""
    kind = type(dataset)
    return (
        isinstance(dataset, TensorDataset)
        and kind.__getitem__ is TensorDataset.__getitem__
        and not hasattr(kind, "__getitems__")
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; pinned ones are copied while the device computes."""

    def moved(part: Any) -> Any:
        return part.to(device, non_blocking=part.is_pinned()) if isinstance(part, Tensor) else part

    return batch if device.type == "cpu" else by_part(moved, batch)


def every_nth(samples: int, rank: int, world_size: int, batch: int) -> Iterator[Tensor]:
    """Batches that split 0..samples-1 among the ranks with no repeat: for validation, where a repeat would
    count twice.

    Every rank gets equally many batches, so that sharded models meet in each; some may be empty.
    """
    mine = range(rank, samples, world_size)
    largest = -(-samples // world_size)
    number = -(-largest // batch)
    size, larger = divmod(len(mine), number)
    start = 0
    for index in range(number):
        end = start + size + (index < larger)
        yield torch.arange(rank + start * world_size, rank + end * world_size, world_size, device="cpu")
        start = end
