"""What a script writes with `torch.save` is whole where SIGTERM comes meanwhile: the signal waits for the end.

Many scripts write their checkpoint over the last one, in place. SIGTERM comes with each restart after a failure of
another rank, and with each preemption; by default it ends the process. The file would be cut short then, and no later
attempt could load it. A save that takes longer than the process is given is still cut: `shutdownSeconds` where the pod
is asked to stop, 10 s after a failure of another rank of the pod, and 2 s where the whole gang restarts.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from typing import Any, Final

from ddp_trainer.rank.after_import import after_import

SERIALIZATION: Final = "torch.serialization"


def finish_saves_before_sigterm() -> None:
    """From now on; call it in a rank before its script. Saves of other threads than the main one are as before: Python
    sets handlers of signals on that one only.
    """
    after_import(SERIALIZATION, _install)


def _install() -> None:
    save = sys.modules[SERIALIZATION].save

    @functools.wraps(save)
    def whole(*args: Any, **kwargs: Any) -> Any:
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or handler in (None, signal.SIG_IGN):
            return save(*args, **kwargs)
        came: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        try:
            return save(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, handler)
            for number in came[:1]:
                signal.raise_signal(number)

    # `torch` takes the name over while it is imported, which is done where torch was there before
    for name in (SERIALIZATION, "torch"):
        if hasattr(sys.modules[name], save.__name__):
            setattr(sys.modules[name], save.__name__, whole)
