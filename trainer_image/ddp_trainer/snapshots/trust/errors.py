"""What can be wrong with a snapshot, by what is to be done about it."""

from __future__ import annotations

from ddp_trainer.contract.exit_codes import UserError


class SnapshotError(Exception):
    """A snapshot could not be written or read; the message says which, why, and what to do. Training may go on
    without it.
    """


class VolumeFullError(SnapshotError):
    """There is no room for a part of the snapshot: a save may make some, and try again."""


class CorruptSnapshotError(SnapshotError):
    """The files are not what their manifest says: never load it, use the one before."""


class IncompatibleSnapshotError(SnapshotError, UserError):
    """The snapshot is intact but does not fit this program: going on would silently train something else.

    Ends the job without a retry (exit code 64), since the next attempt would find the same.
    """
