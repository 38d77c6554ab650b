"""How long a step waits for torch's DataLoader.

    waits = DataWaits()
    _BaseDataLoaderIter.__next__ = waits.timed(_BaseDataLoaderIter.__next__)
    ...
    seconds = waits.of_step()   # once a step, on the thread that makes it

A step waits for what its own thread has fetched since the step before; with gradient accumulation, for all of it. Left
out are fetches without gradients, as in a validation under `torch.no_grad()`, those of other threads, and the end of an
epoch, which brings no batch. A DataLoader inside of another one is part of that one's time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

_attached: DataWaits | None = None


class _OfThread(threading.local):
    seconds: float | None = None
    """Since its last step; None before its first fetch."""


class DataWaits:
    """The waits of each thread since its last step, in seconds."""

    def __init__(self) -> None:
        self._own = _OfThread()

    def timed(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`fetch`, an iterator's `__next__`, with its time taken. torch has been imported."""
        from torch import is_grad_enabled

        own = self._own

        def timed_fetch(iterator: Any) -> Any:
            before, began = own.seconds, perf_counter()
            batch = fetch(iterator)
            if is_grad_enabled():
                own.seconds = (before or 0.0) + perf_counter() - began
            return batch

        return timed_fetch

    def begin(self) -> None:
        """What this thread does from here on is another run."""
        self._own.seconds = None

    def of_step(self) -> float | None:
        """What the step that this thread has made waited; None before it has fetched anything."""
        seconds = self._own.seconds
        if seconds is not None:
            self._own.seconds = 0.0
        return seconds

    def forget(self) -> None:
        """What this thread has fetched since its last step was for no step."""
        self.of_step()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What this thread fetches in the block is for no step."""
        before = self._own.seconds
        try:
            yield
        finally:
            self._own.seconds = before


def attached() -> DataWaits:
    """Those of a loop that reports itself. An earlier one of this process is over."""
    global _attached
    if _attached is None:
        _attached = DataWaits()
        with contextlib.suppress(ImportError, AttributeError):  # a release of torch without it still trains
            from torch.utils.data.dataloader import _BaseDataLoaderIter

            iterators: Any = _BaseDataLoaderIter
            iterators.__next__ = _attached.timed(iterators.__next__)
    _attached.begin()
    return _attached
