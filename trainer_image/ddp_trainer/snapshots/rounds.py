"""What rank 0 alone reads may take longer than a collective may: the ranks meet in rounds meanwhile."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.snapshots.ranks import Ranks

T = TypeVar("T")

ROUND_SECONDS: Final = 10.0
"""How long the other ranks wait for rank 0 in one collective, whose timeout may be shorter than what rank 0 does."""


class Reading(Generic[T]):
    """On rank 0: `read` on a thread of its own. It calls what it is given as often as it has read something."""

    def __init__(self, read: Callable[[Callable[[], None]], T]) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._went_on = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        threading.Thread(target=self._run, args=(read,), name="reading", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over, after that many seconds at most."""
        with storage_awaited():
            concurrent.futures.wait([self._future], seconds)
        return self._future.done()

    def went_on(self) -> bool:
        """Whether something was read since this was asked last."""
        went_on = self._went_on.is_set()
        self._went_on.clear()
        return went_on

    def result(self) -> T:
        """Of a reading that is over: what `read` has returned. Raises what it has raised."""
        return self._future.result()

    def _run(self, read: Callable[[Callable[[], None]], T]) -> None:
        try:
            self._future.set_result(read(self._went_on.set))
        except BaseException as error:
            self._future.set_exception(error)


def meet(ranks: Ranks, reading: Reading[T] | None, beat: Callable[[], None] = lambda: None) -> None:
    """On all ranks: return once rank 0's `reading` is over, or there is none. The others have none.

    All ranks `beat` after a round in which something was read. Raises RuntimeError where a rank is lost; rank 0 once
    its reading is over.
    """
    is_over = False
    while not is_over:
        over = reading is None or reading.wait(ROUND_SECONDS)
        went_on = reading is not None and reading.went_on()
        try:
            numbers = ranks.numbers_from_first(int(over), int(went_on))
        except RuntimeError:
            if reading is not None:
                reading.wait(None)
            raise
        is_over = bool(numbers[0])
        if numbers[1]:
            beat()
