"""What a thread of each member looks after while it trains: that the next member is alive, and that its own main thread
does not wait for a lost one.

No connection breaks where a process or a node stands still, so each member asks the one after it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from ddp_trainer.contract.standard_error import say
from ddp_trainer.live.connections import Stuck
from ddp_trainer.live.questions import Heard, ask
from ddp_trainer.live.views import SILENT_SECONDS, Member

WATCH_SECONDS: Final = 0.5
"""How often each member asks the one after it whether it is alive."""


def watch(
    next_member: Callable[[], tuple[int, Member] | None],
    waits_for_lost: Callable[[], bool],
    lost: Callable[[int, set[str]], None],
    stopped: threading.Event,
) -> None:
    """Until `stopped`. `next_member` has the number of the view, and the member to ask; None while there is none.
    `waits_for_lost`: whether a rank is lost, and its group not yet left. `lost` is called with the number of a view
    whose next member has ended, or is silent; in the second case also with its id.
    """
    silent: tuple[int, Member] | None = None  # the member that left the last question without an answer, and its view
    since = 0.0
    stuck = Stuck()
    while not stopped.wait(WATCH_SECONDS):
        if not waits_for_lost():
            stuck.reset()
        elif stuck.look():
            say("ddp_trainer: this rank waits for a lost one, and nothing wakes it: it ends")
            os.kill(os.getpid(), signal.SIGKILL)  # the others go on, and a new one joins
        if (watched := next_member()) is None:
            continue
        number, member = watched
        heard = ask(member, {"ask": "alive"})
        if heard is Heard.ENDED:
            lost(number, set())
        elif heard is Heard.ANSWER:
            silent = None
        elif silent != watched:
            silent, since = watched, time.monotonic()
        elif time.monotonic() - since >= SILENT_SECONDS:
            lost(number, {member.id})
