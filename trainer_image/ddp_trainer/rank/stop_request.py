"""SIGTERM in a rank: recorded here, agreed on by all ranks (`step_reduce`), and reported by the exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

from ddp_trainer.contract import open_files
from ddp_trainer.contract.exit_codes import EXIT_PREEMPTED
from ddp_trainer.contract.standard_error import flush_streams

_preempted_after: int | None = None
_has_come = False


class StopRequest:
    """Whether SIGTERM has come to this rank. A second one changes nothing: the save that is under way
    finishes.
    """

    def __init__(self) -> None:
        self.raised = False

    def listen(self) -> None:
        """From now on SIGTERM is noted instead of ending the process. Before training begins there is nothing
        to save.
        """
        signal.signal(signal.SIGTERM, self._note)
        os.register_at_fork(after_in_child=self._leave_to_child)

    @property
    def listens(self) -> bool:
        """Whether SIGTERM still comes here: the script may have a handler of its own."""
        return signal.getsignal(signal.SIGTERM) == self._note

    def _note(self, signum: int, frame: FrameType | None) -> None:
        global _has_come
        self.raised = _has_come = True

    def _leave_to_child(self) -> None:
        """A process that the script forks, such as a daemon, is ended by SIGTERM, as it expects: it saves nothing."""
        if self.listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave_as_preempted(step: int) -> None:
    """The script is about to end by itself, but it was asked to after `step`: its exit code must not say that
    it is done.
    """
    global _preempted_after
    _preempted_after = step
    if "ddp_trainer.rank.worker" not in sys.modules:
        # under a launcher the worker asks preempted_after() instead
        atexit.register(_exit_preempted)


def preempted_after() -> int | None:
    """The step after which this process was asked to leave, if it was."""
    return _preempted_after


def is_asked_to_stop() -> bool:
    """Whether this process has noted SIGTERM, or agreed with others to stop. A script's own handler is not known."""
    return _has_come or _preempted_after is not None


def _exit_preempted() -> None:
    # An exit handler cannot change the exit code in any other way.
    open_files.write_out(is_last=True)
    flush_streams()
    os._exit(EXIT_PREEMPTED)
