"""Waiting for a condition. A test never waits for a time: a busy machine needs more of it, an idle one less."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS: Final = 300.0
"""For anything that takes a second on an idle machine. It ends a test that hangs, and says nothing about speed."""
CLUSTER_SECONDS: Final = 600.0
"""For pods on a cluster whose nodes share one machine: twenty times what a gang needs there to train, if it is idle."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two looks, which grow: many a look starts a process."""


class NeverHappened(AssertionError):
    """A condition did not become true in time."""


def eventually(
    look: Callable[[], T | None],
    what: str,
    seconds: float = PATIENCE_SECONDS,
    instead: Callable[[], Any] = lambda: "",
) -> T:
    """The first true value of `look`.

    Raises NeverHappened after `seconds`, with `what` was waited for and what `instead` returns.
    """
    deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise NeverHappened(f"not within {seconds:g} s: {what}\n{instead()}")
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
    return found


async def eventually_async(
    look: Callable[[], Awaitable[T | None]],
    what: str,
    seconds: float = PATIENCE_SECONDS,
    instead: Callable[[], Any] = lambda: "",
) -> T:
    """The same where asking takes an await."""
    deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
    while not (found := await look()):
        if time.monotonic() > deadline:
            raise NeverHappened(f"not within {seconds:g} s: {what}\n{instead()}")
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
    return found
