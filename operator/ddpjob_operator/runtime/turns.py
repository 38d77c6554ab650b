"""One thing in each turn of the event loop."""

from __future__ import annotations

import asyncio


class OneATurn:
    """Lets those who wait go on one after the other, at most one in each turn of the event loop.

    In a turn everything runs that is ready. With many passes, calls or questions that begin in the same one, a timer or
    a probe waits for the sum of their processor times.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return in a turn in which nobody else does."""
        async with self._turn:
            await asyncio.sleep(0)
