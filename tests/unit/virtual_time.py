"""An event loop whose clock jumps to the next timer instead of waiting: a test of an hour takes a millisecond."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Never sleeps: what the loop would have waited is added to its clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.now += timeout
        if not ready and timeout is None:
            raise RuntimeError("the test waits for something that will never happen")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
