"""Processes that load samples ahead of a rank, on top of torch's DataLoader.

They live as long as the rank: an epoch starts none. They ignore SIGTERM until the rank itself ends, because
torchrun sends it to the whole process group and the last steps before a snapshot still need their samples.
And they draw random augmentations from the sample and the epoch alone, so that a resumed run loads what the
unbroken one did, whatever the number of workers or ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_trainer.client.batches import mixed_seed
from ddp_trainer.rank.world import World

Request = tuple[int, Tensor]
"""An epoch, and the samples of one micro-batch."""


class DataWorkerDied(RuntimeError):
    """A process that loads samples has ended; torch's own words name it and its signal."""

    def __init__(self, rank: int, words: RuntimeError) -> None:
        # what torch goes on to say is about machines of one's own
        what = str(words).split(". ")[0].rstrip(". ")
        # torch has a second way to say it, where it finds the process gone before the signal that tells of it
        what = re.sub(r"\(pid\(s\) (\d+)\)", r"(pid \1)", what)
        super().__init__(
            f"rank {rank} cannot load data: {what}. Most often it was killed for memory: raise the pod's memory "
            "limit or the size of /dev/shm, or lower --workers and --prefetch"
        )


class WorkerPool:
    """`load(requests)` gives the batch of each request, in order."""

    def __init__(
        self, dataset: Dataset[Any], *, seed: int, collate: Any, workers: int, prefetch: int, world: World
    ) -> None:
        self._requests = _Requests()
        self._world = world
        cuda = world.device.type == "cuda"
        # A fork of a process that has started CUDA cannot use it, and may hang in its locks.
        context = multiprocessing.get_context("forkserver" if cuda else "fork")
        if cuda:
            _start_forkserver()
        self._leaving = context.Value("b", False, lock=False)
        # Before the interpreter's own exit handler ends the workers by SIGTERM and waits for them.
        Finalize(self, _allow_exit, args=(self._leaving,), exitpriority=100)
        self._loader: DataLoader[Any] = DataLoader(
            _SeededSamples(dataset, seed, may_use_cuda=cuda),
            batch_sampler=self._requests,
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=True,
            pin_memory=cuda,
            worker_init_fn=partial(_start_worker, self._leaving),
            multiprocessing_context=context,
            # Without one of its own, starting an epoch would draw from the generator that dropout uses.
            generator=torch.Generator().manual_seed(seed),
        )

    def load(self, requests: Iterable[Request]) -> Iterator[Any]:
        """The batches of `requests`, which are taken as the workers come to them. Raises DataWorkerDied when a worker
        has.
        """
        self._requests.now = requests
        try:
            # waits for the workers of an earlier epoch
            batches = iter(self._loader)
            _explain_deaths(self._world.rank)
            yield from batches
        except DataWorkerDied:
            raise
        except RuntimeError as error:
            if not _is_death(error):
                raise
            raise DataWorkerDied(self._world.rank, error) from error


class _Requests:
    """The batch sampler of a DataLoader that outlives its epochs: what is asked for now.

    Neither it nor what is asked for knows the pool: in a cycle the garbage collector closes the workers' queues before
    torch, in `__del__`, can tell the workers to leave, and each of them is then waited for in vain for 5 s.
    """

    def __init__(self) -> None:
        self.now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch, indices in self.now:
            yield [(epoch, index) for index in indices.tolist()]


class _SeededSamples(Dataset[Any]):
    """A data set asked for (epoch, index), whose randomness is that of the run's seed, the epoch and the
    index.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, may_use_cuda: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._may_use_cuda = may_use_cuda

    def __getitem__(self, request: tuple[int, int]) -> Any:
        epoch, index = request
        seed = mixed_seed(self._seed, epoch, index)
        if self._may_use_cuda:  # also for the first time in this sample: the seed waits for that
            torch.manual_seed(seed)
        else:
            # the same for the CPU: it would also note the seed, with this stack, for each kind of device that may start
            torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return self._dataset[index]


def _is_death(error: RuntimeError) -> bool:
    """Not an exception that a data set raised in a worker, which torch passes on in other words."""
    return str(error).startswith("DataLoader worker (pid")


def _explain_deaths(rank: int) -> None:
    """Make torch's SIGCHLD handler say what to do.

    It raises in the middle of whatever the rank is at, mostly far from the loader. torch installs it with the first
    workers of a process; for any later loader this does nothing.
    """
    torch_handler = signal.getsignal(signal.SIGCHLD)
    if not callable(torch_handler) or isinstance(torch_handler, _Explained):
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _Explained(torch_handler, rank))


class _Explained:
    """A SIGCHLD handler around torch's."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any], rank: int) -> None:
        self._handler = handler
        self._rank = rank

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            self._handler(signum, frame)
        except RuntimeError as error:
            if not _is_death(error):
                raise
            raise DataWorkerDied(self._rank, error) from error


def _start_forkserver() -> None:
    """Start it with SIGTERM blocked, which it and its workers inherit: it would die of torchrun's, and take the workers
    for dead with it. Blocked, not ignored, so that this process still gets one that comes meanwhile.
    """
    # the forkserver would start it, and that ends with SIGTERM unblocked
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(leaving: Any, worker: int) -> None:
    def on_sigterm(signum: int, frame: object) -> None:
        if leaving.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _allow_exit(leaving: Any) -> None:
    leaving.value = True
