"""An API server that has much to do, or does not answer for a while, as in an upgrade of the control plane: what
follows a job goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from ddpjob_operator.runtime.errors import NO_CONFIGURATION, ApiError

P = ParamSpec("P")
T = TypeVar("T")

SECONDS_WITHOUT_ANSWER = 300.0
SECONDS_BETWEEN_TRIES = 1.0
LONGEST_SECONDS_BETWEEN_LOOKS = 10.0
_TOO_MANY, _SERVER_ERROR = 429, 500


def seconds_to_next_look(took: float, least: float) -> float:
    """After a list of pods that took so many seconds. Those of a large job are many pages, some 10 MB of 1,000 pods: to
    ask for them takes a fifth of the time at most, as long as a list does not take several seconds itself.
    """
    return min(max(least, 4 * took), LONGEST_SECONDS_BETWEEN_LOOKS)


def is_passing(error: ApiError) -> bool:
    """Whether the same call may succeed later: a budget, a server that is busy, or one that does not answer. A login
    that has ended waits for a person.
    """
    if error.reason == NO_CONFIGURATION:
        return False
    return error.status in (0, _TOO_MANY) or error.status >= _SERVER_ERROR


class Patient:
    """Reads of one follower. The first one is tried once: a wrong context is to be said at once."""

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self._note = note
        self._was_answered = False
        self.took = 0.0
        """Seconds until the last answer, without the tries before it that failed."""

    async def read(self, ask: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """What `ask` returns, tried again for as long as an outage may last, which is noted once.

        Raises:
            ApiError: the server refused, or gave no answer for so long.
        """
        clock, since = asyncio.get_running_loop().time, None
        while True:
            asked = clock()
            try:
                answer = await ask(*args, **options)
            except ApiError as error:
                if not self._was_answered or not is_passing(error):
                    raise
                if since is None:
                    since = clock()
                    self._note(f"{error.message}; trying again")
                elif clock() - since >= SECONDS_WITHOUT_ANSWER:
                    raise
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)
            else:
                self._was_answered, self.took = True, clock() - asked
                return answer
