"""Commands that show a job for hours end when nobody reads them any more, as in `ddpjob logs -f train | grep -m1 loss`.

A run goes on then, and so does `ddpjob submit`: their exit codes are those of the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from ddpjob_operator.cli.output import is_unread
from ddpjob_operator.cli.parameters import SUCCEEDED

P = ParamSpec("P")

SECONDS_BETWEEN_LOOKS = 1.0


def while_read(show: Callable[P, Coroutine[Any, Any, int]]) -> Callable[P, Coroutine[Any, Any, int]]:
    """`show`, cancelled once the reader of standard output has gone away; the exit code is 0 then. The first line that
    cannot be written any more shows that.
    """

    @wraps(show)
    async def shown(*args: P.args, **options: P.kwargs) -> int:
        showing = asyncio.create_task(show(*args, **options))
        try:
            while not (await asyncio.wait((showing,), timeout=SECONDS_BETWEEN_LOOKS))[0]:
                if is_unread():
                    return SUCCEEDED
            return showing.result()
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    return shown
