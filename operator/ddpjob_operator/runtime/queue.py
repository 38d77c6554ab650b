"""A queue of keys to look at: one worker a key, many keys side by side, failures again after growing waits.

A key that is added while it waits is not added twice; one that is added while a worker has it is looked at once more
afterwards. So any number of events costs at most two passes, and a pass always starts after the event that asked for
it (level-triggered). Times are the event loop's own, which is monotonic: a clock that is set does not disturb a
backoff.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ddpjob_operator import metrics
from ddpjob_operator.runtime.shares import GOES_ON, Shares
from ddpjob_operator.runtime.turns import OneATurn

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts at a key that fails: `first` doubles up to `longest`, each between half and the whole of
    that."""

    first: float = 0.25
    longest: float = 60.0

    def seconds(self, failures: int, spread: float) -> float:
        """The wait after so many failures in a row (from 1); `spread` from 0 to 1 picks within the jitter."""
        whole = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * spread)


NOBODY = object()


@dataclass(slots=True)
class _Delayed:
    at: float
    handle: asyncio.TimerHandle


@dataclass(eq=False, slots=True)
class _Pass:
    alive: float
    """When it last gave a sign of life."""

    def goes_on(self) -> None:
        self.alive = asyncio.get_running_loop().time()


@dataclass(eq=False)
class WorkQueue(Generic[K]):
    """Keys wait here from the first `add`; they are looked at once `start` is called."""

    workers: int = 16
    backoff: Backoff = field(default_factory=Backoff)
    share: Callable[[K], Hashable] = lambda key: None
    """Whose a key is: workers are shared fairly (`runtime.shares`)."""
    _ready: OrderedDict[Hashable, deque[K]] = field(default_factory=OrderedDict)
    _shares: Shares = field(init=False)
    _queued: set[K] = field(default_factory=set)
    _running: dict[K, _Pass] = field(default_factory=dict)
    _again: set[K] = field(default_factory=set)
    _delayed: dict[K, _Delayed] = field(default_factory=dict)
    _failures: dict[K, int] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _turns: OneATurn = field(default_factory=OneATurn)
    """Many passes need no call, and would run in the turn in which they begin."""
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._shares = Shares(self.workers)

    def start(self, look: Callable[[K], Awaitable[float | None]]) -> None:
        """Start the workers in the running loop.

        They await `look` with a key, which returns seconds after which to look again, or None. Whatever it raises is
        retried after a backoff, but no later than in `look_within` seconds if the error says so.
        """
        self._tasks = [asyncio.create_task(self._work(look), name=f"worker {n}") for n in range(self.workers)]

    async def stop(self, within: float) -> None:
        """Let passes that have begun finish, for at most so many seconds, then cancel them. Nothing new begins."""
        self._stopping = True
        for delayed in self._delayed.values():
            delayed.handle.cancel()
        self._delayed.clear()
        self._news.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, key: K, after: float = 0.0) -> None:
        """Look at `key` now, or after so many seconds unless something asks for it sooner."""
        if self._stopping:
            return
        if after > 0:
            self._add_later(key, after)
            return
        self._cancel_timer(key)
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.setdefault(self.share(key), deque()).append(key)
            self._news.set()

    def add_all(self, keys: Iterable[K]) -> None:
        """Look at each of `keys` now."""
        for key in keys:
            self.add(key)

    def add_unless_backing_off(self, key: K) -> None:
        """Look at `key` now, unless it failed last: what comes every other second must not undo a backoff."""
        if key not in self._failures or key not in self._delayed:
            self.add(key)

    def _add_later(self, key: K, after: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + after
        if (pending := self._delayed.get(key)) is not None and pending.at <= at:
            return
        self._cancel_timer(key)
        self._delayed[key] = _Delayed(at, loop.call_at(at, self._due, key))

    def _due(self, key: K) -> None:
        self._delayed.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: K) -> None:
        if (pending := self._delayed.pop(key, None)) is not None:
            pending.handle.cancel()

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._queued)

    def longest_pass(self) -> float:
        """Seconds that the longest pass in progress has taken so far, since its last sign of life."""
        if not self._running:
            return 0.0
        return asyncio.get_running_loop().time() - min(each.alive for each in self._running.values())

    def sign_of_life(self, key: K) -> None:
        """The pass over `key` goes on: something that it waited for is there, or is nearer."""
        if key in self._running:
            self._running[key].goes_on()

    def dead_workers(self) -> int:
        """Workers that have ended although the queue was not stopped."""
        return 0 if self._stopping else sum(task.done() for task in self._tasks)

    async def _work(self, look: Callable[[K], Awaitable[float | None]]) -> None:
        while True:
            await self._turns.wait()
            if self._stopping:
                return
            whose = next(filter(self._shares.may_take, self._ready), NOBODY)
            if whose is NOBODY:
                self._news.clear()
                await self._news.wait()
                continue
            key = self._take_from(whose)
            try:
                await self._pass(key, look)
            finally:
                self._shares.give_back(whose)
                self._news.set()  # a share that had enough may go on

    def _take_from(self, whose: Hashable) -> K:
        """The next key of a share, which comes last then."""
        key = self._ready[whose].popleft()
        if self._ready[whose]:
            self._ready.move_to_end(whose)
        else:
            del self._ready[whose]
        self._queued.discard(key)
        self._shares.take(whose)
        return key

    async def _pass(self, key: K, look: Callable[[K], Awaitable[float | None]]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        this = self._running[key] = _Pass(began)
        GOES_ON.set(this.goes_on)  # the next pass of this worker sets its own
        try:
            after = await look(key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            after = self.backoff.seconds(failures, random.random())  # noqa: S311 - jitter, not a secret
            after = min(after, getattr(error, "look_within", None) or after)
            metrics.RECONCILE_ERRORS.inc()
            logger.warning("%s: %s; looking again in %.1f s", key, error or type(error).__name__, after,
                           exc_info=not getattr(error, "expected", False))  # fmt: skip
        else:
            self._failures.pop(key, None)
        finally:
            del self._running[key]
            metrics.RECONCILE_SECONDS.observe(loop.time() - began)
        if key in self._again:
            self._again.discard(key)
            # an event that came meanwhile must not shorten the wait after a failure, or a storm of events becomes a
            # storm of retries
            self.add(key, after if key in self._failures and after else 0.0)
            if key in self._failures:
                return
        if after is not None:
            self.add(key, after)
