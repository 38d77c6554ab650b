"""Answers that are shared for a moment: ten windows that are open cost the API server as much as one."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_QUESTIONS = 200


class Answers:
    """The last answer of each question, for those who ask again soon, and one call for those who ask at once.

    An answer that took long is kept for longer, so that asking takes at most a tenth of the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._found: OrderedDict[Hashable, tuple[float, asyncio.Task[Any]]] = OrderedDict()

    async def get(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns, or has returned shortly before. What it raises is not kept."""
        until, task = self._found.get(question, (0.0, None))
        now = self._clock()
        if task is None or (task.done() and (now >= until or _has_failed(task))):
            # an answer may be some MiB of log lines, and nobody gets it any more
            for old in [each for each, (end, kept) in self._found.items() if kept.done() and now >= end]:
                del self._found[old]
            task = asyncio.ensure_future(self._ask(question, ask))
            self._found[question] = (0.0, task)
            self._found.move_to_end(question)
            while len(self._found) > _MOST_QUESTIONS:
                self._found.popitem(last=False)
        # a window that is closed does not end the call for the others
        answer: T = await asyncio.shield(task)
        return answer

    async def _ask(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        began = self._clock()
        answer = await ask()
        now = self._clock()
        if question in self._found:
            self._found[question] = (now + max(self._seconds, 10 * (now - began)), self._found[question][1])
        return answer


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
