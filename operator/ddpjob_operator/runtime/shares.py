"""Places that are shared fairly: calls in flight among namespaces, passes in progress among the owners of jobs.

First come, first served lets one tenant take every place: 1,024 creates behind a webhook that answers after 10 s held
up everybody's status writes for minutes. With a dynamic threshold (Choudhury and Hahne, 1998) nobody holds more than
`MOST` times what is free. One tenant alone gets three quarters of the places, several get equal parts, and one that
holds none finds a free place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar

MOST = 3

GOES_ON: ContextVar[Callable[[], None]] = ContextVar("GOES_ON", default=lambda: None)
"""Called for what waits for a place whenever one becomes free: a long line that moves is no standstill."""


class Shares:
    """Who holds how many of a number of places."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: Counter[Hashable] = Counter()

    @property
    def free(self) -> int:
        return self._places - self._held.total()

    def may_take(self, who: Hashable) -> bool:
        return self._held[who] < MOST * self.free

    def take(self, who: Hashable) -> None:
        self._held[who] += 1

    def give_back(self, who: Hashable) -> None:
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]


class FairSemaphore:
    """Of those who wait, each in turn gets the next place that it may take."""

    def __init__(self, places: int) -> None:
        self._shares = Shares(places)
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._in_line: Counter[Callable[[], None]] = Counter()
        """Whom to call (`GOES_ON`), with the number of its places that it waits for."""

    @asynccontextmanager
    async def place(self, who: Hashable) -> AsyncIterator[None]:
        """Hold a place until the end of the block."""
        await self._acquire(who)
        try:
            yield
        finally:
            self._release(who)

    async def _acquire(self, who: Hashable) -> None:
        if who not in self._waiting and self._shares.may_take(who):
            self._shares.take(who)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        goes_on = GOES_ON.get()
        self._in_line[goes_on] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(who)
            else:
                self._leave(who, turn)
            raise
        finally:
            self._in_line[goes_on] -= 1
            if not self._in_line[goes_on]:
                del self._in_line[goes_on]

    def _release(self, who: Hashable) -> None:
        self._shares.give_back(who)
        for goes_on in self._in_line:
            goes_on()
        while (following := next((other for other in self._waiting if self._shares.may_take(other)), None)) is not None:
            turn = self._waiting[following][0]
            self._leave(following, turn)
            if turn.cancelled():  # its task is, and has not run since
                continue
            if following in self._waiting:
                self._waiting.move_to_end(following)
            self._shares.take(following)
            turn.set_result(None)

    def _leave(self, who: Hashable, turn: asyncio.Future[None]) -> None:
        """Not to wait any more, if it does."""
        turns = self._waiting.get(who, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[who]
