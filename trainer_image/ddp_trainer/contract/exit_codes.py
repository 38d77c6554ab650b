"""Exit codes, and the exceptions that carry them.

Exit codes are the contract with the operator (docs/contracts.md section 3). Inside a rank they are raised as
exceptions, so that `finally` blocks and context managers run; `ddp_trainer.rank.worker` turns them into the code
and into an outcome file. One that its own environment raises, before the script begins, is not turned into either: the
operator and the launcher set it, and the rank ends as Python does, with code 1.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
"""Retryable: any code that has no meaning of its own."""
EXIT_USER = 64
"""The user's or the configuration's error (sysexits.h EX_USAGE): trying again cannot help."""
EXIT_FENCED = 77
"""A newer attempt owns the volume (sysexits.h EX_NOPERM)."""
EXIT_PREEMPTED = 143
"""128 + SIGTERM: asked to leave, and left in order."""


class UserError(Exception):
    """A setting, argument or file of the user's is wrong; the message says which, why, and what to write."""

    exit_code: ClassVar[int] = EXIT_USER


class LossNotFinite(UserError):
    """The loss is NaN or infinite, and the job is to fail then; the message says at which step."""


class RollBack(Exception):
    """The loss is NaN or infinite, and the next attempt goes on from before; the message says at which step."""

    exit_code: ClassVar[int] = EXIT_FAILED


class LiveRecoveryFailed(Exception):
    """The ranks, which recover live, cannot go on without another attempt; the message says why."""

    exit_code: ClassVar[int] = EXIT_FAILED


class StoppedTooFew(LiveRecoveryFailed):
    """SIGTERM came while too few ranks were left to go on: all of them end, after an emergency snapshot."""

    exit_code: ClassVar[int] = EXIT_PREEMPTED


class FencedError(Exception):
    """A newer attempt holds the fencing token of the volume; this one must write nothing more."""

    exit_code: ClassVar[int] = EXIT_FENCED


class Left(BaseException):
    """SIGTERM came to this rank, and the others, which recover live, go on without it: no snapshot is needed.

    A BaseException for the reason of Preempted.
    """

    exit_code: ClassVar[int] = EXIT_PREEMPTED


class Preempted(BaseException):
    """SIGTERM came, all ranks agreed to stop, and the snapshot is saved.

    A BaseException, like KeyboardInterrupt, so that an `except Exception` around a training step neither
    swallows it nor takes it for a crash.
    """

    exit_code: ClassVar[int] = EXIT_PREEMPTED
